// fake_quantize_learned_backward of any groups: a warp has kLsqPieceElements of one, 32 at a time.
#include "ops/learned_scale/lsq.cuh"

namespace halfbyte::device {

constexpr int kSteps = kLsqPieceElements / 32;

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    lsq_elements(const __grid_constant__ LsqElementsArgs args) {
  using Index = Select<kWide, i64, u32>;  // 32-bit divisions are several times as fast
  const auto item = static_cast<Index>(block_index() * (kLinearThreads / 32) + threadIdx.x / 32);
  const Index number = item / static_cast<Index>(args.common.pieces);
  const Index piece = item - number * static_cast<Index>(args.common.pieces);
  if (number >= args.common.num_groups) return;  // a warp as a whole
  const Groups::Group group = args.groups.group<true>(number);
  const i64 begin = static_cast<i64>(piece) * kLsqPieceElements;
  const int lane = threadIdx.x % 32;

  Sums totals{};
  if (begin < group.size) {
    const Group parameters = load_group(args.common.linear, number, [&] { return piece == 0 && lane == 0; });
    TreeSum<5> trees[kSums];
    static_assert(kSteps == 32);
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      Sums terms{};
      const i64 k = begin + step * 32 + lane;
      if (k < group.size)
        terms = run_element(args.common.linear, parameters,
                            group.begin + args.groups.offset<true>(group, static_cast<Index>(k)));
#pragma unroll
      for (int s = 0; s < kSums; ++s) trees[s].add(lane_sum(terms.sum[s], 1, 32), step);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) totals.sum[s] = trees[s].total();
  }
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) store_piece(args.common, number, piece, s, totals.sum[s]);
  }
  wait_for_earlier();
}

}  // namespace halfbyte::device
