// fake_quantize_learned_backward of tensors whose scales differ from column to column: channels along the
// last axis, groups along another. A thread has a chunk of columns and kLsqThreadRows rows; sums go over its
// rows, then over the warps of the block, which lie below each other and share the parameters of the columns.
#include "ops/learned_scale/lsq.cuh"

namespace halfbyte::device {

constexpr int kWarps = kLinearThreads / 32;
constexpr int kColumns = 32 * kChunk;  // of a block
// Where something of column i of lane l lies in shared memory.
constexpr int kStride = 32 + 32 / kChunk, kPlaces = kChunk * kStride;
__device__ __forceinline__ int place_of(int i, int lane) { return i * kStride + lane; }
using Chunk = ChunkOf<Element, kChunk>;

extern "C" __global__ void __launch_bounds__(kLinearThreads, 3)
    lsq_columns(const __grid_constant__ LsqColumnsArgs args) {
  __shared__ F parts[kSums][kWarps][kPlaces];
  __shared__ float scales[kPlaces], reciprocals[kPlaces], limits[kPlaces], lows[kPlaces], highs[kPlaces];
  const LinearCommon& common = args.common.linear;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto block = static_cast<u32>(block_index()), across = static_cast<u32>((args.row + 31) / 32);
  const u32 piece_item = block / across, tile = block - piece_item * across;
  const u32 band = piece_item / static_cast<u32>(args.common.pieces);
  const u32 piece = piece_item - band * static_cast<u32>(args.common.pieces);
  const i64 bands = args.common.num_groups / args.common.band_groups;
  if (band >= bands) return;  // a block as a whole
  load_bins();
  const u32 outer = band / static_cast<u32>(args.bands_per_axis);
  const i64 in_axis = (band - outer * static_cast<u32>(args.bands_per_axis)) * args.group;
  const i64 in_band =
      static_cast<i64>(piece) * kLsqPieceRows + warp * kLsqThreadRows;  // first row of the thread
  const i64 column = static_cast<i64>(tile) * 32 + lane;
  const int rows = column < args.row ? static_cast<int>(formats::clamp<i64>(
                                           min(args.group, args.axis - in_axis) - in_band, 0, kLsqThreadRows))
                                     : 0;
  const i64 first_chunk = (outer * args.axis + in_axis + in_band) * args.row + column;
  const i64 first_group =
      static_cast<i64>(band) * args.common.band_groups + static_cast<i64>(tile) * kColumns;
  const int num_groups =
      static_cast<int>(min<i64>(kColumns, (args.row - static_cast<i64>(tile) * 32) * kChunk));
  const auto store_sums = [&](int i, const Sums& sums) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) parts[s][warp][place_of(i, lane)] = sums.sum[s];
  };

  for (int i = threadIdx.x; i < num_groups; i += kLinearThreads) {
    const OneGroup group(common, load_group(common, first_group + i, [&] { return piece == 0; }));
    const int place = place_of(i % kChunk, i / kChunk);
    scales[place] = group.group.scale;
    reciprocals[place] = group.group.reciprocal;
    limits[place] = limit_of(group.group);
    lows[place] = group.low;
    highs[place] = group.high;
  }
  __syncthreads();

  bool exact = kFast;
  if (rows == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) store_sums(i, Sums{});
  } else if constexpr (kFast) {
    Chunk x[kLsqThreadRows], dy[kLsqThreadRows];
#pragma unroll
    for (int r = 0; r < kLsqThreadRows; ++r) {
      const i64 chunk = first_chunk + min(r, rows - 1) * args.row;
      x[r] = load_chunk<Chunk>(common.data.x, chunk);
      dy[r] = load_gradients<Chunk>(common, chunk);
    }
#pragma unroll
    for (int r = 0; r < kLsqThreadRows; ++r) exact = exact && !has_tiny(Element(), x[r].words);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int place = place_of(i, lane);
      Group group{};
      group.scale = scales[place];
      group.reciprocal = reciprocals[place];
      float scale_terms[kLsqThreadRows], zero_terms[kLsqThreadRows];
#pragma unroll
      for (int r = 0; r < kLsqThreadRows; ++r) {
        exact = exact && fabsf(x[r][i]) < limits[place];
        const FastTerms terms = fast_terms(x[r][i], dy[r][i], group, lows[place], highs[place]);
        scale_terms[r] = r < rows ? terms.scale : 0;
        zero_terms[r] = r < rows ? terms.zero : 0;
        mask_element(dy[r], i, terms.passes);
      }
      Sums sums = {tree_sum(scale_terms)};
      if constexpr (kSums == 2) sums.sum[1] = tree_sum(zero_terms);
      store_sums(i, sums);
    }
    if (exact) {
#pragma unroll
      for (int r = 0; r < kLsqThreadRows; ++r)
        if (r < rows) store_gradients(common, dy[r], first_chunk + r * args.row);
    }
  }
  if (!exact && rows > 0) {
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
      const Group group = load_group(common, first_group + lane * kChunk + i, [] { return false; });
      TreeSum<2> trees[kSums];
      static_assert(kLsqThreadRows == 4);
#pragma unroll 1
      for (int r = 0; r < kLsqThreadRows; ++r) {
        Sums terms{};
        if (r < rows) terms = run_element(common, group, (first_chunk + r * args.row) * kChunk + i);
#pragma unroll
        for (int s = 0; s < kSums; ++s) trees[s].add(terms.sum[s], r);
      }
      Sums sums;
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums.sum[s] = trees[s].total();
      store_sums(i, sums);
    }
  }

  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < kSums * kColumns; item += kLinearThreads) {
    const int sum = item / kColumns, in_tile = item % kColumns;
    F warps[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) warps[w] = parts[sum][w][place_of(in_tile % kChunk, in_tile / kChunk)];
    if (in_tile < num_groups) store_piece(args.common, first_group + in_tile, piece, sum, tree_sum(warps));
  }
  wait_for_earlier();
}

}  // namespace halfbyte::device
