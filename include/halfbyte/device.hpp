// CUDA devices: which are usable, their memory, copies and streams. Nothing here needs the CUDA toolkit: the
// library looks for the driver and NVRTC when the first function is called. A device can be used if NVRTC
// compiles for it, or a kernel pack has kernels for it (kernels.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/tensor.hpp"

namespace halfbyte {

struct CudaDevice {
  int index = 0;
  std::string name;    // "NVIDIA H200"
  int capability = 0;  // 10 * major + minor: 90
  std::string target;  // what kernels are compiled for: "sm_90a"; empty if the device cannot be used
  int num_multiprocessors = 0;
  uint64_t memory_bytes = 0;
  std::string problem;  // why it cannot be used; empty if it can
};

// What this machine has of CUDA, and why it can or cannot be used.
struct CudaInfo {
  // Why no device can be used: "no CUDA driver: libcuda.so.1: cannot open ..."; empty if one can.
  std::string problem;
  std::string driver_path;  // empty if not found
  int driver_version = 0;   // the CUDA version that the driver supports: 1000 * major + 10 * minor
  std::string nvrtc_path;
  int nvrtc_version = 0;  // as above
  std::vector<CudaDevice> devices;
  std::string cache_directory;  // of compiled kernels on disk; empty if none is used
  std::string cache_problem;    // why none is used
  bool usable() const { return problem.empty(); }
};
// Does not throw if the machine lacks something. Creates no context. Creates the cache directory if a device
// can be used.
HALFBYTE_API CudaInfo cuda_info();

// Adds a directory of Python packages, such as the site-packages of the interpreter that this process is, to
// where NVRTC, cuBLAS and cuBLASLt are looked for: in its nvidia/*/lib, where wheels have them. Only what an
// environment variable names goes before; the first added is the first looked in. Each library is looked for
// once in a process: call it before. Throws Error(usage) if the path is not absolute. Thread-safe.
HALFBYTE_API void add_site_packages(const std::string& directory);

// "cpu", "cuda" or "cuda:1". parse_device throws Error(usage) for other words. It does not check whether the
// device exists.
HALFBYTE_API std::string to_string(Device device);
HALFBYTE_API Device parse_device(std::string_view word);
// Several, divided by commas: "cpu,cuda:1"; "cuda:all" is every CUDA device that can be used. Throws
// Error(usage) for other words and for one that is named twice, Error(device) where "cuda:all" is none.
HALFBYTE_API std::vector<Device> parse_devices(std::string_view words);
HALFBYTE_API std::string to_string(std::span<const Device> devices);  // as parse_devices takes it
// Throws Error(device), with the reason, if the device cannot be used. The CPU always can.
HALFBYTE_API void check_device(Device device);

// Throws Error(usage), naming `what`, if work on `device` cannot use the memory. A CUDA device cannot use
// plain host memory, memory of another device, or more bytes than the allocation has. The CPU cannot use
// memory of a CUDA device. Memory that the driver does not know counts as host memory. Takes less than a
// microsecond.
HALFBYTE_API void check_memory(const char* what, const void* data, int64_t num_bytes, Device device);

// A stream of a CUDA device: work on it runs in the order in which it was enqueued. On the CPU a stream does
// nothing, because work is done when the call returns. Functions that take a stream take handle(), a
// CUstream; null is the default stream.
class HALFBYTE_API Stream {
 public:
  Stream() = default;  // of the CPU
  // Throws Error(device) where the device cannot be used.
  explicit Stream(Device device);
  void* handle() const { return handle_.get(); }
  // Waits until all work is done. Throws Error(device) if something failed.
  void synchronize() const;

 private:
  Device device_;
  std::shared_ptr<void> handle_;
};

// Memory of a device, or of the host for copies to and from it. Copies of the object share the memory; the
// last one frees it. Work on it must be done by then.
class HALFBYTE_API Memory {
 public:
  Memory() = default;
  // Uninitialized memory, aligned to at least 256 bytes, as packed weights need. If there is not enough,
  // throws Error(no_memory) for the CPU and Error(device) for a CUDA device, naming the bytes wanted and
  // free.
  Memory(Device device, int64_t num_bytes);
  // Page-locked host memory, which copies to and from `device` use asynchronously. For the CPU: plain memory.
  // Throws Error(no_memory) if the host has none left, and Error(device) if the device cannot be used.
  static Memory host(Device device, int64_t num_bytes);

  std::byte* data() const { return data_.get(); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  friend class Tensor;
  std::shared_ptr<std::byte> data_;
  int64_t num_bytes_ = 0;
};

// A contiguous row-major tensor that owns its memory, or shares the memory of another owner. Copies of the
// object share the memory; the last one frees it, or lets go of the owner. Work on it must be done by then.
class HALFBYTE_API Tensor {
 public:
  Tensor() = default;  // of no elements: f32 [0] on the CPU
  // Uninitialized, at a multiple of 256 bytes. Throws Error(usage) for a negative extent or more than 2^63 -
  // 1 bytes, and as Memory.
  Tensor(Device device, DType dtype, std::vector<int64_t> shape);
  // The elements of a contiguous view, on its device. Waits for `stream`. Throws Error(usage) otherwise.
  static Tensor copy_of(const ConstTensorView& view, void* stream = nullptr);
  // The memory of a contiguous view itself, such as an array of Python: `owner` is held as long as any copy
  // of the tensor, and data() is that of the view. Null: somebody else sees to it that the memory outlives
  // them. Where the tensor is only read, the memory may be read-only. Throws Error(usage) if the view is not
  // contiguous, not aligned to its elements, longer than its memory, or not in memory of its device.
  static Tensor of(const TensorView& view, std::shared_ptr<void> owner);

  Device device() const { return device_; }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t num_elements() const;
  int64_t num_bytes() const;  // of the elements
  std::byte* data() const { return memory_.data(); }
  // Of the memory, with its length: valid as long as the tensor.
  TensorView view() const;
  // The same elements on another device; the tensor itself if it is there already. Waits for `stream`, which
  // is one of the CUDA device of the two.
  Tensor to(Device device, void* stream = nullptr) const;

 private:
  Device device_;
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_ = {0};
  Memory memory_;
};

// Copies between host memory and memory of `device`, in either direction, or within the device. On a CUDA
// device the copy is enqueued on `stream`. Host memory must live until the copy is done; if it is not from
// Memory::host, the call may wait. Throws Error(device) if the device refuses.
HALFBYTE_API void copy(Device device, void* to, const void* from, int64_t num_bytes, void* stream = nullptr);

}  // namespace halfbyte
