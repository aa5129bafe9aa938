// The CUDA side of linear quantization.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/quantize_linear/quantize_linear.h"

namespace halfbyte {

// The kernels and what each is compiled for; everything else is given at run time. bits: 8 or 4, of a code.
// wide: more than 2^31 pieces of work are counted.
cuda::KernelSpec linear_chunks_kernel(DType dtype, int bits, LinearOp op, bool wide);
cuda::KernelSpec linear_columns_kernel(DType dtype, int bits, LinearOp op, bool wide);
cuda::KernelSpec linear_elements_kernel(DType dtype, int bits, LinearOp op);
// block_batch: 0: lanes share a group; 4 or 8: a block has one, of so many chunks a thread.
cuda::KernelSpec linear_fused_kernel(DType dtype, int bits, int block_batch);
cuda::KernelSpec linear_ranges_kernel(DType dtype, bool chunks, bool wide);
cuda::KernelSpec linear_params_kernel(DType dtype);

// The kernels, listed.
std::vector<cuda::Kernel> quantize_linear_kernels();

}  // namespace halfbyte
