// observe, percentiles of few long groups: a block finds the next byte of both ends of a group.
#include "ops/observe/range_counts.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_percentile_pick(const __grid_constant__ PercentileCountsArgs args) {
  const i64 number = block_index();
  if (number >= args.common.groups.num_groups) return;
  PercentileCounts& counts = args.counts[number];
  PercentileState state = args.states[number];
  const bool found =
      next_byte(state, args.pass, args.percentile, [&](int end) { return counts.of_byte[end][threadIdx.x]; });
  if (!found) return;
#pragma unroll
  for (int end = 0; end < 2; ++end) counts.of_byte[end][threadIdx.x] = 0;  // for the next pass
  if (threadIdx.x != 0) return;
  args.states[number] = state;
  if (args.pass == kKeyBits / 8 - 1)
    store_range(&args.common.ranges[number], value_of(static_cast<Key>(state.prefixes[0])),
                value_of(static_cast<Key>(state.prefixes[1])));
}

}  // namespace halfbyte::device
