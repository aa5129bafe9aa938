// qgemm_expert_rows, before a product whose blocks have several tiles of experts' rows: lists the tiles,
// copies rows of x to the order of experts, where they lie in another one, or finds their numbers, and makes
// zeros of the sums of rows that no expert has. Block 0 makes the list, and zeros of flags; of the others
// each warp has a piece of a row.
#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/experts.cuh"

namespace halfbyte::device {

constexpr int kWarps = kExpertRowsThreads / 32;

// By one warp. Entry 0 has the number of the others.
__device__ __forceinline__ void list_tiles(const QgemmExpertRowsArgs& args, int lane) {
  const auto put = [&](i32 number, i32 first, i32 expert, const ExpertRange& rows) {
    const i32 begin = rows.begin + (number - first) * args.tile;
    const i32 tiles = min((rows.end - rows.begin + args.tile - 1) / args.tile, args.most_tiles - first);
    const i32 panel = (number - first) / args.most_width * args.most_width;
    args.list[1 + number] = {expert, begin, min(args.tile, rows.end - begin), first + panel,
                             min(args.most_width, tiles - panel)};
  };
  const i32 listed = list_expert_tiles(args.experts, args.tile, args.most_tiles, put);
  if (lane == 0) args.list[0] = {listed, 0, 0, 0, 0};
}

// The chunks of a piece that a lane has, from `first` on.
__device__ __forceinline__ void copy_piece(Words4* to, const Words4* from, i64 first, i64 chunks, bool once) {
  constexpr int kAtOnce = kExpertRowsPiece / 32;
  Words4 chunk[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) chunk[i] = from[min(first + 32 * i, chunks - 1)];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const i64 at = first + 32 * i;
    if (at >= chunks) break;
    if (once)
      store_once(to + at, chunk[i]);
    else
      to[at] = chunk[i];
  }
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
    for (int i = static_cast<int>(threadIdx.x); i < args.num_flags; i += kExpertRowsThreads)
      args.flags[i] = 0;
    return;
  }
  const i64 number = (block_index() - 1) * kWarps + warp, row = number / args.pieces;
  const i64 piece = number % args.pieces;
  if (row >= args.experts.rows) return;
  const i32 slot = slot_of(args.experts, row);
  if (args.rows_of_x != nullptr && lane == 0) args.rows_of_x[row] = max(slot, 0) / args.experts.slots_per_x;
  if (slot < 0) return;
  if (args.to != nullptr) {
    const auto* const from =
        static_cast<const Words4*>(args.x) + i64{slot / args.experts.slots_per_x} * args.chunks;
    auto* const to = static_cast<Words4*>(args.to) + row * args.chunks;
    copy_piece(to, from, piece * kExpertRowsPiece + lane, args.chunks, args.once);
  }
  if (piece != 0) return;
  if (args.zeros == nullptr || row < clamp(args.experts.offsets[args.experts.num - 1], 0, args.experts.rows))
    return;
  for (i32 part = 0; part < args.zero_parts; ++part) {
    const i64 to = (i64{part} * args.experts.rows + slot) * args.zero_bytes / 2;
    clear_row(static_cast<u16*>(args.zeros) + to, args.zero_bytes / 2);
  }
}

}  // namespace halfbyte::device
