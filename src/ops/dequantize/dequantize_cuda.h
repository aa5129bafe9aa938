// The CUDA side of `dequantize`.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/dequantize/dequantize.h"

namespace halfbyte {

// The kernel that decodes the problem; dequantize_cuda enqueues it.
cuda::KernelSpec dequantize_kernel(const DequantizeProblem& problem);
// The rows of the table of kernels (src/kernels).
std::vector<cuda::Kernel> dequantize_kernels();

}  // namespace halfbyte
