// Where the parts of a quantized matrix lie in the layouts of WeightView (halfbyte/qgemm.hpp).
#pragma once

#include "formats/packed.h"

namespace halfbyte::formats {

// Zero points of 32-bit words: those of the rows of a group are one bit stream, whose words are `groups`
// apart.
HALFBYTE_FN int zero_of_words(const u32* words, i64 groups, i64 row, i64 group, int bits) {
  const i64 bit = row * bits;
  const u32* const word = words + bit / 32 * groups + group;
  const int shift = static_cast<int>(bit % 32);
  u64 two = *word;
  if (shift + bits > 32) two |= static_cast<u64>(word[groups]) << 32;
  return static_cast<int>(two >> shift & ((1u << bits) - 1));
}

struct WeightViewLayout {
  i64 rows = 0, cols = 0;
  int bits = 4;
  i64 group = 1;            // elements that share a scale, along a row, or along all rows (flat)
  i64 groups = 0;           // of a row; not of flat ones
  bool one_group = false;   // one scale for all
  bool flat = false;        // groups run across rows, which they do not divide
  bool flat_codes = false;  // codes do
  i64 row_bytes = 0;        // of codes that do not
  bool high_first = false;  // of the two codes of a byte the first lies in the high half
  bool zero_words = false;  // zero points are packed along the rows into words of 32 bits

  // Where a code lies: its byte, and in which bits of it.
  HALFBYTE_FN i64 code(i64 row, i64 col) const {
    const i64 element = flat_codes ? row * cols + col : col;
    return (flat_codes ? 0 : row * row_bytes) + element * bits / 8;
  }
  HALFBYTE_FN int code_shift(i64 row, i64 col) const {
    return static_cast<int>((flat_codes ? row * cols + col : col) * bits % 8) ^ (high_first ? 4 : 0);
  }
  // The number of a scale, of a bias and, but for zero_words, of a zero point.
  HALFBYTE_FN i64 scale(i64 row, i64 col) const {
    if (one_group) return 0;
    return flat ? (row * cols + col) / group : row * groups + col / group;
  }
  HALFBYTE_FN int load_zero(const void* zeros, i64 row, i64 col) const {
    if (!zero_words) return static_cast<const u8*>(zeros)[scale(row, col)];
    return zero_of_words(static_cast<const u32*>(zeros), groups, row, col / group, bits);
  }

  HALFBYTE_FN i64 code_bytes() const { return flat_codes ? (rows * cols * bits + 7) / 8 : rows * row_bytes; }
  HALFBYTE_FN i64 num_scales() const {
    if (rows == 0 || cols == 0) return 0;
    if (one_group) return 1;
    return flat ? (rows * cols - 1) / group + 1 : rows * groups;
  }
  HALFBYTE_FN i64 zero_bytes() const {
    return zero_words ? round_up(rows * bits, 32) / 8 * groups : num_scales();
  }
};

}  // namespace halfbyte::formats
