// What products with `math = int8` multiply: rows of x rounded to 8 bits, and what of 8 bits stands for the
// codes of a weight. All of it is exact or one rounding of f32, so that every variant gives the same bytes.
//
// Of each row of x, every 64 columns share a scale a = max |x| / 127 (a unit, see formats/packed.h); q = x /
// a is rounded to nearest, ties to even. In a unit, the columns of a part have one scale s of the weight. S
// is the sum of their v q, of integers v that stand for the codes, and T that of their q: exact, below 2^24.
// To y is added in f32, part by part in the order of columns, (a s) S, and (a b) T where there are biases b.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ops/qgemm/qgemm.h"

namespace halfbyte {

inline constexpr float kInt8Most = 127;
inline constexpr PrecisionGuarantee kInt8Guarantee{DType::i8, DType::f32, true, true,
                                                   WeightRounding::code_rounded};

// Of 64 columns of a row of x whose greatest magnitude is given: infinite or NaN if there is such an element,
// of which all of y is NaN. A row below 2^-100 is rounded as if that were its greatest.
struct Int8Scale {
  float scale, reciprocal;
};
inline Int8Scale int8_scale(float magnitude) {
  if (!(magnitude <= std::numeric_limits<float>::max())) return {std::numeric_limits<float>::quiet_NaN(), 0};
  const float most = std::max(magnitude, 0x1p-100f);
  return {most / kInt8Most, kInt8Most / most};
}

// What stands for the codes of a table: value * unit is near its entry. Entries that are multiples of 1/2 up
// to 63.5 are exact; of others the greatest is 127.
struct Int8Table {
  std::array<int8_t, 16> values{};
  float unit = 1;
};
inline Int8Table int8_table(const formats::Codec& codec) {
  Int8Table table;
  float most = 0;
  bool halves = true;
  for (const float entry : codec.book.values) {
    most = std::max(most, std::fabs(entry));
    halves = halves && std::fabs(entry) <= kInt8Most / 2 && std::nearbyint(2 * entry) == 2 * entry;
  }
  table.unit = halves ? 0.5f : most / kInt8Most;
  for (size_t code = 0; code < table.values.size(); ++code)
    table.values[code] = static_cast<int8_t>(std::nearbyint(codec.book.values[code] / table.unit));
  return table;
}

// Where the part ends that begins with column `col` of a row, in a unit of columns [begin, end): with the
// unit where that has one scale, else after 32 or 16 columns, or with the group.
inline int64_t int8_part_end(int64_t group, int64_t begin, int64_t end, int64_t col) {
  if (begin / group == (end - 1) / group) return end;
  const int64_t step = group % 32 == 0 ? 32 : group % 16 == 0 ? 16 : group;
  return std::min(end, (col / step + 1) * step);
}

}  // namespace halfbyte
