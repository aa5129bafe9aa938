// Quantized weights from codes that were made elsewhere: by integer plans, or in flat buffers of 4-bit codes
// with zero points in floating point.
#pragma once

#include <cstdint>
#include <vector>

#include "halfbyte/ops.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// Codes, scale and zero point as QuantizeLinear writes them, to a weight that products multiply, exactly:
// (q - zero_point) * scale is what it decodes to. i4 and u4 become int4, i8 and u8 int8, asymmetric where
// there is a zero point or the codes are unsigned. All are contiguous on one device, of the dtypes and shapes
// of the descriptor; zero_point has no data where it has none. The result is on that device; waits for
// execution.stream.
//
// Granularity: tensor; channel along axis 0 of two; or group along the last axis. Throws Error(usage), naming
// the reason, for other axes and for scales in f64. Error(bad_input), naming the first, for codes outside of
// [q_min, q_max], zero points outside of the range of code_dtype, and scales that are negative or not finite.
HALFBYTE_API QuantizedTensor from_linear(const LinearDescriptor& descriptor, const ConstTensorView& codes,
                                         const ConstTensorView& scale, const ConstTensorView& zero_point = {},
                                         Execution execution = {});

// The reverse: tensors for integer plans, and the descriptor that they fit.
struct LinearCodes {
  LinearDescriptor descriptor;
  Tensor codes;       // i4 of int4, i8 of other integers
  Tensor scale;       // of the shape of descriptor.scale_shape()
  Tensor zero_point;  // of the dtype of the codes, asymmetric weights only
};
// Exact for every integer format. Throws Error(usage) for other formats, for double quantization (see
// QuantizedTensor::expanded), and for Granularity::flat with groups that do not divide the rows. Waits for
// execution.stream.
HALFBYTE_API LinearCodes to_linear(const QuantizedTensor& q, Execution execution = {});

// A buffer of n codes of 4 bits, in groups of `group_size` consecutive ones, the last of which may be short.
// Element 2i is in the low half of byte i. It decodes to
//   int4, symmetric:   (code - 8) * scale
//   int4, asymmetric:  (code - zero) * scale, the zero point no integer; without zeros code * scale
//   nf4:               value * scale, by the scale that is stored, however it was found
struct FlatCodes {
  Format format = Format::int4;  // int4, nf4
  bool symmetric = true;         // int4
  int64_t group_size = 64;
  ConstTensorView codes = {};   // u8, ceil(n / 2)
  ConstTensorView scales = {};  // f32, f64, f16 or bf16, one a group
  ConstTensorView zeros = {};   // of the same dtype, likewise; asymmetric only
};
struct Conversion {
  QuantizedTensor weight;
  // Largest difference between what the weight and what the buffer decodes to, computed in the dtype of its
  // scales (f32 for f16 and bf16), and the first element that has it.
  double max_error = 0;
  int64_t max_error_index = 0;
};
// A weight of this shape, with groups across rows (Granularity::flat) and scales in f32: int4 and nf4 as they
// are, asymmetric int4 as affine4 with the bias -zero * scale. All is in host memory. Throws Error(usage) for
// what does not fit together, and Error(bad_input), naming the first, for scales and zero points that are not
// finite or that f32 cannot hold.
HALFBYTE_API Conversion from_flat(const FlatCodes& flat, std::vector<int64_t> shape);

}  // namespace halfbyte
