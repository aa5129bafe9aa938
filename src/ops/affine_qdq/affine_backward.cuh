// What becomes of the gradients of scales and biases.
#pragma once

#include "ops/affine_qdq/affine.cuh"

namespace halfbyte::device {

// The sum over group number `group`: of dy for its bias, else of q * dy for its scale.
__device__ __forceinline__ void finish(const AffineBackwardArgs& args, bool bias, i64 group, float sum) {
  const float gradient = total_of(sum);
  float* const gradients = bias ? args.biases.gradients : args.scales.gradients;
  if (gradients != nullptr) gradients[group] = gradient;
  if (args.has_adam) {
    float* const value = (bias ? args.biases.values : args.scales.values) + group;
    float* const m = (bias ? args.biases.m : args.scales.m) + group;
    float* const v = (bias ? args.biases.v : args.scales.v) + group;
    const AdamState state =
        adam_step({*value, *m, *v}, gradient, args.adam, [](float x) { return __fsqrt_rn(x); });
    *value = state.value;
    *m = state.m;
    *v = state.v;
  }
}

}  // namespace halfbyte::device
