// The plan of `observe` on the CPU: the scalar reference, what it takes and refuses, its state.
#include <limits>

#include "core/checks.h"
#include "ops/observe/observe_testing.h"

namespace halfbyte {
namespace {

using testing::ObserveCase;
using testing::ObserveCases;
using testing::Storage;

TEST(Observe, every_target_equals_the_reference) {
  testing::for_each_target([&](const char*) {
    ObserveCases cases(1);
    for (int i = 0; i < (testing::kSanitized ? 60 : 600); ++i) {
      ObserveCase test = cases.next(i % 25 == 0 ? 200000 : 2000), expected = test;
      const QuantizeStatus status = testing::run_on_cpu(test, {1 + i % 3});
      const QuantizeStatus reference = testing::run_reference(expected);
      ASSERT_TRUE(testing::same_tensors(expected, test)) << test.text();
      ASSERT_TRUE(testing::same_status(reference, status)) << test.text() << "\n" << testing::text_of(status);
    }
  });
}

// The reference against the definition: an element belongs to the group of its index.
TEST(Observe, the_groups_are_those_of_linear_scales) {
  const std::vector<float> x = {1, -2, 3, 4, 5, -6, 7, 8, -9, 10, 11, 12};  // [2, 3, 2]
  const auto observed = [&](Granularity granularity, int axis, int64_t group_size) {
    ObserveCase test;
    test.descriptor.shape = {2, 3, 2};
    test.descriptor.granularity = granularity;
    test.descriptor.axis = axis;
    test.descriptor.group_size = group_size;
    const std::vector<int64_t> shape = test.descriptor.state_shape();
    const std::vector<float> low(12, INFINITY), high(12, -INFINITY);
    const int64_t none = 0;
    test.x = Storage(DType::f32, {2, 3, 2}, x.data());
    test.min = Storage(DType::f32, shape, low.data());
    test.max = Storage(DType::f32, shape, high.data());
    test.num_batches = Storage(DType::i64, {}, &none);
    EXPECT_TRUE(testing::run_on_cpu(test).ok());
    ObserverState state =
        load_observer(test.min.at(test.min.bytes.data(), {}), test.max.at(test.max.bytes.data(), {}),
                      test.num_batches.at(test.num_batches.bytes.data(), {}));
    EXPECT_EQ(state.num_batches[0], 1);
    return state;
  };
  using Values = std::vector<double>;
  EXPECT_EQ(observed(Granularity::tensor, -1, 0).min, Values({-9}));
  EXPECT_EQ(observed(Granularity::tensor, -1, 0).max, Values({12}));
  EXPECT_EQ(observed(Granularity::channel, 0, 0).min, Values({-6, -9}));
  EXPECT_EQ(observed(Granularity::channel, 1, 0).min, Values({-2, -9, -6}));
  EXPECT_EQ(observed(Granularity::channel, 2, 0).max, Values({11, 12}));
  EXPECT_EQ(observed(Granularity::channel, -1, 0).min, Values({-9, -6}));
  EXPECT_EQ(observed(Granularity::group, 1, 2).min, Values({1, -2, 5, -6, -9, 8, 11, 12}));
  EXPECT_EQ(observed(Granularity::group, 1, 2).max, Values({3, 4, 5, -6, 7, 10, 11, 12}));
  EXPECT_EQ(observed(Granularity::group, -1, 1).max, Values(x.begin(), x.end()));
}

// One observer of [n] values, batch by batch.
struct Observed {
  explicit Observed(ObserverConfig config, DType dtype = DType::f32) {
    descriptor.observer = config;
    descriptor.dtype = dtype;
    reset_observer(min_view(), max_view(), batches_view());
  }
  QuantizeStatus batch(const std::vector<double>& values) {
    testing::Values x;
    x.dtype = descriptor.dtype;
    for (const double value : values) x.push_back(value);
    descriptor.shape = {static_cast<int64_t>(values.size())};
    const auto plan = ObservePlan::select({}, descriptor);
    alignas(16) QuantizeStatus workspace;
    plan.run(nullptr, {&workspace, sizeof workspace},
             {x.view(descriptor.shape), min_view(), max_view(), batches_view()});
    return plan.status(nullptr, {&workspace, sizeof workspace});
  }
  ObserverState state() { return load_observer(min_view(), max_view(), batches_view()); }
  TensorView min_view() { return {&min, descriptor.state_dtype(), {}, {}, {}}; }
  TensorView max_view() { return {&max, descriptor.state_dtype(), {}, {}, {}}; }
  TensorView batches_view() { return {&num_batches, DType::i64, {1}, {}, {}}; }

  ObserveDescriptor descriptor;
  alignas(8) std::array<std::byte, 8> min{}, max{};
  int64_t num_batches = 5;
};

TEST(Observe, a_first_batch_is_that_after_a_reset) {
  for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
    Observed observed({}, dtype);
    EXPECT_EQ(observed.state(), ObserverState::empty(1, observed.descriptor.state_dtype()));
    EXPECT_TRUE(observed.batch({0.5, -0.25, 0}).ok());
    EXPECT_EQ(observed.state().min[0], -0.25);
    EXPECT_EQ(observed.state().max[0], 0.5);
    EXPECT_EQ(observed.state().num_batches[0], 1);
  }
}

// B-1 and B-7 of what others do: the momentum is used, and zeros are a batch like any other.
TEST(Observe, the_momentum_weighs_history) {
  ObserverConfig config;
  config.kind = ObserverKind::moving_average;
  config.momentum = 0.5;
  Observed half(config);
  half.batch({-1, 1});
  half.batch({-2, 3});
  EXPECT_EQ(half.state().min[0], -1.5);
  EXPECT_EQ(half.state().max[0], 2);
  config.momentum = 0.75;
  Observed zeros(config);
  zeros.batch({0, 0});
  zeros.batch({-4, 4});
  EXPECT_EQ(zeros.state().min[0], -1);
  EXPECT_EQ(zeros.state().max[0], 1);
  zeros.batch({0, 0});
  EXPECT_EQ(zeros.state().max[0], 0.75);
  EXPECT_EQ(zeros.state().num_batches[0], 3);
}

TEST(Observe, only_finite_values_count) {
  Observed observed({});
  const QuantizeStatus status = observed.batch({1, NAN, 2, INFINITY, -INFINITY});
  EXPECT_EQ(status.num_nonfinite, 3);
  EXPECT_EQ(status.first_nonfinite, 1);
  EXPECT_EQ(observed.state().min[0], 1);
  EXPECT_EQ(observed.state().max[0], 2);
  observed.batch({NAN, NAN});  // nothing of use: as it was
  EXPECT_EQ(observed.state().min[0], 1);
  EXPECT_EQ(observed.state().num_batches[0], 2);
  const ObserverState before = observed.state();
  observed.batch({});
  EXPECT_EQ(observed.state(), before);
}

TEST(Observe, zeros_have_no_sign) {
  Observed observed({});
  observed.batch({-0.0, -0.0});
  EXPECT_FALSE(std::signbit(observed.state().min[0]));
  EXPECT_FALSE(std::signbit(observed.state().max[0]));
}

void refused(const ObserveDescriptor& descriptor, const std::vector<std::string>& words) {
  try {
    ObservePlan::select({}, descriptor);
    ADD_FAILURE() << words[0] << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(Observe, bad_descriptors_are_refused) {
  ObserveDescriptor good;
  good.shape = {4, 6};
  ObserveDescriptor d = good;
  d.dtype = DType::i8;
  refused(d, {"dtype", "i8"});
  d = good;
  d.granularity = Granularity::channel;
  d.axis = 2;
  refused(d, {"axis", "2"});
  d = good;
  d.granularity = Granularity::group;
  refused(d, {"group_size", "0"});
  d = good;
  d.alignment = 3;
  refused(d, {"alignment", "3"});
  for (const double momentum : {0.0, 1.0, -0.5, std::numeric_limits<double>::quiet_NaN()}) {
    d = good;
    d.observer.momentum = momentum;
    refused(d, {"momentum", "(0, 1)"});
  }
  for (const double percentile : {0.0, -1.0, 100.5, std::numeric_limits<double>::quiet_NaN()}) {
    d = good;
    d.observer.percentile = percentile;
    refused(d, {"percentile", "(0, 100]"});
  }
  d = good;
  d.observer.qparams.q_max = 1000;
  refused(d, {"q_max", "1000"});
  EXPECT_THROW(ObservePlan::select({}, good, {-1}), Error);
}

TEST(Observe, bad_tensors_are_refused) {
  ObserveDescriptor descriptor;
  descriptor.shape = {4};
  const auto plan = ObservePlan::select({}, descriptor);
  alignas(16) std::array<float, 4> x{};
  std::array<float, 1> min{}, max{};
  int64_t num_batches = 0;
  const Observe::Args good{{x.data(), DType::f32, {4}, {}, {}},
                           {min.data(), DType::f32, {}, {}, {}},
                           {max.data(), DType::f32, {}, {}, {}},
                           {&num_batches, DType::i64, {}, {}, {}}};
  EXPECT_FALSE(plan.can_implement(good));
  const auto expect = [&](const Observe::Args& args, const std::vector<std::string>& words) {
    const auto error = plan.can_implement(args);
    ASSERT_TRUE(error.has_value()) << words[0];
    EXPECT_EQ(error->code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error->what()).find(word), std::string::npos) << error->what();
  };
  Observe::Args args = good;
  args.x.shape = {5};
  expect(args, {"x", "[4]", "[5]"});
  args = good;
  args.min.dtype = DType::f64;
  expect(args, {"min", "f32", "f64"});
  args = good;
  args.num_batches.dtype = DType::i32;
  expect(args, {"num_batches", "i64", "i32"});
  args = good;
  args.max.data = args.min.data;
  expect(args, {"max", "min", "overlap"});
  args = good;
  args.x.data = x.data() + 1;  // descriptor.alignment is of CUDA devices
  EXPECT_FALSE(plan.can_implement(args));
  args.x.data = reinterpret_cast<const std::byte*>(x.data()) + 2;
  expect(args, {"x", "4 bytes"});
  alignas(16) QuantizeStatus workspace;
  EXPECT_THROW(plan.run(nullptr, {nullptr, 48}, good), Error);
  EXPECT_THROW(plan.run(nullptr, {reinterpret_cast<std::byte*>(&workspace) + 8, 48}, good), Error);
}

TEST(Observe, states_are_stored_and_loaded) {
  ObserverState state = ObserverState::empty(3, DType::f64);
  ObserverConfig config;
  state.update(config, std::vector<double>{-1, 0, 1e-300}, std::vector<double>{1, 0, 1e300});
  std::array<double, 3> min{}, max{};
  int64_t num_batches = 0;
  const TensorView a{min.data(), DType::f64, {3}, {}, {}}, b{max.data(), DType::f64, {3}, {}, {}},
      n{&num_batches, DType::i64, {}, {}, {}};
  store_observer(state, a, b, n);
  EXPECT_EQ(load_observer(a, b, n), state);
  EXPECT_EQ(max[2], 1e300);
  EXPECT_THROW(store_observer(ObserverState::empty(2, DType::f64), a, b, n), Error);
  EXPECT_THROW(store_observer(ObserverState::empty(3), a, b, n), Error);
  EXPECT_THROW(store_observer(state, a, a, n), Error) << "they overlap";
  ObserverState wrong = state;
  wrong.num_batches[0] = -1;
  EXPECT_THROW(store_observer(wrong, a, b, n), Error);
  wrong = state;
  wrong.min[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(store_observer(wrong, a, b, n), Error);
  wrong.min[0] = -std::numeric_limits<double>::infinity(), wrong.max[0] = 0;
  EXPECT_THROW(store_observer(wrong, a, b, n), Error);
  reset_observer(a, b, n);
  EXPECT_EQ(load_observer(a, b, n), ObserverState::empty(3, DType::f64));
  // Means have a count of each group.
  std::array<int64_t, 3> counts{};
  const TensorView each{counts.data(), DType::i64, {3}, {}, {}}, two{counts.data(), DType::i64, {2}, {}, {}};
  state = ObserverState::empty(3, DType::f64, ObserverKind::mse);
  state.min = state.max = {1, 2, 3};
  state.num_batches = {1, 2, 3};
  store_observer(state, a, b, each);
  EXPECT_EQ(counts, (std::array<int64_t, 3>{1, 2, 3}));
  EXPECT_EQ(load_observer(a, b, each), state);
  EXPECT_THROW(store_observer(state, a, b, n), Error);
  EXPECT_THROW(store_observer(state, a, b, two), Error);
  EXPECT_THROW(store_observer(ObserverState::empty(3, DType::f64), a, b, each), Error);
  reset_observer(a, b, each);
  EXPECT_EQ(load_observer(a, b, each), ObserverState::empty(3, DType::f64, ObserverKind::percentile));
}

TEST(Observe, the_plan_says_what_it_is) {
  ObserveDescriptor descriptor;
  descriptor.shape = {4, 64};
  descriptor.dtype = DType::bf16;
  const auto plan = ObservePlan::select({}, descriptor);
  EXPECT_EQ(plan.sku().op, "observe");
  EXPECT_EQ(plan.sku().kernel, "observe_cpu");
  EXPECT_EQ(plan.sku().dtypes, "bf16 -> f32");
  EXPECT_EQ(plan.precision_guarantee().math, DType::f32);
  EXPECT_EQ(plan.descriptor(), descriptor);
  EXPECT_EQ(plan.workspace_size(), static_cast<int64_t>(sizeof(QuantizeStatus)));
}

}  // namespace
}  // namespace halfbyte
