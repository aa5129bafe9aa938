// The CUDA side of linear quantization.
#pragma once

#include "cuda/launch.h"
#include "ops/quantize_linear/quantize_linear.h"

namespace halfbyte {

// The kernels, and what each is compiled for; everything else is given at run time.
cuda::KernelSpec linear_chunks_kernel(DType dtype, int bits, LinearOp op);
cuda::KernelSpec linear_columns_kernel(DType dtype, int bits, LinearOp op);
cuda::KernelSpec linear_elements_kernel(DType dtype, int bits, LinearOp op);
cuda::KernelSpec linear_fused_kernel(DType dtype, int bits,
                                     int block_batch);  // 0: warps; 4 or 8 chunks a thread
cuda::KernelSpec linear_ranges_kernel(DType dtype, bool chunks);
cuda::KernelSpec linear_params_kernel(DType dtype);

}  // namespace halfbyte
