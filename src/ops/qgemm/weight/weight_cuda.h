// A weight in any layout as kernels are given it (weight_args.h).
#pragma once

#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

// But for its addresses; then these.
WeightArgs weight_args(const QgemmProblem& problem);
void place_weight(WeightArgs& weight, const QgemmProblem& problem, const QgemmTensors& tensors);

}  // namespace halfbyte
