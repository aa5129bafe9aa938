// Work beside that of the calling thread.
#pragma once

#include <exception>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace halfbyte::io {

// One task at a time.
class Background {
 public:
  // Tasks run on the calling thread where `is_used` is false.
  explicit Background(bool is_used) : is_used_(is_used) {}
  Background(const Background&) = delete;
  ~Background() { join(); }

  // Waits for the last task, throws what it threw, and starts this one.
  void start(std::function<void()> task) {
    wait();
    if (is_used_) try {
        // What the thread needs is there before it is: it cannot fail for want of memory but in the task.
        task_ = std::move(task);
        thread_ = std::thread([this]() noexcept {
          try {
            task_();
          } catch (...) {
            thrown_ = std::current_exception();
          }
        });
        return;
      } catch (const std::system_error&) {  // there is no thread
        task = std::move(task_);
      }
    task();
  }
  // Waits for the last task and throws what it threw.
  void wait() {
    join();
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
  }

 private:
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  bool is_used_;
  std::function<void()> task_;
  std::exception_ptr thrown_;
  std::thread thread_;
};

}  // namespace halfbyte::io
