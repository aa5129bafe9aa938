// The inner loops of verifying a file, with the SIMD of the machine. Every target gives the same results.
#pragma once

#include <cstdint>

namespace halfbyte::io {

// The values of codes below 16, and what is nearest to each: from low to high. Where that is the first or the
// last one, the end is 1, else 0.
struct Levels {
  alignas(64) float value[16], low[16], high[16], low_end[16], high_end[16];
};
// y[i] = value[codes[i]] * scale. Returns whether each x[i] is within [low, high] * scale of its code, or
// beyond by at most `slack`, and by `at_ends` more where it is beyond an end; computed in f32, finite.
struct Span {
  float scale = 0, slack = 0, at_ends = 0;
};
bool decode_levels(const Levels& levels, const Span& span, const uint8_t* codes, const float* x,
                   int64_t count, float* y);

// y[i] = (codes[i] - zero) * scale + bias, each rounded, and without the addition where bias is not `added`.
// Returns whether each x[i] is at most `near` away.
struct Steps {
  float scale = 0, bias = 0;
  int zero = 0;
  bool added = false;
  float near = 0;
};
bool decode_steps(const Steps& steps, const uint8_t* codes, const float* x, int64_t count, float* y);

// Of f16 or bf16 in memory, to f32.
void widen_f16(const void* x, int64_t count, float* y);
void widen_bf16(const void* x, int64_t count, float* y);

// Sums over elements: in 16 lanes, element i in lane i % 16, which are added in order.
struct ErrorTotals {
  double squared_error = 0, squared_source = 0, largest = 0;
};
ErrorTotals total_errors(const float* source, const float* decoded, int64_t count);

}  // namespace halfbyte::io
