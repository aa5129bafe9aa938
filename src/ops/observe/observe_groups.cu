// observe, groups that are runs of whole chunks: read once, straight into the state. Lanes of a warp share a
// group, or a block has one.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

using ChunkRange = decltype(signed_range(Chunk()));
constexpr int kBatch = observe_batch(sizeof(Memory));  // groups of a team

// Where the chunks of a group begin, and how many there are.
struct Span {
  i64 first, n;
};
__device__ __forceinline__ Span span_of(const ObserveGroupsArgs& args, int group) {
  const int row = static_cast<int>(args.row_divider.divide(static_cast<u32>(group)));
  const i64 in_row = (group - row * static_cast<int>(args.row_divider.divisor)) * args.group;
  return {row * args.axis + in_row, min(args.group, args.axis - in_row)};
}

// 2^team lanes share a group of at most as many chunks, and have kBatch groups. A lane beyond the end of its
// group reads the last chunk again.
__device__ __forceinline__ void observe_in_warp(const ObserveGroupsArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % 32), own = lane & ((1 << args.team) - 1);
  const int teams = 32 >> args.team;
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int first_group = warp * (kBatch * teams) + (lane >> args.team);
  const auto chunk_of = [&](int b) {
    const Span span = span_of(args, min(first_group + b * teams, args.num_groups - 1));
    return span.first + min(static_cast<i64>(own), span.n - 1);
  };
  Chunk chunks[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) chunks[b] = load_chunk<Chunk>(args.common.x, chunk_of(b));
  ChunkRange ranges[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) ranges[b] = signed_range(chunks[b]);
  for (int mask = 1; mask < 1 << args.team; mask *= 2) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) ranges[b] = join(ranges[b], shuffle_xor(ranges[b], mask));
  }
  // The lanes of a team share out its groups, so that neighbours write side by side.
#pragma unroll 1
  for (int first = 0; first < kBatch; first += 1 << args.team) {
    const int mine = first + own, group = first_group + mine * teams;
    Range<F> range = unpack(ranges[0]);
#pragma unroll
    for (int b = 1; b < kBatch; ++b)
      if (mine == b) range = unpack(ranges[b]);
    const bool has_one = mine < kBatch && group < args.num_groups;
    u32 wrong = __ballot_sync(kAllLanes, has_one && !is_finite(range));
#pragma unroll 1
    for (; wrong != 0; wrong &= wrong - 1) {  // lane by lane, all lanes look at its group
      const int whose = __ffs(static_cast<int>(wrong)) - 1;
      const Span span = span_of(args, __shfl_sync(kAllLanes, group, whose));
      NonFinite found;
      Range<F> finite = no_range<F>();
      if (lane < span.n) finite = finite_range(args.common.x, (span.first + lane) * kChunk, kChunk, found);
      found.report(args.common.counts);
#pragma unroll 1
      for (int mask = 16; mask > 0; mask /= 2) finite = join(finite, shuffle_xor(finite, mask));
      if (lane == whose) range = finite;
    }
    if (has_one) finish(args.common, group, range);
  }
}

// `team` threads, a warp or the block, have a group.
__device__ __forceinline__ void observe_long_groups(const ObserveGroupsArgs& args) {
  const bool warps = args.team == 32;
  const int thread = static_cast<int>(warps ? threadIdx.x % 32 : threadIdx.x);
  const i64 group = warps ? static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32 : blockIdx.x;
  if (group >= args.num_groups) return;  // a warp as a whole
  const Span span = span_of(args, static_cast<int>(group));
  Seen<F> before;
  if (thread == 0) before = state_of(args.common.state, group);
  Range<F> range =
      chunks_range(args.common, thread, span.n, args.team, [&](i64 k) { return span.first + k; });
  range = warps ? warp_range(range) : block_range(range);
  if (thread == 0) finish(args.common, group, before, range);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    observe_groups(const __grid_constant__ ObserveGroupsArgs args) {
  count_batch(args.common);
  if constexpr (kLong)
    observe_long_groups(args);
  else
    observe_in_warp(args);
  wait_for_earlier();
}

}  // namespace halfbyte::device
