// What the kernels of fake_quantize_learned_backward are given, and what an element adds to the gradients of
// its scale and zero point: shared by host and device, freestanding.
#pragma once

#include "formats/pairwise.h"
#include "grouped/linear_args.h"

namespace halfbyte {

template <class F>
struct LsqTerms {
  bool passes = false;    // the gradient of the element
  F scale = 0, zero = 0;  // added to the sums of the group
};
// Scale and zero point are as they are used.
template <class Position = formats::i64, class F>
HALFBYTE_FN LsqTerms<F> lsq_terms(F x, F dy, F scale, int zero_point, int q_min, int q_max) {
  if (x != x) return {};  // NaN NOLINT(misc-redundant-expression)
  if (scale == 0) return {true, 0, 0};
  const F quotient = x / scale, value = formats::round_half_even(quotient);
  const Position position = code_position<Position>(value, zero_point);
  if (q_min <= position && position <= q_max) return {true, dy * (value - quotient), 0};
  return {false, dy * code_distance<F, Position>(position < q_min ? q_min : q_max, zero_point), dy};
}
// The same of a table: its ends, and value_of(quotient), the nearest value.
template <class F, class ValueOf>
HALFBYTE_FN LsqTerms<F> lsq_table_terms(F x, F dy, F scale, F low, F high, const ValueOf& value_of) {
  if (x != x) return {};  // NaN NOLINT(misc-redundant-expression)
  if (scale == 0) return {true, 0, 0};
  const F quotient = x / scale;
  if (low <= quotient && quotient <= high) return {true, dy * (value_of(quotient) - quotient), 0};
  return {false, dy * (quotient < low ? low : high), dy};
}

// The gradients of a group from its totals.
template <class F>
HALFBYTE_FN F lsq_scale_gradient(F total, F factor) {
  return formats::total_of(total * factor);
}
template <class F>
HALFBYTE_FN F lsq_zero_gradient(F total, F scale, F factor) {
  return formats::total_of(-(scale * total) * factor);
}

struct LsqCommon {
  LinearCommon linear;  // y: dx
  void* dscale;
  void* dzero;
  double factor;
  formats::i64 num_groups;
  // Sums of the pieces of groups, where these have several: number ((sum * bands + band) * pieces + piece) *
  // band_groups + g of group band * band_groups + g, with sum 0 for the scale and 1 for the zero point.
  void* partials;
  formats::i64 pieces, band_groups;
};

// lsq_rows: groups that are whole chunks, one behind the other: rows of `row` chunks, groups of `group`
// chunks along them, the last of which may be short. A warp has 128 chunks of its groups, each filled up to
// 2^levels; or a block as many chunks of one group as 128 times its warps.
struct LsqRowsArgs {
  LsqCommon common;
  formats::i64 row, group, groups_per_row;
  formats::Divider row_divider;    // by groups_per_row
  formats::Divider piece_divider;  // by common.pieces
  formats::i32 levels;             // of lanes: less than kLsqWarpLevels
};
inline constexpr int kLsqBatch = 4;       // chunks a thread
inline constexpr int kLsqWarpLevels = 7;  // 128 chunks

// lsq_columns: tensors [bands of `group` rows, columns], of which each column of a band has a scale; a band
// at the end of `axis` rows is short. A block has 32 chunks of columns and kLsqPieceRows rows.
struct LsqColumnsArgs {
  LsqCommon common;
  formats::i64 bands_per_axis, axis, group, row;  // row: chunks
};
inline constexpr int kLsqThreadRows = 4, kLsqPieceRows = kLsqThreadRows * (kLinearThreads / 32);

// lsq_elements: any groups; a warp has kLsqPieceElements of one.
struct LsqElementsArgs {
  LsqCommon common;
  Groups groups;  // of elements
};
inline constexpr int kLsqPieceElements = 1024;

// lsq_totals: adds up the partial sums of groups; a thread has kLsqRun pieces of one of `side` neighbouring
// groups. To further partial sums of `out_pieces`, or, where that is 1, to the gradients.
struct LsqTotalsArgs {
  LsqCommon common;
  void* out;
  formats::i64 out_pieces;
  formats::i32 side, runs;  // threads: side * runs
};
inline constexpr int kLsqRun = 16, kLsqTotalsThreads = 1024;

}  // namespace halfbyte
