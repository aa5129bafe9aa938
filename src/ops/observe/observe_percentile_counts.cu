// observe, percentiles of few long groups: blocks share one; observe_percentile_pick takes what they counted.
#include "ops/observe/range_counts.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_percentile_counts(const __grid_constant__ PercentileCountsArgs args) {
  using Index = Select<kWide, i64, u32>;
  __shared__ ByteCounts counts;
  const SearchCommon& common = args.common;
  const auto block = static_cast<u32>(block_index());
  const u32 number = block / static_cast<u32>(args.splits),
            split = block - number * static_cast<u32>(args.splits);
  if (number >= common.groups.num_groups) return;
  const Groups::Group group = common.groups.group<true>(number);
  const i64 begin = split * args.per_block, end = min(group.size, begin + args.per_block);
  if (begin >= end) return;  // a short group
  const PercentileState state = args.states[number];
  clear(counts);
  __syncthreads();
  count_bytes(counts, common, group, static_cast<Index>(begin), static_cast<Index>(end), args.pass,
              state.prefixes[0], state.prefixes[1]);
  __syncthreads();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const u32 count = total(counts, side, threadIdx.x);
    if (count != 0) atomic_add(&args.counts[number].of_byte[side][threadIdx.x], count);
  }
}

}  // namespace halfbyte::device
