// What the kernel of variant qgemm_sm90_transposed is given: shared by host and device, freestanding.
#pragma once

#include "formats/packed.h"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

inline constexpr int kTransposedThreads = 512;
// Of the half of the table that it does not use.
inline constexpr int kMeetingBytes = 32768;
// Rows of experts, at most, where the kernel finds tiles and rows of x by itself. Each warp gathers its own.
inline constexpr int kTransposedFoundRows = 128;

// What the kernel is compiled for beside types, and how its shared memory lies; all sizes in bytes.
struct QgemmSm90TransposedTiling {
  int tokens;           // rows of x that are multiplied: 8, 16, 32, 64
  int units;            // of a strip, that a block multiplies: 1 or 2, 64 columns each
  int bits;             // of a code
  int group;            // columns that share a scale; 0: a row
  int parameter_bytes;  // of the parameters of a row and group
  bool double_quant;
  bool experts;
  bool finds_rows;  // of experts, and their tiles: there is no list of these, and no copy of x
  int stages;

  // The columns of a strip lie in a slot as blocks: codes, and behind them the parameters of each group. They
  // come as they are where the packed layout has such blocks, else the parameters are copied apart.
  HALFBYTE_FN bool joint() const { return group != 0 && group <= units * formats::kUnitCols; }
  HALFBYTE_FN int units_per_block() const {
    return !joint() ? units : formats::max(group, formats::kUnitCols) / formats::kUnitCols;
  }
  HALFBYTE_FN int unit_bytes() const { return formats::kUnitRows * formats::kUnitCols * bits / 8; }
  HALFBYTE_FN int code_bytes() const { return units_per_block() * unit_bytes(); }
  HALFBYTE_FN int groups_per_block() const { return formats::unit_groups(group); }
  HALFBYTE_FN int group_bytes() const { return formats::kUnitRows * parameter_bytes; }
  HALFBYTE_FN int block_bytes() const { return code_bytes() + groups_per_block() * group_bytes(); }
  HALFBYTE_FN int slot_bytes() const { return units / units_per_block() * block_bytes(); }

  // Few tokens are multiplied by warps, more by warpgroups: teams, each of which has strips and a ring of
  // stages of its own. A step of a team is one strip or two, as many rows of the weight as a box of x has
  // columns.
  HALFBYTE_FN bool by_warp() const { return tokens <= 16; }
  HALFBYTE_FN int teams() const { return kTransposedThreads / (by_warp() ? 32 : 128); }
  HALFBYTE_FN int strips() const { return by_warp() && units == 2 ? 1 : 2; }

  // Whether the stages hold what comes next, of any tile, while the sums of one meet in the half of the table
  // that it does not use: of experts, which have many tiles, where warps multiply. Blocks share none of
  // these.
  HALFBYTE_FN bool flows() const { return experts && by_warp() && bits == 4; }
  HALFBYTE_FN bool can_find_rows() const { return flows() && tokens == 8; }

  // What blocks of a cluster send each other lies in that half, or in memory of its own: twice, for one tile
  // and the next, half of the sums.
  HALFBYTE_FN int table_bytes() const { return bits == 4 ? 65536 : tokens * units * formats::kUnitCols * 4; }
  HALFBYTE_FN int box_bytes() const { return tokens * strips() * formats::kUnitRows * 2; }
  HALFBYTE_FN int stage_bytes() const {  // of all teams
    return teams() * (box_bytes() + strips() * slot_bytes());
  }
  // Sums on their way to the threads that finish them: [team][block of rows of the
  // product][register][thread], those of warpgroups padded such that few lanes meet in a bank.
  HALFBYTE_FN int sum_words() const { return by_warp() ? 32 : 4 * 33; }
  HALFBYTE_FN int block_words() const {
    return by_warp() ? sum_words() * tokens / 2
                     : static_cast<int>(formats::round_up(sum_words() * tokens / 2, 32)) + 2;
  }
  HALFBYTE_FN int exchange_bytes() const { return teams() * units * block_words() * 4 * (by_warp() ? 4 : 1); }
  // Where things begin: the table, the boxes and slots of all stages (afterwards the exchange), barriers, the
  // map of double quantization or the rows that were found.
  HALFBYTE_FN int boxes() const { return table_bytes(); }
  HALFBYTE_FN int slots() const { return boxes() + stages * teams() * box_bytes(); }
  HALFBYTE_FN int barriers() const { return boxes() + stages * stage_bytes(); }
  HALFBYTE_FN int map() const { return barriers() + 2 * stages * teams() * 8; }
  HALFBYTE_FN int found() const { return map(); }
  HALFBYTE_FN int shared_bytes() const {
    return map() + (double_quant ? 256 * 4 : 0) + (finds_rows ? found_rows_bytes(kTransposedFoundRows) : 0);
  }
  // Whether the stages have room for the exchange.
  HALFBYTE_FN bool fits() const { return flows() ? stages >= 2 : exchange_bytes() <= stages * stage_bytes(); }
};

struct QgemmSm90TransposedArgs {
  // [m, n], boxes of m rows, of experts of as many as a tile has, and as many columns as a step has rows of
  // the weight.
  formats::TensorMap x;
  const formats::u8* weight;
  void* y;                       // [m, k]
  CodeValuesArgs values;         // of codes of 4 bits
  formats::i64 scales, seconds;  // sections of the weight: where a row has one scale; zero points or biases
  formats::i64 absmax, map, offset;  // of double quantization
  formats::i64 global_scale;
  formats::u32 absmax_count;
  formats::i64 groups;  // of a row
  formats::i64 k;
  formats::u32 strip_bytes;
  int block_bytes;
  int strips, units;  // of the weight; of a strip
  int m, n;
  int tiles;         // of the columns of the weight
  int cluster;       // blocks, which share the rows of the weight: 1 or 2
  bool bf16_scales;  // parameters of two bytes are bf16, else f16
  bool accumulate;
  bool pairs;  // two neighbours of y are at a multiple of their bytes
  // Of experts. tiles_at_once: of a block, 1 to 16, each with tiles of its own, where the stages flow.
  // expert_tiles: where the kernel does not find them; x_as_it_lies: where it does, at most
  // kTransposedFoundRows rows. partials: [m][partial_stride]; null: y is stored.
  int tiles_at_once;
  ExpertsArgs experts;
  const ExpertTileEntry* expert_tiles;
  const void* x_as_it_lies;
  float* partials;
  formats::i32 partial_stride;  // even
};

}  // namespace halfbyte
