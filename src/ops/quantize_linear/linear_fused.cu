// quantize_linear with parameters that are computed, in one pass: contiguous tensors, groups of whole chunks along the
// last axis. Zeros do not change any parameters here (only the largest magnitude counts, or the range is extended to
// contain 0), so that lanes without elements take part with zeros.
#include "ops/quantize_linear/linear.cuh"
#include "ops/quantize_linear/linear_params.cuh"

namespace halfbyte::device {

constexpr int kChunk = linear_chunk(sizeof(Memory), LinearOp::quantize);
using Chunk = ChunkOf<Element, kChunk>;
constexpr int kWarpBatch = kLinearWarpBatch, kWarps = kLinearThreads / 32;

using ChunkRange = decltype(signed_range(Chunk()));

// Of the finite elements.
__device__ Range<F> finite_range(const void* x, i64 chunk) {
  Range<F> range = {0, 0};
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    const F value = load_element(x, chunk * kChunk + i);
    if (formats::is_finite(value)) range = join(range, Range<F>{-value, value});
  }
  return range;
}

__device__ __forceinline__ Group shuffle(const Group& group, int lane) {
  return {shuffle(group.scale, lane), shuffle(group.zero_point, lane), shuffle(group.reciprocal, lane),
          shuffle(group.limit, lane)};
}

// False where quantize_slow must do it. That no quotient is large is known of the whole group.
__device__ __forceinline__ bool quantize_fast(const LinearCommon& common, const Chunk& x, i64 chunk,
                                              const OneGroup& group) {
  if constexpr (kFast) {
    if (!(group.group.limit > 0)) return false;
    quantize_chunk<kBits>(x, group, common).store(common.data.codes, chunk);
    return true;
  }
  return false;
}
__device__ __forceinline__ void quantize_slow(const LinearCommon& common, i64 chunk, const Group& group) {
  run_slow<LinearOp::quantize, kBits>(common, chunk * kChunk, kChunk, [&](int) { return group; });
}

// Where the chunks of a group begin, and how many there are.
struct Span {
  int first, n;
};
__device__ __forceinline__ Span span_of(const LinearFusedArgs& args, int group) {
  if (args.group_divides_axis) return {group * args.group, args.group};
  const int row = static_cast<int>(args.row_divider.divide(static_cast<u32>(group)));
  const int in_row = (group - row * static_cast<int>(args.row_divider.divisor)) * args.group;
  return {row * args.axis + in_row, min(args.group, args.axis - in_row)};
}

// 2^team lanes share a group of at most as many chunks, and have kWarpBatch groups.
__device__ __forceinline__ void quantize_in_warp(const LinearFusedArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % 32), own = lane & ((1 << args.team) - 1);
  const int teams = 32 >> args.team, team_begin = lane - own;
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int first_group = warp * (kWarpBatch * teams) + (team_begin >> args.team);

  Chunk chunks[kWarpBatch];
  int numbers[kWarpBatch];  // -1: none
#pragma unroll
  for (int b = 0; b < kWarpBatch; ++b) {
    const int group = first_group + b * teams;
    const Span span = span_of(args, min(group, args.num_groups - 1));
    numbers[b] = group < args.num_groups && own < span.n ? span.first + own : -1;
    chunks[b] = numbers[b] >= 0 ? load_chunk<Chunk>(args.common.data.x, numbers[b]) : Chunk{};
  }
  ChunkRange ranges[kWarpBatch];
#pragma unroll
  for (int b = 0; b < kWarpBatch; ++b) ranges[b] = signed_range(chunks[b]);
  for (int mask = 1; mask < 1 << args.team; mask *= 2) {
#pragma unroll
    for (int b = 0; b < kWarpBatch; ++b) ranges[b] = join(ranges[b], shuffle_xor(ranges[b], mask));
  }
  // Lane b of a team works out the parameters of its group b.
  Range<F> range = unpack(ranges[0]);
#pragma unroll
  for (int b = 1; b < kWarpBatch; ++b)
    if (own == b) range = unpack(ranges[b]);
  const bool finite = is_finite(range);
  if (__any_sync(kAllLanes, !finite)) {
#pragma unroll 1
    for (int b = 0; b < kWarpBatch; ++b) {
      const int number = first_group + b * teams;
      const Span span = span_of(args, min(number, args.num_groups - 1));
      Range<F> r = {0, 0};
      if (number < args.num_groups && own < span.n) r = finite_range(args.common.data.x, span.first + own);
      for (int mask = 1; mask < 1 << args.team; mask *= 2) r = join(r, shuffle_xor(r, mask));
      if (own == b) range = r;
    }
  }
  Group group{};
  const int own_group = first_group + own * teams;
  if (own < kWarpBatch && own_group < args.num_groups)
    group = store_group(args.common, own_group, -range.low, range.high);
  if (!finite) group.limit = 0;
  u32 slow = 0;
#pragma unroll
  for (int b = 0; b < kWarpBatch; ++b) {
    const OneGroup shared(args.common, shuffle(group, team_begin + b));
    if (numbers[b] >= 0 && !quantize_fast(args.common, chunks[b], numbers[b], shared)) slow |= 1u << b;
  }
  if (__any_sync(kAllLanes, slow != 0)) {
#pragma unroll 1
    for (int b = 0; b < kWarpBatch; ++b) {
      const Group shared = shuffle(group, team_begin + b);
      const Span span = span_of(args, min(first_group + b * teams, args.num_groups - 1));
      if (slow >> b & 1) quantize_slow(args.common, span.first + own, shared);
    }
  }
}

// A block, of a power of two of warps, has a group of at most `batch` chunks a thread.
template <int batch>
__device__ __forceinline__ void quantize_in_block(const LinearFusedArgs& args) {
  __shared__ Range<F> warp_ranges[kWarps];
  __shared__ Group shared_group;
  const int number = static_cast<int>(blockIdx.x);
  if (number >= args.num_groups) return;
  const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const Span span = span_of(args, number);

  Chunk chunks[batch];
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int c = b * threads + thread;
    chunks[b] = c < span.n ? load_chunk<Chunk>(args.common.data.x, span.first + c) : Chunk{};
  }
  ChunkRange joined = signed_range(chunks[0]);
#pragma unroll
  for (int b = 1; b < batch; ++b) joined = join(joined, signed_range(chunks[b]));
  Range<F> range = unpack(joined);
  const bool finite = is_finite(range);
  if (!finite) {
    range = {0, 0};
#pragma unroll 1
    for (int c = thread; c < span.n; c += threads)
      range = join(range, finite_range(args.common.data.x, span.first + c));
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  if (lane == 0) warp_ranges[thread / 32] = range;
  const bool all_finite = __syncthreads_or(!finite) == 0;
  if (thread < 32) {
    range = warp_ranges[lane & (warps - 1)];
    for (int mask = warps / 2; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
    if (lane == 0) {
      shared_group = store_group(args.common, number, -range.low, range.high);
      if (!all_finite) shared_group.limit = 0;
    }
  }
  __syncthreads();
  const OneGroup group(args.common, shared_group);
  u32 slow = 0;
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int c = b * threads + thread;
    if (c < span.n && !quantize_fast(args.common, chunks[b], span.first + c, group)) slow |= 1u << b;
  }
#pragma unroll 1
  for (int b = 0; b < batch; ++b)
    if (slow >> b & 1) quantize_slow(args.common, span.first + b * threads + thread, shared_group);
}

extern "C" __global__ void __launch_bounds__(kLinearThreads, kFast && kBlockBatch < 8 ? 4 : 2)
    linear_fused(const __grid_constant__ LinearFusedArgs args) {
  if constexpr (kBlockBatch == 0)
    quantize_in_warp(args);
  else
    quantize_in_block<kBlockBatch>(args);
}

}  // namespace halfbyte::device
