// Percentile and mse ranges: the kernels against the scalar reference, the reference against sorted data and
// a search of all candidates.
#include <limits>

#include "ops/observe/range_search_testing.h"

namespace halfbyte {
namespace {

using formats::Seen;
using testing::ObserveCase;

// What the reference makes of it.
struct Expected {
  explicit Expected(const ObserveCase& of) : test(of), status(testing::run_reference(test)) {}
  ObserveCase test;
  QuantizeStatus status;
};

void expect_equal(Expected& expected, ObserveCase test, const PlanPreference& preference) {
  const QuantizeStatus status = testing::run_on_cpu(test, preference);
  const ObserverConfig& config = test.descriptor.observer;
  ASSERT_TRUE(testing::same_tensors(expected.test, test))
      << test.text() << " percentile " << config.percentile << " codes [" << config.qparams.q_min << ", "
      << config.qparams.q_max << "] eps " << config.qparams.eps;
  ASSERT_TRUE(testing::same_status(expected.status, status)) << test.text();
}
void expect_reference(const ObserveCase& test, const PlanPreference& preference) {
  Expected expected(test);
  expect_equal(expected, test, preference);
}

TEST(RangeSearch, every_target_equals_the_reference) {
  testing::ObserveCases cases(1);
  std::mt19937_64 random(2);
  for (int i = 0; i < (testing::kSanitized ? 20 : 150); ++i) {
    ObserveCase test = cases.next(i % 50 == 0 ? 20000 : 500);
    test.descriptor.observer = testing::random_search(random);
    cases.fill(test);
    Expected expected(test);
    testing::for_each_target([&](const char*) { expect_equal(expected, test, {1 + i % 3}); });
  }
}

// Longer than a thread sorts, and than it searches alone.
TEST(RangeSearch, long_groups_equal_the_reference) {
  testing::ObserveCases cases(3);
  std::mt19937_64 random(4);
  for (int i = 0; i < 8; ++i) {
    ObserveCase test;
    ObserveDescriptor& d = test.descriptor;
    d.observer = testing::random_search(random);
    d.observer.kind = i % 2 ? ObserverKind::mse : ObserverKind::percentile;
    d.dtype = testing::kFloatDTypes[i / 2];
    d.shape = {3, i % 2 ? 15000 : 200000, 2};
    if (i % 4 < 2) {
      d.granularity = Granularity::channel;
      d.axis = 2;
    }
    cases.fill(test);
    expect_reference(test, {4});
  }
}

// ---- Percentile

Seen<double> percentile_of(const std::vector<double>& values, double percentile) {
  return range_search_ref::percentile_range(values, percentile);
}

TEST(RangeSearch, percentiles_are_order_statistics) {
  std::vector<double> values(1000);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<double>((i * 7) % 1000) + 1;  // 1 .. 1000
  const auto expect = [&](double percentile, double min, double max) {
    EXPECT_EQ(percentile_of(values, percentile).min, min) << percentile;
    EXPECT_EQ(percentile_of(values, percentile).max, max) << percentile;
  };
  expect(100, 1, 1000);
  expect(99.95, 1, 1000);
  expect(99.9, 2, 999);
  expect(99.85, 2, 999);
  expect(99, 11, 990);
  expect(90, 101, 900);
  expect(50.1, 500, 501);
  // The ends never cross: what lies between is the median.
  for (const double percentile : {50.0, 49.9, 25.0, 1.0, 1e-300}) expect(percentile, 500, 501);
  values.push_back(std::numeric_limits<double>::quiet_NaN());
  values.push_back(std::numeric_limits<double>::infinity());
  expect(99.9, 2, 999);
}

TEST(RangeSearch, the_rank_is_the_nearest_above) {
  EXPECT_EQ(formats::percentile_rank(99.99, 1), 1);
  EXPECT_EQ(formats::percentile_rank(99.99, 2), 2);
  EXPECT_EQ(formats::percentile_rank(50.1, 3), 2);
  EXPECT_EQ(formats::percentile_rank(50, 3), 2);
  EXPECT_EQ(formats::percentile_rank(50, 4), 3);
  EXPECT_EQ(formats::percentile_rank(0.1, 4), 3);
  EXPECT_EQ(formats::percentile_rank(std::nextafter(50.0, 51), 4), 3);
  EXPECT_EQ(formats::percentile_rank(99.9, 1000), 999);
  EXPECT_EQ(formats::percentile_rank(99.9, 1001), 1000);
  EXPECT_EQ(formats::percentile_rank(100, (int64_t{1} << 31) + 1), (int64_t{1} << 31) + 1);
  EXPECT_EQ(formats::percentile_rank(75, int64_t{1} << 40), int64_t{3} << 38);
}

TEST(RangeSearch, few_values_have_percentiles_too) {
  EXPECT_TRUE(percentile_of({}, 99).empty());
  EXPECT_TRUE(percentile_of({std::numeric_limits<double>::quiet_NaN()}, 99).empty());
  EXPECT_EQ(percentile_of({3}, 60).min, 3);
  EXPECT_EQ(percentile_of({3}, 60).max, 3);
  EXPECT_EQ(percentile_of({4, 3}, 60).min, 3);
  EXPECT_EQ(percentile_of({4, 3}, 60).max, 4);
  EXPECT_EQ(percentile_of({5, 3, 4}, 60).min, 4);
  EXPECT_EQ(percentile_of({5, 3, 4}, 67).max, 5);
  EXPECT_EQ(percentile_of({5, 3, 4}, 20).min, 4);
  EXPECT_EQ(percentile_of({5, 3, 4}, 20).max, 4);
  EXPECT_FALSE(std::signbit(percentile_of({-0.0, -0.0, -0.0}, 60).min));
}

// A batch of f32 through a plan.
struct Batch {
  explicit Batch(ObserverConfig config, std::vector<float> values) : x(std::move(values)) {
    ObserveDescriptor descriptor;
    descriptor.shape = {static_cast<int64_t>(x.size())};
    descriptor.observer = config;
    const auto plan = ObservePlan::select({}, descriptor);
    alignas(16) QuantizeStatus workspace;
    plan.run(nullptr, {&workspace, sizeof workspace},
             {{x.data(), DType::f32, descriptor.shape, {}, {}},
              {&min, DType::f32, {}, {}, {}},
              {&max, DType::f32, {}, {}, {}},
              {&num_batches, DType::i64, {}, {}, {}}});
  }
  std::vector<float> x;
  float min = std::numeric_limits<float>::infinity(), max = -min;
  int64_t num_batches = 0;
};

TEST(RangeSearch, one_outlier_does_not_ruin_the_resolution) {
  ObserverConfig config;
  config.kind = ObserverKind::percentile;
  std::vector<float> x = testing::values_of(testing::Shape::normal, 100000, 5);
  x[12345] = 1e6f;
  config.percentile = 99.99;
  const Batch percentile(config, x);
  EXPECT_LT(percentile.max, 5);
  EXPECT_GT(percentile.max, 3);
  EXPECT_GT(percentile.min, -5);
  config.kind = ObserverKind::mse;
  config.qparams = QParamsConfig::of_bits(8);
  x[12345] = 100;
  for (const bool asymmetric : {false, true}) {
    config.qparams = QParamsConfig::of_bits(8, asymmetric);
    const Batch mse(config, x);
    EXPECT_LT(mse.max, 95) << asymmetric;
  }
}

TEST(RangeSearch, constants_keep_their_value) {
  for (const float constant : {1.0f, -2.5f, 0.0f, 1e-30f, 1e30f, 1e-44f, 1e38f}) {
    ObserverConfig config;
    config.kind = ObserverKind::percentile;
    config.percentile = 75;
    const Batch percentile(config, std::vector<float>(300, constant));
    EXPECT_EQ(percentile.min, constant);
    EXPECT_EQ(percentile.max, constant);
    config.kind = ObserverKind::mse;
    for (const bool asymmetric : {false, true}) {
      config.qparams = QParamsConfig::of_bits(4, asymmetric);
      const Batch mse(config, std::vector<float>(300, constant));
      const QParams q = compute_qparams(mse.min, mse.max, config.qparams);
      if (constant == 0) {
        EXPECT_EQ(mse.max, 0);
        continue;
      }
      const double code = std::clamp<double>(std::nearbyint(constant / q.scale) + q.zero_point, -8, 7);
      EXPECT_NEAR((code - q.zero_point) * q.scale / constant, 1, constant < 1e-40f ? 0.5 : 1e-6)
          << constant << " " << asymmetric << " " << mse.min << " " << mse.max;
    }
  }
}

// The mean over batches.
TEST(RangeSearch, batches_are_averaged) {
  ObserverConfig config;
  config.kind = ObserverKind::percentile;
  config.percentile = 100;
  Batch batch(config, {-1, 2});
  ObserverState state = ObserverState::empty(1, DType::f32, config.kind);
  for (const double max : {2.0, 4.0, 9.0}) state.update(config, -1, max);
  EXPECT_EQ(state.max[0], 5);
  EXPECT_EQ(state.num_batches[0], 3);
  EXPECT_EQ(batch.max, 2);
}

// A group weighs a batch by those in which it had finite values itself.
TEST(RangeSearch, each_group_has_a_mean_of_its_own) {
  for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse})
    for (const DType dtype : testing::kFloatDTypes) {
      ObserveDescriptor descriptor;
      descriptor.shape = {3, 1};
      descriptor.granularity = Granularity::channel;
      descriptor.axis = 0;
      descriptor.dtype = dtype;
      descriptor.observer.kind = kind;
      EXPECT_EQ(descriptor.count_shape(), std::vector<int64_t>({3}));
      const auto plan = ObservePlan::select({}, descriptor);
      std::array<double, 3> low, high;
      std::array<int64_t, 3> counts;
      const DType state_dtype = descriptor.state_dtype();
      const TensorView min{low.data(), state_dtype, {3}, {}, {}}, max{high.data(), state_dtype, {3}, {}, {}},
          num_batches{counts.data(), DType::i64, {3}, {}, {}};
      reset_observer(min, max, num_batches);
      EXPECT_EQ(load_observer(min, max, num_batches), ObserverState::empty(3, state_dtype, kind));
      alignas(16) QuantizeStatus workspace;
      for (const std::array<double, 3>& batch :
           {std::array<double, 3>{NAN, 8, NAN}, {NAN, 8, NAN}, {8, NAN, NAN}, {16, 16, NAN}}) {
        testing::Values x;
        x.dtype = dtype;
        for (const double value : batch) x.push_back(value);
        plan.run(nullptr, {&workspace, sizeof workspace}, {x.view({3, 1}), min, max, num_batches});
      }
      const ObserverState state = load_observer(min, max, num_batches);
      EXPECT_EQ(state.num_batches, std::vector<int64_t>({2, 3, 0}));
      const double third = dtype == DType::f64 ? 8 * (2.0 / 3) + 16 * (1 - 2.0 / 3)
                                               : static_cast<double>(static_cast<float>(32 / 3.0));
      EXPECT_NEAR(state.max[0], 12, kind == ObserverKind::mse ? 1 : 0) << to_string(dtype);
      EXPECT_NEAR(state.max[1], third, kind == ObserverKind::mse ? 1 : 0) << to_string(dtype);
      EXPECT_GT(state.min[2], state.max[2]);
    }
}
TEST(RangeSearch, a_channel_of_nan_nan_10_20_gives_15) {
  ObserverConfig config;
  config.kind = ObserverKind::percentile;
  ObserveDescriptor descriptor;
  descriptor.shape = {1};
  descriptor.granularity = Granularity::channel;
  descriptor.observer = config;
  descriptor.alignment = 4;
  const auto plan = ObservePlan::select({}, descriptor);
  float x = 0, low = 0, high = 0;
  int64_t count = 0;
  const auto view = [](auto& value, DType dtype) { return TensorView{&value, dtype, {1}, {}, {}}; };
  reset_observer(view(low, DType::f32), view(high, DType::f32), view(count, DType::i64));
  alignas(16) QuantizeStatus workspace;
  for (const float value : {NAN, NAN, 10.0f, 20.0f}) {
    x = value;
    plan.run(nullptr, {&workspace, sizeof workspace},
             {view(x, DType::f32), view(low, DType::f32), view(high, DType::f32), view(count, DType::i64)});
  }
  EXPECT_EQ(low, 15);
  EXPECT_EQ(high, 15);
  EXPECT_EQ(count, 2);
}

// ---- Mse

// The sum of the squared errors of values quantized as the range says.
double error_of(const std::vector<float>& x, double min, double max, const QParamsConfig& config) {
  const QParams q = compute_qparams(min, max, config, DType::f64, DType::f64);
  double sum = 0;
  for (const float value : x) {
    const double code = std::clamp<double>(formats::round_half_even(value / q.scale) + q.zero_point,
                                           config.q_min, config.q_max);
    const double error = value - (code - q.zero_point) * q.scale;
    sum += error * error;
  }
  return sum;
}

// Over 4,096 ranges.
double least_error(const std::vector<float>& x, const QParamsConfig& config) {
  const auto [low, high] = std::ranges::minmax(x);
  const double min = std::min(0.0f, low), max = std::max(0.0f, high), absmax = std::max(-min, max);
  double least = std::numeric_limits<double>::infinity();
  for (int k = 0; k < 4096; ++k) {
    const int i = k / 64 + 1, j = k % 64 + 1;
    const double both = absmax * (k + 1) / 4096;
    least = std::min(least, config.asymmetric ? error_of(x, min * i / 64, max * j / 64, config)
                                              : error_of(x, -both, both, config));
  }
  return least;
}

struct Excess {
  double most = 0, mean = 0;
  int above = 0;  // a thousandth
};
Excess excess(testing::Shape shape, int64_t n, int groups, const QParamsConfig& codes) {
  ObserverConfig config;
  config.kind = ObserverKind::mse;
  config.qparams = codes;
  Excess result;
  for (int group = 0; group < groups; ++group) {
    const std::vector<float> x = testing::values_of(shape, n, static_cast<uint64_t>(group) * 977 + 13);
    const Batch batch(config, x);
    const double ratio = error_of(x, batch.min, batch.max, codes) / least_error(x, codes);
    result.most = std::max(result.most, ratio);
    result.mean += ratio / groups;
    result.above += ratio > 1.001 ? 1 : 0;
  }
  return result;
}

// Short groups have errors with many minima: a search may end in one that is not the least, as that over
// 4,096 ranges does more often.
TEST(RangeSearch, errors_of_short_groups_are_the_least_but_for_few) {
  constexpr int kGroups = 25;
  for (const int64_t n : {64, 128})
    for (const testing::Shape shape : testing::kShapes)
      for (const int bits : {2, 3, 4, 8})
        for (const bool asymmetric : {false, true}) {
          const Excess e = excess(shape, n, kGroups, QParamsConfig::of_bits(bits, asymmetric));
          EXPECT_LT(e.mean, 1.001) << n << " shape " << static_cast<int>(shape) << " bits " << bits << " "
                                   << asymmetric;
          EXPECT_LE(e.above, bits == 8 ? 2 : 0)
              << n << " shape " << static_cast<int>(shape) << " bits " << bits << " " << asymmetric;
        }
}

TEST(RangeSearch, errors_of_long_groups_are_the_least) {
  int turn = 0;
  for (const testing::Shape shape : testing::kShapes)
    for (const int bits : {2, 3, 4, 8}) {
      const bool asymmetric = (turn / 4 + turn) % 2 != 0;  // each of them with half of the bits
      ++turn;
      const Excess e = excess(shape, 8192, 1, QParamsConfig::of_bits(bits, asymmetric));
      EXPECT_LT(e.most, 1.001) << "shape " << static_cast<int>(shape) << " bits " << bits << " "
                               << asymmetric;
    }
}
TEST(RangeSearch, errors_of_tensors_are_the_least) {
  for (const int bits : {4, 8}) {
    const Excess e = excess(testing::Shape::heavy, 40000, 1, QParamsConfig::of_bits(bits, bits == 4));
    EXPECT_LT(e.most, 1.001) << bits;
  }
}

}  // namespace
}  // namespace halfbyte
