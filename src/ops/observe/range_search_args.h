// What the kernels of percentile and mse ranges are given: shared by host and device, freestanding.
#pragma once

#include "formats/counts.h"
#include "formats/mse_search.h"
#include "formats/observer.h"
#include "formats/percentile.h"
#include "grouped/groups_args.h"

namespace halfbyte {

// What all kernels need to know. `ranges`: those of the finite values, in their place those of the observer;
// both 0 where a group has none.
struct SearchCommon {
  const void* x;
  RangeKeys* ranges;
  Groups groups;  // of elements; contiguous
};
inline constexpr int kSearchThreads = 256;

// observe_percentile_groups: short groups, observe_percentile_blocks: of a block each.
struct PercentileGroupsArgs {
  SearchCommon common;
  double percentile;
};
// Elements that a thread holds, at most, in a warp or a block that has a group.
inline constexpr int kPercentileLanes = 8, kPercentileBlock = 16;

// observe_percentile_counts: how many elements of a group begin with the bytes found so far, of either end,
// and have what byte next; observe_percentile_pick: that byte.
struct PercentileState {
  formats::u64 prefixes[2], ranks[2];  // ranks: from 0, among those with the prefix
};
struct PercentileCounts {
  formats::u64 of_byte[2][256];
};
struct PercentileCountsArgs {
  SearchCommon common;
  PercentileState* states;  // of each group; 0 before, as the counts
  PercentileCounts* counts;
  double percentile;
  formats::i64 per_block, splits;  // elements of a block, blocks of a group
  formats::i32 pass;
};

// Elements of a piece: what a warp, or a block of kMseWarps, has in shared memory.
inline constexpr int kMseWarps = 8;
HALFBYTE_FN int mse_piece(int team_warps, int value_bytes) {
  return team_warps == 1 ? 256 : 16384 / value_bytes;
}
inline constexpr int kMseMostPieces = 256;  // of a block
// observe_mse_groups: a warp or a block has a group, with at most so many pieces.
struct MseGroupsArgs {
  SearchCommon common;
  formats::MseCodes codes;
};
// observe_mse_errors: `splits` blocks have `pieces` of a group, a power of two; observe_mse_pick: the next
// candidates.
template <class F>
struct MseState {
  formats::MseCandidate<F> best, parents[formats::kMseMostParents];
  F least;
};
struct MseErrorsArgs {
  SearchCommon common;
  formats::MseCodes codes;
  void* states;  // MseState<F> of each group
  void* errors;  // F [groups, splits, kMseMostCandidates]
  formats::i64 splits;
  formats::i32 pieces, stage;
};

}  // namespace halfbyte
