// The CUDA side of `all_reduce`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/all_reduce/all_reduce.h"

namespace halfbyte {

// The kernel, listed.
std::vector<cuda::Kernel> all_reduce_kernels();

}  // namespace halfbyte
