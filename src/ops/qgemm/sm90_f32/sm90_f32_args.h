// What the kernel of variant qgemm_sm90_f32 is given: shared by host and device, freestanding.
#pragma once

#include "formats/packed.h"

namespace halfbyte {

inline constexpr int kF32Warps = 16, kF32Threads = kF32Warps * 32;
inline constexpr int kF32StageUnits = kF32Warps;  // consecutive units of a strip: one a warp
inline constexpr int kF32MaxStages = 6;
// Units of a strip that a warp multiplies, of which it keeps the elements of kM rows of x in registers.
HALFBYTE_FN int f32_register_units(int rows) { return rows > 2 ? 0 : 8 / rows; }

// Dynamic shared memory: the table of pairs, the ring of stages, partial sums of two strips, barriers, and
// where it is not in registers x.
struct F32Shared {
  int ring, sums, barriers, x, num_bytes;
};
HALFBYTE_FN F32Shared f32_shared(int rows, int stages, int stage_bytes, int x_cols) {
  constexpr int kTableBytes = 65536;
  F32Shared s{};
  s.ring = kTableBytes;
  s.sums = s.ring + stages * stage_bytes;
  s.barriers = s.sums + 2 * kF32Warps * formats::kUnitRows * rows * 4;
  s.x = s.barriers + 2 * kF32MaxStages * 8;
  s.num_bytes = s.x + rows * x_cols * 4;
  return s;
}

struct QgemmSm90F32Args {
  const formats::u8* weight;
  const float *x, *bias;  // bias: null: none
  float* y;
  formats::i64 n, k, strip_bytes;
  int strips;  // less than 2^31 in any memory
  int m;
  int units;                          // of a strip
  int stages, stage_bytes;            // of the ring
  int block_bytes, block_code_bytes;  // of the weight
  int block_units_shift;              // units of a block: 1 << block_units_shift
  int unit_groups;                    // 2: groups of 32 columns; else 1
  F32Shared shared;
  float values[16];  // by code; of asymmetric integers and affine formats the code
  bool accumulate;
};

}  // namespace halfbyte
