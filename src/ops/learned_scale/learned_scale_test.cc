#include "grouped/fake_problem.h"
#include "halfbyte/device.hpp"
#include "ops/learned_scale/learned_scale_ref.h"
#include "ops/learned_scale/learned_scale_testing.h"

namespace halfbyte {
namespace {

using testing::LsqCase;
using testing::LsqCases;
using testing::Storage;
using Backward = FakeQuantizeLearnedBackward;
using BackwardPlan = FakeQuantizeLearnedBackwardPlan;

QuantizeStatus run_reference(LsqCase& test) {
  LsqProblem problem;
  static_cast<LinearProblem&>(problem) =
      fake_quantize_problem(LinearOp::backward, Device{}, test.descriptor, {1});
  problem.gradient_scale = test.descriptor.gradient_scale;
  const Backward::Args args = test.args(testing::host_memory(test), Device{});
  LsqTensors tensors;
  tensors.x = args.x.data;
  tensors.dy = args.dy.data;
  tensors.scale = address_of(args.scale);
  tensors.zero = address_of(args.zero_point);
  tensors.y = args.dx.data;
  tensors.dscale = args.dscale.data;
  tensors.dzero = args.dzero_point.data;
  return lsq_ref::run(problem, tensors);
}

TEST(FakeQuantizeLearnedBackward, equals_the_reference) {
  LsqCases cases(1);
  for (int i = 0; i < (testing::kSanitized ? 100 : 700); ++i) {
    const LsqCase input = cases.next(i % 50 == 0 ? 300000 : i % 4 == 0 ? 6000 : 600);
    LsqCase expected = input;
    const QuantizeStatus want = run_reference(expected);
    testing::for_each_target([&](const char*) {
      LsqCase test = input;
      const QuantizeStatus got = testing::run_on_cpu(test, {i % 3 == 0 ? 7 : 1});
      EXPECT_TRUE(testing::same_status(want, got))
          << test.text() << testing::text_of(want) << testing::text_of(got);
      ASSERT_TRUE(testing::same_tensors(expected, test));
    });
    if (HasFailure()) return;
  }
}

// ---- Values

struct Result {
  std::vector<double> dx, dscale, dzero;
};
std::vector<double> doubles(const Storage& storage) {
  std::vector<double> result;
  for (int64_t i = 0; i < num_elements(storage.view); ++i)
    result.push_back(
        linear_ref::load_element<double>(storage.bytes.data() + storage.offset, storage.view.dtype, i));
  return result;
}
Storage storage_of(DType dtype, std::vector<int64_t> shape, const std::vector<double>& values) {
  testing::Values stored;
  stored.dtype = dtype;
  for (const double v : values) stored.push_back(v);
  Storage storage;
  storage.view.dtype = dtype;
  storage.view.shape = std::move(shape);
  storage.bytes = stored.bytes;
  return storage;
}
Result run(const FakeQuantizeDescriptor& d, const std::vector<double>& x, const std::vector<double>& dy,
           const std::vector<double>& scale, const std::vector<double>& zero) {
  LsqCase test;
  test.descriptor = d;
  test.descriptor.alignment = size_of(d.dtype);
  test.x = storage_of(d.dtype, d.shape, x);
  test.dy = test.dx = storage_of(d.dtype, d.shape, dy);
  test.scale = storage_of(d.scale_dtype, d.scale_shape(), scale);
  test.dscale = storage_of(d.state_dtype(), d.scale_shape(), std::vector<double>(scale.size(), NAN));
  if (d.zero_point_dtype) {
    test.zero_point = storage_of(d.state_dtype(), d.scale_shape(), zero);
    test.dzero_point = test.dscale;
  }
  testing::run_on_cpu(test, {1});
  Result result{doubles(test.dx), doubles(test.dscale), {}};
  if (d.zero_point_dtype) result.dzero = doubles(test.dzero_point);
  return result;
}
FakeQuantizeDescriptor descriptor_of(std::vector<int64_t> shape, DType dtype = DType::f32) {
  FakeQuantizeDescriptor d;
  d.shape = std::move(shape);
  d.dtype = d.scale_dtype = dtype;
  d.zero_point_dtype = d.state_dtype();
  return d;
}

// What PyTorch 2.11 gives for [-8, 7] with gradients of 1; 0.05, 0.15, 0.25, 0.75 lie near ties in f32, and
// are rounded like there.
TEST(FakeQuantizeLearnedBackward, of_pytorch) {
  const std::vector<double> x = {-1.2, -0.26, 0.0, 0.05, 0.15, 0.25, 0.5, 0.75, 1.3};
  const Result result = run(descriptor_of({9}), x, std::vector<double>(9, 1), {0.1}, {0});
  EXPECT_EQ(result.dx, (std::vector<double>{0, 1, 1, 1, 1, 1, 1, 0, 0}));
  EXPECT_NEAR(result.dscale[0], 5.1, 1e-5);
  EXPECT_NEAR(result.dzero[0], -0.3, 1e-6);
}

TEST(FakeQuantizeLearnedBackward, rounds_zero_points_half_to_even) {
  // 0.5 is 0 and 1.5 is 2, where adding 0.5 and truncating, as PyTorch's gradient does, gives 1 and 2.
  const std::vector<double> x = {-8.2, 7.9, 6.9,
                                 -9.7};  // scale 1: with zero point 0 passes, not, passes, not
  EXPECT_EQ(run(descriptor_of({4}), x, {1, 1, 1, 1}, {1}, {0.5}).dx, (std::vector<double>{1, 0, 1, 0}));
  EXPECT_EQ(run(descriptor_of({4}), x, {1, 1, 1, 1}, {1}, {1.5}).dx, (std::vector<double>{1, 0, 0, 1}));
}

TEST(FakeQuantizeLearnedBackward, what_an_element_adds) {
  const auto d = descriptor_of({1}, DType::f64);
  struct Row {
    double x, dy, scale, zero, dx, dscale, dzero;
  };
  const double inf = INFINITY;
  for (const Row& row : std::vector<Row>{
           {2.75, 3, 1, 0, 3, 0.75, 0},  // 3 - 2.75
           {7.5, 2, 1, 0, 0, 14, -2},    // rounds to 8, beyond 7
           {7.25, 2, 1, 0, 2, -0.5, 0},  // rounds to 7, passes
           {-9, 2, 0.5, 0, 0, -16, -1},  // below: -8
           {-9, 2, 0.5, 3, 0, -22, -1},  // below: -8 - 3
           {inf, 2, 1, 0, 0, 14, -2},
           {-inf, 2, 1, 0, 0, -16, -2},
           {NAN, 2, 1, 0, 0, 0, 0},
           {5, 2, 0, 0, 2, 0, 0},       // scale 0: passes and adds nothing
           {5, inf, -1, 0, inf, 0, 0},  // a scale that is none: likewise
           {inf, 2, 0, 0, 2, 0, 0},
           {NAN, NAN, 1, 0, 0, 0, 0},
       }) {
    const Result got = run(d, {row.x}, {row.dy}, {row.scale}, {row.zero});
    EXPECT_EQ(got.dx[0], row.dx) << row.x;
    EXPECT_EQ(got.dscale[0], row.dscale) << row.x;
    EXPECT_EQ(got.dzero[0], row.dzero) << row.x;
    EXPECT_FALSE(std::signbit(got.dscale[0]) && got.dscale[0] == 0);
    EXPECT_FALSE(std::signbit(got.dzero[0]) && got.dzero[0] == 0);
  }
  EXPECT_TRUE(std::isnan(run(d, {0.25}, {NAN}, {1}, {0}).dscale[0]));
}

TEST(FakeQuantizeLearnedBackward, of_tables) {
  auto d = descriptor_of({4}, DType::f64);
  d.zero_point_dtype.reset();
  d.format = Format::fp4_e2m1;
  const Result result =
      run(d, {5.2, -7, 0.3, 12.5}, {1, 2, 4, 8}, {2}, {});  // quotients 2.6, -3.5, 0.15, 6.25
  EXPECT_EQ(result.dx, (std::vector<double>{1, 2, 4, 0}));
  // 3 - 2.6, a tie to the even code: -4 + 3.5, 0 - 0.15, beyond 6
  EXPECT_NEAR(result.dscale[0], (3 - 2.6) + 2 * (-4 + 3.5) + 4 * (0 - 0.15) + 8 * 6, 1e-12);
}

// The gradients are those of sum(dy * y), with the rounding as a constant where it is not clamped: the
// straight-through estimator passes x / scale, so that y = (rounded + (x - x0) / s) * s there.
TEST(FakeQuantizeLearnedBackward, finite_differences) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal(0, 1);
  for (int round = 0; round < 20; ++round) {
    auto d = descriptor_of({4, 50}, DType::f64);
    d.granularity = Granularity::channel;
    d.axis = 0;
    std::vector<double> x(200), dy(200), scale(4), zero(4);
    for (double& v : x) v = normal(random);
    for (double& v : dy) v = normal(random);
    for (double& v : scale) v = 0.05 + 0.1 * std::fabs(normal(random));
    for (double& v : zero) v = static_cast<double>(static_cast<int>(random() % 9) - 4);
    const Result got = run(d, x, dy, scale, zero);
    for (size_t c = 0; c < 4; ++c) {
      // The loss with scale s and zero point z near those given; what is rounded, and how, stays.
      const auto loss = [&](double s, double z) {
        double sum = 0;
        for (size_t i = c * 50; i < (c + 1) * 50; ++i) {
          const double rounded = std::nearbyint(x[i] / scale[c]), quotient = x[i] / scale[c];
          double y = 0;
          if (rounded + zero[c] < d.q_min)
            y = (d.q_min - z) * s;
          else if (rounded + zero[c] > d.q_max)
            y = (d.q_max - z) * s;
          else
            y = (x[i] / s + (rounded - quotient)) * s;
          sum += dy[i] * y;
        }
        return sum;
      };
      const double h = 1e-6;
      const double ds = (loss(scale[c] + h, zero[c]) - loss(scale[c] - h, zero[c])) / (2 * h);
      const double dz = (loss(scale[c], zero[c] + h) - loss(scale[c], zero[c] - h)) / (2 * h);
      EXPECT_NEAR(got.dscale[c], ds, 1e-3 * std::max(1.0, std::fabs(ds)));
      EXPECT_NEAR(got.dzero[c], dz, 1e-3 * std::max(1.0, std::fabs(dz)));
    }
  }
}

TEST(FakeQuantizeLearnedBackward, gradient_scale) {
  auto d = descriptor_of({3});
  d.gradient_scale = 0.25;
  const Result result = run(d, {2.75, 100, -100}, {1, 1, 2}, {1}, {0});
  EXPECT_EQ(result.dscale[0], (0.25 + 7 - 16) * 0.25);
  EXPECT_EQ(result.dzero[0], -3 * 0.25);
}

// ---- What is refused

TEST(FakeQuantizeLearnedBackward, refuses) {
  const auto refused = [](const auto& work, const std::vector<std::string>& words) {
    try {
      work();
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      for (const std::string& word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  auto d = descriptor_of({2, 3});
  const auto plan = BackwardPlan::select({}, d);
  EXPECT_EQ(plan.sku().op, "fake_quantize_learned_backward");
  alignas(16) std::array<float, 24> memory{};
  alignas(16) QuantizeStatus workspace;
  const auto view = [&](size_t at, std::vector<int64_t> shape) {
    return TensorView{memory.data() + at, DType::f32, std::move(shape), {}, {}};
  };
  const Backward::Args good{view(0, {2, 3}),  view(8, {2, 3}), view(6, {}), view(7, {}),
                            view(16, {2, 3}), view(14, {}),    view(15, {})};
  plan.run(nullptr, {&workspace, sizeof workspace}, good);
  Backward::Args args = good;
  args.dx = view(8, {2, 3});
  EXPECT_FALSE(plan.can_implement(args));
  args = good;
  args.dx = view(0, {2, 3});
  refused([&] { plan.run(nullptr, {&workspace, sizeof workspace}, args); }, {"dx must not overlap x"});
  args = good;
  args.dscale = args.dzero_point;
  refused(
      [&] {
        plan.run(nullptr, {&workspace, sizeof workspace}, args);
      },
      {"dzero_point must not overlap dscale"});
  args = good;
  args.dzero_point = {};
  refused([&] { plan.run(nullptr, {&workspace, sizeof workspace}, args); }, {"dzero_point"});
  args = good;
  args.dscale.dtype = DType::f64;
  refused([&] { plan.run(nullptr, {&workspace, sizeof workspace}, args); }, {"dscale must be f32", "f64"});
  args = good;
  args.x.data = reinterpret_cast<std::byte*>(memory.data()) + 2;
  refused([&] { plan.run(nullptr, {&workspace, sizeof workspace}, args); }, {"x must be aligned to 4 bytes"});
  refused([&] { plan.run(nullptr, {memory.data() + 16, 64}, good); }, {"workspace"});

  d.zero_point_dtype = DType::i32;
  const auto fixed = BackwardPlan::select({}, d);
  args = good;
  args.zero_point.dtype = DType::i32;
  refused(
      [&] {
        fixed.run(nullptr, {&workspace, sizeof workspace}, args);
      },
      {"dzero_point must have no data"});
}

}  // namespace
}  // namespace halfbyte
