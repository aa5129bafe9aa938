// observe, ranges of least error of few long groups: blocks share the errors of a stage; observe_mse_pick
// adds them up.
#include "ops/observe/range_mse.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_mse_errors(const __grid_constant__ MseErrorsArgs args) {
  __shared__ BlockShared shared;
  const auto block = static_cast<u32>(block_index());
  const u32 number = block / static_cast<u32>(args.splits),
            split = block - number * static_cast<u32>(args.splits);
  if (number >= args.common.groups.num_groups) return;
  const Groups::Group group = args.common.groups.group<true>(number);
  const i64 per_block = static_cast<i64>(args.pieces) * mse_piece(kMseWarps, sizeof(F));
  const i64 begin = split * per_block, end = min(group.size, begin + per_block);
  MseSearch<F> search;
  if (begin >= end || !begin_search(&args.common.ranges[number], args.codes, search)) return;
  const Step step(search, args.codes, args.stage);
  if (threadIdx.x < kMseMostParents)
    shared.parents[threadIdx.x] = static_cast<const MseState<F>*>(args.states)[number].parents[threadIdx.x];
  __syncthreads();
  F errors[kKept];
  if (end >> 31 != 0)
    block_errors<i64>(shared, args.common, group, begin, end, step, errors);
  else  // 32-bit divisions are several times as fast
    block_errors<u32>(shared, args.common, group, begin, end, step, errors);
  F* const to = static_cast<F*>(args.errors) + static_cast<i64>(block) * kMost;
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    if (i < step.stage.count()) to[i] = errors[j];
  }
}

}  // namespace halfbyte::device
