// What the kernels of `observe` share: the state, what blocks leave to each other, the ranges of blocks.
#pragma once

#include "grouped/ranges.cuh"
#include "ops/observe/observe_args.h"

namespace halfbyte::device {

constexpr int kThreads = kObserveThreads, kWarps = kThreads / 32;
constexpr int kChunk = 16 / sizeof(Memory);
using Chunk = ChunkOf<Element, kChunk>;

// ---- The state

// The range of finite values of a batch; no_range() where there are none. -0 becomes +0.
__device__ __forceinline__ Seen<F> seen_of(const Range<F>& range) { return {-range.low + 0, range.high + 0}; }

// As it was before the batch.
__device__ __forceinline__ Seen<F> state_of(const ObserveState& state, i64 group) {
  return {load_early(static_cast<const F*>(state.min) + group),
          load_early(static_cast<const F*>(state.max) + group)};
}
__device__ __forceinline__ void store_state(const ObserveState& state, i64 group, const Seen<F>& now) {
  static_cast<F*>(state.min)[group] = now.min;
  static_cast<F*>(state.max)[group] = now.max;
}

// ---- What blocks leave to each other

// The range of a whole group. `before`: its state, loaded before the elements, so that it need not be waited
// for.
__device__ __forceinline__ void finish(const ObserveCommon& common, i64 group, const Seen<F>& before,
                                       const Range<F>& range) {
  if (common.leaves_ranges)
    leave(&common.join.ranges[group], range);
  else
    store_state(common.state, group, observed(before, seen_of(range), common.state.history));
}
__device__ __forceinline__ void finish(const ObserveCommon& common, i64 group, const Range<F>& range) {
  finish(common, group, state_of(common.state, group), range);
}
// Where kernels hand ranges to the state, one thread counts the batch.
__device__ __forceinline__ void count_batch(const ObserveCommon& common) {
  if (!common.leaves_ranges && blockIdx.x == 0 && threadIdx.x == 0) ++*common.state.num_batches;
}
// Whether this is the last of n to arrive, so that it sees what the others left. Called by one thread; others
// that left something must have called __threadfence() and __syncthreads() before.
__device__ __forceinline__ bool is_last(u32* arrived, i64 n) {
  u32 before;
  wait_for_earlier();
  __threadfence();
  asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  __threadfence();
  return before == static_cast<u32>(n - 1);
}

// The range of a block; the first thread gets it.
__device__ __forceinline__ Range<F> block_range(Range<F> range) {
  __shared__ Range<F> warp_ranges[kWarps];
  range = warp_range(range);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (warps == 1) return range;
  if (threadIdx.x % 32 == 0) warp_ranges[threadIdx.x / 32] = range;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < warps; ++i) range = join(range, warp_ranges[i]);
  return range;
}

// The range of the chunks [begin, end) of a thread: number begin, begin + stride, ...; `at(k)`: where it
// lies.
template <class At>
__device__ __forceinline__ Range<F> chunks_range(const ObserveCommon& common, i64 begin, i64 end, int stride,
                                                 const At& at) {
  constexpr int kBatch = 8;  // loads in flight
  Range<F> range = no_range<F>();
  if (begin >= end) return range;
  for (i64 k = begin; k < end; k += kBatch * stride) {
    Chunk chunks[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      chunks[b] = load_chunk<Chunk>(common.x, at(min(k + b * stride, end - 1)));
    auto joined = signed_range(chunks[0]);
#pragma unroll
    for (int b = 1; b < kBatch; ++b) joined = join(joined, signed_range(chunks[b]));
    range = join(range, unpack(joined));
  }
  if (!is_finite(range)) {
    NonFinite found;
    range = no_range<F>();
#pragma unroll 1
    for (i64 k = begin; k < end; k += stride)
      range = join(range, finite_range(common.x, at(k) * kChunk, kChunk, found));
    found.report(common.counts);
  }
  return range;
}

}  // namespace halfbyte::device
