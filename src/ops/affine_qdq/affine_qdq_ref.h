// The scalar reference of `affine_init`, which is also what the CPU runs, and of `affine_qdq_backward`: what
// every backend must equal to the byte.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/counts.h"
#include "formats/bits.h"
#include "formats/pairwise.h"
#include "ops/affine_qdq/affine_qdq.h"

namespace halfbyte {

inline float load_element(const void* x, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(x)[index];
    case DType::f16:
      return formats::f16_to_f32(static_cast<const uint16_t*>(x)[index]);
    default:
      return formats::bf16_to_f32(static_cast<const uint16_t*>(x)[index]);
  }
}

// A group with its elements w[0, n) and their codes.
struct AffineGroup {
  const float* w;
  uint8_t* codes;
  int64_t n;
};

inline formats::GroupParams<float> refit_ref(const AffineProblem& problem, const AffineGroup& group,
                                             const formats::GroupParams<float>& start) {
  formats::RefitSums sums;
  formats::PairwiseSum<double> w_sum, qw_sum, before, after;
  const auto terms = [&](int64_t i) {  // 0, 0 of what does not count
    const bool counts = formats::is_finite(group.w[i]);
    return std::pair{counts ? group.w[i] : 0.0f, counts ? group.codes[i] : uint8_t{0}};
  };
  for (int64_t i = 0; i < group.n; ++i) {
    const auto [w, q] = terms(i);
    w_sum.add(static_cast<double>(w));
    qw_sum.add(static_cast<double>(q) * static_cast<double>(w));
    sums.q += q;
    sums.qq += uint64_t{q} * q;
    sums.n += formats::is_finite(group.w[i]) ? 1 : 0;
  }
  sums.w = w_sum.total();
  sums.qw = qw_sum.total();
  const formats::GroupParams<float> fitted = formats::refitted(sums, start, problem.codec);
  for (int64_t i = 0; i < group.n; ++i) {
    const bool counts = formats::is_finite(group.w[i]);
    const auto error = [&](const formats::GroupParams<float>& params) {
      return counts ? formats::squared_error(group.codes[i], group.w[i], params, problem.codec) : 0.0;
    };
    before.add(error(start));
    after.add(error(fitted));
  }
  return after.total() < before.total() ? fitted : start;
}

// Columns [begin, end) of a row: some whole groups whose codes begin at a byte, all that share its bytes.
// `w` and `codes` have room for as many elements.
inline void affine_init_ref(const AffineProblem& problem, const AffineInitTensors& tensors, int64_t row,
                            int64_t begin, int64_t end, float* w, uint8_t* codes, QuantizeStatus& status) {
  const AffineShape& shape = problem.shape;
  const int64_t first = row * shape.cols;
  uint8_t zero_code = 0;
  for (int64_t at = begin; at < end; at += shape.group_size) {
    const AffineGroup group{w + (at - begin), codes + (at - begin),
                            std::min<int64_t>(shape.group_size, end - at)};
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int64_t i = 0; i < group.n; ++i) {
      const float value = load_element(tensors.w, first + at + i, problem.dtype);
      w[at - begin + i] = value;
      if (formats::is_finite(value)) {
        low = std::min(low, value);
        high = std::max(high, value);
      } else if (status.num_nonfinite++ == 0) {
        status.first_nonfinite = first + at + i;
      }
    }
    formats::GroupParams<float> params = formats::group_params(low, high, problem.codec);
    const auto encode = [&](float value) {
      return static_cast<uint8_t>(formats::affine_encode(value, params, problem.codec, problem.half_away));
    };
    zero_code = encode(0);
    for (int64_t i = 0; i < group.n; ++i)
      group.codes[i] = formats::is_finite(group.w[i]) ? encode(group.w[i]) : zero_code;
    if (problem.refit) params = refit_ref(problem, group, params);
    const int64_t index = row * shape.groups_per_row + at / shape.group_size;
    formats::store_scale(tensors.scales, index, params.scale, problem.codec.scale_type);
    formats::store_scale(tensors.biases, index, params.bias, problem.codec.scale_type);
    status.num_unheld_scales += params.held ? 0 : 1;
    status.num_coarse_scales += params.coarse ? 1 : 0;
  }
  const int64_t n = end - begin, num_bytes = formats::packed_bytes(n, problem.code_bits);
  uint8_t* const out = tensors.codes + row * shape.row_bytes + begin * problem.code_bits / 8;
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t eight = 0;
    for (int64_t k = 0; k < 8; ++k) eight |= uint64_t{i + k < n ? codes[i + k] : zero_code} << (8 * k);
    eight = formats::pack8(eight, problem.code_bits);
    for (int64_t k = 0, at = i / 8 * problem.code_bits; k < problem.code_bits && at + k < num_bytes; ++k)
      out[at + k] = static_cast<uint8_t>(eight >> (8 * k));
  }
}

// What becomes of the sums of a group.
inline void affine_finish_ref(const AffineTrained& to, int64_t group, float gradient, bool adam,
                              const formats::AdamFactors& factors) {
  if (to.gradients != nullptr) to.gradients[group] = gradient;
  if (!adam) return;
  const formats::AdamState state = formats::adam_step({to.values[group], to.m[group], to.v[group]}, gradient,
                                                      factors, [](float x) { return std::sqrt(x); });
  to.values[group] = state.value;
  to.m[group] = state.m;
  to.v[group] = state.v;
}

inline void affine_backward_ref(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row,
                                int64_t begin, int64_t end) {
  const AffineShape& shape = problem.shape;
  for (int64_t group = begin; group < end; ++group) {
    formats::PairwiseSum<float> scale_sum, bias_sum;
    const int64_t last = std::min<int64_t>(shape.cols, (group + 1) * shape.group_size);
    for (int64_t column = group * shape.group_size; column < last; ++column) {
      const float dy = load_element(args.dy, row * shape.cols + column, problem.dtype);
      const int q = formats::get_code(args.codes + row * shape.row_bytes, column, problem.code_bits);
      scale_sum.add(static_cast<float>(q) * dy);
      bias_sum.add(dy);
    }
    const int64_t index = row * shape.groups_per_row + group;
    affine_finish_ref(args.scales, index, scale_sum.total(), problem.adam, args.adam);
    affine_finish_ref(args.biases, index, bias_sum.total(), problem.adam, args.adam);
  }
}

}  // namespace halfbyte
