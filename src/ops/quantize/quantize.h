// What the variants of `quantize` share.
#pragma once

#include <algorithm>
#include <memory>
#include <span>

#include "core/counts.h"
#include "core/format.h"
#include "core/variant.h"
#include "halfbyte/ops.hpp"

namespace halfbyte {

// A checked problem. Arrays as QuantShape describes them; x row-major [shape.rows, shape.cols].
struct QuantizeProblem {
  const void* x = nullptr;
  DType dtype = DType::f32;
  QuantShape shape;
  formats::Codec codec;
  // Granularity::tensor: one group of all elements. `range`: that of its values, or of those that share the
  // global scale; null: of those of x.
  bool one_group = false;
  const ValueRange* range = nullptr;
  bool search = false;  // as Encoding has it
  Importance importance;
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  uint8_t* zeros = nullptr;
  void* biases = nullptr;
  float* global_scale = nullptr;  // null: the format has none
  int num_threads = 0;
  Device device = {};  // of all pointers but `range`
  // Bytes that the addresses of x and codes are multiples of: CUDA kernels are chosen by them, to 16.
  int64_t x_alignment = 1, code_alignment = 1;
  void* stream = nullptr;  // CUDA
  // CPU: what prepare_quantize_cpu made of the rest, where it was asked.
  const void* prepared = nullptr;
  bool is_prepared = false;
};

// For threads_for: the search for a code takes as long as reading several elements.
inline double quantize_work(const QuantizeProblem& problem) {
  return 8 * static_cast<double>(problem.shape.rows) * static_cast<double>(problem.shape.cols);
}

// Columns [begin, end) of one row. begin is a multiple of 8 (so that codes start at a byte) and,
// unless the parameters are given, the start of a group; end likewise, or the end of the row.
struct QuantizeSpan {
  int64_t row = 0, begin = 0, end = 0;
  const formats::GroupParams<double>* params = nullptr;  // given: of all elements; scales are not written
};

void merge(ValueRange& into, const ValueRange& from);
// Counts what is wrong with the parameters of a group.
template <class F>
void count(QuantizeStatus& status, const formats::GroupParams<F>& params) {
  status.num_unheld_scales += params.held ? 0 : 1;
  status.num_coarse_scales += params.coarse ? 1 : 0;
}

// Writes the parameters of group `index`; the stored values are exact in every F.
template <class F>
void store_params(const QuantizeProblem& problem, int64_t index, const formats::GroupParams<F>& params) {
  formats::store_scale(problem.scales, index, params.scale, problem.codec.scale_type,
                       problem.codec.global_scale);
  if (problem.zeros) problem.zeros[index] = static_cast<uint8_t>(params.zero_point - problem.codec.q_min);
  if (problem.biases) formats::store_scale(problem.biases, index, params.bias, problem.codec.scale_type);
}

template <class To, class From>
formats::GroupParams<To> convert_params(const formats::GroupParams<From>& from) {
  return {static_cast<To>(from.scale),
          static_cast<To>(from.bias),
          static_cast<To>(from.code_scale),
          static_cast<To>(from.code_bias),
          from.zero_point,
          from.held,
          from.coarse};
}

// The parameters of one group, in the arithmetic of the data.
inline formats::GroupParams<double> params_of_range(const QuantizeProblem& problem, const ValueRange& range) {
  if (problem.dtype == DType::f64) return formats::group_params(range.min, range.max, problem.codec);
  return convert_params<double>(
      formats::group_params(static_cast<float>(range.min), static_cast<float>(range.max), problem.codec));
}

// The global scale of all values in a range, in the arithmetic of the data.
inline float global_scale_of_range(DType dtype, const ValueRange& range) {
  if (range.min > range.max) return formats::global_scale_of(0.0f);
  const double absmax = std::max(-range.min, range.max);
  return dtype == DType::f64 ? formats::global_scale_of(absmax)
                             : formats::global_scale_of(static_cast<float>(absmax));
}

// SIMD kernels, dispatched at run time. The preparation is shared by all spans of a problem; null if it has
// none.
std::shared_ptr<const void> prepare_quantize_cpu(const QuantizeProblem& problem);
QuantizeStatus quantize_span_cpu(const QuantizeProblem& problem, const QuantizeSpan& span);
ValueRange value_range_cpu(const void* x, DType dtype, int64_t n);

// Searched parameters of a group, elements [first, first + n) of x, all finite and in the range [min, max].
// problem.prepared is that of prepare_search_cpu.
std::shared_ptr<const void> prepare_search_cpu(const QuantizeProblem& problem);
formats::GroupParams<float> search_group_cpu(const QuantizeProblem& problem, int64_t first, int64_t n,
                                             float min, float max);
formats::GroupParams<double> search_group_cpu(const QuantizeProblem& problem, int64_t first, int64_t n,
                                              double min, double max);

// The CPU: returns when all is done.
QuantizeStatus quantize_cpu(const QuantizeProblem& problem);

// CUDA: kernels chosen and loaded for a problem, for any addresses of the same alignment.
struct QuantizeCuda;
std::shared_ptr<const QuantizeCuda> select_quantize_cuda(const QuantizeProblem& problem);
const char* kernel_name(const QuantizeCuda& cuda);  // of the one that writes the codes
int64_t workspace_bytes(const QuantizeCuda& cuda);
// Enqueues the whole operation on problem.stream: nothing waits, nothing is allocated. `workspace` (memory of
// the device, at a multiple of 16) begins with the counts of what was found. `problem`: the one of the
// selection, with the addresses of this run.
void run_quantize_cuda(const QuantizeCuda& cuda, const QuantizeProblem& problem, void* workspace);

// CUDA: both wait for the stream.
std::string refuse_quantize_cuda(const QuantizeProblem& problem);
QuantizeStatus quantize_cuda(const QuantizeProblem& problem);
ValueRange value_range_cuda(const ConstTensorView& x, void* stream);

// A problem without addresses. Throws Error(usage) for bad extents.
QuantizeProblem make_quantize_problem(const QuantSpec& spec, const Encoding& encoding, int64_t rows,
                                      int64_t cols, DType dtype);
// The checked problem of a call of `quantize`. `range` must outlive it.
QuantizeProblem make_quantize_problem(const ConstTensorView& x, const QuantizedView& out,
                                      const Encoding& encoding, Execution execution, const ValueRange* range,
                                      const Importance& importance = {});

}  // namespace halfbyte
