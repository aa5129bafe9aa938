// The operations, one function each. All are deterministic: the same bytes for every number of
// threads, SIMD target and device (but for the payload of a NaN that decoding with a NaN or infinite scale
// gives).
//
// They run where the dense tensor (x, y) is: all other pointers of the call but `range` are memory of the
// same device. On a CUDA device an operation is enqueued on Execution::stream; those that return what they
// found in the data wait for it, the others return at once. Error(device) where the device cannot run it;
// there is no falling back. Alignment on a CUDA device: of each array to its element; 16 bytes are fastest.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "halfbyte/format.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// How an operation runs.
struct Execution {
  int num_threads = 0;     // CPU: 0: all; 1: on the calling thread only
  void* stream = nullptr;  // CUDA: the CUstream of the device to enqueue on; null: the default stream
};

// Non-owning parts of a quantized matrix; see QuantShape for the layout of each.
// Parts that the spec does not have are null.
struct QuantizedView {
  QuantSpec spec;
  int64_t rows = 0;
  int64_t cols = 0;
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  uint8_t* zeros = nullptr;
  void* biases = nullptr;
};

// What a kernel can only find while it runs.
struct QuantizeStatus {
  int64_t num_nonfinite = 0;     // NaN or Inf elements; they get the code of zero
  int64_t first_nonfinite = -1;  // row-major index of the first
  // Groups whose scale or bias is beyond the largest finite value of spec.scale_dtype, or so large
  // that a code decodes to infinity.
  int64_t num_unheld_scales = 0;
  // Groups whose stored scale keeps fewer than 8 significant bits: below 2^-17 for f16, 2^-126 for bf16.
  int64_t num_coarse_scales = 0;
  // Of scales and zero points that were given: negative or not finite; outside the range of the codes.
  int64_t num_invalid_scales = 0;
  int64_t num_invalid_zero_points = 0;
  bool ok() const {
    return num_nonfinite == 0 && num_unheld_scales == 0 && num_invalid_scales == 0 &&
           num_invalid_zero_points == 0;
  }
};

// Smallest and largest finite value of x (contiguous, floating); min = +inf, max = -inf where there
// is none, so that ranges merge by min and max.
struct ValueRange {
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  int64_t num_nonfinite = 0;
  int64_t first_nonfinite = -1;  // row-major index
};
HALFBYTE_API ValueRange value_range(const TensorView& x, Execution execution = {});

// Quantizes x [..., cols] (f32, f16, bf16 or f64; contiguous) into `out` (out.rows = product of the
// leading extents). spec.double_quant must be false: see double_quantize. Nothing overlaps.
// Per group: scale from min, max by spec.scale_rule; code = clamp(rne(x / scale) + zero_point) for
// integers, nearest table value (ties to the lower; fp4: toward zero; fp4_e2m1: to even) for tables.
// f64 input is computed in f64, everything else in f32. Throws Error(usage) for bad arguments only;
// what the data brings is in the status.
// Granularity::tensor: `range` gives the values of the whole tensor where x is only a block of it.
HALFBYTE_API QuantizeStatus quantize(const TensorView& x, const QuantizedView& out, Execution execution = {},
                                     const ValueRange* range = nullptr);

// Decodes into y [..., cols] of dtype f32, f16, bf16 or f64 (contiguous, rows as in.rows).
// integer: (q - zp) * s; affine: q * s + b (two roundings); table: v * s. Computed in f32 (f64 if
// y is f64), rounded once to the dtype of y. Nothing overlaps.
HALFBYTE_API void dequantize(const QuantizedView& in, const TensorView& y, Execution execution = {});

// In host memory. Double quantization of scales (QLoRA, section 3; the layout of bitsandbytes): offset = mean
// of the scales, r = scale - offset, blocks of 256: absmax, code = nearest of a signed dynamic 8-bit map to
// r / absmax. The mean is the f64 sum in a fixed order (blocks of 4096: 32 strided partial sums, a
// halving tree; blocks in order) divided by n, rounded to f32.
inline constexpr int64_t kDoubleQuantBlock = 256;
struct DoubleQuantizedView {
  uint8_t* codes = nullptr;  // [n]
  float* absmax = nullptr;   // [ceil(n / 256)]
  float offset = 0;          // set by double_quantize
};
HALFBYTE_API void double_quantize(const float* scales, int64_t n, DoubleQuantizedView& out);
// map: 256 entries; null: double_quant_map()
HALFBYTE_API void double_dequantize(const DoubleQuantizedView& in, int64_t n, float* scales,
                                    const float* map = nullptr);
HALFBYTE_API const float* double_quant_map();

// An owning quantized matrix in host memory, as `quantize` makes it.
struct QuantizedTensor {
  QuantSpec spec;
  std::vector<int64_t> shape;  // of the original tensor
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;  // bytes of spec.scale_dtype; u8 codes if spec.double_quant
  std::vector<uint8_t> zeros;
  std::vector<uint8_t> biases;
  std::vector<float> scales_absmax;  // double quantization only
  float scales_offset = 0;
};

// One-line forms. quantize throws Error(bad_input) on non-finite data, naming count and first
// index, and where spec.scale_dtype cannot hold a scale.
HALFBYTE_API QuantizedTensor quantize(const TensorView& x, const QuantSpec& spec, Execution execution = {});
HALFBYTE_API void dequantize(const QuantizedTensor& q, const TensorView& y, Execution execution = {});

}  // namespace halfbyte
