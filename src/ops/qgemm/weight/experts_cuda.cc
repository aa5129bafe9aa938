#include "ops/qgemm/weight/experts_cuda.h"

#include <algorithm>

#include "core/arithmetic.h"

namespace halfbyte {

ExpertsArgs experts_args(const QgemmProblem& problem) {
  const QgemmExperts& experts = problem.experts;
  ExpertsArgs args{};
  args.weight_bytes = problem.weight.num_bytes;
  args.rows = static_cast<int32_t>(problem.m);
  args.num = static_cast<int32_t>(experts.num);
  args.rows_per_expert = static_cast<int32_t>(experts.rows_per_expert);
  args.slots_per_x = static_cast<int32_t>(experts.slots_per_x);
  return args;
}

void place_experts(ExpertsArgs& args, const QgemmTensors& tensors) {
  args.offsets = tensors.offsets;
  args.slots = tensors.slots;
  args.routing_weights = tensors.routing_weights;
}

int64_t rows_of_weight(const QgemmProblem& problem) {
  const QgemmExperts& experts = problem.experts;
  if (experts.num == 0) return problem.m;
  if (experts.rows == ExpertRows::masked) return experts.rows_per_expert;
  const int64_t rows = ceil_div(problem.m, experts.num);
  return std::min(problem.m, rows + rows / 2);
}

int64_t tiles_of_rows(const QgemmProblem& problem, int64_t tile) {
  const QgemmExperts& experts = problem.experts;
  return experts.num == 0 ? ceil_div(problem.m, tile)
                          : most_expert_tiles(problem.m, experts.num, experts.rows_per_expert, tile);
}

KernelKey experts_key() {
  return cuda::flag_key("experts", "Rows of x meet the weights of experts, as the device says.");
}

}  // namespace halfbyte
