#include "core/format.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/words.h"
#include "formats/bits.h"

namespace halfbyte {
namespace {

constexpr FormatInfo kFormats[] = {
#define HALFBYTE_SCALES_any std::nullopt
#define HALFBYTE_SCALES_f8_e4m3 DType::f8_e4m3
#define HALFBYTE_SCALES_f8_e8m0 DType::f8_e8m0
#define HALFBYTE_FORMAT(name, kind, bits, default_rule, scales, group) \
  {Format::name, #name, FormatKind::kind, bits, ScaleRule::default_rule, HALFBYTE_SCALES_##scales, group},
#include "halfbyte/formats.def"
#undef HALFBYTE_FORMAT
#undef HALFBYTE_SCALES_any
#undef HALFBYTE_SCALES_f8_e4m3
#undef HALFBYTE_SCALES_f8_e8m0
};

// By format; null where the kind is not table.
constexpr const formats::CodeBook* kBooks[] = {
#define HALFBYTE_BOOK_table(name) &formats::books::name
#define HALFBYTE_BOOK_integer(name) nullptr
#define HALFBYTE_BOOK_affine(name) nullptr
#define HALFBYTE_BOOK_floating(name) nullptr
#define HALFBYTE_FORMAT(name, kind, bits, default_rule, scales, group) HALFBYTE_BOOK_##kind(name),
#include "halfbyte/formats.def"
#undef HALFBYTE_FORMAT
#undef HALFBYTE_BOOK_table
#undef HALFBYTE_BOOK_integer
#undef HALFBYTE_BOOK_affine
#undef HALFBYTE_BOOK_floating
};

constexpr std::array<Word<ScaleRule>, 5> kScaleRules{{{ScaleRule::absmax, "absmax"},
                                                      {ScaleRule::half_range, "half-range"},
                                                      {ScaleRule::signed_max, "signed-max"},
                                                      {ScaleRule::minmax, "minmax"},
                                                      {ScaleRule::mlx_edge, "mlx-edge"}}};

constexpr std::array<Word<Granularity>, 4> kGranularities{{{Granularity::tensor, "tensor"},
                                                           {Granularity::channel, "channel"},
                                                           {Granularity::group, "group"},
                                                           {Granularity::flat, "flat"}}};

constexpr std::array<Word<Layout>, 9> kLayouts{{{Layout::halfbyte, "halfbyte"},
                                                {Layout::bitsandbytes, "bitsandbytes"},
                                                {Layout::compressed_tensors, "compressed-tensors"},
                                                {Layout::mlx, "mlx"},
                                                {Layout::gptq, "gptq"},
                                                {Layout::awq, "awq"},
                                                {Layout::modelopt, "modelopt"},
                                                {Layout::fp8, "fp8"},
                                                {Layout::gpt_oss, "gpt-oss"}}};

bool rule_fits(const FormatInfo& format, bool asymmetric, ScaleRule rule) {
  switch (format.kind) {
    case FormatKind::table:
    case FormatKind::floating:
      return rule == ScaleRule::absmax;
    case FormatKind::affine:
      return rule == ScaleRule::minmax || rule == ScaleRule::mlx_edge;
    case FormatKind::integer:
      return asymmetric ? rule == ScaleRule::minmax
                        : rule == ScaleRule::absmax || rule == ScaleRule::half_range ||
                              rule == ScaleRule::signed_max;
  }
  return false;
}

}  // namespace

std::span<const FormatInfo> all_formats() { return kFormats; }

const FormatInfo& info(Format format) { return kFormats[static_cast<size_t>(format)]; }

const FormatInfo& find_format(std::string_view name) {
  std::string known;
  for (const FormatInfo& format : kFormats) {
    if (name == format.name) return format;
    known += known.empty() ? "" : ", ";
    known += format.name;
  }
  HALFBYTE_FAIL(usage, "unknown format '{}': must be one of {}", name, known);
}

ScaleRule parse_scale_rule(std::string_view word) { return value_of(kScaleRules, word, "scale rule"); }
std::array<float, 16> parse_table(std::string_view text) {
  std::array<float, 16> table = {};
  size_t count = 0;
  for (bool more = true; more; ++count) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view word = text.substr(0, comma);
    float value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    HALFBYTE_CHECK(error == std::errc() && end == word.data() + word.size(), usage,
                   "table: value {} is not a number: '{}'", count, word);
    if (count < table.size()) table[count] = value;
    more = comma < text.size();
    if (more) text.remove_prefix(comma + 1);
  }
  HALFBYTE_CHECK(count == table.size(), usage, "table: expected {} values separated by commas, got {}",
                 table.size(), count);
  return table;
}
const char* to_string(ScaleRule rule) { return word_of(kScaleRules, rule); }
const char* to_string(Granularity granularity) { return word_of(kGranularities, granularity); }

const char* to_string(Layout layout) { return word_of(kLayouts, layout); }
Layout parse_layout(std::string_view word) { return value_of(kLayouts, word, "layout"); }

void check_spec(const QuantSpec& spec) {
  const FormatInfo& format = info(spec.format);
  HALFBYTE_CHECK(!spec.asymmetric || format.kind == FormatKind::integer, usage,
                 "spec: asymmetric needs an integer format, got {}", format.name);
  if (spec.granularity == Granularity::group || spec.granularity == Granularity::flat)
    HALFBYTE_CHECK(spec.group_size > 0, usage, "spec: group_size must be positive, got {}", spec.group_size);
  if (format.scale_dtype) {
    HALFBYTE_CHECK(spec.scale_dtype == *format.scale_dtype, usage,
                   "spec: scale dtype of {} must be {}, got {}", format.name, to_string(*format.scale_dtype),
                   to_string(spec.scale_dtype));
    HALFBYTE_CHECK(spec.granularity == Granularity::group && spec.group_size == format.group_size, usage,
                   "spec: {} has granularity group and group_size {}, got {} and {}", format.name,
                   format.group_size, to_string(spec.granularity), spec.group_size);
  } else {
    HALFBYTE_CHECK(is_floating(spec.scale_dtype), usage,
                   "spec: scale dtype must be f32, f16, bf16 or f64, got {}", to_string(spec.scale_dtype));
  }
  HALFBYTE_CHECK(
      !spec.double_quant || (format.kind != FormatKind::affine && spec.scale_dtype == DType::f32), usage,
      "spec: double quantization needs f32 scales and a format without biases, got {} with {} scales",
      format.name, to_string(spec.scale_dtype));
  if (spec.format == Format::lut4) {
    float largest = 0;
    for (size_t i = 0; i < spec.table.size(); ++i) {
      HALFBYTE_CHECK(std::isfinite(spec.table[i]) && (i == 0 || spec.table[i - 1] < spec.table[i]), usage,
                     "spec: the values of a lut4 table must be finite and ascending; value {} is {}", i,
                     spec.table[i]);
      largest = std::max(largest, std::fabs(spec.table[i]));
    }
  }
}

ScaleRule default_scale_rule(const QuantSpec& spec) {
  return spec.asymmetric ? ScaleRule::minmax : info(spec.format).default_rule;
}

void check_encoding(const QuantSpec& spec, const Encoding& encoding) {
  const FormatInfo& format = info(spec.format);
  const ScaleRule rule = encoding.scale_rule.value_or(default_scale_rule(spec));
  HALFBYTE_CHECK(rule_fits(format, spec.asymmetric, rule), usage,
                 "encoding: scale rule {} does not fit format {}{}", to_string(rule), format.name,
                 spec.asymmetric ? " asymmetric" : "");
  HALFBYTE_CHECK(
      !encoding.search || spec.granularity != Granularity::tensor, usage,
      "encoding: search needs a scale for each channel or group, got granularity tensor, whose one "
      "scale takes all elements at once");
  HALFBYTE_CHECK(!encoding.search || format.kind != FormatKind::floating, usage,
                 "encoding: search is for formats of code books, integers and affine codes, got {}",
                 format.name);
  HALFBYTE_CHECK(
      !encoding.search || encoding.code_scale == CodeScale::stored, usage,
      "encoding: search needs code_scale stored, got unrounded: errors are those of stored scales");
}

bool has_zeros(const QuantSpec& spec) { return spec.asymmetric; }
bool has_global_scale(const QuantSpec& spec) { return info(spec.format).scale_dtype == DType::f8_e4m3; }
bool has_biases(const QuantSpec& spec) { return info(spec.format).kind == FormatKind::affine; }

QuantShape quant_shape(const QuantSpec& spec, int64_t rows, int64_t cols) {
  check_spec(spec);
  HALFBYTE_CHECK(rows >= 0 && cols >= 0, usage, "quant_shape: extents must not be negative, got [{}, {}]",
                 rows, cols);
  const int bits = info(spec.format).bits;
  int64_t num_bits = 0;  // of empty matrices too: of a row, or with columns of one
  HALFBYTE_CHECK(!__builtin_mul_overflow(std::max<int64_t>(rows, 1), std::max<int64_t>(cols, 1), &num_bits) &&
                     !__builtin_mul_overflow(num_bits, bits + 8, &num_bits),
                 usage, "quant_shape: [{}, {}] at {} bits exceeds 2^63 - 1 bits", rows, cols, bits);
  QuantShape shape;
  shape.rows = spec.granularity == Granularity::flat ? 1 : rows;
  shape.cols = spec.granularity == Granularity::flat ? rows * cols : cols;
  shape.row_bytes = formats::packed_bytes(shape.cols, bits);
  const bool sized = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  shape.group_size = sized ? spec.group_size : shape.cols;
  shape.groups_per_row = shape.cols == 0 ? 0 : (shape.cols - 1) / shape.group_size + 1;
  shape.num_groups = shape.rows * shape.groups_per_row;
  if (spec.granularity == Granularity::tensor) shape.num_groups = 1;
  return shape;
}

formats::ScaleType scale_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return formats::ScaleType::f32;
    case DType::f16:
      return formats::ScaleType::f16;
    case DType::bf16:
      return formats::ScaleType::bf16;
    case DType::f64:
      return formats::ScaleType::f64;
    case DType::f8_e4m3:
      return formats::ScaleType::e4m3;
    case DType::f8_e8m0:
      return formats::ScaleType::e8m0;
    default:
      HALFBYTE_FAIL(bug, "scale_type: {} is not a scale dtype", to_string(dtype));
  }
}

const formats::CodeBook* code_book(Format format) { return kBooks[static_cast<size_t>(format)]; }

std::span<const float, 16> table_values(Format format) {
  const formats::CodeBook* book = code_book(format);
  HALFBYTE_CHECK(book != nullptr && format != Format::lut4, bug, "table_values: {} has no values of its own",
                 info(format).name);
  return book->values;
}

formats::Codec make_codec(const QuantSpec& spec, const Encoding& encoding) {
  const FormatInfo& format = info(spec.format);
  formats::Codec codec;
  codec.kind = static_cast<formats::Kind>(format.kind);
  codec.rule = static_cast<formats::Rule>(encoding.scale_rule.value_or(default_scale_rule(spec)));
  codec.scale_type = scale_type(spec.scale_dtype);
  codec.bits = static_cast<formats::u8>(format.bits);
  codec.asymmetric = spec.asymmetric;
  codec.unrounded_code_scale = encoding.code_scale == CodeScale::unrounded;
  codec.q_min = -(1 << (format.bits - 1));
  codec.q_max = (1 << (format.bits - 1)) - 1;
  if (const formats::CodeBook* book = code_book(spec.format)) {
    codec.book = *book;
    if (spec.format == Format::lut4) {
      float values[16];
      std::ranges::copy(spec.table, values);
      codec.book = formats::make_code_book(values, book->tie);
    }
  }
  return codec;
}

static_assert(static_cast<int>(FormatKind::floating) == static_cast<int>(formats::Kind::floating));
static_assert(static_cast<int>(ScaleRule::mlx_edge) == static_cast<int>(formats::Rule::mlx_edge));

}  // namespace halfbyte
