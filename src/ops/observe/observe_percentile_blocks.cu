// observe, percentiles of many long groups: a block has one and reads it once for each byte of a key.
#include "ops/observe/range_counts.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_percentile_blocks(const __grid_constant__ PercentileGroupsArgs args) {
  __shared__ ByteCounts counts;
  const SearchCommon& common = args.common;
  const i64 number = block_index();
  if (number >= common.groups.num_groups) return;
  const Groups::Group group = common.groups.group<true>(number);
  PercentileState state{};
#pragma unroll 1
  for (int pass = 0; pass < kKeyBits / 8; ++pass) {
    clear(counts);
    __syncthreads();
    count_bytes(counts, common, group, 0u, static_cast<u32>(group.size), pass, state.prefixes[0],
                state.prefixes[1]);
    __syncthreads();
    const auto count = [&](int end) -> u64 { return total(counts, end, threadIdx.x); };
    if (!next_byte(state, pass, args.percentile, count)) return;
    __syncthreads();
  }
  if (threadIdx.x == 0)
    store_range(&common.ranges[number], value_of(static_cast<Key>(state.prefixes[0])),
                value_of(static_cast<Key>(state.prefixes[1])));
}

}  // namespace halfbyte::device
