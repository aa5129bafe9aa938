// What the kernels of `observe` share: ranges of finite elements, what blocks leave to each other, the state.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/observe/observe_args.h"

namespace halfbyte::device {

using F = Element::Compute;
using Memory = Element::Memory;

constexpr int kThreads = kObserveThreads, kWarps = kThreads / 32;
constexpr int kChunk = 16 / sizeof(Memory);
using Chunk = ChunkOf<Element, kChunk>;

// ---- Elements that are not finite: found in the range, which they leave without bounds, and looked for
// again.

struct NonFinite {
  u32 count = 0;
  u64 first_key = 0;

  __device__ __forceinline__ void add(i64 index) {
    const u64 key = ~static_cast<u64>(index);
    first_key = max(first_key, key);
    ++count;
  }
  __device__ __forceinline__ void report(QuantizeCounts* counts) const {
    if (count == 0) return;
    atomic_add(&counts->num_nonfinite, count);
    atomic_max(&counts->first_nonfinite_key, first_key);
  }
};

__device__ __forceinline__ void take_finite(const void* x, i64 index, Range<F>& range, NonFinite& found) {
  const F value = load(Element(), static_cast<const Memory*>(x)[index]);
  if (formats::is_finite(value))
    range = join(range, Range<F>{-value, value});
  else
    found.add(index);
}
// Of n elements from number `first` on.
__device__ __forceinline__ Range<F> finite_range(const void* x, i64 first, int n, NonFinite& found) {
  Range<F> range = no_range<F>();
#pragma unroll 1
  for (int i = 0; i < n; ++i) take_finite(x, first + i, range, found);
  return range;
}

// ---- The state

// The range of finite values of a batch; no_range() where there are none. -0 becomes +0.
__device__ __forceinline__ Seen<F> seen_of(const Range<F>& range) { return {-range.low + 0, range.high + 0}; }

// As it was before the batch.
__device__ __forceinline__ Seen<F> state_of(const ObserveState& state, i64 group) {
  return {load_early(static_cast<const F*>(state.min) + group),
          load_early(static_cast<const F*>(state.max) + group)};
}
__device__ __forceinline__ void take_up(const ObserveState& state, i64 group, const Seen<F>& before,
                                        const Range<F>& range, double history) {
  const Seen<F> now = observed(before, seen_of(range), history);
  static_cast<F*>(state.min)[group] = now.min;
  static_cast<F*>(state.max)[group] = now.max;
}

// ---- What blocks leave to each other

__device__ __forceinline__ bool is_empty(const Range<F>& range) { return !(range.high >= -Float<F>::kMax); }
__device__ __forceinline__ void leave(RangeKeys* keys, const Range<F>& range) {
  if (is_empty(range)) return;
  atomic_max(&keys->low, order_key(static_cast<double>(range.low)));
  atomic_max(&keys->high, order_key(static_cast<double>(range.high)));
}
// As all blocks left them, after the last has arrived.
__device__ __forceinline__ Range<F> left(const RangeKeys* keys) {
  u64 low, high;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(low) : "l"(&keys->low) : "memory");
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(high) : "l"(&keys->high) : "memory");
  if (low == 0) return no_range<F>();
  return {static_cast<F>(from_order_key(low)), static_cast<F>(from_order_key(high))};
}
// The range of a whole group. `before`: its state, loaded before the elements, so that it need not be waited
// for.
__device__ __forceinline__ void finish(const ObserveCommon& common, i64 group, const Seen<F>& before,
                                       const Range<F>& range) {
  if (common.leaves_ranges)
    leave(&common.join.ranges[group], range);
  else
    take_up(common.state, group, before, range, common.state.history);
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

// The range of a warp; all lanes get it.
__device__ __forceinline__ Range<F> warp_range(Range<F> range) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  return range;
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
