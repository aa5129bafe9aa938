// The CUDA side of `fake_quantize_learned_backward`.
#pragma once

#include "grouped/linear_cuda.h"
#include "ops/learned_scale/learned_scale.h"

namespace halfbyte {

// wide: 2^31 pieces of work and more. levels: a group fills up 2^levels chunks, at most 2^kLsqWarpLevels; one
// more: a block or several share a group.
cuda::KernelSpec lsq_rows_kernel(const LinearTypes& types, int levels, bool wide);
cuda::KernelSpec lsq_columns_kernel(const LinearTypes& types, bool wide);
cuda::KernelSpec lsq_elements_kernel(const LinearTypes& types, bool wide);
cuda::KernelSpec lsq_totals_kernel(const LinearTypes& types);

// The kernels, listed.
std::vector<cuda::Kernel> learned_scale_kernels();

}  // namespace halfbyte
