// What the kernel of ranges is given: shared by host and device, freestanding.
#pragma once

#include "formats/counts.h"
#include "formats/observer.h"
#include "grouped/groups_args.h"

namespace halfbyte {

// ranges.cu: the ranges of the finite elements of every group are joined to `ranges`, which are 0 before.
struct RangesArgs {
  const void* x;
  RangeKeys* ranges;
  QuantizeCounts* counts;  // null unless kCounts
  Groups groups;
  formats::i64 per_split, splits;  // units of a part, parts of a group
  bool columns;                    // neighbouring threads have neighbouring groups, else a warp has one
};
inline constexpr int kRangesThreads = 256;

}  // namespace halfbyte
