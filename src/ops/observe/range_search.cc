#include "ops/observe/range_search.h"

#include <algorithm>

#include "core/qparams.h"

namespace halfbyte {

SearchGroups search_groups(const ObserveProblem& p) {
  SearchGroups groups{};
  groups.num_groups = p.num_scales;
  groups.axis = p.axis;
  groups.group_outer = p.scale_strides.outer != 0 ? 1 : p.outer;
  groups.group_axis = p.group_size;
  groups.group_inner = p.scale_strides.inner != 0 ? 1 : p.inner;
  groups.groups_axis = p.axis == 0 ? 1 : (p.axis - 1) / p.group_size + 1;
  groups.groups_inner = p.scale_strides.inner != 0 ? p.inner : 1;
  groups.stride_outer = p.axis * p.inner;
  groups.stride_axis = p.inner;
  return groups;
}

int64_t longest_group(const SearchGroups& groups) {
  return groups.group_outer * std::min(groups.group_axis, groups.axis) * groups.group_inner;
}

formats::MseCodes mse_codes(const QParamsConfig& config) {
  const formats::QParamsRule rule = qparams_rule(config, DType::f64);
  formats::MseCodes codes;
  codes.asymmetric = config.asymmetric;
  codes.q_min = config.q_min - rule.fixed_zero_point();
  codes.levels = config.q_max - config.q_min;
  codes.divisor = config.scale_rule == ScaleRule::half_range ? codes.levels / 2.0
                                                             : config.q_max - rule.fixed_zero_point();
  codes.eps = config.eps;
  return codes;
}

bool needs_search(const ObserveProblem& problem) {
  const int64_t longest = longest_group(search_groups(problem));
  if (problem.num_elements() == 0) return false;
  if (problem.observer.kind == ObserverKind::mse) return true;
  return problem.observer.kind == ObserverKind::percentile &&
         formats::percentile_rank(problem.observer.percentile, longest) < longest;
}

}  // namespace halfbyte
