// What the CUDA variants of `qgemm` share on the host.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {

// The rows of the table of kernels (src/kernels): those of all variants.
std::vector<cuda::Kernel> qgemm_kernels();

// What rows of variants have in common: the keys of the weight (codec, group-size, double-quant) and of
// dtype, and the problem of their values: packed, forward, m = 1, n = k = 4096. Error(usage) where the values
// do not go together.
std::vector<KernelKey> qgemm_keys();
QgemmProblem qgemm_problem(const cuda::KernelValues& values);
// A key whose values are numbers; the value of one.
KernelKey number_key(const char* name, const std::vector<int>& values, const char* description);
int number_of(const cuda::KernelValues& values, std::string_view key);

// Of variants for capability 9.0: what their kernels are compiled for, and why the device is another; empty
// if it is not.
inline constexpr const char* kSm90Target = "sm_90a";
std::string refuse_other_than_sm90(const QgemmProblem& problem);

// A kernel of a product; `early`: it may start before the kernel before it has ended, where the device can.
template <class Args>
void launch_qgemm(bool early, cuda::CUfunction function, cuda::Grid grid, void* stream, const Args& args) {
  if (early)
    cuda::launch_early(function, grid, stream, args);
  else
    cuda::launch(function, grid, stream, args);
}

}  // namespace halfbyte
