// Keys that the listed kernels of several ops have, and what their values say.
#pragma once

#include "cuda/kernel.h"
#include "grouped/linear_cuda.h"

namespace halfbyte {

KernelKey wide_key();
// linear_fused: what shares a group.
KernelKey fused_group_key();
int fused_block_batch(const cuda::KernelValues& values);

// Fake quantization and its gradients: dtypes, format and table, then `more`. block_floats: formats whose
// scales are of 8 bits too.
std::vector<KernelKey> fake_keys(const std::vector<std::string>& zero_points,
                                 std::initializer_list<KernelKey> more, bool block_floats = false);
LinearTypes fake_types_of(const cuda::KernelValues& values);

}  // namespace halfbyte
