// The CUDA side of `route`.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/route/route.h"

namespace halfbyte {

// The kernel, listed.
std::vector<cuda::Kernel> route_kernels();

}  // namespace halfbyte
