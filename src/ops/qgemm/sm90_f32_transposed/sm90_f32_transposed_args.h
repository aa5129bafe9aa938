// What the kernel of variant qgemm_sm90_f32_transposed is given: shared by host and device, freestanding.
#pragma once

#include "formats/packed.h"

namespace halfbyte {

inline constexpr int kF32TransposedMaxSlots = 8;
// Of a block: the sums of three and four rows of x take the registers of other warps.
HALFBYTE_FN int f32_transposed_warps(int rows) { return rows <= 2 ? 16 : rows == 3 ? 12 : 8; }

// Dynamic shared memory: the table of pairs, for each warp its ring of slots for a unit and its parameters,
// sums of two items, barriers.
struct F32TransposedShared {
  int rings, sums, barriers, num_bytes;
};
HALFBYTE_FN F32TransposedShared f32_transposed_shared(int rows, int slots, int slot_bytes) {
  constexpr int kTableBytes = 65536;
  const int warps = f32_transposed_warps(rows);
  F32TransposedShared s{};
  s.rings = kTableBytes;
  s.sums = s.rings + warps * slots * slot_bytes;
  s.barriers = s.sums + 2 * warps * formats::kUnitCols * rows * 4;
  s.num_bytes = s.barriers + warps * slots * 8;
  return s;
}

struct QgemmSm90F32TransposedArgs {
  const formats::u8* weight;
  const float *x, *bias;  // bias: null: none
  float* y;
  float* partials;  // [parts][m][k]; null: y is stored
  formats::i64 n, k, strip_bytes;
  int units;                          // of a strip: 64 columns of y
  int strips, part_strips;            // of the weight; of a part of the sums, but the last
  int items;                          // units * parts: what blocks take in turn
  int slots, slot_bytes;              // of the ring of a warp
  int block_bytes, block_code_bytes;  // of the weight
  int block_units_shift;              // units of a block: 1 << block_units_shift
  int unit_groups;                    // 2: groups of 32 columns; else 1
  F32TransposedShared shared;
  float values[16];  // by code; of asymmetric integers and affine formats the code
  bool accumulate;
};

}  // namespace halfbyte
