// Observers by values of the host.
#include <cmath>
#include <limits>

#include "core/qparams.h"
#include "core/words.h"
#include "formats/observer.h"
#include "halfbyte/observe.hpp"

namespace halfbyte {
namespace {

constexpr std::array<Word<ObserverKind>, 4> kKinds{{{ObserverKind::min_max, "min-max"},
                                                    {ObserverKind::moving_average, "moving-average"},
                                                    {ObserverKind::percentile, "percentile"},
                                                    {ObserverKind::mse, "mse"}}};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The weight of what was seen before, as formats::observed has it.
double history_of(const ObserverConfig& config) {
  return config.kind == ObserverKind::min_max ? -1 : config.momentum;
}
// The weight of a state in one that two of them make.
double share_of(const ObserverConfig& config, int64_t own, int64_t other) {
  if (config.kind == ObserverKind::min_max || own + other == 0) return -1;
  return static_cast<double>(own) / static_cast<double>(own + other);
}

template <class F>
formats::Seen<F> seen_of(double min, double max) {
  return {static_cast<F>(min) + 0, static_cast<F>(max) + 0};  // -0 becomes +0
}

// `observed`: of what was seen before, a range and the number of the group.
template <class F, class Observed>
void update(ObserverState& state, std::span<const double> min, std::span<const double> max,
            const Observed& observed) {
  for (size_t i = 0; i < min.size(); ++i) {
    const formats::Seen<F> seen =
        observed(seen_of<F>(state.min[i], state.max[i]), seen_of<F>(min[i], max[i]), i);
    state.min[i] = static_cast<double>(seen.min);
    state.max[i] = static_cast<double>(seen.max);
  }
}
template <class Observed>
void update(ObserverState& state, std::span<const double> min, std::span<const double> max,
            const Observed& observed) {
  if (state.dtype == DType::f64)
    update<double>(state, min, max, observed);
  else
    update<float>(state, min, max, observed);
}

double rounded(double value, DType dtype) {
  return dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
}

// `state`: as check_state has it.
void check_counts(const ObserverConfig& config, const ObserverState& state) {
  const size_t counts = counts_per_group(config.kind) ? state.min.size() : 1;
  HALFBYTE_CHECK(state.num_batches.size() == counts, usage,
                 "observer: num_batches of {} must have {} of the {} groups, got {}: {}",
                 to_string(config.kind), counts_per_group(config.kind) ? "a count of each" : "one count",
                 state.min.size(), state.num_batches.size(),
                 counts_per_group(config.kind)
                     ? "a state with one count does not tell in how many batches each group had finite values"
                     : "the kind counts batches as a whole");
}

}  // namespace

void check_state(const ObserverState& state) {
  HALFBYTE_CHECK(state.min.size() == state.max.size(), usage,
                 "observer: min and max must have one value of each group, got {} and {}", state.min.size(),
                 state.max.size());
  HALFBYTE_CHECK(state.dtype == DType::f32 || state.dtype == DType::f64, usage,
                 "observer: dtype must be f32 or f64, got {}", to_string(state.dtype));
  HALFBYTE_CHECK(state.num_batches.size() == 1 || state.num_batches.size() == state.min.size(), usage,
                 "observer: num_batches must have one value, or one of each of the {} groups, got {}",
                 state.min.size(), state.num_batches.size());
  for (const int64_t count : state.num_batches)  // means have it as a double
    HALFBYTE_CHECK(0 <= count && count < int64_t{1} << 53, usage,
                   "observer: num_batches must be in [0, 2^53), got {}", count);
  for (size_t i = 0; i < state.min.size(); ++i) {
    const double min = state.min[i], max = state.max[i];
    const bool finite = std::isfinite(rounded(min, state.dtype)) && std::isfinite(rounded(max, state.dtype));
    HALFBYTE_CHECK(min > max || (min <= max && finite), bad_input,
                   "observer: group {} must have a finite range of {}, or +inf and -inf, got {} and {}", i,
                   to_string(state.dtype), min, max);
  }
}

const char* to_string(ObserverKind kind) { return word_of(kKinds, kind); }
ObserverKind parse_observer_kind(std::string_view word) { return value_of(kKinds, word, "observer kind"); }

void check_config(const ObserverConfig& config) {
  HALFBYTE_CHECK(config.kind <= ObserverKind::mse, usage, "observer: kind must be 0 to 3, got {}",
                 static_cast<int>(config.kind));
  HALFBYTE_CHECK(0 < config.momentum && config.momentum < 1, usage,
                 "observer: momentum must be in (0, 1), got {}", config.momentum);
  HALFBYTE_CHECK(0 < config.percentile && config.percentile <= 100, usage,
                 "observer: percentile must be in (0, 100], got {}", config.percentile);
  check_config(config.qparams);
}

bool counts_per_group(ObserverKind kind) {
  return kind == ObserverKind::percentile || kind == ObserverKind::mse;
}

ObserverState ObserverState::empty(int64_t num_groups, DType dtype, ObserverKind kind) {
  HALFBYTE_CHECK(num_groups >= 0, usage, "observer: the number of groups must be >= 0, got {}", num_groups);
  ObserverState state;
  state.min.assign(static_cast<size_t>(num_groups), kInfinity);
  state.max.assign(static_cast<size_t>(num_groups), -kInfinity);
  state.dtype = dtype;
  if (counts_per_group(kind)) state.num_batches.assign(static_cast<size_t>(num_groups), 0);
  check_state(state);
  return state;
}

void ObserverState::update(const ObserverConfig& config, std::span<const double> batch_min,
                           std::span<const double> batch_max) {
  check_config(config);
  check_state(*this);
  check_counts(config, *this);
  HALFBYTE_CHECK(batch_min.size() == min.size() && batch_max.size() == min.size(), usage,
                 "observer: batch_min and batch_max must have {} values, one of each group, got {} and {}",
                 min.size(), batch_min.size(), batch_max.size());
  for (size_t i = 0; i < min.size(); ++i) {
    if (batch_min[i] == kInfinity && batch_max[i] == -kInfinity) continue;  // no finite values
    HALFBYTE_CHECK(std::isfinite(rounded(batch_min[i], dtype)) && std::isfinite(rounded(batch_max[i], dtype)),
                   bad_input, "observer: the range of a batch must be finite in {}, got [{}, {}] of group {}",
                   to_string(dtype), batch_min[i], batch_max[i], i);
    HALFBYTE_CHECK(batch_min[i] <= batch_max[i], bad_input,
                   "observer: batch_min must be at most batch_max, got {} and {} of group {}", batch_min[i],
                   batch_max[i], i);
  }
  if (counts_per_group(config.kind)) {
    halfbyte::update(*this, batch_min, batch_max, [&](const auto& before, const auto& batch, size_t group) {
      formats::i64 count = num_batches[group];
      const auto now = formats::observed_mean(before, batch, count);
      num_batches[group] = count;
      return now;
    });
  } else {
    const double history = history_of(config);
    halfbyte::update(*this, batch_min, batch_max, [&](const auto& before, const auto& batch, size_t) {
      return formats::observed(before, batch, history);
    });
    ++num_batches[0];
  }
}
void ObserverState::update(const ObserverConfig& config, double batch_min, double batch_max) {
  update(config, std::span(&batch_min, 1), std::span(&batch_max, 1));
}

void ObserverState::merge(const ObserverConfig& config, const ObserverState& other) {
  check_config(config);
  check_state(*this);
  check_counts(config, *this);
  check_state(other);
  HALFBYTE_CHECK(other.min.size() == min.size() && other.dtype == dtype, usage,
                 "observer: only states of as many groups and one dtype merge, got {} of {} and {} of {}",
                 min.size(), to_string(dtype), other.min.size(), to_string(other.dtype));
  check_counts(config, other);
  if (counts_per_group(config.kind)) {
    halfbyte::update(*this, other.min, other.max, [&](const auto& own, const auto& others, size_t group) {
      const int64_t count = own.empty() ? 0 : num_batches[group],
                    more = others.empty() ? 0 : other.num_batches[group];
      num_batches[group] = count + more;
      return formats::observed(own, others, share_of(config, count, more));
    });
  } else {
    const double share = share_of(config, num_batches[0], other.num_batches[0]);
    halfbyte::update(*this, other.min, other.max, [&](const auto& own, const auto& others, size_t) {
      return formats::observed(own, others, share);
    });
    num_batches[0] += other.num_batches[0];
  }
}

std::vector<QParams> ObserverState::qparams(const QParamsConfig& config, DType scale_dtype) const {
  check_state(*this);
  std::vector<QParams> result;
  result.reserve(min.size());
  for (size_t i = 0; i < min.size(); ++i) {
    HALFBYTE_CHECK(!(min[i] > max[i]), usage, "observer has no data: group {} of {} has seen no finite value",
                   i, min.size());
    result.push_back(compute_qparams(min[i], max[i], config, scale_dtype, dtype));
  }
  return result;
}

}  // namespace halfbyte
