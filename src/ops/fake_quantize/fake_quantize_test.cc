#include "halfbyte/fake_quantize.hpp"

#include "grouped/fake_problem.h"
#include "grouped/linear_ref.h"
#include "halfbyte/quantize_linear.hpp"
#include "ops/fake_quantize/fake_quantize_testing.h"

namespace halfbyte {
namespace {

using testing::FakeCase;
using testing::Storage;

constexpr Device kCpu{DeviceKind::cpu, 0};

// The scalar reference on the tensors of a case.
QuantizeStatus run_reference(FakeCase& test) {
  const FakeQuantizeDescriptor& d = test.descriptor;
  const LinearOp op = test.forward ? LinearOp::fake_quantize
                      : d.mask     ? LinearOp::mask_gradients
                                   : LinearOp::backward;
  const LinearProblem problem = fake_quantize_problem(op, kCpu, d, {});
  const auto data = [](Storage& storage) -> void* { return storage.data(); };
  LinearTensors tensors;
  tensors.y = data(test.y);
  tensors.x = test.forward && test.in_place ? tensors.y : data(test.x);
  tensors.dy = !test.forward && test.in_place ? tensors.y : data(test.dy);
  tensors.mask = data(test.mask);
  tensors.scale = data(test.scale);
  tensors.zero = data(test.zero_point);
  tensors.global_scale = static_cast<float*>(data(test.global_scale));
  tensors.observer = {data(test.min), data(test.max), static_cast<formats::i64*>(data(test.num_batches))};
  tensors.x_strides = tensors.dy_strides =
      tensors.y_strides = {problem.axis * problem.inner, problem.inner, 1};
  if (op != LinearOp::mask_gradients) return linear_ref::run(problem, tensors);
  linear_ref::mask_gradients(problem, tensors);
  return {};
}

TEST(FakeQuantize, RandomPlansEqualTheReferenceOnEveryTarget) {
  testing::FakeCases maker(1);
  for (int i = 0; i < (testing::kSanitized ? 500 : 2000); ++i) {
    const FakeCase input = maker.next(i % 100 == 0 ? 200000 : 3000);
    FakeCase expected = input;
    const PlanPreference preference{i % 8 == 0 ? 16 : i % 5 == 0 ? 3 : 1};
    const QuantizeStatus want = run_reference(expected);
    testing::for_each_target([&](const char*) {
      FakeCase actual = input;
      EXPECT_TRUE(testing::same_status(want, testing::run_on_cpu(actual, preference)));
      EXPECT_TRUE(testing::same_tensors(expected, actual));
    });
    if (HasFailure()) FAIL() << "case " << i << ": " << expected.text();
  }
}

// ---- Plans with tensors of their own ------------------------------------------------------------

using Floats = std::vector<float>;

TensorView view(const Floats& values, std::vector<int64_t> shape) {
  return {const_cast<float*>(values.data()), DType::f32, std::move(shape), {}, {}};
}
TensorView view(const std::vector<int32_t>& values, std::vector<int64_t> shape) {
  return {const_cast<int32_t*>(values.data()), DType::i32, std::move(shape), {}, {}};
}
TensorView view(const std::vector<uint8_t>& values, std::vector<int64_t> shape) {
  return {const_cast<uint8_t*>(values.data()), DType::u8, std::move(shape), {}, {}};
}

struct Result {
  Floats y, dx, scale;
  std::vector<int32_t> zero_point;
  std::vector<uint8_t> mask;
  QuantizeStatus status;
};
// Forward with its mask, and backward of dy = 1 from x and from the mask, which must be equal.
Result run(FakeQuantizeDescriptor d, const Floats& x, Floats scale, std::vector<int32_t> zero_point = {}) {
  const auto num_scales = static_cast<size_t>(num_elements(d.scale_shape()));
  Result r{Floats(x.size()), Floats(x.size()), std::move(scale), std::move(zero_point), {}, {}};
  r.scale.resize(num_scales);
  if (d.zero_point_dtype) r.zero_point.resize(num_scales);
  const TensorView zeros = d.zero_point_dtype ? view(r.zero_point, d.scale_shape()) : TensorView{};
  const TensorView scales = view(r.scale, d.scale_shape());
  int64_t mask_bytes = 1;
  for (const int64_t extent : d.mask_shape()) mask_bytes *= extent;
  r.mask.resize(static_cast<size_t>(mask_bytes));
  d.mask = true;
  d.alignment = 4;
  const auto forward = FakeQuantizePlan::select(kCpu, d);
  std::vector<uint64_t> workspace(64);
  forward.run(
      nullptr, workspace,
      {view(x, d.shape), view(r.y, d.shape), scales, zeros, view(r.mask, d.mask_shape()), {}, {}, {}});
  r.status = forward.status(nullptr, workspace);
  const Floats dy(x.size(), 1);
  FakeQuantizeBackwardPlan::select(kCpu, d).run(
      nullptr, workspace, {{}, view(r.mask, d.mask_shape()), view(dy, d.shape), {}, {}, view(r.dx, d.shape)});
  d.mask = false;
  Floats from_x(x.size());
  FakeQuantizeBackwardPlan::select(kCpu, d).run(
      nullptr, workspace, {view(x, d.shape), {}, view(dy, d.shape), scales, zeros, view(from_x, d.shape)});
  EXPECT_EQ(from_x, r.dx);
  return r;
}
FakeQuantizeDescriptor integers(std::vector<int64_t> shape, int q_min, int q_max) {
  FakeQuantizeDescriptor d;
  d.shape = std::move(shape);
  d.q_min = q_min;
  d.q_max = q_max;
  return d;
}

// PyTorch 1.13's fake_quantize of these gives 0.2 for 0.15 and for 0.25: it multiplies by 1 / 0.1, where
// 0.15 * 10 and 0.25 * 10 are the ties 1.5 and 2.5 as here, so that nothing differs.
TEST(FakeQuantize, ExampleOfPyTorch) {
  const Result r =
      run(integers({9}, -8, 7), {-1.2f, -0.26f, 0.0f, 0.05f, 0.15f, 0.25f, 0.5f, 0.75f, 1.3f}, {0.1f});
  const Floats codes = {-8, -3, 0, 0, 2, 2, 5, 7, 7};
  for (size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(r.y[i], codes[i] * 0.1f) << i;
  EXPECT_EQ(r.dx, (Floats{0, 1, 1, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(r.mask, (std::vector<uint8_t>{0b01111110, 0}));
}

// Quotients that are no ties, but products with the reciprocal, or the other way round: PyTorch, which
// multiplies by the rounded 1 / scale, gives the neighbours in `theirs`.
TEST(FakeQuantize, QuotientsWhereAReciprocalDiffers) {
  const Floats x = {0.00150000001f, 0.0175000001f, 0.057500001f};
  const float scale = 0.00100000005f;
  const Floats ours = {2, 18, 58}, theirs = {1, 17, 57};
  const Result r = run(integers({3}, -128, 127), x, {scale});
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(r.y[i], ours[i] * scale) << i;
    EXPECT_EQ(std::nearbyint(x[i] * (1 / scale)), theirs[i]) << i;
  }
}

TEST(FakeQuantize, ChannelsHaveScalesOfTheirOwn) {
  FakeQuantizeDescriptor d = integers({2, 4}, -10, 10);
  d.granularity = Granularity::channel;
  d.axis = 0;
  const Result r = run(d, {15, 1, 0.5f, -1, 0.05f, 0.10f, 0.15f, -0.20f}, {0.5f, 0.1f});
  const Floats codes = {10, 2, 1, -2, 0, 1, 2, -2};
  for (size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(r.y[i], codes[i] * r.scale[i / 4]) << i;
  EXPECT_EQ(r.dx, (Floats{0, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(FakeQuantize, MaskLooksAtTheRoundedValue) {
  const Result r = run(integers({6}, -8, 7), {0.74f, 0.76f, -0.84f, -0.86f, 0.70f, -0.80f}, {0.1f});
  EXPECT_EQ(r.dx, (Floats{1, 0, 1, 0, 1, 1}));
}

TEST(FakeQuantize, RoundsBeforeTheZeroPointIsAdded) {
  FakeQuantizeDescriptor d = integers({4}, 0, 15);
  d.zero_point_dtype = DType::i32;
  const Floats x = {0.5f, 1.5f, 2.5f, -0.5f};
  EXPECT_EQ(run(d, x, {1}, {1}).y, (Floats{0, 2, 2, 0}));
  EXPECT_EQ(run(d, x, {1}, {3}).y, (Floats{0, 2, 2, 0}));
}

TEST(FakeQuantize, LearnedZeroPointsAreRoundedAndClamped) {
  FakeQuantizeDescriptor d = integers({8}, 0, 15);
  d.granularity = Granularity::group;
  d.group_size = 1;
  d.zero_point_dtype = DType::f32;
  const Floats x(8, -20), zero_point = {2.5f, 3.5f, 3.4f, -0.4f, -1, 15.4f, 99, NAN};
  const Floats scale(8, 1);
  Floats y(8);
  const auto plan = FakeQuantizePlan::select(kCpu, d);
  std::vector<uint64_t> workspace(64);
  plan.run(nullptr, workspace,
           {view(x, {8}), view(y, {8}), view(scale, {8}), view(zero_point, {8}), {}, {}, {}, {}});
  EXPECT_EQ(y, (Floats{-2, -4, -3, 0, 0, -15, -15, 0}));
  EXPECT_EQ(plan.status(nullptr, workspace).num_invalid_zero_points, 3);
}

TEST(FakeQuantize, InfinitiesSaturateAndNanIsKept) {
  Floats x = {INFINITY, -INFINITY, 0, -0.2f, 0};
  constexpr uint32_t kNan = 0xFFC12345u;
  std::memcpy(&x[2], &kNan, 4);
  const Result r = run(integers({5}, -8, 7), x, {0.5f});
  EXPECT_EQ(r.y[0], 3.5f);
  EXPECT_EQ(r.y[1], -4);
  EXPECT_EQ(std::memcmp(&r.y[2], &kNan, 4), 0);
  EXPECT_FALSE(std::signbit(r.y[3]));  // the code 0
  EXPECT_EQ(r.dx, (Floats{0, 0, 0, 1, 1}));
  EXPECT_EQ(r.status.num_nonfinite, 3);
  EXPECT_EQ(r.status.first_nonfinite, 0);
  const Result none = run(integers({5}, -8, 7), x, {0});
  EXPECT_EQ(none.y[0], 0);
  EXPECT_FALSE(std::signbit(none.y[1]));
  EXPECT_EQ(std::memcmp(&none.y[2], &kNan, 4), 0);
  EXPECT_EQ(none.dx, (Floats{1, 1, 0, 1, 1}));
  EXPECT_EQ(run(integers({5}, -8, 7), x, {-0.5f}).status.num_invalid_scales, 1);
}

// The example of NF4: values of the table times absmax 2.
TEST(FakeQuantize, ValuesOfATable) {
  FakeQuantizeDescriptor d;
  d.shape = {8};
  d.format = Format::nf4;
  d.computed = true;
  const Floats x = {-2, -1, -0.5f, -0.0f, 0.1f, 0.5f, 1, 2};
  Result r = run(d, x, {});
  EXPECT_EQ(r.scale, (Floats{2}));
  EXPECT_EQ(r.y, (Floats{-2, -1.0501461f, -0.568882763f, 0, 0.159160599f, 0.492224604f, 0.881419659f, 2}));
  d.computed = false;
  r = run(d, x, {1});
  EXPECT_EQ(r.y.front(), -1);
  EXPECT_EQ(r.dx, (Floats{0, 1, 1, 1, 1, 1, 1, 0}));  // values inside [-1, 1], and the bounds
}

TEST(FakeQuantize, ScalesAndZeroPointsAreComputed) {
  FakeQuantizeDescriptor d = integers({4}, -8, 7);
  d.computed = true;
  EXPECT_EQ(run(d, {-1, 0.5f, 0.25f, 1}, {}).scale, (Floats{1.0f / 7}));
  d.scale_rule = ScaleRule::half_range;
  EXPECT_EQ(run(d, {-1, 0.5f, 0.25f, 1}, {}).scale, (Floats{1.0f / 7.5f}));
  d.eps = 0.5;
  EXPECT_EQ(run(d, {-1, 0.5f, 0.25f, 1}, {}).scale, (Floats{0.5f}));
  d.eps = 0;
  d.zero_point_dtype = DType::i32;
  const Result r = run(d, {-0.5f, 0, 1, 2}, {});
  EXPECT_EQ(r.scale, (Floats{2.5f / 15}));
  EXPECT_EQ(r.zero_point, (std::vector<int32_t>{-5}));
  const Result constant = run(d, {5, 5, 5, 5}, {});
  EXPECT_EQ(constant.y, (Floats{5, 5, 5, 5}));
  // The code -8 has no value of rule absmax: that it is infinite does not count.
  d = integers({4}, -8, 7);
  d.computed = true;
  const Result large = run(d, {3.3e38f, -3.3e38f, 0, 1e38f}, {});
  EXPECT_EQ(large.status.num_unheld_scales, 0);
  EXPECT_EQ(large.y[1], -large.y[0]);
  d.scale_rule = ScaleRule::half_range;  // 7.5: a tie to -8, which is infinite
  const Result unheld = run(d, {0x1.ep127f, -0x1.ep127f, 0, 1e38f}, {});
  EXPECT_EQ(unheld.status.num_unheld_scales, std::isinf(unheld.y[1]) ? 1 : 0);
}

// A step of training, with scales from an observer: forward and both backward operations by one descriptor.
TEST(FakeQuantize, OneDescriptorServesAllPlans) {
  for (const bool mask : {false, true}) {
    FakeQuantizeDescriptor d = integers({4, 16}, -8, 7);
    d.granularity = Granularity::group;
    d.group_size = 16;
    d.computed = true;
    d.zero_point_dtype = DType::i32;
    d.observer.emplace();
    d.mask = mask;
    FakeQuantizeDescriptor given = d;  // the scales that forward wrote
    given.computed = given.mask = false;
    given.observer.reset();
    alignas(16) QuantizeStatus workspace;
    Floats x(64), y(64), dy(64), dx(64), want(64), scale(4), dscale(4), want_dscale(4);
    Floats min(4, INFINITY), max(4, -INFINITY);
    std::vector<int32_t> zero_point(4);
    std::vector<uint8_t> bits(8);
    int64_t num_batches = 0;
    for (size_t i = 0; i < 64; ++i) x[i] = std::sin(static_cast<float>(i)), dy[i] = 1 + static_cast<float>(i);
    const TensorView scales = view(scale, {4, 1}), zeros = view(zero_point, {4, 1}),
                     mask_view = mask ? view(bits, {4, 2}) : TensorView{};
    FakeQuantizePlan::select(kCpu, d).run(nullptr, {&workspace, sizeof workspace},
                                          {view(x, d.shape),
                                           view(y, d.shape),
                                           scales,
                                           zeros,
                                           mask_view,
                                           view(min, {4, 1}),
                                           view(max, {4, 1}),
                                           {&num_batches, DType::i64, {}, {}, {}}});
    std::ranges::transform(x, x.begin(), [](float v) { return 1.1f * v; });  // some are beyond
    if (mask)  // of what forward sees now, with the range of what it saw first
      for (size_t i = 0; i < 64; ++i) {
        const float position = std::nearbyint(x[i] / scale[i / 16]) + static_cast<float>(zero_point[i / 16]);
        bits[i / 8] &= static_cast<uint8_t>(~(-8 <= position && position <= 7 ? 0 : 1 << i % 8));
      }
    FakeQuantizeBackwardPlan::select(kCpu, given)
        .run(nullptr, {&workspace, sizeof workspace},
             {view(x, d.shape), {}, view(dy, d.shape), scales, zeros, view(want, d.shape)});
    FakeQuantizeBackward::Args args{view(x, d.shape), {},    view(dy, d.shape),
                                    scales,           zeros, view(dx, d.shape)};
    if (mask) args = {{}, mask_view, view(dy, d.shape), {}, {}, view(dx, d.shape)};
    FakeQuantizeBackwardPlan::select(kCpu, d).run(nullptr, {&workspace, sizeof workspace}, args);
    EXPECT_EQ(dx, want);
    EXPECT_NE(dx, dy);
    const auto learn = [&](const FakeQuantizeDescriptor& by, Floats& sums) {
      std::ranges::fill(dx, 0.0f);
      FakeQuantizeLearnedBackwardPlan::select(kCpu, by).run(
          nullptr, {&workspace, sizeof workspace},
          {view(x, d.shape), view(dy, d.shape), scales, zeros, view(dx, d.shape), view(sums, {4, 1}), {}});
      EXPECT_EQ(dx, want);
    };
    learn(d, dscale);
    learn(given, want_dscale);
    EXPECT_EQ(dscale, want_dscale);
    EXPECT_EQ(num_batches, 1);  // nothing else has observed
  }
}

TEST(FakeQuantize, CountsLevels) {
  FakeQuantizeDescriptor d;
  EXPECT_EQ(d.num_levels(), 16);
  d.q_max = 23;
  EXPECT_EQ(d.num_levels(), 32);
  d.format = Format::nf4;
  EXPECT_EQ(d.num_levels(), 16);
}

// The mask, a bit an element, lies anywhere.
TEST(FakeQuantize, AnyAddressOnTheCpu) {
  for (const DType dtype : testing::kFloatDTypes) {
    FakeCase c;
    FakeQuantizeDescriptor& d = c.descriptor;
    d.shape = {3, 1000};
    d.dtype = dtype;
    d.computed = d.mask = true;
    std::vector<std::vector<uint8_t>> results;
    for (const int64_t shift : {0, 1, 3}) {
      c.x = Storage(dtype, d.shape, testing::random_values(dtype, 3000, 6).bytes.data(),
                    shift * size_of(dtype));
      c.y = Storage(dtype, d.shape, shift * size_of(dtype));
      c.mask = Storage(DType::u8, d.mask_shape(), shift);
      c.scale = Storage(DType::f32, {}, 4 * shift);
      testing::run_on_cpu(c);
      for (Storage* const s : {&c.y, &c.mask}) results.emplace_back(s->data(), s->data() + s->num_bytes());
    }
    for (size_t i = 2; i < results.size(); ++i) ASSERT_EQ(results[i], results[i % 2]);
  }
}

// ---- Block floats --------------------------------------------------------------------------------

FakeQuantizeDescriptor block_floats(Format format, std::vector<int64_t> shape, DType dtype) {
  FakeQuantizeDescriptor d;
  d.format = format;
  d.shape = std::move(shape);
  d.dtype = dtype;
  d.granularity = Granularity::group;
  d.group_size = info(format).group_size;
  d.scale_dtype = *info(format).scale_dtype;
  d.computed = true;
  d.computed_global_scale = format == Format::nvfp4;
  return d;
}

// A matrix, its quantized form, and what that decodes to.
struct Stored {
  QuantizedTensor q;
  QuantizeStatus status;
  std::vector<uint8_t> y;
};
Stored store(const TensorView& x, Format format, const ValueRange* range = nullptr) {
  const QuantSpec spec{
      .format = format, .group_size = info(format).group_size, .scale_dtype = *info(format).scale_dtype};
  Stored stored{QuantizedTensor(spec, x.shape, x.dtype), {}, {}};
  stored.status = quantize(x, stored.q.view(), {}, {}, range);
  stored.y.resize(static_cast<size_t>(num_elements(x) * size_of(x.dtype)));
  TensorView y = x;
  y.data = stored.y.data();
  dequantize(stored.q.view(), y);
  return stored;
}
std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  const auto* data = reinterpret_cast<const uint8_t*>(tensor.data());
  return {data, data + tensor.num_bytes()};
}

// y, scales, the global scale and what is counted are those of quantize and dequantize, of values that are
// zeros of both signs, subnormal, constant, of one magnitude or of many.
TEST(FakeQuantize, BlockFloatsAreWhatIsStored) {
  uint64_t seed = 1;
  testing::for_each_target([&](const char*) {
    for (const Format format : {Format::nvfp4, Format::mxfp4})
      for (const DType dtype : testing::kFloatDTypes)
        for (const auto& [rows, cols] : std::initializer_list<std::pair<int64_t, int64_t>>{
                 {1, 1}, {1, 16}, {5, 31}, {3, 72}, {64, 64}, {7, 1000}, {40, 4096}, {0, 16}, {3, 0}})
          for (const int kind : {0, 1, 2}) {
            FakeCase c;
            FakeQuantizeDescriptor& d = c.descriptor;
            d = block_floats(format, {rows, cols}, dtype);
            d.alignment = seed % 2 ? 16 : size_of(dtype);
            testing::Values x = testing::random_values(dtype, rows * cols, ++seed);
            for (size_t i = 0; kind == 1 && i < x.exact.size(); i += 3) {  // of bits, -0 too
              const double value = i % 2 ? -0.0 : x.exact[i] * 1e-3;
              formats::store_scale(x.bytes.data(), static_cast<int64_t>(i),
                                   formats::stored(value, scale_type(dtype)), scale_type(dtype));
            }
            if (kind == 2)
              for (size_t i = 0; i < x.exact.size(); ++i)
                formats::store_scale(x.bytes.data(), static_cast<int64_t>(i), 0.75, scale_type(dtype));
            c.x = Storage(dtype, d.shape, x.bytes.data());
            c.y = Storage(dtype, d.shape);
            c.scale = Storage(d.scale_dtype, d.scale_shape());
            if (format == Format::nvfp4) c.global_scale = Storage(DType::f32, {1});
            const QuantizeStatus status = testing::run_on_cpu(c, {seed % 3 == 0 ? 3 : 1});
            const Stored want = store(x.view(d.shape), format);
            const auto got = [](Storage& s) {
              return std::vector<uint8_t>(s.data(), s.data() + s.num_bytes());
            };
            if (status.num_unheld_scales == 0) {  // f64 beyond f32; such a scale counts as 0
              EXPECT_EQ(got(c.y), want.y) << c.text() << " kind " << kind;
            }
            EXPECT_EQ(got(c.scale), bytes_of(want.q.scales)) << c.text();
            if (format == Format::nvfp4) {
              EXPECT_EQ(got(c.global_scale), bytes_of(want.q.global_scale)) << c.text();
            }
            EXPECT_TRUE(testing::same_status(want.status, status)) << c.text();
            if (::testing::Test::HasFailure()) return;
          }
  });
}

// A given global scale is that of quantize with a range. A scale that is too large for it saturates.
TEST(FakeQuantize, BlockFloatsWithAGivenGlobalScale) {
  const Floats x = {-3, 2.9f, 0.1f, -0.0f, 0.2f, 1, 1.5f, -2, 0, 0, 0, 0, 0, 0, 0, 0.75f};
  FakeQuantizeDescriptor d = block_floats(Format::nvfp4, {1, 16}, DType::f32);
  d.computed_global_scale = false;
  d.alignment = 4;
  Floats y(16);
  uint8_t scale = 0;
  std::vector<uint64_t> workspace(64);
  const auto plan = FakeQuantizePlan::select(kCpu, d);
  const auto round = [&](float global_scale) {
    plan.run(nullptr, workspace,
             {view(x, d.shape),
              view(y, d.shape),
              {&scale, DType::f8_e4m3, {1, 1}, {}, {}},
              {},
              {},
              {},
              {},
              {},
              {&global_scale, DType::f32, {1}, {}, {}}});
    return plan.status(nullptr, workspace);
  };
  const ValueRange range{-40, 2, 0, -1};
  const Stored want = store(view(x, d.shape), Format::nvfp4, &range);
  float global_scale = 0;
  std::memcpy(&global_scale, want.q.global_scale.data(), 4);
  EXPECT_EQ(global_scale, 2688.0f / 40);
  EXPECT_TRUE(round(global_scale).ok());
  EXPECT_EQ(std::memcmp(y.data(), want.y.data(), 64), 0);
  EXPECT_EQ(bytes_of(want.q.scales), std::vector<uint8_t>{scale});
  // 3 / 6 times 4480 is five times 448: all is within 0.1 * 6.
  EXPECT_TRUE(round(4480).ok());
  EXPECT_EQ(scale, 0x7E);
  const float s = 448.0f / 4480;
  EXPECT_EQ(y, (Floats{-6 * s, 6 * s, s, 0, 2 * s, 6 * s, 6 * s, -6 * s, 0, 0, 0, 0, 0, 0, 0, 6 * s}));
  for (const float none : {0.0f, -1.0f, INFINITY, NAN}) {
    EXPECT_EQ(round(none).num_invalid_scales, 1) << none;
    EXPECT_EQ(scale, 0);
    EXPECT_EQ(y, Floats(16)) << none;
  }
  d.computed = false;
  const auto given = FakeQuantizePlan::select(kCpu, d);
  for (const float none : {0.0f, -1.0f, INFINITY, NAN})
    for (const uint8_t code : {0x38, 0xB8, 0x00}) {  // 1, -1, 0
      scale = code;
      float global = none;
      given.run(nullptr, workspace,
                {view(x, d.shape),
                 view(y, d.shape),
                 {&scale, DType::f8_e4m3, {1, 1}, {}, {}},
                 {},
                 {},
                 {},
                 {},
                 {},
                 {&global, DType::f32, {1}, {}, {}}});
      EXPECT_EQ(given.status(nullptr, workspace).num_invalid_scales, 1) << none << " " << int{code};
      EXPECT_EQ(y, Floats(16)) << none << " " << int{code};
    }
}

TEST(FakeQuantize, BlockFloatsKeepNanAndSaturate) {
  FakeQuantizeDescriptor d = block_floats(Format::mxfp4, {1, 32}, DType::f32);
  d.alignment = 4;
  Floats x(32, 1), y(32);
  x[0] = 6;
  x[1] = INFINITY;
  x[2] = -INFINITY;
  constexpr uint32_t kNan = 0xFFC12345u;
  std::memcpy(&x[3], &kNan, 4);
  uint8_t scale = 0;
  std::vector<uint64_t> workspace(64);
  const auto plan = FakeQuantizePlan::select(kCpu, d);
  plan.run(
      nullptr, workspace,
      {view(x, d.shape), view(y, d.shape), {&scale, DType::f8_e8m0, {1, 1}, {}, {}}, {}, {}, {}, {}, {}, {}});
  EXPECT_EQ(scale, 127);  // 2^0
  EXPECT_EQ(Floats(y.begin(), y.begin() + 3), (Floats{6, 6, -6}));
  EXPECT_EQ(std::memcmp(&y[3], &kNan, 4), 0);
  EXPECT_EQ(y[4], 1);
  EXPECT_EQ(plan.status(nullptr, workspace).num_nonfinite, 3);
}

// Their gradient is dy itself: no plan computes it.
TEST(FakeQuantize, BlockFloatsHaveNoPlansOfGradients) {
  const FakeQuantizeDescriptor d = block_floats(Format::nvfp4, {4, 16}, DType::f32);
  const auto message = [&](const auto& select) -> std::string {
    try {
      select();
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return error.what();
    }
  };
  const std::string words = "format nvfp4 has no plans of gradients: dx is dy";
  EXPECT_NE(message([&] { FakeQuantizeBackwardPlan::select(kCpu, d); }).find(words), std::string::npos);
  EXPECT_NE(message([&] { FakeQuantizeLearnedBackwardPlan::select(kCpu, d); }).find(words),
            std::string::npos);
  EXPECT_EQ(FakeQuantizePlan::select(kCpu, d).sku().dtypes, "f32, scale f8_e4m3");
}

// ---- The observer --------------------------------------------------------------------------------

TEST(FakeQuantize, ObservesWhatPassesBy) {
  FakeQuantizeDescriptor d = integers({2}, -128, 127);
  d.computed = true;
  d.alignment = 4;
  d.zero_point_dtype = DType::i32;
  d.observer.emplace();
  const auto observe = [&](const std::vector<Floats>& batches) {
    Floats min = {INFINITY}, max = {-INFINITY}, scale(1), y(2);
    std::vector<int32_t> zero_point(1);
    int64_t num_batches = 0;
    const auto plan = FakeQuantizePlan::select(kCpu, d);
    std::vector<uint64_t> workspace(64);
    for (const Floats& x : batches)
      plan.run(nullptr, workspace,
               {view(x, {2}),
                view(y, {2}),
                view(scale, {}),
                view(zero_point, {}),
                {},
                view(min, {}),
                view(max, {}),
                {&num_batches, DType::i64, {}, {}, {}}});
    EXPECT_EQ(num_batches, static_cast<int64_t>(batches.size()));
    EXPECT_EQ(scale[0], (max[0] - min[0]) / 255);
    return std::pair(min[0], max[0]);
  };
  EXPECT_EQ(observe({{-1, 1}, {-2, 3}, {NAN, 0.5f}}), std::pair(-2.0f, 3.0f));
  d.observer->kind = ObserverKind::moving_average;
  d.observer->momentum = 0.9;
  EXPECT_EQ(observe({{-1, 1}, {-2, 3}}), std::pair(-1.1f, 1.2f));
  d.observer->momentum = 0.5;
  EXPECT_EQ(observe({{-1, 1}, {-2, 3}, {NAN, INFINITY}}), std::pair(-1.5f, 2.0f));
}

TEST(FakeQuantize, AGroupThatHasSeenNothingHasNoScale) {
  FakeQuantizeDescriptor d = integers({2}, -8, 7);
  d.computed = true;
  d.alignment = 4;
  d.eps = 1;
  d.observer.emplace();
  Floats x = {NAN, INFINITY}, y(2), scale = {3}, min = {INFINITY}, max = {-INFINITY};
  int64_t num_batches = 0;
  const auto plan = FakeQuantizePlan::select(kCpu, d);
  std::vector<uint64_t> workspace(64);
  plan.run(nullptr, workspace,
           {view(x, {2}),
            view(y, {2}),
            view(scale, {}),
            {},
            {},
            view(min, {}),
            view(max, {}),
            {&num_batches, DType::i64, {}, {}, {}}});
  EXPECT_EQ(scale[0], 0);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(min[0], INFINITY);
  EXPECT_EQ(plan.status(nullptr, workspace).num_invalid_scales, 1);
}

// ---- Properties ----------------------------------------------------------------------------------

// What conversion gives: quantize_linear and dequantize_linear with the scale that fake quantization stored.
TEST(FakeQuantize, ConversionIsExact) {
  testing::FakeCases maker(11);
  int compared = 0;
  for (int i = 0; i < 4000; ++i) {
    FakeCase test = maker.next(2000);
    const FakeQuantizeDescriptor& d = test.descriptor;
    const bool is_unsigned = d.q_min >= 0;
    if (!test.forward || test.in_place || d.format || d.zero_point_dtype == d.state_dtype()) continue;
    if (!is_unsigned && d.q_max > 127) continue;
    const QuantizeStatus status = testing::run_on_cpu(test);
    if (status.num_nonfinite != 0) continue;
    std::vector<uint64_t> workspace(64);
    LinearDescriptor linear;
    linear.shape = d.shape;
    linear.granularity = d.granularity;
    linear.axis = d.axis;
    linear.group_size = d.group_size;
    linear.q_min = d.q_min;
    linear.q_max = d.q_max;
    linear.dtype = d.dtype;
    linear.code_dtype = is_unsigned ? DType::u8 : DType::i8;
    linear.scale_dtype = d.scale_dtype;
    linear.zero_point_dtype = d.zero_point_dtype;
    linear.alignment = size_of(d.dtype);
    std::vector<uint8_t> codes(static_cast<size_t>(num_elements(test.y.view)) + 16);
    const TensorView code_view{codes.data(), linear.code_dtype, d.shape, {}, {}};
    const auto at = [](Storage& storage) { return storage.at(storage.bytes.data(), kCpu); };
    QuantizeLinearPlan::select(kCpu, linear)
        .run(nullptr, workspace, {at(test.x), code_view, at(test.scale), at(test.zero_point)});
    Storage y = test.y;
    std::ranges::fill(y.bytes, Storage::kPoison);
    DequantizeLinearPlan::select(kCpu, linear)
        .run(nullptr, workspace, {code_view, at(test.scale), at(test.zero_point), at(y)});
    ASSERT_EQ(y.bytes, test.y.bytes) << test.text();
    ++compared;
  }
  EXPECT_GT(compared, 300);
}

// |y - x| <= scale / 2 (1 + 2^-20) inside the range, plus half a unit of the rounding of y where that is not
// f32: of computed scales, where all is inside but for what rounding the scale cut off.
TEST(FakeQuantize, ErrorIsAtMostHalfAStep) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  int64_t checked = 0;
  for (const DType dtype : testing::kFloatDTypes)
    for (const bool asymmetric : {false, true})
      for (const double magnitude : {1.0, 1e-30, 1e30, 1e-4})
        for (int kind = 0; kind < 4; ++kind)
          for (int bits = 2; bits <= 8; ++bits) {
            if (dtype == DType::f16 && (magnitude < 1e-5 || magnitude > 1e3)) continue;
            FakeQuantizeDescriptor d;
            d.shape = {4, 64};
            d.granularity = Granularity::group;
            d.group_size = 64;
            d.q_min = -(1 << (bits - 1));
            d.q_max = (1 << (bits - 1)) - 1;
            d.dtype = dtype;
            d.computed = true;
            d.alignment = size_of(dtype);
            if (asymmetric) d.zero_point_dtype = DType::i32;
            testing::Values x;
            x.dtype = dtype;
            for (int i = 0; i < 256; ++i) {
              const double random_value = normal(random) * magnitude;
              x.push_back(kind == 0   ? random_value
                          : kind == 1 ? (i / 64 - 1) * magnitude  // constants, one of them 0
                          : kind == 2 ? (i % 64 == 5 ? 1000 : 1) * random_value
                                      : 0);
            }
            testing::Values y = x;
            Floats scale(4);
            std::vector<int32_t> zero_point(4);
            std::vector<uint64_t> workspace(64);
            FakeQuantizePlan::select(kCpu, d).run(nullptr, workspace,
                                                  {x.view(d.shape),
                                                   y.view(d.shape),
                                                   view(scale, {4, 1}),
                                                   asymmetric ? view(zero_point, {4, 1}) : TensorView{},
                                                   {},
                                                   {},
                                                   {},
                                                   {}});
            for (int64_t i = 0; i < 256; ++i) {
              const auto s = static_cast<double>(scale[static_cast<size_t>(i / 64)]);
              const double value = formats::load_scale<double>(y.bytes.data(), i, scale_type(dtype));
              const double exact = x.exact[static_cast<size_t>(i)];
              const double zero = zero_point[static_cast<size_t>(i / 64)];
              const double inside = std::clamp(exact, (d.q_min - 0.5 - zero) * s, (d.q_max + 0.5 - zero) * s);
              const double unit = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0;
              EXPECT_LE(std::abs(value - inside),
                        s / 2 * (1 + 0x1p-20) + unit * std::max(std::abs(value), std::abs(exact)))
                  << to_string(dtype) << " bits " << bits << " x " << exact << " y " << value << " scale "
                  << s;
              EXPECT_LE(std::abs(inside - exact), std::abs(exact) * 0x1p-20);
              ++checked;
            }
          }
  EXPECT_GT(checked, 100000);
}

// ---- Errors --------------------------------------------------------------------------------------

TEST(FakeQuantize, RefusesDescriptorsThatBreakARule) {
  const auto expect_refused = [](const std::string& words, const auto& change) {
    FakeQuantizeDescriptor d;
    d.shape = {4, 8};
    change(d);
    try {
      check_descriptor(d);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  using D = FakeQuantizeDescriptor;
  expect_refused("dtype must be f32", [](D& d) { d.dtype = DType::i8; });
  expect_refused("scale_dtype must be f32 or dtype (f32), got f16", [](D& d) { d.scale_dtype = DType::f16; });
  expect_refused("axis must be in [-2, 2)", [](D& d) { d.axis = 2; });
  expect_refused("must be within [-128, 255], got -129 and 7", [](D& d) { d.q_min = -129; });
  expect_refused("q_max - q_min must be in [2, 255], got 7 - 6", [](D& d) { d.q_min = 6; });
  expect_refused("q_max - q_min must be in [2, 255], got 255 - -8", [](D& d) { d.q_max = 255; });
  expect_refused("q_max - q_min must be in [2, 255], got -2147483640 - 2147483647", [](D& d) {
    d.q_min = 2147483647;
    d.q_max = -2147483640;
    d.zero_point_dtype = DType::i32;
  });
  expect_refused("0 must be in [q_min, q_max], got [1, 7]", [](D& d) { d.q_min = 1; });
  expect_refused("zero_point_dtype must be i32, or f32 for learned ones, got f64",
                 [](D& d) { d.zero_point_dtype = DType::f64; });
  expect_refused("format must be a table (nf4, fp4, fp4_e2m1, lut4, nvfp4, mxfp4), got int4",
                 [](D& d) { d.format = Format::int4; });
  expect_refused("table must be finite and ascending", [](D& d) { d.format = Format::lut4; });
  expect_refused("format nf4 has no zero points, got zero_point_dtype i32", [](D& d) {
    d.format = Format::nf4;
    d.zero_point_dtype = DType::i32;
  });
  expect_refused("computed zero points must be i32, got zero_point_dtype f32", [](D& d) {
    d.computed = true;
    d.zero_point_dtype = DType::f32;
  });
  expect_refused("scale_rule of a table must be absmax, got half-range", [](D& d) {
    d.computed = true;
    d.format = Format::fp4;
    d.scale_rule = ScaleRule::half_range;
  });
  expect_refused("scale_rule without a zero point must be absmax or half-range, got minmax", [](D& d) {
    d.computed = true;
    d.scale_rule = ScaleRule::minmax;
  });
  expect_refused("need q_max > 0, got 0", [](D& d) {
    d.computed = true;
    d.q_max = 0;
  });
  expect_refused("eps must be finite and >= 0, got nan", [](D& d) { d.eps = NAN; });
  expect_refused("an observer needs computed scales", [](D& d) { d.observer.emplace(); });
  expect_refused("observer.kind must be min-max or moving-average", [](D& d) {
    d.computed = true;
    d.observer.emplace().kind = ObserverKind::mse;
  });
  expect_refused("momentum must be in (0, 1), got nan", [](D& d) {
    d.computed = true;
    d.observer.emplace().kind = ObserverKind::moving_average;
    d.observer->momentum = NAN;
  });
  const auto expect_block_refused = [&](const std::string& words, const auto& change) {
    expect_refused(words, [&](D& d) {
      d = block_floats(Format::nvfp4, {4, 8}, DType::f32);
      change(d);
    });
  };
  expect_block_refused("scale dtype of nvfp4 must be f8_e4m3, got f32",
                       [](D& d) { d.scale_dtype = DType::f32; });
  expect_block_refused("group_size", [](D& d) { d.group_size = 32; });
  expect_block_refused("granularity", [](D& d) { d.granularity = Granularity::tensor; });
  expect_block_refused("format nvfp4 has no zero points", [](D& d) { d.zero_point_dtype = DType::i32; });
  expect_block_refused("format nvfp4 has no eps, got 0.5", [](D& d) { d.eps = 0.5; });
  expect_block_refused("format nvfp4 has no observer", [](D& d) { d.observer.emplace(); });
  expect_block_refused("format nvfp4 has no mask: dx is dy", [](D& d) { d.mask = true; });
  for (const Format format : {Format::nvfp4, Format::mxfp4})
    expect_refused("computed_global_scale needs computed scales of format nvfp4", [&](D& d) {
      d = block_floats(format, {4, 32}, DType::f32);
      d.computed = format == Format::mxfp4;
      d.computed_global_scale = true;
    });
  expect_refused("gradient_scale must be finite and > 0, got 0", [](D& d) { d.gradient_scale = 0; });
  expect_refused("gradient_scale must be finite and > 0, got 1e+39", [](D& d) { d.gradient_scale = 1e39; });
  expect_refused("eps must be finite and >= 0, got 1e+300", [](D& d) { d.eps = 1e300; });
  expect_refused("alignment must be a power of two and at least the 4 bytes of f32, got 2",
                 [](D& d) { d.alignment = 2; });
}

TEST(FakeQuantize, RefusesTensorsThatBreakARule) {
  FakeQuantizeDescriptor d;
  d.shape = {2, 12};
  d.alignment = 4;
  alignas(16) Floats x(24), y(24), dy(24), scale(1), state(2);
  std::vector<uint8_t> mask(4);
  int64_t num_batches = 0;
  const FakeQuantize::Args good{view(x, {2, 12}), view(y, {2, 12}), view(scale, {}), {}, {}, {}, {}, {}};
  const auto refusal = [&](const FakeQuantize::Args& args) {
    const auto error = FakeQuantizePlan::select(kCpu, d).can_implement(args);
    return error ? std::string(error->what()) : "";
  };
  const auto expect = [&](const std::string& words, const auto& change) {
    FakeQuantize::Args args = good;
    change(args);
    EXPECT_NE(refusal(args).find(words), std::string::npos) << refusal(args);
  };
  using A = FakeQuantize::Args;
  EXPECT_EQ(refusal(good), "");
  expect("mask must have no data, as descriptor.mask is false", [&](A& a) { a.mask = view(mask, {2, 2}); });
  expect("zero_point must have no data, as descriptor.zero_point_dtype is not set",
         [&](A& a) { a.zero_point = view(scale, {}); });
  expect("min must have no data, as descriptor.observer is not set", [&](A& a) { a.min = view(state, {}); });
  expect("global_scale must have no data, as descriptor.format is not nvfp4",
         [&](A& a) { a.global_scale = view(state, {1}); });
  expect("scale", [&](A& a) { a.scale = view(y, {}); });  // overlaps y
  expect("overlap", [&](A& a) { a.y.data = x.data() + 1; });
  EXPECT_EQ(refusal({good.x, view(x, {2, 12}), good.scale, {}, {}, {}, {}, {}}), "");  // in place
  d.mask = true;
  expect("mask", [&](A&) {});
  expect("mask", [&](A& a) { a.mask = view(mask, {2, 12}); });
  EXPECT_EQ(refusal({good.x, good.y, good.scale, {}, view(mask, {2, 2}), {}, {}, {}}), "");
  const FakeQuantizeBackward::Args from_mask{{}, view(mask, {2, 2}), view(dy, {2, 12}), {},
                                             {}, view(dy, {2, 12})};
  const auto backward = FakeQuantizeBackwardPlan::select(kCpu, d);
  EXPECT_FALSE(backward.can_implement(from_mask));
  FakeQuantizeBackward::Args both = from_mask;
  both.x = good.x;
  EXPECT_NE(std::string(backward.can_implement(both)->what())
                .find("x must have no data, as the mask is read in its place"),
            std::string::npos);
  d.mask = false;
  d.computed = true;
  d.observer.emplace();
  expect("min", [&](A&) {});
  expect("overlap", [&](A& a) {
    a.min = a.max = view(state, {});
    a.num_batches = {&num_batches, DType::i64, {}, {}, {}};
  });
}

TEST(FakeQuantize, PlansSayWhatTheyAre) {
  FakeQuantizeDescriptor d;
  d.shape = {3, 5};
  d.dtype = DType::bf16;
  d.zero_point_dtype = DType::f32;
  EXPECT_EQ(FakeQuantizePlan::select(kCpu, d).sku().op, "fake_quantize");
  EXPECT_EQ(FakeQuantizePlan::select(kCpu, d).sku().dtypes, "bf16, scale f32, zero point f32");
  EXPECT_EQ(FakeQuantizeBackwardPlan::select(kCpu, d).sku().kernel, "fake_quantize_backward_cpu");
  EXPECT_EQ(d.mask_shape(), (std::vector<int64_t>{3, 1}));
  d.shape = {};
  EXPECT_EQ(d.mask_shape(), (std::vector<int64_t>{1}));
}

}  // namespace
}  // namespace halfbyte
