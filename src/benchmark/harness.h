// What every measurement shares: the backend of a device, memory that is filled and rotates, repeated
// medians.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "benchmark/backend.h"

namespace halfbyte {

inline constexpr int64_t kBenchAlignment = 256;  // of what lies in one memory
inline int64_t bench_padded(int64_t num_bytes) {
  return (num_bytes + kBenchAlignment - 1) / kBenchAlignment * kBenchAlignment;
}
// Values that memory is filled with, over and over; no divisor of rows and groups.
inline constexpr int64_t kBenchPoolValues = (int64_t{1} << 22) - 37 * 64;

using BenchClock = std::chrono::steady_clock;
inline double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

// Memory that grows, in buffers that take turns.
class BenchArena {
 public:
  // True if its content is lost.
  bool reserve(Device device, int64_t num_bytes) {
    if (num_bytes <= memory_.num_bytes()) return false;
    memory_ = {};
    memory_ = Memory(device, num_bytes);
    return true;
  }
  const Memory& memory() const { return memory_; }
  std::byte* at(int set, int64_t set_bytes) const { return memory_.data() + set * set_bytes; }

 private:
  Memory memory_;
};

class BenchHarness {
 public:
  BenchHarness(Device device, const BenchOptions& options);

  Device device() const { return device_; }
  const BenchBackend& backend() const { return *backend_; }
  const Stream& stream() const { return backend_->stream(); }
  int rounds() const { return rounds_; }

  // The pool, over and over.
  void fill(std::byte* to, int64_t num_bytes, std::span<const uint8_t> pool) const;
  // The smallest of the medians of some passes, after a first start of each; one pass for other than
  // rounds().
  std::vector<Timing> medians(std::span<const std::shared_ptr<Work>> works, int rounds) const;
  // The fastest of these alone.
  std::shared_ptr<Work> fastest(std::span<const std::shared_ptr<Work>> works) const;

 private:
  Device device_;
  std::unique_ptr<BenchBackend> backend_;
  int rounds_, passes_;
};

}  // namespace halfbyte
