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
#include <optional>
#include <vector>

#include "halfbyte/device.hpp"
#include "halfbyte/format.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// How an operation runs.
struct Execution {
  int num_threads = 0;     // CPU: 0: all, but 1 for small work; 1: on the calling thread only
  void* stream = nullptr;  // CUDA: the CUstream of the device to enqueue on; null: the default stream
};

// The parts of a quantized matrix, non-owning: QuantizedView, or of what is only read ConstQuantizedView.
// QuantShape describes each. Parts that the spec does not have are null.
template <class Data>  // void, const void
struct BasicQuantizedView {
  QuantSpec spec;
  int64_t rows = 0;
  int64_t cols = 0;
  ConstAs<Data, uint8_t>* codes = nullptr;
  Data* scales = nullptr;
  ConstAs<Data, uint8_t>* zeros = nullptr;
  Data* biases = nullptr;
  ConstAs<Data, float>* global_scale = nullptr;

  operator BasicQuantizedView<const void>() const requires(!std::is_const_v<Data>) {
    return {spec, rows, cols, codes, scales, zeros, biases, global_scale};
  }
};
using QuantizedView = BasicQuantizedView<void>;
using ConstQuantizedView = BasicQuantizedView<const void>;

// What an operation finds in the data while it runs.
struct QuantizeStatus {
  int64_t num_nonfinite = 0;     // NaN or Inf elements; they get the code of zero
  int64_t first_nonfinite = -1;  // row-major index of the first
  // Groups whose scale or bias is larger than the largest finite value of spec.scale_dtype, or so large that
  // a code decodes to infinity.
  int64_t num_unheld_scales = 0;
  // Groups whose stored scale keeps fewer than 8 significant bits: below 2^-17 for f16, 2^-126 for bf16. Not
  // of scales of 8 bits, which never have so many.
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
HALFBYTE_API ValueRange value_range(const ConstTensorView& x, Execution execution = {});

// Of searched scales (Encoding::search): how much the squared error of each input channel counts. Element i
// of the row-major x has weights[(first + i) % count], so that `count` is the number of columns of the
// weight, and `first`, in [0, count), is 0 where x begins with a row. The weights are finite and not
// negative, on the device of x. Of scales that are searched without weights every error counts alike.
struct Importance {
  const float* weights = nullptr;
  int64_t count = 0;
  int64_t first = 0;
};

// Quantizes x [..., cols] (f32, f16, bf16 or f64; contiguous) into `out` (out.rows = product of the
// leading extents). spec.double_quant must be false: see double_quantize. Nothing overlaps.
// In each group, the scale rule of `encoding` computes the scale from min and max. The code of an integer
// format is clamp(rne(x / scale) + zero_point). The code of a table format is the nearest value of the code
// book (ties go to the lower value; fp4: toward zero; fp4_e2m1: to the even code). f64 input is computed in
// f64, everything else in f32. Throws Error(usage) for bad arguments only; the status reports what was found
// in the data. With Granularity::tensor and for nvfp4, if x is only a block of the tensor, `range` gives the
// range of the whole tensor; for nvfp4 it may be that of several tensors which share their global scale.
HALFBYTE_API QuantizeStatus quantize(const ConstTensorView& x, const QuantizedView& out,
                                     const Encoding& encoding = {}, Execution execution = {},
                                     const ValueRange* range = nullptr, const Importance& importance = {});

// Decodes into y [..., cols] of dtype f32, f16, bf16 or f64 (contiguous, rows as in.rows).
// integer: (q - zp) * s; affine: q * s + b (two roundings); table: v * s; nvfp4: v * (s / global scale).
// Computed in f32 (f64 if y is f64), rounded once to the dtype of y. Nothing overlaps.
HALFBYTE_API void dequantize(const ConstQuantizedView& in, const TensorView& y, Execution execution = {});

// Double quantization of scales (QLoRA, section 3; the layout of bitsandbytes), in host memory. offset is the
// mean of the scales, and r = scale - offset. Each block of 256 has its absmax; the code is the entry of a
// signed dynamic 8-bit map that is nearest to r / absmax. The mean is an f64 sum in a fixed order (blocks of
// 4096, each 32 strided partial sums in a halving tree; then the blocks in order), divided by n and rounded
// to f32.
inline constexpr int64_t kDoubleQuantBlock = 256;
template <class Data>  // void, const void
struct BasicDoubleQuantizedView {
  ConstAs<Data, uint8_t>* codes = nullptr;  // [n]
  ConstAs<Data, float>* absmax = nullptr;   // [ceil(n / 256)]
  float offset = 0;                         // set by double_quantize

  operator BasicDoubleQuantizedView<const void>() const requires(!std::is_const_v<Data>) {
    return {codes, absmax, offset};
  }
};
using DoubleQuantizedView = BasicDoubleQuantizedView<void>;
using ConstDoubleQuantizedView = BasicDoubleQuantizedView<const void>;
HALFBYTE_API void double_quantize(const float* scales, int64_t n, DoubleQuantizedView& out);
// map: 256 entries; null: double_quant_map()
HALFBYTE_API void double_dequantize(const ConstDoubleQuantizedView& in, int64_t n, float* scales,
                                    const float* map = nullptr);
HALFBYTE_API const float* double_quant_map();

template <class Data>
struct BasicWeightView;  // qgemm.hpp
using WeightView = BasicWeightView<void>;
class PackedTensor;  // likewise

// A quantized weight that owns its memory, on one device: the parts in the native layout, as QuantShape
// describes them for rows() and cols(). A part that the spec does not have is empty. Copies of the object
// share the memory; the last one frees it. Work on it must be done by then. Parts may be replaced, by tensors
// of the same dtype, device and number of elements; whoever reads them checks that.
struct HALFBYTE_API QuantizedTensor {
  QuantSpec spec;
  // Of the dense weight. The leading axes are folded into rows: [experts, rows, cols] has a matrix for each
  // expert.
  std::vector<int64_t> shape = {0};
  DType dtype = DType::f32;  // of the dense weight: f32, f16, bf16, f64
  // How the codes were chosen, where that is known. Nothing but files of layout halfbyte says it.
  std::optional<Encoding> encoding;
  Tensor codes;   // u8
  Tensor scales;  // spec.scale_dtype; u8 with double quantization
  Tensor zeros;   // u8
  Tensor biases;  // spec.scale_dtype
  // Double quantization, f32: [ceil(scales / 256)], [256], [1]. DoubleQuantizedView describes them.
  Tensor scales_absmax, scales_map, scales_offset;
  Tensor global_scale;  // nvfp4: f32 [1]

  QuantizedTensor() = default;
  // Parts that are uninitialized, but for scales_map, which is double_quant_map(). Throws as quant_shape, and
  // as Tensor.
  QuantizedTensor(const QuantSpec& spec, std::vector<int64_t> shape, DType dtype, Device device = {});

  Device device() const { return codes.device(); }
  int64_t rows() const;         // product of the leading extents
  int64_t cols() const;         // the last extent
  int64_t num_experts() const;  // product of the extents before the last two
  int64_t num_bytes() const;    // of all parts

  // Views are valid as long as the memory. All throw Error(usage), naming the part, where a part does not fit
  // the spec.
  // Throws Error(usage) with double quantization: see expanded().
  QuantizedView view() const;
  // The matrix of one expert, which is all of a weight of up to two axes, in layout halfbyte. Throws
  // Error(usage) as weight_view_bytes, and where the matrix does not begin with a byte, a group or (double
  // quantization) a block of scales of its own.
  WeightView weight_view(int64_t expert = 0) const;
  // The same in packed form, on the same device. Throws as weight_view and packed_weight_bytes. On a CUDA
  // device the work is enqueued on the stream.
  PackedTensor pack(Execution execution = {}, int64_t expert = 0) const;
  // The same weight with scales of spec.scale_dtype: itself where it has them. Waits for `stream`.
  QuantizedTensor expanded(void* stream = nullptr) const;
  // The same weight on another device, as Tensor::to.
  QuantizedTensor to(Device device, void* stream = nullptr) const;
  // A part along an axis of `shape`, in memory of its own: codes and scales as they are, so that it decodes
  // to that part of what the whole decodes to. Throws Error(usage), naming the reason, where it does not
  // begin or end between groups, between bytes of codes, or (double quantization) where a block of scales
  // begins. Waits for `stream`.
  QuantizedTensor slice(const Slice& slice, void* stream = nullptr) const;
};

// One-line forms, on the device of x and of q. quantize waits for Execution::stream. It throws
// Error(bad_input) if the data is not finite, naming the count and the first index, or if spec.scale_dtype
// cannot hold a scale. dequantize waits too with double quantization, which is undone in host memory.
HALFBYTE_API QuantizedTensor quantize(const ConstTensorView& x, const QuantSpec& spec,
                                      const Encoding& encoding = {}, Execution execution = {},
                                      const Importance& importance = {});
HALFBYTE_API void dequantize(const QuantizedTensor& q, const TensorView& y, Execution execution = {});

}  // namespace halfbyte
