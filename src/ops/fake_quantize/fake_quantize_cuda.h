// The kernels of `fake_quantize`, listed.
#pragma once

#include "cuda/kernel.h"

namespace halfbyte {

std::vector<cuda::Kernel> fake_quantize_kernels();

}  // namespace halfbyte
