// affine_qdq_backward of rows of whole groups of 16, 32, ... 1024 elements: gradients of scales and biases in
// one pass over dy. A thread has kAffineBatch chunks of 8 elements, 32 apart, so that loads of a warp are
// contiguous; all are on their way before the first is used. Both sums of a chunk are worked out by its
// thread; a first exchange leaves one of them to each of two lanes, so that all levels above cost as much as
// one sum.
#include "ops/affine_qdq/affine_backward.cuh"

namespace halfbyte::device {

constexpr int kChunk = 8, kBatch = kAffineBatch, kWarps = kAffineThreads / 32;
using Chunk = ChunkOf<Element, kChunk>;
using Codes = Select<kBits == 2 || kBits == 4, u32, u64>;

// Those of a thread, number `first` and 32, 64, ... after it; `chunk`: their numbers, of what exists. Returns
// how many bits are before them in their codes.
template <int kChunkBits, class At>
__device__ __forceinline__ int load_aligned(const AffineBackwardArgs& args, i64 num_bytes, u32 first,
                                            const At& chunk, Codes (&codes)[kBatch]) {
  if constexpr (is_word(kChunkBits)) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      codes[b] = static_cast<Codes>(load_codes<kChunkBits>(args.codes, chunk(b), num_bytes));
    return 0;
  } else {
    return load_words<kChunkBits>(args.codes, first, num_bytes, codes);
  }
}

// Of q * dy in even lanes, of dy in odd ones: over two chunks.
__device__ __forceinline__ float chunk_sums(const Chunk& dy, Codes codes) {
  constexpr u32 kMask = (1u << kBits) - 1;
  float plain[kChunk], products[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const auto code = static_cast<u32>(codes >> (kBits * i));
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
  const auto chunk = [&](int b) {
    return min<u32>(first + b * 32, args.num_chunks - 1);  // behind the end the last again, for nothing
  };
  Chunk dy[kBatch];
  Codes codes[kBatch];
  int before = 0;  // bits before the chunks in their codes
  if (reinterpret_cast<u64>(args.common.codes) % 8 == 0) {
    before = load_aligned<kChunk * kBits>(args.common, args.code_bytes, first, chunk, codes);
  } else {  // at any address, in no more registers
#pragma unroll
    for (int b = 0; b < kBatch; ++b) codes[b] = 0;
#pragma unroll 1
    for (int i = 0; i < kBits; ++i) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        codes[b] |= static_cast<Codes>(args.common.codes[static_cast<i64>(chunk(b)) * kBits + i]) << (8 * i);
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) dy[b] = load_chunk<Chunk>(args.common.dy, chunk(b));
  // The sums that a team has: number j is that of its group j. Each lane finishes one, or several `half`
  // apart.
  const int team = 1 << args.team, half = team / 2, own = lane & (team - 1);
  const int num_sums = kBatch >> args.merge, teams = 32 >> args.team;
  const i64 first_group = static_cast<i64>(warp) * (num_sums * teams) + (lane >> args.team);
  float sums[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) sums[b] = chunk_sums(dy[b], codes[b] >> before);
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
