// quantize_linear, dequantize_linear, quantize_linear_backward and fake_quantize of contiguous tensors whose
// scales belong to whole chunks. A thread has kBatch chunks, 32 apart, so that loads and stores of a warp are
// contiguous; all are on their way before the first is used.
#include "grouped/linear.cuh"

namespace halfbyte::device {

constexpr int kChunk = linear_chunk(sizeof(Memory), kOp, kMask), kBatch = linear_batch(kOp);

// Of a multiprocessor; 0: as the compiler finds it. Without these bounds some kernels of fake quantization
// and gradients of f64 spill, and gradients of 16 bits take a few registers more than leave room for so many
// blocks.
constexpr bool kLearnedZero = kZeroType == ZeroType::f32 || kZeroType == ZeroType::f64;
constexpr bool kBounded = sizeof(Memory) == 2 && !kPackedZeros;
constexpr int kMinBlocks = kOp != LinearOp::backward ? (kFake ? 3 : 0)
                           : kBounded                ? (kLearnedZero ? 3 : 4)
                                                     : (kFake || !kFast ? 2 : 0);

// The number of the chunk's scale and of its zero point, and whether the chunk is the first of its group.
struct Place {
  u32 scale, zero;  // zero: zero_index_of(scale)
  bool first;
};
__device__ __forceinline__ Place place_of(const LinearChunksArgs& args, u32 chunk) {
  const u32 outer = args.outer_divider.divide(chunk), rest = chunk - outer * static_cast<u32>(args.per_outer),
            in = args.scale_divider.divide(rest);
  const auto scale_outer = static_cast<u32>(args.scale_outer), zero_outer = static_cast<u32>(args.zero_outer);
  return {outer * scale_outer + in, outer * zero_outer + in,
          rest == in * static_cast<u32>(args.per_scale) && (scale_outer != 0 || outer == 0)};
}

extern "C" __global__ void __launch_bounds__(kLinearThreads, kMinBlocks)
    HALFBYTE_KERNEL(const __grid_constant__ LinearChunksArgs args) {
  load_bins();
  const int warp = static_cast<int>(block_index()) * (kLinearThreads / 32) + threadIdx.x / 32;
  const int first = warp * (32 * kBatch) + threadIdx.x % 32, num_chunks = static_cast<int>(args.num_chunks);
  Work<kOp, kBits, kChunk> work[kBatch];
  Place places[kBatch];
  u32 scales[kBatch], zeros[kBatch];
  Loaded loaded[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int chunk = min(first + b * 32, num_chunks - 1);
    work[b].load(args.common.data, chunk);
    places[b] = place_of(args, chunk);
    scales[b] = places[b].scale;
    zeros[b] = places[b].zero;
  }
  load_parameters(args.common, scales, zeros, loaded);
  u32 slow = 0;
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int chunk = first + b * 32;
    if (chunk >= num_chunks) break;
    const OneGroup group(args.common, make_group(args.common, loaded[b], [&] { return places[b].first; }));
    if (!work[b].finish(args.common, chunk, group)) slow |= 1u << b;
  }
  if constexpr (kMayBeSlow<kOp>) {
#pragma unroll 1
    for (int b = 0; b < kBatch; ++b) {
      if (!(slow >> b & 1)) continue;
      const i64 chunk = first + b * 32;
      const Place place = place_of(args, chunk);
      Loaded again[1];
      load_parameters(args.common, {place.scale}, {place.zero}, again);
      const Group group = make_group(args.common, again[0], [] { return false; });
      run_slow<kOp, kBits>(args.common, chunk * kChunk, kChunk, [&](int) { return group; });
    }
  }
}

}  // namespace halfbyte::device
