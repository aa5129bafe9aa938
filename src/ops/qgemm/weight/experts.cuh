// Tiles of rows of one expert, found on the device: whatever routing says, rows are those of the tensors.
#pragma once

#include "cuda/device/reduce.cuh"
#include "ops/qgemm/weight/experts_args.h"

namespace halfbyte::device {

// Rows `first` up to first + count in the order of experts. expert == num: rows that no expert has.
struct ExpertTile {
  i64 first;
  int count, expert;  // count 0: there is no such tile
};

// Rows [begin, end) of an expert in the order of experts.
struct ExpertRange {
  i32 begin, end;
};
// From its offset and the one before it; of the first one, that does not matter.
__device__ __forceinline__ ExpertRange expert_range(const ExpertsArgs& args, int expert, i32 before,
                                                    i32 offset) {
  if (args.rows_per_expert > 0) {
    const i32 begin = expert * args.rows_per_expert;
    return {begin, begin + clamp(offset, 0, args.rows_per_expert)};
  }
  const i32 begin = expert == 0 ? 0 : clamp(before, 0, args.rows);
  return {begin, expert == args.num ? args.rows : clamp(offset, begin, args.rows)};
}
__device__ __forceinline__ ExpertRange expert_range(const ExpertsArgs& args, int expert) {
  return expert_range(args, expert, expert > 0 ? args.offsets[expert - 1] : 0,
                      expert < args.num ? args.offsets[expert] : 0);
}

// All tiles of `tile` rows of experts: put(number, number of the expert's first tile, expert, its rows), for
// no more than there is room for, which offsets that do not ascend may exceed; returns how many. By a warp.
template <class F>
__device__ __forceinline__ i32 list_expert_tiles(const ExpertsArgs& args, i32 tile, i32 room, const F& put) {
  const auto tiles_of = [&](const ExpertRange& rows) { return (rows.end - rows.begin + tile - 1) / tile; };
  // A lane has some experts that follow each other. Loads of one offset after the other would take longer
  // than those of the weights of an expert, so some are on their way at a time.
  constexpr int kAtOnce = 4;
  const int lane = static_cast<int>(threadIdx.x % 32), per_lane = (args.num + 31) / 32;
  const int first_expert = lane * per_lane, last_expert = min(first_expert + per_lane, args.num);
  i32 tiles = 0;
  u32 used = 0;  // of the first 32
  for (int begin = 0; begin < per_lane; begin += kAtOnce) {
    i32 offsets[1 + kAtOnce];  // from that before the first one on
#pragma unroll
    for (int i = 0; i <= kAtOnce; ++i)
      offsets[i] = args.offsets[clamp(first_expert + begin + i - 1, 0, args.num - 1)];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = first_expert + begin + i;
      if (expert >= last_expert) break;
      const i32 of_expert = tiles_of(expert_range(args, expert, offsets[i], offsets[i + 1]));
      tiles += of_expert;
      if (of_expert > 0 && begin + i < 32) used |= 1u << (begin + i);
    }
  }
  i32 sum = tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const i32 before = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    if (lane >= distance) sum += before;
  }
  i32 first = sum - tiles;
  const auto put_tiles = [&](int expert) {
    const ExpertRange rows = expert_range(args, expert);
    const i32 count = clamp(room - first, 0, tiles_of(rows));
    for (i32 i = 0; i < count; ++i) put(first + i, first, expert, rows);
    first += count;
  };
  for (; used != 0; used &= used - 1) put_tiles(first_expert + __ffs(static_cast<int>(used)) - 1);
  for (int expert = first_expert + 32; expert < last_expert; ++expert) put_tiles(expert);
  return min(shuffle(sum, 31), room);
}

// Tile number `number` of kRows rows. All lanes of a warp take part.
template <int kRows>
__device__ __forceinline__ ExpertTile find_expert_tile(const ExpertsArgs& args, i32 number) {
  if (args.rows_per_expert > 0) {
    const i32 tiles = (args.rows_per_expert + kRows - 1) / kRows;
    const i32 expert = number / tiles, first = number % tiles * kRows;
    const i32 left = min(args.offsets[expert], args.rows_per_expert) - first;
    return {i64{expert} * args.rows_per_expert + first, clamp(left, 0, kRows), expert};
  }
  const auto tiles_of = [&](int expert) {
    const ExpertRange range = expert_range(args, expert);
    return (range.end - range.begin + kRows - 1) / kRows;
  };
  // A lane has some experts that follow each other.
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int per_lane = args.num / 32 + 1, parts = args.num + 1;
  i32 tiles = 0;
  for (int i = 0; i < per_lane; ++i) {
    const int expert = lane * per_lane + i;
    if (expert < parts) tiles += tiles_of(expert);
  }
  i32 sum = tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const i32 before = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    if (lane >= distance) sum += before;
  }
  const u32 beyond = __ballot_sync(kAllLanes, sum > number);
  if (beyond == 0) return {0, 0, 0};
  const int owner = __ffs(static_cast<int>(beyond)) - 1;
  i32 left = number - shuffle(sum - tiles, owner);
  for (int expert = owner * per_lane; expert < parts; ++expert) {
    const ExpertRange range = expert_range(args, expert);
    const i32 num_tiles = (range.end - range.begin + kRows - 1) / kRows;
    if (left >= num_tiles) {
      left -= num_tiles;
      continue;
    }
    const i32 first = range.begin + left * kRows;
    return {first, min(range.end - first, kRows), expert};
  }
  return {0, 0, 0};
}

// Zeros in a row of y or of sums, of so many T; by a warp.
template <class T>
__device__ __forceinline__ void clear_row(T* to, i64 count) {
  for (i64 i = threadIdx.x % 32; i < count; i += 32) to[i] = 0;
}

// Where row number `i` of the order lies; below 0: nowhere.
__device__ __forceinline__ i32 slot_of(const ExpertsArgs& args, i64 i) {
  if (args.slots == nullptr) return static_cast<i32>(i);
  const i32 slot = args.slots[i];
  return slot < args.rows ? slot : -1;
}

}  // namespace halfbyte::device
