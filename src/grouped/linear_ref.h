// The scalar reference of `quantize_linear`, `dequantize_linear`, `quantize_linear_backward` and
// `fake_quantize`: what every backend must equal to the byte. F is double where the tensors are f64, else
// float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "grouped/linear.h"

namespace halfbyte::linear_ref {

// Element `index` of a contiguous array of integers.
inline int load_integer(const void* data, const CodeStorage& codes, int64_t index) {
  switch (codes.dtype) {
    case DType::i32:
      return static_cast<const int32_t*>(data)[index];
    case DType::i8:
      return static_cast<const int8_t*>(data)[index];
    case DType::u8:
      return static_cast<const uint8_t*>(data)[index];
    case DType::f32:
      return learned_zero_point(static_cast<const float*>(data)[index]);
    case DType::f64:
      return learned_zero_point(static_cast<const double*>(data)[index]);
    default: {
      const int64_t column = index % codes.cols;
      const uint8_t byte =
          static_cast<const uint8_t*>(data)[index / codes.cols * codes.row_bytes + column / 2];
      const int nibble = column % 2 ? byte >> 4 : byte & 15;
      return codes.dtype == DType::i4 ? (nibble ^ 8) - 8 : nibble;
    }
  }
}
// Packed: writing the first of two elements clears the second.
inline void store_integer(void* data, const CodeStorage& codes, int64_t index, int value) {
  switch (codes.dtype) {
    case DType::i32:
      static_cast<int32_t*>(data)[index] = value;
      break;
    case DType::i8:
    case DType::u8:
      static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(value);
      break;
    default: {
      const int64_t column = index % codes.cols;
      uint8_t& byte = static_cast<uint8_t*>(data)[index / codes.cols * codes.row_bytes + column / 2];
      const auto nibble = static_cast<unsigned>(value) & 15u;
      byte = static_cast<uint8_t>(column % 2 ? (byte & 15u) | nibble << 4 : nibble);
      break;
    }
  }
}

// Element `index` of a mask; writing the first one of a byte clears the others.
inline bool load_bit(const void* data, const CodeStorage& mask, int64_t index) {
  const int64_t column = index % mask.cols;
  return static_cast<const uint8_t*>(data)[index / mask.cols * mask.row_bytes + column / 8] >> column % 8 & 1;
}
inline void store_bit(void* data, const CodeStorage& mask, int64_t index, bool bit) {
  const int64_t column = index % mask.cols;
  uint8_t& byte = static_cast<uint8_t*>(data)[index / mask.cols * mask.row_bytes + column / 8];
  byte = static_cast<uint8_t>((column % 8 == 0 ? 0u : byte) | (bit ? 1u : 0u) << column % 8);
}

template <class F>
F load_element(const void* data, DType dtype, int64_t index) {
  return formats::load_scale<F>(data, index, scale_type(dtype));
}
template <class F>
void store_element(void* data, DType dtype, int64_t index, F value) {
  formats::store_scale(data, index, formats::stored(value, scale_type(dtype)), scale_type(dtype));
}

// A scale and zero point as they are used: what is none counts in the status.
template <class F>
formats::GroupParams<F> load_params(const LinearProblem& problem, const LinearTensors& tensors, int64_t index,
                                    QuantizeStatus& status) {
  formats::GroupParams<F> params;
  params.code_scale =
      formats::load_scale<F>(tensors.scale, index, problem.codec.scale_type, global_scale_of(tensors));
  if (!(params.code_scale >= 0 && formats::is_finite(params.code_scale))) {
    params.code_scale = 0;
    ++status.num_invalid_scales;
  }
  if (tensors.zero) {
    params.zero_point = load_integer(tensors.zero, problem.zeros, index);
    if (problem.learns_zeros()) {
      const int zero_point = std::clamp(params.zero_point, problem.codec.q_min, problem.codec.q_max);
      if (params.zero_point != zero_point) ++status.num_invalid_zero_points;
      params.zero_point = zero_point;
    }
  }
  return params;
}

template <class F>
int quantize(F x, const formats::GroupParams<F>& params, const formats::Codec& codec) {
  return linear_code(std::isnan(x) ? 0 : x, params.code_scale, params.zero_point, codec.q_min, codec.q_max);
}
template <class F>
F dequantize(int q, const formats::GroupParams<F>& params) {
  return code_distance<F>(q, params.zero_point) * params.code_scale;
}
// Of an x that is not NaN.
template <class F>
F fake_quantize(F x, const formats::GroupParams<F>& params, const formats::Codec& codec) {
  if (codec.kind == formats::Kind::integer) return dequantize(quantize(x, params, codec), params);
  if (params.code_scale == 0) return 0;
  return formats::decode(formats::encode(x, params, codec), params.code_scale, F{0}, 0, codec);
}
// Whether the gradient passes.
template <class F>
bool is_within(F x, const formats::GroupParams<F>& params, const formats::Codec& codec) {
  if (std::isnan(x)) return false;
  if (params.code_scale == 0) return true;
  if (codec.kind == formats::Kind::table) {
    const formats::CodeBook& book = codec.book;
    const F value = x / params.code_scale;
    return static_cast<F>(book.values[book.code_of_rank[0]]) <= value &&
           value <= static_cast<F>(book.values[book.code_of_rank[15]]);
  }
  const int64_t position = code_position(formats::round_half_even(x / params.code_scale), params.zero_point);
  return codec.q_min <= position && position <= codec.q_max;
}

template <class Body>
void for_each_element(const LinearProblem& problem, const Body& body) {
  for (int64_t o = 0; o < problem.outer; ++o)
    for (int64_t a = 0; a < problem.axis; ++a)
      for (int64_t i = 0; i < problem.inner; ++i) body(o, a, i);
}
inline int64_t offset(const LinearStrides& strides, int64_t o, int64_t a, int64_t i) {
  return o * strides.outer + a * strides.axis + i * strides.inner;
}

// Computes and stores the parameters of groups, by the codec of a run.
template <class F>
class ParamsOfRanges {
 public:
  ParamsOfRanges(const LinearProblem& problem, const LinearTensors& tensors)
      : problem_(problem), tensors_(tensors), codec_(problem.codec) {
    if (tensors.global_scale) is_usable_ = set_global_scale(codec_, *tensors.global_scale);
  }

  // With the global scale.
  const formats::Codec& codec() const { return codec_; }
  void* scales() const { return tensors_.scale; }
  // Whether ranges are all that counts, and scales are valid.
  bool are_of_ranges() const { return is_usable_ && !problem_.observed; }

  // From the range of the finite values of a group; low > high: there are none.
  // Inline: there are as many as groups, some of 16 elements.
  [[gnu::always_inline]] void store(int64_t index, F low, F high, QuantizeStatus& status) const {
    formats::GroupParams<F> params;
    formats::Seen<F> range{low, high};
    status.num_invalid_scales += set_params(index, range, params) ? 0 : 1;
    status.num_unheld_scales += formats::is_held(params, range.min, range.max, codec_) ? 0 : 1;
    status.num_coarse_scales += params.coarse ? 1 : 0;
    formats::store_scale(tensors_.scale, index, params.scale, codec_.scale_type, codec_.global_scale);
    if (tensors_.zero) store_integer(tensors_.zero, problem_.zeros, index, params.zero_point);
  }
  // Of the groups from `index` on; nothing where there are none.
  void store_zeros(int64_t index, const int32_t* zeros, int64_t count) const {
    if (!tensors_.zero) return;
    for (int64_t i = 0; i < count; ++i) store_integer(tensors_.zero, problem_.zeros, index + i, zeros[i]);
  }

 private:
  // Whether there are valid ones. An observer joins its history to the range.
  [[gnu::always_inline]] bool set_params(int64_t index, formats::Seen<F>& range,
                                         formats::GroupParams<F>& params) const {
    if (!is_usable_) return false;
    if (problem_.observed)
      return observe_params(tensors_.observer, index, range, problem_.history, codec_, params);
    params = formats::stored_params(formats::rule_params(range.min, range.max, codec_), codec_);
    return true;
  }

  const LinearProblem& problem_;
  const LinearTensors& tensors_;
  formats::Codec codec_;
  bool is_usable_ = true;  // the global scale
};

// Scales and zero points from the finite values of each group.
template <class F>
void compute_params(const LinearProblem& problem, const LinearTensors& tensors, QuantizeStatus& status) {
  const int64_t n = problem.num_scales;
  Scratch own;
  Scratch& scratch = tensors.scratch ? *tensors.scratch : own;
  F *const low = scratch.take<F>(n), *const high = scratch.take<F>(n);
  std::fill_n(low, n, std::numeric_limits<F>::infinity());
  std::fill_n(high, n, -std::numeric_limits<F>::infinity());
  for_each_element(problem, [&](int64_t o, int64_t a, int64_t i) {
    const F x = load_element<F>(tensors.x, problem.dtype, offset(tensors.x_strides, o, a, i));
    if (!formats::is_finite(x)) return;
    const int64_t index = problem.scale_index(o, a, i);
    low[index] = std::min(low[index], x);
    high[index] = std::max(high[index], x);
  });
  if (problem.observed && problem.num_elements() > 0) ++*tensors.observer.num_batches;
  if (problem.computed_global_scale) {
    F absmax = 0;
    for (int64_t index = 0; index < n; ++index) absmax = std::max({absmax, -low[index], high[index]});
    *tensors.global_scale = formats::global_scale_of(absmax);
  }
  const ParamsOfRanges<F> params(problem, tensors);
  for (int64_t index = 0; index < n; ++index) params.store(index, low[index], high[index], status);
}

template <class F>
QuantizeStatus run(const LinearProblem& problem, const LinearTensors& tensors) {
  QuantizeStatus status, ignored;
  if (problem.computed) compute_params<F>(problem, tensors, status);
  if (problem.num_elements() > 0)  // each scale counts once; computed ones are right, but for those not held
    for (int64_t index = 0; index < problem.num_scales; ++index)
      load_params<F>(problem, tensors, index, problem.computed ? ignored : status);
  for_each_element(problem, [&](int64_t o, int64_t a, int64_t i) {
    const auto params = load_params<F>(problem, tensors, problem.scale_index(o, a, i), ignored);
    const int64_t index = (o * problem.axis + a) * problem.inner + i;
    const int64_t code_index = is_packed(problem.codes.dtype) ? index : offset(tensors.code_strides, o, a, i);
    if (problem.op == LinearOp::dequantize) {
      const int q = load_integer(tensors.codes, problem.codes, code_index);
      store_element(tensors.y, problem.dtype, offset(tensors.y_strides, o, a, i), dequantize(q, params));
      return;
    }
    const F x = load_element<F>(tensors.x, problem.dtype, offset(tensors.x_strides, o, a, i));
    if (problem.op == LinearOp::quantize) {
      if (!formats::is_finite(x) && status.num_nonfinite++ == 0) status.first_nonfinite = index;
      store_integer(tensors.codes, problem.codes, code_index, quantize(x, params, problem.codec));
    } else if (problem.op == LinearOp::fake_quantize) {
      if (!formats::is_finite(x) && status.num_nonfinite++ == 0) status.first_nonfinite = index;
      const bool within = is_within(x, params, problem.codec);
      if (std::isnan(x))
        std::memmove(static_cast<std::byte*>(tensors.y) + index * size_of(problem.dtype),
                     static_cast<const std::byte*>(tensors.x) + index * size_of(problem.dtype),
                     static_cast<size_t>(size_of(problem.dtype)));
      else
        store_element(tensors.y, problem.dtype, index, fake_quantize(x, params, problem.codec));
      if (problem.has_mask) store_bit(tensors.mask, problem.mask, index, within);
    } else {
      const int64_t size = size_of(problem.dtype), to = offset(tensors.y_strides, o, a, i) * size;
      const auto* const dy =
          static_cast<const std::byte*>(tensors.dy) + offset(tensors.dy_strides, o, a, i) * size;
      auto* const dx = static_cast<std::byte*>(tensors.y) + to;
      if (is_within(x, params, problem.codec))
        std::copy_n(dy, size, dx);
      else
        std::fill_n(dx, size, std::byte{0});
    }
  });
  return status;
}

inline QuantizeStatus run(const LinearProblem& problem, const LinearTensors& tensors) {
  return problem.dtype == DType::f64 ? run<double>(problem, tensors) : run<float>(problem, tensors);
}

// y is dy where the bit of the mask is set, else 0.
inline void mask_gradients(const LinearProblem& problem, const LinearTensors& tensors) {
  const auto size = static_cast<size_t>(size_of(problem.dtype));
  const auto* dy = static_cast<const std::byte*>(tensors.dy);
  auto* dx = static_cast<std::byte*>(tensors.y);
  for (int64_t i = 0; i < problem.num_elements(); ++i, dy += size, dx += size)
    if (load_bit(tensors.mask, problem.mask, i))
      std::memmove(dx, dy, size);
    else
      std::memset(dx, 0, size);
}

}  // namespace halfbyte::linear_ref
