// quantize_linear, dequantize_linear and quantize_linear_backward of contiguous tensors whose scales differ from column
// to column: channels along the last axis, groups along another. A thread has a chunk of columns, whose scales it
// loads once, and kLinearRows rows.
#include "ops/quantize_linear/linear.cuh"

namespace halfbyte::device {

constexpr int kBatch = kOp == LinearOp::backward ? 2 : 4;  // rows on their way at a time

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    linear_columns(const __grid_constant__ LinearColumnsArgs args) {
  const i64 row_chunks = args.columns / kChunk, item = block_index() * kLinearThreads + threadIdx.x;
  const i64 column = item % row_chunks, piece = item / row_chunks % args.pieces;
  const i64 band = item / row_chunks / args.pieces;
  if (band >= args.num_bands) return;
  const i64 in_axis = band % args.bands_per_axis * args.group;  // the first row of the band
  const i64 row = band / args.bands_per_axis * args.axis + in_axis;
  const i64 left = min(args.group, args.axis - in_axis) - piece * kLinearRows;
  if (left <= 0) return;
  const int rows = static_cast<int>(min<i64>(left, kLinearRows));

  ManyGroups groups;
  groups.first = band * args.columns + column * kChunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    groups.groups[i] = load_group(args.common, groups.first + i, [&] { return piece == 0; });
  const i64 first = (row + piece * kLinearRows) * row_chunks + column;
#pragma unroll 1
  for (int step = 0; step < rows; step += kBatch) {
    Work<kOp, kBits> work[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      work[b].load(args.common.data, first + min(step + b, rows - 1) * row_chunks);
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (step + b < rows) work[b].finish(args.common, first + (step + b) * row_chunks, groups);
  }
}

}  // namespace halfbyte::device
