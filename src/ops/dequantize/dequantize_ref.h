// The scalar reference of `dequantize`: what every backend must equal to the byte.
#pragma once

#include "formats/bits.h"
#include "ops/dequantize/dequantize.h"

namespace halfbyte {

template <class F>
void dequantize_span_ref(const DequantizeProblem& problem, const DequantizeSpan& span) {
  const formats::Codec& codec = problem.codec;
  const uint8_t* row_codes = problem.codes + span.row * problem.shape.row_bytes;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const GroupDecode<F> group = load_group<F>(problem, group_of(problem, span.row, i));
    const int code = formats::get_code(row_codes, i, codec.bits);
    const F value = formats::decode(code, group.scale, group.bias, group.zero_point, codec);
    const int64_t index = span.row * problem.shape.cols + i;
    switch (problem.dtype) {
      case DType::f32:
        static_cast<float*>(problem.y)[index] = static_cast<float>(value);
        break;
      case DType::f16:
        static_cast<uint16_t*>(problem.y)[index] = formats::to_f16(value);
        break;
      case DType::bf16:
        static_cast<uint16_t*>(problem.y)[index] = formats::to_bf16(value);
        break;
      default:
        static_cast<double*>(problem.y)[index] = static_cast<double>(value);
        break;
    }
  }
}

inline void dequantize_span_ref(const DequantizeProblem& problem, const DequantizeSpan& span) {
  return problem.dtype == DType::f64 ? dequantize_span_ref<double>(problem, span)
                                     : dequantize_span_ref<float>(problem, span);
}

}  // namespace halfbyte
