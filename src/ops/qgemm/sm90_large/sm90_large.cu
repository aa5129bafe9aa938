// y = x . W^T, or x . W, of a packed weight, for many tokens (rows of x): sm_90a. The weight is operand A of
// the matrix instructions, decoded into registers and rounded with its scale; tokens are the columns of
// operand B, x in shared memory. Features are rows of the weight, or its columns: the rows of A, the columns
// of y.
//
// A warpgroup of its own keeps a ring of stages full, of codes and of x, through all tiles of the block. The
// two others have half of the features each; they decode what comes next while the tensor cores multiply what
// is there. Where a block has several tiles one of them is a little ahead, so that the tensor cores have work
// while the other one stores. What tiles are left when all blocks had as many are shared by the blocks of a
// cluster, two or more: each has its share of what is summed, and stores its share of the tokens. Where tiles
// are few, each becomes several, of parts of what is summed: then another kernel adds up their sums. Of
// experts, whose tiles the device alone knows, those that are left are divided among all blocks, see
// QgemmPieces.
//
// Four warpgroups multiply small tiles. They need not look ahead: while one decodes, the tensor cores
// multiply for others. Split: a block has one tile. Two or all of them have the same features, and take
// stages in turn; each stores its share of the tokens. Wide: each has features of its own.
//
// Multicast: before tiles are shared the blocks of a cluster go through the same tokens, stage by stage. Each
// loads half of a stage's x to the shared memory of both, when the warps of both are done with what was
// there.
//
// Forward, a word of 4-bit codes is a fragment of A of a lane, see formats/packed.h. Transposed, it has rows
// 2a and 2a + 1, the k of A, of the columns 16j + 8 * second + 2t + e, e and second 0 or 1. Lane (g, t') has
// the words of a = 8i + t' and 8i + t' + 4 for the 16 rows i of a strip; e = 0 is fragment row g, e = 1 row g
// + 8. Which j, second and t these are is chosen such that no two of a warp's words meet in a bank. In both
// directions fragment rows g and g + 8 are neighbouring features.
#include "ops/qgemm/sm90_large/sm90_large_args.h"

#include "ops/qgemm/weight/experts.cuh"
#include "ops/qgemm/weight/sm90.cuh"
#include "ops/qgemm/weight/tile_ring.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- 1. How a tile is divided.

using Args = QgemmSm90LargeArgs;
constexpr int kTokens = kTiling.tokens, kBlocks = kTiling.blocks, kStages = kTiling.stages;
constexpr bool kExperts = kTiling.experts;
// While a stage is waited for, one is multiplied and one was; the boxes of all have room for the sums of half
// a tile.
static_assert(kStages >= 3 && kStages >= 2 * kBlocks);
static_assert(kTiling.parameter_bytes == kScaleBytes + kSecondBytes && kTiling.group == kGroup);
static_assert(kTiling.double_quant == kDoubleQuant && !(kExperts && kDoubleQuant));
// 4-bit codes that are integers as stored are computed, not looked up: transposed, by as many instructions,
// of which none uses shared memory. Forward it takes twice as many, and 15 % longer.
constexpr bool kComputesCodes = kBits == 4 && !kTiling.has_table();
static_assert(!kComputesCodes || kTransposed);
// With swiglu, of 64 features a warpgroup has a strip of the gate and one of what it opens, two warps each.
constexpr bool kSwiglu = kTiling.swiglu;
static_assert(!kSwiglu || (kExperts && !kTransposed));
constexpr int kMultipliers = kTiling.multipliers();
constexpr int kMultiplierBarrier = 1;  // of their warpgroups
constexpr int kGateBarrier = 2;        // and more: with swiglu, of a warp and its partner
// Warpgroups that take turns at the stages of the same features.
constexpr int kSplits = kTiling.splits;
// Operands A that a warpgroup decodes while one is multiplied: of two that multiply. Four have the tensor
// cores busy without, and no registers for it.
constexpr int kAhead = kTiling.warpgroups == 2 ? 1 : 0;
static_assert(kAhead == 1 ? kSplits == 1 : kBlocks == 1 && kTokens <= 128);
// Who waits for a phase of a barrier must know that the one before it has ended: a wait tells them apart by
// parity only. Warpgroups that take turns do not wait for each other, so each has stages of the ring of its
// own.
static_assert(kStages % kSplits == 0);
// Those who gather rows of x have use for more registers, where that leaves enough for sums.
using Registers = DealtRegisters<kMultipliers / 128, kExperts && kTokens <= 128 ? 56
                                                     : kSplits == 1             ? 40
                                                                                : 32>;
using Place = RingPlace<kStages>;
constexpr int kSlotBytes = kTiling.slot().num_bytes(), kUnitBytes = kTiling.slot().code_bytes();
// A matrix instruction has at most 256 columns. Of a thread, in 64 features: sums of one, and of all.
constexpr int kHalves = kTokens > 256 ? 2 : 1, kColumns = kTokens / kHalves;
constexpr int kSums = kTokens / 2;
constexpr int kGroups = kTiling.slot().groups();   // of a unit
constexpr int kSteps = kLargeStage / 16;           // matrix instructions along a stage
constexpr int kBoxes = kTiling.multicast ? 2 : 1;  // of x in a stage, and lanes that release it
constexpr int kSharers = kTiling.sharers;          // blocks
constexpr int kUnits = kTiling.units();
// Two lanes copy codes, two x, and each pair takes turns at stages: to start the copies of one takes a lane
// longer than it takes to multiply a small one. Tiles have even numbers of stages. Of experts one lane copies
// x, and one finds tiles.
constexpr int kTurnsOfX = kExperts ? 1 : 2;
constexpr int kCopiers = 4;  // warps

// A tile, of experts, as it lies in shared memory; last_stage 0: there is no other.
struct alignas(16) TileSlot {
  i32 features, first, first_stage, last_stage, expert, count_and_givers;
};
static_assert(sizeof(TileSlot) == kLargeTileBytes);
using LargeTileRing = TileRing<TileSlot, kLargeTileSlots>;

// Whether rows of x are gathered.
__device__ __forceinline__ bool gathers(const Args& args) { return kExperts && args.rows_of_x != nullptr; }

// What a thread knows of its block: shared memory, and its own place.
struct Block {
  u8* shared;
  u8* boxes;
  Barrier *full, *empty;
  int thread, lane, warp;
  int column, split;  // of a warpgroup that multiplies: which features of the tile, and which turn
  u32 rank;           // in the cluster

  __device__ __forceinline__ explicit Block(u8* memory)
      : shared(memory),
        boxes(shared + kTiling.box_offset()),
        full(reinterpret_cast<Barrier*>(shared + kTiling.barrier_offset())),
        empty(full + kStages),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        warp(__shfl_sync(~0u, thread / 32, 0)),
        column(warp / 4 / kSplits),
        split(warp / 4 % kSplits),
        rank(cluster_rank()) {}

  // By each of those who copy.
  __device__ __forceinline__ void init_barriers(int copier, bool is_gathered) const {
    for (int stage = copier; stage < kStages; stage += kCopiers) {
      init_barrier(full + stage, is_gathered ? 1 + 64 : 2);  // all lanes that gather arrive
      init_barrier(empty + stage, kBoxes * kMultipliers / kSplits / 32);
    }
    if (kExperts && copier == 0) tile_ring().init_barriers((is_gathered ? 2 : 3) + kMultipliers / 32);
  }
  __device__ __forceinline__ LargeTileRing tile_ring() const {
    return {shared + kTiling.tile_offset(), shared + kTiling.tile_barrier_offset()};
  }
};

// ---- 2. Tiles of a block, one after the other.

struct Tile {
  int features, tokens;         // its number along y; tokens, of experts: the first row, in their order
  int part;                     // of what is summed
  int first_stage, last_stage;  // an even number of stages
  int expert;                   // of experts, and in one register: rows, and givers, see QgemmPieces
  int count_and_givers;
  bool shared;

  __device__ __forceinline__ int count() const { return count_and_givers & 0xFFFF; }
  __device__ __forceinline__ int givers() const { return count_and_givers >> 16; }
};
// How the tiles of experts are dealt out.
__device__ __forceinline__ QgemmPieces pieces_of(const Args& args) {
  const int pair = kTiling.multicast ? args.multicast : 0;
  return {static_cast<int>(gridDim.x) >> pair, args.expert_tiles[0].expert * args.feature_tiles >> pair,
          args.stages, args.dividing_stages};
}
// Tile `number` of this block, of experts; false behind the last one. Of all, they are panel by panel of
// tiles of tokens of one expert, which share what they read, and in a panel as find_tile() has them. Blocks
// that load x for each other have tiles that are a pair.
__device__ __forceinline__ bool find_tile_of_experts(Tile& tile, const Args& args, const QgemmPieces& pieces,
                                                     int number) {
  const int multicast = kTiling.multicast ? args.multicast : 0, block = static_cast<int>(blockIdx.x);
  QgemmPiece piece;
  if (!pieces.find(piece, block >> multicast, number)) return false;
  const int index = piece.tile << multicast | (block & multicast);
  const ExpertTileEntry first = args.expert_tiles[1 + index / args.feature_tiles];
  const int rest = index - first.panel * args.feature_tiles, pair = rest >> multicast;
  const ExpertTileEntry rows = args.expert_tiles[1 + first.panel + pair % first.width];
  tile.features = (pair / first.width << multicast) + (rest & multicast);
  tile.tokens = rows.first;
  tile.part = 0;
  tile.first_stage = piece.first_stage;
  tile.last_stage = piece.last_stage;
  tile.expert = rows.expert;
  tile.count_and_givers = rows.count + piece.givers * 0x10000;
  tile.shared = false;
  return true;
}
__device__ __forceinline__ const u8* weight_of(const Args& args, const Tile& tile) {
  return kExperts ? args.weight + tile.expert * args.experts.weight_bytes : args.weight;
}
// a / b, mostly 0, which takes no division: those of the first tile are what the first copy waits for.
__device__ __forceinline__ int quotient(int a, int b) { return a < b ? 0 : a / b; }
// The tile `number` of this block, of one weight; false behind the last one.
__device__ __forceinline__ bool find_tile(Tile& tile, const Args& args, int number) {
  const int index = static_cast<int>(blockIdx.x) + number * static_cast<int>(gridDim.x);
  tile.shared = index >= args.whole;
  int i = tile.shared ? args.whole + (index - args.whole) / kSharers : index;
  if (i >= args.tiles) return false;
  const int of_part = args.feature_tiles * args.token_tiles, of_panel = args.panel * args.feature_tiles;
  tile.part = quotient(i, of_part);
  i -= tile.part * of_part;
  const int first = quotient(i, of_panel) * args.panel;
  const int width = min(args.panel, args.token_tiles - first), rest = i - first * args.feature_tiles;
  // Neighbours have the same tokens where they load x for each other.
  const int multicast = kTiling.multicast ? args.multicast : 0, pair = rest >> multicast;
  tile.features = (pair / width << multicast) + (rest & multicast);
  tile.tokens = first + pair % width;
  tile.first_stage = tile.part * args.part_stages;
  tile.last_stage = min(tile.first_stage + args.part_stages, args.stages);
  if (tile.shared) {
    const int sharer = index % kSharers, turns = (tile.last_stage - tile.first_stage) / 2;
    tile.last_stage = tile.first_stage + turns * (sharer + 1) / kSharers * 2;
    tile.first_stage += turns * sharer / kSharers * 2;
  }
  return true;
}

// It, or that there is none, into the ring. By one lane.
__device__ __forceinline__ void list_tile(const Block& block, int number, bool found, const Tile& tile) {
  const LargeTileRing ring = block.tile_ring();
  LargeTileRing::Place place;
  place.stage = number % kLargeTileSlots;
  place.parity = static_cast<u32>(number / kLargeTileSlots % 2);
  ring.wait_empty(place) = {tile.features,    tile.tokens,
                            tile.first_stage, found ? tile.last_stage : 0,
                            tile.expert,      tile.count_and_givers};
  ring.say_full(place);
}

// All of them. By one lane.
__device__ __forceinline__ void list_tiles(const Args& args, const Block& block) {
  wait_for_earlier();
  const QgemmPieces pieces = pieces_of(args);
  bool found = true;
  for (int number = 0; found; ++number) {
    Tile tile = {};
    found = find_tile_of_experts(tile, args, pieces, number);
    list_tile(block, number, found, tile);
  }
}

// The tiles of the block, one after the other: by a warp, or by one lane of it.
template <bool kByWarp>
class Tiles {
 public:
  __device__ __forceinline__ Tiles(const Args& args, const Block& block) : args_(args), block_(block) {}

  // The next one, to look at: of experts, its stages and rows alone, since there are not always registers for
  // more. False behind the last one; then no more.
  __device__ __forceinline__ bool look(Tile& tile) {
    if constexpr (!kExperts) return find_tile(tile, args_, number_++);
    const TileSlot& slot = block_.tile_ring().wait_full(place_);
    tile.first_stage = slot.first_stage;
    tile.last_stage = slot.last_stage;
    tile.tokens = slot.first;
    tile.count_and_givers = slot.count_and_givers;
    return tile.last_stage > 0;
  }
  // All of it.
  __device__ __forceinline__ void take(Tile& tile) {
    if constexpr (!kExperts) return;
    const LargeTileRing ring = block_.tile_ring();
    const TileSlot slot = ring.slots[place_.stage];
    if constexpr (kByWarp) __syncwarp();
    if (!kByWarp || block_.lane == 0) ring.release(place_);
    place_.advance();
    tile = {slot.features,         slot.first, 0, slot.first_stage, slot.last_stage, slot.expert,
            slot.count_and_givers, false};
  }
  __device__ __forceinline__ bool next(Tile& tile) {
    const bool is_tile = look(tile);
    if (is_tile) take(tile);
    return is_tile;
  }

 private:
  const Args& args_;
  const Block& block_;
  int number_ = 0;
  LargeTileRing::Place place_;
};

// Whether the blocks of the cluster go through the tile together.
__device__ __forceinline__ bool loads_for_both(const Args& args, const Tile& tile) {
  return kTiling.multicast && args.multicast != 0 && !tile.shared;
}

// ---- 3. The ring is filled: by one lane each.

// Unit `i` of a stage: its strip, and its number in there. Behind the last strip and the last unit these once
// more: x is zero there, or y has no such feature.
__device__ __forceinline__ int strip_of(const Args& args, const Tile& tile, int stage, int i) {
  if constexpr (kSwiglu)
    return min(tile.features * (kUnits / 2) + i / 2 + i % 2 * args.gate_strips, args.strips - 1);
  return min(kTransposed ? stage * 2 + i % 2 : tile.features * kUnits + i, args.strips - 1);
}
__device__ __forceinline__ int unit_of(const Args& args, const Tile& tile, int stage, int i) {
  return min(kTransposed ? tile.features * (kUnits / 2) + i / 2 : stage, args.units - 1);
}
constexpr int kUnitsPerBlock = kTiling.slot().units_per_block();
__device__ __forceinline__ const u8* block_of(const Args& args, const Tile& tile, int strip, int unit) {
  return weight_of(args, tile) + strip * args.strip_bytes + i64{unit / kUnitsPerBlock} * args.block_bytes;
}

// By those who multiply: the codes of the first stages, on their way before there are barriers to copy by.
// Where little is summed it saves a tenth of the time (256x4096, transposed, 256 rows of x: 5.3 to 4.6 us);
// split tiles, which have more in flight, gain nothing.
__device__ __forceinline__ void prefetch_codes(const Args& args, int thread) {
  constexpr int kLines = 16, kLineBytes = 128;  // of a unit, at most
  const int i = thread / kLines % kUnits, line = thread % kLines;
  Tile tile;
  if (find_tile(tile, args, 0) && line * kLineBytes < kSlotBytes) {
    const int stage = tile.first_stage + thread / (kLines * kUnits);
    const int strip = strip_of(args, tile, stage, i), unit = unit_of(args, tile, stage, i);
    const u8* const codes = block_of(args, tile, strip, unit) + unit % kUnitsPerBlock * kUnitBytes;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(codes + line * kLineBytes));
  }
  __syncwarp();
}

// copy(tile, stage of the tile, place in the ring), where the place is empty: of the stages of `turn`, of
// kTurns. begin(tile): before those of a tile.
template <int kTurns, class Begin, class F>
__device__ __forceinline__ void each_stage(const Args& args, const Block& block, int turn, const Begin& begin,
                                           const F& copy) {
  Place place;
  place.stage = turn;
  Tile tile;
  for (Tiles<false> tiles(args, block); tiles.next(tile);) {
    begin(tile);
    for (int stage = tile.first_stage + turn; stage < tile.last_stage;
         stage += kTurns, place.advance(kTurns)) {
      wait(block.empty + place.stage, place.parity ^ 1);
      copy(tile, stage, place.stage);
    }
  }
  // The block stays until the other one has arrived at its barriers for the last time.
  if constexpr (kTiling.multicast)
    for (int i = turn; i < kStages; i += kTurns, place.advance(kTurns))
      wait(block.empty + place.stage, place.parity ^ 1);
}

// Copies the units of stages. What is the same for all stages of a tile is computed once: to start a copy
// takes little longer than to compute from where.
class UnitCopier {
 public:
  __device__ __forceinline__ explicit UnitCopier(const Args& args) : args_(args) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    weight_ = keep(weight_of(args_, tile));
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if constexpr (kTransposed) {
        const int unit = unit_of(args_, tile, 0, 2 * i);
        units_[i] = unit_at(unit);
        if constexpr (kHasGroups) groups_[i] = group_at(unit);
      } else {
        strips_[i] = strip_at(strip_of(args_, tile, 0, i));
      }
    }
  }

  // Those of a stage, codes and parameters, to `units`.
  __device__ __forceinline__ void copy(u8* to, const Tile& tile, int stage, Barrier* full) const {
    if constexpr (kTransposed) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const u8* const strip = keep(from(weight_, strip_at(strip_of(args_, tile, stage, b))));
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
          u8* const slot = to + (2 * i + b) * kSlotBytes;
          copy_bulk(slot, from(strip, units_[i]), kCopiedBytes, full);
          if constexpr (kHasGroups) copy_bulk(slot + kUnitBytes, from(strip, groups_[i]), kGroupBytes, full);
        }
      }
    } else {
      const int unit = unit_of(args_, tile, stage, 0);
      const u8* const codes = keep(from(weight_, unit_at(unit)));
      const u8* const groups = keep(from(weight_, group_at(unit)));
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        u8* const slot = to + i * kSlotBytes;
        copy_bulk(slot, from(codes, strips_[i]), kCopiedBytes, full);
        if constexpr (kHasGroups) copy_bulk(slot + kUnitBytes, from(groups, strips_[i]), kGroupBytes, full);
      }
    }
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        copy_parameters_of_rows(to + i * kSlotBytes + kUnitBytes, strip_of(args_, tile, stage, i), full);
    }
  }

 private:
  // Of a tile: strips, or transposed units of a strip.
  static constexpr int kPlaces = kTransposed ? kUnits / 2 : kUnits;
  // Parameters lie behind the units of a block, if not behind each unit.
  static constexpr bool kHasGroups = kGroup != 0 && !kTiling.slot().joint();
  static constexpr int kCopiedBytes = kTiling.slot().joint() ? kSlotBytes : kUnitBytes;
  static constexpr int kGroupBytes = kTiling.slot().group_bytes();

  // As it is: the compiler would take sums apart to compute more of them for each copy.
  static __device__ __forceinline__ const u8* keep(const u8* address) {
    asm volatile("" : "+l"(address));
    return address;
  }
  // Places are multiples of 16 bytes, and counted so: 32 bits hold them.
  static constexpr int kPiece = 16;
  static __device__ __forceinline__ const u8* from(const u8* base, u32 pieces) {
    return base + u64{pieces} * kPiece;
  }
  __device__ __forceinline__ u32 strip_at(int strip) const {
    return static_cast<u32>(strip) * static_cast<u32>(args_.strip_bytes / kPiece);
  }
  __device__ __forceinline__ u32 block_at(int unit) const {
    return static_cast<u32>(unit / kUnitsPerBlock) * (static_cast<u32>(args_.block_bytes) / kPiece);
  }
  __device__ __forceinline__ u32 unit_at(int unit) const {
    return block_at(unit) + static_cast<u32>(unit % kUnitsPerBlock * (kUnitBytes / kPiece));
  }
  __device__ __forceinline__ u32 group_at(int unit) const {
    return block_at(unit) + static_cast<u32>(kUnitsPerBlock * (kUnitBytes / kPiece));
  }
  // Where a row has one scale.
  __device__ __forceinline__ void copy_parameters_of_rows(u8* to, int strip, Barrier* full) const {
    constexpr int kScales = kUnitRows * kScaleBytes, kSeconds = kUnitRows * kSecondBytes;
    copy_bulk(to, weight_ + args_.scales + i64{strip} * kScales, kScales, full);
    if constexpr (kSeconds != 0)
      copy_bulk(to + kScales, weight_ + args_.seconds + i64{strip} * kSeconds, kSeconds, full);
  }

  const Args& args_;
  const u8* weight_ = nullptr;
  u32 strips_[kPlaces], units_[kPlaces], groups_[kPlaces];
};

__device__ __forceinline__ void copy_codes(const Args& args, const Block& block, int turn) {
  UnitCopier copier(args);
  each_stage<2>(
      args, block, turn, [&](const Tile& tile) { copier.begin(tile); },
      [&](const Tile& tile, int stage, int place) {
        Barrier* const full = block.full + place;
        arrive_expecting(full, kTiling.weight_bytes());
        copier.copy(block.shared + kTiling.unit_offset() + place * kTiling.weight_bytes(), tile, stage, full);
      });
}

__device__ __forceinline__ void copy_x(const Args& args, const Block& block, int turn) {
  wait_for_earlier();
  const auto nothing = [](const Tile&) {};
  each_stage<kTurnsOfX>(args, block, turn, nothing, [&](const Tile& tile, int stage, int place) {
    Barrier* const full = block.full + place;
    constexpr int kTokenBytes = kTiling.x_bytes() / kTokens;
    // Of experts, boxes have rows of the next ones, too, or zeros behind the last row.
    const int first = kExperts ? tile.tokens : tile.tokens * args.tokens, box_tokens = args.tokens / kBoxes;
    arrive_expecting(
        full, static_cast<u32>((kExperts ? args.tokens : min(args.tokens, args.m - first)) * kTokenBytes));
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      u8* const box = block.boxes + place * kTiling.x_bytes() + i * box_tokens * kTokenBytes;
      const int token = first + i * box_tokens, tokens = args.m - token;
      if (!kExperts && tokens <= 0) break;
      const TensorMap* const x = !kExperts && tokens < box_tokens ? &args.last_x : &args.x;
      if (!loads_for_both(args, tile))
        load_tile(box, x, token, stage * kLargeStage, full);
      else if (i == static_cast<int>(block.rank))
        load_tile_multicast(box, x, token, stage * kLargeStage, full, 3);
    }
  });
}

// Rows of x of experts, wherever they lie: by two warps, four of eight rows each, of which a lane has one
// chunk of 16 bytes. What is behind the last row does not matter. Both find the tiles by themselves, and the
// second one lists them for others.
__device__ __forceinline__ void gather_x(const Args& args, const Block& block, int half) {
  constexpr int kRowBytes = kLargeStage * 2, kRowChunks = kRowBytes / 16;
  wait_for_earlier();
  const QgemmPieces pieces = pieces_of(args);
  Place place;
  bool lists = half == 1 && block.lane == 0;
  for (int number = -1;; ++number) {
    if (lists) {
      Tile next;
      lists = find_tile_of_experts(next, args, pieces, number + 1);
      list_tile(block, number + 1, lists, next);
    }
    __syncwarp();
    if (number < 0) continue;
    Tile tile;
    if (!find_tile_of_experts(tile, args, pieces, number)) return;
    // What follows from the lane is computed anew for each tile: there are no registers for it while the next
    // one is found.
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int chunk = lane % kRowChunks, first_row = 4 * half + lane / kRowChunks;
    const u32 boxes =
        shared_address(block.boxes) + static_cast<u32>(first_row * kRowBytes + (chunk ^ first_row) * 16);
    const u8* const own_rows = block.shared + kTiling.row_offset(0) + first_row * 16;
    const auto load_rows = [&](int i) {
      return load_words(own_rows + (kTiling.row_offset(i) - kTiling.row_offset(0)));
    };
    for (int i = lane / 4 * 8 + 4 * half + lane % 4; i < kTokens; i += 64)
      *reinterpret_cast<i32*>(block.shared + kTiling.row_offset(i)) =
          args.rows_of_x[tile.tokens + min(i, tile.count() - 1)];
    __syncwarp();
    for (int stage = tile.first_stage; stage < tile.last_stage; ++stage, place.advance()) {
      const int first = stage * kRowChunks + chunk;
      const bool inside = first < args.row_chunks;
      const u8* from = static_cast<const u8*>(args.x_as_it_lies) + (inside ? first * 16 : 0);
      asm volatile("" : "+l"(from));  // as it is: one multiplication and addition makes the place of a row
      const u32 to = boxes + static_cast<u32>(place.stage * kTiling.x_bytes());
      wait(block.empty + place.stage, place.parity ^ 1);
      Words4 rows = load_rows(0);
#pragma unroll
      for (int begin = 0; begin < kTokens; begin += 32) {
        if (begin >= tile.count()) break;
        const Words4 next = begin + 32 < kTokens ? load_rows(begin + 32) : Words4{};
#pragma unroll
        for (int i = 0; i < 4 && begin + 8 * i < kTokens; ++i)
          copy_async_or_zero(to + static_cast<u32>((begin + 8 * i) * kRowBytes),
                             from + u64{rows.word[i]} * static_cast<u32>(args.row_bytes), inside);
        rows = next;
      }
      arrive_when_copied(block.full + place.stage);
    }
  }
}

// ---- 4. Operand A.

// Of 64 features those of fragment rows g and, the next one, g + 8 of a warp; with swiglu, of 32 columns of
// y.
__device__ __forceinline__ int feature_of(int warp, int g) {
  if constexpr (kSwiglu) return 16 * (warp % 2) + 2 * g;
  return kTransposed ? warp / 2 * 32 + g / 4 * 16 + g / 2 % 2 * 8 + warp % 2 * 4 + g % 2 * 2
                     : 16 * warp + 2 * g;
}

// Of a lane: what it loads of a stage, and the fragments that this becomes.
class Operand {
 public:
  __device__ __forceinline__ Operand(const Args& args, const u8* shared, int column, int warp, int lane,
                                     u32 rank)
      : args_(args),
        units_(shared + kTiling.unit_offset() + column * kBlocks * 2 * kSlotBytes),
        map_(reinterpret_cast<const float*>(shared + kTiling.map_offset())),
        table_lane_(pair_table_lane(lane, rank)),
        first_pair_(column * kBlocks) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (kTransposed) {
      // The words of 4 and of 8 more pairs of rows are at a constant distance.
      codes_at_ = code_place(2 * t, feature_of(warp, g), kBits).byte / 4 * 4;
      strip_ = lane / 16;
      row_ = lane % 16 * 2;
      group_ = kGroups > 1 ? warp / 2 * kParameters : 0;
      has_second_ = g >= 4;
      const int second = g / 2 % 2;
      if constexpr (kComputesCodes) {
        even_ = second != 0 ? 0x3322 : 0x1100;
      } else {
        even_ = pair_selector(2 * second);
        odd_ = pair_selector(2 * second + 1);
      }
    } else {
      const int a = 8 * (warp % 2) + g;
      strip_ = warp / 2;
      row_ = 2 * a;
      codes_at_ = strip_ * kSlotBytes + packed_slot(a, t) * 16;
    }
    if constexpr (kDoubleQuant) offset_ = *reinterpret_cast<const float*>(args.weight + args.offset);
  }

  // From stage `stage` of a tile with these `features`, which is in `place` of the ring, what a block of 64
  // features of the warpgroup needs: to registers, as it is.
  __device__ __forceinline__ void load(int features, int stage, int place, int block) {
    const u8* const pair =
        units_ + place * kTiling.weight_bytes() + block * 2 * kSlotBytes;  // of units: two strips
    load_codes(words_, pair + codes_at_);
#pragma unroll
    for (int i = 0; i < kParameters; ++i) {
      const int group = kTransposed ? group_ + i : i;
      const u8* const scales = pair + strip_ * kSlotBytes + kUnitBytes;
      const u8* const seconds = scales + kGroups * kUnitRows * kScaleBytes;
      StoredParameters& stored = stored_[i];
      stored.scales =
          *reinterpret_cast<const StoredScaleCodes*>(scales + (group * kUnitRows + row_) * kScaleBytes);
      if constexpr (kSecondBytes != 0)
        stored.seconds =
            *reinterpret_cast<const StoredSeconds*>(seconds + (group * kUnitRows + row_) * kSecondBytes);
      if constexpr (kDoubleQuant) load_absmax(stored, features, stage, block, group);
    }
  }

  // The fragments of what was loaded.
  __device__ __forceinline__ void decode(u32 (&a)[kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) look_up(a[i], i);
    if constexpr (kTransposed) {
      ParameterPairs pairs[kParameters];
#pragma unroll
      for (int group = 0; group < kParameters; ++group) {
        const RowParameters rows = unpack(stored_[group]);
        pairs[group] = pair_rows(rows, 0, rows, 1);
      }
      scale_rows<0>(a[0], pairs);
      scale_rows<8>(a[1], pairs);
      scale_rows<16>(a[2], pairs);
      scale_rows<24>(a[3], pairs);
    } else {
#pragma unroll
      for (int group = 0; group < kParameters; ++group) {
        const RowParameters rows = unpack(stored_[group]);
        const ParameterPairs pairs[2] = {pair_rows(rows, 0, rows, 0), pair_rows(rows, 1, rows, 1)};
#pragma unroll
        for (int i = group * kSteps / kParameters; i < (group + 1) * kSteps / kParameters; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = weight_pair(a[i][r], pairs[r % 2]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pin(a[i]);
  }

 private:
  // Two neighbours of each.
  using StoredScaleCodes = Stored<kScaleBytes>::Type;
  using StoredSeconds = Stored<max(kSecondBytes, 1)>::Type;
  struct StoredParameters {
    StoredScaleCodes scales;
    StoredSeconds seconds;
    float absmax[2];
  };
  // Of a lane in a stage: groups with parameters, transposed those of 32 columns, of which it has 16; words
  // of codes.
  static constexpr int kParameters = !kTransposed ? kGroups : kGroups == 4 ? 2 : 1;
  static constexpr int kNumWords = kTransposed || kBits == 8 ? 8 : 4;

  __device__ __forceinline__ void load_codes(u32 (&words)[kNumWords], const u8* from) const {
    if constexpr (kTransposed) {  // of step i / 2, rows 2a or those 8 further on
#pragma unroll
      for (int i = 0; i < kNumWords; ++i)
        words[i] = *reinterpret_cast<const u32*>(from + i / 4 * kSlotBytes + i % 4 * 256);
    } else {
#pragma unroll
      for (int i = 0; i < kNumWords; i += 4) {
        const Words4 four = load_words(from + i / 4 * 1024);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i + j] = four.word[j];
      }
    }
  }

  // The values of the codes of a step.
  __device__ __forceinline__ void look_up(u32 (&a)[4], int i) const {
    if constexpr (kTransposed) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const u32 word = words_[(2 * i + q) % kNumWords];
        if constexpr (kComputesCodes) {
          const u32 bytes = permute_bytes(word, word, even_);  // of both rows, one in each half
          a[2 * q] = integer_pair(Element(), bytes);
          a[2 * q + 1] = integer_pair(Element(), bytes >> 4);
        } else if constexpr (kBits == 4) {
          const u32 even = look_up_pair(word, table_lane_, even_),
                    odd = look_up_pair(word, table_lane_, odd_);
          a[2 * q] = permute_bytes(even, odd, 0x5410);
          a[2 * q + 1] = permute_bytes(even, odd, 0x7632);
        } else {
          a[2 * q] = byte_values<0, 2>(word, word);
          a[2 * q + 1] = byte_values<1, 3>(word, word);
        }
      }
    } else if constexpr (kBits == 4) {
      const u32 word = words_[i];
      a[0] = look_up_pair<0>(word, table_lane_);
      a[1] = look_up_pair<1>(word, table_lane_);
      a[2] = look_up_pair<2>(word, table_lane_);
      a[3] = look_up_pair<3>(word, table_lane_);
    } else {
      const u32 first = words_[2 * i % kNumWords], second = words_[(2 * i + 1) % kNumWords];
      a[0] = byte_values<0, 1>(first, first);
      a[1] = byte_values<2, 3>(first, first);
      a[2] = byte_values<0, 1>(second, second);
      a[3] = byte_values<2, 3>(second, second);
    }
  }
  template <int kFirst>
  __device__ __forceinline__ ParameterPairs of_lanes(const ParameterPairs (&pairs)[kParameters]) const {
    const ParameterPairs first = shuffle<kFirst>(pairs[0]);
    if constexpr (kParameters == 1) return first;
    return select(has_second_, shuffle<kFirst>(pairs[kParameters - 1]), first);
  }
  template <int kFirst>
  __device__ __forceinline__ void scale_rows(u32 (&a)[4], const ParameterPairs (&pairs)[kParameters]) const {
    const ParameterPairs low = of_lanes<kFirst>(pairs), high = of_lanes<kFirst + 4>(pairs);
    a[0] = weight_pair(a[0], low);
    a[1] = weight_pair(a[1], low);
    a[2] = weight_pair(a[2], high);
    a[3] = weight_pair(a[3], high);
  }

  __device__ __forceinline__ void load_absmax(StoredParameters& stored, int features, int stage, int block,
                                              int group) const {
    const int pair = features * (kUnits / 2) + first_pair_ + block;  // of strips (forward) or unit
    const int row = ((kTransposed ? stage : pair) * 2 + strip_) * kUnitRows + row_,
              unit = kTransposed ? pair : stage;
    // Rows and groups of the padding have no absmax, and what comes then does not matter.
    const int of_row = kGroup == 0 ? 0 : min(unit * kUnitCols / kGroupSize + group, args_.groups - 1);
    const float* const absmax = reinterpret_cast<const float*>(args_.weight + args_.absmax);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      stored.absmax[i] = load_early(absmax + (min(row + i, args_.n - 1) * args_.groups + of_row) / 256);
  }
  __device__ __forceinline__ RowParameters unpack(const StoredParameters& stored) const {
    RowParameters rows;
    if constexpr (kDoubleQuant) {
      decode_scales(rows.scale, stored.scales, map_, stored.absmax, offset_);
    } else {
      unpack_scales<kParameterBytes>(rows.scale, stored.scales, has_bf16_scales(args_));
    }
    if constexpr (kAsymmetric) {
      rows.zero[0] = above_2_23(stored.seconds & 0xFF) - kMagic;
      rows.zero[1] = above_2_23(stored.seconds >> 8) - kMagic;
    }
    if constexpr (kAffine) unpack_scales<kParameterBytes>(rows.bias, stored.seconds, has_bf16_scales(args_));
    return rows;
  }

  const Args& args_;
  const u8* const units_;  // of the warpgroup, in the first stage
  const float* const map_;
  // What makes addresses of pairs; transposed, of which bytes. Of computed codes even_ takes those of both.
  u32 table_lane_, even_ = 0, odd_ = 0;
  int first_pair_;               // of units of a stage, that the warpgroup has
  int codes_at_;                 // from a pair of units on
  int strip_, row_, group_ = 0;  // of the parameters that the lane loads; strip_ of the pair
  bool has_second_ = false;      // its columns are in the second group of those
  float offset_ = 0;
  u32 words_[kNumWords];
  StoredParameters stored_[kParameters];
};

// ---- 5. The products.

// Of a lane, of the features of its fragment rows: sum i of 64 features is of token i / 4 * 8 + 2t + i % 2,
// and of the second feature where i & 2.
struct Sums {
  float of[kBlocks][kHalves][kColumns / 2];

  __device__ __forceinline__ float& at(int block, int i) {
    return of[block][i / (kColumns / 2)][i % (kColumns / 2)];
  }
  __device__ __forceinline__ float at(int block, int i) const {
    return of[block][i / (kColumns / 2)][i % (kColumns / 2)];
  }
  // They are what registers hold: the first product of a tile does not add to them, but the compiler would
  // keep them for it.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; ++i) asm volatile("" : "=f"(at(b, i)));
  }
};

// Goes through the stages of all tiles. A turn is two stages, or the two blocks of one: what is next is
// decoded to a[1] while the products of a[0] are under way, then the other way round.
class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Args& args, const Block& block, RingTile x)
      : args_(args),
        block_(block),
        operand_(args, block.shared, block.column, block.warp % 4, block.lane, block.rank),
        x_(x) {
    loaded_.stage = block.split;
  }

  // Without looking ahead: the stages of a tile that this warpgroup has, one or more. It lets go of one
  // before it waits for the next: four that are held would be up to half of the ring.
  __device__ __forceinline__ void multiply_in_turn(Sums& sums, const Tile& tile) {
    begin_releases(tile);
    const int first = tile.first_stage + block_.split;
    for (int stage = first; stage < tile.last_stage; stage += kSplits) {
      load(tile.features, stage);
      operand_.decode(a_[0]);
      start_products(sums.of[0], a_[0], loaded_.stage, stage != first);
      wgmma_wait<0>();
      release(loaded_.stage);
      loaded_.advance(kSplits);
    }
    pin(sums.of[0][0]);
  }

  // Before the first tile.
  __device__ __forceinline__ void begin(const Tile& tile) {
    load(tile.features, tile.first_stage);
    operand_.decode(a_[0]);
  }

  // `next`: the tile after this one, if there is one: `goes_on`; of experts, no more than its first stage.
  // `leads`: the other warpgroup waits for the first turn.
  __device__ __forceinline__ void multiply(Sums& sums, const Tile& tile, const Tile& next, bool goes_on,
                                           bool leads) {
    begin_releases(tile);
    int place = 0;
    constexpr int kTurn = 2 / kBlocks;  // stages
    for (int stage = tile.first_stage; stage < tile.last_stage; stage += kTurn) {
      const bool begins = stage == tile.first_stage, ends = stage + kTurn == tile.last_stage;
      int before = place;
      place = loaded_.stage;
      if constexpr (kTurn == 2) {
        loaded_.advance();
        load(tile.features, stage + 1);
      } else {
        operand_.load(tile.features, stage, place, 1);
      }
      start_products(sums.of[0], a_[0], place, !begins);
      wgmma_wait<1>();
      if (!begins) release(before);
      operand_.decode(a_[kAhead]);

      before = place;
      place = loaded_.stage;
      loaded_.advance();
      // Behind the last stage, what was loaded is decoded once more.
      if (!ends || goes_on)
        load(ends ? next.features : tile.features, ends ? next.first_stage : stage + kTurn);
      start_products(sums.of[kBlocks - 1], a_[kAhead], place, kTurn == 2 || !begins);
      wgmma_wait<1>();
      if (kTurn == 2) release(before);
      operand_.decode(a_[0]);
      if (leads && begins) arrive_some(kMultiplierBarrier, kMultipliers);
    }
    wgmma_wait<0>();
    release(place);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) pin(sums.of[b][half]);
  }

 private:
  // Before those of a tile.
  __device__ __forceinline__ void begin_releases(const Tile& tile) {
    if constexpr (kTiling.multicast)
      released_ = shared_address_of(
          block_.empty, loads_for_both(args_, tile) ? static_cast<u32>(block_.lane % kBoxes) : block_.rank);
  }
  // Stage `stage` of a tile, as soon as it is there.
  __device__ __forceinline__ void load(int features, int stage) {
    wait(block_.full + loaded_.stage, loaded_.parity);
    if (gathers(args_)) fence_proxy_async();  // those who gather do not wait, so they cannot
    operand_.load(features, stage, loaded_.stage, 0);
  }

  // Adds the products with what is in `place` to the sums of a block, or starts with them.
  __device__ __forceinline__ void start_products(float (&sums)[kHalves][kColumns / 2],
                                                 const u32 (&a)[kSteps][4], int place, bool adds) const {
    constexpr int kHalfBytes = kTiling.x_bytes() / kHalves;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        wgmma<Major::k>(Element(), sums[half], a[i],
                        x_.at((place * kTiling.x_bytes() + half * kHalfBytes) / 16 + i * 2), adds || i > 0);
    wgmma_commit();
  }

  // By all warps, when the products of the stage are done. Multicast: a lane arrives at the barrier of each
  // block, or, where these have stages of their own, both at the block's own.
  __device__ __forceinline__ void release(int place) const {
    __syncwarp();
    if constexpr (kTiling.multicast) {
      if (block_.lane < kBoxes)
        arrive_there(released_ + static_cast<u32>(place) * static_cast<u32>(sizeof(Barrier)));
    } else {
      if (block_.lane == 0) arrive(block_.empty + place);
    }
  }

  const Args& args_;
  const Block& block_;
  Operand operand_;
  RingTile x_;
  u32 a_[1 + kAhead][kSteps][4];
  Place loaded_;      // the stage that was loaded last
  u32 released_ = 0;  // the barrier of the first stage, where this lane arrives
};

// ---- 6. The sums become y.

// Words of global memory: without a branch, so that many are under way.
__device__ __forceinline__ void load_where(u32& to, bool inside, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\n@p ld.global.u32 %0, [%2];\n}\n"
               : "+r"(to)
               : "r"(static_cast<int>(inside)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void store_where(bool inside, u8* to, u32 pair) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.u32 [%1], %2;\n}\n" ::"r"(
                   static_cast<int>(inside)),
               "l"(to), "r"(pair)
               : "memory");
}
__device__ __forceinline__ void store_where(bool inside, float* to, float first, float second) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v2.f32 [%1], {%2, %3};\n}\n" ::"r"(
                   static_cast<int>(inside)),
               "l"(to), "f"(first), "f"(second)
               : "memory");
}
__device__ __forceinline__ void unpack_pair(float (&to)[2], u32 pair) {
  to[0] = load(Element(), static_cast<u16>(pair));
  to[1] = load(Element(), static_cast<u16>(pair >> 16));
}

// Columns of y that a block of a warpgroup has.
constexpr int kBlockFeatures = kSwiglu ? 32 : 64;
// Of a block that shares a tile with others, or of a warpgroup of a split one: of the tokens it stores, and
// of the sums of 64 features.
constexpr int kShares = kTiling.shares(), kShareTokens = kTokens / kShares, kShareSums = kSums / kShares;
static_assert(kShareSums % 4 == 0);

// Sum i of the tokens that `rank` stores.
__device__ __forceinline__ float share_of(const Sums& sums, int block, int i, u32 rank) {
  float sum = sums.at(block, i);
#pragma unroll
  for (u32 other = 1; other < kShares; ++other)
    if (rank == other) sum = sums.at(block, i + static_cast<int>(other) * kShareSums);
  return sum;
}

// Adds the sums of the others, blocks of the cluster or warpgroups of a split tile, to those of this one's
// share of the tokens, which become the first; in the order of their ranks.
__device__ __forceinline__ void share_sums(Sums& sums, const Block& block, u32 rank) {
  constexpr int kThreads = kSplits == 1 ? kMultipliers : 128;  // that share with as many others
  constexpr int kShareBytes = kThreads * (kShares - 1) * kBlocks * kShareSums * 4;
  const auto meet = [] {
    if constexpr (kSplits == 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      sync_some(kMultiplierBarrier, kMultipliers);
    }
  };
  meet();  // the others have used up their stages
  u8* const exchange = block.boxes + block.thread / kThreads * kShareBytes + block.thread % kThreads * 16;
  const auto offset = [](u32 from, int b, int i) {
    return (static_cast<int>(from) * kBlocks * kShareSums + b * kShareSums + i) / 4 * kThreads * 16;
  };
  // Where each of the others has its place: one's own is left out.
  const auto each_other = [&](const auto& f) {
#pragma unroll
    for (u32 other = 0; other + 1 < kShares; ++other) f(other, other + (other >= rank));
  };
  each_other([&](u32, u32 other) {
    const u32 there = kSplits == 1 ? shared_address_of(exchange, other)
                                   : shared_address(exchange) + (other - rank) * kShareBytes;
    const u32 place = rank - (rank > other);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kShareSums; i += 4) {
        float sent[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) sent[e] = share_of(sums, b, i + e, other);
        const u32 at = there + static_cast<u32>(offset(place, b, i));
        if constexpr (kSplits == 1)
          store_cluster(at, sent[0], sent[1], sent[2], sent[3]);
        else
          store_shared(at, sent[0], sent[1], sent[2], sent[3]);
      }
  });
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kShareSums; ++i) sums.at(b, i) = share_of(sums, b, i, rank);
  meet();
  each_other([&](u32 place, u32) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kShareSums; i += 4) {
        const Words4 received = load_words(exchange + offset(place, b, i));
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.at(b, i + e) += __uint_as_float(received.word[e]);
      }
  });
}

// The number of this thread, asked for again: there is no register for it while stages are multiplied.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Of experts, what blocks give to the one that stores a tile: all sums of a thread for the same thread there,
// and then a flag of each warp.
class GivenSums {
 public:
  __device__ __forceinline__ explicit GivenSums(const Args& args)
      : step_(1 << (kTiling.multicast ? args.multicast : 0)) {
    const int thread = thread_anew();
    lane_ = thread % 32;
    flag_ = args.given_flags + static_cast<int>(blockIdx.x) * kWarps + thread / 32;
    sums_ = args.given_sums + i64{blockIdx.x} * kBlockSums + thread * 4;
  }

  __device__ __forceinline__ void give(const Sums& sums) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        Words4 given;
#pragma unroll
        for (int e = 0; e < 4; ++e) given.word[e] = bit_cast<u32>(sums.at(b, i + e));
        *place_of(sums_, b, i) = given;
      }
    __syncwarp();
    if (lane_ == 0) store_release(flag_, 1);
  }
  // Adds those of the blocks behind this one, in their order.
  __device__ __forceinline__ void take(Sums& sums, int givers) const {
    // Each lane has the flag of one: the warp stays together.
    const u32* const flag = flag_ - min(lane_ + 1, givers) * step_ * kWarps;
    while (!__all_sync(~0u, load_acquire(flag) != 0)) {
    }
    __syncwarp();  // what each lane sees by its flag, all see
    float* from = sums_;
#pragma unroll 1
    for (int giver = 0; giver < givers; ++giver) {
      from -= step_ * kBlockSums;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int begin = 0; begin < kSums; begin += kAtOnce) {
          Words4 given[kAtOnce / 4];
#pragma unroll
          for (int i = 0; i < kAtOnce / 4; ++i) given[i] = load_to_write(place_of(from, b, begin + 4 * i));
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i)
            sums.at(b, begin + i) += bit_cast<float>(given[i / 4].word[i % 4]);
        }
    }
  }

 private:
  static constexpr int kWarps = kMultipliers / 32, kBlockSums = kBlocks * kSums * kMultipliers;
  // So many at a time: for more there are no registers beside the sums.
  static constexpr int kAtOnce = kSums <= 64 && kSums % 16 == 0 ? 16 : kSums % 8 == 0 ? 8 : 4;

  static __device__ __forceinline__ Words4* place_of(float* sums, int block, int i) {
    return reinterpret_cast<Words4*>(sums + (block * kSums + i) * kMultipliers);
  }
  int lane_;
  u32* flag_;
  float* sums_;
  int step_;  // from a block to the one before
};

// Of experts. Whether the block stores the tile: it has added what others gave it. Else it has given its
// sums.
__device__ __forceinline__ bool give_or_take_sums(Sums& sums, const Args& args, const Tile& tile) {
  const int givers =
      __shfl_sync(~0u, tile.givers(), 0);  // so that the compiler sees that warps stay together
  if (givers == 0) return true;
  const GivenSums given(args);
  if (givers == QgemmPiece::kGives) {
    given.give(sums);
    return false;
  }
  given.take(sums, givers);
  return true;
}

// Rows of y of the tokens of a tile. Of experts they lie anywhere: each lane asks for those of some tokens,
// and for their routing weights, all at once, and the others get them from it. `token`: that of the lane's
// first sum; of experts both count from the first of the tile.
class RowsOfY {
 public:
  // Of experts, slots are under way until find().
  __device__ __forceinline__ RowsOfY(const Args& args, const Tile& tile) {
    if constexpr (kExperts) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int row = 32 * i + static_cast<int>(threadIdx.x % 32);
        slots_[i] = static_cast<u32>(tile.tokens + row);
        load_where(slots_[i], row < tile.count() && args.experts.slots != nullptr,
                   args.experts.slots + tile.tokens + row);
      }
    }
  }
  // `token`: the first of the lane.
  __device__ __forceinline__ void find(const Args& args, int token, int last_token) {
    token_ = token;
    last_token_ = last_token;
    if constexpr (kExperts) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int row = 32 * i + static_cast<int>(threadIdx.x % 32);
        weights_[i] = bit_cast<u32>(1.0f);
        if (row >= last_token || static_cast<i32>(slots_[i]) >= args.experts.rows) slots_[i] = kNone;
        load_where(weights_[i], slots_[i] < kNone && args.experts.routing_weights != nullptr,
                   args.experts.routing_weights + slots_[i]);
      }
    }
  }

  struct Row {
    bool inside;   // there is one
    u32 number;    // from the row of `token` on, of experts from the first of y on
    float weight;  // by routing
  };
  // Of the token of sum i, or so many behind it, in the same 32. Of experts by all lanes.
  __device__ __forceinline__ Row of_sum(int i, int behind = 0) const {
    const int at = i / 4 * 8 + i % 2;  // tokens behind the lane's first
    if constexpr (!kExperts) return {token_ + at < last_token_, static_cast<u32>(at), 1};
    const int lane = at % 32 + static_cast<int>(threadIdx.x % 4) * 2 + behind;
    const u32 slot = shuffle(slots_[at / 32], lane);
    return {slot < kNone, slot, bit_cast<float>(shuffle(weights_[at / 32], lane))};
  }

 private:
  static constexpr int kOfLane = kExperts ? (kTokens + 31) / 32 : 1;
  static constexpr u32 kNone = 0x80000000;  // and more: slots below 0
  int token_, last_token_;
  u32 slots_[kOfLane], weights_[kOfLane];
};

// The sums that are stored at a time begin with number 0, 1, 4, 5 and so on: each has that of the second
// feature two behind it.
__device__ __forceinline__ constexpr int first_sum(int i) { return i / 2 * 4 + i % 2; }
// So many sums are stored at a time: of 288 tokens, with a global scale, registers are left for eight.
template <int kCount>
constexpr int kStoredAtOnce = kCount % 16 == 0 && !(kTokens > 256 && kGlobalScale) ? 16
                              : kCount % 8 == 0                                    ? 8
                                                                                   : 4;

// Of two neighbouring features; zeros where there is none.
__device__ __forceinline__ u32 load_bias(const Args& args, const Tile& tile, int feature) {
  if (args.bias == nullptr) return 0;
  const i64 first = kExperts ? i64{tile.expert} * args.features * (kSwiglu ? 2 : 1) : 0;
  return *reinterpret_cast<const u32*>(static_cast<const u16*>(args.bias) + first + feature);
}

// What sums are multiplied by when they are stored.
__device__ __forceinline__ float factor_of(const Args& args, const Tile& tile) {
  return kGlobalScale ? global_factor(weight_of(args, tile), args.global_scale) : 1;
}

// The first kCount sums of each block, of one part of several. `feature`, `token`: of the first sum.
template <int kCount>
__device__ __forceinline__ void store_partials(const Sums& sums, const Args& args, const Tile& tile,
                                               const RowsOfY& rows_of_y, int feature, int token) {
  const float factor = factor_of(args, tile);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b, feature += 64) {
    const bool is_feature = feature < args.features;
    if (!kExperts && !is_feature) return;
    const i64 first_row = tile.part * i64{args.m} + (kExperts ? 0 : token);
    float* const to = args.partials + first_row * args.partial_stride + feature;
    float bias[2];  // of experts
    unpack_pair(bias, kExperts && is_feature ? load_bias(args, tile, feature) : 0);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int first = first_sum(i);
      const RowsOfY::Row row = rows_of_y.of_sum(first);
      const auto biased = [&](float v, float bias) { return kExperts ? v * factor + bias : v * factor; };
      store_where(row.inside && is_feature, to + u64{static_cast<u32>(args.partial_stride)} * row.number,
                  biased(sums.at(b, first), bias[0]), biased(sums.at(b, first + 2), bias[1]));
    }
  }
}

// each(f): f(what was there, of two columns, what is to be stored, where, whether y has it), of all pairs.
template <class Each>
__device__ __forceinline__ void add_or_store(const Args& args, const Each& each) {
  if (args.accumulate) {
    each([](u32& pair, float, float, const u8* y, bool inside) { load_where(pair, inside, y); });
    each([](u32 pair, float first, float second, u8* y, bool inside) {
      float v[2];
      unpack_pair(v, pair);
      store_where(inside, y, store_pair(Element(), first + v[0], second + v[1]));
    });
  } else {
    each([](u32, float first, float second, u8* y, bool inside) {
      store_where(inside, y, store_pair(Element(), first, second));
    });
  }
}

// Stores the first kCount sums of each block as y.
template <int kCount>
__device__ __forceinline__ void store_sums(const Sums& sums, const Args& args, const Tile& tile,
                                           const RowsOfY& rows_of_y, int feature, int token) {
  const float factor = factor_of(args, tile);
  const u32 y_stride = static_cast<u32>(args.features) * 2;  // bytes
#pragma unroll
  for (int b = 0; b < kBlocks; ++b, feature += 64) {
    const bool is_feature = feature < args.features;
    if (!kExperts && !is_feature) return;
    float bias[2];
    unpack_pair(bias, is_feature ? load_bias(args, tile, feature) : 0);
    u8* const y = static_cast<u8*>(args.y) + (kExperts ? 0 : token) * i64{y_stride} + feature * 2;
    // So many at a time: what they are added to is loaded before anything is stored, so that it takes the
    // time of a load once; for more there are no registers beside the sums.
    constexpr int kAtOnce = kStoredAtOnce<kCount>;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kAtOnce) {
      u32 before[kAtOnce / 2] = {};
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < kAtOnce / 2; ++i) {
          const int first = begin + first_sum(i);
          const RowsOfY::Row row = rows_of_y.of_sum(first);
          const auto weighted = [&](float v) { return kExperts ? v * row.weight : v; };
          f(before[i], weighted(sums.at(b, first) * factor + bias[0]),
            weighted(sums.at(b, first + 2) * factor + bias[1]), y + u64{y_stride} * row.number,
            row.inside && is_feature);
        }
      };
      add_or_store(args, each);
    }
  }
}

// gate / (1 + e^-gate). The reciprocal is 1 ulp off at most (PTX ISA, rcp); to divide would take longer than
// all else here.
__device__ __forceinline__ float silu(float gate) {
  float factor;
  asm("rcp.approx.f32 %0, %1;" : "=f"(factor) : "f"(1 + exp(-gate)));
  return gate * factor;
}

// Opens the gates, and stores y. A warp with sums of the gate and its partner, with those of what it opens,
// give each other four of eight sums, of two tokens: each then has both of the other two, and of both
// features.
__device__ __forceinline__ void store_opened(const Sums& sums, const Args& args, const Tile& tile,
                                             const Block& block, const RowsOfY& rows_of_y, int feature) {
  constexpr int kGroups = kTiling.gate_groups();  // of eight sums, at a time
  const float factor = factor_of(args, tile);
  const int thread = block.thread % 128, opens = thread / 64;
  const int barrier = kGateBarrier + block.column * 2 + block.warp % 2;
  const u32 y_stride = static_cast<u32>(args.features) * 2;  // bytes
#pragma unroll
  for (int b = 0; b < kBlocks; ++b, feature += kBlockFeatures) {
    const bool is_feature = feature < args.features;
    float gate_bias[2], opened_bias[2];
    unpack_pair(gate_bias, is_feature ? load_bias(args, tile, feature) : 0);
    unpack_pair(opened_bias, is_feature ? load_bias(args, tile, args.features + feature) : 0);
    u8* const y = static_cast<u8*>(args.y) + feature * 2;
    static_assert(kSums % (8 * kGroups) == 0);
#pragma unroll
    for (int begin = 0; begin < kSums; begin += 8 * kGroups) {
      sync_some(barrier, 64);  // the partner has taken what was there
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        float given[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = begin + 8 * i + e;
          given[e] = opens != 0 ? sums.at(b, at) : sums.at(b, at + 4);
        }
        store_shared(shared_address(block.shared + kTiling.gate_offset(block.thread, i)), given[0], given[1],
                     given[2], given[3]);
      }
      sync_some(barrier, 64);
      u32 before[kGroups * 2] = {};
      float opened[kGroups * 2][2];  // of each token
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const Words4 received = load_words(block.shared + kTiling.gate_offset(block.thread ^ 64, i));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = begin + 8 * i + e;
          const float own = opens != 0 ? sums.at(b, at + 4) : sums.at(b, at),
                      other = bit_cast<float>(received.word[e]);
          const float gate = (opens != 0 ? other : own) * factor + gate_bias[e / 2];
          opened[i * 2 + e % 2][e / 2] =
              silu(gate) * ((opens != 0 ? own : other) * factor + opened_bias[e / 2]);
        }
      }
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < kGroups * 2; ++i) {
          const RowsOfY::Row row = rows_of_y.of_sum(begin + i / 2 * 8 + i % 2, 8 * opens);
          f(before[i], opened[i][0] * row.weight, opened[i][1] * row.weight, y + u64{y_stride} * row.number,
            row.inside && is_feature);
        }
      };
      add_or_store(args, each);
    }
  }
}

// The same of whatever the tile is a part of. `token`: the first of those of the tile.
template <int kCount>
__device__ __forceinline__ void store_tile(const Sums& sums, const Args& args, const Tile& tile,
                                           const Block& block, RowsOfY& rows_of_y, int token) {
  const int thread = kExperts ? thread_anew() : block.thread, lane = thread % 32;
  const int warp = kExperts ? thread / 32 : block.warp;
  const int feature = tile.features * kTiling.y_features() + warp / 4 / kSplits * kBlocks * kBlockFeatures +
                      feature_of(warp % 4, lane / 4);
  const int first = kExperts ? 0 : tile.tokens * args.tokens,
            last_token = kExperts ? tile.count() : min(first + args.tokens, args.m);
  token += first + lane % 4 * 2;
  rows_of_y.find(args, token, last_token);
  if constexpr (kSwiglu)
    store_opened(sums, args, tile, block, rows_of_y, feature);
  else if (args.partials != nullptr)
    store_partials<kCount>(sums, args, tile, rows_of_y, feature, token);
  else
    store_sums<kCount>(sums, args, tile, rows_of_y, feature, token);
}

#endif

extern "C" __global__ void
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__launch_bounds__(kTiling.threads(), 1)
#endif
    qgemm_sm90_large(const __grid_constant__ QgemmSm90LargeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Words4 shared_words[];
  const Block block(reinterpret_cast<u8*>(shared_words));

  let_next_start();
  const int copier = block.warp - kMultipliers / 32;
  start_ring<kMultipliers, kCopiers>(copier, &args.x, [&] { block.init_barriers(copier, gathers(args)); });
  if constexpr (kTiling.multicast) cluster_arrive_relaxed();

  if (copier >= 0) {
    keep_registers<Registers::kCopy>();
    if constexpr (kTiling.multicast) cluster_wait();  // for the barriers of both blocks
    if (gathers(args) && copier % 2 == 1) {
      gather_x(args, block, copier / 2);
      return;
    }
    if (!elect_lane()) return;
    if (copier % 2 == 0) {
      copy_codes(args, block, copier / 2);
    } else if (kExperts && copier == 3) {
      list_tiles(args, block);
    } else {
      copy_x(args, block, copier / 2);
    }
    return;
  }

  if constexpr (kSplits == 1 && !kExperts) prefetch_codes(args, block.thread);
  take_registers<Registers::kMultiply>();
  if constexpr (kTiling.has_table()) build_pair_table<kMultipliers>(args.values, block.thread, block.rank);
  if (kDoubleQuant && block.thread < 256)
    reinterpret_cast<float*>(block.shared + kTiling.map_offset())[block.thread] =
        reinterpret_cast<const float*>(args.weight + args.map)[block.thread];
  wait_for_earlier();
  if constexpr (kTiling.multicast) cluster_wait();
  wait_for_ring<kMultipliers, kCopiers>();

  Multiplier multiplier(args, block, {k_major_tile(block.boxes, 1024)});
  Sums sums = {};
  Tile tile, next;
  Tiles<true> tiles(args, block);
  if (!tiles.look(tile)) return;  // of experts
  if constexpr (kAhead == 0) {
    do {
      if constexpr (kExperts) sums.forget();
      RowsOfY rows_of_y(args, tile);
      multiplier.multiply_in_turn(sums, tile);
      tiles.take(tile);
      if constexpr (kSplits > 1) share_sums(sums, block, static_cast<u32>(block.split));
      if (kExperts && !give_or_take_sums(sums, args, tile)) continue;
      store_tile<kShareSums>(sums, args, tile, block, rows_of_y, block.split * kShareTokens);
    } while (kSplits == 1 && tiles.look(tile));
    return;
  }
  tiles.take(tile);
  bool goes_on = tiles.look(next);
  // Where the block has several tiles warpgroup 1 begins when 0 is a turn ahead.
  bool leads = goes_on && block.column == 0;
  if (goes_on && block.column == 1) sync_some(kMultiplierBarrier, kMultipliers);
  multiplier.begin(tile);
  for (;; leads = false, goes_on = tiles.look(next)) {
    if constexpr (kExperts) sums.forget();
    multiplier.multiply(sums, tile, next, goes_on, leads);
    if (!kExperts && tile.shared) break;  // the last one
    if (!kExperts || give_or_take_sums(sums, args, tile)) {
      RowsOfY rows_of_y(args, tile);
      store_tile<kSums>(sums, args, tile, block, rows_of_y, 0);
    }
    if (!goes_on) return;
    tile = next;
    tiles.take(tile);
  }
  share_sums(sums, block, block.rank);
  RowsOfY rows_of_y(args, tile);
  store_tile<kShareSums>(sums, args, tile, block, rows_of_y, static_cast<int>(block.rank) * kShareTokens);
#endif
}

}  // namespace halfbyte::device
