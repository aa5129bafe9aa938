// quantize_linear, dequantize_linear and quantize_linear_backward of contiguous tensors whose scales belong to whole
// chunks. A thread has kBatch chunks, 32 apart, so that loads and stores of a warp are contiguous; all are on
// their way before the first is used.
#include "ops/quantize_linear/linear.cuh"

namespace halfbyte::device {

constexpr int kBatch = linear_batch(kOp);

struct Place {
  i64 scale;
  bool first;  // the chunk is the first of its group
};
__device__ __forceinline__ Place place_of(const LinearChunksArgs& args, i64 chunk) {
  if (args.num_chunks <= 0x7FFFFFFF) {
    const u32 c = static_cast<u32>(chunk), outer = args.outer_divider.divide(c);
    const u32 rest = c - outer * args.outer_divider.divisor, in = args.scale_divider.divide(rest);
    return {outer * args.scale_outer + in,
            rest == in * args.scale_divider.divisor && (args.scale_outer != 0 || outer == 0)};
  }
  const i64 outer = chunk / args.per_outer, rest = chunk - outer * args.per_outer, in = rest / args.per_scale;
  return {outer * args.scale_outer + in, rest == in * args.per_scale && (args.scale_outer != 0 || outer == 0)};
}

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    linear_chunks(const __grid_constant__ LinearChunksArgs args) {
  const i64 warp = block_index() * (kLinearThreads / 32) + threadIdx.x / 32;
  const i64 first = warp * (32 * kBatch) + threadIdx.x % 32;
  Work<kOp, kBits> work[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) work[b].load(args.common.data, min(first + b * 32, args.num_chunks - 1));
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const i64 chunk = first + b * 32;
    if (chunk >= args.num_chunks) return;
    const Place place = place_of(args, chunk);
    const OneGroup group = {load_group(args.common, place.scale, [&] { return place.first; })};
    work[b].finish(args.common, chunk, group);
  }
}

}  // namespace halfbyte::device
