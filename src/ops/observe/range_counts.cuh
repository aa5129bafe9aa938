// Percentiles of long groups: the keys of both ranks byte by byte, by counting elements that begin with what
// is known.
#pragma once

#include "ops/observe/range_percentile.cuh"

namespace halfbyte::device {

constexpr int kCopies = 4;  // of each counter, so that fewer lanes meet
struct ByteCounts {
  u32 of_byte[2][256][kCopies];
};

__device__ __forceinline__ void clear(ByteCounts& counts) {
  u32* const all = &counts.of_byte[0][0][0];
#pragma unroll
  for (int i = 0; i < 2 * 256 * kCopies; i += kThreads) all[i + threadIdx.x] = 0;
}
__device__ __forceinline__ u32 total(const ByteCounts& counts, int end, int byte) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) sum += counts.of_byte[end][byte][i];
  return sum;
}

// Of the elements [begin, end) of a group; fewer than 2^32. In the first pass one end stands for both.
template <class Index>
__device__ __forceinline__ void count_bytes(ByteCounts& counts, const SearchCommon& common,
                                            const Groups::Group& group, Index begin, Index end, int pass,
                                            u64 low, u64 high) {
  constexpr int kUnroll = 8;  // loads in flight
  const int shift = kKeyBits - 8 * (pass + 1);
  const u32 copy = threadIdx.x % kCopies;
  for (Index k = begin + threadIdx.x; k < end; k += kUnroll * kThreads) {
    Memory x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) x[u] = element_at(common, group, min(k + u * kThreads, end - 1));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Key key = key_of(x[u]);
      if (key == kNoKey || k + u * kThreads >= end) continue;
      const u64 known = static_cast<u64>(key) >> shift;
      const auto byte = static_cast<u32>(known & 0xFF);
      if (pass == 0) {
        atomicAdd(&counts.of_byte[0][byte][copy], 1u);
      } else {
        if (known >> 8 == low) atomicAdd(&counts.of_byte[0][byte][copy], 1u);
        if (known >> 8 == high) atomicAdd(&counts.of_byte[1][byte][copy], 1u);
      }
    }
  }
}

// What all threads of a block know after find_byte().
struct Found {
  u64 total, byte, rank;  // rank: among those with this byte
};
// Thread b has the count of byte b: the byte in which rank_of(total) lies, from 0. Nothing where the total is
// 0.
template <class RankOf>
__device__ __forceinline__ Found find_byte(u64 count, const RankOf& rank_of) {
  __shared__ u64 sums[kWarps];
  __shared__ Found found;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 end = count;  // of the counts up to this one
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u64 other = __shfl_up_sync(kAllLanes, end, distance);
    if (lane >= distance) end += other;
  }
  __syncthreads();  // all have read what was found before
  if (lane == 31) sums[warp] = end;
  __syncthreads();
  u64 total = 0;
#pragma unroll
  for (u32 i = 0; i < kWarps; ++i) {
    if (i == warp) end += total;
    total += sums[i];
  }
  if (total == 0) return {};
  const u64 rank = rank_of(total);
  if (end - count <= rank && rank < end) found = {total, threadIdx.x, rank - (end - count)};
  __syncthreads();
  return found;
}

// One pass: the next byte of both ends. `count(end)`: of byte threadIdx.x. False where the group has no
// finite value.
template <class Count>
__device__ __forceinline__ bool next_byte(PercentileState& state, int pass, double percentile,
                                          const Count& count) {
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const Found found = find_byte(count(pass == 0 ? 0 : end), [&](u64 total) {
      if (pass > 0) return state.ranks[end];
      const auto rank = static_cast<u64>(percentile_rank(percentile, static_cast<i64>(total)));
      return end == 0 ? total - rank : rank - 1;
    });
    if (found.total == 0) return false;
    state.ranks[end] = found.rank;
    state.prefixes[end] = state.prefixes[end] << 8 | found.byte;
  }
  return true;
}

}  // namespace halfbyte::device
