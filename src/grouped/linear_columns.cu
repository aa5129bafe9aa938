// quantize_linear, dequantize_linear, quantize_linear_backward and fake_quantize of contiguous tensors whose
// scales differ from column to column: channels along the last axis, groups along another. A thread has a
// chunk of columns, whose scales it loads once, and kLinearRows rows.
#include "grouped/linear.cuh"

namespace halfbyte::device {

constexpr int kChunk = linear_columns_chunk(sizeof(Memory), kMask);
constexpr int kBatch = kOp == LinearOp::backward ? (kFast ? 2 : 1) : 4;  // rows on their way at a time

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    HALFBYTE_KERNEL(const __grid_constant__ LinearColumnsArgs args) {
  load_bins();
  const auto row_chunks = static_cast<u32>(args.columns / kChunk);
  const auto item = static_cast<u32>(block_index() * kLinearThreads + threadIdx.x);
  const u32 row_item = item / row_chunks, column = item - row_item * row_chunks;
  const u32 band = row_item / static_cast<u32>(args.pieces);
  const int piece = static_cast<int>(row_item - band * static_cast<u32>(args.pieces));
  if (band >= args.num_bands) return;
  const u32 outer = band / static_cast<u32>(args.bands_per_axis);
  const i64 in_axis =
      (band - outer * static_cast<u32>(args.bands_per_axis)) * args.group;  // first row of the band
  const i64 row = outer * args.axis + in_axis;
  const i64 left = min(args.group, args.axis - in_axis) - static_cast<i64>(piece) * kLinearRows;
  if (left <= 0) return;
  const int rows = static_cast<int>(min<i64>(left, kLinearRows));

  ManyGroups<kChunk> groups;
  const i64 first_scale = static_cast<i64>(band) * args.columns + column * kChunk;
  Loaded loaded[kChunk];
  if constexpr (kFast) {
    i64 scales[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) scales[i] = first_scale + i;
    load_parameters(args.common, scales, loaded);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (!kFast) loaded[i] = load_parameters(args.common, first_scale + i);  // takes fewer registers
    const Group group = make_group(args.common, loaded[i], [&] { return piece == 0; });
    groups.template set<kBits>(args.common, i, group, kOp != LinearOp::dequantize);
  }
  const i64 stride = row_chunks;  // of rows, in chunks
  const i64 first = (row + static_cast<i64>(piece) * kLinearRows) * stride + column;
#pragma unroll 1
  for (int step = 0; step < rows; step += kBatch) {
    Work<kOp, kBits, kChunk> work[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) work[b].load(args.common.data, first + min(step + b, rows - 1) * stride);
    u32 slow = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (step + b < rows && !work[b].finish(args.common, first + (step + b) * stride, groups))
        slow |= 1u << b;
    if constexpr (kMayBeSlow<kOp>) {
#pragma unroll 1
      for (int b = 0; b < kBatch; ++b)
        if (slow >> b & 1)
          run_slow<kOp, kBits>(args.common, (first + (step + b) * stride) * kChunk, kChunk, [&](int i) {
            return load_group(args.common, first_scale + i, [] { return false; });
          });
    }
  }
}

}  // namespace halfbyte::device
