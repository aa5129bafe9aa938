// What a thread keeps from call to call.
#pragma once

#include <pthread.h>

#include <new>

namespace halfbyte {

// An object of type T of each thread that asks for it, ended with the thread; that of the main thread lives
// as long as the process. Not thread_local: where there is no memory for the first use of that in a thread,
// the C library ends the process.
template <class T>
class PerThread {
 public:
  PerThread() noexcept
      : usable_(::pthread_key_create(&key_, [](void* object) { delete static_cast<T*>(object); }) == 0) {}
  PerThread(const PerThread&) = delete;

  // Null: this thread has none yet.
  T* find() const noexcept { return usable_ ? static_cast<T*>(::pthread_getspecific(key_)) : nullptr; }
  // Makes it where there is none. Null: there is no memory for it.
  T* get() const noexcept {
    if (T* const object = find()) return object;
    T* const object = usable_ ? new (std::nothrow) T() : nullptr;
    if (object == nullptr || ::pthread_setspecific(key_, object) == 0) return object;
    delete object;
    return nullptr;
  }

 private:
  pthread_key_t key_{};
  bool usable_;
};

}  // namespace halfbyte
