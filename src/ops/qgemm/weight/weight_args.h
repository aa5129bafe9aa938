// A weight in any layout as kernels are given it: shared by host and device, freestanding.
#pragma once

#include "formats/divider.h"

namespace halfbyte {

inline constexpr int kWeightChunk = 8;  // columns that a thread decodes together

// What codes of 4 bits stand for but for the scale (code_values() of weight_cuda.h), as elements of 16 bits.
// Byte permutes choose from four words: the bytes of codes 4 i to 4 i + 3, low ones and high ones.
struct CodeValuesArgs {
  formats::u32 low[4], high[4];
};

// One parameter of the groups of a packed weight: of group g of row 32 s + r it is at
//   base + s * strip_bytes + g / groups_per_block * block_bytes + (g % groups_per_block * 32 + r) * its size
struct PackedParameterArgs {
  formats::i64 base, strip_bytes, block_bytes;
};

// A weight [n, k], packed or in the arrays of a view.
struct WeightArgs {
  const formats::u8* codes;  // packed: all of it, as scales, zeros and biases
  const void* scales;
  const void* zeros;  // null: the zero point is `zero` everywhere
  const void* biases;
  const float *absmax, *map, *offset;  // null but for double quantization
  const float* global_scale;           // null: none
  formats::i64 n, k;
  formats::i64 group, groups;        // columns of a group; groups of a row, 0 where all rows have one
  formats::Divider group_chunks;     // by the chunks of a group, where groups are whole chunks
  formats::i64 row_bits, num_bytes;  // view: from row to row, of the codes in all
  formats::i64 strip_bytes;          // packed
  int block_bytes, block_shift;      // packed; columns of a block: 1 << block_shift
  int group_shift;                   // packed; groups of a block: 1 << group_shift
  PackedParameterArgs scale, other;  // packed; other: zero points or biases
  float values[16];                  // of a table
  int zero;                          // the code of 0, of symmetric integers
  formats::u8 scale_type;            // ScaleType
  bool whole_chunks;                 // the columns of a chunk share their group
  bool flat;                         // groups run across rows
  bool zero_words;                   // zero points as compressed-tensors has them
  bool wide;                         // view: rows of codes are aligned to 4 bytes
};

}  // namespace halfbyte
