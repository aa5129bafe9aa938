// The kernel of `compute_qparams`, listed.
#include "ops/compute_qparams/compute_qparams_cuda.h"

namespace halfbyte {

std::vector<cuda::Kernel> compute_qparams_kernels() {
  return {{{"compute_qparams",
            "compute_qparams",
            "Scales and zero points from ranges.",
            {{"dtype", {"f32", "f64"}, false, "The dtype of the ranges."}}},
           [](const cuda::KernelValues& values) { return compute_qparams_kernel(cuda::dtype_of(values)); }}};
}

}  // namespace halfbyte
