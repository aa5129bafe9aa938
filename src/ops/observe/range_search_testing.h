// For the tests of percentile and mse ranges: random observers, data of known kinds.
#pragma once

#include "ops/observe/observe_testing.h"

namespace halfbyte::testing {

inline ObserverConfig random_search(std::mt19937_64& random) {
  const auto pick = [&](std::initializer_list<double> from) {
    return *(from.begin() + random() % from.size());
  };
  ObserverConfig config;
  config.kind = random() % 2 ? ObserverKind::percentile : ObserverKind::mse;
  config.percentile = pick({99.99, 99.9, 99, 90, 75, 51, 50.001, 50, 30, 0.01, 100});
  QParamsConfig& codes = config.qparams;
  codes = QParamsConfig::of_bits(static_cast<int>(2 + random() % 7), random() % 2 != 0);
  if (random() % 4 == 0) {  // unsigned
    codes.q_max -= codes.q_min;
    codes.q_min = 0;
  }
  if (!codes.asymmetric && random() % 2) codes.scale_rule = ScaleRule::half_range;
  if (random() % 4 == 0) codes.eps = pick({0x1p-23, 1e-3, 0.1, 1e30});
  return config;
}

enum class Shape { normal, laplace, uniform, heavy, outlier, positive };
inline constexpr Shape kShapes[] = {Shape::normal, Shape::laplace, Shape::uniform,
                                    Shape::heavy,  Shape::outlier, Shape::positive};
// n values of a distribution; `outlier`: normal but for one.
inline std::vector<float> values_of(Shape shape, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::exponential_distribution<float> exponential;
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::student_t_distribution<float> heavy(3);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& x : values) switch (shape) {
      case Shape::laplace:
        x = exponential(random) * (random() % 2 ? 1.0f : -1.0f);
        break;
      case Shape::uniform:
        x = uniform(random);
        break;
      case Shape::heavy:
        x = heavy(random);
        break;
      case Shape::positive:
        x = std::fabs(normal(random)) * (random() % 4 ? 1.0f : -0.2f);
        break;
      default:
        x = normal(random);
        break;
    }
  if (shape == Shape::outlier && n > 0) values[random() % values.size()] = 100;
  return values;
}

}  // namespace halfbyte::testing
