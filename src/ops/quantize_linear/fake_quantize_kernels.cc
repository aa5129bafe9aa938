// The kernels of fake quantization, listed: those of linear quantization, otherwise specialised.
#include "core/words.h"
#include "ops/quantize_linear/lsq_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

constexpr std::array<Word<ZeroType>, 4> kZeroTypes{
    {{ZeroType::none, "none"}, {ZeroType::i32, "i32"}, {ZeroType::f32, "f32"}, {ZeroType::f64, "f64"}}};
constexpr const char* kIntegers = "integers";

std::vector<std::string> formats() {
  std::vector<std::string> words = {kIntegers, "lut4"};
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::table && format.format != Format::lut4) words.push_back(format.name);
  return words;
}

std::vector<KernelKey> keys(const std::vector<std::string>& zero_points,
                            std::initializer_list<KernelKey> more) {
  std::vector<KernelKey> keys = {
      cuda::dtype_key("The dtype of x, y and gradients."),
      {"scale-dtype", {"f32", "f16", "bf16", "f64"}, false, "f32, or the dtype."},
      {"zero-point", zero_points, false, "The dtype of zero points: i32, or learned f32 (f64: f64)."},
      {"format", formats(), false, "A table has no zero points."},
      {"table", {}, true, "The 16 ascending values of lut4, separated by commas."}};
  keys.insert(keys.end(), more);
  return keys;
}
std::vector<KernelKey> given_keys(std::initializer_list<KernelKey> more) {
  std::vector<KernelKey> all = keys({"none", "i32", "f32", "f64"},
                                    {{"operation", {"forward", "backward"}, false, "What is done."},
                                     cuda::flag_key("mask", "Forward writes the mask of the gradient.")});
  all.insert(all.end(), more);
  return all;
}
KernelKey wide_key() { return cuda::flag_key("wide", "2^31 pieces of work and more."); }
KernelKey rule_key() {
  return {"scale-rule",
          {"absmax", "half-range", "minmax"},
          false,
          "How ranges become scales: minmax with a zero point, and only then; tables: absmax."};
}

LinearOp operation_of(const KernelValues& values) {
  return values.at("operation") == "backward" ? LinearOp::backward : LinearOp::fake_quantize;
}
LinearTypes types_of(const KernelValues& values) {
  LinearTypes types;
  types.fake = true;
  types.dtype = cuda::dtype_of(values);
  types.scale_dtype = parse_dtype(values.at("scale-dtype"));
  types.zero_type = value_of(kZeroTypes, values.at("zero-point"), "zero point");
  HALFBYTE_CHECK(types.scale_dtype == DType::f32 || types.scale_dtype == types.dtype, usage,
                 "scale-dtype must be f32 or the dtype ({}), got {}", to_string(types.dtype),
                 to_string(types.scale_dtype));
  const bool is_f64 = types.dtype == DType::f64;
  HALFBYTE_CHECK(types.zero_type != (is_f64 ? ZeroType::f32 : ZeroType::f64), usage,
                 "zero-point must be that of f64 data for f64 data and only then, got {} for {}",
                 values.at("zero-point"), to_string(types.dtype));
  const std::string &format = values.at("format"), &table = values.at("table");
  if (format != kIntegers) {
    QuantSpec spec;
    spec.format = find_format(format).format;
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
  if (!values.contains("mask")) return types;
  types.mask = cuda::is_set(values, "mask");
  HALFBYTE_CHECK(!(types.mask && values.contains("operation") && operation_of(values) == LinearOp::backward),
                 usage, "mask is of operation forward");
  return types;
}
formats::Rule rule_of(const KernelValues& values, const LinearTypes& types) {
  const ScaleRule rule = parse_scale_rule(values.at("scale-rule"));
  HALFBYTE_CHECK((rule == ScaleRule::minmax) == (types.zero_type != ZeroType::none), usage,
                 "scale-rule must be minmax with a zero point and only then, got {} with zero-point {}",
                 values.at("scale-rule"), values.at("zero-point"));
  HALFBYTE_CHECK(!types.book || rule == ScaleRule::absmax, usage,
                 "scale-rule of format {} must be absmax, got {}", values.at("format"),
                 values.at("scale-rule"));
  return static_cast<formats::Rule>(rule);
}

}  // namespace

std::vector<cuda::Kernel> fake_quantize_kernels() {
  return {
      {{"fake_quantize", "fake_chunks", "Tensors whose scales belong to whole chunks.",
        given_keys({wide_key()})},
       [](const KernelValues& values) {
         return linear_chunks_kernel(types_of(values), operation_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "fake_columns", "Tensors whose scales differ from column to column.",
        given_keys({wide_key()})},
       [](const KernelValues& values) {
         return linear_columns_kernel(types_of(values), operation_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "fake_elements", "Any tensors.", given_keys({})},
       [](const KernelValues& values) {
         return linear_elements_kernel(types_of(values), operation_of(values));
       }},
      {{"fake_quantize", "fake_fused", "Observer, scales, zero points and values in one pass.",
        keys({"none", "i32"},
             {rule_key(),
              cuda::flag_key("mask", "The mask of the gradient is written."),
              {"group",
               {"lanes", "block-4", "block-8"},
               false,
               "What shares a group: lanes of a warp, or a block with so many chunks a thread."}})},
       [](const KernelValues& values) {
         const LinearTypes types = types_of(values);
         const std::string& group = values.at("group");
         return linear_fused_kernel(types, LinearOp::fake_quantize, rule_of(values, types),
                                    group == "lanes"     ? 0
                                    : group == "block-4" ? 4
                                                         : 8);
       }},
      {{"fake_quantize", "fake_params", "Observer, scales and zero points from ranges.",
        keys({"none", "i32"}, {rule_key()})},
       [](const KernelValues& values) {
         const LinearTypes types = types_of(values);
         return linear_params_kernel(types, LinearOp::fake_quantize, rule_of(values, types));
       }},
      {{"fake_quantize",
        "mask_gradients",
        "Gradients by the mask.",
        {cuda::dtype_key("The dtype of gradients."),
         cuda::flag_key("elements", "Chunks of 16 bytes do not have whole bytes of the mask."), wide_key()}},
       [](const KernelValues& values) {
         return mask_gradients_kernel(cuda::dtype_of(values), !cuda::is_set(values, "elements"),
                                      cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_rows", "Gradients of learned scales of groups one behind the other.",
        keys({"none", "i32", "f32", "f64"},
             {{"levels",
               {"3", "0", "1", "2", "4", "5", "6", "7", "8"},
               false,
               "A group fills up 2^levels chunks of 16 bytes; 8: blocks share a group."},
              wide_key()})},
       [](const KernelValues& values) {
         return lsq_rows_kernel(types_of(values), values.at("levels")[0] - '0', cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_columns", "Gradients of learned scales of groups side by side.",
        keys({"none", "i32", "f32", "f64"}, {wide_key()})},
       [](const KernelValues& values) {
         return lsq_columns_kernel(types_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_elements", "Gradients of learned scales of any groups.",
        keys({"none", "i32", "f32", "f64"}, {wide_key()})},
       [](const KernelValues& values) {
         return lsq_elements_kernel(types_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_totals", "Sums of the pieces of groups, for gradients of learned scales.",
        keys({"none", "i32", "f32", "f64"}, {})},
       [](const KernelValues& values) { return lsq_totals_kernel(types_of(values)); }},
  };
}

}  // namespace halfbyte
