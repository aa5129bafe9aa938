// Codes and parameters of the weight of a product, in host memory, wherever their layout has them.
#pragma once

#include "ops/qgemm/qgemm.h"

namespace halfbyte {

inline int load_code(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t col) {
  if (problem.packed) return problem.weight.load_code(static_cast<const uint8_t*>(tensors.weight), row, col);
  const formats::WeightViewLayout& view = problem.view;
  const auto* bytes = static_cast<const uint8_t*>(tensors.codes);
  return formats::code_at(bytes + view.code(row, col), view.code_shift(row, col), view.bits);
}

// 1 where there is none.
inline float load_global_scale(const QgemmProblem& problem, const QgemmTensors& tensors) {
  if (problem.codec.scale_type != formats::ScaleType::e4m3) return 1;
  return *(problem.packed ? reinterpret_cast<const float*>(static_cast<const uint8_t*>(tensors.weight) +
                                                           problem.weight.global_scale)
                          : tensors.global_scale);
}

// The parameters of a group, in the type the arithmetic is done in.
template <class F>
struct WeightGroup {
  F scale = 0, bias = 0;
  int zero_point = 0;  // signed
};

// Of the group of an element.
template <class F>
WeightGroup<F> load_group(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row,
                          int64_t col) {
  const formats::Codec& codec = problem.codec;
  const formats::PackedLayout& packed = problem.weight;
  const formats::WeightViewLayout& view = problem.view;
  const int64_t group = problem.packed ? col / packed.group : 0;
  // Numbers of elements in arrays, or in the packed memory.
  const auto* memory = static_cast<const uint8_t*>(tensors.weight);
  const void* scale = problem.packed ? memory + packed.scale(row, group) : tensors.scales;
  const int64_t index = problem.packed ? 0 : view.scale(row, col);
  WeightGroup<F> result;
  if (problem.double_quant) {
    const auto section = [&](int64_t offset) { return reinterpret_cast<const float*>(memory + offset); };
    const float* absmax = problem.packed ? section(packed.absmax) : tensors.absmax;
    const float* map = problem.packed ? section(packed.map) : tensors.map;
    const float* offset = problem.packed ? section(packed.offset) : tensors.offset;
    const int64_t number = problem.packed ? row * packed.groups + group : index;
    const int code = static_cast<const uint8_t*>(scale)[index];
    result.scale = static_cast<F>(map[code] * absmax[number / 256] + *offset);
  } else {
    result.scale =
        formats::load_scale<F>(scale, index, codec.scale_type, load_global_scale(problem, tensors));
  }
  if (codec.asymmetric) {
    const int stored =
        problem.packed ? memory[packed.zero(row, group)] : view.load_zero(tensors.zeros, row, col);
    result.zero_point = stored + codec.q_min;
  }
  if (codec.kind == formats::Kind::affine)
    result.bias = problem.packed
                      ? formats::load_scale<F>(memory + packed.bias(row, group), 0, codec.scale_type)
                      : formats::load_scale<F>(tensors.biases, index, codec.scale_type);
  return result;
}

// Element `index` of x, y or bias.
template <class F>
F load_element(const void* data, int64_t index, DType dtype) {
  return formats::load_scale<F>(data, index,
                                dtype == DType::f32   ? formats::ScaleType::f32
                                : dtype == DType::f16 ? formats::ScaleType::f16
                                                      : formats::ScaleType::bf16);
}
template <class F>
void store_element(void* data, int64_t index, F value, DType dtype) {
  formats::store_scale(data, index, value,
                       dtype == DType::f32   ? formats::ScaleType::f32
                       : dtype == DType::f16 ? formats::ScaleType::f16
                                             : formats::ScaleType::bf16);
}

}  // namespace halfbyte
