#include "ops/observe/range_search.h"

#include "core/qparams.h"

namespace halfbyte {

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
  const int64_t longest = problem.groups().longest();
  if (problem.num_elements() == 0) return false;
  if (problem.observer.kind == ObserverKind::mse) return true;
  return problem.observer.kind == ObserverKind::percentile &&
         formats::percentile_rank(problem.observer.percentile, longest) < longest;
}

}  // namespace halfbyte
