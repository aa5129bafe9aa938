// Products of dense matrices by cuBLAS, for comparison.
#pragma once

#include <cstdint>

#include "halfbyte/device.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// On one stream of the current context. What it enqueues can be captured once it has run.
class Cublas {
 public:
  Cublas(Device device, void* stream);
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas();
  // y[m, n] = x[m, k] . w[n, k]^T; transposed: y[m, k] = x[m, n] . w[n, k]. All of `dtype` (bf16, f16, f32),
  // row-major; f32 sums.
  void product(DType dtype, bool transposed, int64_t m, int64_t n, int64_t k, const void* x, const void* w,
               void* y) const;

 private:
  Memory workspace_;
  void* handle_ = nullptr;
};

}  // namespace halfbyte
