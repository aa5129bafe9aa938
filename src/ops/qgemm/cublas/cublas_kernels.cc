// The kernels of variant qgemm_cublas, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {

std::vector<cuda::Kernel> qgemm_cublas_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys) {
    if (key.name == "dtype") key.values = {"bf16", "f16"};
    if (key.name == "group-size") key.values = {"64", "32", "48"};
  }
  return {{{"qgemm", "qgemm_cublas_decode", "A slice of a packed weight as a dense matrix.", std::move(keys)},
           [](const cuda::KernelValues& values) {
             QgemmProblem problem = qgemm_problem(values);
             problem.m = 128;
             return qgemm_cublas_decode_kernel(problem);
           }}};
}

}  // namespace halfbyte
