// Plans of `quantize` and `dequantize` (ops.hpp, which has the formulas): for matrices that are encoded or
// decoded many times. They give the bytes of the functions and, where those wait for the device or look for
// their kernel in each call, do neither.
#pragma once

#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

struct HALFBYTE_API QuantizeDescriptor {
  // double_quant must be false: double_quantize makes the 8-bit scales, double_dequantize decodes them,
  // outside of plans.
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;  // of x and y: f32, f64, f16, bf16
  // What `run` may rely on: of the addresses of x, y and codes, in bytes, a power of two, at least the size
  // of an element; 16 is fastest. Scales and biases are aligned to their elements.
  int64_t alignment = 16;

  bool operator==(const QuantizeDescriptor&) const = default;
};

// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const QuantizeDescriptor& descriptor);

// x -> out. spec.scale_dtype is f64 for f64 data only. Granularity::tensor: of all of x. The status is what
// `quantize` returns. Nothing overlaps.
struct HALFBYTE_API Quantize {
  using Descriptor = QuantizeDescriptor;
  struct Args {
    TensorView x;       // read: [..., cols], contiguous, `rows` the product of the other extents
    QuantizedView out;  // written: spec, rows and cols of the descriptor; memory of the plan's device
  };
  using Status = QuantizeStatus;
};
// in -> y. There is nothing to find: the status is that of no data, whatever the workspace holds; it waits
// for the stream all the same. Nothing overlaps.
struct HALFBYTE_API Dequantize {
  using Descriptor = QuantizeDescriptor;
  struct Args {
    QuantizedView in;  // read, else as above
    TensorView y;      // written
  };
  using Status = QuantizeStatus;
};

using QuantizePlan = Plan<Quantize>;
using DequantizePlan = Plan<Dequantize>;
extern template class Plan<Quantize>;
extern template class Plan<Dequantize>;

}  // namespace halfbyte
