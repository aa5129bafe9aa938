// What the kernels of `affine_qdq` are given: shared by host and device, freestanding.
#pragma once

#include "formats/adam.h"
#include "formats/affine.h"
#include "formats/counts.h"

namespace halfbyte {

inline constexpr int kAffineThreads = 256;

// A matrix, and its codes: rows of row_bytes, of codes of 8 bits where they are not packed.
struct AffineShape {
  formats::i64 rows, cols, row_bytes, group_size, groups_per_row;
};

// affine_init. A warp has a unit of `unit` groups of a row (fewer at its end): as few as are whole bytes of
// codes.
struct AffineInitArgs {
  const void* w;
  formats::u8* codes;
  void* scales;
  void* biases;
  QuantizeCounts* counts;
  AffineShape shape;
  formats::i64 units_per_row;
  formats::i32 unit;
  formats::i32 levels;  // the largest code, below 2^code_bits
  formats::i32 code_bits;
  formats::Rule rule;  // minmax or mlx_edge
  formats::ScaleType scale_type;
  bool refit;
};
inline constexpr int kAffineUnit = 8;  // the most groups of a unit
// Groups whose codes are whole bytes.
HALFBYTE_FN int affine_unit(formats::i64 group_size, int code_bits) {
  int unit = 1;
  while (group_size % 8 * unit * code_bits % 8 != 0) unit *= 2;
  return unit;
}

// What becomes of one sum of each group: of q * dy for the scale, of dy for the bias.
struct AffineTrained {
  float* gradients;  // may be null
  float* values;     // these with Adam
  float* m;
  float* v;
};
struct AffineBackwardArgs {
  const formats::u8* codes;
  const void* dy;
  AffineTrained scales, biases;
  bool has_adam;
  formats::AdamFactors adam;
};

// affine_chunks: rows of whole groups of 2^k * 8 elements, up to 1024. A chunk is 8 elements, a team of
// 2^team lanes has one group, or a warp has one of 2^merge times its chunks.
struct AffineChunksArgs {
  AffineBackwardArgs common;
  formats::i64 num_chunks, num_groups, code_bytes;
  formats::i32 team, merge;
};
inline constexpr int kAffineBatch = 4;  // chunks a thread

// affine_groups: a warp has a group.
struct AffineGroupsArgs {
  AffineBackwardArgs common;
  AffineShape shape;
};

}  // namespace halfbyte
