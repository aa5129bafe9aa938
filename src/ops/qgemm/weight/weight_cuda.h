// A weight as kernels are given it (weight_args.h).
#pragma once

#include <array>
#include <string>

#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

// kByteScales: which numbers scales of one byte are, e4m3 or e8m0; f32 where scales have more bytes.
std::string byte_scales_config(const QgemmProblem& problem);
// Lines of the configuration of a kernel for packed weights: this, kBits, kAsymmetric, kAffine, kFloating,
// kDoubleQuant, and kParameterBytes, of a bias or a scale that is not quantized. What symmetric codes of 4
// bits stand for is an argument: their formats share kernels.
std::string packed_config(const QgemmProblem& problem);
// kBf16Scales: whether parameters of two bytes are bf16, else f16, where this is no argument.
std::string bf16_scales_config(const QgemmProblem& problem);
// What codes of 4 bits stand for but for the scale, rounded to `dtype`; of asymmetric integers and affine
// formats the stored codes.
std::array<float, 16> code_values(const formats::Codec& codec, DType dtype);
// Likewise; dtype: bf16 or f16.
CodeValuesArgs code_values_args(const formats::Codec& codec, DType dtype);

// The sections of a packed weight, where kernels are given just these.
template <class Args>
void describe_sections(Args& args, const formats::PackedLayout& weight) {
  args.scales = weight.scales;
  args.seconds = weight.has_zeros ? weight.zeros : weight.biases;
  args.absmax = weight.absmax;
  args.map = weight.map;
  args.offset = weight.offset;
  args.global_scale = weight.global_scale;
}

// A weight in any layout, but for its addresses; then these.
WeightArgs weight_args(const QgemmProblem& problem);
void place_weight(WeightArgs& weight, const QgemmProblem& problem, const QgemmTensors& tensors);

}  // namespace halfbyte
