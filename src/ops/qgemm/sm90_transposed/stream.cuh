// qgemm_sm90_transposed, phase 1: codes, parameters and x on their way to shared memory.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "ops/qgemm/sm90_transposed/sm90_transposed_args.h"
#include "ops/qgemm/weight/found_rows.cuh"
#include "ops/qgemm/weight/sm90.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTokens = kTiling.tokens, kUnits = kTiling.units, kStages = kTiling.stages;
constexpr bool kExperts = kTiling.experts, kFlows = kTiling.flows(), kFindsRows = kTiling.finds_rows;
constexpr int kTeams = kTiling.teams(), kTeamWarps = kTransposedThreads / 32 / kTeams,
              kStrips = kTiling.strips();
static_assert(kTiling.parameter_bytes == kScaleBytes + kSecondBytes && kTiling.group == kGroup);
static_assert(kTiling.fits() && !(kExperts && kDoubleQuant) && (!kFindsRows || kTiling.can_find_rows()));
static_assert(kTiling.bits == 8 || kTiling.table_bytes() == kPairTableBytes);

// Columns of a weight, times some rows of x.
struct Tile {
  int columns;                    // their number
  i32 expert = 0, first_row = 0;  // of experts; the rows in their order
  i32 num_rows = 0;
};
__device__ __forceinline__ const u8* weight_of(const QgemmSm90TransposedArgs& args, const Tile& tile) {
  return kExperts ? args.weight + tile.expert * args.experts.weight_bytes : args.weight;
}

using Found = FoundRows<kTransposedFoundRows>;
__device__ __forceinline__ Found& found_rows(u8* shared) {
  return *reinterpret_cast<Found*>(shared + kTiling.found());
}
// How many tiles of rows of experts there are; a load.
__device__ __forceinline__ i32 count_row_tiles(const QgemmSm90TransposedArgs& args, u8* shared) {
  if constexpr (kFindsRows) return found_rows(shared).num_tiles;
  return kExperts ? args.expert_tiles[0].expert : 1;
}
// Tile `number` of all; false behind the last one. Of experts those of the same rows follow each other.
__device__ __forceinline__ bool find_tile(Tile& tile, const QgemmSm90TransposedArgs& args, u8* shared,
                                          i32 row_tiles, int number) {
  tile = {number};
  if constexpr (!kExperts) return number < args.tiles;
  const int of_rows = number / args.tiles;
  if (of_rows >= row_tiles) return false;
  if constexpr (kFindsRows) {
    const Found::Tile found = found_rows(shared).tiles[of_rows];
    tile = {number - of_rows * args.tiles, found.expert, found.first, found.count};
    return true;
  }
  const ExpertTileEntry entry = args.expert_tiles[1 + of_rows];
  tile = {number - of_rows * args.tiles, entry.expert, entry.first, entry.count};
  return true;
}

// The copies of a team: a ring of stages, numbers first() and up, each of which holds a step. One thread of
// the team starts them.
class Stream {
 public:
  // Team `team` of `num_teams` that share the tile; `ring`: which of the rings of the block it has.
  __device__ __forceinline__ Stream(const QgemmSm90TransposedArgs& args, u8* shared, int ring, int team,
                                    int num_teams, int rank)
      : args_(args),
        shared_(shared),
        boxes_(shared + kTiling.boxes()),
        slots_(shared + kTiling.slots()),
        full_(reinterpret_cast<Barrier*>(shared + kTiling.barriers())),
        first_(ring * kStages),
        strips_apart_(num_teams * kStrips),
        first_box_(k_major_tile(boxes_, 1024)) {
    asm("" : "+l"(first_box_));  // kept in registers: made again in each step, it costs more
    const int sets = (args.strips + kStrips - 1) / kStrips;
    const int first = (rank == 0 ? 0 : sets / 2) + team, last = rank + 1 < args.cluster ? sets / 2 : sets;
    first_strip_ = first * kStrips;
    steps_ = max(last - first + num_teams - 1, 0) / num_teams;
  }

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full(first() + i), kFindsRows ? 1 + 32 : 1);  // all lanes that gather x arrive
      init_barrier(empty(first() + i), kTeamWarps);
    }
    fence_barrier_init();
  }

  __device__ __forceinline__ void set_tile(const Tile& tile) {
    weight_ = weight_of(args_, tile);
    first_row_ = tile.first_row;
    num_rows_ = tile.num_rows;
    const int unit = tile.columns * kUnits, units = min(kUnits, args_.units - unit);
    code_bytes_ = static_cast<u32>(kTiling.joint() ? units / kTiling.units_per_block() * kTiling.block_bytes()
                                                   : units * kTiling.unit_bytes());
    const u8* const block = weight_ + static_cast<i64>(unit / kPackedUnits) * args_.block_bytes;
    codes_ = block + unit % kPackedUnits * kTiling.unit_bytes();
    parameters_ = block + kPackedUnits * kTiling.unit_bytes();
  }

  // ---- Filling the ring

  // Starts the copies of the first tile: weights of the first half of the ring, which do not wait for x, ...
  __device__ __forceinline__ void start_weight() const {
    for (int i = 0; i < min(kEarly, steps()); ++i) load_weight(i, first() + i);
  }
  // ... then x of that half, and the other half, which x does not wait behind.
  __device__ __forceinline__ void start_rest() const {
    for (int i = 0; i < min(kEarly, steps()); ++i) load_x(i, first() + i);
    for (int i = kEarly; i < min(kStages, steps()); ++i) {
      load_x(i, first() + i);
      load_weight(i, first() + i);
    }
  }
  // Starts those of a later tile, whose first step comes to `stage`: the whole ring is free.
  __device__ __forceinline__ void restart(int stage) const {
    for (int i = 0, to = stage; i < min(kStages, steps()); ++i, to = next(to)) {
      load_weight(i, to);
      load_x(i, to);
    }
  }

  // Codes and parameters of a step; `full` waits for x too.
  __device__ __forceinline__ void load_weight(int step, int stage) const {
    constexpr u32 kApart = kTiling.joint() ? 0 : kTiling.group_bytes();
    // Of experts, boxes have rows of the next ones, too, or zeros behind the last row.
    const u32 x_bytes = static_cast<u32>((kExperts ? kTokens : args_.m) * kRowBytes);
    arrive_expecting(full(stage), kStrips * (code_bytes_ + kApart) + (kFindsRows ? 0 : x_bytes));
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      // Behind the last strip: that once more, for rows beyond x, which are zeros.
      const int strip = kStrips == 1 ? strip_of(step) : min(strip_of(step) + i, args_.strips - 1);
      u8* const to = slots_ + (stage * kStrips + i) * kTiling.slot_bytes();
      copy_bulk_once(to, codes_ + static_cast<u64>(strip) * args_.strip_bytes, code_bytes_, full(stage));
      if constexpr (kApart != 0) load_parameters(to + kTiling.code_bytes(), strip, full(stage));
    }
  }
  __device__ __forceinline__ void load_x(int step, int stage) const {
    load_tile(boxes_ + stage * kTiling.box_bytes(), &args_.x, first_row_, strip_of(step) * kUnitRows,
              full(stage));
  }

  // Rows of x, wherever they lie: by a warp. What is behind the last one does not matter.
  __device__ __forceinline__ void gather_x(int step, int stage) const {
    constexpr int kChunks = kRowBytes / 16;
    const int lane = static_cast<int>(threadIdx.x % 32), chunk = lane % kChunks;
    const int col = strip_of(step) * kUnitRows + chunk * 8;
    const i32* const rows = found_rows(shared_).rows_of_x + first_row_;
    const u32 box = shared_address(boxes_ + stage * kTiling.box_bytes());
#pragma unroll
    for (int row = lane / kChunks; row < kTokens; row += 32 / kChunks) {
      if (row >= num_rows_) break;
      const u32 offset = static_cast<u32>(row * kRowBytes + chunk * 16);
      copy_async_or_zero(
          box + (kRowBytes == 64 ? swizzle_64(offset) : swizzle_128(offset)),
          static_cast<const u16*>(args_.x_as_it_lies) + i64{rows[row]} * args_.n + min(col, args_.n - 8),
          col < args_.n);
    }
    arrive_when_copied(full(stage));
  }

  // ---- What lies where

  __device__ __forceinline__ int steps() const { return steps_; }  // of the team
  __device__ __forceinline__ int strip_of(int step) const {
    return first_strip_ + step * (kFlows ? strips_apart_ : kTeams * kStrips);
  }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int next(int stage) const {
    return stage + 1 == first() + kStages ? first() : stage + 1;
  }
  __device__ __forceinline__ int previous(int stage) const {
    return stage == first() ? first() + kStages - 1 : stage - 1;
  }
  __device__ __forceinline__ Barrier* full(int stage) const { return full_ + stage; }
  __device__ __forceinline__ Barrier* empty(int stage) const { return full_ + kTeams * kStages + stage; }
  // Operand B of rows 16 * i and up, for wgmma().
  __device__ __forceinline__ u64 box(int stage, int i) const {
    const u32 low =
        static_cast<u32>(first_box_) + static_cast<u32>(stage * (kTiling.box_bytes() / 16) + i * 2);
    return (first_box_ & ~0xFFFFFFFFull) | low;
  }
  __device__ __forceinline__ const u8* box_bytes(int stage) const {
    return boxes_ + stage * kTiling.box_bytes();
  }
  __device__ __forceinline__ const u8* slot(int stage, int strip) const {
    return slots_ + (stage * kStrips + strip) * kTiling.slot_bytes();
  }

 private:
  static constexpr int kEarly = (kStages + 1) / 2;
  static constexpr int kRowBytes = kStrips * kUnitRows * 2;  // of x, in a box
  // Units of a block of the packed layout.
  static constexpr int kPackedUnits = max(kGroup, kUnitCols) / kUnitCols;

  __device__ __forceinline__ void load_parameters(u8* to, int strip, Barrier* barrier) const {
    if constexpr (kGroup != 0) {
      copy_bulk(to, parameters_ + static_cast<u64>(strip) * args_.strip_bytes, kTiling.group_bytes(),
                barrier);
    } else {
      constexpr int kScales = kUnitRows * kScaleBytes, kSeconds = kUnitRows * kSecondBytes;
      copy_bulk(to, weight_ + args_.scales + static_cast<i64>(strip) * kScales, kScales, barrier);
      if constexpr (kSeconds != 0)
        copy_bulk(to + kScales, weight_ + args_.seconds + static_cast<i64>(strip) * kSeconds, kSeconds,
                  barrier);
    }
  }

  const QgemmSm90TransposedArgs& args_;
  u8* shared_;
  u8 *boxes_, *slots_;
  Barrier* full_;
  int first_, strips_apart_, first_strip_, steps_;
  u64 first_box_;
  i32 first_row_ = 0, num_rows_ = 0;  // of x
  const u8* weight_ = nullptr;
  const u8 *codes_ = nullptr, *parameters_ = nullptr;  // of the tile and strip 0; inlined parameters
  u32 code_bytes_ = 0;
};

// What a team copies, step after step, through all its tiles: from number `first` on, each `apart` from the
// one before.
class Flow {
 public:
  // The stream is that of the first tile, which there must be.
  __device__ __forceinline__ Flow(Stream& stream, const QgemmSm90TransposedArgs& args, u8* shared,
                                  i32 row_tiles, int first, int apart)
      : stream_(stream),
        args_(args),
        shared_(shared),
        row_tiles_(row_tiles),
        goes_on_(stream.steps() > 0),
        number_(first),
        apart_(apart) {
    find_upcoming();
  }
  // Starts the copies of the next step to a stage that is free. By a warp, of which one lane starts them.
  __device__ __forceinline__ void load_next(int stage, bool starts) {
    if (!goes_on_) return;
    if (starts) stream_.load_weight(step_, stage);
    if constexpr (kFindsRows)
      stream_.gather_x(step_, stage);
    else if (starts)
      stream_.load_x(step_, stage);
    if (++step_ < stream_.steps()) return;
    step_ = 0;
    goes_on_ = has_upcoming_;
    if (!goes_on_) return;
    stream_.set_tile(upcoming_);
    find_upcoming();
  }

 private:
  __device__ __forceinline__ void find_upcoming() {
    number_ += apart_;
    has_upcoming_ = find_tile(upcoming_, args_, shared_, row_tiles_, number_);
  }

  Stream& stream_;
  const QgemmSm90TransposedArgs& args_;
  u8* shared_;
  i32 row_tiles_;
  bool goes_on_, has_upcoming_ = false;
  int step_ = 0, number_, apart_;
  Tile upcoming_;
};

#endif

}  // namespace halfbyte::device
