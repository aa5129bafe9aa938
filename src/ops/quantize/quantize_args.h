// What the kernels of `quantize` are given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

// What a kernel finds in the data; all 0 before. The key of the first non-finite element is ~index, so that
// the largest is the first and 0 is none.
struct QuantizeCounts {
  formats::u64 num_nonfinite, first_nonfinite_key, num_unheld_scales, num_coarse_scales;
};

// The range of finite values: order_key(-min), order_key(max); 0 where there is none.
struct RangeKeys {
  formats::u64 low, high;
};
// An integer, never 0, that orders like x (not NaN), and back.
HALFBYTE_FN formats::u64 order_key(double x) {
  const auto bits = formats::bit_cast<formats::u64>(x);
  return bits ^ (bits >> 63 != 0 ? ~0ull : 1ull << 63);
}
HALFBYTE_FN double from_order_key(formats::u64 key) {
  return formats::bit_cast<double>(key ^ (key >> 63 != 0 ? 1ull << 63 : ~0ull));
}

// x [rows, cols] and the parts of its quantized form, as QuantShape describes them.
struct QuantizeArgs {
  const void* x;
  formats::u8* codes;
  void* scales;
  formats::u8* zeros;
  void* biases;
  QuantizeCounts* counts;
  const RangeKeys* ranges;  // quantize_spans: of every group, where they are known before; else null
  formats::i64 rows, cols, row_bytes, group_size, groups_per_row;
  formats::i64 num_chunks;  // quantize_groups: of kQuantizeChunk elements
  // quantize_spans: columns of a block's share of a row, a multiple of 8; whole groups (of at most 2^31
  // columns), or, where ranges are given, no more than a group.
  formats::i64 span_cols, spans_per_row;
};

// The shape of the kernels' work. A chunk of elements has codes of whole bytes.
inline constexpr int kQuantizeChunk = 8;
// quantize_groups: small blocks end at different times, so that others can load meanwhile.
inline constexpr int kGroupsThreads = 128;
HALFBYTE_FN int groups_batch(int group_size, int element_bytes) {  // chunks a thread
  return formats::min(group_size / kQuantizeChunk, 16 / element_bytes);
}
inline constexpr int kSpansThreads = 256;
inline constexpr int kMaxSpanGroups = 512;
inline constexpr int kRangeThreads = 256;

// value_range: of each group of x [rows, cols]; ranges are all 0 before.
struct ValueRangeArgs {
  const void* x;
  RangeKeys* ranges;
  QuantizeCounts* counts;  // null: non-finite elements are not counted
  formats::i64 num_groups, cols, group_size, groups_per_row;
  formats::i64 spans_per_group;  // blocks share a group: kRangeSpan elements each
};
inline constexpr formats::i64 kRangeSpan = 32768;

}  // namespace halfbyte
