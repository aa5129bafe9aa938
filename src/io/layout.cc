#include "io/layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/format.h"
#include "io/columnwise.h"

namespace halfbyte::io {
namespace {

constexpr int64_t kWordBytes = 4;                                        // of packed zero points
constexpr DType kScaleDTypes[] = {DType::f32, DType::f16, DType::bf16};  // that files have
constexpr DType kF32[] = {DType::f32}, kF16[] = {DType::f16};

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

int bits_of(const QuantizedWeight& weight) { return info(weight.spec.format).bits; }

bool packs_zeros(const QuantizedWeight& weight) {
  return layout_info(weight.layout).packs_zeros && has_zeros(weight.spec);
}

// Rows of which the zero points fill whole words.
int64_t zeros_unit(const QuantizedWeight& weight) {
  return std::max(
      8, 8 * static_cast<int>(kWordBytes) / std::gcd(8 * static_cast<int>(kWordBytes), bits_of(weight)));
}
// Words for the zero points of so many rows, in one group.
int64_t zero_words(int64_t rows, int bits) { return (rows * bits + 8 * kWordBytes - 1) / (8 * kWordBytes); }

int64_t stored_scale_size(const QuantizedWeight& weight) {
  return size_of(weight.exponents.empty() ? weight.spec.scale_dtype : DType::f8_e8m0);
}
// Of the scales of a row, in the native layout.
int64_t scale_row_bytes(const QuantizedWeight& weight, const Block& block) {
  return block.shape.groups_per_row * size_of(weight.spec.scale_dtype);
}

int64_t stored_row_bytes(const QuantizedWeight& weight, const QuantShape& shape) {
  if (weight.spec.format == Format::fp8) return shape.row_bytes;  // no layout has words of them
  return round_up(shape.row_bytes, layout_info(weight.layout).row_align_bytes);
}

// Rows that are stored as one matrix: those of an expert.
int64_t rows_per_matrix(const QuantizedWeight& weight) {
  return weight.shape.size() < 2 ? 1 : weight.shape[weight.shape.size() - 2];
}

template <class T, class ToText>
void check_allowed(const LayoutInfo& layout, const char* what, std::span<const T> allowed, T value,
                   const ToText& text) {
  if (allowed.empty() || std::ranges::find(allowed, value) != allowed.end()) return;
  std::string words;
  for (const T& word : allowed) words += fmt::format("{}{}", words.empty() ? "" : " or ", text(word));
  HALFBYTE_FAIL(usage, "layout {}: {} must be {}, got {}", layout.name, what, words, text(value));
}

float epsilon(DType dtype) {
  return dtype == DType::f32 ? 0x1p-23f : dtype == DType::f16 ? 0x1p-10f : 0x1p-7f;
}

// zeros [rows, groups] of bytes -> words [ceil(rows * bits / 32), groups], and back: a bit stream for each
// group.
void pack_zeros(const uint8_t* zeros, int64_t rows, int64_t groups, int bits, std::byte* stored) {
  const int64_t num_words = zero_words(rows, bits);
  for (int64_t group = 0; group < groups; ++group) {
    uint64_t pending = 0;  // bits that are not yet in a word
    int num_pending = 0;
    for (int64_t word = 0, row = 0; word < num_words; ++word) {
      for (; num_pending < 32 && row < rows; ++row, num_pending += bits)
        pending |= uint64_t{zeros[row * groups + group]} << num_pending;
      const auto value = static_cast<uint32_t>(pending);
      std::memcpy(stored + (word * groups + group) * kWordBytes, &value, kWordBytes);
      pending >>= 32;
      num_pending -= 32;
    }
  }
}
void unpack_zeros(const std::byte* stored, int64_t rows, int64_t groups, int bits, uint8_t* zeros) {
  const uint64_t mask = (1u << bits) - 1;
  for (int64_t group = 0; group < groups; ++group) {
    uint64_t pending = 0;
    int num_pending = 0;
    for (int64_t word = 0, row = 0; row < rows; ++row) {
      if (num_pending < bits) {
        uint32_t value;
        std::memcpy(&value, stored + (word++ * groups + group) * kWordBytes, kWordBytes);
        pending |= uint64_t{value} << num_pending;
        num_pending += 32;
      }
      zeros[row * groups + group] = static_cast<uint8_t>(pending & mask);
      pending >>= bits;
      num_pending -= bits;
    }
  }
}

void swap_nibbles(const std::byte* from, std::byte* to, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; ++i) to[i] = from[i] << 4 | from[i] >> 4;
}

}  // namespace

int64_t QuantizedWeight::rows() const {
  int64_t product = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) product *= shape[i];
  return product;
}

std::span<const LayoutInfo* const> all_layouts() {
  // In the order of preference for a format that several hold.
  static const std::array<const LayoutInfo*, 9> layouts = {
      &bitsandbytes_layout(), &compressed_tensors_layout(), &mlx_layout(), &halfbyte_layout(), &gptq_layout(),
      &awq_layout(),          &modelopt_layout(),           &fp8_layout(), &gpt_oss_layout()};
  return layouts;
}

const LayoutInfo& layout_info(Layout layout) {
  for (const LayoutInfo* row : all_layouts())
    if (row->layout == layout) return *row;
  HALFBYTE_FAIL(bug, "no layout {}", static_cast<int>(layout));
}

const LayoutInfo& default_layout(Format format) {
  for (const LayoutInfo* row : all_layouts())
    if (row->formats.empty() || std::ranges::find(row->formats, format) != row->formats.end()) return *row;
  HALFBYTE_FAIL(bug, "no layout for format {}", info(format).name);
}

std::span<const Granularity> granularities_of(const LayoutInfo& layout, Format format) {
  return format == Format::fp8 && !layout.fp8_granularities.empty() ? layout.fp8_granularities
                                                                    : layout.granularities;
}

std::span<const int64_t> group_sizes_of(const LayoutInfo& layout, Format format) {
  static constexpr int64_t kBlocks[] = {kFp8Block};
  if (format == Format::fp8 && !layout.fp8_granularities.empty()) return kBlocks;
  return layout.group_sizes;
}

int64_t scale_rows_of(const LayoutInfo& layout, const QuantSpec& spec) {
  const bool blocks = spec.format == Format::fp8 && !layout.fp8_granularities.empty() &&
                      spec.granularity == Granularity::group;
  return blocks ? kFp8Block : 1;
}

QuantSpec resolve_spec(const LayoutInfo& layout, const QuantizeOptions& options, DType dtype) {
  const auto word = [](auto value) { return to_string(value); };
  QuantSpec spec;
  spec.format = options.format;
  spec.asymmetric = options.asymmetric;
  spec.double_quant = options.double_quant;
  spec.table = options.table;
  check_allowed<Format>(layout, "format", layout.formats, spec.format, [](Format f) { return info(f).name; });
  HALFBYTE_CHECK(layout.asymmetric || !spec.asymmetric, usage,
                 "layout {}: has no zero points: asymmetric must be off", layout.name);
  HALFBYTE_CHECK(layout.double_quant || !spec.double_quant, usage,
                 "layout {}: double quantization must be off", layout.name);

  const FormatInfo& format = info(spec.format);
  if (format.scale_dtype) {  // which has one form
    spec.granularity = options.granularity.value_or(Granularity::group);
    spec.group_size = options.group_size.value_or(format.group_size);
    spec.scale_dtype = options.scale_dtype.value_or(*format.scale_dtype);
    check_spec(spec);
    return spec;
  }
  const std::span<const Granularity> granularities = granularities_of(layout, spec.format);
  const std::span<const int64_t> group_sizes = group_sizes_of(layout, spec.format);
  // Who wants groups of a size wants groups.
  const bool has_groups = std::ranges::find(granularities, Granularity::group) != granularities.end();
  spec.granularity = options.granularity.value_or(options.group_size && has_groups ? Granularity::group
                                                                                   : granularities.front());
  check_allowed(layout, "granularity", granularities, spec.granularity, word);
  if (spec.granularity == Granularity::group || spec.granularity == Granularity::flat) {
    spec.group_size = options.group_size.value_or(group_sizes.size() == 1 ? group_sizes.front()
                                                                          : layout.default_group_size);
    check_allowed(layout, "group size", group_sizes, spec.group_size, [](int64_t size) { return size; });
  } else {
    HALFBYTE_CHECK(!options.group_size, usage, "group size {} does not go with granularity {}",
                   *options.group_size, to_string(spec.granularity));
  }

  switch (layout.scale_dtypes) {
    case ScaleDTypes::f32:
      spec.scale_dtype = options.scale_dtype.value_or(DType::f32);
      check_allowed<DType>(layout, "scale dtype", kF32, spec.scale_dtype, word);
      break;
    case ScaleDTypes::f16:
      spec.scale_dtype = options.scale_dtype.value_or(DType::f16);
      check_allowed<DType>(layout, "scale dtype", kF16, spec.scale_dtype, word);
      break;
    case ScaleDTypes::of_weight:
      spec.scale_dtype = options.scale_dtype.value_or(dtype);
      HALFBYTE_CHECK(spec.scale_dtype == dtype || hides_dtype(layout, spec.format), usage,
                     "layout {}: scale dtype must be that of the weights, which is {}, got {}", layout.name,
                     to_string(dtype), to_string(spec.scale_dtype));
      break;
    case ScaleDTypes::any:
      spec.scale_dtype = options.scale_dtype.value_or(spec.double_quant ? DType::f32 : DType::f16);
      break;
  }
  check_allowed<DType>(layout, "scale dtype", kScaleDTypes, spec.scale_dtype, word);
  check_spec(spec);
  return spec;
}

Encoding resolve_encoding(const LayoutInfo& layout, const QuantizeOptions& options, const QuantSpec& spec) {
  const FormatKind kind = info(spec.format).kind;
  const bool of_layout = !layout.scale_rules.empty() && !spec.asymmetric &&
                         (kind == FormatKind::integer || kind == FormatKind::affine);
  const ScaleRule rule = of_layout ? layout.scale_rules.front() : default_scale_rule(spec);
  const Encoding encoding{options.scale_rule.value_or(rule),
                          options.search ? CodeScale::stored : layout.code_scale, options.search};
  HALFBYTE_CHECK(!of_layout || kind != FormatKind::integer || encoding.scale_rule != ScaleRule::signed_max,
                 usage,
                 "layout {}: scale rule signed-max makes negative scales, which its readers are not known to "
                 "take; layout halfbyte has them",
                 layout.name);
  if (of_layout)
    check_allowed<ScaleRule>(layout, "scale rule", layout.scale_rules, *encoding.scale_rule,
                             [](ScaleRule value) { return to_string(value); });
  check_encoding(spec, encoding);
  return encoding;
}

std::string cannot_hold(const LayoutInfo& layout, const QuantSpec& spec, std::span<const int64_t> shape) {
  const int64_t cols = shape.back();
  if (layout.whole_groups && spec.granularity == Granularity::group && cols % spec.group_size != 0 &&
      scale_rows_of(layout, spec) == 1)
    return fmt::format("layout {}: {} columns are not a multiple of the group size {}", layout.name, cols,
                       spec.group_size);
  if (cols < layout.min_cols)
    return fmt::format("layout {}: {} columns are fewer than {}", layout.name, cols, layout.min_cols);
  if (layout.turns_experts && shape.size() != 3)
    return fmt::format("layout {}: holds experts in one tensor of three axes, not tensors of {}", layout.name,
                       shape.size());
  if (layout.packing == Packing::rows) return "";
  if (shape.size() != 2)
    return fmt::format("layout {}: holds matrices, not tensors of {} axes", layout.name, shape.size());
  // Zero points fill words along the rows; codes of gptq along the columns, those of awq along the rows.
  const int64_t unit = 32 / std::gcd(32, info(spec.format).bits);
  if (shape[0] % unit != 0)
    return fmt::format("layout {}: {} rows are not a multiple of {}", layout.name, shape[0], unit);
  if (layout.packing == Packing::gptq && cols % unit != 0)
    return fmt::format("layout {}: {} columns are not a multiple of {}", layout.name, cols, unit);
  return "";
}

bool shares_scales(const QuantizedTensor& q, int64_t scale_rows) {
  if (scale_rows == 1) return true;
  const halfbyte::Tensor scales = q.scales.to({});
  const int64_t rows = q.rows() / q.num_experts(), row_bytes = scales.num_bytes() / q.rows();
  for (int64_t row = 0; row < q.rows(); ++row) {
    const std::byte* const own = scales.data() + row * row_bytes;
    const int64_t behind = row % rows % scale_rows;  // the first row of the block
    if (std::memcmp(own, own - behind * row_bytes, static_cast<size_t>(row_bytes)) != 0) return false;
  }
  return true;
}

QuantizedWeight written_weight(std::string name, std::vector<int64_t> shape, DType dtype, Layout layout,
                               const QuantSpec& spec) {
  QuantizedWeight weight{std::move(name), std::move(shape), dtype, layout, spec};
  // Every reader has version 1, which cannot hold a zero point of 0.
  weight.words.zeros_less_one = layout == Layout::gptq && !spec.asymmetric;
  // Loaders of transformers make one of uninitialised memory where a file has none.
  weight.words.has_group_index = layout == Layout::gptq;
  weight.scale_rows = scale_rows_of(layout_info(layout), spec);
  return weight;
}

bool hides_dtype(const LayoutInfo& layout, Format format) {
  const bool by_scales = !info(format).scale_dtype && format != Format::fp8;
  return layout.packing != Packing::rows || (!by_scales && layout.layout != Layout::halfbyte);
}

std::string module_of(const std::string& weight) {
  constexpr std::string_view kWeight = ".weight";
  return weight.ends_with(kWeight) ? weight.substr(0, weight.size() - kWeight.size()) : weight;
}

std::vector<Part> parts_of(const QuantizedWeight& weight) { return layout_info(weight.layout).parts(weight); }

std::vector<int64_t> with_last(std::span<const int64_t> shape, int64_t last) {
  std::vector<int64_t> result(shape.begin(), shape.end());
  result.back() = last;
  return result;
}

Block block_at(const QuantizedWeight& weight, int64_t element, int64_t max_elements) {
  const int64_t cols = weight.cols(), num_rows = weight.rows(), num_elements = num_rows * cols;
  Block block;
  if (weight.spec.granularity == Granularity::flat) {
    const int64_t unit = 8 * std::min(weight.spec.group_size, num_elements);
    block.begin = element / unit * unit;
    block.count = std::min(num_elements - block.begin, std::max(unit, max_elements / unit * unit));
    block.rows = 1;
    block.cols = block.count;
    block.first_group = block.begin / weight.spec.group_size;
  } else {
    // Words of zero points and blocks of scales hold rows of one matrix.
    const int64_t unit = is_columnwise(weight) ? columnwise_unit(weight)
                         : packs_zeros(weight) ? zeros_unit(weight)
                                               : weight.scale_rows;
    const bool of_matrix = packs_zeros(weight) || weight.scale_rows > 1;
    const int64_t matrix_rows = of_matrix ? rows_per_matrix(weight) : num_rows;
    const int64_t row = element / cols;
    const int64_t matrix = row / matrix_rows * matrix_rows;
    block.first_row = matrix + (row - matrix) / unit * unit;
    block.rows =
        std::min(matrix + matrix_rows - block.first_row, std::max(unit, max_elements / cols / unit * unit));
    block.cols = cols;
    block.begin = block.first_row * cols;
    block.count = block.rows * cols;
  }
  block.shape = quant_shape(weight.spec, block.rows, block.cols);
  if (weight.spec.granularity == Granularity::channel || weight.spec.granularity == Granularity::group)
    block.first_group = block.first_row * block.shape.groups_per_row;
  return block;
}

int64_t preferred_elements(const QuantizedWeight& weight, int64_t otherwise) {
  return is_columnwise(weight) ? std::max(otherwise, kColumnElements) : otherwise;
}

StoredRange stored_range(const QuantizedWeight& weight, const Block& block, Role role) {
  if (is_columnwise(weight)) return columnwise_range(weight, block, role);
  int64_t offset = 0, num_bytes = 0;
  if (role == Role::codes && weight.spec.granularity == Granularity::flat) {
    offset = block.begin / 8 * bits_of(weight);
    num_bytes = block.shape.row_bytes;
  } else if (role == Role::codes) {
    offset = block.first_row * stored_row_bytes(weight, block.shape);
    num_bytes = block.rows * stored_row_bytes(weight, block.shape);
  } else if (role == Role::zeros && packs_zeros(weight)) {
    const int64_t matrix_rows = rows_per_matrix(weight);
    const int bits = bits_of(weight);
    const int64_t word_rows = block.first_row / matrix_rows * zero_words(matrix_rows, bits) +
                              zero_words(block.first_row % matrix_rows, bits);
    offset = word_rows * block.shape.groups_per_row * kWordBytes;
    num_bytes = zero_words(block.rows, bits) * block.shape.groups_per_row * kWordBytes;
  } else if (role == Role::scales && weight.scale_rows > 1) {
    const int64_t matrix_rows = rows_per_matrix(weight),
                  row_bytes = block.shape.groups_per_row * stored_scale_size(weight);
    offset = (block.first_row / matrix_rows * ceil_div(matrix_rows, weight.scale_rows) +
              block.first_row % matrix_rows / weight.scale_rows) *
             row_bytes;
    num_bytes = ceil_div(block.rows, weight.scale_rows) * row_bytes;
  } else {
    const int64_t size = role == Role::zeros    ? 1
                         : role == Role::scales ? stored_scale_size(weight)
                                                : size_of(weight.spec.scale_dtype);
    offset = block.first_group * size;
    num_bytes = block.shape.num_groups * size;
  }
  return {static_cast<uint64_t>(offset), static_cast<uint64_t>(num_bytes), static_cast<uint64_t>(num_bytes)};
}

int64_t native_bytes(const QuantizedWeight& weight, const Block& block, Role role) {
  if (role == Role::codes) return block.shape.code_bytes();
  return block.shape.num_groups * (role == Role::zeros ? 1 : size_of(weight.spec.scale_dtype));
}

int64_t native_offset(const QuantizedWeight& weight, const Block& block, Role role) {
  if (role != Role::codes)
    return block.first_group * (role == Role::zeros ? 1 : size_of(weight.spec.scale_dtype));
  return weight.spec.granularity == Granularity::flat ? block.begin / 8 * bits_of(weight)
                                                      : block.first_row * block.shape.row_bytes;
}

std::span<const std::byte> to_stored(const QuantizedWeight& weight, const Block& block, Role role,
                                     std::byte* native, Buffer& scratch) {
  const LayoutInfo& layout = layout_info(weight.layout);
  const auto num_bytes = static_cast<int64_t>(stored_range(weight, block, role).num_bytes());
  std::byte* stored = native;
  if (is_columnwise(weight)) {
    stored = scratch.reserve(num_bytes);
    pack_columnwise(weight, block, role, native, stored);
  } else if (role == Role::codes && layout.high_nibble_first) {
    swap_nibbles(native, native, num_bytes);
  } else if (role == Role::codes && layout.row_align_bytes > 1) {
    const int64_t row_bytes = block.shape.row_bytes, stored_row = stored_row_bytes(weight, block.shape);
    const int used_bits = static_cast<int>(block.cols * bits_of(weight) % 8);
    if (stored_row != row_bytes) stored = scratch.reserve(num_bytes);
    for (int64_t row = 0; row < block.rows; ++row) {
      std::byte* const end = stored + row * stored_row + row_bytes;
      if (stored != native) {
        std::memcpy(end - row_bytes, native + row * row_bytes, static_cast<size_t>(row_bytes));
        std::memset(end, 0, static_cast<size_t>(stored_row - row_bytes));
      }
      if (used_bits != 0) end[-1] &= static_cast<std::byte>((1 << used_bits) - 1);
    }
  } else if (role == Role::zeros && packs_zeros(weight)) {
    stored = scratch.reserve(num_bytes);
    pack_zeros(reinterpret_cast<const uint8_t*>(native), block.rows, block.shape.groups_per_row,
               bits_of(weight), stored);
  } else if (role == Role::scales && weight.scale_rows > 1) {  // the same of all rows of a block
    const int64_t row_bytes = scale_row_bytes(weight, block);
    stored = scratch.reserve(num_bytes);
    for (int64_t row = 0; row < block.rows; row += weight.scale_rows)
      std::memcpy(stored + row / weight.scale_rows * row_bytes, native + row * row_bytes,
                  static_cast<size_t>(row_bytes));
  }
  return {stored, static_cast<size_t>(num_bytes)};
}

void to_native(const QuantizedWeight& weight, const Block& block, Role role, const std::byte* stored,
               std::byte* native) {
  const LayoutInfo& layout = layout_info(weight.layout);
  const int64_t num_bytes = native_bytes(weight, block, role);
  if (is_columnwise(weight)) {
    unpack_columnwise(weight, block, role, stored, native);
  } else if (role == Role::codes && layout.high_nibble_first) {
    swap_nibbles(stored, native, num_bytes);
  } else if (role == Role::codes && stored_row_bytes(weight, block.shape) != block.shape.row_bytes) {
    const int64_t row_bytes = block.shape.row_bytes, stored_row = stored_row_bytes(weight, block.shape);
    for (int64_t row = 0; row < block.rows; ++row)
      std::memcpy(native + row * row_bytes, stored + row * stored_row, static_cast<size_t>(row_bytes));
  } else if (role == Role::zeros && packs_zeros(weight)) {
    unpack_zeros(stored, block.rows, block.shape.groups_per_row, bits_of(weight),
                 reinterpret_cast<uint8_t*>(native));
  } else if (role == Role::scales && (weight.scale_rows > 1 || !weight.exponents.empty())) {
    const int64_t row_bytes = scale_row_bytes(weight, block);
    const auto num_stored = static_cast<int64_t>(stored_range(weight, block, role).num_bytes());
    if (!weight.exponents.empty()) {
      for (int64_t i = 0; i < num_stored; ++i)
        formats::store_scale(native, i, formats::load_scale<float>(stored, i, scale_type(DType::f8_e8m0)),
                             scale_type(DType::f32));
    } else {
      std::memcpy(native, stored, static_cast<size_t>(num_stored));
    }
    // From the last row on: each comes from one that is not behind it.
    for (int64_t row = weight.scale_rows > 1 ? block.rows - 1 : 0; row > 0; --row)
      std::memmove(native + row * row_bytes, native + row / weight.scale_rows * row_bytes,
                   static_cast<size_t>(row_bytes));
  } else {
    std::memcpy(native, stored, static_cast<size_t>(num_bytes));
  }
}

void restore_columns(const QuantizedWeight& weight, std::byte* elements, int64_t rows, int64_t size) {
  if (weight.words.order.empty()) return;
  const int64_t cols = weight.cols();
  std::vector<std::byte> native(static_cast<size_t>(cols * size));
  for (int64_t row = 0; row < rows; ++row) {
    std::byte* const own = elements + row * cols * size;
    std::memcpy(native.data(), own, native.size());
    for (int64_t i = 0; i < cols; ++i)
      std::memcpy(own + weight.words.order[static_cast<size_t>(i)] * size, native.data() + i * size,
                  static_cast<size_t>(size));
  }
}

void replace_zero_scales(const QuantizedWeight& weight, int64_t num_scales, std::byte* scales) {
  if (!layout_info(weight.layout).zero_scale_is_eps || info(weight.spec.format).scale_dtype) return;
  const auto type = scale_type(weight.spec.scale_dtype);
  for (int64_t i = 0; i < num_scales; ++i)
    if (formats::load_scale<float>(scales, i, type) == 0)
      formats::store_scale(scales, i, epsilon(weight.spec.scale_dtype), type);
}

const Tensor& part_of(const QuantizedTensor& q, Role role) {
  switch (role) {
    case Role::codes:
      return q.codes;
    case Role::scales:
      return q.scales;
    case Role::zeros:
      return q.zeros;
    case Role::biases:
      return q.biases;
    case Role::scales_absmax:
      return q.scales_absmax;
    case Role::constant:
      break;
  }
  HALFBYTE_FAIL(bug, "no part for role {}", static_cast<int>(role));
}

Buffer& NativeBuffers::of(Role role) {
  switch (role) {
    case Role::codes:
      return codes;
    case Role::scales:
      return scales;
    case Role::zeros:
      return zeros;
    case Role::biases:
      return biases;
    default:
      HALFBYTE_FAIL(bug, "no native buffer for role {}", static_cast<int>(role));
  }
}

QuantizedView native_view(const QuantizedWeight& weight, const Block& block, NativeBuffers& buffers) {
  QuantizedView view;
  view.spec = weight.spec;
  view.spec.double_quant = false;  // the scales of a block are always expanded
  view.rows = block.rows;
  view.cols = block.cols;
  for (const Role role : block_roles(weight.spec))
    buffers.of(role).reserve(native_bytes(weight, block, role));
  view.codes = reinterpret_cast<uint8_t*>(buffers.codes.mirror());
  view.scales = buffers.scales.mirror();
  if (has_zeros(weight.spec)) view.zeros = reinterpret_cast<uint8_t*>(buffers.zeros.mirror());
  if (has_biases(weight.spec)) view.biases = buffers.biases.mirror();
  if (has_global_scale(weight.spec)) {
    std::memcpy(buffers.global_scale.reserve(sizeof(float)), &weight.global_scale, sizeof(float));
    view.global_scale = reinterpret_cast<float*>(buffers.global_scale.mirror());
  }
  return view;
}

QuantizedView view_of(const QuantizedTensor& q, const QuantizedWeight& weight, const Block& block) {
  const auto at = [&](Role role) { return part_of(q, role).data() + native_offset(weight, block, role); };
  QuantizedView view{q.spec, block.rows, block.cols};
  view.codes = reinterpret_cast<uint8_t*>(at(Role::codes));
  view.scales = at(Role::scales);
  if (has_zeros(q.spec)) view.zeros = reinterpret_cast<uint8_t*>(at(Role::zeros));
  if (has_biases(q.spec)) view.biases = at(Role::biases);
  if (has_global_scale(q.spec)) view.global_scale = reinterpret_cast<float*>(q.global_scale.data());
  return view;
}

std::vector<Role> block_roles(const QuantSpec& spec) {
  std::vector<Role> roles = {Role::codes, Role::scales};
  if (has_zeros(spec)) roles.push_back(Role::zeros);
  if (has_biases(spec)) roles.push_back(Role::biases);
  return roles;
}

}  // namespace halfbyte::io
