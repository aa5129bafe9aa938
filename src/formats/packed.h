// The packed layout of a weight [n, k] for qgemm, version 2: one form for products along k (forward) and
// along n (transposed), for every number of rows of the other operand. 2 to 6 or 8 bits a code.
//
// A unit is 32 rows (n) by 64 columns (k); a strip is the units of 32 rows, one behind the other along k;
// rows and columns are padded to whole units (whole blocks) with codes and parameters that are 0 bytes.
//
// Within a unit, codes of 4 and 8 bits lie as the fragments of the matrix instructions want them. Rows 2a and
// 2a + 1 and the pairs of columns 2t, 2t + 1 and 2t + 8, 2t + 9 of each 16 columns j are a word of 4-bit
// codes: register fragments a0..a3 of A of mma.m16n8k16 (wgmma m64k16), lane g * 4 + t of the warp that has
// rows 2g (fragment row g) and 2g + 1 (fragment row g + 8). The words of j = 0..3 lie together, 16 bytes, in
// slot(a, t) of 64: a lane reads them at once, without bank conflicts, and so are the words read that a lane
// of the transposed product needs. Of 8-bit codes the 16 bytes hold 32 columns, and a unit is two such halves
// of 1024 bytes.
//
// Codes of other widths are bit streams (bits.h), one of 64 columns for each row of a unit, one row behind
// the other: 8 columns are `bits` bytes, and a row of a unit is a multiple of 8 bytes.
//
// The parameters of a group (scales; zero points or biases) of the 32 rows lie behind the codes of their
// columns where groups are 16, 32, 64 or 128 columns long: a block, see PackedLayout; in sections of their
// own otherwise. A group of another multiple of 16 columns is stored as several of these with the same
// parameters: products are tuned for them.
#pragma once

#include "formats/bits.h"

namespace halfbyte::formats {

inline constexpr int kPackedVersion = 2;
inline constexpr int kUnitRows = 32, kUnitCols = 64;
inline constexpr int kMaxBlockCols = 256;     // columns of the longest block
inline constexpr int kTileBytes = 1024;       // of codes in fragments: 32 bytes of 32 rows
inline constexpr int kPackedAlignment = 256;  // bytes, of the memory and of its sections

// Whether codes lie as fragments; else they are bit streams.
HALFBYTE_FN bool in_fragments(int bits) { return bits == 4 || bits == 8; }
// Codes of 32 rows that lie together: a unit, or half of one of 8 bits.
HALFBYTE_FN int tile_bytes(int bits) {
  return in_fragments(bits) ? kTileBytes : kUnitRows * kUnitCols * bits / 8;
}

// Groups of the 64 columns of a unit that have parameters of their own; `group`: columns, 0 where a row has
// one.
HALFBYTE_FN int unit_groups(int group) { return group == 0 ? 1 : max(kUnitCols / group, 1); }

// Of the 16 bytes of rows 2a, 2a + 1 and pairs t, t + 4: 0..63.
HALFBYTE_FN int packed_slot(int a, int t) { return 4 * a + (t ^ (a & 2)); }

// Where a code lies within its unit; code_at reads it.
struct CodePlace {
  int byte;   // 0 .. 256 * bits - 1
  int shift;  // 0 .. 7
};
HALFBYTE_FN CodePlace code_place(int row, int col, int bits) {
  if (!in_fragments(bits)) {
    const int bit = (row * kUnitCols + col) * bits;
    return {bit / 8, bit % 8};
  }
  const int odd = row & 1, second = col >> 3 & 1, t = col >> 1 & 3;
  const int slot = packed_slot(row >> 1, t) * 16;
  if (bits == 4) return {slot + (col >> 4) * 4 + odd + 2 * second, (col & 1) * 4};
  return {(col >> 5) * 1024 + slot + (col >> 4 & 1) * 8 + second * 4 + odd * 2 + (col & 1), 0};
}

HALFBYTE_FN i64 round_up(i64 x, i64 multiple) { return (x + multiple - 1) / multiple * multiple; }

// The parts of the memory of a packed weight; all offsets and sizes in bytes.
//   inlined:  strip s at s * strip_bytes, made of blocks_per_strip blocks: the codes of the units of max(64,
//             group) columns, then, group by group: 32 scales; then, group by group, 32 zero points or
//             biases.
//   else:     the codes only, one block a unit; scales [strip][group][32] from `scales`, zero points or
//   biases
//             likewise from `zeros` / `biases`.
// Double quantization: scales are u8 codes; their absmax (f32, one for 256 scales in the order n * groups +
// group), the map of codes (256 f32) and the offset (f32) lie in sections of their own. So does the global
// scale (f32) of formats that have one.
struct PackedLayout {
  i64 n = 0, k = 0;
  i64 group = 0;    // columns that share a scale, as they are stored: k where a row has one
  i64 repeats = 1;  // stored groups that a group of the weight makes
  int bits = 4;
  int scale_bytes = 4;     // of a scale: 1 where it is a code of double quantization
  int bias_bytes = 0;      // of a bias; 0: none
  bool has_zeros = false;  // u8 zero points
  bool has_biases = false;
  bool double_quant = false;
  bool has_global_scale = false;
  bool inlined = false;

  i64 groups = 0;         // of a row as they are stored, the padding not counted
  i64 weight_groups = 0;  // of a row of the weight
  i64 strips = 0, blocks_per_strip = 0;
  int block_cols = kUnitCols;  // columns of a block
  int block_code_bytes = 0, block_bytes = 0;
  i64 strip_bytes = 0;
  i64 scales = 0, zeros = 0, biases = 0;  // sections; 0 where inlined
  i64 absmax = 0, map = 0, offset = 0;    // sections of double quantization
  i64 global_scale = 0;                   // section
  i64 num_bytes = 0;                      // in all

  // Tiles of codes of a strip, of tile_bytes() each.
  HALFBYTE_FN i64 tiles_per_strip() const { return blocks_per_strip * (block_code_bytes / tile_bytes(bits)); }
  HALFBYTE_FN i64 tile(i64 strip, i64 tile_of_strip) const {  // where it begins
    const int tiles_per_block = block_code_bytes / tile_bytes(bits);
    return strip * strip_bytes + tile_of_strip / tiles_per_block * block_bytes +
           tile_of_strip % tiles_per_block * tile_bytes(bits);
  }
  // Groups of a row that there is memory for.
  HALFBYTE_FN i64 padded_groups() const { return inlined ? blocks_per_strip * (block_cols / group) : groups; }

  HALFBYTE_FN i64 unit(i64 strip, i64 unit_of_strip) const {  // where its codes begin
    const i64 units_per_block = block_cols / kUnitCols;
    return strip * strip_bytes + unit_of_strip / units_per_block * block_bytes +
           unit_of_strip % units_per_block * (kUnitRows * kUnitCols * bits / 8);
  }
  HALFBYTE_FN CodePlace place_in_unit(i64 row, i64 col) const {
    return code_place(static_cast<int>(row % kUnitRows), static_cast<int>(col % kUnitCols), bits);
  }
  HALFBYTE_FN i64 code(i64 row, i64 col) const {  // its byte; which bits: place_in_unit
    return unit(row / kUnitRows, col / kUnitCols) + place_in_unit(row, col).byte;
  }
  // A code of the packed weight at `memory`.
  HALFBYTE_FN int load_code(const u8* memory, i64 row, i64 col) const {
    return code_at(memory + code(row, col), place_in_unit(row, col).shift, bits);
  }
  // Of a parameter that takes `size` bytes; `before`: bytes a group of the parameters before it in a block.
  HALFBYTE_FN i64 parameter(i64 row, i64 group_of_row, i64 section, int before, int size) const {
    const i64 strip = row / kUnitRows, r = row % kUnitRows;
    if (!inlined) return section + ((strip * groups + group_of_row) * kUnitRows + r) * size;
    const i64 groups_per_block = block_cols / group;
    return strip * strip_bytes + group_of_row / groups_per_block * block_bytes + block_code_bytes +
           groups_per_block * before * kUnitRows + (group_of_row % groups_per_block * kUnitRows + r) * size;
  }
  HALFBYTE_FN i64 scale(i64 row, i64 group_of_row) const {
    return parameter(row, group_of_row, scales, 0, scale_bytes);
  }
  HALFBYTE_FN i64 zero(i64 row, i64 group_of_row) const {
    return parameter(row, group_of_row, zeros, scale_bytes, 1);
  }
  HALFBYTE_FN i64 bias(i64 row, i64 group_of_row) const {
    return parameter(row, group_of_row, biases, scale_bytes, bias_bytes);
  }
};

// `group`: columns that share a scale, at least k where a row has one. `parameter_bytes`: of a scale and a
// bias as they are stored, 1 for the scales of double quantization.
HALFBYTE_FN PackedLayout packed_layout(i64 n, i64 k, int bits, i64 group, int parameter_bytes, bool has_zeros,
                                       bool has_biases, bool double_quant, bool has_global_scale) {
  PackedLayout p;
  p.n = n;
  p.k = k;
  p.bits = bits;
  p.group = min(group, max<i64>(k, 1));
  p.scale_bytes = double_quant ? 1 : parameter_bytes;
  p.bias_bytes = has_biases ? parameter_bytes : 0;
  p.has_zeros = has_zeros;
  p.has_biases = has_biases;
  p.double_quant = double_quant;
  p.has_global_scale = has_global_scale;
  p.inlined = (group == 16 || group == 32 || group == 64 || group == 128 || group == 256) && k > 0;
  if (p.inlined) p.group = group;
  // The absmax of double quantization belong to scales by their number.
  if (group >= 48 && group % 16 == 0 && (group < k || group == 256) && k > 0 && !double_quant) {
    p.inlined = true;
    p.group = group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16;
    p.repeats = group / p.group;
  }
  p.groups = (k + p.group - 1) / p.group;
  p.weight_groups = (p.groups + p.repeats - 1) / p.repeats;
  p.strips = (n + kUnitRows - 1) / kUnitRows;
  if (p.inlined) p.block_cols = static_cast<int>(max<i64>(kUnitCols, p.group));
  p.blocks_per_strip = (k + p.block_cols - 1) / p.block_cols;
  p.block_code_bytes = kUnitRows * p.block_cols * bits / 8;
  const int group_bytes = kUnitRows * (p.scale_bytes + p.bias_bytes + (has_zeros ? 1 : 0));
  p.block_bytes =
      p.block_code_bytes + (p.inlined ? p.block_cols / static_cast<int>(p.group) * group_bytes : 0);
  p.strip_bytes = p.blocks_per_strip * p.block_bytes;
  i64 end = p.strips * p.strip_bytes;
  const i64 num_parameters = p.strips * p.groups * kUnitRows;
  if (!p.inlined) {
    p.scales = round_up(end, kPackedAlignment);
    end = p.scales + num_parameters * p.scale_bytes;
    if (has_zeros) {
      p.zeros = round_up(end, kPackedAlignment);
      end = p.zeros + num_parameters;
    }
    if (has_biases) {
      p.biases = round_up(end, kPackedAlignment);
      end = p.biases + num_parameters * p.bias_bytes;
    }
  }
  if (double_quant) {
    p.absmax = round_up(end, kPackedAlignment);
    p.map = p.absmax + (n * p.groups + 255) / 256 * 4;
    p.offset = p.map + 256 * 4;
    end = p.offset + 4;
  }
  if (has_global_scale) {
    p.global_scale = round_up(end, kPackedAlignment);
    end = p.global_scale + 4;
  }
  p.num_bytes = round_up(end, kPackedAlignment);
  return p;
}

}  // namespace halfbyte::formats
