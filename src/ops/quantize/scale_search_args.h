// What quantize_search is given: shared by host and device, freestanding.
#pragma once

#include "ops/quantize/quantize_args.h"

namespace halfbyte {

struct ScaleSearchArgs {
  QuantizeArgs quantize;
  // Of kSearchUnit groups, whose codes begin at a byte: in a row, and of a block.
  formats::i64 units_per_row;
  formats::i32 units;
  const float* importance;  // of element i: number (first + i) % count; null: all alike
  formats::i64 importance_count, importance_first;
};
inline constexpr int kSearchUnit = 8, kSearchThreads = 128;
// The units of a block: of short groups several, which share what it costs to begin.
inline constexpr int kMaxSearchUnits = 8;
HALFBYTE_FN int search_units(formats::i64 group_size) {
  return static_cast<int>(formats::clamp<formats::i64>(128 / group_size, 1, kMaxSearchUnits));
}

}  // namespace halfbyte
