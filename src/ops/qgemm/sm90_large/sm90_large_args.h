// What the kernel of variant qgemm_sm90_large is given, and how it divides its work: shared by host and
// device, freestanding.
#pragma once

#include "formats/packed.h"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/unit_slot_args.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

// What is summed in a stage: columns (forward) or rows (transposed) of the weight.
inline constexpr int kLargeStage = 64;
// Of experts, tiles that are found ahead, and bytes of each in shared memory.
inline constexpr int kLargeTileSlots = 4, kLargeTileBytes = 32;

// A tile of y: tokens are rows of x, features are rows (forward) or columns (transposed) of the weight. A
// stage has x [tokens][64], of one or two boxes, and units of the packed weight: forward, one of each of some
// strips, transposed, some of each of two strips.
struct QgemmSm90LargeTiling {
  int tokens;      // at most; a multiple of 16, above 256 of 32
  int blocks;      // of 64 features, that a warpgroup multiplies: 1 or 2
  int warpgroups;  // that multiply: 2 or 4
  int splits;  // of them have the same block of features, each its share of the stages; 1, of 4 also 2 or 4
  int bits;
  bool computed;        // codes of 4 bits are integers that are computed, else they are looked up
  int group;            // columns that share a scale; 0: a row
  int parameter_bytes;  // of the parameters of a row and group
  bool double_quant;
  int stages;
  bool multicast;  // blocks of a cluster may load half of x each, for both: it comes in two boxes
  int sharers;     // blocks that share a tile: 2; 4 or 8, where all tiles are shared; of four warpgroups 1
  bool experts;    // rows of x meet the weights of experts: their tiles are in a list
  // Of experts: half of the features are a gate. A tile has as many of them as of those that they open.
  bool swiglu;

  HALFBYTE_FN int multipliers() const { return 128 * warpgroups; }  // threads
  HALFBYTE_FN int threads() const { return multipliers() + 128; }   // of a block: one warpgroup copies
  HALFBYTE_FN int features() const { return 64 * warpgroups / splits * blocks; }
  HALFBYTE_FN int y_features() const { return features() / (swiglu ? 2 : 1); }
  HALFBYTE_FN int units() const { return features() / formats::kUnitRows; }  // of a stage
  HALFBYTE_FN UnitSlot slot() const { return {bits, group, parameter_bytes}; }
  HALFBYTE_FN int x_bytes() const { return tokens * kLargeStage * 2; }
  HALFBYTE_FN int weight_bytes() const { return units() * slot().num_bytes(); }

  // Bytes of shared memory from its begin: the table of pairs, which uses half of each of its rows of 256
  // bytes; the boxes of x of all stages; their units; the map of double quantization; what warps give each
  // other with swiglu; the barriers, and of experts the tiles and their barriers. A table has what is behind
  // the units, but for a map, in the other halves of its rows. Blocks of a cluster exchange sums where the
  // boxes were.
  HALFBYTE_FN bool has_table() const { return bits == 4 && !computed; }
  HALFBYTE_FN int barrier_bytes() const { return stages * 16; }
  HALFBYTE_FN int box_offset() const { return has_table() ? 65536 : 0; }
  HALFBYTE_FN int unit_offset() const { return box_offset() + stages * x_bytes(); }
  HALFBYTE_FN int map_offset() const { return unit_offset() + stages * weight_bytes(); }
  HALFBYTE_FN int end_offset() const {
    return row_list_offset() + (experts && !has_table() ? (tokens + 31) / 32 * 128 : 0);
  }
  // Of experts, the numbers of the rows of x that a tile has: of each 32 those of rows i, i + 8 and up
  // together.
  HALFBYTE_FN int row_list_offset() const {
    return map_offset() + (double_quant ? 1024 : 0) + (swiglu && !has_table() ? gate_bytes() : 0);
  }
  HALFBYTE_FN int row_offset(int i) const {
    const int in_line = (i % 8 * 4 + i % 32 / 8) * 4;
    return has_table() ? 48 * 1024 + i / 32 * 256 + 128 + in_line
                       : row_list_offset() + i / 32 * 128 + in_line;
  }
  // With swiglu, so many times 16 bytes of each thread, and where the i-th are. Sums of more tokens leave
  // registers for one.
  HALFBYTE_FN int gate_groups() const { return tokens > 256 || tokens % 32 != 0 ? 1 : 2; }
  HALFBYTE_FN int gate_bytes() const { return 16 * gate_groups() * multipliers(); }
  HALFBYTE_FN int gate_offset(int thread, int i) const {
    const int number = i * multipliers() + thread;
    return has_table() ? 1024 + number / 8 * 256 + 128 + number % 8 * 16 : map_offset() + number * 16;
  }
  HALFBYTE_FN bool barriers_in_table() const { return has_table() && barrier_bytes() <= 128; }
  HALFBYTE_FN int barrier_offset() const { return barriers_in_table() ? 128 : end_offset(); }
  HALFBYTE_FN int tile_bytes() const { return experts ? kLargeTileSlots * kLargeTileBytes : 0; }
  HALFBYTE_FN int tile_barrier_bytes() const { return experts ? kLargeTileSlots * 16 : 0; }
  HALFBYTE_FN int tile_offset() const {
    return barrier_offset() + (barriers_in_table() ? 256 : barrier_bytes());
  }
  HALFBYTE_FN int tile_barrier_offset() const {
    return tile_offset() + (barriers_in_table() ? 256 : tile_bytes());
  }
  HALFBYTE_FN int shared_bytes() const {
    return end_offset() + (barriers_in_table() ? 0 : barrier_bytes() + tile_bytes() + tile_barrier_bytes());
  }
  // Those who have sums of the same features: each sums up all of a share of the tokens.
  HALFBYTE_FN int shares() const { return splits == 1 ? sharers : splits; }
  // Of the sums, four bytes each, that a block is sent by the others which share a tile, or those that its
  // warpgroups send each other.
  HALFBYTE_FN int exchange_bytes() const {
    return tokens * features() * (shares() - 1) * 4 / (splits == 1 ? sharers : 1);
  }
};

// What a block has of a tile of experts: stages [first_stage, last_stage).
struct QgemmPiece {
  static constexpr int kGives = -1;
  int tile;
  int first_stage, last_stage;
  int givers;  // blocks with other pieces, whose sums it adds; kGives: it gives its sums to one of them
};

// How blocks deal out the tiles of experts, whose number the device alone knows. What tiles are left when all
// blocks had as many are divided along what is summed ("stream-k": Osama et al. 2023, arXiv 2301.03598). They
// lie one behind the other, and each block has a range of their turns, of two stages: pieces of one or more
// tiles, before the tiles that it has whole. Who has the first piece of a tile stores it, when others have
// given it the sums of theirs, which it adds in their order.
//
// Ranges go from the last block to the first: `giver` i of a piece of block b is block b - i. So a block
// waits for those with lower numbers only, which have started before. Else blocks of two products, each with
// a half of the device, could wait for ever for others that find no room.
//
// Where clusters go through pairs of tiles together, these stand for blocks and tiles.
struct QgemmPieces {
  static constexpr int kFewest = 4;      // turns of a range
  static constexpr int kMostGivers = 7;  // of a tile, on average
  int blocks, whole;                     // whole: so many tiles are not divided, the first ones
  int turns;                             // of a tile
  formats::u32 all_turns;                // of those that are divided
  int sharers;                           // blocks that have a range; 0: no tile is divided

  // `stages`: of a tile, even; to divide tiles takes as long as `dividing_stages` for all blocks.
  HALFBYTE_FN QgemmPieces(int num_blocks, int tiles, int stages, int dividing_stages)
      : blocks(num_blocks), whole(tiles), turns(stages / 2), all_turns(0), sharers(0) {
    const int left = tiles % blocks;
    if (left == 0 || (blocks - left) * stages <= blocks * dividing_stages) return;
    all_turns = static_cast<formats::u32>(left) * static_cast<formats::u32>(turns);
    const int most =
        formats::min(left * (1 + kMostGivers), static_cast<int>(all_turns / formats::u32{kFewest}));
    sharers = formats::min(blocks, most);
    if (sharers > left)
      whole = tiles - left;
    else
      sharers = 0;
  }
  // The first turn of a range. One of a few turns of a tile would not be worth its sums.
  HALFBYTE_FN formats::u32 begin_of(int range) const {
    const formats::u32 of_tile = static_cast<formats::u32>(turns), few = kFewest / 2;
    const formats::u32 before_it = static_cast<formats::u32>(range) * all_turns;
    // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): there are ranges
    const formats::u32 begin = before_it / static_cast<formats::u32>(sharers);
    const formats::u32 before = begin % of_tile, behind = of_tile - before;
    return before < few ? begin - before : behind < few ? begin + behind : begin;
  }
  // What `number` of a block is; false behind the last one.
  HALFBYTE_FN bool find(QgemmPiece& piece, int block, int number) const {
    const int range = blocks - 1 - block;
    if (range < sharers) {
      const formats::u32 begin = begin_of(range), end = begin_of(range + 1);
      const int first = static_cast<int>(begin) / turns, last = (static_cast<int>(end) + turns - 1) / turns;
      const int pieces = begin < end ? last - first : 0;
      if (number < pieces) {
        const formats::u32 begin_of_tile = static_cast<formats::u32>((first + number) * turns),
                           end_of_tile = begin_of_tile + static_cast<formats::u32>(turns);
        piece.tile = whole + first + number;
        piece.first_stage = begin > begin_of_tile ? 2 * static_cast<int>(begin - begin_of_tile) : 0;
        piece.last_stage = 2 * static_cast<int>(formats::min(end, end_of_tile) - begin_of_tile);
        piece.givers = 0;
        if (begin > begin_of_tile) {
          piece.givers = QgemmPiece::kGives;
        } else {
          for (int i = range + 1; i < sharers && begin_of(i) < end_of_tile; ++i) ++piece.givers;
        }
        return true;
      }
      number -= pieces;
    }
    piece = {block + number * blocks, 0, 2 * turns, 0};
    return piece.tile < whole;
  }
};

struct QgemmSm90LargeArgs {
  // [m, k], transposed [m, n]: in boxes of `tokens` rows, or half as many; the last, where it has fewer, in
  // boxes of as many, since a row of a box beyond x takes as long as several within.
  formats::TensorMap x, last_x;
  const formats::u8* weight;
  const void* bias;  // null: none
  void* y;
  CodeValuesArgs values;             // of codes of 4 bits
  float* partials;                   // [parts][m][partial_stride]: sums, or parts of them; null: y is stored
  formats::i64 strip_bytes;          // of the weight, and its sections:
  formats::i64 scales, seconds;      // where a row has one scale; zero points or biases
  formats::i64 absmax, map, offset;  // of double quantization
  formats::i64 global_scale;
  formats::i32 block_bytes;
  formats::i32 strips, units;   // of the weight; of a strip
  formats::i32 gate_strips;     // with swiglu, of half of the weight
  formats::i32 n, groups;       // of the weight; of a row
  formats::i32 m, features;     // of y
  formats::i32 partial_stride;  // even
  // Of a tile, a multiple of 2: the last may lie beyond x. Tiles that are shared have two or more for each of
  // those who share it.
  formats::i32 stages;
  formats::i32 part_stages;  // of a part but the last, a multiple of 2
  formats::i32 feature_tiles, token_tiles;
  formats::i32 tokens;  // of a tile: at most those of the tiling; even
  // 1: the blocks of a cluster have neighbouring features and load x for each other; feature_tiles and
  // `whole` are multiples of 2, of experts feature_tiles. 0: each loads its own.
  formats::i32 multicast;
  formats::i32 panel;  // tiles of tokens that are gone through before the next ones
  formats::i32 tiles,
      whole;         // whole: tiles of one block each. The blocks of a cluster share one of the others.
  bool bf16_scales;  // parameters of two bytes are bf16, else f16
  bool accumulate;
  // Of a kernel for experts, whose tiles of tokens are in a list: neither token_tiles, panel, tiles and whole
  // nor last_x are used, and m is all rows.
  ExpertsArgs experts;
  const ExpertTileEntry* expert_tiles;
  // Of experts, where rows of x are gathered: the numbers of those that rows have in the order of experts,
  // null where x is in that order itself; x, and chunks of 16 bytes of its rows.
  const formats::i32* rows_of_x;
  const void* x_as_it_lies;
  formats::i32 row_chunks, row_bytes;
  // Of experts: sums that blocks give each other, of a tile each, and flags of their warps, zeros at first.
  // To give and to add them takes as long as so many stages.
  float* given_sums;
  formats::u32* given_flags;
  formats::i32 dividing_stages;
};

}  // namespace halfbyte
