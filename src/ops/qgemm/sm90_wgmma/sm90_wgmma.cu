// y = x . W^T for up to 64 tokens (rows of x): sm_90a. The weight is operand A of the matrix instructions,
// decoded into registers; tokens are the columns of operand B, which is x in shared memory.
//
// A warpgroup of its own keeps a ring of stages full of the codes of the block's tiles, one behind the other,
// and of x. Each of the others has 64 rows, or twice 64, and some of the columns of each stage; it decodes
// the next chunk of its columns while the tensor cores multiply this one. The sums of a chunk start at zero
// and are scaled in f32 when they are added to those of the tile; affine formats, and groups of 16 columns,
// are scaled as they are decoded.
#include "ops/qgemm/sm90_wgmma/sm90_wgmma_args.h"

#include "ops/qgemm/weight/experts.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/found_rows.cuh"
#include "ops/qgemm/weight/output.cuh"
#include "ops/qgemm/weight/sm90.cuh"
#include "ops/qgemm/weight/tile_ring.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- 1. How a tile is divided.

using Args = QgemmSm90WgmmaArgs;
constexpr int kTokens = kTiling.tokens, kStages = kTiling.stages;
constexpr bool kExperts = kTiling.experts;
// Whether it may find the tiles of experts and rows of x by itself.
constexpr bool kFindsRows = kTiling.finds_rows();
static_assert(kStages > 1 && !(kExperts && kDoubleQuant));
constexpr int kWarpgroups = kTiling.warpgroups();  // that multiply; one more copies
constexpr int kMultipliers = kWarpgroups * 128, kThreads = kTiling.threads();
constexpr int kCopiers = kExperts ? 3 : 2;  // warps
using Registers = DealtRegisters<kWarpgroups>;
constexpr int kRowGroups = kTiling.row_groups(), kColGroups = kTiling.col_groups();
// Of strips: of a tile, of a warpgroup.
constexpr int kTilePairs = kTiling.strips / 2, kPairs = kTilePairs / kRowGroups;
constexpr int kStageCols = kTiling.stage_cols(), kGroupCols = kStageCols / kColGroups;  // of a warpgroup
constexpr int kStageBytes = kTiling.stage_bytes(), kStripBytes = kTiling.strip_bytes();
constexpr int kBlockCols = kTiling.block_cols, kBlockBytes = kTiling.block_bytes;
constexpr int kStageBlocks = kStageCols / kBlockCols;
// Columns that are added up before they are scaled: of one group, and no more than a lane decodes while those
// before are multiplied.
constexpr int kChunkCols = kGroup == 32 ? 32 : 64, kChunkSteps = kChunkCols / 16;
// Of a stage: pairs of strips take turns, so that the scales of one are loaded early. Even, so that what is
// under way is in the same registers when a stage begins.
constexpr int kChunks = kGroupCols / kChunkCols * kPairs;
constexpr int kChunkWords = (kChunkCols + kWordsCols - 1) / kWordsCols;  // 16 bytes of codes each
static_assert(kGroupCols / kChunkCols % 2 == 0 && kPairs <= 2);
constexpr bool kScalesChunks = kGroup != 0 && !kScalesWeights;  // else rows, at the end, or weights
constexpr int kSums = kTokens / 2;                              // of a thread and a pair of strips
constexpr int kBoxBytes = kTokens * 128;                        // of x: 64 columns
// Of scratch memory: lines of the sums of a warpgroup; of those of all but the first along the columns, which
// those of the other block follow.
constexpr int kGroupLines = 4 * kPairs * kSums;
constexpr int kClusterLines = kRowGroups * (kColGroups - 1) * kGroupLines;
// Whether sums of a tile may be in several warpgroups or blocks.
constexpr bool kAddsSums = kColGroups > 1 || kTiling.shared;
static_assert(kClusterLines + (kTiling.shared ? kGroupLines : 0) <= 256);
static_assert(!kTiling.shared || kTiling.can_share());

// From the codes of a column 0: where those of a column begin that a lane reads at once.
__device__ constexpr int code_offset(int col) {
  return col / kBlockCols * kBlockBytes + col % kBlockCols / kUnitCols * (kUnitRows * kUnitCols * kBits / 8) +
         col % kUnitCols / kWordsCols * 1024;
}
// Where the scales of the group of a column begin.
__device__ constexpr int group_offset(int col) {
  return col / kBlockCols * kBlockBytes + kUnitRows * kBlockCols * kBits / 8 +
         col % kBlockCols / kGroupSize * (kUnitRows * kScaleBytes);
}
// Likewise its zero points or biases.
__device__ constexpr int second_offset(int col) {
  return col / kBlockCols * kBlockBytes +
         kUnitRows * (kBlockCols * kBits / 8 + kBlockCols / kGroupSize * kScaleBytes) +
         col % kBlockCols / kGroupSize * (kUnitRows * kSecondBytes);
}

// Pairs of strips of a weight, which the cluster makes for some rows of x; last_pair 0: there are no others.
struct Work {
  i32 pair = 0, last_pair = 0;
  i32 expert = 0, first_row = 0;  // of experts; the rows of x in their order
  __device__ __forceinline__ i32 num_strips(const Args& args) const {
    return min(2 * last_pair, args.num_strips) - 2 * pair;
  }
};
__device__ __forceinline__ const u8* weight_of(const Args& args, const Work& work) {
  return kExperts ? args.weight + work.expert * args.experts.weight_bytes : args.weight;
}
// The same in shared memory, with what its rows are.
struct alignas(16) TileSlot {
  Work work;
  alignas(16) i32 count;   // of rows
  i32 rows[kTokens];       // of y; below 0: none
  i32 rows_of_x[kTokens];  // at least 0
  float weights[kTokens];  // by routing
};
static_assert(!kExperts || sizeof(TileSlot) == kTiling.tile_bytes());
using WgmmaTileRing = TileRing<TileSlot, kWgmmaTileSlots>;

// What a thread knows of its block: shared memory, its own place, and the work.
struct Block {
  u8* ring;
  float* map;  // of double quantization
  Barrier *full, *empty;
  // Of the sums of a tile that the other block of the cluster sends; when they may be overwritten.
  Barrier *received, *taken;
  int thread, lane, warp, warpgroup;
  int first_pair, last_pair;    // of strips of the cluster, of one weight
  int first_stage, last_stage;  // of a tile, of this block

  __device__ __forceinline__ Block(const Args& args, u8* shared)
      : ring(shared + kTiling.ring_offset()),
        map(reinterpret_cast<float*>(shared + kTiling.map_offset())),
        full(reinterpret_cast<Barrier*>(shared + kTiling.barrier_offset())),
        empty(full + kStages),
        received(empty + kStages),
        taken(received + 1),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        warp(__shfl_sync(~0u, thread / 32, 0)),
        warpgroup(warp / 4) {
    const int log2_cluster = kTiling.shared ? args.log2_cluster : 0;
    const int worker = static_cast<int>(blockIdx.x) >> log2_cluster, half = static_cast<int>(rank());
    first_pair = worker * args.num_pairs + min(worker, args.num_longer);
    last_pair = first_pair + args.num_pairs + (worker < args.num_longer ? 1 : 0);
    first_stage = args.num_stages * half >> log2_cluster;
    last_stage = args.num_stages * (half + 1) >> log2_cluster;
  }

  // In the cluster. Read each time: a register for it, or for what follows from it, would be taken from the
  // loop over stages, which then has up to a sixth more instructions.
  __device__ __forceinline__ u32 rank() const { return kTiling.shared ? cluster_rank() : 0; }

  __device__ __forceinline__ WgmmaTileRing tile_ring() const {
    u8* const shared = ring - kTiling.ring_offset();
    return {shared + kTiling.tile_offset(), shared + kTiling.tile_barrier_offset()};
  }

  // By each of those who copy.
  __device__ __forceinline__ void init_barriers(int copier) const {
    for (int slot = copier; slot < kStages; slot += kCopiers) {
      init_barrier(full + slot, 2);
      init_barrier(empty + slot, kWarpgroups * 4);
    }
    if (copier != 0) return;
    if constexpr (kExperts) tile_ring().init_barriers(2 + kWarpgroups * 4);
    init_barrier(received, 1);
    init_barrier(taken, 4);
  }
};

// ---- 2. Tiles of a block, one after the other.

// Whether tiles are found here, not in a list, and rows of x lie where they were given.
__device__ __forceinline__ bool finds_rows(const Args& args) {
  return kFindsRows && args.expert_tiles == nullptr;
}

// Of experts, all of them, into their ring. By a warp. All clusters have as many, give or take one.
__device__ __forceinline__ void list_tiles(const Args& args, const Block& block) {
  using Found = FoundRows<kWgmmaFoundRows>;
  auto& found = *reinterpret_cast<Found*>(block.ring - kTiling.ring_offset() + kTiling.found_offset());
  wait_for_earlier();
  const bool finds = finds_rows(args);
  if (finds) find_rows(found, args.experts, kTokens);
  const i32 row_tiles = finds ? found.num_tiles : args.expert_tiles[0].expert;
  const u32 log2_cluster = kTiling.shared ? static_cast<u32>(args.log2_cluster) : 0;
  const u32 worker = blockIdx.x >> log2_cluster, num_workers = gridDim.x >> log2_cluster;
  const u32 of_weight = static_cast<u32>(args.num_pairs), all = static_cast<u32>(row_tiles) * of_weight;
  // all * i / num_workers, without a division of 64 bits.
  const u32 each = all / num_workers, rest = all - each * num_workers;
  const auto begin_of = [&](u32 i) { return each * i + rest * i / num_workers; };
  u32 at = begin_of(worker);
  const u32 end = begin_of(worker + 1);
  const WgmmaTileRing ring = block.tile_ring();
  // Rows are looked up once for all tiles that have them: it takes three loads, one after the other, which is
  // longer than to multiply a tile of few columns.
  static_assert(!kExperts || kTokens <= 32);  // a lane has one
  u32 of_rows = ~0u;
  i32 expert = 0, first_row = 0, count = 0, row = -1, row_of_x = 0;
  float weight = 1;
  const auto look_up = [&](u32 number) {
    of_rows = number;
    if (finds) {
      const Found::Tile tile = found.tiles[number];
      expert = tile.expert;
      first_row = tile.first;
      count = tile.count;
      const i32 i = first_row + min(block.lane, count - 1);
      row = block.lane < count ? found.slots[i] : -1;
      row_of_x = found.rows_of_x[i];
      weight = found.weights[i];
      return;
    }
    const ExpertTileEntry entry = args.expert_tiles[1 + number];
    expert = entry.expert;
    first_row = entry.first;
    count = entry.count;
    row = block.lane < count ? slot_of(args.experts, first_row + block.lane) : -1;
    const bool is_weighted = row >= 0 && args.experts.routing_weights != nullptr;
    weight = is_weighted ? args.experts.routing_weights[row] : 1;
  };
  for (WgmmaTileRing::Place place;; place.advance(), ++at) {
    Work work;
    if (at < end) {
      const u32 number = at / of_weight;
      if (number != of_rows) look_up(number);
      const i32 pair = static_cast<i32>(at - number * of_weight) * kTilePairs;
      work = {pair, min(pair + kTilePairs, (args.num_strips + 1) / 2), expert, first_row};
    }
    TileSlot& slot = ring.wait_empty(place);
    if (block.lane < kTokens) {
      slot.rows[block.lane] = row;
      if constexpr (kFindsRows) slot.rows_of_x[block.lane] = row_of_x;
      slot.weights[block.lane] = weight;
    }
    if (block.lane == 0) slot.work = work, slot.count = count;
    __syncwarp();
    if (block.lane == 0) ring.say_full(place);
    if (work.last_pair == 0) return;
  }
}

// What a block does: by a warp, or by one lane of it.
template <bool kByWarp>
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(const Block& block) : block_(block), next_{block.first_pair} {}

  // False behind the last one. Of experts the tile keeps its slot until it is released.
  __device__ __forceinline__ bool next(Work& work) {
    if constexpr (kExperts) {
      work = slot().work;
    } else {
      work.pair = next_;
      next_ += kTilePairs;
      work.last_pair = min(next_, block_.last_pair);
      if (work.pair >= block_.last_pair) return false;
    }
    return work.last_pair > 0;
  }
  // Of experts.
  __device__ __forceinline__ const TileSlot& slot() const { return block_.tile_ring().wait_full(place_); }
  __device__ __forceinline__ bool has_next() const {
    WgmmaTileRing::Place after = place_;
    after.advance();
    return block_.tile_ring().wait_full(after).work.last_pair > 0;
  }
  __device__ __forceinline__ void release() {
    if constexpr (kByWarp) __syncwarp();
    if (!kByWarp || block_.lane == 0) block_.tile_ring().release(place_);
    place_.advance();
  }

 private:
  const Block& block_;
  int next_;
  WgmmaTileRing::Place place_;
};

// ---- 3. The ring is filled: by one lane each.

__device__ __forceinline__ void copy_codes(const Args& args, const Block& block) {
  RingPlace<kStages> place{0, 1};
  int before_x = kStages / 2;  // stages; those behind them would hold up x
  Work work;
  for (Tiles<false> tiles(block); tiles.next(work);) {
    if constexpr (kExperts) tiles.release();
    const u8* from =
        weight_of(args, work) + 2 * work.pair * args.strip_bytes + i64{block.first_stage} * kStripBytes;
    // To the end of the strip.
    int num_bytes = (args.num_blocks - block.first_stage * kStageBlocks) * kBlockBytes;
    const int num_strips = work.num_strips(args);
    for (int stage = block.first_stage; stage < block.last_stage; ++stage, place.advance()) {
      if (before_x-- == 0) wait_for_earlier();
      const u32 size = static_cast<u32>(min(num_bytes, kStripBytes));
      u8* to = block.ring + place.stage * kStageBytes + kTiling.x_bytes();
      wait(block.empty + place.stage, place.parity);
      Barrier* const full = block.full + place.stage;
      arrive_expecting(full, size * static_cast<u32>(num_strips));
      const u8* source = from;
#pragma unroll
      for (int i = 0; i < kTiling.strips; ++i, source += args.strip_bytes)
        if (i < num_strips) copy_bulk_once(to + i * kStripBytes, source, size, full);
      from += kStripBytes;
      num_bytes -= kStripBytes;
    }
  }
}

__device__ __forceinline__ void copy_x(const Args& args, const Block& block) {
  RingPlace<kStages> place{0, 1};
  wait_for_earlier();
  Work work;
  for (Tiles<false> tiles(block); tiles.next(work);) {
    if constexpr (kExperts) tiles.release();
    for (int stage = block.first_stage; stage < block.last_stage; ++stage, place.advance()) {
      wait(block.empty + place.stage, place.parity);
      Barrier* const full = block.full + place.stage;
      // Of experts, boxes have rows of the next ones, too, or zeros behind the last row.
      arrive_expecting(full, static_cast<u32>((kExperts ? kTokens : args.m) * kStageCols * 2));
#pragma unroll
      for (int i = 0; i < kStageCols / 64; ++i)
        load_tile(block.ring + place.stage * kStageBytes + i * kBoxBytes, &args.x, work.first_row,
                  stage * kStageCols + i * 64, full);
    }
  }
}

// Rows of x that lie anywhere, by a warp. Some stages are under way: a stage is full when those behind it
// were asked for. These have room besides two that are kept: who multiplies one waits for the next.
__device__ __forceinline__ void gather_x(const Args& args, const Block& block) {
  constexpr int kUnderWay = min(3, kStages - 2);
  const auto* const x = static_cast<const Memory*>(args.x_as_it_lies);
  RingPlace<kStages> place{0, 1}, asked_for;
  int under_way = 0;
  const auto finish_stage = [&] {
    fence_proxy_async();
    __syncwarp();
    if (block.lane == 0) arrive(block.full + asked_for.stage);
    asked_for.advance();
  };
  wait_for_earlier();
  Work work;
  for (Tiles<true> tiles(block); tiles.next(work); tiles.release()) {
    const TileSlot& slot = tiles.slot();
    for (int stage = block.first_stage; stage < block.last_stage; ++stage, place.advance()) {
      wait(block.empty + place.stage, place.parity);
      const u32 boxes = shared_address(block.ring) + static_cast<u32>(place.stage * kStageBytes);
#pragma unroll 1
      for (int row = 0; row < slot.count; ++row) {
        const Memory* const from = x + i64{slot.rows_of_x[row]} * args.k;
#pragma unroll 1
        for (int i = block.lane * 8; i < kStageCols; i += 32 * 8) {
          const int col = stage * kStageCols + i;
          const u32 offset = swizzle_128(static_cast<u32>(row * 128 + i % 64 * 2));
          copy_async_or_zero(boxes + static_cast<u32>(i / 64 * kBoxBytes) + offset,
                             from + min(col, static_cast<int>(args.k) - 8), col < args.k);
        }
      }
      commit_copies();
      if (under_way < kUnderWay) {
        ++under_way;
      } else {
        wait_copies<kUnderWay>();
        finish_stage();
      }
    }
  }
  wait_copies();
  for (; under_way > 0; --under_way) finish_stage();
}

// ---- 4. What a lane has of a tile.

// Of every tile: a lane has rows 2a and 2a + 1 of a strip, and of a second one 64 rows on where kPairs is 2.
struct Lane {
  int row_group, col_group;  // of its warpgroup
  int warp_of_group, a, t;
  int pair_of_tile, strip_of_tile;  // the first that the warpgroup, the warp has
  int first_col;                    // of a stage
  int codes, scales, seconds;       // in a stage: of the first column
  u32 table;
  RingTile x;  // from the first column on

  __device__ __forceinline__ explicit Lane(const Block& block)
      : row_group(block.warpgroup / kColGroups),
        col_group(block.warpgroup % kColGroups),
        warp_of_group(block.warp % 4),
        a(8 * (warp_of_group & 1) + block.lane / 4),
        t(block.lane % 4),
        pair_of_tile(row_group * kPairs),
        strip_of_tile(2 * pair_of_tile + warp_of_group / 2),
        first_col(col_group * kGroupCols) {
    const int strip = kTiling.x_bytes() + strip_of_tile * kStripBytes;
    codes = strip + code_offset(first_col) + packed_slot(a, t) * 16;
    scales = strip + group_offset(first_col) + 2 * a * kScaleBytes;
    seconds = strip + second_offset(first_col) + 2 * a * kSecondBytes;
    table = pair_table_lane(block.lane, block.rank());
    x = {k_major_tile(block.ring + first_col / 64 * kBoxBytes, 1024)};
  }
};

struct Tile {
  int pair;                   // of strips: the first
  int num_pairs;              // that this warpgroup has, and those of later tiles
  bool active, active_again;  // whether it has any, now and in the next tile
  bool active_before;         // in the one before
  int strip, row;             // the first of the lane
  float sums[kPairs][kSums] = {};
  RowPair rows[2];  // of two pairs of strips, or of every other chunk of one

  // Of experts, any tile may have fewer pairs than others. So all warpgroups multiply what is in the ring,
  // and each stores the pairs that there are. active_again is found later.
  __device__ __forceinline__ Tile(const Block& block, const Lane& lane, const Work& work, bool is_first)
      : pair(work.pair),
        num_pairs((kExperts ? work.last_pair : block.last_pair) - pair - lane.pair_of_tile),
        active(kExperts || num_pairs > 0),
        active_again(num_pairs > kTilePairs),
        active_before(kExperts ? !is_first : pair > block.first_pair),
        strip(2 * pair + lane.strip_of_tile),
        row(strip * 32 + 2 * lane.a) {}

  // f(sum, number), in a fixed order.
  template <class F>
  __device__ __forceinline__ void each_sum(const F& f) {
#pragma unroll
    for (int i = 0; i < kPairs * kSums; ++i) f(sums[i / kSums][i % kSums], i);
  }
};

// ---- 5. Chunks are decoded and multiplied.

class Multiplier {
 public:
  __device__ __forceinline__ Multiplier(const Args& args, const Block& block, const Lane& lane)
      : args_(args), block_(block), lane_(lane) {}

  // The parameters of rows that have one scale.
  __device__ __forceinline__ void load_tile_rows(Tile& tile, const u8* weight) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int b = i % kPairs;
      const i64 at = min(tile.strip + 2 * b, args_.num_strips - 1) * i64{kUnitRows} + 2 * lane_.a;
      load_rows(tile.rows[i], weight + args_.scales + at * kScaleBytes,
                weight + args_.seconds + at * kSecondBytes, tile.row + 64 * b, 0, true);
    }
  }

  // The sums of a tile over the stages of the block.
  __device__ __forceinline__ void run(Tile& tile, const Work& work) {
    if constexpr (kGroup == 0) load_tile_rows(tile, weight_of(args_, work));
    if (tile.active)
      multiply(tile);
    else
      skip();
    place_.advance();
  }

 private:
  // While a chunk is multiplied the next one is decoded.
  __device__ __forceinline__ void multiply(Tile& tile) {
    Chunks chunks;
    const int last_stage = block_.last_stage;
    wait(block_.full + place_.stage, place_.parity);
    load_chunk(chunks, 0, block_.first_stage);
    decode_chunk(chunks, tile, 0, block_.first_stage);
    for (int stage = block_.first_stage; stage < last_stage; ++stage) {
      const int done = place_.stage;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        start_products(chunks, tile, c, done);
        const bool ends_stage = c + 1 == kChunks, goes_on = !ends_stage || stage + 1 < last_stage;
        const int next = ends_stage ? 0 : c + 1;
        if (goes_on) {
          if (ends_stage) {
            place_.advance();
            wait(block_.full + place_.stage, place_.parity);
          }
          load_chunk(chunks, next, ends_stage ? stage + 1 : stage);
        }
        if (c > 0) {
          wgmma_wait<1>();
          add_chunk(tile, chunks, c - 1);
        }
        if (goes_on) decode_chunk(chunks, tile, next, ends_stage ? stage + 1 : stage);
      }
      // Sums that are under way from one turn of the loop to the next would make the compiler wait for each
      // instruction.
      wgmma_wait<0>();
      if constexpr (!kScalesChunks)
        for (auto& some : tile.sums) pin(some);
      add_chunk(tile, chunks, kChunks - 1);
      release(done);
    }
  }

  // Of a tile of which the warpgroup has nothing; the block has a stage at least.
  __device__ __forceinline__ void skip() {
    for (int stage = block_.first_stage;; place_.advance()) {
      wait(block_.full + place_.stage, place_.parity);
      release(place_.stage);
      if (++stage == block_.last_stage) return;
    }
  }

 private:
  // Chunk c of a stage is of pair of strips c % kPairs, of columns c / kPairs * kChunkCols and up of those of
  // the warpgroup. Two are under way.
  struct Chunks {
    u32 a[2][kChunkSteps][4];  // operand A
    float sums[2][kSums];
    Words4 words[kPairs][kChunkWords];  // codes
  };

  // First its codes, which take a while; then decode_chunk() makes them a[c % 2].
  __device__ __forceinline__ void load_chunk(Chunks& chunks, int c, int stage) const {
    const u8* const from =
        block_.ring + place_.stage * kStageBytes + c % kPairs * 2 * kStripBytes + lane_.codes;
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i)
      if (const int col = c / kPairs * kChunkCols + i * kWordsCols; col % kWordsCols == 0)
        chunks.words[c % kPairs][i] = load_words(from + code_offset(col));
    // What was not copied may be anything: of floating codes NaN, which times x, zero there, is not zero.
    if (kFloating && !is_inside(column_of(c, stage)))
#pragma unroll
      for (Words4& words : chunks.words[c % kPairs]) words = {};
  }
  // The first column of chunk c of a stage; whether columns from there on were copied.
  __device__ __forceinline__ int column_of(int c, int stage) const {
    return stage * kStageCols + lane_.first_col + c / kPairs * kChunkCols;
  }
  __device__ __forceinline__ bool is_inside(int col) const { return col < args_.num_blocks * kBlockCols; }

  __device__ __forceinline__ void decode_chunk(Chunks& chunks, Tile& tile, int c, int stage) const {
    const int b = c % kPairs, first = c / kPairs * kChunkCols;
    const u8* const from = block_.ring + place_.stage * kStageBytes + b * 2 * kStripBytes;
    RowPair& rows = tile.rows[c % 2];
#pragma unroll
    for (int j = 0; j < kChunkSteps; ++j) {
      if (const int of_chunk = 16 * j; kGroup != 0 && of_chunk % min(kGroupSize, kChunkCols) == 0) {
        const int of_lane = first + of_chunk, col = column_of(c, stage) + of_chunk;
        load_rows(rows, from + lane_.scales + group_offset(of_lane) - group_offset(0),
                  from + lane_.seconds + second_offset(of_lane) - second_offset(0), tile.row + 64 * b,
                  col / kGroupSize, is_inside(col));
      }
      decode(chunks.a[c % 2][j], chunks.words[b][16 * j / kWordsCols], (first + 16 * j) % kWordsCols / 16,
             rows, lane_.table);
    }
#pragma unroll
    for (int j = 0; j < kChunkSteps; ++j) pin(chunks.a[c % 2][j]);
  }

  // `row`: the first; `group`: of the row; `inside`: whether anything was copied.
  __device__ __forceinline__ void load_rows(RowPair& to, const u8* scales, const u8* seconds, int row,
                                            int group, bool inside) const {
    if constexpr (kDoubleQuant) {
      const u32 codes = *reinterpret_cast<const u16*>(scales);
      const float* const of_weight = reinterpret_cast<const float*>(args_.weight + args_.absmax);
      const float offset = *reinterpret_cast<const float*>(args_.weight + args_.offset);
      const int at = min(row, args_.n - 1) * args_.groups + group;
      const float absmax[2] = {of_weight[min(at, args_.last_scale) >> 8],
                               of_weight[min(at + args_.groups, args_.last_scale) >> 8]};
      decode_scales(to.scale, codes, block_.map, absmax, offset);
    } else {
      load_scales<kParameterBytes>(to.scale, scales, has_bf16_scales(args_));
    }
    // What was not copied may be anything.
    to.scale[0] = inside ? to.scale[0] : 0;
    to.scale[1] = inside ? to.scale[1] : 0;
    if constexpr (kAsymmetric) {
      const u32 zeros = *reinterpret_cast<const u16*>(seconds);
      to.zero[0] = above_2_23(zeros & 255);
      to.zero[1] = above_2_23(zeros >> 8);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to.zero_pair[i] = store_pair(Element(), to.zero[i] - kMagic, to.zero[i] - kMagic);
    }
    if constexpr (kScalesWeights)
#pragma unroll
      for (int i = 0; i < 2; ++i) to.scale_pair[i] = store_pair(Element(), to.scale[i], to.scale[i]);
    if constexpr (kAffine) {
      float bias[2];
      load_scales<kParameterBytes>(bias, seconds, has_bf16_scales(args_));
#pragma unroll
      for (int i = 0; i < 2; ++i) to.bias_pair[i] = inside ? store_pair(Element(), bias[i], bias[i]) : 0;
    }
  }

  // Of chunk c of the stage in `slot`: to sums of its own, or added to those of the tile.
  __device__ __forceinline__ void start_products(Chunks& chunks, Tile& tile, int c, int slot) const {
    const int col = c / kPairs * kChunkCols;
    const int first = slot * (kStageBytes / 16) + (col / 64 * kBoxBytes + col % 64 * 2) / 16;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kChunkSteps; ++j) {
      const u64 x = lane_.x.at(first + j * 2);
      if constexpr (kScalesChunks)
        wgmma<Major::k>(Element(), chunks.sums[c % 2], chunks.a[c % 2][j], x, j > 0);
      else
        wgmma<Major::k>(Element(), tile.sums[c % kPairs], chunks.a[c % 2][j], x);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void add_chunk(Tile& tile, Chunks& chunks, int c) const {
    if constexpr (kScalesChunks) {
      float(&sums)[kSums] = tile.sums[c % kPairs];
      pin(chunks.sums[c % 2]);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        sums[i] = multiply_add(tile.rows[c % 2].scale[i / 2 % 2], chunks.sums[c % 2][i], sums[i]);
    }
  }

  // By all warps, when the sums of the stage are done.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (block_.lane == 0) arrive(block_.empty + slot);
  }

  const Args& args_;
  const Block& block_;
  const Lane& lane_;
  RingPlace<kStages> place_;
};

// ---- 6. The sums of the warpgroups, then of the blocks, are added up.

// Sum i of the lane in the scratch memory that begins at line `first`.
__device__ __forceinline__ u32 line_of(const Block& block, const Lane& lane, int first, int i) {
  return scratch_address(first + lane.warp_of_group * (kPairs * kSums) + i, block.lane, block.rank());
}

// The warpgroups that have the columns of the same rows give theirs to the first of them.
__device__ __forceinline__ void add_warpgroups(Tile& tile, const Block& block, const Lane& lane) {
  // The second barrier: what was read may be overwritten.
  constexpr int kNumThreads = kColGroups * 128;
  const int stored = 1 + 2 * lane.row_group, read = stored + 1,
            lines = lane.row_group * (kColGroups - 1) * kGroupLines;
  if (tile.active && lane.col_group > 0) {
    if (tile.active_before) sync_some(read, kNumThreads);
    tile.each_sum([&](float& sum, int i) {
      store_shared(line_of(block, lane, lines + (lane.col_group - 1) * kGroupLines, i), sum);
    });
    arrive_some(stored, kNumThreads);
  } else if (tile.active) {
    sync_some(stored, kNumThreads);
#pragma unroll
    for (int c = 0; c < kColGroups - 1; ++c)
      tile.each_sum(
          [&](float& sum, int i) { sum += load_shared(line_of(block, lane, lines + c * kGroupLines, i)); });
    if (tile.active_again) arrive_some(read, kNumThreads);
  }
}

// Each block of a cluster finishes half of the rows, or the first all. `stores`: whether the warpgroup has
// sums, then whether it stores them. `parity`: of the tile.
__device__ __forceinline__ void add_blocks(Tile& tile, const Block& block, const Lane& lane, bool& stores,
                                           u32 parity) {
  const u32 finisher = kRowGroups > 1 ? static_cast<u32>(lane.row_group) : 0;
  if (stores && block.rank() != finisher) {
    if (tile.active_before) wait_cluster(block.taken, parity ^ 1);
    const u32 barrier = address_in(finisher, shared_address(block.received));
    tile.each_sum([&](float& sum, int i) {
      store_async(address_in(finisher, line_of(block, lane, kClusterLines, i)), sum, barrier);
    });
  }
  stores = stores && block.rank() == finisher;
  if (!stores) return;
  if (lane.warp_of_group == 0 && block.lane == 0) arrive_expecting(block.received, kGroupLines * 128);
  wait_cluster(block.received, parity);
  tile.each_sum([&](float& sum, int i) { sum += load_shared(line_of(block, lane, kClusterLines, i)); });
  __syncwarp();
  if (block.lane == 0 && tile.active_again)
    arrive_cluster(address_in(finisher ^ 1, shared_address(block.taken)));
}

// ---- 7. y is stored.

// `slot`: of experts.
__device__ __forceinline__ void store_tile(const Args& args, const Tile& tile, const Lane& lane,
                                           const TileSlot* slot) {
  Memory* const y = static_cast<Memory*>(args.y) + (kExperts ? 0 : 2 * lane.t * i64{args.n}) + tile.row;
  const i64 expert = kExperts ? slot->work.expert : 0;
  const float factor =
      global_factor(args.weight + (kExperts ? expert * args.experts.weight_bytes : 0), args.global_scale);
#pragma unroll
  for (int b = 0; b < kPairs; ++b) {
    const int row = tile.row + 64 * b;
    if (b >= tile.num_pairs || row >= args.n) break;
    const bool second = row + 1 < args.n;
    const Memory* const biases = static_cast<const Memory*>(args.bias) + expert * args.n + row;
    float bias[2] = {};
    if (args.bias != nullptr) {
      bias[0] = load(Element(), biases[0]);
      if (second) bias[1] = load(Element(), biases[1]);
    }
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 2 * i + 2 * lane.t + e;
        const i64 row_of_y = kExperts ? slot->rows[token] : 2 * i + e;
        if (kExperts ? row_of_y < 0 : token >= args.m) continue;
        float v[2] = {tile.sums[b][i + e], tile.sums[b][i + e + 2]};
        if constexpr (kGroup == 0 && !kAffine) {
          v[0] *= tile.rows[b].scale[0];
          v[1] *= tile.rows[b].scale[1];
        }
        if constexpr (kGlobalScale) {
          v[0] *= factor;
          v[1] *= factor;
        }
        v[0] += bias[0];
        v[1] += bias[1];
        if constexpr (kExperts) {
          if (args.partials != nullptr) {
            *reinterpret_cast<FloatPair*>(args.partials + row_of_y * args.partial_stride + row) = {v[0],
                                                                                                   v[1]};
            continue;
          }
          v[0] *= slot->weights[token];
          v[1] *= slot->weights[token];
        }
        store_two(y + row_of_y * args.n + 64 * b, v, second, args.accumulate, args.pairs);
      }
    }
  }
}

#endif

extern "C" __global__ void
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__launch_bounds__(kThreads, 1)
#endif
    qgemm_sm90_wgmma(const __grid_constant__ QgemmSm90WgmmaArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ Words4 shared_words[];
  const Block block(args, reinterpret_cast<u8*>(shared_words));

  let_next_start();
  const int copier = block.warp - kWarpgroups * 4;
  start_ring<kMultipliers, kCopiers>(copier, &args.x, [&] { block.init_barriers(copier); });
  const auto shares = [&] { return kTiling.shared && args.log2_cluster > 0; };
  if (shares()) cluster_arrive_relaxed();

  if (block.warpgroup == kWarpgroups) {
    keep_registers<Registers::kCopy>();
    if (copier == 0 && elect_lane())
      copy_codes(args, block);
    else if (copier == 1 && finds_rows(args))
      gather_x(args, block);
    else if (copier == 1 && elect_lane())
      copy_x(args, block);
    else if (kExperts && copier == 2)
      list_tiles(args, block);
    else if (finds_rows(args) && copier == 3 && (args.partials != nullptr || !args.accumulate)) {
      wait_for_earlier();
      clear_rows(args.experts, args.partials, args.partial_stride, static_cast<u16*>(args.y), args.n);
    }
    return;
  }

  take_registers<Registers::kMultiply>();
  if constexpr (kBits == 4) build_pair_table<kMultipliers>(args.values, block.thread, block.rank());
  if constexpr (kDoubleQuant)
    if (block.thread < 256)
      block.map[block.thread] = reinterpret_cast<const float*>(args.weight + args.map)[block.thread];
  wait_for_earlier();
  wait_for_ring<kMultipliers, kCopiers>();
  if (shares()) cluster_wait();  // the other block has its barriers

  const Lane lane(block);
  Multiplier multiplier(args, block, lane);
  Tiles<true> tiles(block);
  Work work;
  for (u32 number = 0; tiles.next(work); ++number) {
    Tile tile(block, lane, work, number == 0);
    multiplier.run(tile, work);
    if constexpr (kExperts && kAddsSums) tile.active_again = tiles.has_next();
    if constexpr (kColGroups > 1) add_warpgroups(tile, block, lane);
    bool stores = tile.active && lane.col_group == 0;
    if (shares()) add_blocks(tile, block, lane, stores, number % 2);
    if (stores) store_tile(args, tile, lane, kExperts ? &tiles.slot() : nullptr);
    if constexpr (kExperts) tiles.release();
  }
#endif
}

}  // namespace halfbyte::device
