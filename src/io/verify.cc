#include "io/verify.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/format.h"
#include "cpu/parallel.h"
#include "io/config.h"
#include "io/safetensors.h"
#include "io/verify_span.h"
#include "io/whole_tensors.h"

namespace halfbyte::io {
namespace {

// Small, so that source and decoded values stay in the second-level cache. Fixed: sums are added block by
// block.
constexpr int64_t kVerifyElements = 64 * 1024;
constexpr double kTiny = 0x1p-148;     // of products that underflow
constexpr double kF32Slack = 0x1p-22;  // of the roundings of one decoding in f32, relative

// The written file, as a stranger would open it.
class WrittenFile {
 public:
  WrittenFile(const std::string& path, const std::string& name)
      : name_(name), input_(InputFile::open(path)), header_(read_safetensors_header(input_, name)) {
    for (const StoredTensor& tensor : header_.tensors) by_name_[tensor.name] = &tensor;
  }

  const StoredTensor& take(const std::string& name, std::string_view dtype,
                           const std::vector<int64_t>& shape) {
    const auto found = by_name_.find(name);
    HALFBYTE_CHECK(found != by_name_.end(), verify, "verify: {} has no tensor \"{}\"", printable(name_),
                   printable(name));
    const StoredTensor& tensor = *found->second;
    HALFBYTE_CHECK(tensor.dtype == dtype && tensor.shape == shape, verify,
                   "verify: tensor \"{}\" is {} [{}], not {} [{}]", printable(name), tensor.dtype,
                   fmt::join(tensor.shape, ", "), dtype, fmt::join(shape, ", "));
    ++num_taken_;
    return tensor;
  }
  // A tensor that must hold exactly these bytes.
  void take_constant(const std::string& name, std::string_view dtype, const std::vector<int64_t>& shape,
                     std::span<const std::byte> expected) {
    const std::vector<std::byte> bytes = read_all(take(name, dtype, shape));
    HALFBYTE_CHECK(std::ranges::equal(bytes, expected), verify, "verify: tensor \"{}\" has a wrong value",
                   printable(name));
  }
  nlohmann::json take_json(const std::string& name) {
    const auto found = by_name_.find(name);
    const int64_t num_bytes = found == by_name_.end() ? 0 : static_cast<int64_t>(found->second->num_bytes);
    const std::vector<std::byte> bytes = read_all(take(name, "U8", {num_bytes}));
    return nlohmann::json::parse(reinterpret_cast<const char*>(bytes.data()),
                                 reinterpret_cast<const char*>(bytes.data()) + bytes.size());
  }
  void check_all_taken() const {
    HALFBYTE_CHECK(num_taken_ == header_.tensors.size(), verify, "verify: {} has {} tensors, not {}",
                   printable(name_), header_.tensors.size(), num_taken_);
  }

  std::vector<std::byte> read_all(const StoredTensor& tensor) const {
    std::vector<std::byte> bytes(tensor.num_bytes);
    input_.read(tensor.offset, bytes);
    return bytes;
  }
  void read(const StoredTensor& tensor, int64_t offset, int64_t num_bytes, std::byte* out) const {
    input_.read(tensor.offset + static_cast<uint64_t>(offset), {out, static_cast<size_t>(num_bytes)});
  }

 private:
  std::string name_;
  InputFile input_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, const StoredTensor*> by_name_;
  size_t num_taken_ = 0;
};

// Values of the types of 8 bits, by their definitions.
float e4m3_value(std::byte byte) {
  const int bits = std::to_integer<int>(byte), exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits >= 128 ? -value : value;
}
const std::array<float, 256>& e4m3_values() {
  static const auto values = [] {
    std::array<float, 256> all;
    for (size_t i = 0; i < 256; ++i) all[i] = e4m3_value(static_cast<std::byte>(i));
    return all;
  }();
  return values;
}
float e8m0_value(std::byte byte) {
  const int bits = std::to_integer<int>(byte);
  return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, bits - 127);
}

// Largest difference between x and x as a scale of `dtype`, which is never rounded to 0. Of e4m3: in units of
// the global scale.
double rounding(DType dtype, double x) {
  x = std::abs(x);
  switch (dtype) {
    case DType::f16:
      return std::max(x * 0x1p-11, 0x1p-24);
    case DType::bf16:
      return std::max(x * 0x1p-8, 0x1p-133);
    case DType::f8_e4m3:
      return std::max(x * 0x1p-4, 0x1p-9);
    case DType::f8_e8m0:
      return std::max(x * 0.75, 0x1p-127);
    default:
      return std::max(x * 0x1p-24, kTiny);
  }
}

// A bound that a finite value keeps, and an infinite one never.
float finite_bound(double bound) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(bound, -kMax, kMax));
}

// The parameters of one group.
struct Group {
  float scale = 0, bias = 0;
  int zero = 0;            // code of zero (integer formats)
  double scale_error = 0;  // of a scale that was quantized in turn
};

// Buffers of one thread.
struct VerifyBuffers {
  Buffer raw, source, x, y, codes;
  std::vector<Group> groups;
};

bool is_one_run(const SourceRows& rows, int64_t cols) {
  return rows.col_stride == 1 && rows.row_stride == cols;
}

// Elements of a task. More of them where a row is a column in the input or the output: the columns are read
// one by one.
int64_t task_elements(const OutputWeight& weight, const QuantizedWeight* quantized) {
  const bool in_columns =
      quantized != nullptr && (quantized->layout == Layout::gptq || quantized->layout == Layout::awq);
  return is_transposed(weight) || in_columns ? kTransposedElements : kVerifyElements;
}

// Bytes of a weight from `offset` on, from where its description says that each element is. It shares nothing
// with how the writer reads them.
void read_source(const Checkpoint::Impl& source, const OutputWeight& weight, int64_t offset,
                 std::span<std::byte> bytes, Buffer& buffer) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  const int bits = safetensors_dtype_bits(stored_dtype(source, weight));
  const int64_t cols = weight.cols(), size = bits / 8;
  int64_t end = 0;  // of the source, in elements of the weight
  for (const SourceRows& rows : weight.sources) {
    const Weight& stored = source.weights[rows.weight];
    const StoredTensor& tensor = source.tensors[static_cast<size_t>(stored.parts.front())];
    if (bits % 8 != 0) return source.read(tensor, static_cast<uint64_t>(offset), bytes);  // it is all of it
    const int64_t begin = end;
    end += rows.num_rows * cols;
    const int64_t low = std::max(offset / size, begin), high = std::min((offset + num_bytes) / size, end);
    if (low >= high) continue;
    Decoder decoder(source);
    const auto read = [&](int64_t element, int64_t count, std::byte* out) {
      if (rows.as_stored)
        return decoder.decode_stored(*source.quantized_weight(stored), element, count, *stored.dtype, out);
      if (stored.layout) return decoder.decode(stored, element, count, *stored.dtype, out);
      source.read(tensor, static_cast<uint64_t>(element * size), {out, static_cast<size_t>(count * size)});
    };
    if (is_one_run(rows, cols)) {
      read(rows.first + low - begin, high - low, bytes.data() + (low * size - offset));
      continue;
    }
    // Lines are the rows [top, bottom), or where columns are farther apart than rows, these of each column.
    constexpr int64_t kLines = 64;  // at once: as many as the first-level cache has
    const int64_t top = (low - begin) / cols, bottom = ceil_div(high - begin, cols);
    const bool by_columns = rows.col_stride > rows.row_stride;
    const int64_t num_lines = by_columns ? cols : bottom - top, length = by_columns ? bottom - top : cols;
    const int64_t line_stride = by_columns ? rows.col_stride : rows.row_stride;
    const int64_t step = by_columns ? rows.row_stride : rows.col_stride, span = (length - 1) * step + 1;
    std::byte* const lines = buffer.reserve(std::min(kLines, num_lines) * span * size);
    for (int64_t first = 0; first < num_lines; first += kLines) {
      const int64_t last = std::min(first + kLines, num_lines);
      for (int64_t line = first; line < last; ++line)
        read(rows.first + top * rows.row_stride + line * line_stride, span,
             lines + (line - first) * span * size);
      for (int64_t place = 0; place < length; ++place)
        for (int64_t line = first; line < last; ++line) {
          const int64_t row = top + (by_columns ? place : line), column = by_columns ? line : place;
          const int64_t element = begin + row * cols + column;
          if (element < low || element >= high) continue;
          std::byte* to = bytes.data() + (element * size - offset);
          const std::byte* from = lines + ((line - first) * span + place * step) * size;
          if (size == 2) {
            std::memcpy(to, from, 2);  // without a call
          } else {
            std::memcpy(to, from, static_cast<size_t>(size));
          }
        }
    }
  }
  if (weight.plus == 0) return;
  const DType dtype = *dtype_from_safetensors(stored_dtype(source, weight));
  for (int64_t at = 0; at < num_bytes; at += size) {
    float value;
    auto* number = reinterpret_cast<std::byte*>(&value);
    convert_elements(bytes.data() + at, dtype, 1, number, DType::f32);
    value += weight.plus;
    convert_elements(number, DType::f32, 1, bytes.data() + at, dtype);
  }
}

// A quantized weight in the written file.
class Unpacker {
 public:
  Unpacker(WrittenFile& file, const QuantizedWeight& weight);
  // Decodes elements [begin, begin + count): whole rows, or (flat) from the first of a group whose codes
  // begin with a byte. Every element must be as near to x, if it is given, as its neighbouring levels allow.
  void decode(int64_t begin, int64_t count, const float* x, VerifyBuffers& buffers) const;

 private:
  void open();
  void open_bitsandbytes();
  void open_compressed_tensors();
  void open_mlx();
  void open_halfbyte();
  void set_table(std::span<const float> values) { table_.assign(values.begin(), values.end()); }
  void set_e4m3_table();
  void open_block_float(const std::string& codes, const std::string& scales, const char* scale_dtype);
  void open_global_scale(const std::string& name);
  void open_gptq();
  void open_modelopt();
  void open_fp8(const std::string& scales);
  void open_gpt_oss();
  void open_awq();
  void open_columns(bool symmetric_zeros_less_one);
  void find_cells();
  void read_codes(int64_t begin, int64_t count, VerifyBuffers& buffers) const;
  void read_columns(const StoredTensor& tensor, int64_t first, int64_t count, std::byte* out) const;
  void read_code_columns(int64_t begin, int64_t count, VerifyBuffers& buffers) const;
  void read_group_columns(int64_t begin, int64_t count, VerifyBuffers& buffers) const;
  void read_groups(int64_t begin, int64_t count, VerifyBuffers& buffers) const;
  void read_quantized_scales(int64_t first, int64_t count, VerifyBuffers& buffers) const;
  void read_zeros(int64_t first_row, int64_t first, int64_t count, VerifyBuffers& buffers) const;
  void decode_table(const Group& group, const uint8_t* codes, const float* x, int64_t count, int64_t index,
                    float* y) const;
  void decode_integer(const Group& group, const uint8_t* codes, const float* x, int64_t count, int64_t index,
                      float* y) const;
  // Searched scales may leave values far outside of the levels.
  bool clips() const { return weight_.encoding && weight_.encoding->search; }
  [[noreturn]] void fail(int64_t index, float x, float y) const {
    HALFBYTE_FAIL(verify,
                  "verify: weight \"{}\" element {} is {} but decodes to {}, which is not the nearest level",
                  printable(weight_.name), index, x, y);
  }

  WrittenFile& file_;
  const QuantizedWeight& weight_;
  const QuantSpec& spec_;
  const int bits_;
  int64_t rows_, cols_, groups_per_row_, num_groups_;
  const StoredTensor *codes_ = nullptr, *scales_ = nullptr, *zeros_ = nullptr, *biases_ = nullptr,
                     *absmax_ = nullptr;
  int64_t row_bytes_ = 0;   // stored, where not flat
  int64_t scale_rows_ = 1;  // rows of a matrix that share stored scales
  bool high_nibble_first_ = false;
  bool zeros_in_words_ = false;
  enum class Columns : uint8_t { none, gptq, awq } columns_ = Columns::none;  // tensors are transposed
  std::unique_ptr<WholeTensor> whole_codes_;                                  // where they are
  // Tables and floating codes: the values, what is nearest to each of them, the largest magnitude.
  struct Cell {
    float low, high;
  };
  std::vector<float> table_;
  std::vector<Cell> cells_;
  std::optional<Levels> levels_;  // the same of 16 values
  float largest_ = 0;
  float global_scale_ = 1;
  std::vector<float> scale_map_;  // double quantization
  float scale_offset_ = 0;
};

Unpacker::Unpacker(WrittenFile& file, const QuantizedWeight& weight)
    : file_(file), weight_(weight), spec_(weight.spec), bits_(info(weight.spec.format).bits) {
  cols_ = weight.shape.back();
  rows_ = 1;
  for (size_t i = 0; i + 1 < weight.shape.size(); ++i) rows_ *= weight.shape[i];
  const int64_t n = rows_ * cols_;
  switch (spec_.granularity) {
    case Granularity::tensor:
      groups_per_row_ = num_groups_ = 1;
      break;
    case Granularity::channel:
      groups_per_row_ = 1, num_groups_ = rows_;
      break;
    case Granularity::group:
      groups_per_row_ = ceil_div(cols_, spec_.group_size), num_groups_ = rows_ * groups_per_row_;
      break;
    case Granularity::flat:
      groups_per_row_ = num_groups_ = ceil_div(n, spec_.group_size);
      break;
  }
  try {
    open();
  } catch (const nlohmann::json::exception& error) {
    HALFBYTE_FAIL(verify, "verify: the description of weight \"{}\" is damaged: {}", printable(weight.name),
                  error.what());
  }
  find_cells();
}

void Unpacker::open() {
  switch (weight_.layout) {
    case Layout::bitsandbytes:
      open_bitsandbytes();
      break;
    case Layout::compressed_tensors:
      open_compressed_tensors();
      break;
    case Layout::mlx:
      open_mlx();
      break;
    case Layout::halfbyte:
      open_halfbyte();
      break;
    case Layout::gptq:
      open_gptq();
      break;
    case Layout::awq:
      open_awq();
      break;
    case Layout::modelopt:
      open_modelopt();
      break;
    case Layout::fp8:
      open_fp8(weight_.name + "_scale_inv");
      break;
    case Layout::gpt_oss:
      open_gpt_oss();
      break;
  }
}

// Half way to the neighbours; at the ends, to the largest magnitude that a scale stands for.
void Unpacker::find_cells() {
  std::vector<float> values;  // ascending, each once
  for (const float value : table_)
    if (!std::isnan(value)) values.push_back(value);
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  for (const float value : values) largest_ = std::max(largest_, std::abs(value));
  for (const float value : table_) {
    Cell& cell = cells_.emplace_back(Cell{largest_, -largest_});  // of NaN: nothing is nearest to it
    if (std::isnan(value)) continue;
    const auto at = std::ranges::lower_bound(values, value);
    cell.low = at == values.begin() ? -largest_ : (value + at[-1]) / 2;
    cell.high = at + 1 == values.end() ? largest_ : (value + at[1]) / 2;
  }
  if (table_.size() != 16) return;
  Levels& levels = levels_.emplace();
  for (size_t c = 0; c < 16; ++c) {
    levels.value[c] = table_[c];
    levels.low[c] = cells_[c].low, levels.high[c] = cells_[c].high;
    levels.low_end[c] = cells_[c].low == -largest_ ? 1 : 0;
    levels.high_end[c] = cells_[c].high == largest_ ? 1 : 0;
  }
}

void Unpacker::open_bitsandbytes() {
  const std::string& name = weight_.name;
  high_nibble_first_ = true;
  if (weight_.experts4bit) {  // "X.gate_up_proj" and "X.gate_up_absmax"
    const int64_t experts = weight_.shape[0];
    codes_ = &file_.take(name, "U8", {experts, rows_ * cols_ / 2 / experts});
    scales_ =
        &file_.take(name.substr(0, name.rfind('_')) + "_absmax", "F32", {experts, num_groups_ / experts});
    return set_table(table_values(spec_.format));
  }
  codes_ = &file_.take(name, "U8", {ceil_div(rows_ * cols_, 2), 1});
  scales_ = &file_.take(name + ".absmax", spec_.double_quant ? "U8" : "F32", {num_groups_});
  set_table(table_values(spec_.format));
  file_.take_constant(name + ".quant_map", "F32", {16}, std::as_bytes(std::span(table_)));
  const std::string type = info(spec_.format).name;
  const nlohmann::json state = file_.take_json(name + ".quant_state.bitsandbytes__" + type);
  const bool fits = state.value("quant_type", "") == type &&
                    state.value("blocksize", int64_t{0}) == spec_.group_size &&
                    state.value("dtype", "") == torch_name(weight_.dtype) &&
                    state.value("shape", std::vector<int64_t>()) == weight_.shape;
  HALFBYTE_CHECK(fits, verify, "verify: the quant_state of \"{}\" is wrong: {}", printable(name),
                 state.dump());
  if (!spec_.double_quant) return;
  absmax_ = &file_.take(name + ".nested_absmax", "F32", {ceil_div(num_groups_, 256)});
  scale_map_ = weight_.scales_map;
  if (scale_map_.empty()) scale_map_.assign(double_quant_map(), double_quant_map() + 256);
  file_.take_constant(name + ".nested_quant_map", "F32", {256}, std::as_bytes(std::span(scale_map_)));
  HALFBYTE_CHECK(state.value("nested_blocksize", 0) == 256 && state.value("nested_dtype", "") == "float32",
                 verify, "verify: the quant_state of \"{}\" is wrong: {}", printable(name), state.dump());
  scale_offset_ = static_cast<float>(state.value("nested_offset", std::numeric_limits<double>::quiet_NaN()));
}

void Unpacker::open_compressed_tensors() {
  const std::string& name = weight_.name;
  std::vector<int64_t> shape = weight_.shape;
  if (spec_.format == Format::fp8) return open_fp8(name + "_scale");
  if (spec_.format == Format::nvfp4 || spec_.format == Format::mxfp4) {
    const bool nvfp4 = spec_.format == Format::nvfp4;
    if (nvfp4) open_global_scale(name + "_global_scale");
    open_block_float(name + "_packed", name + "_scale", nvfp4 ? "F8_E4M3" : "U8");
    return;
  }
  const auto rank = static_cast<int64_t>(shape.size());
  file_.take_constant(name + "_shape", "I64", {rank}, std::as_bytes(std::span(weight_.shape)));
  shape.back() = ceil_div(cols_ * bits_, 32);
  row_bytes_ = 4 * shape.back();
  codes_ = &file_.take(name + "_packed", "I32", shape);
  shape.back() = groups_per_row_;
  scales_ = &file_.take(name + "_scale", dtype_to_safetensors(weight_.dtype), shape);
  if (!spec_.asymmetric) return;
  zeros_in_words_ = true;
  shape[shape.size() - 2] = ceil_div(shape[shape.size() - 2] * bits_, 32);
  zeros_ = &file_.take(name + "_zero_point", "I32", shape);
}

// Two codes in a byte, the first in its low half.
void Unpacker::open_block_float(const std::string& codes, const std::string& scales,
                                const char* scale_dtype) {
  std::vector<int64_t> shape = weight_.shape;
  shape.back() = row_bytes_ = cols_ / 2;
  codes_ = &file_.take(codes, "U8", shape);
  shape.back() = groups_per_row_;
  scales_ = &file_.take(scales, scale_dtype, shape);
  set_table(table_values(spec_.format));
}

// A byte a code. A scale of a group may be that of 128 rows of a matrix.
void Unpacker::open_fp8(const std::string& scales) {
  row_bytes_ = cols_;
  codes_ = &file_.take(weight_.name, "F8_E4M3", weight_.shape);
  std::vector<int64_t> shape = weight_.shape;
  if (spec_.granularity == Granularity::group) scale_rows_ = 128;
  shape[shape.size() - 2] = ceil_div(shape[shape.size() - 2], scale_rows_);
  shape.back() = groups_per_row_;
  if (spec_.granularity == Granularity::tensor) shape = {1};
  if (weight_.layout == Layout::modelopt) shape = {};
  scales_ = &file_.take(scales, dtype_to_safetensors(spec_.scale_dtype), shape);
  set_e4m3_table();
}

void Unpacker::set_e4m3_table() {
  for (int code = 0; code < 256; ++code) table_.push_back(e4m3_value(static_cast<std::byte>(code)));
}

void Unpacker::open_gpt_oss() {
  std::vector<int64_t> shape = weight_.shape;
  row_bytes_ = cols_ / 2;
  shape.back() = groups_per_row_;
  scales_ = &file_.take(weight_.name + "_scales", "U8", shape);
  shape.push_back(16);
  codes_ = &file_.take(weight_.name + "_blocks", "U8", shape);
  set_table(table_values(spec_.format));
}

void Unpacker::open_global_scale(const std::string& name) {
  const std::vector<std::byte> bytes = file_.read_all(file_.take(name, "F32", {1}));
  std::memcpy(&global_scale_, bytes.data(), sizeof global_scale_);
  HALFBYTE_CHECK(global_scale_ == weight_.global_scale, verify, "verify: \"{}\" is {}, not {}",
                 printable(name), global_scale_, weight_.global_scale);
}

void Unpacker::open_modelopt() {
  const std::string& name = weight_.name;
  if (spec_.format == Format::fp8) return open_fp8(name + "_scale");
  const float reciprocal = weight_.global_reciprocal;
  file_.take_constant(name + "_scale_2", "F32", {}, std::as_bytes(std::span(&reciprocal, 1)));
  global_scale_ = 1 / reciprocal;
  open_block_float(name, name + "_scale", "F8_E4M3");
}

void Unpacker::open_mlx() {
  std::string module = weight_.name;
  if (module.ends_with(".weight")) module.resize(module.size() - std::strlen(".weight"));
  std::vector<int64_t> shape = weight_.shape;
  row_bytes_ = cols_ * bits_ / 8;
  shape.back() = cols_ * bits_ / 32;
  codes_ = &file_.take(module + ".weight", "U32", shape);
  shape.back() = groups_per_row_;
  scales_ = &file_.take(module + ".scales", dtype_to_safetensors(weight_.dtype), shape);
  biases_ = &file_.take(module + ".biases", dtype_to_safetensors(weight_.dtype), shape);
}

void Unpacker::open_halfbyte() {
  const std::string& name = weight_.name;
  const bool flat = spec_.granularity == Granularity::flat, tensor = spec_.granularity == Granularity::tensor;
  std::vector<int64_t> shape = weight_.shape;
  row_bytes_ = ceil_div(cols_ * bits_, 8);
  shape.back() = row_bytes_;
  if (flat) shape = {ceil_div(rows_ * cols_ * bits_, 8)};
  codes_ = &file_.take(name, "U8", shape);
  shape = weight_.shape;
  shape.back() = groups_per_row_;
  if (flat || tensor) shape = {num_groups_};
  const char* dtype = dtype_to_safetensors(spec_.scale_dtype);
  scales_ = &file_.take(name + ".scales", spec_.double_quant ? "U8" : dtype, shape);
  if (spec_.asymmetric) zeros_ = &file_.take(name + ".zeros", "U8", shape);
  if (info(spec_.format).kind == FormatKind::affine) biases_ = &file_.take(name + ".biases", dtype, shape);
  if (spec_.format == Format::lut4) {
    file_.take_constant(name + ".table", "F32", {16}, std::as_bytes(std::span(spec_.table)));
    set_table(spec_.table);
  } else if (info(spec_.format).kind == FormatKind::table) {
    set_table(table_values(spec_.format));
  } else if (info(spec_.format).kind == FormatKind::floating) {
    set_e4m3_table();
  }
  if (spec_.format == Format::nvfp4) open_global_scale(name + ".global_scale");
  const nlohmann::json json = file_.take_json(name + ".quant_spec");
  const bool sized = flat || spec_.granularity == Granularity::group;
  const bool fits = json.value("version", 0) == 1 && json.value("format", "") == info(spec_.format).name &&
                    json.value("asymmetric", !spec_.asymmetric) == spec_.asymmetric &&
                    json.value("granularity", "") == to_string(spec_.granularity) &&
                    (!sized || json.value("group_size", int64_t{0}) == spec_.group_size) &&
                    json.value("scale_dtype", "") == to_string(spec_.scale_dtype) &&
                    json.value("double_quant", !spec_.double_quant) == spec_.double_quant &&
                    json.value("shape", std::vector<int64_t>()) == weight_.shape &&
                    json.value("dtype", "") == to_string(weight_.dtype);
  HALFBYTE_CHECK(fits, verify, "verify: the quant_spec of \"{}\" is wrong: {}", printable(name), json.dump());
  if (!spec_.double_quant) return;
  absmax_ = &file_.take(name + ".scales_absmax", "F32", {ceil_div(num_groups_, 256)});
  scale_map_.assign(double_quant_map(), double_quant_map() + 256);
  scale_offset_ = static_cast<float>(json.value("scales_offset", std::numeric_limits<double>::quiet_NaN()));
}

// Tensors of [.., out]; a word has codes of neighbours along the inputs, zero points of neighbours along the
// outputs.
void Unpacker::open_gptq() {
  columns_ = Columns::gptq;
  const std::string module = weight_.name.substr(0, weight_.name.rfind(".weight"));
  codes_ = &file_.take(module + ".qweight", "I32", {cols_ * bits_ / 32, rows_});
  std::vector<int32_t> groups(static_cast<size_t>(cols_));
  for (size_t i = 0; i < groups.size(); ++i)
    groups[i] = static_cast<int32_t>(static_cast<int64_t>(i) / ceil_div(cols_, groups_per_row_));
  file_.take_constant(module + ".g_idx", "I32", {cols_}, std::as_bytes(std::span(groups)));
  open_columns(true);
}

// Here words have codes of neighbours along the outputs too.
void Unpacker::open_awq() {
  columns_ = Columns::awq;
  const std::string module = weight_.name.substr(0, weight_.name.rfind(".weight"));
  codes_ = &file_.take(module + ".qweight", "I32", {cols_, rows_ / 8});
  open_columns(false);
}

void Unpacker::open_columns(bool symmetric_zeros_less_one) {
  const std::string module = weight_.name.substr(0, weight_.name.rfind(".weight"));
  whole_codes_ = std::make_unique<WholeTensor>(codes_->num_bytes);
  scales_ = &file_.take(module + ".scales", "F16", {groups_per_row_, rows_});
  const std::vector<int64_t> shape = {groups_per_row_, rows_ * bits_ / 32};
  if (spec_.asymmetric) {
    zeros_ = &file_.take(module + ".qzeros", "I32", shape);
    return;
  }
  const uint32_t zero = (1u << (bits_ - 1)) - (symmetric_zeros_less_one ? 1 : 0);
  std::vector<uint8_t> bytes(static_cast<size_t>(groups_per_row_ * rows_ * bits_ / 8));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit)
    if ((zero >> bit % static_cast<size_t>(bits_) & 1) != 0)
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | 1 << bit % 8);
  file_.take_constant(module + ".qzeros", "I32", shape, std::as_bytes(std::span(bytes)));
}

// Bytes [first, first + count) of each row of a tensor.
void Unpacker::read_columns(const StoredTensor& tensor, int64_t first, int64_t count, std::byte* out) const {
  const int64_t num_rows = tensor.shape[0], row_bytes = static_cast<int64_t>(tensor.num_bytes) / num_rows;
  if (count == row_bytes) return file_.read(tensor, 0, num_rows * row_bytes, out);
  for (int64_t row = 0; row < num_rows; ++row)
    file_.read(tensor, row * row_bytes + first, count, out + row * count);
}

uint32_t word_at(const std::byte* words, int64_t index) {
  uint32_t word;
  std::memcpy(&word, words + index * 4, 4);
  return word;
}
// Of awq: where in a word is the code of each of eight outputs.
constexpr int kAwqNibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Eight nibbles, the lowest first, to a byte each.
uint64_t nibbles_to_bytes(uint32_t word) {
  uint64_t bytes = word;
  bytes = (bytes | bytes << 16) & 0x0000FFFF0000FFFF;
  bytes = (bytes | bytes << 8) & 0x00FF00FF00FF00FF;
  return (bytes | bytes << 4) & 0x0F0F0F0F0F0F0F0F;
}
// Byte i of number j <-> byte j of number i.
void transpose_bytes(std::array<uint64_t, 8>& of) {
  const auto exchange = [&](size_t distance, int shift, uint64_t mask) {
    for (size_t i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      const uint64_t other = (of[i] >> shift ^ of[i + distance]) & mask;
      of[i + distance] ^= other;
      of[i] ^= other << shift;
    }
  };
  exchange(4, 32, 0x00000000FFFFFFFF);
  exchange(2, 16, 0x0000FFFF0000FFFF);
  exchange(1, 8, 0x00FF00FF00FF00FF);
}

void Unpacker::read_code_columns(int64_t begin, int64_t count, VerifyBuffers& buffers) const {
  constexpr int64_t kTogether = 64;  // columns, so that a line of the cache gets all of its codes
  const int64_t rows = count / cols_, first_row = begin / cols_;
  auto* codes = reinterpret_cast<uint8_t*>(buffers.codes.reserve(count));
  const bool awq = columns_ == Columns::awq;
  const std::byte* const raw = whole_codes_->get([&](uint64_t offset, std::span<std::byte> bytes) {
    file_.read(*codes_, static_cast<int64_t>(offset), std::ssize(bytes), bytes.data());
  }) + (awq ? first_row / 8 : first_row) * 4;
  const int64_t words = static_cast<int64_t>(codes_->num_bytes) / codes_->shape[0] / 4;  // to the next row
  const uint32_t mask = (1u << bits_) - 1;
  const auto store = [&](int64_t r, int64_t k, uint64_t eight) {
    std::memcpy(codes + r * cols_ + k, &eight, 8);
  };
  for (int64_t k0 = 0; k0 < cols_; k0 += kTogether) {
    const int64_t end = std::min(k0 + kTogether, cols_), whole = bits_ == 4 ? k0 + (end - k0) / 8 * 8 : k0;
    for (int64_t r = 0; r < rows && whole > k0; r += awq ? 8 : 1)
      for (int64_t k = k0; k < whole; k += 8) {
        if (!awq) {
          store(r, k, nibbles_to_bytes(word_at(raw, k / 8 * words + r)));
          continue;
        }
        std::array<uint64_t, 8> eight;  // of a column, then of a row
        for (int64_t i = 0; i < 8; ++i)
          eight[static_cast<size_t>(i)] = nibbles_to_bytes(word_at(raw, (k + i) * words + r / 8));
        transpose_bytes(eight);
        for (int64_t i = 0; i < 8; ++i) store(r + i, k, eight[static_cast<size_t>(kAwqNibbles[i])]);
      }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = whole; k < end; ++k) {
        uint64_t word;
        int shift;
        if (awq) {
          word = word_at(raw, k * words + r / 8);
          shift = 4 * kAwqNibbles[r % 8];
        } else {
          const int64_t bit = k * bits_;
          shift = static_cast<int>(bit % 32);
          word = word_at(raw, bit / 32 * words + r);
          if (shift + bits_ > 32) word |= uint64_t{word_at(raw, (bit / 32 + 1) * words + r)} << 32;
        }
        codes[r * cols_ + k] = static_cast<uint8_t>(word >> shift & mask);
      }
  }
}

void Unpacker::read_group_columns(int64_t begin, int64_t count, VerifyBuffers& buffers) const {
  const int64_t rows = count / cols_, first_row = begin / cols_, size = size_of(spec_.scale_dtype);
  buffers.groups.assign(static_cast<size_t>(rows * groups_per_row_), {});
  const auto group_of = [&](int64_t row, int64_t group) -> Group& {
    return buffers.groups[static_cast<size_t>(row * groups_per_row_ + group)];
  };
  std::byte* raw = buffers.raw.reserve(groups_per_row_ * rows * size);
  read_columns(*scales_, first_row * size, rows * size, raw);
  for (int64_t g = 0; g < groups_per_row_; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      Group& group = group_of(r, g);
      convert_elements(raw + (g * rows + r) * size, spec_.scale_dtype, 1,
                       reinterpret_cast<std::byte*>(&group.scale), DType::f32);
      group.zero = 1 << (bits_ - 1);
    }
  if (zeros_ == nullptr) return;
  const int64_t words = rows * bits_ / 32;
  raw = buffers.raw.reserve(groups_per_row_ * words * 4);
  read_columns(*zeros_, first_row * bits_ / 8, words * 4, raw);
  for (int64_t g = 0; g < groups_per_row_; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t bit = columns_ == Columns::awq ? r / 8 * 32 + 4 * kAwqNibbles[r % 8] : r * bits_;
      uint64_t word = word_at(raw, g * words + bit / 32);
      if (bit % 32 + bits_ > 32) word |= uint64_t{word_at(raw, g * words + bit / 32 + 1)} << 32;
      group_of(r, g).zero = static_cast<int>(word >> bit % 32 & ((1u << bits_) - 1));
    }
}

// The first `count` codes of a little-endian bit stream (or with the first code of a byte in its high
// nibble).
void unpack_codes(const std::byte* bytes, int64_t count, int bits, bool high_nibble_first, uint8_t* codes) {
  const auto* in = reinterpret_cast<const uint8_t*>(bytes);
  if (bits == 8) {
    std::memcpy(codes, in, static_cast<size_t>(count));
  } else if (bits == 4) {
    const int first = high_nibble_first ? 4 : 0, second = 4 - first;
    for (int64_t i = 0; i < count / 2; ++i) {
      codes[2 * i] = in[i] >> first & 15;
      codes[2 * i + 1] = in[i] >> second & 15;
    }
    if (count % 2 == 1) codes[count - 1] = in[count / 2] >> first & 15;
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t bit = i * bits;
      const int shift = static_cast<int>(bit % 8);
      int word = in[bit / 8];
      if (shift + bits > 8) word |= in[bit / 8 + 1] << 8;
      codes[i] = static_cast<uint8_t>(word >> shift & ((1 << bits) - 1));
    }
  }
}

void Unpacker::read_codes(int64_t begin, int64_t count, VerifyBuffers& buffers) const {
  if (columns_ != Columns::none) return read_code_columns(begin, count, buffers);
  auto* codes = reinterpret_cast<uint8_t*>(buffers.codes.reserve(count));
  if (spec_.granularity == Granularity::flat) {
    const int64_t num_bytes = ceil_div(count * bits_, 8);
    std::byte* raw = buffers.raw.reserve(num_bytes);
    file_.read(*codes_, begin * bits_ / 8, num_bytes, raw);
    unpack_codes(raw, count, bits_, high_nibble_first_, codes);
  } else {
    const int64_t rows = count / cols_;
    std::byte* raw = buffers.raw.reserve(rows * row_bytes_);
    file_.read(*codes_, begin / cols_ * row_bytes_, rows * row_bytes_, raw);
    for (int64_t row = 0; row < rows; ++row)
      unpack_codes(raw + row * row_bytes_, cols_, bits_, high_nibble_first_, codes + row * cols_);
  }
}

void Unpacker::read_groups(int64_t begin, int64_t count, VerifyBuffers& buffers) const {
  if (columns_ != Columns::none) return read_group_columns(begin, count, buffers);
  int64_t first = 0, num = 1;
  if (spec_.granularity == Granularity::flat) {
    first = begin / spec_.group_size;
    num = ceil_div(begin + count, spec_.group_size) - first;
  } else if (spec_.granularity != Granularity::tensor) {
    first = begin / cols_ * groups_per_row_;
    num = count / cols_ * groups_per_row_;
  }
  buffers.groups.assign(static_cast<size_t>(num), {});
  const int64_t size = size_of(spec_.scale_dtype);
  const auto read_values = [&](const StoredTensor& tensor, float Group::*field) {
    std::byte* raw = buffers.raw.reserve(num * size);
    if (scale_rows_ == 1) {
      file_.read(tensor, first * size, num * size, raw);
    } else {
      const int64_t matrix_rows = weight_.shape[weight_.shape.size() - 2], row_size = groups_per_row_ * size;
      for (int64_t row = begin / cols_, last = row + count / cols_; row < last; ++row, raw += row_size) {
        const int64_t stored =
            row / matrix_rows * ceil_div(matrix_rows, scale_rows_) + row % matrix_rows / scale_rows_;
        file_.read(tensor, stored * row_size, row_size, raw);
      }
      raw = buffers.raw.data();
    }
    const std::array<float, 256>& e4m3 = e4m3_values();
    float value = 0;
    for (int64_t i = 0; i < num; ++i) {
      if (spec_.scale_dtype == DType::f8_e4m3)
        value = e4m3[std::to_integer<size_t>(raw[i])] / global_scale_;
      else if (spec_.scale_dtype == DType::f8_e8m0)
        value = e8m0_value(raw[i]);
      else
        convert_elements(raw + i * size, spec_.scale_dtype, 1, reinterpret_cast<std::byte*>(&value),
                         DType::f32);
      buffers.groups[static_cast<size_t>(i)].*field = value;
    }
  };
  if (spec_.double_quant) {
    read_quantized_scales(first, num, buffers);
  } else {
    read_values(*scales_, &Group::scale);
  }
  if (biases_) read_values(*biases_, &Group::bias);
  for (Group& group : buffers.groups) group.zero = 1 << (bits_ - 1);
  if (zeros_) read_zeros(begin / cols_, first, num, buffers);
}

void Unpacker::read_quantized_scales(int64_t first, int64_t count, VerifyBuffers& buffers) const {
  const int64_t first_absmax = first / 256, num_absmax = ceil_div(first + count, 256) - first_absmax;
  std::vector<float> absmax(static_cast<size_t>(num_absmax));
  file_.read(*absmax_, first_absmax * 4, num_absmax * 4, reinterpret_cast<std::byte*>(absmax.data()));
  std::byte* raw = buffers.raw.reserve(count);
  file_.read(*scales_, first, count, raw);
  for (int64_t i = 0; i < count; ++i) {
    Group& group = buffers.groups[static_cast<size_t>(i)];
    const auto code = static_cast<size_t>(raw[i]);
    const float value = scale_map_[code],
                unit = absmax[static_cast<size_t>((first + i) / 256 - first_absmax)];
    const float below = code == 0 ? -1 : scale_map_[code - 1], above = code == 255 ? 1 : scale_map_[code + 1];
    group.scale = value * unit + scale_offset_;
    group.scale_error = static_cast<double>(std::max(value - below, above - value)) / 2 * unit +
                        (std::abs(group.scale) + std::abs(scale_offset_) + unit) * kF32Slack;
  }
}

void Unpacker::read_zeros(int64_t first_row, int64_t first, int64_t count, VerifyBuffers& buffers) const {
  if (!zeros_in_words_) {
    std::byte* raw = buffers.raw.reserve(count);
    file_.read(*zeros_, first, count, raw);
    for (int64_t i = 0; i < count; ++i)
      buffers.groups[static_cast<size_t>(i)].zero = static_cast<int>(raw[i]);
    return;
  }
  // Zero point of row r: bits (r % per_word) * bits of word r / per_word of its column. The rows are of one
  // matrix.
  const int64_t matrix_rows = weight_.shape[weight_.shape.size() - 2], per_word = 32 / bits_;
  const int64_t row = first_row % matrix_rows, last_row = row + count / groups_per_row_ - 1;
  const int64_t first_word = row / per_word, num_words = last_row / per_word + 1 - first_word;
  std::byte* raw = buffers.raw.reserve(num_words * groups_per_row_ * 4);
  file_.read(*zeros_,
             (first_row / matrix_rows * ceil_div(matrix_rows, per_word) + first_word) * groups_per_row_ * 4,
             num_words * groups_per_row_ * 4, raw);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = row + i / groups_per_row_, column = i % groups_per_row_;
    uint32_t word;
    std::memcpy(&word, raw + ((r / per_word - first_word) * groups_per_row_ + column) * 4, 4);
    buffers.groups[static_cast<size_t>(i)].zero =
        static_cast<int>(word >> (r % per_word * bits_) & ((1u << bits_) - 1));
  }
}

void Unpacker::decode(int64_t begin, int64_t count, const float* x, VerifyBuffers& buffers) const {
  read_codes(begin, count, buffers);
  read_groups(begin, count, buffers);
  const auto* codes = reinterpret_cast<const uint8_t*>(buffers.codes.data());
  auto* y = reinterpret_cast<float*>(buffers.y.reserve(count * 4));
  const bool table = !table_.empty();
  const bool flat = spec_.granularity == Granularity::flat, one = spec_.granularity == Granularity::tensor;
  const int64_t row_length = flat ? count : cols_;
  const bool sized = flat || spec_.granularity == Granularity::group;
  const int64_t group_length = sized ? spec_.group_size : cols_;
  const Group* group = buffers.groups.data();
  for (int64_t row = 0; row < count; row += row_length)
    for (int64_t column = 0; column < row_length; column += group_length) {
      const int64_t at = row + column, n = std::min(group_length, row_length - column);
      const float* const own = x == nullptr ? nullptr : x + at;
      if (table) {
        decode_table(*group, codes + at, own, n, begin + at, y + at);
      } else {
        decode_integer(*group, codes + at, own, n, begin + at, y + at);
      }
      if (!one) ++group;
    }
}

void Unpacker::decode_table(const Group& group, const uint8_t* codes, const float* x, int64_t count,
                            int64_t index, float* y) const {
  if (x == nullptr) {
    for (int64_t i = 0; i < count; ++i) y[i] = table_[codes[i]] * group.scale;
    return;
  }
  const double scale = group.scale;
  const double slack = largest_ * (scale * kF32Slack + 2 * group.scale_error) + kTiny;
  const double global = global_scale_;
  const double end_slack = clips() ? std::numeric_limits<double>::infinity()
                                   : slack + largest_ * rounding(spec_.scale_dtype, scale * global) / global;
  if (levels_) {
    // In f32, which rounds by less than half of the slack: what passes would pass below.
    const float narrow = finite_bound(slack / 2), at_ends = finite_bound(end_slack - slack);
    if (decode_levels(*levels_, {group.scale, narrow, at_ends / 2}, codes, x, count, y)) return;
  }
  float level[256], lower[256], upper[256];
  for (size_t c = 0; c < table_.size(); ++c) {
    const Cell& cell = cells_[c];
    level[c] = table_[c] * group.scale;
    lower[c] = finite_bound(cell.low * scale - (cell.low == -largest_ ? end_slack : slack));
    upper[c] = finite_bound(cell.high * scale + (cell.high == largest_ ? end_slack : slack));
  }
  bool good = true;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t c = codes[i];
    y[i] = level[c];
    good &= (x[i] >= lower[c]) & (x[i] <= upper[c]);
  }
  if (good) return;
  for (int64_t i = 0; i < count; ++i)
    if (!(x[i] >= lower[codes[i]] && x[i] <= upper[codes[i]])) fail(index + i, x[i], y[i]);
}

void Unpacker::decode_integer(const Group& group, const uint8_t* codes, const float* x, int64_t count,
                              int64_t index, float* y) const {
  const bool affine = biases_ != nullptr;
  const float scale = group.scale, bias = group.bias;
  const int zero = affine ? 0 : group.zero;
  if (x == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      y[i] = static_cast<float>(codes[i] - zero) * scale;
      if (affine) y[i] += bias;
    }
    return;
  }
  const double step = std::abs(scale), levels = (1 << bits_) - 1;
  const double stored_error =
      levels * rounding(spec_.scale_dtype, scale) + (affine ? rounding(spec_.scale_dtype, bias) : 0);
  const double slack =
      (levels * step + std::abs(bias)) * kF32Slack + (levels + 1) * group.scale_error + kTiny;
  const double unrounded =
      weight_.encoding && weight_.encoding->code_scale == CodeScale::unrounded ? stored_error : 0;
  // Of a value within the levels to its own; of a value outside to the last one: no rule clips more than one
  // step.
  const float near = finite_bound(step / 2 + slack + unrounded),
              far = finite_bound(clips() ? std::numeric_limits<double>::infinity()
                                         : step + slack + stored_error);
  if (decode_steps({scale, bias, zero, affine, near}, codes, x, count, y)) return;
  const float end_a = static_cast<float>(-zero) * scale + bias;
  const float end_b = static_cast<float>((1 << bits_) - 1 - zero) * scale + bias;
  for (int64_t i = 0; i < count; ++i) {
    const float inside = std::clamp(x[i], std::min(end_a, end_b), std::max(end_a, end_b));
    if (!(std::abs(inside - y[i]) <= near && std::abs(x[i] - inside) <= far)) fail(index + i, x[i], y[i]);
  }
}

}  // namespace

void ErrorSums::add(const float* source, const float* decoded, int64_t count, int64_t first_index) {
  const ErrorTotals totals = total_errors(source, decoded, count);
  squared_error += totals.squared_error;
  squared_source += totals.squared_source;
  if (totals.largest <= max_error) return;
  max_error = totals.largest;
  for (int64_t i = 0; i < count; ++i)
    if (std::abs(static_cast<double>(decoded[i]) - static_cast<double>(source[i])) == totals.largest) {
      max_error_index = first_index + i;
      return;
    }
}

void ErrorSums::merge(const ErrorSums& later) {
  if (later.max_error > max_error) max_error = later.max_error, max_error_index = later.max_error_index;
  squared_error += later.squared_error;
  squared_source += later.squared_source;
}

double ErrorSums::relative_rmse() const {
  return squared_error == 0 ? 0 : std::sqrt(squared_error / squared_source);
}
double ErrorSums::snr_db() const { return -20 * std::log10(relative_rmse()); }

int64_t verify_buffer_bytes(const OutputWeight& source, const QuantizedWeight& weight) {
  const Block block = block_at(weight, 0, task_elements(source, &weight));
  const int64_t size = size_of(weight.dtype),
                per_element = size + 2 * static_cast<int64_t>(sizeof(float)) + 2;
  const bool strided = std::ranges::any_of(
      source.sources, [&](const SourceRows& rows) { return !is_one_run(rows, source.cols()); });
  // Whole rows with what is between their elements, which is as much again.
  const int64_t gathered = strided ? 2 * (block.count + 2 * source.cols()) * size : 0;
  return gathered + block.count * per_element +
         block.shape.num_groups * static_cast<int64_t>(sizeof(Group) + sizeof(float));
}

namespace {

// Elements of what was given must be those that were decoded, to the bit.
void compare_given(const VerifyItem& item, const Block& block, VerifyBuffers& buffers) {
  auto* const x = reinterpret_cast<float*>(buffers.x.reserve(block.count * 4));
  dequantize(view_of(*item.given, *item.quantized, block), {x, DType::f32, {block.rows, block.cols}, {}, {}},
             {1});
  const auto* const y = reinterpret_cast<const float*>(buffers.y.data());
  if (std::memcmp(x, y, static_cast<size_t>(block.count) * 4) == 0) return;
  for (int64_t i = 0; i < block.count; ++i)
    HALFBYTE_CHECK(std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i]), verify,
                   "verify: weight \"{}\" element {} is {} but decodes to {}",
                   printable(item.quantized->name), block.begin + i, x[i], y[i]);
}

}  // namespace

void verify_files(const Checkpoint::Impl& source, std::span<const VerifyFile> files, int num_threads,
                  ProgressPhase& progress) {
  std::vector<std::unique_ptr<WrittenFile>> opened;
  std::vector<VerifyItem> items;  // of all files
  std::vector<std::unique_ptr<Unpacker>> unpackers;
  struct Copy {
    const WrittenFile* file = nullptr;
    const StoredTensor* tensor = nullptr;
  };
  std::vector<Copy> copies;
  struct Task {
    size_t item;
    int64_t begin, count;  // elements, or bytes of a copy
  };
  std::vector<Task> tasks;
  for (const VerifyFile& of : files) {
    opened.push_back(std::make_unique<WrittenFile>(of.path, of.path.substr(of.path.rfind('/') + 1)));
    WrittenFile& file = *opened.back();
    for (const VerifyItem& item : of.items) {
      const size_t i = items.size();
      items.push_back(item);
      unpackers.emplace_back();
      copies.emplace_back();
      const OutputWeight& weight = *item.source;
      const int64_t most = task_elements(weight, item.quantized);
      if (const QuantizedWeight* quantized = item.quantized) {
        unpackers[i] = std::make_unique<Unpacker>(file, *quantized);
        for (int64_t begin = 0, n = num_elements(weight.shape); begin < n; begin += tasks.back().count)
          tasks.push_back({i, begin, block_at(*quantized, begin, most).count});
      } else {
        copies[i] = {&file, &file.take(weight.name, stored_dtype(source, weight), weight.shape)};
        const auto num_bytes = static_cast<int64_t>(copies[i].tensor->num_bytes);
        for (int64_t begin = 0; begin < num_bytes; begin += tasks.back().count)
          tasks.push_back({i, begin, std::min(4 * most, num_bytes - begin)});
      }
    }
    file.check_all_taken();
  }

  std::vector<std::atomic<int64_t>> left(items.size());  // tasks
  for (const Task& task : tasks) ++left[task.item];
  std::vector<ErrorSums> sums(tasks.size());
  std::vector<VerifyBuffers> buffers(static_cast<size_t>(effective_threads(num_threads)));
  parallel_for(static_cast<int64_t>(tasks.size()), 1, num_threads,
               [&](int64_t first, int64_t last, int worker) {
                 VerifyBuffers& own = buffers[static_cast<size_t>(worker)];
                 for (auto t = static_cast<size_t>(first); t < static_cast<size_t>(last); ++t) {
                   const auto [item, begin, count] = tasks[t];
                   const OutputWeight& weight = *items[item].source;
                   const QuantizedWeight* quantized = items[item].quantized;
                   const int64_t size = quantized ? size_of(quantized->dtype) : 1;
                   const auto num_bytes = static_cast<size_t>(count * size);
                   if (items[item].given != nullptr) {
                     unpackers[item]->decode(begin, count, nullptr, own);
                     compare_given(items[item], block_at(*quantized, begin, count), own);
                     if (--left[item] == 0) unpackers[item].reset();
                     progress.add(num_bytes);
                     continue;
                   }
                   std::byte* raw = own.source.reserve(count * size);
                   if (const Tensor* dense = items[item].dense)
                     std::memcpy(raw, dense->data() + begin, num_bytes);
                   else
                     read_source(source, weight, begin * size, {raw, num_bytes}, own.raw);
                   if (quantized) {
                     std::byte* x = own.x.reserve(count * 4);
                     convert_elements(raw, quantized->dtype, count, x, DType::f32);
                     unpackers[item]->decode(begin, count, reinterpret_cast<const float*>(x), own);
                     sums[t].add(reinterpret_cast<const float*>(x),
                                 reinterpret_cast<const float*>(own.y.data()), count, begin);
                   } else {
                     std::byte* copy = own.x.reserve(count);
                     copies[item].file->read(*copies[item].tensor, begin, count, copy);
                     HALFBYTE_CHECK(std::memcmp(raw, copy, num_bytes) == 0, verify,
                                    "verify: tensor \"{}\" differs from the input within bytes [{}, {})",
                                    printable(weight.name), begin, begin + count);
                   }
                   if (--left[item] == 0) unpackers[item].reset();  // with a whole tensor, perhaps
                   progress.add(num_bytes);
                 }
               });
  std::vector<ErrorSums> totals(items.size());
  for (size_t t = 0; t < tasks.size(); ++t) totals[tasks[t].item].merge(sums[t]);
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].quantized || items[i].given != nullptr) continue;
    WeightReport& report = *items[i].report;
    report.measured = true;
    report.max_error = totals[i].max_error;
    report.max_error_index = totals[i].max_error_index;
    report.relative_rmse = totals[i].relative_rmse();
    report.snr_db = totals[i].snr_db();
  }
}

}  // namespace halfbyte::io
