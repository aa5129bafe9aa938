// Units of a packed weight (formats/packed.h) for the variants that decode them whole.
#pragma once

#include <algorithm>
#include <array>

#include "formats/packed.h"

namespace halfbyte {

// Where the codes and parameters of a unit of the first strip lie, in bytes.
struct alignas(64) UnitPlace {
  int64_t codes;
  int64_t parts;                                   // of its columns, with parameters of their own: 1, 2 or 4
  std::array<int64_t, 4> groups, scales, offsets;  // of these
};

// Of the units of a strip, in order; offsets: zero points or biases. Groups are multiples of 16 columns, or
// rows.
inline void find_units(const formats::PackedLayout& layout, UnitPlace* units) {
  for (int64_t unit = 0; unit * formats::kUnitCols < layout.k; ++unit) {
    UnitPlace& place = units[unit];
    place.codes = layout.unit(0, unit);
    const auto group_of = [&](int64_t part, int64_t parts) {
      const int64_t col = unit * formats::kUnitCols + part * (formats::kUnitCols / parts);
      return std::min(col / layout.group, layout.groups - 1);  // padding: as the last
    };
    place.parts = group_of(0, 1) == group_of(3, 4) ? 1 : layout.group % (formats::kUnitCols / 2) == 0 ? 2 : 4;
    for (int64_t part = 0; part < place.parts; ++part) {
      const int64_t group = group_of(part, place.parts);
      const auto at = static_cast<size_t>(part);
      place.groups[at] = group;
      place.scales[at] = layout.scale(0, group);
      place.offsets[at] = layout.has_biases ? layout.bias(0, group) : layout.zero(0, group);
    }
  }
}

// The columns of a unit in the order in which vectors have them. Of fragments, 16 words make vectors, one of
// each nibble or byte of a row; number 16 v + w of the result is the column of word w in vector v. Every
// other order of columns is made of this one. Bit streams have theirs as they are.
constexpr std::array<uint8_t, formats::kUnitCols> column_order(int bits) {
  std::array<uint8_t, formats::kUnitCols> columns{};
  for (int col = 0; col < formats::kUnitCols; ++col) {
    const auto [byte, shift] = formats::code_place(0, col, bits);
    const int word = byte % formats::kTileBytes / 4, of_word = byte % 4;
    const int vector = bits == 4 ? of_word / 2 * 2 + shift / 4 : byte / formats::kTileBytes * 2 + of_word;
    const int number = formats::in_fragments(bits) ? vector * 16 + word : col;
    columns[static_cast<size_t>(number)] = static_cast<uint8_t>(col);
  }
  return columns;
}

}  // namespace halfbyte
