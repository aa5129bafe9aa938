// What CUDA variants that take the weights of experts share on the host.
#pragma once

#include "cuda/kernel.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/experts_args.h"

namespace halfbyte {

// But for addresses, which place_experts() adds.
ExpertsArgs experts_args(const QgemmProblem& problem);
void place_experts(ExpertsArgs& args, const QgemmTensors& tensors);

// Rows that a weight is likely to meet: what tiles are chosen by. Those of experts are a half more than if
// all had as many, as some have more than others.
int64_t rows_of_weight(const QgemmProblem& problem);
// Tiles of `tile` rows, at most.
int64_t tiles_of_rows(const QgemmProblem& problem, int64_t tile);

// The key of their kernels.
KernelKey experts_key();

}  // namespace halfbyte
