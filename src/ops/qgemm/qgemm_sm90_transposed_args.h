// What the kernel of variant qgemm_sm90_transposed is given: shared by host and device, freestanding.
#pragma once

#include "formats/packed.h"

namespace halfbyte {

inline constexpr int kTransposedWarpgroups = 4, kTransposedThreads = 128 * kTransposedWarpgroups;
// Strips that a warpgroup multiplies in a step: 64 rows of the weight, as many as a box of x has columns.
inline constexpr int kTransposedStrips = 2;
// Rows of the weight in a step of the block.
inline constexpr int kTransposedStepRows = kTransposedWarpgroups * kTransposedStrips * formats::kUnitRows;

// What the kernel is compiled for beside types, and how its shared memory lies; all sizes in bytes.
struct QgemmSm90TransposedTiling {
  int tokens;           // rows of x that are multiplied: 8, 16, 32, 64
  int units;            // of a strip, that a block multiplies: 1 or 2, 64 columns each
  int bits;             // of a code
  int group;            // columns that share a scale; 0: a row
  int parameter_bytes;  // of the parameters of a row and group
  bool double_quant;
  int stages;

  // The columns of a strip lie in a slot as blocks: codes, and behind them the parameters of each group. They
  // come as they are where the packed layout has such blocks, else the parameters are copied apart.
  HALFBYTE_FN bool joint() const { return group != 0 && group <= units * formats::kUnitCols; }
  HALFBYTE_FN int units_per_block() const {
    return !joint() ? units : formats::max(group, formats::kUnitCols) / formats::kUnitCols;
  }
  HALFBYTE_FN int unit_bytes() const { return formats::kUnitRows * formats::kUnitCols * bits / 8; }
  HALFBYTE_FN int code_bytes() const { return units_per_block() * unit_bytes(); }
  HALFBYTE_FN int groups_per_block() const { return group == 32 ? 2 : 1; }
  HALFBYTE_FN int group_bytes() const { return formats::kUnitRows * parameter_bytes; }
  HALFBYTE_FN int block_bytes() const { return code_bytes() + groups_per_block() * group_bytes(); }
  HALFBYTE_FN int slot_bytes() const { return units / units_per_block() * block_bytes(); }

  HALFBYTE_FN int table_bytes() const { return bits == 4 ? 65536 : 0; }
  HALFBYTE_FN int box_bytes() const { return tokens * 128; }
  HALFBYTE_FN int stage_bytes() const {  // of all warpgroups
    return kTransposedWarpgroups * (box_bytes() + kTransposedStrips * slot_bytes());
  }
  // Sums on their way to the threads that finish them: by warp where there are few tokens, else by warpgroup,
  // [part][block of rows of the product][register][lane], padded such that few lanes meet in a bank.
  HALFBYTE_FN bool by_warp() const { return tokens <= 16; }
  HALFBYTE_FN int sum_words() const { return by_warp() ? 32 : 33 * 4; }
  HALFBYTE_FN int block_words() const {
    return static_cast<int>(formats::round_up(sum_words() * tokens / 2, 32)) + (by_warp() ? 1 : 2);
  }
  HALFBYTE_FN int exchange_bytes() const {
    return kTransposedWarpgroups * units * block_words() * 4 * (by_warp() ? 16 : 1);
  }
  // Where things begin: the table, the boxes and slots of all stages (afterwards the exchange), barriers, the
  // map of double quantization.
  HALFBYTE_FN int boxes() const { return table_bytes(); }
  HALFBYTE_FN int slots() const { return boxes() + stages * kTransposedWarpgroups * box_bytes(); }
  HALFBYTE_FN int barriers() const { return boxes() + stages * stage_bytes(); }
  HALFBYTE_FN int map() const { return barriers() + stages * kTransposedWarpgroups * 8; }
  HALFBYTE_FN int shared_bytes() const { return map() + (double_quant ? 256 * 4 : 0); }
  // Whether the stages have room for the exchange.
  HALFBYTE_FN bool fits() const { return exchange_bytes() <= stages * stage_bytes(); }
};

struct QgemmSm90TransposedArgs {
  formats::TensorMap x;  // [m, n], boxes of `tokens` rows
  const formats::u8* weight;
  void* y;                       // [m, k]
  formats::i64 scales, seconds;  // sections of the weight: where a row has one scale; zero points or biases
  formats::i64 absmax, map, offset;  // of double quantization
  formats::i64 groups;               // of a row
  formats::i64 k;
  formats::u32 strip_bytes;
  int block_bytes;
  int strips, units;  // of the weight; of a strip
  int m, n;
  int tiles;    // of the columns of the weight
  int steps;    // of all rows of the weight, shared by the blocks of a cluster
  int cluster;  // blocks: 1 or 2
  bool accumulate;
};

}  // namespace halfbyte
