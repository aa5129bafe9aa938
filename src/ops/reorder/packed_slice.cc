// Packed weights cut and joined, along rows and along columns: strips, and blocks of strips, are moved as
// they are.
#include <numeric>

#include "core/arithmetic.h"
#include "core/expect.h"
#include "core/packed_weight.h"
#include "core/plan_device.h"
#include "core/quantized_tensor.h"
#include "core/tensor_check.h"
#include "core/weight_view.h"
#include "ops/reorder/reorder.h"

namespace halfbyte {
namespace {

constexpr const char* kConcatRows = "concat_rows";
constexpr const char* kConcatCols = "concat_cols";
constexpr const char* kSlice = "slice";

std::string name_of(size_t weight) { return fmt::format("weights[{}]", weight); }

formats::PackedLayout layout_of(const ConstPackedWeight& weight) {
  return packed_layout_of(weight.spec, weight.rows, weight.cols);
}

float global_scale_of(const ConstPackedWeight& weight, void* stream) {
  float scale = 0;
  const int64_t at = layout_of(weight).global_scale;
  copy(weight.device, &scale, static_cast<const std::byte*>(weight.data) + at, sizeof scale, stream);
  wait_for(weight.device, stream);
  return scale;
}

// Where weights of a spec are cut: strips begin there, or blocks and groups.
struct Cuts {
  int64_t block, group = 1;
  bool has(int64_t at) const { return at % block == 0 && at % group == 0; }
  int64_t unit() const {  // a group may be said to be as long as there are numbers
    int64_t unit = 0;
    return __builtin_mul_overflow(block / std::gcd(block, group), group, &unit) ? group : unit;
  }
};
Cuts cuts_of(const ConstPackedWeight& weight, bool rows) {
  const QuantSpec& spec = weight.spec;
  const bool grouped = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  if (rows) return {formats::kUnitRows};
  return {layout_of(weight).block_cols, grouped ? spec.group_size : 1};
}

// Whether the blocks of `part`, if it has any, are blocks of `whole`.
bool has_same_blocks(const formats::PackedLayout& part, const formats::PackedLayout& whole) {
  return part.k == 0 || (part.inlined == whole.inlined && part.block_bytes == whole.block_bytes);
}

// Where a piece lies in a weight.
struct Corner {
  int64_t strip = 0, block = 0;
};

// Copies strips, and blocks of each, with what belongs to them.
void copy_blocks(const ConstPackedWeight& from, Corner begin, const PackedWeight& to, Corner at,
                 int64_t strips, int64_t blocks, void* stream) {
  if (blocks == 0) return;
  const formats::PackedLayout source = layout_of(from), target = layout_of(to);
  // Of each strip: `size` bytes of the `from_strip` and `to_strip` that it has.
  const auto move = [&](int64_t to_part, int64_t to_strip, int64_t to_first, int64_t from_part,
                        int64_t from_strip, int64_t from_first, int64_t size) {
    std::byte* const y = static_cast<std::byte*>(to.data) + to_part + at.strip * to_strip + to_first;
    const std::byte* const x =
        static_cast<const std::byte*>(from.data) + from_part + begin.strip * from_strip + from_first;
    if (size == to_strip && size == from_strip) return copy(to.device, y, x, strips * size, stream);
    for (int64_t strip = 0; strip < strips; ++strip)
      copy(to.device, y + strip * to_strip, x + strip * from_strip, size, stream);
  };
  move(0, target.strip_bytes, at.block * target.block_bytes, 0, source.strip_bytes,
       begin.block * source.block_bytes, blocks * source.block_bytes);
  if (source.inlined) return;
  // A row has one group, or groups begin with blocks and end with them or the row.
  const auto group_of = [](const formats::PackedLayout& layout, int64_t block) {
    return layout.groups == 1 ? 0 : block * layout.block_cols / layout.group;
  };
  const int64_t count = std::min<int64_t>({source.groups - group_of(source, begin.block),
                                           target.groups - group_of(target, at.block),
                                           ceil_div(blocks * source.block_cols, source.group)});
  const auto move_parameters = [&](int64_t to_part, int64_t from_part, int64_t size) {
    const int64_t unit = formats::kUnitRows * size;
    move(to_part, target.groups * unit, group_of(target, at.block) * unit, from_part, source.groups * unit,
         group_of(source, begin.block) * unit, count * unit);
  };
  move_parameters(target.scales, source.scales, source.scale_bytes);
  if (source.has_zeros) move_parameters(target.zeros, source.zeros, 1);
  if (source.has_biases) move_parameters(target.biases, source.biases, source.bias_bytes);
}

// What lies between the sections, and the global scale of a weight that the new one is made of.
void finish(const ConstPackedWeight& from, const PackedWeight& to, void* stream) {
  const formats::PackedLayout layout = layout_of(to);
  auto* const memory = static_cast<std::byte*>(to.data);
  static constexpr std::byte kZeros[formats::kPackedAlignment] = {};  // a gap is shorter
  ReorderGap gaps[kReorderGaps] = {};
  find_gaps(layout, gaps);
  for (const ReorderGap& gap : gaps) copy(to.device, memory + gap.begin, kZeros, gap.end - gap.begin, stream);
  if (layout.has_global_scale)
    copy(to.device, memory + layout.global_scale,
         static_cast<const std::byte*>(from.data) + layout_of(from).global_scale, sizeof(float), stream);
}

// Joining along rows, and along columns.
struct Axis {
  const char* op;
  int64_t ConstPackedWeight::*joined;
  int64_t ConstPackedWeight::*kept;
  const char *joined_name, *kept_name;
};
constexpr Axis kRows = {kConcatRows, &ConstPackedWeight::rows, &ConstPackedWeight::cols, "rows", "cols"};
constexpr Axis kCols = {kConcatCols, &ConstPackedWeight::cols, &ConstPackedWeight::rows, "cols", "rows"};

void check_no_double_quant(const char* op, const QuantSpec& spec) {
  HALFBYTE_CHECK(!spec.double_quant, usage,
                 "{}: scales must not be double quantized: blocks of {} run across rows", op,
                 kDoubleQuantBlock);
}

// A weight of their spec with the extents of all. Waits for `stream` where there is a global scale.
ConstPackedWeight check_to_concat(const Axis& axis, std::span<const ConstPackedWeight> weights,
                                  void* stream) {
  const char* const op = axis.op;
  HALFBYTE_CHECK(!weights.empty(), usage, "{}: weights must not be empty", op);
  const ConstPackedWeight& first = weights[0];
  check_no_double_quant(op, first.spec);
  HALFBYTE_CHECK(first.spec.granularity != Granularity::tensor, usage,
                 "{}: scales must not be one for a tensor: those of several weights differ", op);
  check_device(first.device);
  ConstPackedWeight whole = first;
  whole.*axis.joined = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const ConstPackedWeight& weight = weights[i];
    const std::string name = name_of(i);
    check_same_spec(op, name.c_str(), weight.spec, first.spec, "weights[0]");
    check_packed(op, name.c_str(), weight, first.device, false);
    HALFBYTE_CHECK(weight.*axis.kept == first.*axis.kept, usage,
                   "{}: {}.{} must be {} as of the first, got {}", op, name, axis.kept_name, first.*axis.kept,
                   weight.*axis.kept);
    const Cuts cuts = cuts_of(first, &axis == &kRows);
    HALFBYTE_CHECK(cuts.has(weight.*axis.joined) || i + 1 == weights.size(), usage,
                   "{}: {}.{} must be a multiple of {} but for the last weight, got {}", op, name,
                   axis.joined_name, cuts.unit(), weight.*axis.joined);
    if (has_global_scale(first.spec)) {
      const float expected = global_scale_of(first, stream), actual = global_scale_of(weight, stream);
      HALFBYTE_CHECK(actual == expected, usage,
                     "{}: the global scale of {} must be {} as of the first, got {}", op, name, expected,
                     actual);
    }
    HALFBYTE_CHECK(!__builtin_add_overflow(whole.*axis.joined, weight.*axis.joined, &(whole.*axis.joined)),
                   usage, "{}: the {} of all exceed 2^63 - 1", op, axis.joined_name);
  }
  for (size_t i = 0; i < weights.size(); ++i)
    HALFBYTE_CHECK(
        has_same_blocks(layout_of(weights[i]), layout_of(whole)), usage,
        "{}: {}, of {} columns, is stored in another form than {} columns: join the weights before they are "
        "packed",
        op, name_of(i), weights[i].cols, whole.cols);
  return whole;
}

void join(const Axis& axis, std::span<const ConstPackedWeight> weights, const PackedWeight& to,
          void* stream) {
  Corner at;
  for (const ConstPackedWeight& weight : weights) {
    const formats::PackedLayout layout = layout_of(weight);
    copy_blocks(weight, {}, to, at, layout.strips, layout.blocks_per_strip, stream);
    (&axis == &kRows ? at.strip : at.block) += &axis == &kRows ? layout.strips : layout.blocks_per_strip;
  }
  finish(weights[0], to, stream);
}

PackedTensor joined(const Axis& axis, std::span<const ConstPackedWeight> weights, void* stream) {
  const ConstPackedWeight whole = check_to_concat(axis, weights, stream);
  PackedTensor result(whole.spec, whole.rows, whole.cols, whole.device);
  join(axis, weights, result.view(), stream);
  wait_for(whole.device, stream);
  return result;
}

// Of memory that is to be written: of this form, apart from what is read.
void check_target(const char* op, const PackedWeight& to, const ConstPackedWeight& form, const char* name,
                  const char* what, std::span<const ConstPackedWeight> read) {
  check_same_spec(op, "to", to.spec, form.spec, name);
  HALFBYTE_CHECK(to.rows == form.rows && to.cols == form.cols, usage,
                 "{}: to must be [{}, {}], {}, got [{}, {}]", op, form.rows, form.cols, what, to.rows,
                 to.cols);
  const ArgumentMemory written = check_packed(op, "to", to, form.device, true);
  for (size_t i = 0; i < read.size(); ++i) {
    const std::string each = read.size() == 1 ? name : name_of(i);
    check_apart(op, written, check_packed(op, each.c_str(), read[i], form.device, false));
  }
}

void join_into(const Axis& axis, std::span<const ConstPackedWeight> weights, const PackedWeight& to,
               void* stream) {
  const ConstPackedWeight whole = check_to_concat(axis, weights, stream);
  check_target(axis.op, to, whole, "weights[0]",
               fmt::format("the {} of all weights", axis.joined_name).c_str(), weights);
  join(axis, weights, to, stream);
}

// The form of a slice.
ConstPackedWeight check_to_slice(const ConstPackedWeight& from, const Slice& slice) {
  check_device(from.device);
  check_packed(kSlice, "from", from, from.device, false);
  const int64_t extents[] = {from.rows, from.cols};
  const std::vector<int64_t> kept = check_slice(kSlice, extents, slice);
  check_no_double_quant(kSlice, from.spec);
  ConstPackedWeight result = from;
  result.rows = kept[0];
  result.cols = kept[1];
  const Cuts cuts = cuts_of(from, slice.axis == 0);
  for (const int64_t at : {slice.begin, slice.end})
    HALFBYTE_CHECK(cuts.has(at) || at == extents[slice.axis], usage,
                   "{}: a packed weight [{}, {}] is cut at {} that are multiples of {}, got {}", kSlice,
                   from.rows, from.cols, slice.axis == 0 ? "rows" : "columns", cuts.unit(), at);
  HALFBYTE_CHECK(has_same_blocks(layout_of(result), layout_of(from)), usage,
                 "{}: {} columns are stored in another form than {}: cut the weight before it is packed",
                 kSlice, result.cols, from.cols);
  return result;
}

void cut(const ConstPackedWeight& from, const Slice& slice, const PackedWeight& to, void* stream) {
  const formats::PackedLayout layout = layout_of(to);
  const Corner begin = slice.axis == 0 ? Corner{slice.begin / formats::kUnitRows, 0}
                                       : Corner{0, slice.begin / layout.block_cols};
  copy_blocks(from, begin, to, {}, layout.strips, layout.blocks_per_strip, stream);
  finish(from, to, stream);
}

}  // namespace

PackedTensor PackedTensor::concat_rows(std::span<const ConstPackedWeight> weights, void* stream) {
  return joined(kRows, weights, stream);
}
PackedTensor PackedTensor::concat_cols(std::span<const ConstPackedWeight> weights, void* stream) {
  return joined(kCols, weights, stream);
}
void concat_rows(std::span<const ConstPackedWeight> weights, const PackedWeight& to, void* stream) {
  join_into(kRows, weights, to, stream);
}
void concat_cols(std::span<const ConstPackedWeight> weights, const PackedWeight& to, void* stream) {
  join_into(kCols, weights, to, stream);
}

PackedTensor PackedTensor::slice(const Slice& slice, void* stream) const {
  const ConstPackedWeight form = check_to_slice(weight_, slice);
  PackedTensor result(form.spec, form.rows, form.cols, form.device);
  cut(weight_, slice, result.view(), stream);
  wait_for(form.device, stream);
  return result;
}

void copy_slice(const ConstPackedWeight& from, const Slice& slice, const PackedWeight& to, void* stream) {
  const ConstPackedWeight form = check_to_slice(from, slice);
  check_target(kSlice, to, form, "from", "the slice", {{from}});
  cut(from, slice, to, stream);
}

}  // namespace halfbyte
