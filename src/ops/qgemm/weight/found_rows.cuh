// Of few rows of experts, a block finds by itself whose they are and where they lie, without a kernel before
// it: sm_90a.
#pragma once

#include "cuda/device/memory.cuh"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/experts.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// In shared memory; rows in the order of experts.
template <int kMost>
struct FoundRows {
  struct Tile {
    i32 expert;
    u16 first, count;
  };
  Tile tiles[kMost];
  i32 slots[kMost];      // below 0: nowhere
  i32 rows_of_x[kMost];  // at least 0
  float weights[kMost];  // by routing
  i32 num_tiles;
};

// Tiles of `tile` rows. By a warp.
template <int kMost>
__device__ __forceinline__ void find_rows(FoundRows<kMost>& found, const ExpertsArgs& args, i32 tile) {
  static_assert(sizeof(found) == found_rows_bytes(kMost));
  const int lane = static_cast<int>(threadIdx.x % 32);
  // On their way while experts are counted.
  if (args.slots != nullptr)
    for (int i = lane; i < args.rows; i += 32)
      copy_async(reinterpret_cast<u32*>(found.slots + i), args.slots + i);
  const i32 tiles =
      list_expert_tiles(args, tile, kMost, [&](i32 number, i32 first, i32 expert, const ExpertRange& rows) {
        const i32 begin = rows.begin + (number - first) * tile;
        found.tiles[number] = {expert, static_cast<u16>(begin),
                               static_cast<u16>(min(tile, rows.end - begin))};
      });
  wait_copies();
  for (int i = lane; i < args.rows; i += 32) {
    const i32 given = args.slots == nullptr ? i : found.slots[i], slot = given < args.rows ? given : -1;
    found.slots[i] = slot;
    found.rows_of_x[i] = max(slot, 0) / args.slots_per_x;
    found.weights[i] = slot >= 0 && args.routing_weights != nullptr ? args.routing_weights[slot] : 1;
  }
  if (lane == 0) found.num_tiles = tiles;
  __syncwarp();
}

// Zeros for rows that no expert has, in sums or in y, of rows of so many elements. By a warp of each block.
__device__ __forceinline__ void clear_rows(const ExpertsArgs& args, float* sums, i64 sums_stride, u16* y,
                                           i64 y_cols) {
  const i32 first = clamp(args.offsets[args.num - 1], 0, args.rows);
  for (i64 i = first + i64{blockIdx.x}; i < args.rows; i += gridDim.x) {
    const i32 row = slot_of(args, i);
    if (row < 0) continue;
    if (sums != nullptr)
      clear_row(sums + i64{row} * sums_stride, sums_stride);
    else
      clear_row(y + i64{row} * y_cols, y_cols);
  }
}

#endif

}  // namespace halfbyte::device
