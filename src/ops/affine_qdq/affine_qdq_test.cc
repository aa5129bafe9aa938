// Affine quantization that is trained: against scalar references and plain loops, golden vectors, properties,
// what is refused.
#include "halfbyte/affine_qdq.hpp"

#include <bit>
#include <functional>

#include "halfbyte/quantize_plan.hpp"
#include "ops/affine_qdq/affine_qdq_ref.h"
#include "ops/affine_qdq/affine_qdq_testing.h"

namespace halfbyte {
namespace {

using testing::AffineCase;
using testing::AffineCases;
using testing::AffineOp;
using testing::AffineTensor;
using testing::Values;

// ---- Plans, one line each, of f32

struct Affine {
  AffineQdqDescriptor d;
  std::vector<uint8_t> codes;
  std::vector<float> scales, biases;
  QuantizeStatus status;

  explicit Affine(const AffineQdqDescriptor& of) : d(of) {
    codes.resize(static_cast<size_t>(d.rows * d.code_shape()[1]));
    scales.resize(static_cast<size_t>(d.rows * d.scale_shape()[1]));
    biases = scales;
  }
  template <class T>
  static TensorView view(std::vector<T>& data, std::vector<int64_t> shape) {
    return {data.data(), sizeof(T) == 1 ? DType::u8 : DType::f32, std::move(shape), {}, {}};
  }
  void init(std::vector<float> w) {
    alignas(16) std::array<uint8_t, 64> workspace;
    const auto plan = AffineInitPlan::select({}, d);
    plan.run(nullptr, workspace,
             {view(w, {d.rows, d.cols}), view(codes, d.code_shape()), view(scales, d.scale_shape()),
              view(biases, d.scale_shape())});
    status = plan.status(nullptr, workspace);
  }
  std::vector<float> decode() {
    std::vector<float> y(static_cast<size_t>(d.rows * d.cols));
    alignas(16) std::array<uint8_t, 64> workspace;
    AffineQdqPlan::select({}, d).run(nullptr, workspace,
                                     {view(codes, d.code_shape()), view(scales, d.scale_shape()),
                                      view(biases, d.scale_shape()), view(y, {d.rows, d.cols})});
    return y;
  }
  struct Gradients {
    std::vector<float> scales, biases;
  };
  Gradients backward(std::vector<float> dy) {
    Gradients g{scales, biases};
    alignas(16) std::array<uint8_t, 64> workspace;
    AffineQdqBackward::Args args;
    args.codes = view(codes, d.code_shape());
    args.dy = view(dy, {d.rows, d.cols});
    args.dscales = view(g.scales, d.scale_shape());
    args.dbiases = view(g.biases, d.scale_shape());
    AffineQdqBackwardPlan::select({}, d).run(nullptr, workspace, args);
    return g;
  }
  std::vector<int> unpacked() const {
    std::vector<int> result;
    for (int64_t row = 0; row < d.rows; ++row)
      for (int64_t i = 0; i < d.cols; ++i)
        result.push_back(d.packed ? formats::get_code(codes.data() + row * d.code_shape()[1], i, d.bits)
                                  : codes[static_cast<size_t>(row * d.cols + i)]);
    return result;
  }
};

// A row that is one group.
AffineQdqDescriptor row_of(size_t n, int bits = 4) {
  AffineQdqDescriptor d;
  d.rows = 1;
  d.cols = d.group_size = static_cast<int64_t>(n);
  d.bits = bits;
  return d;
}

using Ints = std::vector<int>;
using Floats = std::vector<float>;

// ---- Golden vectors

TEST(AffineQdq, GoldenInit) {
  struct Golden {
    Floats w;
    ScaleRule rule;
    AffineRounding rounding;
    float scale, bias;
    Ints codes;
  };
  constexpr auto kMinMax = ScaleRule::minmax, kEdge = ScaleRule::mlx_edge;
  constexpr auto kEven = AffineRounding::half_even, kAway = AffineRounding::half_away;
  const Floats ties = {0, .5f, 1.5f, 2.5f, 3.5f, 7.5f, 14.5f, 15}, low = {-3, -2.5f, -2, -1},
               mixed = {-1, -.5f, 0, .25f, .5f, 1, 1.5f, 2}, constant(8, 3.14f), zeros(8, 0.0f);
  for (const Golden& golden :
       std::vector<Golden>{{ties, kMinMax, kAway, 1, 0, {0, 1, 2, 3, 4, 8, 15, 15}},
                           {ties, kMinMax, kEven, 1, 0, {0, 0, 2, 2, 4, 8, 14, 15}},
                           {constant, kMinMax, kEven, 1, 3.14f, Ints(8, 0)},
                           {low, kMinMax, kEven, 0.13333334f, -3, {0, 4, 7, 15}},
                           {mixed, kEdge, kEven, -0.2f, 2, {15, 12, 10, 9, 8, 5, 2, 0}},
                           {mixed, kEdge, kAway, -0.2f, 2, {15, 13, 10, 9, 8, 5, 3, 0}},
                           {low, kEdge, kEven, 0.13636364f, -3, {0, 4, 7, 15}},
                           {{1, 2, 2.5f, 3}, kEdge, kEven, -0.13636364f, 3, {15, 7, 4, 0}},
                           {zeros, kEdge, kEven, -1e-7f, 0, Ints(8, 0)}}) {
    SCOPED_TRACE(fmt::format("[{}] {} {}", fmt::join(golden.w, ", "), to_string(golden.rule),
                             static_cast<int>(golden.rounding)));
    for (const bool packed : {true, false}) {
      AffineQdqDescriptor d = row_of(golden.w.size());
      d.scale_rule = golden.rule;
      d.rounding = golden.rounding;
      d.packed = packed;
      Affine affine(d);
      affine.init(golden.w);
      EXPECT_EQ(affine.unpacked(), golden.codes);
      EXPECT_EQ(affine.scales[0], golden.scale);
      EXPECT_EQ(affine.biases[0], golden.bias);
      EXPECT_TRUE(affine.status.ok());
    }
  }
}

TEST(AffineQdq, GoldenForwardAndGradients) {
  for (const bool packed : {true, false}) {
    AffineQdqDescriptor d = row_of(8);
    d.packed = packed;
    Affine affine(d);
    affine.codes = packed ? std::vector<uint8_t>{0x10, 0x32, 0xEF, 0xCD}
                          : std::vector<uint8_t>{0, 1, 2, 3, 15, 14, 13, 12};
    affine.scales = {0.25f};
    affine.biases = {-1};
    EXPECT_EQ(affine.decode(), (Floats{-1, -.75f, -.5f, -.25f, 2.75f, 2.5f, 2.25f, 2}));
    const auto gradients = affine.backward({1, -1, 2, .5f, -.25f, 1, 0, 4});
    EXPECT_EQ(gradients.scales[0], 62.75f);
    EXPECT_EQ(gradients.biases[0], 7.25f);
  }
}

TEST(AffineQdq, PacksLikeMlx) {
  AffineQdqDescriptor d = row_of(8);
  Affine affine(d);
  affine.init(
      {10, 3, 7, 1, 5, 14, 2, 9});  // codes are w - 1 scaled by 13 / 15: only the order of bits counts
  const Ints codes = affine.unpacked();
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(affine.codes[i / 2] >> (i % 2 * 4) & 15, codes[i]);
  d.cols = d.group_size = 32;
  d.scale_rule = ScaleRule::mlx_edge;
  Floats w;
  for (int i = 0; i < 32; ++i) w.push_back(static_cast<float>(i - 10) / 16);
  const std::pair<int, std::vector<uint32_t>> goldens[] = {
      {2, {0xaaaaabff, 0x00055555}},
      {3, {0x6ddb6fff, 0x36dc925b, 0x00124a49}},
      {4, {0xbccddeef, 0x8899aaab, 0x44556677, 0x00112233}},
      {5, {0x75be77df, 0x3a56d7c6, 0x35cf8465, 0xc74254b6, 0x00443214}},
      {6, {0x77e7bf7f, 0xbb6fc73d, 0x863967a6, 0x1765b75f, 0xa30e4125, 0x00210620}},
      {8, {0xe7eff7ff, 0xc6ced6de, 0xa5adb5bd, 0x848c949d, 0x636b737c, 0x424a525b, 0x2129313a, 0x00081019}}};
  for (const auto& [bits, words] : goldens) {
    d.bits = bits;
    Affine mlx(d);
    mlx.init(w);
    ASSERT_EQ(mlx.codes.size(), words.size() * 4);
    EXPECT_EQ(std::memcmp(mlx.codes.data(), words.data(), mlx.codes.size()), 0) << bits;
    EXPECT_EQ(mlx.biases[0], 1.3125f);
  }
}

// Any number of levels, in the width that bits say.
TEST(AffineQdq, AnyNumberOfLevels) {
  AffineQdqDescriptor d = row_of(5);
  EXPECT_EQ(d.num_levels(), 16);
  d.n_bins = 3;  // scale (max - min) / 2
  for (const int bits : {2, 4, 8})
    for (const bool packed : {true, false}) {
      d.bits = bits;
      d.packed = packed;
      Affine affine(d);
      affine.init({-1, -0.5f, 0, 0.75f, 3});
      EXPECT_EQ(affine.scales[0], 2);
      EXPECT_EQ(affine.biases[0], -1);
      EXPECT_EQ(affine.unpacked(), (Ints{0, 0, 0, 1, 2}));
      EXPECT_EQ(affine.decode(), (Floats{-1, -1, -1, 1, 3}));
    }
  d.scale_rule = ScaleRule::mlx_edge;  // the larger edge and 0 are codes: 3 / rne(3 / 2) = 1.5, downwards
  Affine edge(d);
  edge.init({-1, -0.5f, 0, 0.75f, 3});
  EXPECT_EQ(edge.scales[0], -1.5f);
  EXPECT_EQ(edge.biases[0], 3);
  EXPECT_EQ(edge.unpacked(), (Ints{2, 2, 2, 2, 0}));
  Floats w(257);
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i);
  for (int n_bins = 2; n_bins <= 256; ++n_bins) {
    AffineQdqDescriptor all = row_of(w.size(), 8);
    all.n_bins = n_bins;
    all.refit = n_bins % 2 == 0;
    Affine affine(all);
    affine.init(w);
    const Ints codes = affine.unpacked();
    EXPECT_EQ(codes.front(), 0);
    EXPECT_EQ(codes.back(), n_bins - 1);
    EXPECT_EQ(*std::ranges::max_element(codes), n_bins - 1);
    const Floats y = affine.decode();
    const float step = 256.0f / static_cast<float>(n_bins - 1);
    if (all.refit) continue;  // the least squares, which need not be within half a step
    for (size_t i = 0; i < w.size(); ++i) ASSERT_NEAR(y[i], w[i], step * 0.51f + 1e-3f) << n_bins;
  }
}

// Flat buffers of whole groups are one row; any leading axes are rows; a scale for each row needs no axis.
TEST(AffineQdq, ShapesOfAnyRank) {
  Floats w(96), y(96), dy(96), scales(12), biases(12), dscales(12), dbiases(12);
  for (size_t i = 0; i < w.size(); ++i) dy[i] = w[i] = std::sin(static_cast<float>(i * i));
  std::vector<uint8_t> codes(48);
  alignas(16) std::array<uint8_t, 64> workspace;
  using Shape = std::vector<int64_t>;
  const auto view = [](auto& data, const Shape& shape) { return Affine::view(data, shape); };
  const auto run = [&](const AffineQdqDescriptor& d, const Shape& dense, const Shape& packed,
                       const Shape& groups) {
    const TensorView q = view(codes, packed), s = view(scales, groups), b = view(biases, groups);
    AffineInitPlan::select({}, d).run(nullptr, workspace, {view(w, dense), q, s, b});
    AffineQdqPlan::select({}, d).run(nullptr, workspace, {q, s, b, view(y, dense)});
    AffineQdqBackward::Args args;
    args.codes = q;
    args.dy = view(dy, dense);
    args.dscales = view(dscales, groups);
    args.dbiases = view(dbiases, groups);
    AffineQdqBackwardPlan::select({}, d).run(nullptr, workspace, args);
    return std::tuple(codes, scales, biases, y, dscales, dbiases);
  };
  AffineQdqDescriptor d;
  d.alignment = 4;
  d.group_size = 8;
  d.rows = 1;
  d.cols = 96;
  const auto flat = run(d, {96}, {48}, {12});
  EXPECT_EQ(run(d, {1, 96}, {1, 1, 48}, {1, 12}), flat);
  d.rows = 12;
  d.cols = 8;
  EXPECT_EQ(run(d, {12, 8}, {3, 4, 4}, {12, 1}), flat);
  EXPECT_EQ(run(d, {3, 4, 8}, {12, 4}, {12}), flat);
  EXPECT_EQ(run(d, {3, 2, 2, 8}, {12, 4}, {3, 4}), flat);
  const auto refused = [&](const Shape& dense, const Shape& groups) {
    EXPECT_THROW(run(d, dense, {12, 4}, groups), Error);
  };
  refused({96}, {12});
  refused({12, 8}, {2, 12});
  refused({12, 8}, {11});
  refused({8, 12}, {12, 1});
  refused({-3, -4, 8}, {12, 1});
}

TEST(AffineQdq, GoldenAdam) {
  AffineQdqDescriptor d = row_of(1, 2);
  d.adam = true;
  std::vector<uint8_t> code = {1};
  Floats dy = {0.5f}, scale = {1}, bias = {1}, scale_m = {0}, scale_v = {0}, bias_m = {0}, bias_v = {0};
  const auto plan = AffineQdqBackwardPlan::select({}, d);
  alignas(16) std::array<uint8_t, 64> workspace;
  const std::vector<int64_t> one = {1, 1};
  for (int64_t step = 1; step <= 3; ++step) {
    AffineQdqBackward::Args args{Affine::view(code, one),
                                 Affine::view(dy, one),
                                 {},
                                 {},
                                 Affine::view(scale, one),
                                 Affine::view(bias, one),
                                 Affine::view(scale_m, one),
                                 Affine::view(scale_v, one),
                                 Affine::view(bias_m, one),
                                 Affine::view(bias_v, one),
                                 {}};
    args.adam.step = step;
    plan.run(nullptr, workspace, args);
    const double expected = 1 - 1e-3 * static_cast<double>(step);
    EXPECT_NEAR(static_cast<double>(scale[0]), expected, 2e-7);
    EXPECT_NEAR(static_cast<double>(bias[0]), expected, 2e-7);
  }
  EXPECT_NEAR(static_cast<double>(scale_m[0]), 0.5 * (1 - 0.9 * 0.9 * 0.9), 1e-7);
}

// ---- Against plain loops

// z rounded half away: 0.49999997 is below a half, though 0.49999997f + 0.5f is 1.
TEST(AffineQdq, HalfAwayIsExact) {
  AffineQdqDescriptor d = row_of(6);
  d.rounding = AffineRounding::half_away;
  Affine affine(d);
  const float below = std::nextafter(0.5f, 0.0f);
  affine.init({0, below, 0.5f, std::nextafter(1.5f, 0.0f), 1.5f, 15});
  EXPECT_EQ(affine.unpacked(), (Ints{0, 0, 1, 1, 2, 15}));
}

// What `quantize` writes is what init does without its own options.
void compare_with_quantize(AffineCase& test) {
  const AffineQdqDescriptor& d = test.descriptor;
  QuantSpec spec;
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::affine && format.bits == d.bits) spec.format = format.format;
  spec.group_size = d.group_size;
  spec.scale_dtype = d.scale_dtype;
  const Encoding encoding{d.scale_rule,
                          d.scale_rule == ScaleRule::mlx_edge ? CodeScale::unrounded : CodeScale::stored};
  testing::Parts parts(spec, d.rows, d.cols);
  const QuantizeStatus expected =
      quantize(test.dense.at(test.dense.bytes.data(), {}), parts.view(), encoding);
  const QuantizeStatus status = testing::run_on_cpu(test);
  EXPECT_TRUE(testing::same_status(expected, status)) << testing::text_of(status);
  const auto equal = [](const std::vector<uint8_t>& a, AffineTensor& b) {
    return b.bytes.empty() || std::equal(a.begin(), a.end() - testing::Parts::kGuard, b.data<uint8_t>());
  };
  EXPECT_TRUE(equal(parts.codes, test.codes));
  EXPECT_TRUE(equal(parts.scales, test.scales));
  EXPECT_TRUE(equal(parts.biases, test.biases));
}

TEST(AffineQdq, InitIsQuantize) {
  AffineCases cases(1);
  for (int i = 0; i < 600 && !HasFailure(); ++i) {
    AffineCase test = cases.next(3000);
    test.op = AffineOp::init;
    test.descriptor.packed = true;
    test.descriptor.n_bins = 0;
    test.descriptor.refit = false;
    test.descriptor.rounding = AffineRounding::half_even;
    cases.fill(test);
    SCOPED_TRACE(test.text());
    compare_with_quantize(test);
  }
}

// Codes by the rounding of the C library, of the parameters that were stored.
TEST(AffineQdq, InitAgainstPlainLoops) {
  AffineCases cases(2);
  for (int i = 0; i < 600 && !HasFailure(); ++i) {
    AffineCase test = cases.next(2000);
    test.op = AffineOp::init;
    test.descriptor.scale_dtype = DType::f32;  // codes of stored and of unrounded parameters are the same
    test.descriptor.refit = false;
    cases.fill(test);
    SCOPED_TRACE(test.text());
    const QuantizeStatus status = testing::run_on_cpu(test);
    const AffineQdqDescriptor& d = test.descriptor;
    const auto groups = d.rows * d.cols == 0 ? 0 : d.scale_shape()[1];
    for (int64_t index = 0; index < d.rows * d.cols; ++index) {
      const int64_t row = index / d.cols, column = index % d.cols,
                    group = row * groups + column / d.group_size;
      float w = load_element(test.dense.data<uint8_t>(), index, d.dtype);
      if (!std::isfinite(w)) w = 0;
      const float scale = test.scales.data<float>()[group], bias = test.biases.data<float>()[group];
      if (d.num_levels() == 2 && std::isinf(scale)) {  // the range of f32 and more in one step
        EXPECT_GT(status.num_unheld_scales, 0);
        continue;
      }
      ASSERT_TRUE(std::isfinite(scale) && std::isfinite(bias));
      const float z = std::isfinite(w - bias) ? (w - bias) / scale : (w / 2 - bias / 2) / (scale / 2);
      // Of one value that is large the rule of MLX has scale 0: every code is the same.
      if (scale == 0) continue;
      const float rounded = d.rounding == AffineRounding::half_away ? std::round(z) : std::nearbyint(z);
      const int expected =
          static_cast<int>(std::clamp(rounded, 0.0f, static_cast<float>(d.num_levels() - 1)));
      const int bits = d.packed ? d.bits : 8;
      ASSERT_EQ(formats::get_code(test.codes.data<uint8_t>() + row * d.code_shape()[1], column, bits),
                expected)
          << "element " << index << " z " << z;
    }
  }
}

TEST(AffineQdq, ForwardAgainstPlainLoops) {
  AffineCases cases(3);
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    AffineCase test = cases.next(3000);
    test.op = AffineOp::qdq;
    cases.fill(test);
    SCOPED_TRACE(test.text());
    testing::run_on_cpu(test);
    const AffineQdqDescriptor& d = test.descriptor;
    Values expected;
    expected.dtype = d.dtype;
    for (int64_t index = 0; index < d.rows * d.cols; ++index) {
      const int64_t row = index / d.cols, column = index % d.cols;
      const int64_t group = row * d.scale_shape()[1] + column / d.group_size;
      const int q = formats::get_code(test.codes.data<uint8_t>() + row * d.code_shape()[1], column,
                                      d.packed ? d.bits : 8);
      const float scale = load_element(test.scales.data<uint8_t>(), group, d.scale_dtype),
                  bias = load_element(test.biases.data<uint8_t>(), group, d.scale_dtype);
      const volatile float product = static_cast<float>(q) * scale;
      expected.push_back(static_cast<double>(product + bias));
    }
    if (!test.dense.bytes.empty()) {
      EXPECT_EQ(std::memcmp(expected.bytes.data(), test.dense.data<uint8_t>(), expected.bytes.size()), 0);
    }
  }
}

// ---- Backward

void expect_reference(AffineCase test, int num_threads) {
  AffineCase expected = test;
  const AffineQdqDescriptor& d = test.descriptor;
  const AffineProblem problem = make_affine_problem(d);
  AffineBackwardArgs args{};
  const auto data = [](AffineTensor& t) { return t.bytes.empty() ? nullptr : t.data<float>(); };
  args.codes = expected.codes.bytes.empty() ? nullptr : expected.codes.data<uint8_t>();
  args.dy = expected.dense.bytes.empty() ? nullptr : expected.dense.data<uint8_t>();
  args.scales = {data(expected.dscales), data(expected.scales), data(expected.scale_m),
                 data(expected.scale_v)};
  args.biases = {data(expected.dbiases), data(expected.biases), data(expected.bias_m), data(expected.bias_v)};
  const double step = static_cast<double>(test.adam.step);
  args.adam = {static_cast<float>(1e-3 / (1 - std::pow(0.9, step))),
               0.9f,
               static_cast<float>(1 - 0.9),
               0.999f,
               static_cast<float>(1 - 0.999),
               static_cast<float>(std::sqrt(1 - std::pow(0.999, step))),
               1e-8f};
  for (int64_t row = 0; row < d.rows; ++row)
    affine_backward_ref(problem, args, row, 0, problem.shape.groups_per_row);
  testing::run_on_cpu(test, num_threads);
  size_t i = 0;
  const auto all = test.all();
  for (AffineTensor* tensor : expected.all()) {
    EXPECT_EQ(tensor->bytes, all[i]->bytes) << AffineCase::kNames[i];
    ++i;
  }
}

TEST(AffineQdq, BackwardEqualsTheReferenceOnEveryTarget) {
  testing::for_each_target([&](const char*) {
    AffineCases cases(4);
    for (int i = 0; i < (testing::kSanitized ? 60 : 400) && !HasFailure(); ++i) {
      AffineCase test = cases.next(i % 20 == 0 ? 40000 : 2000);
      test.op = AffineOp::backward;
      cases.fill(test);
      SCOPED_TRACE(test.text());
      expect_reference(test, 1 + i % 5);
    }
  });
}

// Every width of codes with groups of every kind.
TEST(AffineQdq, BackwardOfEveryKind) {
  AffineCases cases(5);
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const bool packed : {true, false})
      for (const int64_t group : {1, 2, 4, 7, 8, 16, 64, 100, 128, 1024, 4096, 5000, 8192})
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          AffineCase test;
          test.op = AffineOp::backward;
          test.descriptor = {2, group * 2 + 5, bits, group, packed, dtype};
          test.descriptor.adam = group % 8 == 0;
          cases.fill(test);
          SCOPED_TRACE(test.text());
          expect_reference(test, 2);
          if (HasFailure()) return;
        }
}

// The tree: neighbours first.
TEST(AffineQdq, SumsArePairwise) {
  const Floats dy = {1, 1e8f, -1e8f, 3, 0.5f, 2, 7};
  Affine affine(row_of(dy.size()));
  const float expected = ((dy[0] + dy[1]) + (dy[2] + dy[3])) + ((dy[4] + dy[5]) + dy[6]);
  EXPECT_EQ(affine.backward(dy).biases[0], expected);
  float in_order = 0;
  for (const float x : dy) in_order += x;
  EXPECT_NE(in_order, expected);
}

TEST(AffineQdq, SumsOfZerosAndOfWhatIsNotFinite) {
  Affine affine(row_of(4));
  affine.codes = {0x12, 0x34};
  auto gradients = affine.backward({-0.0f, -0.0f, -0.0f, -0.0f});
  EXPECT_EQ(std::bit_cast<uint32_t>(gradients.scales[0]), 0u);
  EXPECT_EQ(std::bit_cast<uint32_t>(gradients.biases[0]), 0u);
  gradients = affine.backward({INFINITY, -INFINITY, 1, -NAN});
  EXPECT_EQ(std::bit_cast<uint32_t>(gradients.scales[0]), 0x7FC00000u);
  EXPECT_EQ(std::bit_cast<uint32_t>(gradients.biases[0]), 0x7FC00000u);
}

// dL/ds and dL/db of L = sum of (y - w)^2 / 2, by central differences of a loss in f64.
TEST(AffineQdq, FiniteDifferences) {
  AffineQdqDescriptor d;
  d.rows = 3;
  d.cols = 150;
  d.group_size = 64;
  Affine affine(d);
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal;
  Floats w(static_cast<size_t>(d.rows * d.cols));
  for (float& x : w) x = normal(random);
  affine.init(w);
  for (float& scale : affine.scales) scale *= 1.1f;
  const Ints q = affine.unpacked();
  const auto group_of = [&](size_t i) { return i / 150 * 3 + i % 150 / 64; };
  const auto loss = [&](size_t group, double ds, double db) {
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      if (group_of(i) != group) continue;
      const double error = q[i] * (static_cast<double>(affine.scales[group]) + ds) +
                           static_cast<double>(affine.biases[group]) + db - static_cast<double>(w[i]);
      sum += error * error / 2;
    }
    return sum;
  };
  Floats dy = affine.decode();
  for (size_t i = 0; i < dy.size(); ++i) dy[i] -= w[i];
  const auto gradients = affine.backward(dy);
  for (size_t group = 0; group < affine.scales.size(); ++group) {
    constexpr double kStep = 1e-4;
    const double ds = (loss(group, kStep, 0) - loss(group, -kStep, 0)) / (2 * kStep);
    const double db = (loss(group, 0, kStep) - loss(group, 0, -kStep)) / (2 * kStep);
    EXPECT_NEAR(static_cast<double>(gradients.scales[group]), ds, 1e-3 * std::fabs(ds));
    EXPECT_NEAR(static_cast<double>(gradients.biases[group]), db, 1e-3 * std::fabs(db));
  }
}

// ---- Properties of init

// Half a step, and what rounding the scale, the bias and y adds.
TEST(AffineQdq, ErrorIsHalfAStep) {
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const uint64_t seed : {1, 2, 3}) {
      AffineQdqDescriptor d;
      d.rows = 4;
      d.cols = 1000;
      d.bits = bits;
      d.group_size = 50;
      Floats w;
      for (const double x : testing::random_values(DType::f32, d.rows * d.cols, seed).exact)
        w.push_back(static_cast<float>(x) * 1e-3f);  // differences stay finite
      Affine affine(d);
      affine.init(w);
      EXPECT_EQ(affine.status.num_unheld_scales, 0);
      const Floats y = affine.decode();
      for (size_t i = 0; i < w.size(); ++i) {
        const size_t group = i / 50;
        const double scale = std::fabs(static_cast<double>(affine.scales[group])),
                     bias = std::fabs(static_cast<double>(affine.biases[group]));
        // Of w - b, of the scale (once a code), of q s and of q s + b.
        const double rounding =
            (std::fabs(static_cast<double>(w[i])) + bias + (1 << bits) * scale) * 0x1p-23 + 1e-43;
        ASSERT_LE(std::fabs(static_cast<double>(y[i]) - static_cast<double>(w[i])), scale / 2 + rounding)
            << i;
      }
    }
}

double squared_error(const Floats& y, const Floats& w, size_t begin, size_t end) {
  double sum = 0;
  for (size_t i = begin; i < end; ++i)
    if (std::isfinite(w[i])) sum += std::pow(static_cast<double>(y[i]) - static_cast<double>(w[i]), 2);
  return sum;
}

TEST(AffineQdq, RefitIsTheLeastSquares) {
  for (const int bits : {2, 3, 4, 8})
    for (const DType scale_dtype : {DType::f32}) {
      AffineQdqDescriptor d;
      d.rows = 8;
      d.cols = 500;
      d.bits = bits;
      d.group_size = 64;
      d.scale_dtype = scale_dtype;
      std::mt19937_64 random(7);
      std::normal_distribution<float> normal(0.01f, 0.02f);
      Floats w(static_cast<size_t>(d.rows * d.cols));
      for (float& x : w) x = normal(random);
      w[17] = NAN;
      Affine plain(d);
      plain.init(w);
      d.refit = true;
      Affine refitted(d);
      refitted.init(w);
      EXPECT_EQ(plain.codes, refitted.codes);
      const Ints codes = plain.unpacked();
      const Floats y0 = plain.decode(), y1 = refitted.decode();
      int better = 0;
      for (size_t group = 0; group < plain.scales.size(); ++group) {
        const size_t begin = group / 8 * 500 + group % 8 * 64,
                     end = std::min(begin + 64, (group / 8 + 1) * 500);
        const double before = squared_error(y0, w, begin, end), after = squared_error(y1, w, begin, end);
        EXPECT_LE(after, before);
        better += after < before ? 1 : 0;
        // The optimum, by centred sums.
        double n = 0, mean_q = 0, mean_w = 0, qq = 0, qw = 0;
        for (size_t i = begin; i < end; ++i)
          if (std::isfinite(w[i])) n += 1, mean_q += codes[i], mean_w += static_cast<double>(w[i]);
        mean_q /= n;
        mean_w /= n;
        for (size_t i = begin; i < end; ++i)
          if (std::isfinite(w[i])) {
            qq += (codes[i] - mean_q) * (codes[i] - mean_q);
            qw += (codes[i] - mean_q) * (static_cast<double>(w[i]) - mean_w);
          }
        const double scale = qw / qq, bias = mean_w - scale * mean_q;
        EXPECT_NEAR(static_cast<double>(refitted.scales[group]), scale, 1e-6 * std::fabs(scale));
        EXPECT_NEAR(static_cast<double>(refitted.biases[group]), bias,
                    1e-6 * (std::fabs(bias) + std::fabs(scale)));
      }
      EXPECT_GT(better, 60);
    }
}

// Never worse, whatever the data, in the scales as stored.
TEST(AffineQdq, RefitIsNeverWorse) {
  AffineCases cases(8);
  int better = 0;
  for (int i = 0; i < 300 && !HasFailure(); ++i) {
    AffineCase test = cases.next(1500);
    test.op = AffineOp::init;
    test.descriptor.refit = false;
    cases.fill(test);
    AffineCase refit = test;
    refit.descriptor.refit = true;
    SCOPED_TRACE(refit.text());
    testing::run_on_cpu(test);
    testing::run_on_cpu(refit);
    EXPECT_EQ(test.codes.bytes, refit.codes.bytes);
    const AffineQdqDescriptor& d = test.descriptor;
    if (d.rows * d.cols == 0) continue;
    const int64_t groups = d.scale_shape()[1];
    for (int64_t group = 0; group < d.rows * groups; ++group) {
      const auto error = [&](AffineCase& of) {
        double sum = 0;
        const float scale = load_element(of.scales.data<uint8_t>(), group, d.scale_dtype),
                    bias = load_element(of.biases.data<uint8_t>(), group, d.scale_dtype);
        const int64_t row = group / groups, begin = group % groups * d.group_size;
        for (int64_t c = begin; c < std::min(d.cols, begin + d.group_size); ++c) {
          const float w = load_element(of.dense.data<uint8_t>(), row * d.cols + c, d.dtype);
          if (!std::isfinite(w)) continue;
          const int q =
              formats::get_code(of.codes.data<uint8_t>() + row * d.code_shape()[1], c, d.packed ? d.bits : 8);
          const double y = static_cast<double>(static_cast<float>(q) * scale + bias);
          sum += (y - static_cast<double>(w)) * (y - static_cast<double>(w));
        }
        return sum;
      };
      const double before = error(test), after = error(refit);
      if (!std::isfinite(before)) continue;
      EXPECT_LE(after, before * (1 + 1e-12)) << group;
      better += after < before ? 1 : 0;
    }
  }
  EXPECT_GT(better, 1000);
}

TEST(AffineQdq, WhatIsNotFinite) {
  for (const bool packed : {true, false}) {
    AffineQdqDescriptor d = row_of(6);
    d.rows = 2;
    d.packed = packed;
    d.refit = true;
    Affine affine(d);
    affine.init({-1, NAN, 0, INFINITY, 2, -INFINITY, NAN, NAN, INFINITY, NAN, NAN, NAN});
    const Ints codes = affine.unpacked();
    EXPECT_EQ(codes[0], 0);
    EXPECT_EQ(codes[4], 15);
    for (const size_t i : {1, 3, 5}) EXPECT_EQ(codes[i], codes[2]) << i;  // of 0
    for (size_t i = 6; i < 12; ++i) EXPECT_EQ(codes[i], 0);
    EXPECT_EQ(affine.scales[1], 1);
    EXPECT_EQ(affine.biases[1], 0);
    EXPECT_EQ(affine.status.num_nonfinite, 9);
    EXPECT_EQ(affine.status.first_nonfinite, 1);
    EXPECT_FALSE(affine.status.ok());
  }
}

TEST(AffineQdq, ThreadsDoNotMatter) {
  AffineCases cases(9);
  for (int i = 0; i < 60; ++i) {
    AffineCase test = cases.next(i % 6 == 0 ? 600000 : 5000);
    SCOPED_TRACE(test.text());
    AffineCase one = test;
    const QuantizeStatus expected = testing::run_on_cpu(one, 1);
    for (const int threads : {2, 5, 16}) {
      AffineCase many = test;
      EXPECT_TRUE(testing::same_status(expected, testing::run_on_cpu(many, threads)));
      const auto all = many.all();
      size_t k = 0;
      for (AffineTensor* tensor : one.all()) EXPECT_EQ(tensor->bytes, all[k++]->bytes);
    }
    if (HasFailure()) return;
  }
}

// ---- What is refused

template <class Body>
void expect_refused(const Body& body, const std::vector<std::string>& words) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << fmt::format("{}", fmt::join(words, " "));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(AffineQdq, RefusesBadDescriptors) {
  const auto refused = [](const std::function<void(AffineQdqDescriptor&)>& change,
                          const std::vector<std::string>& words) {
    AffineQdqDescriptor d = row_of(64);
    check_descriptor(d);
    change(d);
    expect_refused([&] { check_descriptor(d); }, words);
    expect_refused([&] { AffineInitPlan::select({}, d); }, words);
    expect_refused([&] { AffineQdqPlan::select({}, d); }, words);
    expect_refused([&] { AffineQdqBackwardPlan::select({}, d); }, words);
    expect_refused([&] { (void)d.scale_shape(); }, words);
    expect_refused([&] { (void)d.code_shape(); }, words);
  };
  refused([](auto& d) { d.bits = 7; }, {"bits must be 2, 3, 4, 5, 6 or 8", "got 7"});
  refused([](auto& d) { d.bits = 1; }, {"bits", "got 1"});
  refused([](auto& d) { d.n_bins = 1; }, {"n_bins must be 0 (all codes), or 2 to the 16 codes", "got 1"});
  refused([](auto& d) { d.n_bins = 17; }, {"n_bins", "got 17"});
  refused([](auto& d) { d.n_bins = -1; }, {"n_bins", "got -1"});
  refused([](auto& d) { d.group_size = 0; }, {"group_size", "got 0"});
  refused([](auto& d) { d.rows = -1; }, {"rows", "got -1"});
  refused([](auto& d) { d.cols = int64_t{1} << 62; }, {"63"});
  refused([](auto& d) { d.dtype = DType::f64; }, {"dtype", "got f64"});
  refused([](auto& d) { d.scale_dtype = DType::i8; }, {"scale_dtype", "got i8"});
  refused([](auto& d) { d.scale_rule = ScaleRule::absmax; }, {"scale_rule", "absmax"});
  refused([](auto& d) { d.alignment = 24; }, {"alignment", "24"});
  refused([](auto& d) { d.alignment = 2; }, {"alignment", "4 bytes of f32", "got 2"});
  expect_refused([] { AffineQdqBackwardPlan::select({}, row_of(64), {-1}); }, {"num_threads", "-1"});
}

TEST(AffineQdq, RefusesBadArguments) {
  AffineCases cases(10);
  AffineCase test;
  test.op = AffineOp::backward;
  test.descriptor = row_of(64);
  test.descriptor.adam = true;
  cases.fill(test);
  AffineQdqBackward::Args good = testing::args_of(test, testing::host_memory(test), {}).backward;
  const auto plan = AffineQdqBackwardPlan::select({}, test.descriptor);
  ASSERT_FALSE(plan.can_implement(good));
  const auto refused = [&](const std::function<void(AffineQdqBackward::Args&)>& change,
                           const std::vector<std::string>& words) {
    AffineQdqBackward::Args args = good;
    change(args);
    alignas(16) std::array<uint8_t, 64> workspace;
    expect_refused([&] { plan.run(nullptr, workspace, args); }, words);
    EXPECT_TRUE(plan.can_implement(args).has_value());
  };
  refused([](auto& a) { a.dy.dtype = DType::bf16; }, {"affine_qdq_backward", "dy must be f32", "bf16"});
  refused([](auto& a) { a.codes.shape = {1, 64}; }, {"codes", "[1, 32]", "[1, 64]"});
  refused([](auto& a) { a.scales.data = nullptr; }, {"scales", "has no data"});
  refused([](auto& a) { a.bias_v.shape = {2}; }, {"bias_v", "[1, 1]", "[2]"});
  refused([](auto& a) { a.scale_m.data = a.scale_v.data; }, {"scale_v", "must not overlap scale_m"});
  refused([](auto& a) { a.adam.step = 0; }, {"adam.step", "got 0"});
  refused([](auto& a) { a.adam.beta1 = 1; }, {"adam.beta1", "[0, 1)", "got 1"});
  refused([](auto& a) { a.adam.beta2 = NAN; }, {"adam.beta2", "nan"});
  refused([](auto& a) { a.adam.learning_rate = INFINITY; }, {"adam.learning_rate", "inf"});
  refused([](auto& a) { a.adam.epsilon = -1; }, {"adam.epsilon", "-1"});

  AffineQdqDescriptor d = test.descriptor;
  d.adam = false;
  const auto without = AffineQdqBackwardPlan::select({}, d);
  good.dscales = good.scale_m;
  expect_refused([&] { throw Error(*without.can_implement(good)); }, {"scales must have no data", "adam"});
  AffineQdqBackward::Args neither;
  neither.codes = good.codes;
  neither.dy = good.dy;
  expect_refused([&] { throw Error(*without.can_implement(neither)); },
                 {"dscales or dbiases must have data"});
}

TEST(AffineQdq, DescribesItself) {
  AffineQdqDescriptor d = row_of(64);
  d.dtype = DType::bf16;
  const auto backward = AffineQdqBackwardPlan::select({}, d);
  EXPECT_EQ(backward.sku().op, "affine_qdq_backward");
  EXPECT_EQ(backward.sku().dtypes, "u4 packed, bf16 -> f32");
  EXPECT_EQ(AffineQdqPlan::select({}, d).sku().op, "affine_qdq");
  EXPECT_EQ(AffineInitPlan::select({}, d).sku().kernel, "affine_init_cpu");
  d.refit = true;
  EXPECT_EQ(AffineInitPlan::select({}, d).precision_guarantee().accumulator, DType::f64);
}

}  // namespace
}  // namespace halfbyte
