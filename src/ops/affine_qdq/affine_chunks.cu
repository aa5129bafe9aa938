// affine_qdq_backward of rows of whole groups of 16, 32, ... 1024 elements: gradients of scales and biases in
// one pass over dy. A thread has kAffineBatch chunks of 8 elements, 32 apart, so that loads of a warp are
// contiguous; all are on their way before the first is used. Both sums of a chunk are worked out by its
// thread; a first exchange leaves one of them to each of two lanes, so that all levels above cost as much as
// one sum.
#include "ops/affine_qdq/affine_backward.cuh"

namespace halfbyte::device {

constexpr int kChunk = 8, kBatch = kAffineBatch, kWarps = kAffineThreads / 32;
using Chunk = ChunkOf<Element, kChunk>;

// Of q * dy in even lanes, of dy in odd ones: over two chunks.
__device__ __forceinline__ float chunk_sums(const Chunk& dy, u64 codes) {
  constexpr u32 kMask = (1u << kBits) - 1;
  float plain[kChunk], products[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const u32 code = kBits == 4 ? static_cast<u32>(codes) >> (4 * i) : static_cast<u32>(codes >> (kBits * i));
    plain[i] = dy[i];
    products[i] = __fmul_rn(__fsub_rn(above_2_23(code & kMask), 0x1p23f), plain[i]);
  }
  return fold_sums(tree_sum(products), tree_sum(plain), 1);
}

extern "C" __global__ void __launch_bounds__(kAffineThreads, sizeof(Memory) == 2 ? 4 : 3)
    affine_chunks(const __grid_constant__ AffineChunksArgs args) {
  const int lane = lane_index();
  const u32 warp = static_cast<u32>(block_index()) * kWarps + threadIdx.x / 32;
  const u32 first = warp * (32 * kBatch) + lane;
  Chunk dy[kBatch];
  u64 codes[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const u32 chunk = min<u32>(first + b * 32, args.num_chunks - 1);  // the last again, for nothing
    dy[b] = load_chunk<Chunk>(args.common.dy, chunk);
    codes[b] = load_codes<kChunk * kBits>(args.common.codes, chunk, args.code_bytes);
  }
  // The sums that a team has: number j is that of its group j. Each lane finishes one, or several `half`
  // apart.
  const int team = 1 << args.team, half = team / 2, own = lane & (team - 1);
  const int num_sums = kBatch >> args.merge, teams = 32 >> args.team;
  const i64 first_group = static_cast<i64>(warp) * (num_sums * teams) + (lane >> args.team);
  float sums[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) sums[b] = chunk_sums(dy[b], codes[b]);
  for (int mask = 2; mask < team; mask *= 2) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) sums[b] = sums[b] + shuffle_xor(sums[b], mask);
  }
  if (args.merge > 0) {
    sums[0] = sums[0] + sums[1];
    sums[1] = sums[2] + sums[3];
    if (args.merge > 1) sums[0] = sums[0] + sums[1];
  }
#pragma unroll 1
  for (int j = own >> 1; j < num_sums; j += half) {
    const i64 group = first_group + j * teams;
    if (group >= args.num_groups) break;
    float sum = sums[0];
#pragma unroll
    for (int b = 1; b < kBatch; ++b)
      if (j == b) sum = sums[b];
    finish(args.common, own % 2 != 0, group, sum);
  }
}

}  // namespace halfbyte::device
