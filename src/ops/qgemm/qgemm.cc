#include "ops/qgemm/qgemm.h"

#include <algorithm>
#include <array>

#include "core/format.h"
#include "core/words.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

constexpr std::array<Word<WeightLayout>, 4> kLayouts{
    {{WeightLayout::halfbyte, "halfbyte"},
     {WeightLayout::bitsandbytes, "bitsandbytes"},
     {WeightLayout::compressed_tensors, "compressed-tensors"},
     {WeightLayout::mlx, "mlx"}}};
constexpr std::array<Word<QgemmMath>, 3> kMaths{
    {{QgemmMath::automatic, "auto"}, {QgemmMath::tf32, "tf32"}, {QgemmMath::f64, "f64"}}};

constexpr int64_t kMaxExtent = int64_t{1} << 40;  // padding does not overflow

void check_extent(const char* what, const char* name, int64_t extent) {
  HALFBYTE_CHECK(extent >= 0 && extent <= kMaxExtent, usage, "{}: {} must be 0 to 2^40, got {}", what, name,
                 extent);
}

// What packed weights and views have in common.
void check_weight(const char* what, const QuantSpec& spec, int64_t rows, int64_t cols) {
  check_spec(spec);
  const FormatInfo& format = info(spec.format);
  HALFBYTE_CHECK(format.bits == 4 || format.bits == 8, usage,
                 "{}: spec.format must be one of 4 or 8 bits, got {}", what, format.name);
  HALFBYTE_CHECK(spec.scale_dtype != DType::f64, usage,
                 "{}: spec.scale_dtype must be f32, f16 or bf16, got f64", what);
  check_extent(what, "the number of rows", rows);
  check_extent(what, "the number of columns", cols);
}

// Throws where [rows, cols] with this padding has too many bits.
void check_padded(const QuantSpec& spec, int64_t rows, int64_t cols, int64_t row_multiple,
                  int64_t col_multiple) {
  quant_shape(spec, formats::round_up(rows, row_multiple), formats::round_up(cols, col_multiple));
}

bool is_grouped(const QuantSpec& spec) {
  return spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
}
// Columns that share a scale.
int64_t group_of(const QuantSpec& spec, int64_t cols) {
  return is_grouped(spec) ? spec.group_size : std::max<int64_t>(cols, 1);
}

}  // namespace

const char* to_string(WeightLayout layout) { return word_of(kLayouts, layout); }
WeightLayout parse_weight_layout(std::string_view word) { return value_of(kLayouts, word, "weight layout"); }
const char* to_string(QgemmMath math) { return word_of(kMaths, math); }
QgemmMath parse_qgemm_math(std::string_view word) { return value_of(kMaths, word, "math of qgemm"); }

// ---- Layouts of weights

formats::PackedLayout packed_layout_of(const char* what, const QuantSpec& spec, int64_t rows, int64_t cols) {
  check_weight(what, spec, rows, cols);
  HALFBYTE_CHECK(
      spec.granularity != Granularity::flat || cols % spec.group_size == 0, usage,
      "{}: groups of spec.granularity flat must divide the rows of a packed weight, got groups of {} "
      "for {} columns",
      what, spec.group_size, cols);
  check_padded(spec, rows, cols, formats::kUnitRows, 256);
  return formats::packed_layout(rows, cols, info(spec.format).bits, group_of(spec, cols),
                                static_cast<int>(size_of(spec.scale_dtype)), has_zeros(spec),
                                has_biases(spec), spec.double_quant);
}

int64_t packed_weight_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
  return packed_layout_of("packed_weight_bytes", spec, rows, cols).num_bytes;
}

formats::WeightViewLayout view_layout_of(const char* what, const QuantSpec& spec, int64_t rows, int64_t cols,
                                         WeightLayout layout) {
  check_weight(what, spec, rows, cols);
  const FormatInfo& format = info(spec.format);
  const auto check = [&](bool fits, const char* rule) {
    HALFBYTE_CHECK(fits, usage, "{}: layout {} holds {}, got {} with granularity {}{}", what,
                   to_string(layout), rule, format.name, to_string(spec.granularity),
                   spec.double_quant ? " and double quantization" : "");
  };
  formats::WeightViewLayout v;
  v.rows = rows;
  v.cols = cols;
  v.bits = format.bits;
  v.group = group_of(spec, cols);
  v.groups = cols == 0 ? 0 : (cols - 1) / v.group + 1;
  v.one_group = spec.granularity == Granularity::tensor;
  v.flat = v.flat_codes = spec.granularity == Granularity::flat;
  v.row_bytes = (cols * v.bits + 7) / 8;
  switch (layout) {
    case WeightLayout::halfbyte:
      break;
    case WeightLayout::bitsandbytes:
      check(format.kind == FormatKind::table && v.flat, "table formats with granularity flat");
      v.high_first = true;
      break;
    case WeightLayout::compressed_tensors:
      check(format.kind == FormatKind::integer && !spec.double_quant &&
                (spec.granularity == Granularity::group || spec.granularity == Granularity::channel),
            "int4 and int8 with granularity group or channel, without double quantization");
      v.zero_words = has_zeros(spec);
      v.row_bytes = formats::round_up(cols * v.bits, 32) / 8;
      break;
    case WeightLayout::mlx:
      check(format.kind == FormatKind::affine && spec.granularity == Granularity::group,
            "affine formats with granularity group");
      v.row_bytes = formats::round_up(cols * v.bits, 32) / 8;
      break;
  }
  check_padded(spec, rows, cols, 8, 8);
  return v;
}

std::vector<ArgumentMemory> check_packed(const char* op, const char* name, const PackedWeight& weight,
                                         Device device, bool written) {
  HALFBYTE_CHECK(weight.version == kPackedWeightVersion, usage, "{}: {}.version must be {}, got {}", op, name,
                 kPackedWeightVersion, weight.version);
  HALFBYTE_CHECK(weight.device == device, usage, "{}: {} must be on {}, got {}", op, name, to_string(device),
                 to_string(weight.device));
  const ArgumentMemory memory{name,
                              weight.data,
                              packed_layout_of(op, weight.spec, weight.rows, weight.cols).num_bytes,
                              weight.num_bytes,
                              formats::kPackedAlignment,
                              false,
                              written};
  check_argument(op, memory, device);
  return {memory};
}

std::vector<ArgumentMemory> check_view(const char* op, const WeightViewNames& names, const WeightView& view,
                                       Device device, int64_t code_alignment, bool written) {
  HALFBYTE_CHECK(view.device == device, usage, "{}: {} must be on {}, got {}", op, names.view,
                 to_string(device), to_string(view.device));
  const QuantSpec& spec = view.spec;
  const formats::WeightViewLayout layout = view_layout_of(op, spec, view.rows, view.cols, view.layout);
  const int64_t scale_bytes = size_of(spec.scale_dtype), num_scales = layout.num_scales();
  const bool nested = spec.double_quant;
  std::vector<ArgumentMemory> parts;
  const auto add = [&](const char* name, const void* data, bool has, int64_t num_bytes, int64_t alignment) {
    HALFBYTE_CHECK(has || data == nullptr, usage, "{}: {} must be null: spec has none", op, name);
    if (!has) return;
    parts.push_back({name, data, num_bytes, -1, alignment, false, written});
    check_argument(op, parts.back(), device);
  };
  add(names.codes, view.codes, true, layout.code_bytes(), code_alignment);
  add(names.scales, view.scales, true, nested ? num_scales : num_scales * scale_bytes,
      nested ? 1 : scale_bytes);
  add(names.zeros, view.zeros, has_zeros(spec), layout.zero_bytes(), layout.zero_words ? 4 : 1);
  add(names.biases, view.biases, has_biases(spec), num_scales * scale_bytes, scale_bytes);
  add(names.absmax, view.absmax, nested, (num_scales + kDoubleQuantBlock - 1) / kDoubleQuantBlock * 4, 4);
  add(names.map, view.map, nested, 256 * 4, 4);
  add(names.offset, view.offset, nested, 4, 4);
  return parts;
}

// ---- Descriptors

void check_descriptor(const QgemmDescriptor& d) {
  constexpr const char* kWhat = "qgemm descriptor";
  check_extent(kWhat, "m", d.m);
  check_extent(kWhat, "n", d.n);
  check_extent(kWhat, "k", d.k);
  HALFBYTE_CHECK(d.dtype == DType::bf16 || d.dtype == DType::f16 || d.dtype == DType::f32, usage,
                 "{}: dtype must be bf16, f16 or f32, got {}", kWhat, to_string(d.dtype));
  if (d.packed)
    packed_layout_of(kWhat, d.spec, d.n, d.k);
  else
    view_layout_of(kWhat, d.spec, d.n, d.k, d.layout);
  contiguous_bytes(DType::f64, std::array{d.m, d.n});
  contiguous_bytes(DType::f64, std::array{d.m, d.k});
  HALFBYTE_CHECK(!d.bias || !d.transposed, usage, "{}: bias must be false where transposed is true", kWhat);
  HALFBYTE_CHECK(d.math == QgemmMath::automatic || d.dtype == DType::f32, usage,
                 "{}: math {} needs dtype f32, got {}", kWhat, to_string(d.math), to_string(d.dtype));
  HALFBYTE_CHECK(d.alignment > 0 && (d.alignment & (d.alignment - 1)) == 0 && d.alignment >= size_of(d.dtype),
                 usage, "{}: alignment must be a power of two and at least the {} bytes of {}, got {}", kWhat,
                 size_of(d.dtype), to_string(d.dtype), d.alignment);
  HALFBYTE_CHECK(d.tile.m >= 0 && d.tile.n >= 0, usage, "{}: tile must not be negative, got {} x {}", kWhat,
                 d.tile.m, d.tile.n);
  std::string known;
  for (const QgemmVariant& variant : qgemm_variants()) {
    if (d.variant == variant.name) return;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", variant.name);
  }
  HALFBYTE_CHECK(d.variant.empty(), usage, "{}: variant must be empty or one of {}, got '{}'", kWhat, known,
                 d.variant);
}

// ---- Variants

std::span<const QgemmVariant> qgemm_variants() {
  static const QgemmVariant variants[] = {kQgemmCpu};
  return variants;
}

QgemmProblem make_qgemm_problem(Device device, const QgemmDescriptor& d, int num_threads) {
  QgemmProblem problem;
  problem.device = device;
  problem.num_threads = num_threads;
  problem.transposed = d.transposed;
  problem.m = d.m;
  problem.n = d.n;
  problem.k = d.k;
  problem.dtype = d.dtype;
  problem.codec = make_codec(d.spec);
  problem.codec.rule = {};
  problem.codec.unrounded_code_scale = false;
  problem.double_quant = d.spec.double_quant;
  problem.group = group_of(d.spec, d.k);
  problem.packed = d.packed;
  if (d.packed)
    problem.weight = packed_layout_of("qgemm descriptor", d.spec, d.n, d.k);
  else
    problem.view = view_layout_of("qgemm descriptor", d.spec, d.n, d.k, d.layout);
  problem.bias = d.bias;
  problem.accumulate = d.accumulate;
  problem.math = d.math;
  problem.early_start = d.early_start;
  problem.alignment = d.alignment;
  problem.tile = d.tile;
  return problem;
}

namespace {

std::string reason_of(const QgemmVariant& variant, const QgemmProblem& problem) {
  if (variant.device == problem.device.kind) return variant.refuse(problem);
  return variant.device == DeviceKind::cpu ? "it is for the CPU" : "it is for CUDA devices";
}

}  // namespace

const QgemmVariant& choose_qgemm(const QgemmProblem& problem, const std::string& name) {
  const auto variants = qgemm_variants();
  if (name.empty())
    return choose<QgemmProblem, std::shared_ptr<const QgemmKernel>>("qgemm", variants, problem,
                                                                    problem.device.kind);
  const auto variant =
      std::ranges::find(variants, name, [](const QgemmVariant& v) { return std::string_view(v.name); });
  HALFBYTE_CHECK(variant != variants.end(), bug, "qgemm: no variant {}", name);
  const std::string reason = reason_of(*variant, problem);
  HALFBYTE_CHECK(reason.empty(), device, "qgemm: descriptor.variant {} does not take this: {}", name, reason);
  return *variant;
}

std::vector<QgemmChoice> explain_qgemm(Device device, const QgemmDescriptor& descriptor) {
  check_descriptor(descriptor);
  check_device(device);
  const QgemmProblem problem = make_qgemm_problem(device, descriptor, 0);
  std::vector<QgemmChoice> choices;
  for (const QgemmVariant& variant : qgemm_variants())
    choices.push_back({variant.name, problem.is_empty() ? "y has no elements" : reason_of(variant, problem)});
  return choices;
}

}  // namespace halfbyte
