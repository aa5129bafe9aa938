#include "core/fork.h"

#include <pthread.h>

#include <atomic>

namespace halfbyte {
namespace {

std::atomic<bool> forked = false;
std::atomic<ForkSafeMutex*> mutexes = nullptr;
std::mutex forking;             // held during a fork()
ForkSafeMutex* held = nullptr;  // the first of those that are held then

void hold() {
  forking.lock();
  held = mutexes;
  for (ForkSafeMutex* mutex = held; mutex != nullptr; mutex = mutex->next()) mutex->lock();
}
void release() {
  for (ForkSafeMutex* mutex = held; mutex != nullptr; mutex = mutex->next()) mutex->unlock();
  forking.unlock();
}
void release_in_child() {
  forked = true;
  release();
}

}  // namespace

bool sees_forks() noexcept {
  static const bool registered = ::pthread_atfork(hold, release, release_in_child) == 0;
  return registered;
}

bool is_forked() noexcept { return forked; }

ForkSafeMutex::ForkSafeMutex() noexcept {
  static_cast<void>(sees_forks());
  next_ = mutexes;
  while (!mutexes.compare_exchange_weak(next_, this)) {
  }
}

}  // namespace halfbyte
