// The kernels of `quantize_linear`, listed.
#pragma once

#include "cuda/kernel.h"

namespace halfbyte {

std::vector<cuda::Kernel> quantize_linear_kernels();

}  // namespace halfbyte
