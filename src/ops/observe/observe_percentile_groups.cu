// observe, percentiles of short groups: a warp or a block has the keys of a group in registers, and finds
// those of both ranks bit by bit, by counting what is below.
#include "ops/observe/range_percentile.cuh"

namespace halfbyte::device {

constexpr int kKeys = kTeamWarps == 1 ? kPercentileLanes : kPercentileBlock;  // of a thread
constexpr int kTeams = kWarps / kTeamWarps, kTeamThreads = 32 * kTeamWarps;

// The sum over the team, of which all get it. Called by all of it.
struct TeamSum {
  u32 (*sums)[kTeamWarps];  // two of them, by turns, in shared memory
  int turn = 0;

  __device__ __forceinline__ u32 operator()(u32 value) {
#if __CUDA_ARCH__ >= 800
    value = __reduce_add_sync(kAllLanes, value);
#else
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
#endif
    if constexpr (kTeamWarps > 1) {
      turn ^= 1;
      if (threadIdx.x % 32 == 0) sums[turn][threadIdx.x / 32] = value;
      __syncthreads();
      value = 0;
#pragma unroll
      for (int i = 0; i < kTeamWarps; ++i) value += sums[turn][i];
    }
    return value;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_percentile_groups(const __grid_constant__ PercentileGroupsArgs args) {
  __shared__ u32 sums[2][kTeamWarps];
  const SearchCommon& common = args.common;
  const i64 number = block_index() * kTeams + threadIdx.x / kTeamThreads;
  if (number >= common.groups.num_groups) return;  // a team as a whole
  const Groups::Group group = common.groups.group<true>(number);
  const auto n = static_cast<u32>(group.size), thread = threadIdx.x % kTeamThreads;
  TeamSum sum = {sums};
  Key keys[kKeys];
  u32 finite = 0;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    const u32 k = thread + j * kTeamThreads;
    keys[j] = k < n ? key_of(element_at(common, group, k)) : kNoKey;
    finite += keys[j] != kNoKey;
  }
  finite = sum(finite);
  if (finite == 0) return;
  const auto rank = static_cast<u32>(percentile_rank(args.percentile, finite));
  // The largest keys with no more than so many below them.
  const u32 below_low = finite - rank, below_high = rank - 1;
  Key low = 0, high = 0;
#pragma unroll 1
  for (int bit = kKeyBits - 1; bit >= 0; --bit) {
    const Key with_low = low | static_cast<Key>(static_cast<Key>(1) << bit);
    const Key with_high = high | static_cast<Key>(static_cast<Key>(1) << bit);
    u32 below = 0;  // two counts of at most 2^12
#pragma unroll
    for (int j = 0; j < kKeys; ++j)
      below += (keys[j] < with_low ? 1u : 0u) + (keys[j] < with_high ? 1u << 16 : 0u);
    below = sum(below);
    if ((below & 0xFFFF) <= below_low) low = with_low;
    if (below >> 16 <= below_high) high = with_high;
  }
  if (thread == 0) store_range(&common.ranges[number], value_of(low), value_of(high));
}

}  // namespace halfbyte::device
