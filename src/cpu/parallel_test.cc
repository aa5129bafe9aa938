#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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

}  // namespace
}  // namespace halfbyte
