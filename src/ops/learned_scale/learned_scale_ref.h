// The scalar reference of `fake_quantize_learned_backward`: what every backend must equal to the byte. F is
// double where the tensors are f64, else float.
#pragma once

#include "grouped/linear_ref.h"
#include "ops/learned_scale/learned_scale.h"

namespace halfbyte::lsq_ref {

template <class F>
void store_gradients(const LsqProblem& problem, const LsqTensors& tensors, int64_t index, F scale_total,
                     F zero_total, F scale) {
  const F factor = static_cast<F>(problem.gradient_scale);
  static_cast<F*>(tensors.dscale)[index] = lsq_scale_gradient(scale_total, factor);
  if (problem.learns_zeros())
    static_cast<F*>(tensors.dzero)[index] = lsq_zero_gradient(zero_total, scale, factor);
}

template <class F>
QuantizeStatus run(const LsqProblem& problem, const LsqTensors& tensors) {
  struct Group {
    formats::GroupParams<F> params;
    formats::PairwiseSum<F> scale, zero;
  };
  QuantizeStatus status, ignored;
  std::vector<Group> groups(static_cast<size_t>(problem.num_scales));
  for (size_t i = 0; i < groups.size(); ++i)
    groups[i].params = linear_ref::load_params<F>(problem, tensors, static_cast<int64_t>(i),
                                                  problem.num_elements() > 0 ? status : ignored);
  const formats::CodeBook& book = problem.codec.book;
  const bool table = problem.codec.kind == formats::Kind::table;
  int64_t index = 0;
  linear_ref::for_each_element(problem, [&](int64_t o, int64_t a, int64_t i) {
    Group& group = groups[static_cast<size_t>(problem.scale_index(o, a, i))];
    const int64_t size = size_of(problem.dtype), at = index++ * size;
    const auto* const dy = static_cast<const std::byte*>(tensors.dy) + at;
    const F x = linear_ref::load_element<F>(static_cast<const std::byte*>(tensors.x) + at, problem.dtype, 0);
    const F gradient = linear_ref::load_element<F>(dy, problem.dtype, 0), scale = group.params.code_scale;
    const auto terms =
        table ? lsq_table_terms(x, gradient, scale, static_cast<F>(book.values[book.code_of_rank[0]]),
                                static_cast<F>(book.values[book.code_of_rank[15]]),
                                [&](F quotient) {
                                  return static_cast<F>(book.values[formats::table_encode(book, quotient)]);
                                })
              : lsq_terms(x, gradient, scale, group.params.zero_point, problem.codec.q_min,
                          problem.codec.q_max);
    group.scale.add(terms.scale);
    group.zero.add(terms.zero);
    if (terms.passes)
      std::copy_n(dy, size, static_cast<std::byte*>(tensors.y) + at);
    else
      std::fill_n(static_cast<std::byte*>(tensors.y) + at, size, std::byte{0});
  });
  for (size_t i = 0; i < groups.size(); ++i)
    store_gradients(problem, tensors, static_cast<int64_t>(i), groups[i].scale.total(),
                    groups[i].zero.total(), groups[i].params.code_scale);
  return status;
}

inline QuantizeStatus run(const LsqProblem& problem, const LsqTensors& tensors) {
  return problem.dtype == DType::f64 ? run<double>(problem, tensors) : run<float>(problem, tensors);
}

}  // namespace halfbyte::lsq_ref
