// The scalar reference of `quantize`: what every backend must equal to the byte. The SIMD kernels call
// it for groups with non-finite values or extreme scales.
#pragma once

#include "formats/bits.h"
#include "formats/scale_search.h"
#include "ops/quantize/quantize.h"

namespace halfbyte {

// F is the type the arithmetic is done in: float, or double for f64 data.
template <class F>
F load_element(const void* x, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f16:
      return static_cast<F>(formats::f16_to_f32(static_cast<const uint16_t*>(x)[i]));
    case DType::bf16:
      return static_cast<F>(formats::bf16_to_f32(static_cast<const uint16_t*>(x)[i]));
    case DType::f32:
      return static_cast<F>(static_cast<const float*>(x)[i]);
    default:
      return static_cast<F>(static_cast<const double*>(x)[i]);
  }
}

// Of elements [begin, begin + n); the index of the first non-finite one counts from `begin`.
inline ValueRange value_range_ref(const void* x, DType dtype, int64_t begin, int64_t n) {
  ValueRange range;
  for (int64_t i = 0; i < n; ++i) {
    const double value = load_element<double>(x, dtype, begin + i);
    if (!formats::is_finite(value)) {
      if (range.num_nonfinite++ == 0) range.first_nonfinite = i;
      continue;
    }
    range.min = formats::min(range.min, value);
    range.max = formats::max(range.max, value);
  }
  return range;
}

// The parameters of a group, elements [first, first + n) of x, whose finite values are in the range [min,
// max].
template <class F>
formats::GroupParams<F> group_params_ref(const QuantizeProblem& problem, int64_t first, int64_t n, F min,
                                         F max) {
  if (!problem.search) return formats::group_params(min, max, problem.codec);
  const Importance& importance = problem.importance;
  return formats::search_params(
      n, [&](int64_t i) { return load_element<F>(problem.x, problem.dtype, first + i); },
      [&](int64_t i) {
        return importance.weights ? importance.weights[(importance.first + first + i) % importance.count]
                                  : 1.0f;
      },
      min, max, problem.codec);
}

// One code a byte.
template <class F>
void encode_ref(const void* x, DType dtype, int64_t begin, int64_t n, const formats::GroupParams<F>& params,
                const formats::Codec& codec, uint8_t* codes) {
  const int zero = formats::zero_code(params, codec);
  for (int64_t i = 0; i < n; ++i) {
    const F value = load_element<F>(x, dtype, begin + i);
    codes[i] = static_cast<uint8_t>(formats::is_finite(value) ? formats::encode(value, params, codec) : zero);
  }
}

template <class F>
QuantizeStatus quantize_span_ref(const QuantizeProblem& problem, const QuantizeSpan& span) {
  const QuantShape& shape = problem.shape;
  const formats::Codec& codec = problem.codec;
  QuantizeStatus status;
  uint8_t* row_codes = problem.codes + span.row * shape.row_bytes;
  formats::GroupParams<F> params;
  if (span.params) params = convert_params<F>(*span.params);
  int64_t packed = span.begin;  // codes before this column are written
  uint64_t pending = 0;         // up to eight codes, one a byte
  for (int64_t begin = span.begin; begin < span.end;) {
    const int64_t n = std::min(span.params ? span.end - begin : shape.group_size, span.end - begin);
    const int64_t first = span.row * shape.cols + begin;
    const ValueRange range = value_range_ref(problem.x, problem.dtype, first, n);
    merge(status, {range.num_nonfinite, range.first_nonfinite < 0 ? -1 : first + range.first_nonfinite, 0});
    if (!span.params) {
      params = group_params_ref(problem, first, n, static_cast<F>(range.min), static_cast<F>(range.max));
      count(status, params);
      store_params(problem, span.row * shape.groups_per_row + begin / shape.group_size, params);
    }
    for (int64_t i = begin; i < begin + n; ++i) {
      uint8_t code = 0;
      encode_ref(problem.x, problem.dtype, span.row * shape.cols + i, 1, params, codec, &code);
      pending |= static_cast<uint64_t>(code) << (8 * (i % 8));
      const bool last = i + 1 == span.end;
      if (i % 8 != 7 && !last) continue;
      for (int64_t pad = i % 8 + 1; last && pad < 8; ++pad)
        pending |= static_cast<uint64_t>(formats::zero_code(params, codec)) << (8 * pad);
      const uint64_t bits = formats::pack8(pending, codec.bits);
      const int64_t end_byte = formats::packed_bytes(i + 1, codec.bits);
      for (int64_t byte = packed / 8 * codec.bits, k = 0; byte < end_byte; ++byte, ++k)
        row_codes[byte] = static_cast<uint8_t>(bits >> (8 * k));
      packed = i + 1;
      pending = 0;
    }
    begin += n;
  }
  return status;
}

inline QuantizeStatus quantize_span_ref(const QuantizeProblem& problem, const QuantizeSpan& span) {
  return problem.dtype == DType::f64 ? quantize_span_ref<double>(problem, span)
                                     : quantize_span_ref<float>(problem, span);
}

}  // namespace halfbyte
