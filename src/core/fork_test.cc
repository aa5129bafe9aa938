#include "core/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace halfbyte {
namespace {

TEST(ForkSafeMutex, IsFreeInAChildAndWhatItGuardsIsWhole) {
  static auto& mutex = *new ForkSafeMutex;
  static volatile int64_t first = 0, second = 0;
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) {
      const std::lock_guard lock(mutex);
      first = first + 1;
      for (int i = 0; i < 1000; ++i) second = first - 1;
      second = first;
    }
  });
  ASSERT_FALSE(is_forked());
  for (int i = 0; i < 50; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(10);
      const std::lock_guard lock(mutex);
      ::_exit(first == second && is_forked() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  done = true;
  other.join();
  EXPECT_FALSE(is_forked());
}

}  // namespace
}  // namespace halfbyte
