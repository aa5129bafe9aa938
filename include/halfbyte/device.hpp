// CUDA devices: which are usable, memory on them, copies and streams. Nothing here needs the CUDA
// toolkit: the driver and NVRTC are found when the first function is called. A device can be used where NVRTC
// compiles for it or a kernel pack has kernels for it (kernels.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/tensor.hpp"

namespace halfbyte {

struct CudaDevice {
  int index = 0;
  std::string name;    // "NVIDIA H200"
  int capability = 0;  // 10 * major + minor: 90
  std::string target;  // that kernels are compiled for: "sm_90a"; empty if the device cannot be used
  int num_multiprocessors = 0;
  uint64_t memory_bytes = 0;
  std::string problem;  // why it cannot be used; empty if it can
};

// What was found of CUDA on this machine, and why it can or cannot be used.
struct CudaInfo {
  // Why no device can be used: "no CUDA driver: libcuda.so.1: cannot open ..."; empty if one can.
  std::string problem;
  std::string driver_path;  // empty if not found
  int driver_version = 0;   // of CUDA that the driver supports: 1000 * major + 10 * minor
  std::string nvrtc_path;
  int nvrtc_version = 0;  // as above
  std::vector<CudaDevice> devices;
  std::string cache_directory;  // of compiled kernels on disk; empty if none is used
  std::string cache_problem;    // why none is used
  bool usable() const { return problem.empty(); }
};
// Never throws for what the machine lacks. Makes no context; where a device can be used, the cache directory.
HALFBYTE_API CudaInfo cuda_info();

// "cpu", "cuda" or "cuda:1". parse_device throws Error(usage) for other words; it does not look whether the
// device exists.
HALFBYTE_API std::string to_string(Device device);
HALFBYTE_API Device parse_device(std::string_view word);
// Throws Error(device) with the reason where the device cannot be used. The CPU always can.
HALFBYTE_API void check_device(Device device);

// Throws Error(usage) naming `what` unless the memory can be used by work on `device`: a CUDA device cannot
// be given plain host memory, memory of another device, or more bytes than its allocation has; the CPU cannot
// be given memory of a CUDA device. What the driver does not know is host memory. Takes less than a
// microsecond.
HALFBYTE_API void check_memory(const char* what, const void* data, int64_t num_bytes, Device device);

// A stream of a CUDA device: what is enqueued on it runs in order. On the CPU: nothing, everything is done
// when the call returns. Functions that take a stream take handle(): a CUstream; null is the default stream.
class HALFBYTE_API Stream {
 public:
  Stream() = default;  // of the CPU
  // Throws Error(device) where the device cannot be used.
  explicit Stream(Device device);
  void* handle() const { return handle_.get(); }
  // Waits until all is done. Throws Error(device) where something failed.
  void synchronize() const;

 private:
  Device device_;
  std::shared_ptr<void> handle_;
};

// Memory of a device, or of the host for copies to and from it. Copies share it; the last one frees it, for
// which work on it must be done.
class HALFBYTE_API Memory {
 public:
  Memory() = default;
  // Uninitialized, at least 256-byte aligned: packed weights want that. Throws Error(no_memory) for the CPU,
  // Error(device) for a CUDA device, naming the bytes wanted and free.
  Memory(Device device, int64_t num_bytes);
  // Host memory that copies to and from `device` run asynchronously on (page-locked). For the CPU: plain.
  // Throws Error(no_memory) where the host has none left, Error(device) where the device cannot be used.
  static Memory host(Device device, int64_t num_bytes);

  std::byte* data() const { return data_.get(); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<std::byte> data_;
  int64_t num_bytes_ = 0;
};

// Copies between host memory and memory of `device`, either way, or within it. On a CUDA device enqueued on
// `stream`: host memory must live until that has come so far, and may make the call wait if it is not from
// Memory::host. Throws Error(device) where the device refuses.
HALFBYTE_API void copy(Device device, void* to, const void* from, int64_t num_bytes, void* stream = nullptr);

}  // namespace halfbyte
