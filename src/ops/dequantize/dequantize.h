// What the variants of `dequantize` share.
#pragma once

#include <memory>
#include <string>

#include "core/format.h"
#include "core/variant.h"
#include "halfbyte/ops.hpp"

namespace halfbyte {

// A checked problem. Arrays as QuantShape describes them; y row-major [shape.rows, shape.cols].
struct DequantizeProblem {
  QuantShape shape;
  formats::Codec codec;
  bool one_group = false;  // Granularity::tensor
  const uint8_t* codes = nullptr;
  const void* scales = nullptr;
  const uint8_t* zeros = nullptr;
  const void* biases = nullptr;
  const float* global_scale = nullptr;  // null: the format has none
  void* y = nullptr;
  DType dtype = DType::f32;
  bool past_caches = false;  // CPU: what is written does not stay in them
  int num_threads = 0;
  Device device = {};  // of all pointers
  // Bytes that the addresses of codes and y are multiples of: CUDA kernels are chosen by them, to 16.
  int64_t code_alignment = 1, y_alignment = 1;
  void* stream = nullptr;  // CUDA
};

// For threads_for.
inline double dequantize_work(const DequantizeProblem& problem) {
  return static_cast<double>(problem.shape.rows) * static_cast<double>(problem.shape.cols);
}

// Columns [begin, end) of one row; begin is a multiple of 8.
struct DequantizeSpan {
  int64_t row = 0, begin = 0, end = 0;
};

// The parameters of a group, in the type the arithmetic is done in.
template <class F>
struct GroupDecode {
  F scale, bias;
  int zero_point;
};
template <class F>
inline GroupDecode<F> load_group(const DequantizeProblem& problem, int64_t group) {
  const formats::Codec& codec = problem.codec;
  return {formats::load_scale<F>(problem.scales, group, codec.scale_type, codec.global_scale),
          problem.biases ? formats::load_scale<F>(problem.biases, group, codec.scale_type) : F{0},
          problem.zeros ? problem.zeros[group] + codec.q_min : 0};
}
// The group of a column.
inline int64_t group_of(const DequantizeProblem& problem, int64_t row, int64_t column) {
  return problem.one_group ? 0 : row * problem.shape.groups_per_row + column / problem.shape.group_size;
}

// SIMD kernels, dispatched at run time.
void dequantize_span_cpu(const DequantizeProblem& problem, const DequantizeSpan& span);

// The CPU: returns when all is done.
void dequantize_cpu(const DequantizeProblem& problem);

// CUDA: the kernel chosen and loaded for a problem, for any addresses of the same alignment.
struct DequantizeCuda;
std::shared_ptr<const DequantizeCuda> select_dequantize_cuda(const DequantizeProblem& problem);
const char* kernel_name(const DequantizeCuda& cuda);
// Enqueues it on problem.stream; `problem`: the one of the selection, with the addresses of this run.
void run_dequantize_cuda(const DequantizeCuda& cuda, const DequantizeProblem& problem);

// CUDA: enqueued on problem.stream.
std::string refuse_dequantize_cuda(const DequantizeProblem& problem);
void dequantize_cuda(const DequantizeProblem& problem);

// Of a matrix and memory for its elements, which are not checked. Throws Error(usage) for bad extents.
DequantizeProblem make_dequantize_problem(const ConstQuantizedView& in, void* y, DType dtype);

}  // namespace halfbyte
