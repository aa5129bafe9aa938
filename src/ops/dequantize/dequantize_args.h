// What the kernel of `dequantize` is given: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"

namespace halfbyte {

// The parts of a quantized matrix, as QuantShape describes them, and y [rows, cols].
struct DequantizeArgs {
  const formats::u8* codes;
  const void* scales;
  const formats::u8* zeros;
  const void* biases;
  void* y;
  formats::i64 rows, cols, row_bytes, group_size, groups_per_row;
  // Where groups are whole chunks of y and rows whole groups, and there are less than 2^31 chunks; else 0.
  formats::i64 chunks_per_group;
  formats::i32 group_shift;       // whole groups: 2^group_shift chunks are one
  const float* global_scale;      // of scales that are e4m3
  formats::ScaleType scale_type;  // of scales and biases
  float values[16];               // of a table, by code
};

inline constexpr int kDequantizeThreads = 256;
// Elements of a chunk: 16 bytes of y; where rows are not aligned 8, so that it begins at a byte.
HALFBYTE_FN int dequantize_chunk(bool aligned, int element_bytes) { return aligned ? 16 / element_bytes : 8; }
// Chunks a thread. Parameters of any group size take more registers.
HALFBYTE_FN int dequantize_batch(bool aligned, bool whole_groups, int element_bytes) {
  return !aligned ? 1 : (whole_groups ? 16 : 8) / element_bytes;
}

}  // namespace halfbyte
