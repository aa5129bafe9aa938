#include "grouped/linear_kernels.h"

#include "core/checks.h"
#include "core/words.h"

namespace halfbyte {

using cuda::KernelValues;

namespace {

constexpr std::array<Word<ZeroType>, 4> kZeroTypes{
    {{ZeroType::none, "none"}, {ZeroType::i32, "i32"}, {ZeroType::f32, "f32"}, {ZeroType::f64, "f64"}}};
constexpr const char* kIntegers = "integers";

std::vector<std::string> format_words(bool block_floats) {
  std::vector<std::string> words = {kIntegers, "lut4"};
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::table && (block_floats || !format.scale_dtype) &&
        format.format != Format::lut4)
      words.push_back(format.name);
  return words;
}

}  // namespace

KernelKey wide_key() { return cuda::flag_key("wide", "2^31 pieces of work and more."); }
KernelKey fused_group_key() {
  return {"group",
          {"lanes", "block-4", "block-8"},
          false,
          "What shares a group: lanes of a warp, or a block with so many chunks a thread."};
}
int fused_block_batch(const KernelValues& values) {
  const std::string& group = values.at("group");
  return group == "lanes" ? 0 : group == "block-4" ? 4 : 8;
}

std::vector<KernelKey> fake_keys(const std::vector<std::string>& zero_points,
                                 std::initializer_list<KernelKey> more, bool block_floats) {
  std::vector<KernelKey> keys = {
      cuda::dtype_key("The dtype of x, y and gradients."),
      {"zero-point", zero_points, false, "The dtype of zero points: i32, or learned f32 (f64: f64)."},
      {"format", format_words(block_floats), false, "A table has no zero points."},
      {"table", {}, true, "The 16 ascending values of lut4, separated by commas."}};
  keys.insert(keys.end(), more);
  return keys;
}
LinearTypes fake_types_of(const KernelValues& values) {
  LinearTypes types;
  types.fake = true;
  types.dtype = cuda::dtype_of(values);
  types.zero_type = value_of(kZeroTypes, values.at("zero-point"), "zero point");
  const bool is_f64 = types.dtype == DType::f64;
  HALFBYTE_CHECK(types.zero_type != (is_f64 ? ZeroType::f32 : ZeroType::f64), usage,
                 "zero-point must be that of f64 data for f64 data and only then, got {} for {}",
                 values.at("zero-point"), to_string(types.dtype));
  const std::string &format = values.at("format"), &table = values.at("table");
  if (format != kIntegers) {
    const FormatInfo& of = find_format(format);
    QuantSpec spec;
    spec.format = of.format;
    if (of.scale_dtype) {
      spec.scale_dtype = *of.scale_dtype;
      spec.group_size = of.group_size;
      types.byte_scales = scale_type(*of.scale_dtype);
    }
    HALFBYTE_CHECK((spec.format == Format::lut4) == !table.empty(), usage,
                   "format lut4 and table go together, got format {} and {} table", format,
                   table.empty() ? "no" : "a");
    if (!table.empty()) spec.table = parse_table(table);
    check_spec(spec);
    HALFBYTE_CHECK(types.zero_type == ZeroType::none, usage, "format {} has no zero points", format);
    types.book = make_codec(spec).book;
  } else {
    HALFBYTE_CHECK(table.empty(), usage, "format lut4 and table go together, got format {} and a table",
                   format);
  }
  const bool backward = values.contains("operation") && values.at("operation") == "backward";
  HALFBYTE_CHECK(!(backward && types.byte_scales), usage, "format {} has no operation backward: dx is dy",
                 format);
  if (!values.contains("mask")) return types;
  types.mask = cuda::is_set(values, "mask");
  HALFBYTE_CHECK(!(types.mask && backward), usage, "mask is of operation forward");
  HALFBYTE_CHECK(!(types.mask && types.byte_scales), usage, "format {} has no mask: dx is dy", format);
  return types;
}

}  // namespace halfbyte
