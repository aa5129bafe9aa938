// fake_quantize_learned_backward of any groups: a warp has kLsqPieceElements of one, 32 at a time.
#include "ops/learned_scale/lsq.cuh"

namespace halfbyte::device {

constexpr int kSteps = kLsqPieceElements / 32;

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    lsq_elements(const __grid_constant__ LsqElementsArgs args) {
  using Index = Select<kWide, i64, u32>;  // 32-bit divisions are several times as fast
  const auto item = static_cast<Index>(block_index() * (kLinearThreads / 32) + threadIdx.x / 32);
  const Index group = item / static_cast<Index>(args.common.pieces);
  const Index piece = item - group * static_cast<Index>(args.common.pieces);
  if (group >= args.common.num_groups) return;  // a warp as a whole
  const Index axis_group = group / static_cast<Index>(args.groups_inner);
  const Index i = group - axis_group * static_cast<Index>(args.groups_inner);
  const Index o = axis_group / static_cast<Index>(args.groups_axis);
  const i64 a = static_cast<i64>(axis_group - o * static_cast<Index>(args.groups_axis)) * args.group_axis;
  const auto group_axis = static_cast<Index>(min(args.group_axis, args.axis - a));
  const auto group_inner = static_cast<Index>(args.group_inner);
  const i64 size = args.group_outer * group_axis * args.group_inner;
  const i64 base = (o * args.axis + a) * args.inner + i, begin = static_cast<i64>(piece) * kLsqPieceElements;
  const int lane = threadIdx.x % 32;

  Sums totals{};
  if (begin < size) {
    const Group parameters = load_group(args.common.linear, group, [&] { return piece == 0 && lane == 0; });
    TreeSum<5> trees[kSums];
    static_assert(kSteps == 32);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      Sums terms{};
      const i64 k = begin + step * 32 + lane;
      if (k < size) {
        const Index row = static_cast<Index>(k) / group_inner,
                    in_row = static_cast<Index>(k) - row * group_inner;
        const Index in_outer = row / group_axis, in_axis = row - in_outer * group_axis;
        terms = run_element(args.common.linear, parameters,
                            base + (in_outer * args.axis + in_axis) * args.inner + in_row);
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) trees[s].add(lane_sum(terms.sum[s], 1, 32), step);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) totals.sum[s] = trees[s].total();
  }
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) store_piece(args.common, group, piece, s, totals.sum[s]);
  }
  wait_for_earlier();
}

}  // namespace halfbyte::device
