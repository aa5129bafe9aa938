// quantize_linear and fake_quantize with parameters that are computed, in one pass: contiguous tensors,
// groups of whole chunks along the last axis. Zeros do not change any parameters here (only the largest
// magnitude counts, or the range is extended to contain 0), so that lanes without elements take part with
// zeros. They do change what an observer has seen: in fake_quantize such lanes have the last chunk of their
// group.
#include "grouped/linear.cuh"
#include "grouped/linear_params.cuh"

namespace halfbyte::device {

constexpr int kChunk = linear_chunk(sizeof(Memory), LinearOp::quantize, kMask);
using Chunk = ChunkOf<Element, kChunk>;
constexpr int kWarpBatch = kLinearWarpBatch, kWarps = kLinearThreads / 32;

using ChunkRange = decltype(signed_range(Chunk()));

__device__ __forceinline__ Range<F> range_of_nothing() {
  if constexpr (kFake) return no_range<F>();
  return {0, 0};
}
// Of the finite elements.
__device__ Range<F> finite_range(const void* x, i64 chunk) {
  Range<F> range = range_of_nothing();
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    const F value = load_element(x, chunk * kChunk + i);
    if (formats::is_finite(value)) range = join(range, Range<F>{-value, value});
  }
  return range;
}

// The group of a range, whose finite elements are all of it where `finite`.
__device__ __forceinline__ Group group_of(const LinearCommon& common, i64 index, const Range<F>& range,
                                          bool finite, bool store) {
  Group group = make_params(common, index, -range.low, range.high, store);
  if constexpr (kFast) {
    const float least = round_half_even(quotient(-range.low, group.scale, group.reciprocal));
    const float most = round_half_even(quotient(range.high, group.scale, group.reciprocal));
    // Quotients may be large where a given global scale is.
    if (!finite || (kHasGlobalScale && !(max(range.low, range.high) < group.limit)))
      group.limit = 0;
    else if (group.limit > 0 && least >= static_cast<float>(common.q_min - group.zero_point) &&
             most <= static_cast<float>(common.q_max - group.zero_point))
      group.limit = kNoClamp;
  }
  return group;
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
    if constexpr (kFake) {
      if (group.group.limit == kNoClamp)
        fake_quantize_chunk<false>(x, group, common, chunk);
      else
        fake_quantize_chunk<true>(x, group, common, chunk);
      return true;
    }
    const auto codes = group.group.limit == kNoClamp ? quantize_chunk<kBits, false>(x, group, common)
                                                     : quantize_chunk<kBits, true>(x, group, common);
    if constexpr (kBlockBatch > 0)  // measured: where lanes share a group, caching is faster
      codes.store_once(common.data.codes, chunk);
    else
      codes.store(common.data.codes, chunk);
    return true;
  }
  return false;
}
__device__ __forceinline__ void quantize_slow(const LinearCommon& common, i64 chunk, const Group& group) {
  run_slow<kOp, kBits>(common, chunk * kChunk, kChunk, [&](int) { return group; });
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

// Chunk number `own` of a span; beyond its end zeros, see above.
__device__ __forceinline__ Chunk load_own(const LinearFusedArgs& args, const Span& span, int own) {
  if constexpr (kFake)
    return load_chunk_to_write<Chunk>(args.common.data.x, span.first + min(own, span.n - 1));
  return own < span.n ? load_chunk<Chunk>(args.common.data.x, span.first + own) : Chunk{};
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
    chunks[b] = group < args.num_groups ? load_own(args, span, own) : Chunk{};
  }
  ChunkRange ranges[kWarpBatch];
#pragma unroll
  for (int b = 0; b < kWarpBatch; ++b) ranges[b] = signed_range(chunks[b]);
  for (int mask = 1; mask < 1 << args.team; mask *= 2) {
#pragma unroll
    for (int b = 0; b < kWarpBatch; ++b) ranges[b] = join(ranges[b], shuffle_xor(ranges[b], mask));
  }
  // Lane b of a team works out the parameters of its group b. Teams of block floats may have fewer lanes than
  // groups: these take turns.
  const int turn = kByteScales ? 1 << args.team : kWarpBatch;
#pragma unroll 1
  for (int first = 0; first < kWarpBatch; first += turn) {
    const int mine = first + own;
    Range<F> range = unpack(ranges[0]);
#pragma unroll
    for (int b = 1; b < kWarpBatch; ++b)
      if (mine == b) range = unpack(ranges[b]);
    const bool finite = is_finite(range);
    if (__any_sync(kAllLanes, !finite)) {
#pragma unroll 1
      for (int b = 0; b < kWarpBatch; ++b) {
        const int number = first_group + b * teams;
        const Span span = span_of(args, min(number, args.num_groups - 1));
        Range<F> r = range_of_nothing();
        if (number < args.num_groups && own < span.n) r = finite_range(args.common.data.x, span.first + own);
        for (int mask = 1; mask < 1 << args.team; mask *= 2) r = join(r, shuffle_xor(r, mask));
        if (mine == b) range = r;
      }
    }
    Group group{};
    const int own_group = first_group + mine * teams;
    if (mine < kWarpBatch && own_group < args.num_groups)
      group = group_of(args.common, own_group, range, finite, true);
    u32 slow = 0;
#pragma unroll
    for (int b = 0; b < kWarpBatch; ++b) {
      if (kByteScales && (b < first || b >= first + turn)) continue;
      const OneGroup shared(args.common, shuffle(group, team_begin + b - first));
      if (numbers[b] >= 0 && !quantize_fast(args.common, chunks[b], numbers[b], shared)) slow |= 1u << b;
    }
    if (__any_sync(kAllLanes, slow != 0)) {
#pragma unroll 1
      for (int b = first; b < min(kWarpBatch, first + turn); ++b) {
        const Group shared = shuffle(group, team_begin + b - first);
        const Span span = span_of(args, min(first_group + b * teams, args.num_groups - 1));
        if (slow >> b & 1) quantize_slow(args.common, span.first + own, shared);
      }
    }
  }
}

// A block, of a power of two of warps, has a group of at most `batch` chunks a thread.
template <int batch>
__device__ __forceinline__ void quantize_in_block(const LinearFusedArgs& args) {
  __shared__ Range<F> warp_ranges[kWarps];
  const int number = static_cast<int>(blockIdx.x);
  if (number >= args.num_groups) return;
  const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const Span span = span_of(args, number);

  Chunk chunks[batch];
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int c = b * threads + thread;
    chunks[b] = load_own(args, span, c);
  }
  ChunkRange joined = signed_range(chunks[0]);
#pragma unroll
  for (int b = 1; b < batch; ++b) joined = join(joined, signed_range(chunks[b]));
  Range<F> range = unpack(joined);
  const bool finite = is_finite(range);
  if (!finite) {
    range = range_of_nothing();
#pragma unroll 1
    for (int c = thread; c < span.n; c += threads)
      range = join(range, finite_range(args.common.data.x, span.first + c));
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  if (lane == 0) warp_ranges[thread / 32] = range;
  const bool all_finite = __syncthreads_or(!finite) == 0;
  range = warp_ranges[lane & (warps - 1)];
  for (int mask = warps / 2; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  Group own_group;
  if (kFake && args.common.observer.min != nullptr) {
    __shared__ Group observed;
    if (thread == 0) observed = group_of(args.common, number, range, all_finite, true);
    __syncthreads();
    own_group = observed;
  } else {  // worked out by all threads, which saves a barrier
    own_group = group_of(args.common, number, range, all_finite, thread == 0);
  }
  const OneGroup group(args.common, own_group);
  u32 slow = 0;
#pragma unroll
  for (int b = 0; b < batch; ++b) {
    const int c = b * threads + thread;
    if (c < span.n && !quantize_fast(args.common, chunks[b], span.first + c, group)) slow |= 1u << b;
  }
#pragma unroll 1
  for (int b = 0; b < batch; ++b)
    if (slow >> b & 1) quantize_slow(args.common, span.first + b * threads + thread, own_group);
}

// Of a multiprocessor. Those of block floats, which take turns, would spill with more.
constexpr int kMinBlocks = !kFast || kBlockBatch == 8 || kByteScales ? 2 : kFake ? 3 : 4;

extern "C" __global__ void __launch_bounds__(kLinearThreads, kMinBlocks)
    HALFBYTE_KERNEL(const __grid_constant__ LinearFusedArgs args) {
  load_bins();
  if (blockIdx.x == 0 && threadIdx.x == 0) store_global_scale(args.common);
  if constexpr (kFake) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && args.common.observer.num_batches != nullptr)
      ++*args.common.observer.num_batches;
  }
  if constexpr (kBlockBatch == 0)
    quantize_in_warp(args);
  else
    quantize_in_block<kBlockBatch>(args);
}

}  // namespace halfbyte::device
