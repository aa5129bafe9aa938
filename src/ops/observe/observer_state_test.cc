// Scales and zero points from ranges, and observers by values of the host: what PyTorch has, and what goes
// wrong elsewhere.
#include <cmath>
#include <limits>

#include "halfbyte/observe.hpp"
#include "ops/testing.h"

namespace halfbyte {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTorchEps = 0x1p-23;

QParamsConfig codes(int q_min, int q_max, bool asymmetric, ScaleRule rule) {
  return {q_min, q_max, asymmetric, rule, kTorchEps};
}
QParamsConfig asymmetric(int q_min, int q_max) { return codes(q_min, q_max, true, ScaleRule::minmax); }
QParamsConfig symmetric(int q_min, int q_max) { return codes(q_min, q_max, false, ScaleRule::half_range); }

void expect_qparams(const QParams& actual, float scale, int zero_point) {
  EXPECT_EQ(static_cast<float>(actual.scale), scale);
  EXPECT_EQ(actual.scale, static_cast<double>(static_cast<float>(actual.scale)));
  EXPECT_EQ(actual.zero_point, zero_point);
}

// ---- compute_qparams

TEST(QParams, of_bits_are_those_of_qat) {
  const auto of = [](int bits, bool is_asymmetric, double min, double max) {
    return compute_qparams(min, max, QParamsConfig::of_bits(bits, is_asymmetric));
  };
  expect_qparams(of(8, false, -1, 1), 7.874016e-3f, 0);
  expect_qparams(of(4, false, -1, 1), 0.14285715f, 0);
  expect_qparams(of(4, true, -0.5, 2), 0.16666667f, -5);
  expect_qparams(of(8, true, -0.5, 2), 9.803922e-3f, -77);
  expect_qparams(of(8, true, 0, 1), 3.921569e-3f, -128);
  // 0 is in the range (B-4), and small or constant ranges are ranges like any other (B-5).
  EXPECT_EQ(of(8, true, 1, 3), of(8, true, 0, 3));
  expect_qparams(of(8, true, 1, 3), 3.0f / 255, -128);
  EXPECT_EQ(of(8, true, -3, -1), of(8, true, -3, 0));
  expect_qparams(of(8, true, 5, 5), 5.0f / 255, -128);
  EXPECT_EQ(of(8, true, 5, 5), of(8, true, 0, 5));
  expect_qparams(of(8, true, 1e-9, 2e-9), 2e-9f / 255, -128);
  expect_qparams(of(8, false, 1e-30, 1e-30), 1e-30f / 127, 0);
  EXPECT_EQ(of(8, false, 0, 0), QParams{});
  for (int bits = 2; bits <= 8; ++bits) {
    const QParamsConfig config = QParamsConfig::of_bits(bits);
    EXPECT_EQ(config.num_levels(), 1 << bits);
    EXPECT_EQ(compute_qparams(-1, 1, config).scale,
              static_cast<double>(1.0f / static_cast<float>(config.q_max)));
  }
  EXPECT_THROW(QParamsConfig::of_bits(1), Error);
  EXPECT_THROW(QParamsConfig::of_bits(9), Error);
}

TEST(QParams, are_those_of_pytorch) {
  // MinMaxObserver after [-1, .5, 2] and [-3, .1, 1].
  expect_qparams(compute_qparams(-3, 2, asymmetric(-128, 127)), 0.0196078438f, 25);
  expect_qparams(compute_qparams(-3, 2, symmetric(-128, 127)), 0.0235294122f, 0);
  expect_qparams(compute_qparams(-3, 2, asymmetric(0, 255)), 0.0196078438f, 153);
  expect_qparams(compute_qparams(-3, 2, symmetric(0, 255)), 0.0235294122f, 128);
  expect_qparams(compute_qparams(-3, 2, asymmetric(-8, 7)), 0.33333334f, 1);
  // All 3; all 0.
  expect_qparams(compute_qparams(3, 3, asymmetric(0, 255)), 3.0f / 255, 0);
  expect_qparams(compute_qparams(0, 0, asymmetric(0, 255)), 1.1920929e-07f, 0);
  expect_qparams(compute_qparams(-1e-9, 1e-9, asymmetric(0, 255)), 1.1920929e-07f, 0);
}

TEST(QParams, the_scale_is_that_of_its_dtype) {
  const QParamsConfig config = asymmetric(-128, 127);
  for (const DType scale_dtype : {DType::f16, DType::bf16, DType::f32}) {
    const QParams params = compute_qparams(-1, 2, config, scale_dtype);
    testing::Values stored;
    stored.dtype = scale_dtype;
    stored.push_back(static_cast<double>(3.0f / 255));
    EXPECT_EQ(params.scale, stored.exact[0]) << to_string(scale_dtype);
    EXPECT_EQ(params.zero_point, -128 - std::lrint(-1 / stored.exact[0]));
  }
  EXPECT_EQ(compute_qparams(-1, 2, config, DType::f64, DType::f64).scale, 3.0 / 255);
  EXPECT_EQ(compute_qparams(-1, 2, config, DType::f32, DType::f64).scale, static_cast<double>(3.0f / 255));
  EXPECT_THROW(compute_qparams(-1, 2, config, DType::f64), Error) << "f64 scales of f32";
  EXPECT_THROW(compute_qparams(-1, 2, config, DType::i8), Error);
}

// A value in the range comes back to within half a step and what the scale was rounded by.
TEST(QParams, ranges_are_covered) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 20000; ++i) {
    const int q_min = static_cast<int>(random() % 384) - 128;
    const int levels = std::min(255 - q_min, 2 + static_cast<int>(random() % 254));
    if (levels < 2) continue;
    QParamsConfig config{q_min, q_min + levels, random() % 2 == 0, ScaleRule::minmax, 0};
    if (!config.asymmetric) config.scale_rule = random() % 2 ? ScaleRule::absmax : ScaleRule::half_range;
    if (!config.asymmetric && config.q_max <= 0) continue;
    const double magnitude = std::exp2(static_cast<double>(random() % 200) - 100);
    const double a = static_cast<float>(normal(random) * magnitude),
                 b = static_cast<float>(normal(random) * magnitude);
    const double min = std::min(a, b), max = std::max(a, b);
    const QParams params = compute_qparams(min, max, config);
    ASSERT_GT(params.scale, 0);
    ASSERT_GE(params.zero_point, config.asymmetric || q_min >= 0 ? q_min : 0);
    ASSERT_LE(params.zero_point, config.asymmetric || q_min >= 0 ? config.q_max : 0);
    // Rounding of the zero point costs half a step, symmetric half-range or one-sided bounds half a step too.
    if (!config.asymmetric && q_min < 0 && -q_min < config.q_max) continue;  // the negative end is cut
    const double low = (config.q_min - params.zero_point) * params.scale,
                 high = (config.q_max - params.zero_point) * params.scale;
    ASSERT_LE(low, min + params.scale * 0.5001)
        << config.q_min << " " << config.q_max << " " << min << " " << max;
    if (config.asymmetric || config.scale_rule == ScaleRule::absmax || -q_min == config.q_max)
      ASSERT_GE(high, max - params.scale * 0.5001);
    else
      ASSERT_GE(high,
                max - params.scale *
                          (0.5001 + std::abs(config.q_min + config.q_max - 2 * params.zero_point) / 2.0));
  }
}

void refused(ErrorCode code, const std::string& word, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << word << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(QParams, bad_configurations_are_refused) {
  const auto expect = [](const QParamsConfig& config, const std::string& word) {
    refused(ErrorCode::usage, word, [&] { check_config(config); });
    refused(ErrorCode::usage, word, [&] { compute_qparams(-1, 1, config); });
  };
  expect({-129, 126}, "q_min");
  expect({0, 256}, "q_max");
  expect({0, 1}, "q_max - q_min");
  expect({5, 4}, "q_max - q_min");
  expect({-128, 128, false}, "q_max - q_min");
  expect({-128, 0, false}, "q_max > 0");
  expect({-128, 127, true, ScaleRule::absmax}, "minmax");
  expect({-128, 127, false, ScaleRule::minmax}, "absmax or half-range");
  expect({-128, 127, false, ScaleRule::signed_max}, "absmax or half-range");
  expect({-128, 127, false, ScaleRule::absmax, -1}, "eps");
  expect({-128, 127, false, ScaleRule::absmax, kNaN}, "eps");
  expect({-128, 127, false, ScaleRule::absmax, kInfinity}, "eps");
  check_config({-128, 0, true, ScaleRule::minmax});
}

TEST(QParams, bad_ranges_are_refused) {
  const QParamsConfig config = QParamsConfig::of_bits(8);
  refused(ErrorCode::bad_input, "finite", [&] { compute_qparams(kNaN, 1, config); });
  refused(ErrorCode::bad_input, "finite", [&] { compute_qparams(-1, kNaN, config); });
  refused(ErrorCode::bad_input, "finite", [&] { compute_qparams(-kInfinity, 1, config); });
  refused(ErrorCode::bad_input, "finite", [&] { compute_qparams(-1, 1e300, config); });
  refused(ErrorCode::bad_input, "at most max", [&] { compute_qparams(1, -1, config); });
  refused(ErrorCode::bad_input, "cannot hold", [&] { compute_qparams(-1e30, 1e30, config, DType::f16); });
}

// ---- ObserverState

TEST(ObserverState, the_golden_batches_of_pytorch) {
  ObserverConfig config;
  ObserverState state = ObserverState::empty(1);
  state.update(config, -1, 2);
  state.update(config, -3, 1);
  EXPECT_EQ(state.min[0], -3);
  EXPECT_EQ(state.max[0], 2);
  expect_qparams(state.qparams(asymmetric(-128, 127))[0], 0.0196078438f, 25);
  config.kind = ObserverKind::moving_average;  // averaging constant .01
  ObserverState average = ObserverState::empty(1);
  average.update(config, -1, 2);
  average.update(config, -3, 1);
  EXPECT_EQ(static_cast<float>(average.min[0]), -1.02f);
  EXPECT_EQ(static_cast<float>(average.max[0]), 1.99f);
  expect_qparams(average.qparams(asymmetric(-128, 127))[0], 0.0118039213f, -42);
}

// old + c (new - old) in f32, as PyTorch has it.
TEST(ObserverState, averages_are_within_an_ulp_of_pytorch) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  ObserverConfig config;
  config.kind = ObserverKind::moving_average;
  const float c = 0.01f;
  for (int i = 0; i < 2000; ++i) {
    const float old = -std::fabs(normal(random)), now = -std::fabs(normal(random));
    ObserverState state = ObserverState::empty(1);
    state.update(config, old, 0);
    state.update(config, now, 0);
    const float torch = old + c * (now - old);
    const auto ours = static_cast<float>(state.min[0]);
    EXPECT_GE(ours, std::nextafterf(torch, -INFINITY));
    EXPECT_LE(ours, std::nextafterf(torch, INFINITY));
  }
  // -1, -2, -3 and 1, 3, 5 (documented to five digits).
  ObserverState state = ObserverState::empty(1);
  state.update(config, -1, 1);
  state.update(config, -2, 3);
  state.update(config, -3, 5);
  EXPECT_NEAR(state.min[0], -1.0299, 1e-6);
  EXPECT_NEAR(state.max[0], 1.0598, 1e-6);
}

// B-1: the configured momentum is used. B-7: zeros are a batch like any other.
TEST(ObserverState, the_momentum_is_used) {
  ObserverConfig config;
  config.kind = ObserverKind::moving_average;
  config.momentum = 0.9;
  ObserverState state = ObserverState::empty(1);
  state.update(config, -1, 1);
  state.update(config, -2, 3);
  EXPECT_EQ(static_cast<float>(state.min[0]), -1.1f);
  EXPECT_EQ(static_cast<float>(state.max[0]), 1.2f);
  config.momentum = 0.5;
  state = ObserverState::empty(1);
  state.update(config, -1, 1);
  state.update(config, -2, 3);
  EXPECT_EQ(state.min[0], -1.5);
  EXPECT_EQ(state.max[0], 2);
  state = ObserverState::empty(1);
  state.update(config, 0, 0);
  state.update(config, -2, 2);
  EXPECT_EQ(state.max[0], 1);
  state.update(config, 0, 0);
  state.update(config, -2, 2);
  EXPECT_EQ(state.max[0], 1.25);
  EXPECT_EQ(state.num_batches[0], 4);
}

// B-2: the ranges of batches are averaged, not joined.
TEST(ObserverState, percentiles_are_averaged) {
  for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse}) {
    ObserverConfig config;
    config.kind = kind;
    ObserverState state = ObserverState::empty(1, DType::f32, kind);
    state.update(config, -1, 1);
    state.update(config, -2, 3);
    state.update(config, -6, 2);
    EXPECT_EQ(state.min[0], -3);
    EXPECT_EQ(state.max[0], 2);
    EXPECT_EQ(state.num_batches[0], 3);
  }
}

// B-6: nothing seen is an error, and so is what is no range; the state stays as it was.
TEST(ObserverState, what_is_no_range_is_refused) {
  ObserverConfig config;
  ObserverState state = ObserverState::empty(2);
  refused(ErrorCode::usage, "no data", [&] { state.qparams(QParamsConfig::of_bits(8)); });
  state.update(config, std::vector<double>{-1, 0}, std::vector<double>{1, 0});
  const ObserverState before = state;
  const auto expect = [&](ErrorCode code, const std::string& word, std::vector<double> min,
                          std::vector<double> max) {
    refused(code, word, [&] { state.update(config, min, max); });
    EXPECT_EQ(state, before);
  };
  expect(ErrorCode::bad_input, "finite", {-2, kNaN}, {2, 1});
  expect(ErrorCode::bad_input, "finite", {-2, 0}, {2, kInfinity});
  expect(ErrorCode::bad_input, "finite", {-1e39, 0}, {2, 1});
  expect(ErrorCode::bad_input, "at most", {-2, 1}, {2, 0});
  expect(ErrorCode::usage, "2 values", {-2}, {2});
  config.momentum = kNaN;
  expect(ErrorCode::usage, "momentum", {-2, 0}, {2, 0});
  config = {};
  config.percentile = kNaN;
  expect(ErrorCode::usage, "percentile", {-2, 0}, {2, 0});
  config = {};
  config.kind = static_cast<ObserverKind>(9);
  expect(ErrorCode::usage, "kind", {-2, 0}, {2, 0});
  EXPECT_EQ(state.qparams(QParamsConfig::of_bits(8))[0].scale, static_cast<double>(1.0f / 127));
}

TEST(ObserverState, states_merge) {
  const auto seen = [](const ObserverConfig& config, const std::vector<std::pair<double, double>>& ranges) {
    ObserverState state = ObserverState::empty(1);
    for (const auto& [min, max] : ranges) state.update(config, min, max);
    return state;
  };
  ObserverConfig config;
  ObserverState state = seen(config, {{-1, 1}, {0, 3}});
  state.merge(config, seen(config, {{-2, 2}}));
  EXPECT_EQ(state, seen(config, {{-1, 1}, {0, 3}, {-2, 2}}));
  const ObserverState before = state;
  state.merge(config, ObserverState::empty(1));
  EXPECT_EQ(state, before);
  ObserverState none = ObserverState::empty(1);
  none.merge(config, before);
  EXPECT_EQ(none, before);
  config.kind = ObserverKind::percentile;  // means over batches: as if one had seen all
  state = seen(config, {{-1, 1}, {-3, 2}});
  state.merge(config, seen(config, {{-5, 6}}));
  EXPECT_EQ(state.min[0], -3);
  EXPECT_EQ(state.max[0], 3);
  EXPECT_EQ(state.num_batches[0], 3);
  config.kind = ObserverKind::moving_average;
  state = seen(config, {{-1, 1}});
  state.merge(config, seen(config, {{-2, 2}}));
  EXPECT_EQ(state.min[0], -1.5);
  ObserverState worn = state;
  worn.num_batches[0] = std::numeric_limits<int64_t>::max();
  refused(ErrorCode::usage, "num_batches must be in [0, 2^53), got 9223372036854775807",
          [&] { state.merge(config, worn); });
  refused(ErrorCode::usage, "num_batches", [&] { worn.update(config, -1, 1); });
  refused(ErrorCode::usage, "as many groups", [&] { state.merge(config, ObserverState::empty(2)); });
  refused(ErrorCode::usage, "one dtype", [&] { state.merge(config, ObserverState::empty(1, DType::f64)); });
}

// Means weigh what each group has seen; a state that does not tell is refused.
TEST(ObserverState, means_count_per_group) {
  for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse}) {
    ObserverConfig config;
    config.kind = kind;
    EXPECT_TRUE(counts_per_group(kind));
    const ObserverState empty = ObserverState::empty(3, DType::f32, kind);
    EXPECT_EQ(empty.num_batches, std::vector<int64_t>(3));
    ObserverState state = empty, other = empty;
    state.min = state.max = {4, 4, kInfinity};
    state.max[2] = -kInfinity;
    state.num_batches = {1, 3, 7};  // 7: of a group that has seen nothing, it does not count
    other.min = other.max = {12, 12, 12};
    other.num_batches = {3, 1, 2};
    state.merge(config, other);
    EXPECT_EQ(state.max, std::vector<double>({10, 6, 12}));
    EXPECT_EQ(state.min, state.max);
    EXPECT_EQ(state.num_batches, std::vector<int64_t>({4, 4, 2}));
    const std::vector<double> batch = {20, 1, 0};
    state.update(config, batch, batch);
    EXPECT_EQ(state.max, std::vector<double>({12, 5, 8}));
    EXPECT_EQ(state.num_batches, std::vector<int64_t>({5, 5, 3}));
    const ObserverState before = state;
    ObserverState one = ObserverState::empty(1, DType::f32, kind);
    for (const double value : {kInfinity, kInfinity, 10.0, 20.0})  // no finite values in two batches
      one.update(config, value, std::isinf(value) ? -value : value);
    EXPECT_EQ(one.max[0], 15);
    EXPECT_EQ(one.num_batches, std::vector<int64_t>({2}));
    refused(ErrorCode::bad_input, "finite", [&] { one.update(config, kInfinity, 1); });
    state.num_batches = {5};
    const std::string refusal = "num_batches of " + std::string(to_string(kind)) +
                                " must have a count of each of the 3 groups, got 1: a state with one count";
    refused(ErrorCode::usage, refusal, [&] { state.update(config, batch, batch); });
    refused(ErrorCode::usage, refusal, [&] { state.merge(config, before); });
    refused(ErrorCode::usage, refusal, [&, copy = before]() mutable { copy.merge(config, state); });
    state.num_batches = {5, 5};
    refused(ErrorCode::usage, "one of each of the 3 groups, got 2",
            [&] { state.update(config, batch, batch); });
    EXPECT_EQ(state.max, before.max);
    config.kind = ObserverKind::min_max;
    state.num_batches = before.num_batches;
    refused(ErrorCode::usage, "num_batches of min-max must have one count of the 3 groups, got 3",
            [&] { state.update(config, batch, batch); });
  }
  EXPECT_FALSE(counts_per_group(ObserverKind::min_max));
  EXPECT_FALSE(counts_per_group(ObserverKind::moving_average));
}

TEST(ObserverState, kinds_have_words) {
  for (const ObserverKind kind :
       {ObserverKind::min_max, ObserverKind::moving_average, ObserverKind::percentile, ObserverKind::mse})
    EXPECT_EQ(parse_observer_kind(to_string(kind)), kind);
  EXPECT_STREQ(to_string(ObserverKind::moving_average), "moving-average");
  refused(ErrorCode::usage, "min-max, moving-average, percentile, mse",
          [] { parse_observer_kind("histogram"); });
}

TEST(ObserverState, computes_in_its_dtype) {
  ObserverConfig config;
  ObserverState state = ObserverState::empty(1, DType::f64);
  state.update(config, -0.1, 1e300);
  EXPECT_EQ(state.min[0], -0.1);
  EXPECT_EQ(state.qparams(QParamsConfig::of_bits(8, true), DType::f64)[0].scale, (1e300 + 0.1) / 255);
  ObserverState single = ObserverState::empty(1);
  single.update(config, -0.1, 1);
  EXPECT_EQ(single.min[0], static_cast<double>(-0.1f));
  refused(ErrorCode::usage, "dtype", [] { ObserverState::empty(1, DType::f16); });
  refused(ErrorCode::usage, "groups", [] { ObserverState::empty(-1); });
}

}  // namespace
}  // namespace halfbyte
