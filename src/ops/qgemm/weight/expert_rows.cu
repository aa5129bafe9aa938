// qgemm_expert_rows, before a product whose blocks have several tiles of experts' rows: lists the tiles,
// copies rows of x to the order of experts, where they lie in another one, and makes zeros of the sums of
// rows that no expert has. Block 0 makes the list; of the others each warp has a row.
#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/experts.cuh"

namespace halfbyte::device {

constexpr int kWarps = kExpertRowsThreads / 32;

// By one warp. Entry 0 has the number of the others.
__device__ __forceinline__ void list_tiles(const QgemmExpertRowsArgs& args, int lane) {
  const ExpertsArgs& experts = args.experts;
  i32 listed = 0;
  for (i32 first = 0; first < experts.num; first += 32) {
    const i32 expert = first + lane;
    i64 begin = 0;
    i32 count = 0;
    if (expert < experts.num) {
      if (experts.rows_per_expert > 0) {
        begin = i64{expert} * experts.rows_per_expert;
        count = clamp(experts.offsets[expert], 0, experts.rows_per_expert);
      } else {
        const ExpertRange range = expert_range(experts, expert);
        begin = range.begin;
        count = range.end - range.begin;
      }
    }
    const i32 tiles = (count + args.tile - 1) / args.tile;
    i32 sum = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const i32 before = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
      if (lane >= distance) sum += before;
    }
    const i32 first_tile = listed + sum - tiles;
    // Offsets that do not ascend could give more than there is room for.
    const i32 room = clamp(args.most_tiles - first_tile, 0, tiles);
    for (i32 tile = 0; tile < room; ++tile) {
      const i32 row = tile * args.tile, panel = tile / args.most_width * args.most_width;
      args.list[1 + first_tile + tile] = {expert, static_cast<i32>(begin + row), min(args.tile, count - row),
                                          first_tile + panel, min(args.most_width, room - panel)};
    }
    listed += shuffle(sum, 31);
  }
  if (lane == 0) args.list[0] = {min(listed, args.most_tiles), 0, 0, 0, 0};
}

extern "C" __global__ void __launch_bounds__(kExpertRowsThreads)
    qgemm_expert_rows(const __grid_constant__ QgemmExpertRowsArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  wait_for_earlier();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  if (block_index() == 0) {
    if (warp == 0) list_tiles(args, lane);
    return;
  }
  const i64 row = (block_index() - 1) * kWarps + warp;
  if (row >= args.experts.rows) return;
  const i32 slot = slot_of(args.experts, row);
  if (slot < 0) return;
  if (args.to != nullptr) {
    const auto* const from =
        static_cast<const Words4*>(args.x) + i64{slot / args.experts.slots_per_x} * args.chunks;
    for (i64 i = lane; i < args.chunks; i += 32)
      static_cast<Words4*>(args.to)[row * args.chunks + i] = from[i];
  }
  if (args.zeros == nullptr || row < clamp(args.experts.offsets[args.experts.num - 1], 0, args.experts.rows))
    return;
  for (i32 part = 0; part < args.zero_parts; ++part) {
    const i64 to = (i64{part} * args.experts.rows + slot) * args.zero_bytes / 2;
    for (i64 i = lane; i < args.zero_bytes / 2; i += 32) static_cast<u16*>(args.zeros)[to + i] = 0;
  }
}

}  // namespace halfbyte::device
