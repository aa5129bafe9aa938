// What the kernels of variant qgemm_simt are given: shared by host and device, freestanding.
#pragma once

#include "formats/divider.h"

namespace halfbyte {

inline constexpr int kSimtThreads = 256, kSimtWarps = kSimtThreads / 32;
inline constexpr int kSimtChunk = 8;  // columns that a thread decodes together
inline constexpr int kSimtRows = 4;   // of the weight: what a warp of qgemm_simt_rows multiplies with x
// Steps of qgemm_simt_tiles along the summed axis: each thread decodes one chunk.
HALFBYTE_FN int simt_step(int tile_n) { return kSimtThreads * kSimtChunk / tile_n; }

// One parameter of the groups of a packed weight: of group g of row 32 s + r it is at
//   base + s * strip_bytes + g / groups_per_block * block_bytes + (g % groups_per_block * 32 + r) * its size
struct SimtPackedParameter {
  formats::i64 base, strip_bytes, block_bytes;
};

// A weight [n, k], packed or in the arrays of a view.
struct SimtWeight {
  const formats::u8* codes;  // packed: all of it, as scales, zeros and biases
  const void* scales;
  const void* zeros;  // null: the zero point is `zero` everywhere
  const void* biases;
  const float *absmax, *map, *offset;  // null but for double quantization
  formats::i64 n, k;
  formats::i64 group, groups;         // columns of a group; groups of a row, 0 where all rows have one
  formats::Divider group_chunks;      // by the chunks of a group, where groups are whole chunks
  formats::i64 row_codes, num_bytes;  // view: from row to row, of the codes in all
  formats::i64 strip_bytes;           // packed
  int block_bytes, block_shift;       // packed; columns of a block: 1 << block_shift
  int group_shift;                    // packed; groups of a block: 1 << group_shift
  SimtPackedParameter scale, other;   // packed; other: zero points or biases
  float values[16];                   // of a table
  int zero;                           // the code of 0, of symmetric integers
  formats::u8 scale_type;             // ScaleType
  bool whole_chunks;                  // the columns of a chunk share their group
  bool flat;                          // groups run across rows
  bool zero_words;                    // zero points as compressed-tensors has them
  bool wide;                          // view: chunks are aligned to 4 bytes
};

struct SimtArgs {
  SimtWeight weight;
  const void* x;
  const void* bias;  // null: none
  void* y;
  void* partials;  // [splits][m][out_cols] where splits > 1
  formats::i64 m, in_cols, out_cols;
  formats::i64 tiles_m, tiles_n, split_steps;  // of qgemm_simt_tiles
  int splits;
  bool transposed, accumulate;
};

}  // namespace halfbyte
