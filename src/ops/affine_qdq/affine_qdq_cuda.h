// The CUDA side of `affine_qdq`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/affine_qdq/affine_qdq.h"

namespace halfbyte {

// Of a problem: its dtype and half_away.
cuda::KernelSpec affine_init_kernel(const AffineProblem& problem);
// dtype, code_bits.
cuda::KernelSpec affine_chunks_kernel(const AffineProblem& problem);
cuda::KernelSpec affine_groups_kernel(const AffineProblem& problem);
cuda::KernelSpec affine_backward_plain_kernel(const AffineProblem& problem);  // for other programs

// The kernels, listed.
std::vector<cuda::Kernel> affine_qdq_kernels();

}  // namespace halfbyte
