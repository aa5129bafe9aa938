// The CUDA kernels of `quantize`.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_args.h"

namespace halfbyte {

// The kernel that quantizes the problem; the other one it may need is value_range_kernel(problem.dtype).
cuda::KernelSpec quantize_kernel(const QuantizeProblem& problem);
cuda::KernelSpec value_range_kernel(DType dtype);
// The rows of the table of kernels (src/kernels).
std::vector<cuda::Kernel> quantize_kernels();

}  // namespace halfbyte
