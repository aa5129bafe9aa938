// What the kernels of variant qgemm_simt are given: shared by host and device, freestanding.
#pragma once

#include "ops/qgemm/weight/experts_args.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

inline constexpr int kSimtThreads = 256, kSimtWarps = kSimtThreads / 32;
inline constexpr int kSimtChunk = kWeightChunk;
inline constexpr int kSimtRows = 4;  // of the weight: what a warp of qgemm_simt_rows multiplies with x
// Steps of qgemm_simt_tiles along the summed axis: each thread decodes one chunk.
HALFBYTE_FN int simt_step(int tile_n) { return kSimtThreads * kSimtChunk / tile_n; }

struct SimtArgs {
  WeightArgs weight;
  ExpertsArgs experts;  // of a kernel for experts: tiles of rows are found on the device, m is all rows
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
