// Progress of a long operation: told to one caller at a time, about twenty times a second.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "core/checks.h"
#include "halfbyte/checkpoint.hpp"
#include "io/json.h"

namespace halfbyte::io {

class ProgressReporter {
  static constexpr int64_t kInterval = 50;  // milliseconds

 public:
  explicit ProgressReporter(ProgressFunction function) : function_(std::move(function)) {}

  // Thread safe. Error(cancelled) where the caller says so.
  void report(const Progress& progress) {
    if (!function_) return;
    const bool last = progress.done_bytes >= progress.total_bytes;
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
    if (!last && now < next_) return;
    std::unique_lock lock(mutex_, std::defer_lock);
    if (last) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return;
    }
    next_ = now + kInterval;
    last_ = progress;
    call();
  }
  // Where there is work without progress: the last report once more, as often.
  void poll() {
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
    if (!function_ || now < next_) return;
    const std::lock_guard lock(mutex_);
    next_ = now + kInterval;
    call();
  }
  // The last chance to cancel: what follows cannot be taken back.
  void ask() {
    next_ = 0;
    poll();
  }

 private:
  // Under the lock. What one phase was told holds for those beside it, too.
  void call() {
    if (cancelled_ == nullptr && !function_(last_)) cancelled_ = last_.phase;
    HALFBYTE_CHECK(cancelled_ == nullptr, cancelled, "{} was cancelled", cancelled_);
  }

  ProgressFunction function_;
  std::mutex mutex_;
  Progress last_ = {"plan", 0, 0};
  const char* cancelled_ = nullptr;  // the phase that was
  std::atomic<int64_t> next_ = 0;
};

// Asks the caller whether to stop reading headers, whose sizes say nothing of the time.
inline Stop stop_of(const ProgressFunction& function) {
  if (!function) return {};
  return [&function] {
    const Progress progress{"open", 0, 0};
    HALFBYTE_CHECK(function(progress), cancelled, "{} was cancelled", progress.phase);
  };
}

// Counts the bytes of one phase of the operation.
class ProgressPhase {
 public:
  // `before`: a phase beside which this one runs, and which alone is reported until it is done.
  ProgressPhase(ProgressReporter& reporter, const char* name, uint64_t total_bytes,
                const ProgressPhase* before = nullptr)
      : reporter_(reporter), name_(name), total_bytes_(total_bytes), before_(before) {}

  void add(uint64_t num_bytes) {
    const uint64_t done = done_bytes_ += num_bytes;
    if (before_ != nullptr && !before_->is_done())
      reporter_.poll();
    else
      reporter_.report({name_, done, total_bytes_});
  }
  // What was added must be done again.
  void take_back(uint64_t num_bytes) { done_bytes_ -= num_bytes; }
  bool is_done() const { return done_bytes_ >= total_bytes_; }

 private:
  ProgressReporter& reporter_;
  const char* name_;
  uint64_t total_bytes_;
  const ProgressPhase* before_;
  std::atomic<uint64_t> done_bytes_ = 0;
};

}  // namespace halfbyte::io
