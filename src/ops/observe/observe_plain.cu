// observe with plain parameters (docs/kernels.md): a block has a group at a time.
#include "grouped/groups_args.h"
#include "grouped/ranges.cuh"

namespace halfbyte::device {

constexpr int kWarps = kThreads / 32;

extern "C" __global__ void __launch_bounds__(kThreads)
    halfbyte_observe(const Memory* x, F* state_min, F* state_max, i64* num_batches, QuantizeCounts* counts,
                     double history, i64 outer, i64 axis, i64 inner, i64 group_outer, i64 group_axis,
                     i64 group_inner) {
  __shared__ F lows[kWarps], highs[kWarps];
  const i64 groups_axis = (axis + group_axis - 1) / group_axis;
  const i64 groups_outer = group_outer == 1 ? outer : 1, groups_inner = group_inner == 1 ? inner : 1;
  const Groups groups = {groups_outer * groups_axis * groups_inner,
                         groups_axis,
                         groups_inner,
                         axis,
                         group_outer,
                         group_axis,
                         group_inner,
                         {axis * inner, inner, 1}};
  if (outer * axis * inner == 0) return;  // nothing was seen
  if (blockIdx.x == 0 && threadIdx.x == 0) ++*num_batches;
  for (i64 number = blockIdx.x; number < groups.num_groups; number += gridDim.x) {
    const Groups::Group group = groups.group<true>(number);
    Range<F> range = no_range<F>();
    NonFinite found;
#pragma unroll 1
    for (i64 k = threadIdx.x; k < group.size; k += kThreads)
      take_finite(x, group.begin + groups.offset<true>(group, k), range, found);
    found.report(counts);
    range = warp_range(range);
    if (threadIdx.x % 32 == 0) {
      lows[threadIdx.x / 32] = range.low;
      highs[threadIdx.x / 32] = range.high;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 1; i < kWarps; ++i) range = join(range, Range<F>{lows[i], highs[i]});
      const Seen<F> seen = observed(Seen<F>{state_min[number], state_max[number]},
                                    Seen<F>{-range.low + 0, range.high + 0}, history);
      state_min[number] = seen.min;
      state_max[number] = seen.max;
    }
    __syncthreads();
  }
}

}  // namespace halfbyte::device
