// What the variants of `dequantize` share.
#pragma once

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
  void* y = nullptr;
  DType dtype = DType::f32;
  bool past_caches = false;  // CPU: what is written does not stay in them
  int num_threads = 0;
  Device device = {};      // of all pointers
  void* stream = nullptr;  // CUDA
};

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
  return {formats::load_scale<F>(problem.scales, group, codec.scale_type),
          problem.biases ? formats::load_scale<F>(problem.biases, group, codec.scale_type) : F{0},
          problem.zeros ? problem.zeros[group] + codec.q_min : 0};
}
// The group of a column.
inline int64_t group_of(const DequantizeProblem& problem, int64_t row, int64_t column) {
  return problem.one_group ? 0 : row * problem.shape.groups_per_row + column / problem.shape.group_size;
}

// SIMD kernels, dispatched at run time.
void dequantize_span_cpu(const DequantizeProblem& problem, const DequantizeSpan& span);

// CUDA: enqueued on problem.stream.
std::string refuse_dequantize_cuda(const DequantizeProblem& problem);
void dequantize_cuda(const DequantizeProblem& problem);

}  // namespace halfbyte
