// What both sides of `reorder` are: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"
#include "formats/weight_view.h"

namespace halfbyte {

// Bytes of the packed memory that hold nothing.
struct ReorderGap {
  formats::i64 begin, end;
};
inline constexpr int kReorderGaps = 4;

// A view of a quantized matrix and its packed form. The codes of the view are one bit stream in which row r
// begins at bit r * row_bits.
struct ReorderArgs {
  formats::PackedLayout layout;
  ReorderGap gaps[kReorderGaps];
  formats::u8* packed;
  formats::u8* codes;
  void* scales;
  void* zeros;
  void* biases;
  float *absmax, *map, *offset, *global_scale;
  formats::i64 row_bits, num_code_bytes;
  formats::ScaleType scale_type;
  bool high_first;  // 4 bits: the first code of a byte is in its high half
  bool one_group;   // the view has one scale, the packed form the same in every group
  bool zero_words;  // zero points lie in words of 32 bits along the rows
  int padding;      // the code behind the end of a row; kPaddingOfGroup: as its last group has it
};
inline constexpr int kPaddingOfGroup = -1;

// Where the code at a bit of the stream lies.
struct ViewPlace {
  formats::i64 byte;
  int shift;
};
HALFBYTE_FN ViewPlace view_place(const ReorderArgs& args, formats::i64 bit) {
  return {bit / 8, static_cast<int>(bit % 8) ^ (args.high_first ? 4 : 0)};
}
HALFBYTE_FN formats::i64 view_bit(const ReorderArgs& args, formats::i64 row, formats::i64 col) {
  return row * args.row_bits + col * args.layout.bits;
}
HALFBYTE_FN int view_code(const ReorderArgs& args, formats::i64 row, formats::i64 col) {
  const ViewPlace place = view_place(args, view_bit(args, row, col));
  return formats::code_at(args.codes + place.byte, place.shift, args.layout.bits);
}
// What fills up the last byte, or word, of a row.
HALFBYTE_FN int padding_code(const ReorderArgs& args, formats::i64 row) {
  if (args.padding != kPaddingOfGroup) return args.padding;
  const formats::PackedLayout& p = args.layout;
  const formats::i64 last = p.groups - 1;
  if (p.has_zeros) return args.packed[p.zero(row, last)];
  formats::Codec codec;
  codec.kind = formats::Kind::affine;
  codec.bits = static_cast<formats::u8>(p.bits);
  codec.q_min = 0;
  codec.q_max = (1 << p.bits) - 1;
  formats::GroupParams<float> params;
  params.code_scale = formats::load_scale<float>(args.packed + p.scale(row, last), 0, args.scale_type);
  params.code_bias = formats::load_scale<float>(args.packed + p.bias(row, last), 0, args.scale_type);
  return formats::zero_code(params, codec);
}

// The number of the parameter of the view that a group of the packed form has.
HALFBYTE_FN formats::i64 view_parameter(const ReorderArgs& args, formats::i64 row, formats::i64 group) {
  return args.one_group ? 0 : row * args.layout.weight_groups + group / args.layout.repeats;
}
HALFBYTE_FN formats::i64 zero_rows(const ReorderArgs& args) { return args.one_group ? 1 : args.layout.n; }
// Zero points in words. From the view to the packed form: that of a row; 0 where there is none.
HALFBYTE_FN formats::u8 zero_from_words(const ReorderArgs& args, formats::i64 row, formats::i64 group) {
  const formats::PackedLayout& p = args.layout;
  if (row >= p.n || group >= p.groups) return 0;
  return static_cast<formats::u8>(formats::zero_of_words(static_cast<const formats::u32*>(args.zeros),
                                                         p.weight_groups, args.one_group ? 0 : row,
                                                         group / p.repeats, p.bits));
}
// Back: of a strip, whose zero points of a group are as many words as a code has bits, word number `word`.
// `group`: of the view.
HALFBYTE_FN void put_zero_word(const ReorderArgs& args, formats::i64 strip, int word, formats::i64 group) {
  const formats::PackedLayout& p = args.layout;
  const formats::i64 first = strip * formats::kUnitRows;
  if (first + word * 32 / p.bits >= zero_rows(args)) return;
  formats::u32 value = 0;
  for (int row = word * 32 / p.bits; row * p.bits < (word + 1) * 32 && first + row < zero_rows(args); ++row) {
    const formats::u32 zero = args.packed[p.zero(first + row, group * p.repeats)] & ((1u << p.bits) - 1);
    const int at = row * p.bits - word * 32;
    value |= at >= 0 ? zero << at : zero >> -at;
  }
  static_cast<formats::u32*>(args.zeros)[(strip * p.bits + word) * p.weight_groups + group] = value;
}
// In f32, one for 256 scales of the view.
HALFBYTE_FN formats::i64 num_absmax(const ReorderArgs& args) {
  return (args.layout.n * args.layout.groups + 255) / 256;
}

// The kernel that moves codes by vectors: rows of the view consist of them.
inline constexpr int kReorderThreads = 256;
inline constexpr int kVectorBytes = 16;
// What a thread takes otherwise, to the packed form: columns of a row that are whole bytes of it.
HALFBYTE_FN int reorder_columns(int bits) { return formats::in_fragments(bits) ? 2 : 8; }
// What a warp takes of a strip: of each row 8 vectors.
inline constexpr int kTilesPerWarp = 4;
// The kernel that moves parameters: groups of a strip that a warp takes, a lane a row.
inline constexpr int kGroupsPerWarp = 8;

}  // namespace halfbyte
