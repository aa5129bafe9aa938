// NUMA nodes, simulated: machines with several are rare.
#include "cpu/topology.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "cpu/parallel.h"

namespace halfbyte {
namespace {

// What the system says of its nodes, in files.
class Nodes : public ::testing::Test {
 protected:
  Nodes() {
    if (::mkdtemp(root_.data()) == nullptr) throw std::runtime_error("mkdtemp " + root_);
  }
  ~Nodes() override { std::filesystem::remove_all(root_); }
  void add(const std::string& name, const std::string& cpulist) {
    std::filesystem::create_directories(root_ + "/" + name);
    std::ofstream(root_ + "/" + name + "/cpulist") << cpulist << '\n';
  }
  void set_online(const std::string& nodes) { std::ofstream(root_ + "/online") << nodes << '\n'; }
  Topology read(int num_cpus) const {
    std::vector<int> cpus(static_cast<size_t>(num_cpus));
    std::iota(cpus.begin(), cpus.end(), 0);
    return Topology::read(root_, cpus);
  }
  std::string root_ = ::testing::TempDir() + "halfbyte-nodes-XXXXXX";
};

TEST_F(Nodes, AreThoseOfTheUsableCpus) {
  add("node0", "0-2,6-7");
  add("node1", "");  // memory alone
  add("node10", "3,5");
  add("node2", "4,8-11");
  set_online("0-2,10");
  const Topology all = read(12);
  EXPECT_EQ(all.num_cpus, (std::vector{5, 5, 2}));
  EXPECT_EQ(all.node_of_cpu, (std::vector{0, 0, 0, 2, 1, 2, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(read(4).num_cpus, (std::vector{3, 1}));  // of node0 and node10
  EXPECT_EQ(read(3).num_cpus, std::vector{3});
  set_online("0,2");
  EXPECT_EQ(read(12).num_cpus, (std::vector{5, 5}));
}

TEST_F(Nodes, AreOneWhereTheSystemSaysNothingOfUse) {
  EXPECT_EQ(read(5).num_cpus, std::vector{5});  // nothing
  EXPECT_EQ(Topology::read(root_ + "/none", std::array{0, 1}).num_cpus, std::vector{2});
  EXPECT_EQ(read(0).num_cpus, std::vector{1});
  add("node0", "nonsense");
  add("node1", "7-99999999999");
  set_online("0-3");
  EXPECT_EQ(read(5).num_cpus, std::vector{5});
  set_online("nonsense");
  add("node2", "0-1");
  EXPECT_EQ(read(5).num_cpus, std::vector{5});
}

TEST_F(Nodes, AreThoseOfThisMachine) {
  const Topology& here = topology();
  EXPECT_GT(std::accumulate(here.num_cpus.begin(), here.num_cpus.end(), 0), 0);
  EXPECT_GE(here.node(), 0);
  EXPECT_LT(here.node(), std::ssize(here.num_cpus));
}

// Two nodes of two CPUs each. A thread asks once in each call of parallel_for, and hears what `cpus` says.
class TwoNodes : public ::testing::Test {
 protected:
  explicit TwoNodes() { set_topology(&machine_); }
  ~TwoNodes() override { set_topology(nullptr); }

  void place(std::array<int, 4> cpus) {
    places_ = cpus;
    asked_ = 0;
  }
  static int node() { return place_ / 2; }  // of this thread

 private:
  static int cpu() { return place_ = places_[static_cast<size_t>(asked_++) % 4]; }

  static inline std::array<int, 4> places_{};
  static inline std::atomic<int> asked_ = 0;
  static inline thread_local int place_ = 0;
  const Topology machine_{{2, 2}, {0, 0, 1, 1}, cpu};
};

// Waits until `done`. False where that takes longer than anything should.
template <class Done>
bool wait_for(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// Fewer threads than nodes, nodes of any size, and threads that come from any of them.
TEST(UnevenNodes, ItemsAreDoneOnceByExclusiveWorkers) {
  static std::atomic<int> asked;
  for (const std::vector<int>& num_cpus : {std::vector{1, 7, 2}, {64, 64}, {1, 1, 1, 1, 1}, {3, 1000}}) {
    Topology machine{num_cpus, {}, [] { return asked++ * 7 % 16; }};
    for (int i = 0; i < 16; ++i) machine.node_of_cpu.push_back(i % static_cast<int>(num_cpus.size()));
    set_topology(&machine);
    for (const int threads : {2, 3, 5, 16})
      for (const int64_t n : {1, 2, 3, 7, 300}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(n)), busy(static_cast<size_t>(threads));
        parallel_for(n, 1, threads, [&](int64_t begin, int64_t, int worker) {
          EXPECT_EQ(busy[static_cast<size_t>(worker)]++, 0);
          ++seen[static_cast<size_t>(begin)];
          --busy[static_cast<size_t>(worker)];
        });
        for (const std::atomic<int>& count : seen) EXPECT_EQ(count, 1) << threads << " " << n;
      }
    set_topology(nullptr);
  }
}

// Whatever thread comes when, a node has the same half of the work in every call.
TEST_F(TwoNodes, EachHasTheSamePartInEveryCall) {
  for (const std::array<int, 4>& cpus : {std::array{0, 1, 2, 3}, {2, 0, 3, 1}, {3, 2, 1, 0}, {1, 3, 3, 0}}) {
    place(cpus);
    std::atomic<int> begun = 0;
    std::array<int, 4> node_of{};
    parallel_for(4, 1, 4, [&](int64_t begin, int64_t, int worker) {
      EXPECT_EQ(worker, begin);
      node_of[static_cast<size_t>(begin)] = node();
      ++begun;
      EXPECT_TRUE(wait_for([&] { return begun == 4; }));  // none steals
    });
    EXPECT_EQ(node_of, (std::array{0, 0, 1, 1}));
  }
}

// Threads of one node alone do the work of both.
TEST_F(TwoNodes, ThreadsBeyondANodesWorkersHelpTheOther) {
  place({2, 3, 2, 2});
  std::atomic<int> begun = 0;
  std::array<std::atomic<int>, 4> seen{};
  parallel_for(4, 1, 4, [&](int64_t begin, int64_t, int worker) {
    ++seen[static_cast<size_t>(worker)];
    EXPECT_EQ(worker, begin);
    ++begun;
    EXPECT_TRUE(wait_for([&] { return begun == 4; }));
  });
  for (const std::atomic<int>& count : seen) EXPECT_EQ(count, 1);
}

TEST_F(TwoNodes, WorkIsStolenFromTheSameNodeFirst) {
  for (const int64_t thief : {0, 1, 2, 3}) {
    place({0, 1, 2, 3});
    std::atomic<int> waiting = 0, stolen = 0;
    std::array<std::atomic<int64_t>, 16> order{};
    parallel_for(80, 1, 4, [&](int64_t begin, int64_t, int worker) {
      if (worker != thief) {
        if (stolen < 15) ++waiting;
        EXPECT_TRUE(wait_for([&] { return stolen == 15; }));
      } else {
        EXPECT_TRUE(wait_for([&] { return waiting == 3 || stolen == 15; }));
        if (begin / 20 != thief && stolen < 15) order[static_cast<size_t>(stolen++)] = begin;
      }
    });
    // Its neighbour waits in one of its twenty items; fifteen of the others can be stolen.
    for (int i = 0; i < 15; ++i)
      EXPECT_EQ(order[static_cast<size_t>(i)] / 20, thief ^ 1) << thief << " " << i;
  }
}

}  // namespace
}  // namespace halfbyte
