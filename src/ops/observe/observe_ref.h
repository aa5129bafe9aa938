// The scalar reference of `observe`: what every backend must equal to the byte.
#pragma once

#include <vector>

#include "core/format.h"
#include "formats/convert.h"
#include "ops/observe/observe.h"
#include "ops/observe/range_search_ref.h"

namespace halfbyte::observe_ref {

using formats::Seen;

// A value of a group that is one, into its range. -0 is +0.
template <class F>
void widen(Seen<F>& seen, F x) {
  seen.min = formats::min(seen.min, x + 0);
  seen.max = formats::max(seen.max, x + 0);
}

// The ranges of the finite values.
template <class F>
QuantizeStatus value_ranges(const ObserveProblem& problem, const void* x, Seen<F>* seen) {
  QuantizeStatus status;
  for (int64_t group = 0; group < problem.num_scales; ++group) seen[group] = {};
  int64_t index = 0;
  for (int64_t o = 0; o < problem.outer; ++o)
    for (int64_t a = 0; a < problem.axis; ++a)
      for (int64_t i = 0; i < problem.inner; ++i, ++index) {
        const F value = formats::load_scale<F>(x, index, scale_type(problem.dtype));
        if (formats::is_finite(value))
          widen(seen[problem.scale_index(o, a, i)], value);
        else if (status.num_nonfinite++ == 0)
          status.first_nonfinite = index;
      }
  return status;
}

// The state takes up the ranges of a batch.
template <class F>
void take_up(const ObserveProblem& problem, const Seen<F>* seen, const ObserveTensors& tensors) {
  auto *const min = static_cast<F*>(tensors.min), *const max = static_cast<F*>(tensors.max);
  if (!problem.is_mean()) ++*tensors.num_batches;
  for (int64_t group = 0; group < problem.num_scales; ++group) {
    Seen<F> state{min[group], max[group]};
    if (problem.is_mean()) {
      formats::i64 count = tensors.num_batches[group];
      state = formats::observed_mean(state, seen[group], count);
      tensors.num_batches[group] = count;
    } else {
      state = formats::observed(state, seen[group], problem.history);
    }
    min[group] = state.min;
    max[group] = state.max;
  }
}

template <class F>
QuantizeStatus run(const ObserveProblem& problem, const ObserveTensors& tensors) {
  std::vector<Seen<F>> seen(static_cast<size_t>(problem.num_scales));
  const QuantizeStatus status = value_ranges(problem, tensors.x, seen.data());
  range_search_ref::run(problem, tensors.x, seen.data());
  if (problem.num_elements() > 0) take_up(problem, seen.data(), tensors);
  return status;
}

}  // namespace halfbyte::observe_ref
