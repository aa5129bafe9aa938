// What the kernels of variant qgemm_sm80 are given, and how they cut up a product: shared by host and device,
// freestanding.
#pragma once

#include "formats/packed.h"
#include "ops/qgemm/weight/experts_args.h"

namespace halfbyte {

// y [m, out_cols] = x [m, in_cols] times the weight. A block makes a tile of y: kQgemmSm80Features columns,
// which are rows (forward) or columns (transposed) of the weight, for some rows of x, the tokens. It walks in
// steps of kQgemmSm80Step columns of x.
inline constexpr int kQgemmSm80Features = 256, kQgemmSm80Step = 64, kQgemmSm80Threads = 256;
// Units of the packed weight in a step of a tile: 8 strips, or 2 strips of 4 units.
inline constexpr int kQgemmSm80Units =
    kQgemmSm80Features * kQgemmSm80Step / (formats::kUnitRows * formats::kUnitCols);

// The widest tile, which has its own loop: the scale goes into the weight.
inline constexpr int kQgemmSm80WideTokens = 128;

// What a step needs in shared memory, and how many of them are under way.
struct QgemmSm80Stage {
  int code_bytes = 0;   // of the units
  int param_bytes = 0;  // of one group of the 32 rows of a unit
  int groups = 1;       // of a unit: 1, 2 or 4
  int x_bytes = 0;
  int table_bytes = 0, map_bytes = 0;  // before the stages
  int stages = 0;
  HALFBYTE_FN int bytes() const { return code_bytes + param_bytes * groups * kQgemmSm80Units + x_bytes; }
  HALFBYTE_FN int shared_bytes() const { return table_bytes + map_bytes + stages * bytes(); }
};

// How scales and x are stored. A constant of the kernels for what is common; those for what is rare take it
// as an argument.
struct QgemmSm80Stored {
  int parameter_bytes = 4;  // of a bias, or a scale that is not quantized
  bool double_quant;        // scales are quantized
};

struct QgemmSm80Args {
  const void* x;  // rows of whole chunks of 16 bytes; of f32 that is split the parts, one behind the other
  const formats::u8* weight;
  const void* bias;  // null: none
  void* y;
  float values[16];  // that codes of 4 bits stand for but for the scale, rounded to the dtype of x
  float* partials;   // [splits][m][out_stride]; null where there is one split
  formats::i64 m, out_cols;
  formats::i64 x_stride, x_part;            // elements, from row to row and from part to part
  formats::i64 out_stride;                  // out_cols rounded up to pairs
  formats::i64 feature_tiles, token_tiles;  // of a block: ((split * feature_tiles) + ...) * token_tiles + ...
  formats::i64 steps, splits;               // split s walks steps s * steps / splits up to those of s + 1
  formats::i64 strips, units_per_strip;     // of the weight, with padding
  formats::i64 strip_bytes;                 // as PackedLayout has them
  formats::u32 block_bytes;
  int block_shift;                     // units of a block are 1 << block_shift
  bool inlined;                        // else a row has one group
  formats::i64 scales, zeros, biases;  // sections; 0 where inlined
  formats::i64 absmax, map, offset;    // sections of double quantization
  formats::i64 global_scale;
  formats::i64 groups, last_absmax;  // of a row; index of the last absmax
  bool pairs;                        // two neighbours of y are at a multiple of their bytes
  bool bf16_scales;                  // parameters of two bytes are bf16, else f16
  bool accumulate;
  ExpertsArgs experts;  // of a kernel for experts: tiles of tokens are found on the device, m is all rows
  // For a rare kernel; as QgemmSm80Stage has them.
  QgemmSm80Stored stored;
  int map_bytes, stage_bytes, stages;
};

// That a block may have on devices of a compute capability (10 * major + minor).
HALFBYTE_FN int qgemm_sm80_most_shared_bytes(int capability) {
  return (capability == 90 || capability == 100 || capability == 103 ? 227
          : capability == 80                                         ? 163
                                                                     : 99) *
         1024;
}

// `scale_bytes`, `bias_bytes`: as PackedLayout has them. `x_bytes`: of an element of x, with all its parts.
HALFBYTE_FN QgemmSm80Stage qgemm_sm80_stage(int bits, int scale_bytes, bool has_zeros, int bias_bytes,
                                            bool double_quant, int groups, int tokens, int x_bytes,
                                            bool experts, int capability) {
  // Of the narrower tiles one does on every device. Of experts, a token has its rows of x and y there.
  const int most = qgemm_sm80_most_shared_bytes(tokens == kQgemmSm80WideTokens ? capability : 0) -
                   (experts ? tokens * 8 : 0);
  QgemmSm80Stage s;
  s.code_bytes = kQgemmSm80Features * kQgemmSm80Step * bits / 8;
  s.param_bytes =
      formats::kUnitRows * (scale_bytes + (has_zeros ? 1 : 0) + bias_bytes + (double_quant ? 4 : 0));
  s.groups = groups;
  s.x_bytes = tokens * kQgemmSm80Step * x_bytes;
  s.table_bytes = bits == 4 ? 32768 : 0;
  s.map_bytes = double_quant ? 1024 : 0;
  s.stages = formats::min(4, (most - s.shared_bytes()) / s.bytes());
  return s;
}

// Blocks that the registers of a multiprocessor hold. `groups`: of a unit. f32 needs more of them along the
// rows of the weight and with many groups; where shared memory holds one block only, it gets these.
HALFBYTE_FN int qgemm_sm80_blocks(int tokens, bool is_f32, bool transposed, bool affine, int groups,
                                  int capability) {
  const bool is_small = qgemm_sm80_most_shared_bytes(capability) < 128 * 1024;
  const bool crowded = is_f32 && (groups == 4 || (transposed && (affine || is_small)));
  return tokens <= 32 && !crowded ? 2 : 1;
}

}  // namespace halfbyte
