// What the kernel of variant qgemm_sm90_split is given, and how it divides its work: shared by host and
// device, freestanding.
#pragma once

#include "formats/packed.h"
#include "ops/qgemm/weight/unit_slot_args.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

// What is summed in a stage: columns (forward) or rows (transposed) of the weight.
inline constexpr int kSplitStage = 64;
// Of a tile, rows (forward) or columns (transposed) of the weight; units of the packed weight in a stage.
inline constexpr int kSplitFeatures = 256;
inline constexpr int kSplitUnits = kSplitFeatures * kSplitStage / (formats::kUnitRows * formats::kUnitCols);
inline constexpr int kSplitMultipliers = 512, kSplitThreads = kSplitMultipliers + 128;
inline constexpr int kSplitXParts = 3;

// A block makes a tile of y. A stage has units and the parts of x, [kSplitXParts][tokens][64] of bf16; or x
// as it is, [2][tokens][32] of f32, which is scaled for each group of features, and split.
struct QgemmSm90SplitTiling {
  int tokens;       // at most: 16, 32, 64
  int scaled;       // in so many ways x is scaled, 1, 2 or 4 for all features; 0: it comes in parts
  int table_bytes;  // of what pairs of codes of 4 bits stand for
  int bits;
  int group;            // columns that share a scale; 0: a row
  int parameter_bytes;  // of the parameters of a row and group
  int stages;

  HALFBYTE_FN UnitSlot slot() const { return {bits, group, parameter_bytes}; }
  HALFBYTE_FN int part_bytes() const { return tokens * kSplitStage * 2; }
  HALFBYTE_FN int parts_bytes() const { return kSplitXParts * part_bytes(); }
  HALFBYTE_FN int x_bytes() const { return scaled > 0 ? tokens * kSplitStage * 4 : parts_bytes(); }
  // Of scaled x: stages whose parts there is room for. With two, those of the next can be written while
  // those of a stage are read.
  HALFBYTE_FN int scaled_stages() const { return tokens * scaled <= 128 ? 2 : 1; }
  HALFBYTE_FN int weight_bytes() const { return kSplitUnits * slot().num_bytes(); }

  // Bytes of shared memory from its begin: the table of pairs, the parts of scaled x, x of all stages, their
  // units, the barriers.
  HALFBYTE_FN int parts_offset() const { return table_bytes; }
  HALFBYTE_FN int x_offset() const { return parts_offset() + scaled * scaled_stages() * parts_bytes(); }
  HALFBYTE_FN int unit_offset() const { return x_offset() + stages * x_bytes(); }
  HALFBYTE_FN int barrier_offset() const { return unit_offset() + stages * weight_bytes(); }
  HALFBYTE_FN int shared_bytes() const { return barrier_offset() + stages * 16; }
};

struct QgemmSm90SplitArgs {
  // The parts of x, one behind the other: [kSplitXParts * m][in_cols], in boxes of `tokens` rows; the last
  // tile in boxes of as many as it has. x as it is: [m][2 * in_cols] halves of f32, likewise.
  formats::TensorMap x, last_x;
  const formats::u8* weight;
  const void* bias;  // null: none
  void* y;
  float* partials;               // [parts][m][partial_stride]; null: y is stored
  float values[16];              // of codes of 4 bits, where weights are split
  CodeValuesArgs pairs_of;       // of codes of 4 bits, where sums are scaled
  formats::i64 strip_bytes;      // of the weight, and its sections:
  formats::i64 scales, seconds;  // where a row has one scale; zero points
  formats::i64 global_scale;
  formats::i64 out_cols, partial_stride;  // partial_stride: even
  formats::i32 block_bytes;
  formats::i32 strips, units;  // of the weight; of a strip
  formats::i32 m;
  formats::i32 stages, part_stages;         // of a tile; of a part of it
  formats::i32 feature_tiles, token_tiles;  // of a block: ((part * token_tiles) + ...) * feature_tiles + ...
  bool pairs;                               // two neighbours of y are at a multiple of their bytes
  bool accumulate;
};

}  // namespace halfbyte
