// Plans of `quantize` and `dequantize`, for matrices that are encoded or decoded many times. ops.hpp has the
// formulas. The plans give the same bytes as the functions. Unlike the functions, they neither wait for the
// device nor look for their kernel in each call.
#pragma once

#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

struct HALFBYTE_API QuantizeDescriptor {
  // double_quant must be false: 8-bit scales are made by double_quantize and decoded by double_dequantize,
  // outside of plans.
  QuantSpec spec = {};
  int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;  // of x and y: f32, f64, f16, bf16
  // Alignment of the addresses of x, y and codes, in bytes, as LinearDescriptor has it. Scales and biases are
  // aligned to their elements.
  int64_t alignment = 16;
  Encoding encoding = {};  // of quantize

  bool operator==(const QuantizeDescriptor&) const = default;
};

// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const QuantizeDescriptor& descriptor);

// x -> out. spec.scale_dtype may be f64 for f64 data only. With Granularity::tensor, the range is that of all
// of x. The status is what `quantize` returns. Nothing overlaps.
struct HALFBYTE_API Quantize {
  using Descriptor = QuantizeDescriptor;
  struct Args {
    ConstTensorView x = {};  // read: [..., cols], contiguous, `rows` the product of the other extents
    QuantizedView out = {};  // written: spec, rows and cols of the descriptor; memory of the plan's device
  };
  using Status = QuantizeStatus;
};
// in -> y. It has nothing to report: the status is that of empty data, whatever the workspace holds. Reading
// it still waits for the stream. Nothing overlaps.
struct HALFBYTE_API Dequantize {
  using Descriptor = QuantizeDescriptor;
  struct Args {
    ConstQuantizedView in = {};  // read; otherwise as above
    TensorView y = {};           // written
  };
  using Status = QuantizeStatus;
};

using QuantizePlan = Plan<Quantize>;
using DequantizePlan = Plan<Dequantize>;
extern template class Plan<Quantize>;
extern template class Plan<Dequantize>;

}  // namespace halfbyte
