// The CUDA side of `quantize`, asynchronous: the free function waits for it.
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

// Bytes of device memory that enqueue_quantize needs.
int64_t quantize_workspace_bytes(const QuantizeProblem& problem);
// Enqueues the whole operation on problem.stream; nothing waits, nothing is allocated. `workspace` (device
// memory, 16-byte aligned) begins with the counts of what was found, see core/counts.h.
void enqueue_quantize(const QuantizeProblem& problem, void* workspace);

}  // namespace halfbyte
