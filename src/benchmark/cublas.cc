#include "benchmark/cublas.h"

#include "core/checks.h"
#include "cuda/cublas.h"

namespace halfbyte {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

}  // namespace

Cublas::Cublas(Device device, void* stream) : workspace_(device, kWorkspaceBytes) {
  const cuda::Cublas& cublas = cuda::find_cublas();
  HALFBYTE_CHECK(cublas.problem.empty(), device, "{}", cublas.problem);
  cuda::check_cublas(cublas.cublasCreate_v2(&handle_), "cublasCreate");
  cuda::check_cublas(cublas.cublasSetStream_v2(handle_, stream), "cublasSetStream");
  cuda::check_cublas(
      cublas.cublasSetWorkspace_v2(handle_, workspace_.data(), static_cast<size_t>(kWorkspaceBytes)),
      "cublasSetWorkspace");
}

Cublas::~Cublas() { cuda::find_cublas().cublasDestroy_v2(handle_); }

void Cublas::product(DType dtype, bool transposed, int64_t m, int64_t n, int64_t k, const void* x,
                     const void* w, void* y) const {
  constexpr int kNo = 0, kYes = 1, kComputeF32 = 68, kDefaultAlgorithm = -1;
  const float one = 1, zero = 0;
  const int type = cuda::cublas_type(dtype);
  const int columns = static_cast<int>(transposed ? k : n), sums = static_cast<int>(transposed ? n : k);
  // By columns, as cuBLAS sees matrices, all are their transposes: y^T = w x^T or w^T x^T.
  cuda::check_cublas(
      cuda::find_cublas().cublasGemmEx(handle_, transposed ? kNo : kYes, kNo, columns, static_cast<int>(m),
                                       sums, &one, w, type, static_cast<int>(k), x, type, sums, &zero, y,
                                       type, columns, kComputeF32, kDefaultAlgorithm),
      "cublasGemmEx");
}

}  // namespace halfbyte
