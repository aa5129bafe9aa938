// A step of Adam, each operation rounded: include/halfbyte/affine_qdq.hpp has the formula.
#pragma once

#include "formats/pairwise.h"

namespace halfbyte::formats {

// What a step needs of its settings, rounded once.
struct AdamFactors {
  float step_size = 0;         // learning rate / (1 - beta1^step)
  float beta1 = 0, rest1 = 0;  // rest = 1 - beta
  float beta2 = 0, rest2 = 0;
  float root = 1;  // sqrt(1 - beta2^step)
  float epsilon = 0;
};

// A parameter with its moments.
struct AdamState {
  float value = 0, m = 0, v = 0;
};

HALFBYTE_FN float one_nan(float x) {
  const bool is_nan = (bit_cast<u32>(x) & ~Float<float>::kSign) > Float<float>::kInfinity;
  return is_nan ? quiet_nan<float>() : x;
}

// square_root: correctly rounded.
template <class SquareRoot>
HALFBYTE_FN AdamState adam_step(const AdamState& before, float gradient, const AdamFactors& f,
                                const SquareRoot& square_root) {
  const float m = f.beta1 * before.m + f.rest1 * gradient;
  const float v = f.beta2 * before.v + f.rest2 * gradient * gradient;
  const float value = before.value - f.step_size * m / (square_root(v) / f.root + f.epsilon);
  return {one_nan(value), one_nan(m), one_nan(v)};
}

}  // namespace halfbyte::formats
