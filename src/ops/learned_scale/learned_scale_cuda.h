// The CUDA side of `fake_quantize_learned_backward`.
#pragma once

#include "grouped/linear_cuda.h"
#include "ops/learned_scale/learned_scale.h"

namespace halfbyte {

// What shares a group: up to 4 lanes, more, a warp, blocks.
enum class LsqTeam : uint8_t { few, lanes, warp, block };
cuda::KernelSpec lsq_rows_kernel(const LinearTypes& types, LsqTeam team);
cuda::KernelSpec lsq_columns_kernel(const LinearTypes& types);
// wide: 2^31 pieces of work and more.
cuda::KernelSpec lsq_elements_kernel(const LinearTypes& types, bool wide);
cuda::KernelSpec lsq_totals_kernel(const LinearTypes& types);

// The kernels, listed.
std::vector<cuda::Kernel> learned_scale_kernels();

}  // namespace halfbyte
