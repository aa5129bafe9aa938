// fake_quantize_learned_backward of tensors whose groups are whole chunks, one behind the other. A thread has
// kLsqBatch chunks, 32 apart, all on their way before the first is used; sums go over the elements of a
// chunk, the lanes, the chunks of a thread, the warps of a block: the order of the elements in the group.
#include "ops/learned_scale/lsq.cuh"

namespace halfbyte::device {

constexpr int kWarpChunks = 32 * kLsqBatch;
// What a warp has of a group fills up 2^levels chunks; kMinLevels <= levels <= kMaxLevels.
__device__ __forceinline__ int levels_of(const LsqRowsArgs& args) {
  return kMinLevels == kMaxLevels ? kMinLevels : args.levels;
}
__device__ __forceinline__ bool has_level(int level, int levels) {
  return level < kMinLevels || (level < kMaxLevels && level < levels);
}
// Values that a level of lanes adds two at a time; after it a lane has half as many.
constexpr int kValues = kSums * kLsqBatch;
static_assert(kLsqBatch == 4 && 1 << kLsqWarpLevels == kWarpChunks);

using Chunk = ChunkOf<Element, kChunk>;

// A chunk of a group, and where it lies.
struct Place {
  int group, rank, chunk;
  bool inside;  // else there is no such chunk; `chunk` then names another
};
__device__ __forceinline__ Place place_of(const LsqRowsArgs& args, int group, int rank) {
  const auto last = static_cast<int>(args.common.num_groups) - 1;
  Place place = {min(group, last), rank, 0, group <= last};
  int row = place.group, in_row = 0;
  if (args.groups_per_row != 1) {
    row = args.row_divider.divide(place.group);
    in_row = (place.group - row * static_cast<int>(args.groups_per_row)) * static_cast<int>(args.group);
  }
  const int size = min(static_cast<int>(args.group), static_cast<int>(args.row) - in_row);
  place.inside = place.inside && rank < size;
  place.chunk = row * static_cast<int>(args.row) + in_row + min(rank, size - 1);
  return place;
}

// The group of chunk b of this thread, and its number within it.
__device__ __forceinline__ Place place_of(const LsqRowsArgs& args, int b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto block = static_cast<int>(block_index());
  if constexpr (kBlock) {
    int group = block;
    if (args.common.pieces != 1) group = args.piece_divider.divide(block);
    const int piece = block - group * static_cast<int>(args.common.pieces);
    const int first = piece * static_cast<int>(blockDim.x * kLsqBatch) + warp * kWarpChunks;
    return place_of(args, group, first + b * 32 + lane);
  } else {
    const int levels = levels_of(args);
    const int first = (block * (kLinearThreads / 32) + warp) << (kLsqWarpLevels - levels);
    return place_of(args, first + ((b * 32 + lane) >> levels), (b * 32 + lane) & ((1 << levels) - 1));
  }
}

// One level of lanes: two values at a time while there are several.
template <int n, int kLevel>
__device__ __forceinline__ void add_lanes(F (&values)[kValues], int levels) {
  if constexpr (kLevel < 5) {
    if (!has_level(kLevel, levels)) return;
    if constexpr (n > 1) {
#pragma unroll
      for (int i = 0; i < n / 2; ++i) values[i] = fold_sums(values[2 * i], values[2 * i + 1], 1 << kLevel);
      add_lanes<n / 2, kLevel + 1>(values, levels);
    } else {
      values[0] = values[0] + shuffle_xor(values[0], 1 << kLevel);
      add_lanes<1, kLevel + 1>(values, levels);
    }
  }
}

__device__ __forceinline__ Sums run_chunk(const LsqRowsArgs& args, const Place& place) {
  const Group group = load_group(args.common.linear, place.group, [] { return false; });
  constexpr int kChunkLevels = kChunk == 8 ? 3 : kChunk == 4 ? 2 : 1;
  TreeSum<kChunkLevels> trees[kSums];
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    const Sums terms = run_element(args.common.linear, group, static_cast<i64>(place.chunk) * kChunk + i);
#pragma unroll
    for (int s = 0; s < kSums; ++s) trees[s].add(terms.sum[s], i);
  }
  Sums sums;
#pragma unroll
  for (int s = 0; s < kSums; ++s) sums.sum[s] = trees[s].total();
  return sums;
}

extern "C" __global__ void __launch_bounds__(kLinearThreads, kFast ? 4 : 3)
    lsq_rows(const __grid_constant__ LsqRowsArgs args) {
  const LinearCommon& common = args.common.linear;
  F values[kValues] = {};  // number s * kLsqBatch + b: sum s of chunk b
  u32 slow = 0;
  load_bins();
  if constexpr (kFast) {
    Chunk x[kLsqBatch], dy[kLsqBatch];
    constexpr int kLoaded = kMinLevels < kLsqWarpLevels ? kLsqBatch : 1;  // groups of a thread
    u32 groups[kLoaded];
    Loaded loaded[kLoaded];
#pragma unroll
    for (int b = 0; b < kLsqBatch; ++b) {
      const Place place = place_of(args, b);
      x[b] = load_chunk<Chunk>(common.data.x, place.chunk);
      dy[b] = load_gradients<Chunk>(common, place.chunk);
    }
#pragma unroll
    for (int b = 0; b < kLoaded; ++b) groups[b] = static_cast<u32>(place_of(args, b).group);
    load_parameters(common, groups, loaded);
#pragma unroll
    for (int b = 0; b < kLsqBatch; ++b) {
      const Place place = place_of(args, b);
      if (!place.inside) continue;
      const OneGroup group(common, make_group(common, loaded[b % kLoaded], [&] { return place.rank == 0; }));
      if (!is_exact(x[b], group)) {
        slow |= 1u << b;
        continue;
      }
      float scale_terms[kChunk], zero_terms[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const FastTerms terms = fast_terms(x[b][i], dy[b][i], group.group, group.low, group.high);
        scale_terms[i] = terms.scale;
        zero_terms[i] = terms.zero;
        mask_element(dy[b], i, terms.passes);
      }
      store_gradients<kBlock>(common, dy[b], place.chunk);  // measured: short groups are faster with caching
      values[b] = tree_sum(scale_terms);
      if constexpr (kSums == 2) values[kLsqBatch + b] = tree_sum(zero_terms);
    }
  } else {
#pragma unroll 1
    for (int b = 0; b < kLsqBatch; ++b) {
      const Place place = place_of(args, b);
      if (place.inside) slow |= 1u << b;
      if (place.inside && place.rank == 0) load_group(common, place.group, [] { return true; });
    }
  }
#pragma unroll 1
  for (int b = 0; b < kLsqBatch; ++b) {
    if (!(slow >> b & 1)) continue;
    const Sums sums = run_chunk(args, place_of(args, b));
#pragma unroll
    for (int v = 0; v < kValues; ++v)
      if (v % kLsqBatch == b) values[v] = sums.sum[v / kLsqBatch];
  }

  const int levels = levels_of(args), lane_levels = kMaxLevels <= 5 ? levels : min(levels, 5);
  add_lanes<kValues, 0>(values, levels);
  wait_for_earlier();
  // A lane now has the values whose low bits are those of its number: as many bits as there were levels, or
  // all.
  constexpr int kAll = kSums == 2 ? 3 : 2;
  const int folds = kMinLevels >= kAll ? kAll : min(levels, kAll);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (has_level(5, levels)) values[0] = values[0] + shuffle_xor(values[0], 1);
  if (has_level(6, levels)) values[0] = values[0] + shuffle_xor(values[0], 2);
  if constexpr (!kBlock) {
    const i64 first = (block_index() * (kLinearThreads / 32) + warp) << (kLsqWarpLevels - levels);
    if ((lane & ((1 << lane_levels) - 1)) >> folds != 0) return;  // the others have the same
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (j >= kValues >> folds) break;
      const int value = j << folds | (lane & ((1 << folds) - 1)), b = value % kLsqBatch;
      const i64 group = first + ((b * 32 + lane) >> levels);
      if ((b & ((1 << (levels - lane_levels)) - 1)) == 0 && group < args.common.num_groups)
        store_gradient(args.common, group, kSums == 1 ? 0 : value / kLsqBatch, values[j]);
    }
  } else {
    constexpr int kWarps = kLinearThreads / 32;
    __shared__ F totals[kSums][kWarps];
    if (lane % kLsqBatch == 0 && lane / kLsqBatch < kSums) totals[lane / kLsqBatch][warp] = values[0];
    __syncthreads();
    if (threadIdx.x >= kSums) return;
    F warps[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      warps[w] = w < static_cast<int>(blockDim.x / 32) ? totals[threadIdx.x][w] : F{0};
    const i64 group = block_index() / args.common.pieces;
    if (group < args.common.num_groups)
      store_piece(args.common, group, block_index() - group * args.common.pieces,
                  static_cast<int>(threadIdx.x), tree_sum(warps));
  }
}

}  // namespace halfbyte::device
