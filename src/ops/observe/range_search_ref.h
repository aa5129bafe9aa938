// The scalar reference of percentile and mse ranges: what every backend must equal to the byte.
#pragma once

#include <algorithm>
#include <vector>

#include "core/format.h"
#include "formats/convert.h"
#include "ops/observe/range_search.h"

namespace halfbyte::range_search_ref {

using formats::MseCandidate;
using formats::Seen;

// The elements of a group, in order.
template <class F>
std::vector<F> elements_of(const ObserveProblem& problem, const void* x, int64_t s) {
  const Groups groups = problem.groups();
  const Groups::Group group = groups.group<true>(s);
  std::vector<F> elements;
  for (int64_t k = 0; k < group.size; ++k)
    elements.push_back(
        formats::load_scale<F>(x, group.begin + groups.offset<true>(group, k), scale_type(problem.dtype)));
  return elements;
}

template <class F>
Seen<F> percentile_range(std::vector<F> values, double percentile) {
  std::erase_if(values, [](F x) { return !formats::is_finite(x); });
  if (values.empty()) return {};
  std::ranges::sort(values);
  const auto n = static_cast<int64_t>(values.size());
  const int64_t k = formats::percentile_rank(percentile, n);
  return {values[static_cast<size_t>(n - k)] + 0, values[static_cast<size_t>(k - 1)] + 0};
}

// The sum of the squared errors of a candidate, in units.
template <class F>
F mse_error(const std::vector<F>& values, F per_unit, const MseCandidate<F>& candidate, int levels) {
  const F reciprocal = 1 / candidate.scale, high = candidate.low + static_cast<F>(levels);
  formats::PairwiseSum<F> sum;
  for (const F x : values)
    sum.add(formats::is_finite(x)
                ? formats::mse_term(x * per_unit, candidate.scale, reciprocal, candidate.low, high)
                : 0);
  return sum.total();
}

// `seen`: of the finite values.
template <class F>
Seen<F> mse_range(const std::vector<F>& values, const Seen<F>& seen, const formats::MseCodes& codes) {
  if (seen.empty() || (seen.min == 0 && seen.max == 0)) return seen;
  const auto search = formats::MseSearch<F>::of(seen.min, seen.max, codes);
  std::vector<MseCandidate<F>> parents;
  MseCandidate<F> best;
  F least = 0;
  for (int number = 0; number <= formats::kMseStages; ++number) {
    const formats::MseStage stage = formats::mse_stage(codes.asymmetric, number);
    const int count = stage.count();
    std::vector<MseCandidate<F>> candidates;
    std::vector<F> errors, merits;
    for (int i = 0; i < count; ++i) {
      candidates.push_back(number == 0
                               ? search.rung(i, codes)
                               : search.child(parents[static_cast<size_t>(i / (stage.scales * stage.zeros))],
                                              i, stage, codes));
      errors.push_back(mse_error(values, search.per_unit, candidates.back(), codes.levels));
      if ((number == 0 && i == 0) || errors.back() < least) {
        least = errors.back();
        best = candidates.back();
      }
    }
    if (number == formats::kMseStages) break;
    for (int i = 0; i < count; ++i) merits.push_back(formats::mse_merit(errors.data(), i, stage.scales));
    parents.resize(static_cast<size_t>(formats::mse_stage(codes.asymmetric, number + 1).parents));
    for (int i = 0; i < count; ++i) {
      const auto rank = static_cast<size_t>(formats::mse_rank(merits.data(), count, i));
      if (rank < parents.size()) parents[rank] = candidates[static_cast<size_t>(i)];
    }
  }
  Seen<F> result;
  search.range(best, codes, result.min, result.max);
  return result;
}

template <class F>
void run(const ObserveProblem& problem, const void* x, Seen<F>* seen) {
  if (problem.num_elements() == 0) return;
  for (int64_t s = 0; s < problem.num_scales; ++s) {
    const std::vector<F> values = elements_of<F>(problem, x, s);
    if (problem.observer.kind == ObserverKind::percentile)
      seen[s] = percentile_range(values, problem.observer.percentile);
    if (problem.observer.kind == ObserverKind::mse)
      seen[s] = mse_range(values, seen[s], mse_codes(problem.observer.qparams));
  }
}

}  // namespace halfbyte::range_search_ref
