// What the kernel of `qgemm_sm90_wgmma` is given, and how it divides its work: shared by host and device,
// freestanding.
#pragma once

#include "formats/common.h"
#include "ops/qgemm/weight/expert_rows_args.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

// Of experts, tiles that are found ahead.
inline constexpr int kWgmmaTileSlots = 4;
// Rows of experts, at most, where the kernel finds tiles and rows of x by itself. One warp gathers them: with
// 128 rows it takes up to 1.07 times as long.
inline constexpr int kWgmmaFoundRows = 64;

// A tile is 32 * strips rows of the weight by all tokens; a block reads it in stages of so many columns.
// Pairs of strips go to different warpgroups, or two to one, and so do the parts of the columns of a stage,
// whose sums are added up at the end of the tile. Two blocks of a cluster may share the columns of a tile.
struct QgemmSm90WgmmaTiling {
  int tokens = 8;       // 8, 16, 32, 64: m rounded up
  int strips = 4;       // 8, 4 or 2
  bool shared = false;  // whether there is code for clusters of two blocks
  bool experts = false;
  int block_cols = 64;  // columns and bytes of a block of the packed layout
  int block_bytes = 0;
  int bits = 4;
  int stages = 0;

  // Where 128 registers a thread are too few: 255 of half as many threads.
  HALFBYTE_FN int warpgroups() const { return tokens * bits >= 256 ? 2 : 4; }
  HALFBYTE_FN int threads() const { return (warpgroups() + 1) * 128; }
  HALFBYTE_FN bool can_share() const { return row_groups() <= 2; }
  HALFBYTE_FN int row_groups() const { return formats::min(strips / 2, warpgroups()); }
  HALFBYTE_FN int col_groups() const { return warpgroups() / row_groups(); }
  // A stage of 256 columns of all warpgroups takes an eighth fewer instructions a column than two of 128.
  HALFBYTE_FN int stage_cols() const {
    return formats::max(col_groups() * (experts && col_groups() == 1 ? 256 : 128), block_cols);
  }
  // Tiles of x [tokens][64], then of each strip its blocks.
  HALFBYTE_FN int x_bytes() const { return stage_cols() * tokens * 2; }
  HALFBYTE_FN int strip_bytes() const { return stage_cols() / block_cols * block_bytes; }
  HALFBYTE_FN int stage_bytes() const { return (x_bytes() + strips * strip_bytes() + 1023) / 1024 * 1024; }

  // Bytes of shared memory from its begin: table and partial sums; the ring of stages; the map of double
  // quantization; the barriers; of experts the tiles that were found, each with the numbers of its rows
  // of y and of x and with their routing weights, their barriers, and a list of all of them.
  HALFBYTE_FN int ring_offset() const { return bits == 4 ? 65536 : 32768; }
  HALFBYTE_FN int map_offset() const { return ring_offset() + stages * stage_bytes(); }
  HALFBYTE_FN int barrier_offset() const { return map_offset() + 1024; }
  HALFBYTE_FN int tile_offset() const { return barrier_offset() + (stages + 1) * 16; }
  HALFBYTE_FN int tile_bytes() const { return 32 + 12 * tokens; }
  HALFBYTE_FN int tile_barrier_offset() const { return tile_offset() + kWgmmaTileSlots * tile_bytes(); }
  HALFBYTE_FN int found_offset() const { return tile_barrier_offset() + kWgmmaTileSlots * 16; }
  HALFBYTE_FN int shared_bytes() const {
    return !experts ? tile_offset() : found_offset() + (finds_rows() ? found_rows_bytes(kWgmmaFoundRows) : 0);
  }
  // Whether the kernel can do without a list of tiles and a copy of x.
  HALFBYTE_FN bool finds_rows() const { return experts && tokens == 8; }
};

struct QgemmSm90WgmmaArgs {
  formats::TensorMap x;  // [m, k], boxes of m rows; of experts, of as many as a tile has
  const formats::u8* weight;
  const void* bias;
  void* y;
  CodeValuesArgs values;             // of codes of 4 bits
  formats::i64 strip_bytes;          // of the weight, and its sections:
  formats::i64 scales, seconds;      // where a row has one scale; zero points or biases
  formats::i64 absmax, map, offset;  // of double quantization
  formats::i64 global_scale;
  formats::i32 groups;      // of a row
  formats::i32 last_scale;  // the number of the last one
  formats::i32 m, n;
  formats::i32 num_strips, num_blocks;  // num_blocks: of a strip
  formats::i32 num_stages;              // of a row, all blocks of the cluster together
  formats::i32 log2_cluster;            // blocks of a cluster: 1 of two, 0 of one
  // Pairs of strips of a cluster; of the first `num_longer` clusters one more. Of experts: tiles of a
  // weight.
  formats::i32 num_pairs, num_longer;
  bool bf16_scales;  // parameters of two bytes are bf16, else f16
  bool accumulate;
  bool pairs;  // two neighbouring elements of y and of bias can be accessed at once
  // Of experts. expert_tiles: null where the kernel finds them and rows of x by itself, of which there are at
  // most kWgmmaFoundRows, in `x_as_it_lies`.
  // partials: [m][partial_stride], sums with their bias; null: y is stored.
  ExpertsArgs experts;
  const ExpertTileEntry* expert_tiles;
  const void* x_as_it_lies;
  formats::i64 k;
  float* partials;
  formats::i32 partial_stride;  // even
};

}  // namespace halfbyte
