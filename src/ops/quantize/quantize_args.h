// What the kernels of `quantize` are given: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"
#include "formats/counts.h"

namespace halfbyte {

// x [rows, cols] and the parts of its quantized form, as QuantShape describes them.
struct QuantizeArgs {
  const void* x;
  formats::u8* codes;
  void* scales;
  formats::u8* zeros;
  void* biases;
  QuantizeCounts* counts;
  const RangeKeys* ranges;        // quantize_spans: of every group, where they are known before; else null
  float* global_scale;            // written, where the format has one: that of
  const RangeKeys* tensor_range;  // the values that share it
  formats::i64 rows, cols, row_bytes, group_size, groups_per_row;
  // quantize_groups: chunks of kQuantizeChunk elements; 2^group_shift of them are a group.
  formats::i64 num_chunks;
  formats::i32 group_shift;
  // quantize_spans: columns of a block's share of a row, a multiple of 8; whole groups (of at most 2^31
  // columns), or, where ranges are given, no more than a group.
  formats::i64 span_cols, spans_per_row;
  formats::Rule rule;
  formats::ScaleType scale_type;  // of scales and biases
  bool unrounded_code_scale;      // as Codec has it
};

// The shape of the kernels' work. A chunk of elements has codes of whole bytes.
inline constexpr int kQuantizeChunk = 8;
// quantize_groups: small blocks end at different times, so that others can load meanwhile.
inline constexpr int kGroupsThreads = 128;
// Chunks a thread, kBatch: more share the cost of the parameters, but take shared memory.
HALFBYTE_FN int groups_batch(int group_size, int element_bytes) {
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
