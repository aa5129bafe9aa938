// The CUDA side of `observe`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/observe/observe.h"

namespace halfbyte {

// A kernel of the op, specialised on the dtype of x and `lines` of "halfbyte_config.h".
cuda::KernelSpec observe_kernel(const char* source, const char* name, DType dtype, const std::string& lines);
// is_long: a warp or a block has a group, else lanes share one.
cuda::KernelSpec observe_groups_kernel(DType dtype, bool is_long);
// runs: a group is not in one piece.
cuda::KernelSpec observe_parts_kernel(DType dtype, bool runs);
cuda::KernelSpec observe_columns_kernel(DType dtype);
cuda::KernelSpec observe_update_kernel(DType dtype);  // of x

// The kernels, listed.
std::vector<cuda::Kernel> observe_kernels();

}  // namespace halfbyte
