// The operations, one function each. All are deterministic: every number of threads, SIMD target and device
// gives the same bytes. The one exception is the payload of a NaN that comes from decoding with a NaN or
// infinite scale.
//
// An operation runs on the device of the dense tensor (x or y). All other pointers of the call, except
// `range`, must be memory of the same device. On a CUDA device the operation is enqueued on
// Execution::stream. Operations that return what they found in the data wait for the stream; the others
// return at once. If the device cannot run an operation, that is an Error(device); nothing falls back. On a
// CUDA device each array must be aligned to its elements; 16 bytes are fastest.
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

// The parts of a quantized matrix, non-owning. QuantShape describes each. Parts that the spec does not have
// are null.
struct QuantizedView {
  QuantSpec spec;
  int64_t rows = 0;
  int64_t cols = 0;
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  uint8_t* zeros = nullptr;
  void* biases = nullptr;
};

// What an operation finds in the data while it runs.
struct QuantizeStatus {
  int64_t num_nonfinite = 0;     // NaN or Inf elements; they get the code of zero
  int64_t first_nonfinite = -1;  // row-major index of the first
  // Groups whose scale or bias is larger than the largest finite value of spec.scale_dtype, or so large that
  // a code decodes to infinity.
  int64_t num_unheld_scales = 0;
  // Groups whose stored scale keeps fewer than 8 significant bits: below 2^-17 for f16, 2^-126 for bf16.
  int64_t num_coarse_scales = 0;
  // Given scales that are negative or not finite, and learned zero points outside the range of the codes.
  int64_t num_invalid_scales = 0;
  int64_t num_invalid_zero_points = 0;
  bool ok() const {
    return num_nonfinite == 0 && num_unheld_scales == 0 && num_invalid_scales == 0 &&
           num_invalid_zero_points == 0;
  }
};

// Smallest and largest finite value of x (contiguous, floating). If there is none, min = +inf and max = -inf,
// so ranges merge by min and max.
struct ValueRange {
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  int64_t num_nonfinite = 0;
  int64_t first_nonfinite = -1;  // row-major index
};
HALFBYTE_API ValueRange value_range(const TensorView& x, Execution execution = {});

// Quantizes x [..., cols] (f32, f16, bf16 or f64; contiguous) into `out` (out.rows = product of the
// leading extents). spec.double_quant must be false: see double_quantize. Nothing overlaps.
// In each group, the scale rule of `encoding` computes the scale from min and max. The code of an integer
// format is clamp(rne(x / scale) + zero_point). The code of a table format is the nearest value of the code
// book (ties go to the lower value; fp4: toward zero; fp4_e2m1: to the even code). f64 input is computed in
// f64, everything else in f32. Throws Error(usage) for bad arguments only; the status reports what was found
// in the data. With Granularity::tensor, if x is only a block of the tensor, `range` gives the range of the
// whole tensor.
HALFBYTE_API QuantizeStatus quantize(const TensorView& x, const QuantizedView& out,
                                     const Encoding& encoding = {}, Execution execution = {},
                                     const ValueRange* range = nullptr);

// Decodes into y [..., cols] of dtype f32, f16, bf16 or f64 (contiguous, rows as in.rows).
// integer: (q - zp) * s; affine: q * s + b (two roundings); table: v * s. Computed in f32 (f64 if
// y is f64), rounded once to the dtype of y. Nothing overlaps.
HALFBYTE_API void dequantize(const QuantizedView& in, const TensorView& y, Execution execution = {});

// Double quantization of scales (QLoRA, section 3; the layout of bitsandbytes), in host memory. offset is the
// mean of the scales, and r = scale - offset. Each block of 256 has its absmax; the code is the entry of a
// signed dynamic 8-bit map that is nearest to r / absmax. The mean is an f64 sum in a fixed order (blocks of
// 4096, each 32 strided partial sums in a halving tree; then the blocks in order), divided by n and rounded
// to f32.
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

// One-line forms. quantize throws Error(bad_input) if the data is not finite, naming the count and the first
// index, or if spec.scale_dtype cannot hold a scale.
HALFBYTE_API QuantizedTensor quantize(const TensorView& x, const QuantSpec& spec,
                                      const Encoding& encoding = {}, Execution execution = {});
HALFBYTE_API void dequantize(const QuantizedTensor& q, const TensorView& y, Execution execution = {});

}  // namespace halfbyte
