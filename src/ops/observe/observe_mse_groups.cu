// observe, ranges of least error: a warp or a block has a group, and all stages of its search.
#include "ops/observe/range_mse.cuh"

namespace halfbyte::device {

constexpr int kTeams = kTeamWarps == 1 ? 4 : 1;  // of a block
constexpr int kTeamThreads = 32 * kTeamWarps;

// What a warp has in shared memory.
struct WarpShared {
  alignas(16) F y[mse_piece(1, sizeof(F))];
  F errors[kMost];
  Candidate parents[kMseMostParents];
};
// A group of one piece, by a warp.
__device__ __forceinline__ void search_group(WarpShared& shared, const MseGroupsArgs& args, i64 number) {
  const Groups::Group group = args.common.groups.group<true>(number);
  MseSearch<F> search;
  if (!begin_search(&args.common.ranges[number], args.codes, search)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const u32 blocks = load_piece<u32>(args.common, group, 0, mse_piece(1, sizeof(F)), search.per_unit,
                                     threadIdx.x % 32, 32, shared.y);
  __syncwarp();
  Candidate best;
  F least_error = 0;
#pragma unroll 1
  for (int stage = 0; stage <= kMseStages; ++stage) {
    const Step step(search, args.codes, stage);
#pragma unroll 1
    for (int i = lane; i < step.stage.count(); i += 32)
      shared.errors[i] =
          error_of(shared.y, blocks, step.candidate(i, shared.parents), static_cast<F>(args.codes.levels));
    __syncwarp();
    take_errors(step, shared.errors, shared.parents, best, least_error);
  }
  if (lane == 0) end_search(&args.common.ranges[number], search, best, args.codes);
}

// By a block.
__device__ __forceinline__ void search_group(BlockShared& shared, const MseGroupsArgs& args, i64 number) {
  const Groups::Group group = args.common.groups.group<true>(number);
  MseSearch<F> search;
  if (!begin_search(&args.common.ranges[number], args.codes, search)) return;
  Candidate best;
  F least_error = 0;
#pragma unroll 1
  for (int stage = 0; stage <= kMseStages; ++stage) {
    const Step step(search, args.codes, stage);
    F errors[kKept];
    block_errors<u32>(shared, args.common, group, 0, group.size, step, errors);
    __syncthreads();  // all have read the partial sums
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      if (i < step.stage.count()) shared.partial[0][i] = errors[j];
    }
    __syncthreads();
    if (threadIdx.x < 32) take_errors(step, shared.partial[0], shared.parents, best, least_error);
    __syncthreads();
  }
  if (threadIdx.x == 0) end_search(&args.common.ranges[number], search, best, args.codes);
}

extern "C" __global__ void __launch_bounds__(kTeams* kTeamThreads, kTeamWarps == 1 ? 4 : 2)
    observe_mse_groups(const __grid_constant__ MseGroupsArgs args) {
  __shared__ Select<kTeamWarps == 1, WarpShared, BlockShared> shared[kTeams];
  const u32 team = threadIdx.x / kTeamThreads;
  const i64 number = block_index() * kTeams + team;
  if (number >= args.common.groups.num_groups) return;  // a team as a whole
  search_group(shared[team], args, number);
}

}  // namespace halfbyte::device
