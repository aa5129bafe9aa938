// The CUDA side of `qgemm`.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {

// The rows of the table of kernels (src/kernels): those of all variants, below.
std::vector<cuda::Kernel> qgemm_kernels();
std::vector<cuda::Kernel> qgemm_simt_kernels();

// What these rows have in common: the keys of the weight (codec, group-size, double-quant) and of dtype, and
// the problem of their values: packed, forward, m = 1, n = k = 4096. Error(usage) where the values do not go
// together.
std::vector<KernelKey> qgemm_keys();
QgemmProblem qgemm_problem(const cuda::KernelValues& values);

}  // namespace halfbyte
