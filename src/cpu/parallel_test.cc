#include "cpu/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace halfbyte {
namespace {

TEST(Parallel, CoversEveryItemOnceInRangesOfAtMostTheGrain) {
  for (const int threads : {0, 1, 2, 3, 16})
    for (const int64_t n : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
      parallel_for(n, 8, threads, [&](int64_t begin, int64_t end, int worker) {
        EXPECT_LE(end - begin, 8);
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, effective_threads(threads));
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& count) { return count == 1; }));
    }
}

// A worker number is never used by two threads at a time, and as many threads run as were asked for, more
// than the machine has included.
TEST(Parallel, WorkersAreExclusiveAndAsManyAsAskedFor) {
  constexpr int kThreads = 8;
  std::vector<std::atomic<int>> busy(kThreads);
  std::atomic<int> running = 0, most = 0;
  // Where others compute, threads may come late.
  for (int round = 0; round < 20 && most <= 2; ++round)
    parallel_for(64, 1, kThreads, [&](int64_t, int64_t, int worker) {
      EXPECT_EQ(busy[static_cast<size_t>(worker)]++, 0);
      const int now = ++running;
      int seen = most;
      while (now > seen && !most.compare_exchange_weak(seen, now)) {
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      --running;
      --busy[static_cast<size_t>(worker)];
    });
  EXPECT_GT(most, 2);
}

// A call in a body of another: its workers are exclusive, too, and the outer ones go on.
TEST(Parallel, CallsMayBeNested) {
  std::vector<std::atomic<int>> busy(3);
  std::atomic<int> sum = 0;
  for (int round = 0; round < 20; ++round)
    parallel_for(12, 1, 3, [&](int64_t, int64_t, int worker) {
      EXPECT_EQ(busy[static_cast<size_t>(worker)]++, 0);
      std::vector<std::atomic<int>> inner(3);
      parallel_for(8, 1, 3, [&](int64_t, int64_t, int inner_worker) {
        EXPECT_EQ(inner[static_cast<size_t>(inner_worker)]++, 0);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        ++sum;
        --inner[static_cast<size_t>(inner_worker)];
      });
      --busy[static_cast<size_t>(worker)];
    });
  EXPECT_EQ(sum, 20 * 12 * 8);
}

TEST(Parallel, LittleWorkIsForOneThreadUnlessThreadsAreAskedFor) {
  EXPECT_EQ(threads_for(0, 1000), 1);
  EXPECT_EQ(threads_for(0, 1e9), 0);
  for (const int threads : {1, 3}) {
    EXPECT_EQ(threads_for(threads, 1000), threads);
    EXPECT_EQ(threads_for(threads, 1e9), threads);
  }
}

TEST(Parallel, AnExceptionIsRethrown) {
  for (const int threads : {1, 2, 4})
    EXPECT_THROW(parallel_for(100, 1, threads,
                              [](int64_t begin, int64_t, int) {
                                if (begin == 50) throw std::runtime_error("stop");
                              }),
                 std::runtime_error);
}

#ifndef __SANITIZE_THREAD__  // its runtime allows no threads in a child

// A child of fork() has no workers, and locks of theirs may be held. Others compute meanwhile.
TEST(Parallel, ComputesInAChildOfFork) {
  const auto sums = [](int threads) {
    std::atomic<int64_t> sum = 0;
    parallel_for(1000, 1, threads, [&](int64_t begin, int64_t, int) { sum += begin; });
    return sum == 499500;
  };
  EXPECT_TRUE(sums(4));
  std::atomic<bool> done = false;
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&] {
      while (!done) EXPECT_TRUE(sums(4));
    });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);
      ::_exit(sums(4) && sums(3) ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  done = true;
  for (std::thread& other : others) other.join();
}

// The rest are of processes of their own, which have used no threads before.
class ParallelDeathTest : public testing::Test {
 protected:
  ParallelDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// Where threads cannot be started, fewer compute.
TEST_F(ParallelDeathTest, RunsOnFewerThreadsWhereTheyDoNotStart) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "its shadow takes the address space";
#endif
  const auto computes = [] {
    // Room for the stacks of two threads, of 4 MiB each.
    int64_t num_pages = 0;
    std::ifstream("/proc/self/statm") >> num_pages;
    const auto now = static_cast<rlim_t>(num_pages * ::sysconf(_SC_PAGESIZE));
    const struct rlimit limit = {now + (11 << 20), RLIM_INFINITY};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) return false;
    std::atomic<bool> is_worker = true;
    std::vector<std::atomic<int>> seen(1000);
    for (int round = 0; round < 50; ++round)
      parallel_for(1000, 1, 16, [&](int64_t begin, int64_t, int worker) {
        if (worker >= 16) is_worker = false;
        ++seen[static_cast<size_t>(begin)];
      });
    return is_worker && std::ranges::all_of(seen, [](const auto& count) { return count == 50; });
  };
  EXPECT_EXIT(::_exit(computes() ? 0 : 1), testing::ExitedWithCode(0), "");
}

// What TBB was told of more threads than the machine has ends with the process, in which others may compute.
TEST_F(ParallelDeathTest, ComputesAloneOnceTheProcessEnds) {
  static const auto computes_alone = [] {
    std::atomic<bool> alone = true;
    parallel_for(64, 1, max_threads() + 2, [&](int64_t, int64_t, int worker) {
      if (worker != 0) alone = false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
    return alone.load();
  };
  const auto end = [] {
    std::atexit([] { ::_exit(computes_alone() ? 0 : 1); });
    if (computes_alone()) ::_exit(2);
    std::exit(3);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "");
}

#endif

}  // namespace
}  // namespace halfbyte
