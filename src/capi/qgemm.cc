// Products with quantized weights, and their packed form.
#include "capi/qgemm.h"

#include <optional>

#include "halfbyte/device.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

static_assert(HALFBYTE_WEIGHT_ROUNDING_WEIGHT_ROUNDED == static_cast<int>(WeightRounding::weight_rounded));
static_assert(HALFBYTE_QGEMM_MATH_INT8 == static_cast<int>(QgemmMath::int8));

namespace {

halfbyte_packed_weight default_packed() {
  halfbyte_packed_weight weight{};
  weight.version = kPackedWeightVersion;
  return weight;
}

// The parts of a view must have the bytes that it says: in C++ their length is not known.
WeightView weight_view_of(const halfbyte_weight_view* given, const char* name) {
  required(given, name);
  const halfbyte_weight_view c = read_struct(given, {}, name);
  const std::string prefix = fmt::format("{}->", name);
  const TensorView codes = view_of(c.codes, (prefix + "codes").c_str());
  WeightView view;
  view.spec = spec_of(c.spec, (prefix + "spec").c_str());
  view.rows = c.rows;
  view.cols = c.cols;
  if (c.layout < 0 || c.layout > HALFBYTE_LAYOUT_GPT_OSS)
    refuse("{}layout must be 0 to {}, got {}", prefix, int{HALFBYTE_LAYOUT_GPT_OSS}, c.layout);
  view.layout = static_cast<Layout>(c.layout);
  view.device = codes.device;
  const WeightViewBytes bytes = weight_view_bytes(view.spec, view.rows, view.cols, view.layout);
  // Codes and zero points are bytes or words of any dtype.
  const auto get = [&](const DLTensor* tensor, const char* part_name, int64_t num_bytes,
                       std::optional<DType> dtype = std::nullopt) -> void* {
    if (tensor == nullptr) return nullptr;
    const std::string full = prefix + part_name;
    const TensorView part = view_of(tensor, full.c_str());
    if (dtype && part.dtype != *dtype)
      refuse("{} must be {}, got {}", full, to_string(*dtype), to_string(part.dtype));
    if (!is_contiguous(part)) refuse("{} must be contiguous", full);
    if (part.device != view.device)
      refuse("{} must be on {}, got {}", full, to_string(view.device), to_string(part.device));
    const int64_t actual = contiguous_bytes(part.dtype, part.shape);
    if (actual != num_bytes) refuse("{} must have {} bytes, got {}", full, num_bytes, actual);
    return part.data;
  };
  view.codes = get(c.codes, "codes", bytes.codes);
  const DType scale_dtype = view.spec.double_quant ? DType::u8 : view.spec.scale_dtype;
  view.scales = get(c.scales, "scales", bytes.scales, scale_dtype);
  view.zeros = get(c.zeros, "zeros", bytes.zeros);
  view.biases = get(c.biases, "biases", bytes.biases, view.spec.scale_dtype);
  view.absmax = static_cast<float*>(get(c.absmax, "absmax", bytes.absmax, DType::f32));
  view.map = static_cast<float*>(get(c.map, "map", bytes.map, DType::f32));
  view.offset = static_cast<float*>(get(c.offset, "offset", bytes.offset, DType::f32));
  view.global_scale =
      static_cast<float*>(get(c.global_scale, "global_scale", bytes.global_scale, DType::f32));
  return view;
}

halfbyte_qgemm_descriptor default_descriptor() {
  const QgemmDescriptor defaults;
  halfbyte_qgemm_descriptor descriptor{};
  descriptor.alignment = defaults.alignment;
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.layout = static_cast<int32_t>(defaults.layout);
  descriptor.math = static_cast<int32_t>(defaults.math);
  descriptor.packed = defaults.packed;
  return descriptor;
}

QgemmDescriptor descriptor_of(const halfbyte_qgemm_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_qgemm_descriptor c = read_struct(given, default_descriptor(), "descriptor");
  QgemmDescriptor descriptor;
  descriptor.spec = spec_of(c.spec, "descriptor.spec");
  descriptor.m = c.m;
  descriptor.n = c.n;
  descriptor.k = c.k;
  descriptor.transposed = flag_of(c.transposed, "descriptor.transposed");
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.packed = flag_of(c.packed, "descriptor.packed");
  descriptor.layout = enum_of(c.layout, Layout::gpt_oss, "descriptor.layout");
  descriptor.bias = flag_of(c.bias, "descriptor.bias");
  descriptor.accumulate = flag_of(c.accumulate, "descriptor.accumulate");
  descriptor.math = enum_of(c.math, QgemmMath::int8, "descriptor.math");
  descriptor.early_start = flag_of(c.early_start, "descriptor.early_start");
  descriptor.alignment = c.alignment;
  if (c.variant != nullptr) descriptor.variant = c.variant;
  descriptor.tile = {c.tile_m, c.tile_n};
  return descriptor;
}

Qgemm::Args args_of(const QgemmDescriptor& descriptor, const halfbyte_qgemm_args* given) {
  required(given, "args");
  const halfbyte_qgemm_args c = read_struct(given, {}, "args");
  Qgemm::Args args;
  args.x = view_of(c.x, "x");
  args.y = view_of(c.y, "y");
  args.bias = descriptor.bias ? view_of(c.bias, "bias") : optional_view_of(c.bias, "bias");
  if (descriptor.packed || c.weight != nullptr) args.weight = packed_of(c.weight, "weight");
  if (!descriptor.packed || c.view != nullptr) args.view = weight_view_of(c.view, "view");
  return args;
}

}  // namespace

PackedWeight halfbyte::capi::packed_of(const halfbyte_packed_weight* given, const char* name) {
  required(given, name);
  const halfbyte_packed_weight c = read_struct(given, default_packed(), name);
  const std::string prefix = fmt::format("{}->", name);
  const TensorView data = view_of(c.data, (prefix + "data").c_str());
  if (data.dtype != DType::u8) refuse("{}data must be u8, got {}", prefix, to_string(data.dtype));
  if (!is_contiguous(data)) refuse("{}data must be contiguous", prefix);
  if (c.version < INT_MIN || c.version > INT_MAX)
    refuse("{}version must be {}, got {}", prefix, kPackedWeightVersion, c.version);
  PackedWeight weight;
  weight.spec = spec_of(c.spec, (prefix + "spec").c_str());
  weight.rows = c.rows;
  weight.cols = c.cols;
  weight.data = data.data;
  weight.device = data.device;
  weight.version = static_cast<int>(c.version);
  weight.num_bytes = num_elements(data);
  return weight;
}

halfbyte_blob* halfbyte::capi::new_explanation(const std::vector<QgemmChoice>& choices) {
  std::string lines;
  for (const QgemmChoice& choice : choices)
    lines += fmt::format("{}{}: {}\n", choice.variant, choice.packs ? " (packs the view first)" : "",
                         choice.reason);
  return new halfbyte_blob{std::move(lines)};
}

HALFBYTE_PLAN(qgemm, Qgemm, halfbyte_qgemm_descriptor)

struct halfbyte_qgemm_plans {
  QgemmPlans plans;
};

halfbyte_status halfbyte_qgemm_plans_create(DLDevice device, const halfbyte_qgemm_descriptor* descriptor,
                                            const halfbyte_plan_preference* preference,
                                            halfbyte_qgemm_plans** plans) {
  return guard([&] {
    required(plans, "plans");
    *plans = new halfbyte_qgemm_plans{
        QgemmPlans(from_dlpack(device), descriptor_of(descriptor), preference_of(preference))};
  });
}
halfbyte_status halfbyte_qgemm_plans_workspace_size(const halfbyte_qgemm_plans* plans, int64_t m,
                                                    int64_t* num_bytes) {
  return guard([&] { required(num_bytes, "num_bytes") = required(plans, "plans").plans.workspace_size(m); });
}
halfbyte_status halfbyte_qgemm_plans_run(const halfbyte_qgemm_plans* plans, void* stream, void* workspace,
                                         int64_t workspace_bytes, const halfbyte_qgemm_args* args) {
  return guard([&] {
    const QgemmPlans& of = required(plans, "plans").plans;
    of.run(stream, {workspace, workspace_bytes}, args_of(of.descriptor(), args));
  });
}
void halfbyte_qgemm_plans_destroy(halfbyte_qgemm_plans* plans) { delete plans; }

halfbyte_status halfbyte_qgemm_descriptor_init(halfbyte_qgemm_descriptor* descriptor, size_t struct_size) {
  return init_struct(descriptor, default_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_qgemm_explain(DLDevice device, const halfbyte_qgemm_descriptor* descriptor,
                                       halfbyte_blob** text) {
  return guard([&] {
    required(text, "text");
    *text = new_explanation(explain_qgemm(from_dlpack(device), descriptor_of(descriptor)));
  });
}
halfbyte_status halfbyte_qgemm_math_find(const char* word, halfbyte_qgemm_math* math) {
  return guard(
      [&] { required(math, "math") = static_cast<int32_t>(parse_qgemm_math(&required(word, "word"))); });
}
const char* halfbyte_qgemm_math_name(halfbyte_qgemm_math math) {
  return math < 0 || math > HALFBYTE_QGEMM_MATH_INT8 ? nullptr : to_string(static_cast<QgemmMath>(math));
}
const char* halfbyte_weight_rounding_name(halfbyte_weight_rounding rounding) {
  return rounding < 0 || rounding > HALFBYTE_WEIGHT_ROUNDING_WEIGHT_ROUNDED
             ? nullptr
             : to_string(static_cast<WeightRounding>(rounding));
}

halfbyte_status halfbyte_weight_view_init(halfbyte_weight_view* view, size_t struct_size) {
  return init_struct(view, {}, struct_size, "view");
}
halfbyte_status halfbyte_packed_weight_init(halfbyte_packed_weight* weight, size_t struct_size) {
  return init_struct(weight, default_packed(), struct_size, "weight");
}
halfbyte_status halfbyte_packed_weight_bytes(const halfbyte_quant_spec* spec, int64_t rows, int64_t cols,
                                             int64_t* num_bytes) {
  return guard(
      [&] { required(num_bytes, "num_bytes") = packed_weight_bytes(spec_of(spec, "spec"), rows, cols); });
}
halfbyte_status halfbyte_reorder_to_packed(const halfbyte_weight_view* from, const halfbyte_packed_weight* to,
                                           const halfbyte_execution* execution) {
  return guard([&] { reorder(weight_view_of(from, "from"), packed_of(to, "to"), execution_of(execution)); });
}
halfbyte_status halfbyte_reorder_from_packed(const halfbyte_packed_weight* from,
                                             const halfbyte_weight_view* to,
                                             const halfbyte_execution* execution) {
  return guard([&] { reorder(packed_of(from, "from"), weight_view_of(to, "to"), execution_of(execution)); });
}
namespace {

std::vector<ConstPackedWeight> packed_list_of(const halfbyte_packed_weight* const* weights, int64_t count) {
  if (count < 0) refuse("count must be >= 0, got {}", count);
  std::vector<ConstPackedWeight> given;
  for (int64_t i = 0; i < count; ++i)
    given.push_back(packed_of((&required(weights, "weights"))[i], fmt::format("weights[{}]", i).c_str()));
  return given;
}

}  // namespace

halfbyte_status halfbyte_packed_concat_rows(const halfbyte_packed_weight* const* weights, int64_t count,
                                            const halfbyte_packed_weight* to, void* stream) {
  return guard([&] { concat_rows(packed_list_of(weights, count), packed_of(to, "to"), stream); });
}
halfbyte_status halfbyte_packed_concat_cols(const halfbyte_packed_weight* const* weights, int64_t count,
                                            const halfbyte_packed_weight* to, void* stream) {
  return guard([&] { concat_cols(packed_list_of(weights, count), packed_of(to, "to"), stream); });
}
halfbyte_status halfbyte_packed_slice(const halfbyte_packed_weight* from, const halfbyte_slice* slice,
                                      const halfbyte_packed_weight* to, void* stream) {
  return guard(
      [&] { copy_slice(packed_of(from, "from"), slice_of(slice, "slice"), packed_of(to, "to"), stream); });
}
