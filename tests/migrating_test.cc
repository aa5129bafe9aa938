// What docs/migrating.md says of the differences from other systems, a test for each row.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "halfbyte/simple.hpp"

namespace halfbyte {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;
using Codes = std::vector<int8_t>;

TensorView view(Floats& values) {
  return {values.data(), DType::f32, {static_cast<int64_t>(values.size())}, {}, {}};
}
TensorView view(std::vector<int32_t>& values) {
  return {values.data(), DType::i32, {static_cast<int64_t>(values.size())}, {}, {}};
}
TensorView view(Bytes& values) {
  return {values.data(), DType::u8, {static_cast<int64_t>(values.size())}, {}, {}};
}
TensorView view(Codes& values) {
  return {values.data(), DType::i8, {static_cast<int64_t>(values.size())}, {}, {}};
}
template <class Op>
QuantizeStatus run(const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(Device{}, descriptor, {1});
  const Memory workspace(Device{}, plan.workspace_size());
  plan.run(nullptr, workspace, args);
  return plan.status(nullptr, workspace);
}

struct Flat {
  Bytes codes, zeros;
  Floats scales, decoded;
};
Flat int4_of(Floats x, const Int4Config& config) {
  const auto n = static_cast<int64_t>(x.size());
  const auto groups = static_cast<size_t>(config.num_groups(n));
  Flat flat{Bytes(static_cast<size_t>(config.packed_bytes(n))), Bytes(groups), Floats(groups),
            Floats(x.size())};
  const TensorView zeros = config.symmetric ? TensorView{} : view(flat.zeros);
  quantize_int4(view(x), view(flat.codes), view(flat.scales), zeros, n, config);
  dequantize_int4(view(flat.codes), view(flat.scales), zeros, view(flat.decoded), n, config);
  return flat;
}
Flat nf4_of(Floats x, int64_t group_size) {
  const auto n = static_cast<int64_t>(x.size());
  const Int4Config config{group_size};
  Flat flat{Bytes(static_cast<size_t>(config.packed_bytes(n))),
            {},
            Floats(static_cast<size_t>(config.num_groups(n))),
            Floats(x.size())};
  quantize_nf4(view(x), view(flat.codes), view(flat.scales), n, group_size);
  dequantize_nf4(view(flat.codes), view(flat.scales), view(flat.decoded), n, group_size);
  return flat;
}

// ---- A: INT4 and NF4 of flat buffers

TEST(MigratingA, Int4RoundsHalfToEven) {
  const Flat flat = int4_of({-7, -3.5, -.5, .5, 1.5, 2.5, 3.49f, 7}, {8});
  EXPECT_EQ(flat.codes, (Bytes{0x41, 0x88, 0xAA, 0xFB}));
  EXPECT_EQ(flat.decoded, (Floats{-7, -4, 0, 0, 2, 2, 3, 7}));
}
TEST(MigratingA, ZeroPointsAreIntegersAndTheRangeContainsZero) {
  const Flat flat = int4_of({-1, -.5, 0, .25, .5, 1, 1.5, 2}, {8, false});
  EXPECT_EQ(flat.zeros, (Bytes{5}));
  EXPECT_FLOAT_EQ(flat.scales[0], 0.2f);
  EXPECT_EQ(flat.codes, (Bytes{0x30, 0x65, 0xA7, 0xFD}));
  EXPECT_EQ(int4_of({1, 2, 3, 4}, {4, false}).zeros, (Bytes{0}));
}
TEST(MigratingA, ConstantGroupsRoundTrip) {
  for (const float c : {3.25f, -3.25f}) {
    const Flat flat = int4_of(Floats(32, c), {32, false});
    EXPECT_NEAR(flat.decoded[0], c, 1e-6);
  }
}
TEST(MigratingA, TinyGroupsKeepTheirValues) {
  const Flat flat = int4_of({1e-30f, -7e-30f, 3e-30f, 0}, {4});
  EXPECT_NEAR(flat.decoded[1] / -7e-30f, 1, 1e-6);
}
TEST(MigratingA, HugeGroupsKeepTheirValues) {
  const Flat flat = int4_of({3.4e38f, -3.4e38f, 1e38f, 0}, {4});
  EXPECT_NEAR(flat.decoded[0] / 3.4e38f, 1, 1e-6);
  EXPECT_NEAR(flat.decoded[1] / -3.4e38f, 1, 1e-6);
}
TEST(MigratingA, Nf4ScaleIsAbsmax) {
  const Flat flat = nf4_of({-2, -1, -.5, -0.0f, .1f, .5, 1, 2}, 8);
  EXPECT_EQ(flat.scales, (Floats{2}));
  EXPECT_EQ(flat.codes, (Bytes{0x20, 0x74, 0xA8, 0xFC}));
  EXPECT_FLOAT_EQ(flat.decoded[1], -1.0501461f);
}
TEST(MigratingA, TheOddHalfByteIsTheCodeOfZero) {
  EXPECT_EQ(nf4_of({1, -1, 1}, 3).codes, (Bytes{0x0F, 0x7F}));
  EXPECT_EQ(int4_of({7, -7, 7}, {3}).codes, (Bytes{0x1F, 0x8F}));
}
TEST(MigratingA, NanIsAnError) { EXPECT_THROW(int4_of({1, kNan, 2}, {3}), Error); }
TEST(MigratingA, GroupsOfAPlanRunOnAStream) {
  QuantSpec spec{.format = Format::int4, .granularity = Granularity::flat, .group_size = 8};
  EXPECT_EQ(QuantizePlan::select(Device{}, {spec, 1, 100, DType::f32}).sku().op, "quantize");
}

// ---- B: quantization-aware training

TEST(MigratingB, ADegenerateRangeIsExtendedToZero) {
  const QParams params = compute_qparams(5, 5, QParamsConfig::of_bits(8, true));
  EXPECT_FLOAT_EQ(static_cast<float>(params.scale), 5.f / 255);
  EXPECT_EQ(params.zero_point, -128);
  EXPECT_EQ(compute_qparams(1, 3, QParamsConfig::of_bits(8, true)),
            compute_qparams(0, 3, QParamsConfig::of_bits(8, true)));
}
TEST(MigratingB, ScalesHaveNoFloorUnlessAsked) {
  QParamsConfig config = QParamsConfig::of_bits(8);
  EXPECT_NEAR(compute_qparams(-1e-9, 1e-9, config).scale * 127 / 1e-9, 1, 1e-6);
  config.eps = std::numeric_limits<float>::epsilon();
  EXPECT_EQ(compute_qparams(-1e-9, 1e-9, config).scale, config.eps);
}
TEST(MigratingB, ZeroPointsRoundHalfToEven) {
  EXPECT_EQ(compute_qparams(-3.5, 11.5, QParamsConfig::of_bits(4, true)).zero_point, -4);
}
TEST(MigratingB, TheMaskIsThatOfTheRoundedValue) {
  FakeQuantizeDescriptor d;
  d.shape = {6};
  Floats x = {.74f, .76f, -.84f, -.86f, .70f, -.80f}, dy(6, 1), dx(6), scale = {.1f};
  run<FakeQuantizeBackward>(d, {view(x), {}, view(dy), view(scale), {}, view(dx)});
  EXPECT_EQ(dx, (Floats{1, 0, 1, 0, 1, 1}));
}
TEST(MigratingB, MomentumIsThatOfTheObserver) {
  ObserverConfig config;
  config.kind = ObserverKind::moving_average;
  for (const auto& [momentum, min, max] : {std::array{.9, -1.1, 1.2}, {.5, -1.5, 2.0}}) {
    config.momentum = momentum;
    ObserverState state = ObserverState::empty(1, DType::f64);
    state.update(config, -1, 1);
    state.update(config, -2, 3);
    EXPECT_NEAR(state.min[0], min, 1e-12);
    EXPECT_NEAR(state.max[0], max, 1e-12);
  }
}
TEST(MigratingB, AnObserverWithoutDataIsAnError) {
  EXPECT_THROW(ObserverState::empty(1).qparams(QParamsConfig::of_bits(8)), Error);
}
TEST(MigratingB, PercentilesAreExact) {
  ObserveDescriptor d;
  d.shape = {100};
  d.observer.kind = ObserverKind::percentile;
  d.observer.percentile = 90;
  Floats x(100), min = {INFINITY}, max = {-INFINITY};
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + 1);
  std::vector<int64_t> num_batches(1);
  run<Observe>(d, {view(x), view(min), view(max), {num_batches.data(), DType::i64, {}, {}, {}}});
  EXPECT_EQ(min[0], 11);
  EXPECT_EQ(max[0], 90);
}

// ---- C: fused products

// y of a [2, 96] x, a weight whose rows are no multiple of a group, and of the sums in f64.
TEST(MigratingC, AnyExtentAndTheNativeLayoutAsItIs) {
  const int64_t m = 2, n = 3, k = 100;
  Floats x(static_cast<size_t>(m * k)), w(static_cast<size_t>(n * k)), decoded(w.size()),
      y(static_cast<size_t>(m * n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::cos(static_cast<float>(3 * i));
  const QuantSpec spec;  // nf4, groups of 64
  Bytes codes(static_cast<size_t>(n * k / 2));
  Floats scales(static_cast<size_t>(n * 2));
  const QuantizedView parts{spec, n, k, codes.data(), scales.data(), nullptr, nullptr};
  quantize({w.data(), DType::f32, {n, k}, {}, {}}, parts);
  dequantize(parts, {decoded.data(), DType::f32, {n, k}, {}, {}});
  WeightView weight{.spec = spec, .rows = n, .cols = k, .codes = codes.data(), .scales = scales.data()};
  for (const QgemmMath math : {QgemmMath::automatic, QgemmMath::f64}) {
    run<Qgemm>({.spec = spec,
                .m = m,
                .n = n,
                .k = k,
                .dtype = DType::f32,
                .packed = false,
                .math = math,
                .alignment = 4},
               {.x = {x.data(), DType::f32, {m, k}, {}, {}},
                .view = weight,
                .y = {y.data(), DType::f32, {m, n}, {}, {}}});
    for (int64_t row = 0; row < m; ++row)
      for (int64_t column = 0; column < n; ++column) {
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double term = static_cast<double>(x[static_cast<size_t>(row * k + i)]) *
                              static_cast<double>(decoded[static_cast<size_t>(column * k + i)]);
          sum += term;
          magnitude += std::fabs(term);
        }
        const auto result = static_cast<double>(y[static_cast<size_t>(row * n + column)]);
        const double bound =
            math == QgemmMath::f64 ? 0x1p-24 * (std::fabs(sum) + magnitude) : 2 * k * 0x1p-24 * magnitude;
        EXPECT_LE(std::fabs(result - sum), bound);
      }
  }
}
TEST(MigratingC, EmptyProductsAreDone) {
  Bytes codes(3 * 32);
  Floats scales(3);
  Qgemm::Args args;
  args.x = {nullptr, DType::f32, {0, 64}};
  args.view = {.spec = {}, .rows = 3, .cols = 64, .codes = codes.data(), .scales = scales.data()};
  args.y = {nullptr, DType::f32, {0, 3}};
  run<Qgemm>({.m = 0, .n = 3, .k = 64, .dtype = DType::f32, .packed = false, .alignment = 4}, args);
}

// ---- D: linear quantization of groups

LinearDescriptor group_of_4() {
  LinearDescriptor d = LinearDescriptor::per_group({4}, 4);
  d.zero_point_dtype = DType::i32;
  d.alignment = 4;
  return d;
}
TEST(MigratingD, TheQuotientIsRoundedBeforeTheZeroPointIsAdded) {
  for (const auto& [zero_point, expected] : {std::pair(1, Codes{1, 3, 3, 1}), {3, Codes{3, 5, 5, 3}}}) {
    Floats x = {.5f, 1.5f, 2.5f, -.5f}, scale = {1};
    std::vector<int32_t> zero = {zero_point};
    Codes codes(4);
    run<QuantizeLinear>(group_of_4(), {view(x), view(codes), view(scale), view(zero)});
    EXPECT_EQ(codes, expected);
  }
}
TEST(MigratingD, AnyZeroPoint) {
  LinearDescriptor d = group_of_4();
  d.q_min = -8;
  d.q_max = 7;
  Floats x = {90, 95, 99, 107}, scale = {1}, y(4), dy(4, 1), dx(4);
  std::vector<int32_t> zero = {-100};
  Codes codes(4);
  EXPECT_TRUE(run<QuantizeLinear>(d, {view(x), view(codes), view(scale), view(zero)}).ok());
  EXPECT_EQ(codes, (Codes{-8, -5, -1, 7}));
  run<DequantizeLinear>(d, {view(codes), view(scale), view(zero), view(y)});
  EXPECT_EQ(y, (Floats{92, 95, 99, 107}));
  run<QuantizeLinearBackward>(d, {view(x), view(dy), view(scale), view(zero), view(dx)});
  EXPECT_EQ(dx, (Floats{0, 1, 1, 1}));
}
TEST(MigratingD, F64IsComputedInF64) {
  LinearDescriptor d = LinearDescriptor::per_group({1}, 1);
  d.dtype = d.scale_dtype = DType::f64;
  double x = .15, scale = .1;
  int8_t code = 0;
  run<QuantizeLinear>(d, {{&x, DType::f64, {1}, {}, {}},
                          {&code, DType::i8, {1}, {}, {}},
                          {&scale, DType::f64, {1}, {}, {}},
                          {}});
  EXPECT_EQ(code, 1);
}
TEST(MigratingD, TheMaskIsInclusive) {
  LinearDescriptor d = LinearDescriptor::per_group({4}, 4);
  d.q_min = -8;
  d.q_max = 7;
  d.alignment = 4;
  Floats x = {.70f, .74f, -.80f, -.84f}, dy(4, 1), dx(4), scale = {.1f};
  run<QuantizeLinearBackward>(d, {view(x), view(dy), view(scale), {}, view(dx)});
  EXPECT_EQ(dx, dy);
}
TEST(MigratingD, ATailGroupIsAGroup) {
  LinearDescriptor d = LinearDescriptor::per_group({6}, 4);
  d.alignment = 4;
  EXPECT_EQ(d.scale_shape(), (std::vector<int64_t>{2}));
  Floats x = {1, 2, 3, 4, 5, 6}, scale = {1, 2};
  Codes codes(6);
  run<QuantizeLinear>(d, {view(x), view(codes), view(scale), {}});
  EXPECT_EQ(codes, (Codes{1, 2, 3, 4, 2, 3}));
}
TEST(MigratingD, ANegativeScaleCountsAsZero) {
  LinearDescriptor d = LinearDescriptor::per_group({4}, 4);
  d.alignment = 4;
  Floats x = {1, 2, 3, 4}, scale = {-1};
  Codes codes(4, 9);
  EXPECT_EQ(run<QuantizeLinear>(d, {view(x), view(codes), view(scale), {}}).num_invalid_scales, 1);
  EXPECT_EQ(codes, (Codes{0, 0, 0, 0}));
}
TEST(MigratingD, CodesLieAtAnyAddress) {
  Floats x = {1, 2, 3, 4}, scale = {1};
  std::vector<int32_t> zero = {0};
  Codes memory(5);
  const TensorView codes{memory.data() + 1, DType::i8, {4}, {}, {}};
  run<QuantizeLinear>(group_of_4(), {view(x), codes, view(scale), view(zero)});
  EXPECT_EQ(memory, (Codes{0, 1, 2, 3, 4}));
}

// ---- E: affine codes for training

AffineQdqDescriptor one_group(int64_t size, AffineRounding rounding) {
  AffineQdqDescriptor d;
  d.rows = 1;
  d.cols = d.group_size = size;
  d.packed = false;
  d.rounding = rounding;
  d.alignment = 4;
  return d;
}
Bytes affine_codes(Floats w, AffineRounding rounding, Floats* scale_and_bias = nullptr) {
  const AffineQdqDescriptor d = one_group(static_cast<int64_t>(w.size()), rounding);
  Bytes codes(w.size());
  Floats scale(1), bias(1);
  const std::vector<int64_t> one = {1, 1}, row = {1, d.cols};
  run<AffineInit>(d, {{w.data(), DType::f32, row, {}, {}},
                      {codes.data(), DType::u8, row, {}, {}},
                      {scale.data(), DType::f32, one, {}, {}},
                      {bias.data(), DType::f32, one, {}, {}}});
  if (scale_and_bias != nullptr) *scale_and_bias = {scale[0], bias[0]};
  return codes;
}
TEST(MigratingE, HalvesRoundToEvenOrAway) {
  const Floats w = {0, .5f, 1.5f, 2.5f, 3.5f, 7.5f, 14.5f, 15};
  EXPECT_EQ(affine_codes(w, AffineRounding::half_even), (Bytes{0, 0, 2, 2, 4, 8, 14, 15}));
  EXPECT_EQ(affine_codes(w, AffineRounding::half_away), (Bytes{0, 1, 2, 3, 4, 8, 15, 15}));
}
TEST(MigratingE, HalfAwayIsExactBelowAHalf) {
  EXPECT_EQ(affine_codes({0, 0.49999997f, 15}, AffineRounding::half_away), (Bytes{0, 0, 15}));
}
TEST(MigratingE, AConstantGroupIsExact) {
  Floats scale_and_bias;
  EXPECT_EQ(affine_codes(Floats(4, 3.14f), AffineRounding::half_even, &scale_and_bias), Bytes(4));
  EXPECT_EQ(scale_and_bias, (Floats{1, 3.14f}));
}
TEST(MigratingE, GradientsSumNeighboursFirst) {
  AffineQdqDescriptor d = one_group(8, AffineRounding::half_even);
  Bytes codes = {0, 1, 2, 3, 15, 14, 13, 12};
  Floats dy = {1, -1, 2, .5f, -.25f, 1, 0, 4}, dscale(1), dbias(1);
  const std::vector<int64_t> one = {1, 1}, row = {1, 8};
  const TensorView c{codes.data(), DType::u8, row, {}, {}}, g{dy.data(), DType::f32, row, {}, {}};
  const TensorView s{dscale.data(), DType::f32, one, {}, {}}, b{dbias.data(), DType::f32, one, {}, {}};
  AffineQdqBackward::Args args{};
  args.codes = c;
  args.dy = g;
  args.dscales = s;
  args.dbiases = b;
  run<AffineQdqBackward>(d, args);
  EXPECT_EQ(dscale[0], 62.75f);
  EXPECT_EQ(dbias[0], 7.25f);
  // ((a + b) + (c + d)), not ((a + c) + (b + d)) as in a tree of halves.
  d = one_group(4, AffineRounding::half_even);
  dy = {1e8f, 1, -1e8f, 1};
  codes = {1, 1, 1, 1};
  args.codes = {codes.data(), DType::u8, {1, 4}, {}, {}};
  args.dy = {dy.data(), DType::f32, {1, 4}, {}, {}};
  run<AffineQdqBackward>(d, args);
  EXPECT_EQ(dbias[0], 0);
}

}  // namespace
}  // namespace halfbyte
