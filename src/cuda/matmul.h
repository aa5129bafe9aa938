// Products of dense matrices by cuBLASLt, prepared once for many runs.
#pragma once

#include <memory>

#include "cuda/cublas.h"

namespace halfbyte::cuda {

// y[m, n] = x[m, k] . w^T (+ bias[n]), w [n, k]; by_rows: x[m, k] . w, w [k, n]. Rows are contiguous,
// strides from row to row in elements. All of `dtype`, bf16 or f16; sums are f32 and rounded once.
struct MatmulShape {
  DType dtype = DType::bf16;
  int64_t m = 0, n = 0, k = 0;
  bool by_rows = false;
  int64_t x_stride = 0, w_stride = 0, y_stride = 0;
  bool bias = false;
  int64_t alignment = 16;  // bytes, of x, bias and y; of w and the workspace 256
  bool operator==(const MatmulShape&) const = default;
};

// Why there are none on a device; empty if there are.
std::string refuse_matmul(const Context& context);

// Of the current context. The algorithm is chosen once, among those that give the same bytes run to run.
class Matmul {
 public:
  // Throws Error(device) where cuBLASLt has no algorithm that makes do with the workspace.
  Matmul(const Context& context, const MatmulShape& shape, int64_t workspace_bytes);
  // Any number of threads at a time. Allocates nothing on the device; can be captured.
  void run(const void* x, const void* w, const void* bias, void* y, void* workspace, void* stream) const;

 private:
  // Until the end of the scope, as the address of the bias is part of it. bias: null if there is none.
  using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, int (*)(cublasLtMatmulDesc)>;
  Description describe(const void* bias) const;
  using Layout = std::shared_ptr<cublasLtMatrixLayoutOpaque_t>;

  MatmulShape shape_;
  cublasLtHandle handle_ = nullptr;
  Layout w_, x_, y_;
  cublasLtMatmulAlgo algorithm_{};
  size_t workspace_bytes_ = 0;
};

}  // namespace halfbyte::cuda
