#include "halfbyte/convert.hpp"

#include <algorithm>
#include <cmath>

#include "core/checks.h"
#include "core/format.h"
#include "core/quantized_tensor.h"
#include "core/tensor_check.h"
#include "formats/bits.h"

namespace halfbyte {
namespace {

int bits_of(DType code_dtype) { return is_packed(code_dtype) ? 4 : 8; }
bool is_signed(DType code_dtype) { return code_dtype == DType::i4 || code_dtype == DType::i8; }
// From a code to its offset form: the least code becomes 0.
int offset_of(DType code_dtype) { return is_signed(code_dtype) ? 1 << (bits_of(code_dtype) - 1) : 0; }

// Element `i` of rows that begin at bytes, in offset form.
int offset_code(const std::byte* data, DType dtype, int64_t row, int64_t col, int64_t cols) {
  if (!is_packed(dtype)) {
    const int byte = std::to_integer<int>(data[row * cols + col]);
    return dtype == DType::i8 ? byte ^ 128 : byte;
  }
  const int byte = std::to_integer<int>(data[row * ((cols + 1) / 2) + col / 2]);
  const int code = byte >> (col % 2 * 4) & 15;
  return dtype == DType::i4 ? code ^ 8 : code;
}
void put_offset_code(std::byte* data, DType dtype, int64_t row, int64_t col, int64_t cols, int code) {
  if (!is_packed(dtype)) {
    data[row * cols + col] = static_cast<std::byte>(dtype == DType::i8 ? code ^ 128 : code);
    return;
  }
  std::byte& byte = data[row * ((cols + 1) / 2) + col / 2];
  byte |= static_cast<std::byte>((dtype == DType::i4 ? code ^ 8 : code) << (col % 2 * 4));
}

// The argument in host memory. Error(usage) where it is not as the descriptor says.
Tensor host_of(const char* op, const char* name, const ConstTensorView& view, DType dtype,
               std::span<const int64_t> shape, Device device, void* stream) {
  const ArgumentData data = data_of(view);
  check_tensor(op, {.name = name, .view = &data, .dtype = dtype, .shape = shape}, device);
  return Tensor::copy_of(view, stream).to(Device{}, stream);
}

// How a weight has the scales of a descriptor. Error(usage) with the reason if it cannot.
QuantSpec spec_of(const LinearDescriptor& d) {
  QuantSpec spec;
  spec.format = bits_of(d.code_dtype) == 4 ? Format::int4 : Format::int8;
  spec.asymmetric = d.zero_point_dtype.has_value() || !is_signed(d.code_dtype);
  spec.granularity = d.granularity;
  spec.scale_dtype = d.scale_dtype;
  HALFBYTE_CHECK(d.scale_dtype != DType::f64, usage,
                 "from_linear: scale_dtype must be f32, f16 or bf16 for products, got f64");
  const auto rank = static_cast<int>(d.shape.size());
  const int axis = d.axis < 0 ? d.axis + rank : d.axis;
  HALFBYTE_CHECK(rank >= 1, usage, "from_linear: a weight has at least one axis, got none");
  if (d.granularity == Granularity::channel)
    HALFBYTE_CHECK(rank == 2 && axis == 0, usage,
                   "from_linear: channels of a weight are its rows: axis 0 of two, got axis {} of {}", axis,
                   rank);
  if (d.granularity == Granularity::group) {
    HALFBYTE_CHECK(axis == rank - 1, usage,
                   "from_linear: groups of a weight lie along its last axis, got axis {} of {}", axis, rank);
    spec.group_size = d.group_size;
  }
  return spec;
}

}  // namespace

QuantizedTensor from_linear(const LinearDescriptor& d, const ConstTensorView& codes,
                            const ConstTensorView& scale, const ConstTensorView& zero_point,
                            Execution execution) {
  constexpr const char* kOp = "from_linear";
  check_descriptor(d);
  QuantizedTensor q(spec_of(d), d.shape, d.dtype);
  const Device device = codes.device;
  const std::vector<int64_t> scale_shape = d.scale_shape();
  const Tensor given = host_of(kOp, "codes", codes, d.code_dtype, d.shape, device, execution.stream);
  const Tensor scales = host_of(kOp, "scale", scale, d.scale_dtype, scale_shape, device, execution.stream);
  const int bits = bits_of(d.code_dtype), offset = offset_of(d.code_dtype);
  const int64_t rows = q.rows(), cols = q.cols(), num_groups = q.scales.num_elements();
  const auto type = scale_type(d.scale_dtype);
  for (int64_t i = 0; i < scales.num_elements(); ++i) {
    const auto value = formats::load_scale<float>(scales.data(), i, type);
    HALFBYTE_CHECK(std::isfinite(value) && value >= 0, bad_input,
                   "{}: scale {} is {}, which counts as 0 in the plan and not in a weight", kOp, i, value);
  }
  std::copy_n(scales.data(), q.scales.num_bytes(), q.scales.data());

  auto* const zeros = reinterpret_cast<uint8_t*>(q.zeros.data());
  if (!d.zero_point_dtype) {
    HALFBYTE_CHECK(zero_point.data == nullptr, usage,
                   "{}: zero_point must have no data: the descriptor has none", kOp);
    if (q.spec.asymmetric) std::fill_n(zeros, num_groups, uint8_t{0});
  } else {
    const DType dtype = *d.zero_point_dtype;
    const Tensor points =
        host_of(kOp, "zero_point", zero_point, dtype, scale_shape, device, execution.stream);
    const int64_t last = scale_shape.empty() ? 1 : scale_shape.back();
    for (int64_t i = 0; i < num_groups; ++i) {
      int64_t zero = 0;
      if (dtype == DType::i32)
        zero = int64_t{reinterpret_cast<const int32_t*>(points.data())[i]} + offset;
      else
        zero = offset_code(points.data(), dtype, i / last, i % last, last);
      HALFBYTE_CHECK(zero >= 0 && zero < 1 << bits, bad_input,
                     "{}: zero point {} is {}, not a value of {}: a weight has no such form", kOp, i,
                     zero - offset, to_string(d.code_dtype));
      zeros[i] = static_cast<uint8_t>(zero);
    }
  }

  auto* const packed = reinterpret_cast<uint8_t*>(q.codes.data());
  const int64_t row_bytes = formats::packed_bytes(cols, bits);
  const int64_t groups_per_row =
      q.spec.granularity == Granularity::tensor || rows == 0 ? 0 : num_groups / rows;
  std::fill_n(packed, q.codes.num_bytes(), uint8_t{0});
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* const to = packed + row * row_bytes;
    for (int64_t col = 0; col < cols; ++col) {
      const int code = offset_code(given.data(), d.code_dtype, row, col, cols);
      HALFBYTE_CHECK(code - offset >= d.q_min && code - offset <= d.q_max, bad_input,
                     "{}: code {} is {}, outside of [{}, {}]", kOp, row * cols + col, code - offset, d.q_min,
                     d.q_max);
      formats::put_code(to, col, bits, code);
    }
    const int64_t group = groups_per_row == 0 ? 0 : (row + 1) * groups_per_row - 1;
    if (cols * bits % 8 != 0)
      formats::put_code(to, cols, bits, q.spec.asymmetric ? zeros[group] : 1 << (bits - 1));
  }
  return q.to(device, execution.stream);
}

LinearCodes to_linear(const QuantizedTensor& weight, Execution execution) {
  constexpr const char* kOp = "to_linear";
  check_quantized(kOp, weight);
  const QuantizedTensor q = weight.to(Device{}, execution.stream);
  const QuantSpec& spec = q.spec;
  const int bits = info(spec.format).bits;
  const int64_t rows = q.rows(), cols = q.cols();
  HALFBYTE_CHECK(info(spec.format).kind == FormatKind::integer, usage,
                 "{}: the format must be of integers, got {}", kOp, info(spec.format).name);
  HALFBYTE_CHECK(!spec.double_quant, usage, "{}: double quantization must be off: take expanded()", kOp);
  const bool flat = spec.granularity == Granularity::flat;
  HALFBYTE_CHECK(!flat || cols % spec.group_size == 0, usage,
                 "{}: groups of {} that run across rows of {} elements are no groups of a plan", kOp,
                 spec.group_size, cols);
  LinearCodes result;
  LinearDescriptor& d = result.descriptor;
  d.shape = q.shape;
  // Of a row, where it is no channel of two axes.
  const bool rows_are_groups = spec.granularity == Granularity::channel && q.shape.size() != 2;
  d.granularity = flat || rows_are_groups ? Granularity::group : spec.granularity;
  d.axis = d.granularity == Granularity::channel ? 0 : -1;
  if (d.granularity == Granularity::group)
    d.group_size = rows_are_groups ? std::max<int64_t>(cols, 1) : spec.group_size;
  d.code_dtype = bits == 4 ? DType::i4 : DType::i8;
  d.q_min = -(1 << (bits - 1));
  d.q_max = -d.q_min - 1;
  d.scale_dtype = spec.scale_dtype;
  d.dtype = spec.scale_dtype == DType::f32 ? q.dtype : spec.scale_dtype;
  if (spec.asymmetric) d.zero_point_dtype = d.code_dtype;
  check_descriptor(d);

  const std::vector<int64_t> scale_shape = d.scale_shape();
  result.codes = Tensor({}, d.code_dtype, q.shape);
  result.scale = Tensor({}, d.scale_dtype, scale_shape);
  // Rows without elements have a scale in a plan, and none in a weight.
  const bool has_scales = q.scales.num_elements() > 0;
  if (has_scales)
    std::copy_n(q.scales.data(), q.scales.num_bytes(), result.scale.data());
  else
    std::fill_n(result.scale.data(), result.scale.num_bytes(), std::byte{0});
  // Offset codes of fewer bits than the dtype has begin higher.
  const int shift = offset_of(d.code_dtype) + d.q_min;
  const auto fill = [&](const Tensor& to, const auto& code_of) {
    const int64_t last = to.shape().empty() ? 1 : to.shape().back(), n = to.num_elements();
    std::fill_n(to.data(), to.num_bytes(), std::byte{0});  // of null for no elements
    for (int64_t i = 0; i < n; ++i)
      put_offset_code(to.data(), d.code_dtype, i / last, i % last, last, code_of(i) + shift);
  };
  const auto* const codes = reinterpret_cast<const uint8_t*>(q.codes.data());
  const int64_t row_bytes = rows == 0 || flat ? 0 : q.codes.num_elements() / rows;
  fill(result.codes, [&](int64_t i) {
    return flat ? formats::get_code(codes, i, bits)
                : formats::get_code(codes + i / cols * row_bytes, i % cols, bits);
  });
  if (spec.asymmetric) {
    result.zero_point = Tensor({}, d.code_dtype, scale_shape);
    fill(result.zero_point,
         [&](int64_t i) { return has_scales ? std::to_integer<int>(q.zeros.data()[i]) : 0; });
  }
  for (Tensor* part : {&result.codes, &result.scale, &result.zero_point})
    if (part->num_elements() > 0) *part = part->to(weight.device(), execution.stream);
  return result;
}

namespace {

// x is a value of the dtype of the scales, decoded in it.
template <class F>
F decode_flat(const FlatCodes& flat, int code, F scale, F zero) {
  if (flat.format == Format::nf4)
    return static_cast<F>(table_values(Format::nf4)[static_cast<size_t>(code)]) * scale;
  return (static_cast<F>(code) - (flat.symmetric ? F{8} : zero)) * scale;
}

template <class F>
Conversion from_flat_of(const FlatCodes& flat, std::vector<int64_t> shape) {
  const bool affine = flat.format == Format::int4 && !flat.symmetric;
  QuantSpec spec;
  spec.format = affine ? Format::affine4 : flat.format;
  spec.granularity = Granularity::flat;
  spec.group_size = flat.group_size;
  Conversion result{QuantizedTensor(spec, std::move(shape),
                                    is_floating(flat.scales.dtype) ? flat.scales.dtype : DType::f32)};
  QuantizedTensor& q = result.weight;
  const int64_t n = q.rows() * q.cols(), groups = q.scales.num_elements();
  const auto check = [&](const char* name, const ConstTensorView& view, DType dtype, int64_t count) {
    const int64_t wanted[] = {count};
    const ArgumentData data = data_of(view);
    check_tensor("from_flat", {.name = name, .view = &data, .dtype = dtype, .shape = wanted}, Device{});
  };
  check("codes", flat.codes, DType::u8, (n + 1) / 2);
  check("scales", flat.scales, flat.scales.dtype, groups);
  const bool has_zeros = flat.zeros.data != nullptr;
  HALFBYTE_CHECK(affine || !has_zeros, usage,
                 "from_flat: zeros must have no data: the codes have no zero points");
  if (has_zeros) check("zeros", flat.zeros, flat.scales.dtype, groups);

  const auto type = scale_type(flat.scales.dtype);
  std::vector<F> scales(static_cast<size_t>(groups)), zeros(scales.size());
  auto* const to_scales = reinterpret_cast<float*>(q.scales.data());
  auto* const to_biases = reinterpret_cast<float*>(q.biases.data());
  for (int64_t g = 0; g < groups; ++g) {
    const auto i = static_cast<size_t>(g);
    scales[i] = formats::load_scale<F>(flat.scales.data, g, type);
    if (has_zeros) zeros[i] = formats::load_scale<F>(flat.zeros.data, g, type);
    to_scales[g] = static_cast<float>(scales[i]);
    const float bias = static_cast<float>(-zeros[i] * scales[i]);
    HALFBYTE_CHECK(std::isfinite(to_scales[g]) && std::isfinite(bias), bad_input,
                   "from_flat: group {} has scale {} and zero point {}: f32 has no such scale and bias", g,
                   scales[i], zeros[i]);
    if (affine) to_biases[g] = bias + 0.0f;
  }
  auto* const codes = reinterpret_cast<uint8_t*>(q.codes.data());
  std::copy_n(static_cast<const uint8_t*>(flat.codes.data), q.codes.num_bytes(), codes);
  const float* const table = spec.format == Format::nf4 ? table_values(Format::nf4).data() : nullptr;
  for (int64_t i = 0; i < n; ++i) {
    const int code = formats::get_code(codes, i, 4);
    const int64_t g = i / flat.group_size;
    const float own = affine  ? static_cast<float>(code) * to_scales[g] + to_biases[g]
                      : table ? table[code] * to_scales[g]
                              : static_cast<float>(code - 8) * to_scales[g];
    const F theirs =
        decode_flat<F>(flat, code, scales[static_cast<size_t>(g)], zeros[static_cast<size_t>(g)]);
    const double error = std::abs(static_cast<double>(own) - static_cast<double>(theirs));
    if (error > result.max_error) result.max_error = error, result.max_error_index = i;
  }
  if (n % 2 != 0) {
    // The code of zero, which other systems need not store.
    const int64_t last = groups - 1;
    int zero = table ? 7 : 8;
    if (affine) {
      formats::GroupParams<float> params;
      params.code_scale = to_scales[last];
      params.code_bias = to_biases[last];
      zero = formats::zero_code(params, make_codec(spec));
    }
    uint8_t& byte = codes[n / 2];
    byte = static_cast<uint8_t>((byte & 15) | zero << 4);
  }
  return result;
}

}  // namespace

Conversion from_flat(const FlatCodes& flat, std::vector<int64_t> shape) {
  HALFBYTE_CHECK(flat.format == Format::int4 || flat.format == Format::nf4, usage,
                 "from_flat: format must be int4 or nf4, got {}", info(flat.format).name);
  HALFBYTE_CHECK(is_floating(flat.scales.dtype), usage,
                 "from_flat: scales must be f32, f64, f16 or bf16, got {}", to_string(flat.scales.dtype));
  return flat.scales.dtype == DType::f64 ? from_flat_of<double>(flat, std::move(shape))
                                         : from_flat_of<float>(flat, std::move(shape));
}

}  // namespace halfbyte
