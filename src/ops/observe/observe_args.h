// What the kernels of `observe` are given: shared by host and device, freestanding.
#pragma once

#include "formats/counts.h"
#include "formats/divider.h"
#include "formats/observer.h"

namespace halfbyte {

// The state on a device, and how it takes up the ranges of a batch.
struct ObserveState {
  void *min, *max;            // f32; f64 of f64 tensors
  formats::i64* num_batches;  // one; where history is kMean one of each group
  double history;             // the weight of what was seen before, as formats::observed has it; or kMean
};
// The mean over batches, as formats::observed_mean has it.
inline constexpr double kMean = 2;

inline constexpr int kObserveThreads = 256;

// Where blocks that share a group join what they found; all 0 before.
struct ObserveJoin {
  RangeKeys* ranges;      // of each group
  formats::u32* arrived;  // of those that share the same groups: how many are done
};
struct ObserveCommon {
  const void* x;
  QuantizeCounts* counts;
  ObserveState state;
  ObserveJoin join;
  bool leaves_ranges;  // there, for observe_update; else they are handed to the state
};

// All extents in chunks of 16 bytes, unless it is said otherwise.

// observe_groups: rows of `axis`, groups of `group` along them.
struct ObserveGroupsArgs {
  ObserveCommon common;
  formats::i64 axis, group;
  formats::i32 num_groups;
  formats::i32 team;             // 2^team lanes share a group; long ones: so many threads have one
  formats::Divider row_divider;  // by the groups of a row
};

// Groups of a team.
HALFBYTE_FN int observe_batch(int element_bytes) { return element_bytes == 8 ? 4 : 8; }

// observe_parts: `parts` blocks have a part of `per_part` of a group; fewer than 2^31 in all. Group g begins
// at g / per_row * row + g % per_row * group, and has `runs` runs, `run_stride` apart, of `run`, or what is
// left of `row`.
struct ObservePartsArgs {
  ObserveCommon common;
  formats::i64 row, group, runs, run, run_stride, per_part;
  formats::u32 per_row, parts;
  formats::Divider run_divider;  // by run; not kWide: a group has fewer than 2^31
  formats::i32 tail;             // elements behind all of them, of group 0
};

// observe_columns: bands of `group` rows, of which each column is a group; of every `axis` rows the last band
// may be short. A block has `rows` of a band in 2^width columns of chunks.
struct ObserveColumnsArgs {
  ObserveCommon common;
  formats::i64 axis, group, columns, rows;
  formats::u32 bands_per_axis, pieces, tiles;  // pieces of a band, tiles across; fewer than 2^31 in all
  formats::i32 width;
};

// observe_update: the state takes up ranges that are complete.
struct ObserveUpdateArgs {
  ObserveState state;
  const RangeKeys* ranges;  // of each group
  formats::i64 num_groups;
};

}  // namespace halfbyte
