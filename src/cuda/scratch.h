// Small device memory for calls that wait for their result, kept for the next call.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/driver.h"

namespace halfbyte::cuda {

class Scratch {
 public:
  // At least num_bytes of the device's memory, aligned to 256 bytes, uninitialized.
  Scratch(const Context& context, int64_t num_bytes);
  // The context must be current, as for all calls on a device. All work on the memory must be done, but where
  // an exception leaves the scope.
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return std::bit_cast<void*>(pointer_); }

 private:
  int device_;
  int64_t num_bytes_;
  int exceptions_;
  CUdeviceptr pointer_ = 0;
};

}  // namespace halfbyte::cuda
