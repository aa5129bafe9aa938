// Linear quantization: integers with a scale and a zero point (the QuantizeLinear of ONNX), as plans.
//
//   quantize    q = clamp(rne(x / scale) + zero_point, q_min, q_max): the quotient is correctly rounded, then
//               rounded half to even, before the zero point is added
//   dequantize  y = (q - zero_point) * scale
//   backward    dx = dy where q_min <= rne(x / scale) + zero_point <= q_max, else 0: the straight-through
//               estimator (Bengio et al. 2013) with the inclusive mask of PyTorch
//
// Arithmetic is f32 (f64 for f64 tensors), and results are rounded once to their dtype. Zero points are any
// i32, also outside [q_min, q_max]: rne(x / scale) + zero_point is exact, as in 64 bits, and so is q -
// zero_point, until it is converted to f32 (f64). Infinities saturate. NaN gets the code of 0, which is
// clamp(zero_point, q_min, q_max), and the gradient 0. A scale of 0 gives this code everywhere, and passes
// every gradient except that of NaN. A given scale that is negative or not finite counts as 0, and the status
// counts it. Every device, SIMD target, number of threads and run gives the same bytes.
#pragma once

#include <vector>

#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

struct HALFBYTE_API LinearDescriptor {
  std::vector<int64_t> shape = {};  // of x, y, codes and gradients, in elements; any rank, any extents
  // tensor: one scale. channel: one for each index of `axis`. group: one for `group_size` consecutive
  // elements along `axis`; the last group may be short. For one scale per token, use group along the last
  // axis with group_size = its extent.
  Granularity granularity = Granularity::tensor;
  int axis = -1;                  // channel, group (tensor: see strided); counted from the end where negative
  int64_t group_size = 0;         // group: elements, > 0
  int q_min = -128, q_max = 127;  // within the range of code_dtype; without a zero point around 0
  DType dtype = DType::f32;       // of x, y and gradients: f32, f64, f16, bf16
  DType code_dtype = DType::i8;   // i8, u8, or packed i4, u4
  DType scale_dtype = DType::f32;  // f32, or the same as dtype
  // None: symmetric, the zero point is 0. Else i32, or the same as code_dtype.
  std::optional<DType> zero_point_dtype = {};
  // For quantize; the other operations are given what it wrote. false: scale and zero point are given. true:
  // they are computed and written. scale_rule computes them from the range of the finite values for codes in
  // [q_min, q_max] (absmax or half_range; with a zero point minmax, over the range extended to contain 0).
  // They are rounded to scale_dtype, and the stored scale decides the codes.
  bool computed = false;
  ScaleRule scale_rule = ScaleRule::absmax;
  // What `run` relies on. strided = true: x, y, gradients, and codes of whole bytes may have any strides >= 0
  // that let the axes before `axis` be walked as one axis, and the axes after it as another. No two elements
  // of an output may lie at the same place. strided = false: all tensors are contiguous.
  bool strided = false;
  // What CUDA kernels rely on: the alignment of the addresses of all these tensors, in bytes, a power of two,
  // at least the size of an element of x. 16 is fastest. Less is of x, y and gradients only: codes, which are
  // bytes, then lie anywhere. On the CPU a tensor has the alignment of its own elements, whatever this is.
  int64_t alignment = 16;

  // Descriptors of each granularity. The other fields have their defaults.
  static LinearDescriptor per_tensor(std::vector<int64_t> shape);
  static LinearDescriptor per_channel(std::vector<int64_t> shape, int axis);
  static LinearDescriptor per_group(std::vector<int64_t> shape, int64_t group_size, int axis = -1);
  static LinearDescriptor per_token(std::vector<int64_t> shape);

  // The shape of scale and zero point, which are always contiguous. Per tensor: []. Per channel: [extent of
  // axis]. Per group: `shape`, with the number of groups in place of the extent of `axis`. Throws as
  // check_descriptor.
  std::vector<int64_t> scale_shape() const;
  // Of the codes: 256 for [-128, 127].
  int64_t num_levels() const { return int64_t{q_max} - q_min + 1; }

  bool operator==(const LinearDescriptor&) const = default;
};
// Packed dtypes (i4 in two's complement, u4), for codes and zero points: two elements in a byte along the
// last axis, the first in the low half. Each row of the last axis begins at a byte. After a row of odd
// length, the other half of the byte is 0. Contiguous only.

// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const LinearDescriptor& descriptor);

// One descriptor serves all three plans.

// x -> codes. Nothing overlaps.
struct HALFBYTE_API QuantizeLinear {
  using Descriptor = LinearDescriptor;
  struct Args {
    ConstTensorView x = {};      // read
    TensorView codes = {};       // written
    TensorView scale = {};       // read; written where computed
    TensorView zero_point = {};  // likewise; without data where the descriptor has none
  };
  using Status = QuantizeStatus;
};
// codes, which are any of code_dtype, -> y. Nothing overlaps.
struct HALFBYTE_API DequantizeLinear {
  using Descriptor = LinearDescriptor;
  struct Args {
    ConstTensorView codes = {}, scale = {}, zero_point = {};  // read
    TensorView y = {};                                        // written
  };
  using Status = QuantizeStatus;
};
// x, dy -> dx. dx may be the same memory as dy.
struct HALFBYTE_API QuantizeLinearBackward {
  using Descriptor = LinearDescriptor;
  struct Args {
    ConstTensorView x = {}, dy = {}, scale = {}, zero_point = {};  // read
    TensorView dx = {};                                            // written
  };
  using Status = QuantizeStatus;
};

using QuantizeLinearPlan = Plan<QuantizeLinear>;
using DequantizeLinearPlan = Plan<DequantizeLinear>;
using QuantizeLinearBackwardPlan = Plan<QuantizeLinearBackward>;
extern template class Plan<QuantizeLinear>;
extern template class Plan<DequantizeLinear>;
extern template class Plan<QuantizeLinearBackward>;

}  // namespace halfbyte
