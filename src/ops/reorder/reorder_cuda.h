// The CUDA side of `reorder`.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/reorder/reorder.h"

namespace halfbyte {

// The kernels that move codes and parameters; reorder_cuda enqueues them.
struct ReorderKernels {
  cuda::KernelSpec codes, parameters;
};
ReorderKernels reorder_kernels_of(const ReorderProblem& problem);
// The rows of the table of kernels (src/kernels).
std::vector<cuda::Kernel> reorder_kernels();

}  // namespace halfbyte
