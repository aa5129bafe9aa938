// What qgemm_sm90_mma is given: shared by host and device, freestanding.
#pragma once

#include "formats/convert.h"
#include "formats/packed.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

inline constexpr int kSm90MmaWarps = 16, kSm90MmaThreads = 32 * kSm90MmaWarps;
inline constexpr int kSm90MmaTokens = 8;  // rows of x, at most
inline constexpr int kSm90MmaSharedBytes = 232448;
inline constexpr int kSm90MmaAbsmaxStrips = 4;  // whose absmax are in shared memory, with those yet to come

// A stage of the ring: a unit for each warp, in order along k. They begin a block of the packed layout and
// lie together as a strip of so many columns does. `group`: columns; 0: a row has one.
HALFBYTE_FN formats::PackedLayout sm90_mma_stage(int bits, int parameter_bytes, bool asymmetric, bool affine,
                                                 int group, bool double_quant) {
  const int cols = kSm90MmaWarps * formats::kUnitCols;
  return formats::packed_layout(formats::kUnitRows, cols, bits, group > 0 ? group : cols, parameter_bytes,
                                asymmetric, affine, double_quant, false);
}

// Where things are in shared memory: the table of pairs (none for codes of 8 bits), with the sums of warps in
// the gaps between its rows; the ring; of double quantization the map, and two
// absmax for each row of some strips; barriers; the state of the block.
struct Sm90MmaShared {
  int sum_stride, sum_begin;  // of 128 bytes of sums
  int ring, map, absmax, barriers, work, num_bytes;
};
HALFBYTE_FN Sm90MmaShared sm90_mma_shared(int bits, int stage_bytes, int num_stages, bool double_quant) {
  Sm90MmaShared s{};
  const int num_sums = 2 * kSm90MmaWarps * formats::kUnitRows * kSm90MmaTokens;  // two strips
  s.sum_stride = bits == 4 ? 256 : 128;
  s.sum_begin = s.sum_stride - 128;
  s.ring = num_sums / 32 * s.sum_stride;
  s.map = s.ring + num_stages * stage_bytes;
  s.absmax = s.map + (double_quant ? 256 * 4 : 0);
  s.barriers = s.absmax + (double_quant ? kSm90MmaAbsmaxStrips * 2 * formats::kUnitRows * 4 : 0);
  s.work = s.barriers + 2 * num_stages * 8;
  s.num_bytes = s.work + 8;
  return s;
}

struct QgemmSm90MmaArgs {
  const void* x;
  const unsigned char* weight;
  const void* bias;  // null: none
  void* y;
  CodeValuesArgs values;         // of codes of 4 bits
  formats::PackedLayout layout;  // of the weight
  int m;
  int units;          // of a strip, with columns below k
  int rounds, rest;   // strips / blocks, strips % blocks
  bool whole_chunks;  // rows of x are chunks of 16 bytes
  bool accumulate, early_start;
};

}  // namespace halfbyte
