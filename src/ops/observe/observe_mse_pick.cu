// observe, ranges of least error of few long groups: a block adds up the errors of a stage and picks the
// next.
#include "ops/observe/range_mse.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_mse_pick(const __grid_constant__ MseErrorsArgs args) {
  __shared__ F totals[kMost];
  __shared__ Candidate parents[kMseMostParents];
  const i64 number = block_index();
  if (number >= args.common.groups.num_groups) return;
  const Groups::Group group = args.common.groups.group<true>(number);
  MseSearch<F> search;
  if (!begin_search(&args.common.ranges[number], args.codes, search)) return;
  const Step step(search, args.codes, args.stage);
  auto& state = static_cast<MseState<F>*>(args.states)[number];
  const i64 per_block = static_cast<i64>(args.pieces) * mse_piece(kMseWarps, sizeof(F));
  const auto splits = static_cast<u32>((group.size - 1) / per_block + 1);  // a short group has fewer
  const F* const errors = static_cast<const F*>(args.errors) + number * args.splits * kMost;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < step.stage.count(); i += kThreads) {
    TreeSums<28> sums;
#pragma unroll 1
    for (u32 split = 0; split < splits; split += kBlock) {
      const F sum = tree_of<kBlock>(
          split, [&](u32 at) { return at < splits ? errors[static_cast<i64>(at) * kMost + i] : 0; });
      sums.push(sum, split / kBlock);
    }
    totals[i] = sums.total((splits + kBlock - 1) / kBlock);
  }
  if (threadIdx.x < kMseMostParents) parents[threadIdx.x] = state.parents[threadIdx.x];
  __syncthreads();
  if (threadIdx.x >= 32) return;
  Candidate best = state.best;
  F least_error = state.least;
  take_errors(step, totals, parents, best, least_error);
  if (threadIdx.x < kMseMostParents) state.parents[threadIdx.x] = parents[threadIdx.x];
  if (threadIdx.x != 0) return;
  state.best = best;
  state.least = least_error;
  if (args.stage == kMseStages) end_search(&args.common.ranges[number], search, best, args.codes);
}

}  // namespace halfbyte::device
