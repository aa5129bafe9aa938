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

// Where num_batches batches were seen before.
double history_of(const ObserverConfig& config, int64_t num_batches) {
  switch (config.kind) {
    case ObserverKind::min_max:
      return -1;
    case ObserverKind::moving_average:
      return config.momentum;
    default:
      return static_cast<double>(num_batches) / static_cast<double>(num_batches + 1);
  }
}

template <class F>
formats::Seen<F> seen_of(double min, double max) {
  return {static_cast<F>(min) + 0, static_cast<F>(max) + 0};  // -0 becomes +0
}

template <class F>
void update(ObserverState& state, double history, std::span<const double> min, std::span<const double> max) {
  for (size_t i = 0; i < min.size(); ++i) {
    const auto seen =
        formats::observed(seen_of<F>(state.min[i], state.max[i]), seen_of<F>(min[i], max[i]), history);
    state.min[i] = static_cast<double>(seen.min);
    state.max[i] = static_cast<double>(seen.max);
  }
}

double rounded(double value, DType dtype) {
  return dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
}

}  // namespace

void check_state(const ObserverState& state) {
  HALFBYTE_CHECK(state.min.size() == state.max.size(), usage,
                 "observer: min and max must have one value of each group, got {} and {}", state.min.size(),
                 state.max.size());
  HALFBYTE_CHECK(state.dtype == DType::f32 || state.dtype == DType::f64, usage,
                 "observer: dtype must be f32 or f64, got {}", to_string(state.dtype));
  // Means have it as a double.
  HALFBYTE_CHECK(0 <= state.num_batches && state.num_batches < int64_t{1} << 53, usage,
                 "observer: num_batches must be in [0, 2^53), got {}", state.num_batches);
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
  HALFBYTE_CHECK(50 < config.percentile && config.percentile <= 100, usage,
                 "observer: percentile must be in (50, 100], got {}", config.percentile);
  check_config(config.qparams);
}

ObserverState ObserverState::empty(int64_t num_groups, DType dtype) {
  HALFBYTE_CHECK(num_groups >= 0, usage, "observer: the number of groups must be >= 0, got {}", num_groups);
  ObserverState state;
  state.min.assign(static_cast<size_t>(num_groups), kInfinity);
  state.max.assign(static_cast<size_t>(num_groups), -kInfinity);
  state.dtype = dtype;
  check_state(state);
  return state;
}

void ObserverState::update(const ObserverConfig& config, std::span<const double> batch_min,
                           std::span<const double> batch_max) {
  check_config(config);
  check_state(*this);
  HALFBYTE_CHECK(batch_min.size() == min.size() && batch_max.size() == min.size(), usage,
                 "observer: batch_min and batch_max must have {} values, one of each group, got {} and {}",
                 min.size(), batch_min.size(), batch_max.size());
  for (size_t i = 0; i < min.size(); ++i) {
    HALFBYTE_CHECK(std::isfinite(rounded(batch_min[i], dtype)) && std::isfinite(rounded(batch_max[i], dtype)),
                   bad_input, "observer: the range of a batch must be finite in {}, got [{}, {}] of group {}",
                   to_string(dtype), batch_min[i], batch_max[i], i);
    HALFBYTE_CHECK(batch_min[i] <= batch_max[i], bad_input,
                   "observer: batch_min must be at most batch_max, got {} and {} of group {}", batch_min[i],
                   batch_max[i], i);
  }
  const double history = history_of(config, num_batches);
  if (dtype == DType::f64)
    halfbyte::update<double>(*this, history, batch_min, batch_max);
  else
    halfbyte::update<float>(*this, history, batch_min, batch_max);
  ++num_batches;
}
void ObserverState::update(const ObserverConfig& config, double batch_min, double batch_max) {
  update(config, std::span(&batch_min, 1), std::span(&batch_max, 1));
}

void ObserverState::merge(const ObserverConfig& config, const ObserverState& other) {
  check_config(config);
  check_state(*this);
  check_state(other);
  HALFBYTE_CHECK(other.min.size() == min.size() && other.dtype == dtype, usage,
                 "observer: only states of as many groups and one dtype merge, got {} of {} and {} of {}",
                 min.size(), to_string(dtype), other.min.size(), to_string(other.dtype));
  const int64_t total = num_batches + other.num_batches;
  const double history = config.kind == ObserverKind::min_max || total == 0
                             ? -1
                             : static_cast<double>(num_batches) / static_cast<double>(total);
  if (dtype == DType::f64)
    halfbyte::update<double>(*this, history, other.min, other.max);
  else
    halfbyte::update<float>(*this, history, other.min, other.max);
  num_batches = total;
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
