// What kernels that find ranges share: elements that are not finite, and what blocks leave to each other.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/counts.h"
#include "formats/observer.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

using F = Element::Compute;  // what is computed in
using Memory = Element::Memory;

__device__ __forceinline__ F load_element(const void* x, i64 index) {
  return load(Element(), static_cast<const Memory*>(x)[index]);
}

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
  const F value = load_element(x, index);
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

// The range of a warp; all lanes get it.
__device__ __forceinline__ Range<F> warp_range(Range<F> range) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  return range;
}

// ---- What blocks leave to each other: joined by integer atomics, so that their order does not matter.

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

}  // namespace halfbyte::device
