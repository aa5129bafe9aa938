// Tensors of which every task needs short pieces from everywhere, such as those of awq and gptq: to ask the
// system for each piece would take longer than to read all once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "io/layout.h"

namespace halfbyte::io {

using ReadBytes = std::function<void(uint64_t offset, std::span<std::byte> bytes)>;

// The bytes of one.
class WholeTensor {
 public:
  explicit WholeTensor(uint64_t num_bytes) : num_bytes_(num_bytes) {}
  // Thread safe: those who ask meanwhile read parts side by side. Where `read` throws, another one reads that
  // part.
  const std::byte* get(const ReadBytes& read);

 private:
  // Not std::once_flag, of which others wait for ever where a function throws (GCC bug 66146).
  enum class Part : uint8_t { missing, being_read, there };

  const uint64_t num_bytes_;
  std::atomic<bool> is_complete_ = false;
  std::mutex mutex_;
  // What threads wait for, see Meeting in communicator.cc.
  std::atomic<int> num_changes_ = 0;
  std::unique_ptr<std::byte[]> bytes_;
  std::vector<Part> parts_;
};

// Those that are being read.
class WholeTensors {
 public:
  // What is kept, but for the tensor that was asked for last.
  static constexpr uint64_t kMostBytes = 128 << 20;
  // The bytes of a range, one run behind the other. Thread safe. A tensor is forgotten when as many bytes as
  // it has were asked for, or when others are kept, the one that was asked for the longest ago first.
  void read(const StoredTensor& tensor, const StoredRange& range, const ReadBytes& read,
            std::span<std::byte> bytes);

 private:
  struct Entry {
    const StoredTensor* tensor;
    std::shared_ptr<WholeTensor> whole;
    uint64_t missing;  // bytes that were not asked for
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;  // that of the last call behind all others
};

}  // namespace halfbyte::io
