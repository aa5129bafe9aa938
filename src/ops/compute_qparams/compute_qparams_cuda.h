// The CUDA side of `compute_qparams`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/compute_qparams/compute_qparams.h"

namespace halfbyte {

// dtype: of min and max.
cuda::KernelSpec compute_qparams_kernel(DType dtype);

// The kernel, listed.
std::vector<cuda::Kernel> compute_qparams_kernels();

}  // namespace halfbyte
