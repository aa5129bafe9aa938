// The CUDA side of `dequantize`.
#pragma once

#include "cuda/launch.h"
#include "ops/dequantize/dequantize.h"

namespace halfbyte {

// The kernel that decodes the problem; dequantize_cuda enqueues it.
cuda::KernelSpec dequantize_kernel(const DequantizeProblem& problem);

}  // namespace halfbyte
