// The memory that weights pass through on their way between files and operations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfbyte/device.hpp"

namespace halfbyte::io {

// Memory that grows without being copied or cleared. That of a CUDA device is page-locked and has a mirror
// there, of the same size, for operations to work on. On the CPU the memory is its own mirror.
class Buffer {
 public:
  Buffer() = default;  // of the CPU
  explicit Buffer(Device device) : device_(device) {}

  // Makes it at least so large; the contents are lost where it grows. Returns data().
  std::byte* reserve(int64_t num_bytes);
  std::byte* data() const { return host_.data(); }
  std::byte* mirror() const { return mirror_.data(); }
  // Copies what the last reserve asked for to the mirror, or back: enqueued on the stream. Nothing on the
  // CPU.
  void upload(const Stream& stream) const;
  void download(const Stream& stream) const;

 private:
  Device device_;
  Memory host_, mirror_;
  int64_t num_bytes_ = 0;  // of the last reserve
};

}  // namespace halfbyte::io
