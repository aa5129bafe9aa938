#include "capi/support.h"

#include "core/per_thread.h"
#include "halfbyte/device.hpp"
#include "halfbyte/version.hpp"

namespace halfbyte::capi {
namespace {

struct LastError {
  std::string text;
  ErrorDetails details;
  bool was_lost = false;  // for want of memory
};
const PerThread<LastError> last_errors;

// Of the calling thread: empty before the first, and where there is no memory for one.
const LastError& last_error() {
  alignas(LastError) static std::byte memory[sizeof(LastError)];
  static const LastError& none = *new (memory) LastError;  // never destroyed, and takes no memory
  const LastError* const found = last_errors.find();
  return found == nullptr ? none : *found;
}

}  // namespace

halfbyte_status fail(ErrorCode code, const char* message) noexcept {
  LastError* const last = last_errors.get();
  if (last == nullptr) return HALFBYTE_NO_MEMORY;  // without a text: the status says what it would
  last->was_lost = false;
  last->details = {};
  try {
    last->text = message;
  } catch (const std::bad_alloc&) {
    last->was_lost = true;
  }
  return static_cast<halfbyte_status>(code);
}
halfbyte_status fail(const Error& error) noexcept {
  const halfbyte_status status = fail(error.code(), error.what());
  if (LastError* const last = last_errors.find()) {
    last->details.kind = error.kind();
    try {
      last->details = {error.kind(), error.argument(), error.expected(), error.actual()};
    } catch (const std::bad_alloc&) {
      last->was_lost = true;
    }
  }
  return status;
}

std::vector<std::string> words_of(const char* const* words, int64_t count, const char* name) {
  if (count < 0) refuse("{}: their number must not be negative, got {}", name, count);
  if (count > 0) required(words, name);
  std::vector<std::string> result;
  for (int64_t i = 0; i < count; ++i) result.emplace_back(&required(words[i], name));
  return result;
}

QuantSpec spec_of(const halfbyte_quant_spec* given, const char* name) {
  required(given, name);
  const halfbyte_quant_spec spec = read_struct(given, to_c(QuantSpec{}), name);
  QuantSpec result;
  result.format = enum_of(spec.format, all_formats().back().format, "spec.format");
  result.asymmetric = flag_of(spec.asymmetric, "spec.asymmetric");
  result.granularity = enum_of(spec.granularity, Granularity::flat, "spec.granularity");
  result.group_size = spec.group_size;
  result.scale_dtype = dtype_of(spec.scale_dtype, "spec.scale_dtype");
  result.double_quant = flag_of(spec.double_quant, "spec.double_quant");
  std::copy(std::begin(spec.table), std::end(spec.table), result.table.begin());
  return result;
}

halfbyte_quant_spec to_c(const QuantSpec& spec) {
  halfbyte_quant_spec result{};
  result.struct_size = sizeof result;
  result.format = static_cast<int32_t>(spec.format);
  result.asymmetric = spec.asymmetric;
  result.granularity = static_cast<int32_t>(spec.granularity);
  result.group_size = spec.group_size;
  result.scale_dtype = static_cast<int32_t>(spec.scale_dtype);
  result.double_quant = spec.double_quant;
  std::copy(spec.table.begin(), spec.table.end(), result.table);
  return result;
}

Encoding encoding_of(const halfbyte_encoding* given, const char* name) {
  if (given == nullptr) return {};
  const halfbyte_encoding encoding = read_struct(given, to_c(Encoding{}), name);
  return {optional_of(encoding.scale_rule, ScaleRule::mlx_edge, "encoding.scale_rule"),
          enum_of(encoding.code_scale, CodeScale::unrounded, "encoding.code_scale"),
          flag_of(encoding.search, "encoding.search")};
}

halfbyte_encoding to_c(const Encoding& encoding) {
  return {sizeof(halfbyte_encoding),
          encoding.scale_rule ? static_cast<int32_t>(*encoding.scale_rule) : HALFBYTE_UNSET,
          static_cast<int32_t>(encoding.code_scale), nullptr, encoding.search};
}

void* part(const DLTensor* tensor, const char* name, DType dtype, int64_t n, Device device) {
  if (tensor == nullptr) return nullptr;
  const TensorView view = view_of(tensor, name);
  if (view.dtype != dtype) refuse("{} must be {}, got {}", name, to_string(dtype), to_string(view.dtype));
  if (!is_contiguous(view)) refuse("{} must be contiguous", name);
  if (num_elements(view) != n) refuse("{} must have {} elements, got {}", name, n, num_elements(view));
  if (view.device != device)
    refuse("{} must be on {}, got {}", name, to_string(device), to_string(view.device));
  if (n > 0) {
    if (view.data == nullptr) refuse("{} has {} elements but no data", name, n);
    check_memory(name, view.data, n * size_of(dtype), device);
  }
  return view.data;
}

QuantizedView parts_of(const halfbyte_quantized* given, const QuantSpec& spec, int64_t rows, int64_t cols,
                       Device device, const char* name) {
  required(given, name);
  const halfbyte_quantized parts = read_struct(given, {}, name);
  QuantizedView view;
  view.spec = spec;
  view.rows = rows;
  view.cols = cols;
  const QuantShape shape = quant_shape(spec, rows, cols);
  const std::string prefix = std::string(name) + "->";
  const auto get = [&](const DLTensor* tensor, const char* part_name, DType dtype, int64_t n) {
    return part(tensor, (prefix + part_name).c_str(), dtype, n, device);
  };
  view.codes = static_cast<uint8_t*>(get(parts.codes, "codes", DType::u8, shape.code_bytes()));
  view.scales = get(parts.scales, "scales", spec.scale_dtype, shape.num_groups);
  view.zeros = static_cast<uint8_t*>(get(parts.zeros, "zeros", DType::u8, shape.num_groups));
  view.biases = get(parts.biases, "biases", spec.scale_dtype, shape.num_groups);
  view.global_scale = static_cast<float*>(get(parts.global_scale, "global_scale", DType::f32, 1));
  return view;
}

halfbyte_quantize_status to_c(const QuantizeStatus& status) {
  return {sizeof(halfbyte_quantize_status), status.num_nonfinite,     status.first_nonfinite,
          status.num_unheld_scales,         status.num_coarse_scales, status.num_invalid_scales,
          status.num_invalid_zero_points};
}

Execution execution_of(const halfbyte_execution* given) {
  const halfbyte_execution execution = read_struct(given, {}, "execution");
  return {threads_of(execution.num_threads, "execution.num_threads"), execution.stream};
}

// The enumerators are those of C++.
#define HALFBYTE_SAME(c, cpp) static_assert(static_cast<int32_t>(c) == static_cast<int32_t>(cpp))
HALFBYTE_SAME(HALFBYTE_OK, ErrorCode::ok);
HALFBYTE_SAME(HALFBYTE_BUG, ErrorCode::bug);
HALFBYTE_SAME(HALFBYTE_USAGE, ErrorCode::usage);
HALFBYTE_SAME(HALFBYTE_BAD_INPUT, ErrorCode::bad_input);
HALFBYTE_SAME(HALFBYTE_VERIFY, ErrorCode::verify);
HALFBYTE_SAME(HALFBYTE_DEVICE, ErrorCode::device);
HALFBYTE_SAME(HALFBYTE_IO, ErrorCode::io);
HALFBYTE_SAME(HALFBYTE_NO_MEMORY, ErrorCode::no_memory);
HALFBYTE_SAME(HALFBYTE_EXISTS, ErrorCode::exists);
HALFBYTE_SAME(HALFBYTE_CORRUPT, ErrorCode::corrupt);
HALFBYTE_SAME(HALFBYTE_CANCELLED, ErrorCode::cancelled);
HALFBYTE_SAME(HALFBYTE_DTYPE_F32, DType::f32);
HALFBYTE_SAME(HALFBYTE_DTYPE_F16, DType::f16);
HALFBYTE_SAME(HALFBYTE_DTYPE_BF16, DType::bf16);
HALFBYTE_SAME(HALFBYTE_DTYPE_F64, DType::f64);
HALFBYTE_SAME(HALFBYTE_DTYPE_I8, DType::i8);
HALFBYTE_SAME(HALFBYTE_DTYPE_U8, DType::u8);
HALFBYTE_SAME(HALFBYTE_DTYPE_I32, DType::i32);
HALFBYTE_SAME(HALFBYTE_DTYPE_U32, DType::u32);
HALFBYTE_SAME(HALFBYTE_DTYPE_I64, DType::i64);
HALFBYTE_SAME(HALFBYTE_DTYPE_I4, DType::i4);
HALFBYTE_SAME(HALFBYTE_DTYPE_U4, DType::u4);
HALFBYTE_SAME(HALFBYTE_DTYPE_F8_E4M3, DType::f8_e4m3);
HALFBYTE_SAME(HALFBYTE_DTYPE_F8_E8M0, DType::f8_e8m0);
HALFBYTE_SAME(HALFBYTE_SCALE_RULE_ABSMAX, ScaleRule::absmax);
HALFBYTE_SAME(HALFBYTE_SCALE_RULE_HALF_RANGE, ScaleRule::half_range);
HALFBYTE_SAME(HALFBYTE_SCALE_RULE_SIGNED_MAX, ScaleRule::signed_max);
HALFBYTE_SAME(HALFBYTE_SCALE_RULE_MINMAX, ScaleRule::minmax);
HALFBYTE_SAME(HALFBYTE_SCALE_RULE_MLX_EDGE, ScaleRule::mlx_edge);
HALFBYTE_SAME(HALFBYTE_GRANULARITY_TENSOR, Granularity::tensor);
HALFBYTE_SAME(HALFBYTE_GRANULARITY_CHANNEL, Granularity::channel);
HALFBYTE_SAME(HALFBYTE_GRANULARITY_GROUP, Granularity::group);
HALFBYTE_SAME(HALFBYTE_GRANULARITY_FLAT, Granularity::flat);
HALFBYTE_SAME(HALFBYTE_CODE_SCALE_STORED, CodeScale::stored);
HALFBYTE_SAME(HALFBYTE_CODE_SCALE_UNROUNDED, CodeScale::unrounded);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_GENERAL, ErrorKind::general);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_INVALID_ARGUMENT, ErrorKind::invalid_argument);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_INVALID_PROBLEM, ErrorKind::invalid_problem);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_UNSUPPORTED, ErrorKind::unsupported);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_MISALIGNED, ErrorKind::misaligned);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_BUFFER_TOO_SMALL, ErrorKind::buffer_too_small);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_WORKSPACE_TOO_SMALL, ErrorKind::workspace_too_small);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_COMPILATION_FAILED, ErrorKind::compilation_failed);
HALFBYTE_SAME(HALFBYTE_ERROR_KIND_LAUNCH_FAILED, ErrorKind::launch_failed);
#undef HALFBYTE_SAME
// A pair for each row of formats.def.
struct FormatId {
  halfbyte_format c;
  Format cpp;
};
constexpr FormatId kFormatIds[] = {
    {HALFBYTE_FORMAT_NF4, Format::nf4},           {HALFBYTE_FORMAT_FP4, Format::fp4},
    {HALFBYTE_FORMAT_FP4_E2M1, Format::fp4_e2m1}, {HALFBYTE_FORMAT_LUT4, Format::lut4},
    {HALFBYTE_FORMAT_INT2, Format::int2},         {HALFBYTE_FORMAT_INT3, Format::int3},
    {HALFBYTE_FORMAT_INT4, Format::int4},         {HALFBYTE_FORMAT_INT5, Format::int5},
    {HALFBYTE_FORMAT_INT6, Format::int6},         {HALFBYTE_FORMAT_INT8, Format::int8},
    {HALFBYTE_FORMAT_AFFINE2, Format::affine2},   {HALFBYTE_FORMAT_AFFINE3, Format::affine3},
    {HALFBYTE_FORMAT_AFFINE4, Format::affine4},   {HALFBYTE_FORMAT_AFFINE5, Format::affine5},
    {HALFBYTE_FORMAT_AFFINE6, Format::affine6},   {HALFBYTE_FORMAT_AFFINE8, Format::affine8},
    {HALFBYTE_FORMAT_NVFP4, Format::nvfp4},       {HALFBYTE_FORMAT_MXFP4, Format::mxfp4},
    {HALFBYTE_FORMAT_FP8, Format::fp8},
};
constexpr Format kFormats[] = {
#define HALFBYTE_FORMAT(name, kind, bits, default_rule, scales, group) Format::name,
#include "halfbyte/formats.def"
#undef HALFBYTE_FORMAT
};
constexpr auto kNumFormats = static_cast<int32_t>(std::size(kFormats));
static_assert(std::size(kFormatIds) == std::size(kFormats), "kFormatIds lacks a row of formats.def");
static_assert(std::ranges::all_of(kFormatIds,
                                  [](FormatId id) { return id.c == static_cast<int32_t>(id.cpp); }),
              "a HALFBYTE_FORMAT_ is not the number of its row in formats.def");

}  // namespace halfbyte::capi

using namespace halfbyte;
using namespace halfbyte::capi;

const char* halfbyte_status_name(halfbyte_status status) { return to_string(static_cast<ErrorCode>(status)); }

const char* halfbyte_last_error(void) {
  return last_error().was_lost ? "out of memory, for the text of an error too" : last_error().text.c_str();
}

const char* halfbyte_error_kind_name(halfbyte_error_kind kind) {
  return word_of(kind, ErrorKind::launch_failed);
}
halfbyte_error_kind halfbyte_last_error_kind(void) { return static_cast<int32_t>(last_error().details.kind); }
const char* halfbyte_last_error_argument(void) { return last_error().details.argument.c_str(); }
const char* halfbyte_last_error_expected(void) { return last_error().details.expected.c_str(); }
const char* halfbyte_last_error_actual(void) { return last_error().details.actual.c_str(); }

int32_t halfbyte_version(void) { return HALFBYTE_VERSION; }
const char* halfbyte_version_string(void) { return kVersion; }

halfbyte_status halfbyte_dtype_find(const char* word, halfbyte_dtype* dtype) {
  return guard(
      [&] { required(dtype, "dtype") = static_cast<int32_t>(parse_dtype(&required(word, "word"))); });
}
halfbyte_status halfbyte_format_find(const char* word, halfbyte_format* format) {
  return guard([&] {
    required(format, "format") = static_cast<int32_t>(find_format(&required(word, "word")).format);
  });
}
halfbyte_status halfbyte_scale_rule_find(const char* word, halfbyte_scale_rule* rule) {
  return guard(
      [&] { required(rule, "rule") = static_cast<int32_t>(parse_scale_rule(&required(word, "word"))); });
}

const char* halfbyte_dtype_name(halfbyte_dtype dtype) { return word_of(dtype, DType::f8_e8m0); }
const char* halfbyte_scale_rule_name(halfbyte_scale_rule rule) { return word_of(rule, ScaleRule::mlx_edge); }
const char* halfbyte_format_name(halfbyte_format format) {
  return format < 0 || format >= kNumFormats ? nullptr : info(static_cast<Format>(format)).name;
}

const void* halfbyte_blob_data(const halfbyte_blob* blob) {
  return blob == nullptr ? nullptr : blob->bytes.c_str();
}
int64_t halfbyte_blob_size(const halfbyte_blob* blob) {
  return blob == nullptr ? 0 : static_cast<int64_t>(blob->bytes.size());
}
void halfbyte_blob_destroy(halfbyte_blob* blob) { delete blob; }
