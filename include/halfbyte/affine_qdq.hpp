// Plans for training the scales and biases of an affine quantization while its codes stay fixed (DWQ).
//
//   init      codes, scales and biases of a matrix, group by group: what training starts from
//   qdq       y = q * scale + bias, two roundings in f32, then one to the dtype of y
//   backward  dscale = sum of q * dy, dbias = sum of dy over the elements of a group, in one pass over dy;
//             optionally a step of Adam with them, in the same pass
//
// Matrices are [rows, cols], with groups of `group_size` elements along a row; the last group may be short.
// Tensors may have any leading axes that make up the rows: none for one row, so that flat buffers of whole
// groups are a matrix of one row. A last axis of one element (a scale for each row) may be left out.
// Arithmetic is f32. Sums have the order of a binary tree over the elements of the group (pairwise), so every
// device, SIMD target, number of threads and run gives the same bytes. A NaN in sums and parameters is always
// the same NaN. docs/training.md shows the loop.
#pragma once

#include <vector>

#include "halfbyte/format.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

// How a code is rounded from (w - bias) / scale.
enum class AffineRounding : uint8_t { half_even, half_away };

// One description for all three plans.
struct HALFBYTE_API AffineQdqDescriptor {
  int64_t rows = 0, cols = 0;
  int bits = 4;                    // of a code: 2, 3, 4, 5, 6, 8; codes are 0 .. num_levels() - 1
  int64_t group_size = 64;         // elements, > 0
  bool packed = true;              // codes as in QuantShape; false: one code in each byte
  DType dtype = DType::f32;        // of w, y, dy: f32, f16, bf16
  DType scale_dtype = DType::f32;  // of scales and biases: f32, f16, bf16; gradients are f32
  // For Init. minmax: scale = (max - min) / (num_levels() - 1) and bias = min; a constant group has scale
  // = 1. The stored scale and bias decide the codes. mlx_edge: the rule of MLX (its CPU build), in which 0
  // and the larger edge are exact. The scale and bias before they are rounded to scale_dtype decide the
  // codes.
  ScaleRule scale_rule = ScaleRule::minmax;
  AffineRounding rounding = AffineRounding::half_even;  // Init. MLX: CPU half_even, Metal and CUDA half_away
  // For Init. Afterwards, replaces scale and bias by those that minimise the sum of (q * scale + bias - w)^2
  // over the codes, rounded to scale_dtype, if that makes the sum smaller.
  bool refit = false;
  bool adam = false;  // Backward: with a step of Adam
  // Alignment of the addresses of w, y and dy, in bytes, which `run` relies on. A power of two, at least the
  // size of an element of dtype; 16 is fastest. Everything else is aligned to its elements: codes lie at any
  // address, but those of AffineQdq as QuantizeDescriptor has it. Backward reads them fastest at multiples
  // of 8.
  int64_t alignment = 16;
  int n_bins = 0;  // levels: 2 .. 2^bits; 0: 2^bits

  int num_levels() const { return n_bins == 0 ? 1 << bits : n_bins; }
  // Shape of the codes (u8): [rows, bytes of a row], with one code in each byte if not packed. Shape of
  // scales, biases, their gradients and moments: [rows, groups of a row]. Both throw as check_descriptor.
  std::vector<int64_t> code_shape() const;
  std::vector<int64_t> scale_shape() const;

  bool operator==(const AffineQdqDescriptor&) const = default;
};

// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const AffineQdqDescriptor& descriptor);

// w -> codes, scales, biases. Elements that are not finite get the code of 0 and affect nothing else. The
// status counts them, and counts scales as `quantize` does. Nothing overlaps.
struct HALFBYTE_API AffineInit {
  using Descriptor = AffineQdqDescriptor;
  struct Args {
    ConstTensorView w = {};                           // read
    TensorView codes = {}, scales = {}, biases = {};  // written
  };
  using Status = QuantizeStatus;
};

// codes, scales, biases -> y. It has nothing to report: the status is that of empty data. Nothing overlaps.
struct HALFBYTE_API AffineQdq {
  using Descriptor = AffineQdqDescriptor;
  struct Args {
    ConstTensorView codes = {}, scales = {}, biases = {};  // read
    TensorView y = {};                                     // written
  };
  using Status = QuantizeStatus;
};

// A step of Adam (Kingma and Ba, 2015, algorithm 1). For each parameter p with gradient g, each operation
// rounded to f32, from left to right:
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   p = p - step_size * m / (sqrt(v) / root + epsilon)
// where step_size = learning_rate / (1 - beta1^step), root = sqrt(1 - beta2^step), 1 - beta1 and 1 - beta2
// are computed in f64 and, like beta1, beta2 and epsilon, rounded once: the formula of PyTorch.
struct HALFBYTE_API AdamStep {
  double learning_rate = 1e-3;        // finite
  double beta1 = 0.9, beta2 = 0.999;  // in [0, 1)
  double epsilon = 1e-8;              // finite, >= 0
  int64_t step = 1;                   // number of this step, from 1
  bool operator==(const AdamStep&) const = default;
};

// codes, dy -> dscales, dbiases. With descriptor.adam it also steps the trained scales and biases, which are
// f32 masters. With scale_dtype f32, these are the ones that AffineQdq decodes with. It has nothing to
// report: the status is that of empty data. Nothing overlaps. A run captured in a graph repeats the same
// AdamStep.
struct HALFBYTE_API AffineQdqBackward {
  using Descriptor = AffineQdqDescriptor;
  struct Args {
    ConstTensorView codes = {}, dy = {};  // read
    // Written: f32, scale_shape(). Either may be without data; with adam both may.
    TensorView dscales = {}, dbiases = {};
    // Only with adam, otherwise without data: f32, scale_shape(), read and written. The moments are 0 before
    // step 1.
    TensorView scales = {}, biases = {};
    TensorView scale_m = {}, scale_v = {}, bias_m = {}, bias_v = {};
    AdamStep adam = {};
  };
  using Status = QuantizeStatus;
};

using AffineInitPlan = Plan<AffineInit>;
using AffineQdqPlan = Plan<AffineQdq>;
using AffineQdqBackwardPlan = Plan<AffineQdqBackward>;
extern template class Plan<AffineInit>;
extern template class Plan<AffineQdq>;
extern template class Plan<AffineQdqBackward>;

}  // namespace halfbyte
