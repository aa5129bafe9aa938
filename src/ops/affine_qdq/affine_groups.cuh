// Gradients of any group: its warp takes 256 elements at a time, 32 side by side. Of the sums over lanes,
// each exchange halves how many a lane has, until it has one.
#pragma once

#include "ops/affine_qdq/affine_backward.cuh"

namespace halfbyte::device {

constexpr int kRows = 8, kStep = 32 * kRows;

__device__ __forceinline__ void run_group(const AffineGroupsArgs& args, i64 group) {
  const AffineShape& shape = args.shape;
  const int lane = lane_index();
  const i64 row = group / shape.groups_per_row;
  const i64 begin = (group - row * shape.groups_per_row) * shape.group_size;
  const i64 end = min(shape.cols, begin + shape.group_size);
  const u8* const codes = args.common.codes + row * shape.row_bytes;
  WarpSums<float> sums;
#pragma unroll 1
  for (i64 step = begin; step < end; step += kStep) {
    float products[kRows], plain[kRows], four[kRows / 2], two[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const i64 column = step + i * 32 + lane;
      plain[i] = products[i] = 0;
      if (column < end) {
        plain[i] = load_element(args.common.dy, row * shape.cols + column);
        products[i] = __fmul_rn(static_cast<float>(get_code(codes, column, kBits)), plain[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) products[i] = fold_sums(products[i], plain[i], 1);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) four[i] = fold_sums(products[2 * i], products[2 * i + 1], 2);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) two[i] = fold_sums(four[2 * i], four[2 * i + 1], 4);
    // Lanes have rows: their bits 1, 2, 3 are those of the number of the row.
    sums.add(lane_sum(lane_sum(fold_sums(two[0], two[1], 8), 16, 32), 2, 16));
  }
  const float sum = sums.total();
  if (lane < 2) finish(args.common, lane == 1, group, sum);
}

}  // namespace halfbyte::device
