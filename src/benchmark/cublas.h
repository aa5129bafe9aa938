// Products of dense matrices by cuBLAS, found at run time, for comparison. The types are those of
// cublas_v2.h.
#pragma once

#include <cstdint>
#include <string>

#include "halfbyte/device.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

struct CublasLibrary {
  std::string path;     // empty if there is none
  int version = 0;      // major
  std::string problem;  // why there is none; empty if there is
  // NOLINTBEGIN(readability-identifier-naming): its names
  int (*cublasGetProperty)(int property, int* value) = nullptr;
  int (*cublasCreate_v2)(void** handle) = nullptr;
  int (*cublasDestroy_v2)(void* handle) = nullptr;
  int (*cublasSetStream_v2)(void* handle, void* stream) = nullptr;
  int (*cublasSetWorkspace_v2)(void* handle, void* workspace, size_t num_bytes) = nullptr;
  int (*cublasGemmEx)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                      const void* a, int type_a, int lda, const void* b, int type_b, int ldb,
                      const void* beta, void* c, int type_c, int ldc, int compute_type,
                      int algorithm) = nullptr;
  // NOLINTEND(readability-identifier-naming)
};
// The first of library_candidates, HALFBYTE_CUBLAS first, that opens and is of no later major version of CUDA
// than the driver. Once per process.
const CublasLibrary& find_cublas();

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
