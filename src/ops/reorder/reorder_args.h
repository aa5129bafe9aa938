// What both sides of `reorder` are: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"
#include "formats/packed.h"

namespace halfbyte {

// Bytes of the packed memory that hold nothing.
struct ReorderGap {
  formats::i64 begin, end;
};
inline constexpr int kReorderGaps = 4;

// A view of a quantized matrix and its packed form. The codes of the view are one sequence in which row r
// begins at number r * row_codes.
struct ReorderArgs {
  formats::PackedLayout layout;
  ReorderGap gaps[kReorderGaps];
  formats::u8* packed;
  formats::u8* codes;
  void* scales;
  void* zeros;
  void* biases;
  float *absmax, *map, *offset;
  formats::i64 row_codes, num_code_bytes;
  formats::ScaleType scale_type;
  bool high_first;  // 4 bits: the first code of a byte is in its high half
  bool one_group;   // the view has one scale, the packed form the same in every group
  bool zero_words;  // zero points lie in words of 32 bits along the rows
  int padding;      // the code behind the end of a row; kPaddingOfGroup: as its last group has it
};
inline constexpr int kPaddingOfGroup = -1;

// Where code number i of the view lies.
struct ViewPlace {
  formats::i64 byte;
  int shift;
};
HALFBYTE_FN ViewPlace view_place(const ReorderArgs& args, formats::i64 i) {
  if (args.layout.bits == 8) return {i, 0};
  return {i / 2, (i % 2 != 0) != args.high_first ? 4 : 0};
}
HALFBYTE_FN int view_code(const ReorderArgs& args, formats::i64 row, formats::i64 col) {
  const ViewPlace place = view_place(args, row * args.row_codes + col);
  return args.codes[place.byte] >> place.shift & ((1 << args.layout.bits) - 1);
}
HALFBYTE_FN int packed_code(const ReorderArgs& args, formats::i64 row, formats::i64 col) {
  const formats::PackedLayout& p = args.layout;
  const int shift = formats::code_place(static_cast<int>(row % formats::kUnitRows),
                                        static_cast<int>(col % formats::kUnitCols), p.bits)
                        .shift;
  return args.packed[p.code(row, col)] >> shift & ((1 << p.bits) - 1);
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
  formats::GroupParams<float> params;
  params.code_scale = formats::load_scale<float>(args.packed + p.scale(row, last), 0, args.scale_type);
  params.code_bias = formats::load_scale<float>(args.packed + p.bias(row, last), 0, args.scale_type);
  return formats::zero_code(params, codec);
}

// The number of a parameter of the view.
HALFBYTE_FN formats::i64 view_parameter(const ReorderArgs& args, formats::i64 row, formats::i64 group) {
  return args.one_group ? 0 : row * args.layout.groups + group;
}
// Zero points in words: those of rows_per_word rows lie in one.
HALFBYTE_FN int rows_per_word(const ReorderArgs& args) { return 32 / args.layout.bits; }
HALFBYTE_FN formats::i64 zero_rows(const ReorderArgs& args) { return args.one_group ? 1 : args.layout.n; }
// In f32, one for 256 scales of the view.
HALFBYTE_FN formats::i64 num_absmax(const ReorderArgs& args) {
  return (args.layout.n * args.layout.groups + 255) / 256;
}

// The kernel that moves codes by vectors: rows of the view consist of them.
inline constexpr int kReorderThreads = 256;
inline constexpr int kVectorBytes = 16;
// What a warp takes of a strip: of each row 8 vectors.
inline constexpr int kTilesPerWarp = 4;
// The kernel that moves parameters: groups of a strip that a warp takes, a lane a row.
inline constexpr int kGroupsPerWarp = 8;

}  // namespace halfbyte
