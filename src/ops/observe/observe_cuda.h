// The CUDA side of `observe`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/observe/observe.h"

namespace halfbyte {

// The kernels, listed.
std::vector<cuda::Kernel> observe_kernels();

}  // namespace halfbyte
