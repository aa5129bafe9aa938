// observe, few large groups of whole chunks: blocks have parts of them, join what they found by integer
// atomics, whose order does not matter, and the last one of a group hands it to the state.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    observe_parts(const __grid_constant__ ObservePartsArgs args) {
  count_batch(args.common);
  const u32 block = blockIdx.x, group = block / args.parts, row = group / args.per_row;
  const i64 in_row = (group - row * args.per_row) * args.group, base = row * args.row + in_row;
  const i64 run = min(args.run, args.row - in_row), n = kRuns ? args.runs * args.run : run;
  const i64 begin = (block - group * args.parts) * args.per_part, end = min(n, begin + args.per_part);
  Seen<F> before;
  if (threadIdx.x == 0) before = state_of(args.common.state, group);
  Range<F> range;
  if constexpr (kRuns) {
    range = chunks_range(args.common, begin + threadIdx.x, end, kThreads, [&](i64 k) {
      const i64 o = static_cast<i64>(args.run_divider.divide(static_cast<u32>(k)));
      return base + o * args.run_stride + (k - o * args.run);
    });
  } else {
    range = chunks_range(args.common, begin + threadIdx.x, end, kThreads, [&](i64 k) { return base + k; });
  }
  if (block == 0 && threadIdx.x == 0 && args.tail > 0) {
    NonFinite found;
    range = join(range, finite_range(args.common.x, n * kChunk, args.tail, found));
    found.report(args.common.counts);
  }
  range = block_range(range);
  wait_for_earlier();
  if (threadIdx.x != 0) return;
  if (args.parts > 1) {
    leave(&args.common.join.ranges[group], range);
    if (args.common.leaves_ranges || !is_last(&args.common.join.arrived[group], args.parts)) return;
    range = left(&args.common.join.ranges[group]);
  }
  finish(args.common, group, before, range);
}

}  // namespace halfbyte::device
