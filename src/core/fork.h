// What a child of fork() may rely on: it has the calling thread alone, and memory as the others left it.
#pragma once

#include <mutex>

namespace halfbyte {

// False: there is no memory to be told of fork(), and the next two know nothing of it.
bool sees_forks() noexcept;

// Whether this process was forked from one that had called sees_forks(), or a ForkSafeMutex.
bool is_forked() noexcept;

// A mutex of the process, never destroyed: fork() waits until nobody holds it, so that the child finds it
// free and what it guards whole. For moments, within which no other ForkSafeMutex is taken.
class ForkSafeMutex {
 public:
  ForkSafeMutex() noexcept;
  ForkSafeMutex(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  ForkSafeMutex* next() const { return next_; }

 private:
  std::mutex mutex_;
  ForkSafeMutex* next_ = nullptr;
};

}  // namespace halfbyte
