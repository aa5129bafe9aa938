// What quantize_search is given: shared by host and device, freestanding.
#pragma once

#include "ops/quantize/quantize_args.h"

namespace halfbyte {

struct ScaleSearchArgs {
  QuantizeArgs quantize;
  formats::i64 units_per_row;  // of kSearchUnit groups, whose codes begin at a byte
  const float* importance;     // of element i: number (first + i) % count; null: all alike
  formats::i64 importance_count, importance_first;
};
inline constexpr int kSearchUnit = 8, kSearchThreads = 128;

}  // namespace halfbyte
