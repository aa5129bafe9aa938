// Plans of fake quantization, for quantization-aware training. A tensor is rounded to the values that a
// quantized tensor could hold, and keeps its dtype. Gradients pass through the rounding.
//
//   forward          q = clamp(rne(x / scale) + zero_point, q_min, q_max), y = (q - zero_point) * scale
//   of a table       y = value * scale, with the value of the table nearest to x / scale; ties are those of
//                    the format
//   of nvfp4, mxfp4  the same, with scales of 8 bits. Where they are computed, y of a finite x is, bit by
//   bit,
//                    what dequantize makes of the codes that quantize gives
//   backward         dx = dy where q_min <= rne(x / scale) + zero_point <= q_max, else +0; of a table where
//                    lowest value <= x / scale <= highest value: the straight-through estimator (Bengio et
//                    al. 2013) with the inclusive mask of PyTorch. Of nvfp4 and mxfp4 dx = dy everywhere, as
//                    in torchao (torchao/prototype/qat/nvfp4.py), which needs no plan: computed scales leave
//                    x outside only by their rounding, by 1/6 of the highest value at most
//
// Arithmetic is f32 (f64 for f64 tensors), with correctly rounded quotients; results are rounded once to the
// dtype. Integer zero points are any i32, and sums with them exact, as in quantize_linear.hpp. The scale is
// the stored one, rounded to its dtype: quantize_linear and dequantize_linear with it give exactly y.
// Infinities saturate. NaN stays NaN, bit by bit, and has gradient 0. A code of zero gives +0. A scale of 0
// gives 0 everywhere (-0 where the zero point is above q_max), and passes every gradient except that of NaN.
// A given scale that is negative or not finite counts as 0, and the status counts it. Every device, SIMD
// target, number of threads and run gives the same bytes.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "halfbyte/format.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

struct HALFBYTE_API FakeQuantizeDescriptor {
  std::vector<int64_t> shape = {};  // of x, y and gradients, in elements; any rank, any extents
  // As LinearDescriptor has them.
  Granularity granularity = Granularity::tensor;
  int axis = -1;
  int64_t group_size = 0;
  // Unset: integers in [q_min, q_max]. Set: a format of kind table, without zero points: nf4, fp4, fp4_e2m1,
  // lut4 (its values are `table`, ascending), nvfp4 or mxfp4. The last two are for forward only, with groups
  // and scale_dtype of their own (FormatInfo), along any axis, and without eps, observer and mask.
  std::optional<Format> format = {};
  std::array<float, 16> table = {};
  // q_max - q_min in [2, 255], within [-128, 255]; without a zero point around 0.
  int q_min = -8, q_max = 7;
  DType dtype = DType::f32;        // of x, y and gradients: f32, f64, f16, bf16
  DType scale_dtype = DType::f32;  // f32, or the same as dtype; of nvfp4 f8_e4m3, of mxfp4 f8_e8m0
  // Unset: the zero point is 0. i32: integer zero points. f32 (f64 for f64 tensors): learned zero points,
  // which are rounded half to even and clamped to [q_min, q_max] when used; NaN counts as q_min. The status
  // counts those that were clamped.
  std::optional<DType> zero_point_dtype = {};
  // For forward; backward is given what it wrote. false: scale and zero point are given. true: they are
  // computed from the range of the finite values of x, and written. scale_rule is absmax or half_range;
  // minmax with a zero point, which must be i32; absmax for tables. No scale is less than eps.
  bool computed = false;
  ScaleRule scale_rule = ScaleRule::absmax;
  double eps = 0;
  // With `computed`: x is observed first (kinds min_max, moving_average), and scales come from the range in
  // the observer's state after that. A group that has seen nothing gets scale 0 and counts as an invalid
  // scale.
  std::optional<ObserverConfig> observer = {};
  // forward writes the mask of the gradient, one bit per element; backward reads it instead of x, but learned
  // backward, which needs x. See mask_shape().
  bool mask = false;
  // For learned backward: factor of the gradients of scale and zero point. LSQ (arXiv:1902.08153) uses 1 /
  // sqrt(n * q_max), where n is the number of elements that share a scale.
  double gradient_scale = 1;
  int64_t alignment = 16;  // of x, y and gradients, as LinearDescriptor has it
  // With `computed`, of nvfp4: the global scale is that of the largest magnitude of x (has_global_scale), and
  // written; x is read twice. false: it is given, and a scale that is too large for it becomes the largest
  // f8_e4m3, 448. With one that is not positive and finite all scales count as invalid, and as 0.
  bool computed_global_scale = false;

  // The shape of scale, zero point, their gradients and the observer's state, as in LinearDescriptor. Throws
  // as check_descriptor.
  std::vector<int64_t> scale_shape() const;
  // The shape of the mask (u8): `shape` with ceil(K / 8) in place of the last extent K ([1] for []). Element
  // i of a row is bit i % 8 of byte i / 8 of that row. The bits after the last element are 0.
  std::vector<int64_t> mask_shape() const;
  // Of the codes: 16 for [-8, 7], and of a table.
  int64_t num_levels() const { return format ? 16 : int64_t{q_max} - q_min + 1; }
  DType state_dtype() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  bool operator==(const FakeQuantizeDescriptor&) const = default;
};
// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const FakeQuantizeDescriptor& descriptor);

// One descriptor serves all three plans: scales and zero points that forward computed are given to the
// others.

// x -> y. y may be the same memory as x; nothing else overlaps. All tensors are contiguous. The status is
// that of quantize_linear.
struct HALFBYTE_API FakeQuantize {
  using Descriptor = FakeQuantizeDescriptor;
  struct Args {
    ConstTensorView x = {};      // read
    TensorView y = {};           // written
    TensorView scale = {};       // read; written where computed
    TensorView zero_point = {};  // likewise; without data where the descriptor has none
    TensorView mask = {};        // written; without data where the descriptor has none
    // The observer's state as in observe.hpp, read and written; without data where the descriptor has none.
    TensorView min = {}, max = {}, num_batches = {};
    // f32 [1]: read; written where computed; without data but of nvfp4.
    TensorView global_scale = {};
  };
  using Status = QuantizeStatus;
};
// The straight-through estimator: x, dy -> dx. dx may be the same memory as dy. With the descriptor's `mask`,
// the mask is read, and x, scale and zero_point have no data; without it, the mask has no data.
struct HALFBYTE_API FakeQuantizeBackward {
  using Descriptor = FakeQuantizeDescriptor;
  struct Args {
    ConstTensorView x = {}, mask = {}, dy = {}, scale = {}, zero_point = {};  // read
    TensorView dx = {};                                                       // written
  };
  using Status = QuantizeStatus;
};
// x, dy -> dx and the gradients of scale and zero point (LSQ, arXiv:1902.08153; LSQ+, arXiv:2004.09576). dx
// may be the same memory as dy. Let v = x / scale, and let r be v rounded as forward rounds it. An element
//   that passes (see backward)  has dx = dy and adds dy * (r - v) to the sum of its scale
//   that does not               has dx = +0, adds dy * bound to it, and dy to the sum of its zero point
// where bound is the nearer of q_min - zero_point and q_max - zero_point, each rounded once, or for a table
// its lowest or highest value. NaN adds nothing, and neither does an element with scale 0. Then, with
// rounding after each operation,
//   dscale = scale_sum * gradient_scale        dzero_point = -(scale * zero_sum) * gradient_scale
// The sums are pairwise over the elements of the group in row-major order: S(i, 2m) = S(i, m) + S(i + m, m),
// with m a power of two and i a multiple of 2m. A gradient is never -0, and NaN is the quiet NaN without a
// sign. The status counts invalid scales and zero points.
struct HALFBYTE_API FakeQuantizeLearnedBackward {
  using Descriptor = FakeQuantizeDescriptor;
  struct Args {
    ConstTensorView x = {}, dy = {}, scale = {}, zero_point = {};  // read
    TensorView dx = {};                                            // written
    TensorView dscale = {};                                        // written: scale_shape(), state_dtype()
    TensorView dzero_point = {};  // likewise, of a learned zero point; else without data
  };
  using Status = QuantizeStatus;
};

using FakeQuantizePlan = Plan<FakeQuantize>;
using FakeQuantizeBackwardPlan = Plan<FakeQuantizeBackward>;
using FakeQuantizeLearnedBackwardPlan = Plan<FakeQuantizeLearnedBackward>;
extern template class Plan<FakeQuantize>;
extern template class Plan<FakeQuantizeBackward>;
extern template class Plan<FakeQuantizeLearnedBackward>;

}  // namespace halfbyte
