// The plan of `compute_qparams`: what the function computes, of many.
#include <array>

#include "halfbyte/observe.hpp"
#include "ops/compute_qparams/compute_qparams_testing.h"

namespace halfbyte {
namespace {

using testing::QParamsCase;
using testing::QParamsCases;

TEST(ComputeQParams, equals_the_function) {
  QParamsCases cases(1);
  for (int i = 0; i < 300; ++i) {
    QParamsCase test = cases.next(i % 30 == 0 ? 20000 : 300);
    const QuantizeStatus status = testing::run_qparams_on_cpu(test, {1 + i % 3});
    QuantizeStatus expected;
    const QParamsDescriptor& d = test.descriptor;
    for (int64_t k = 0; k < test.n(); ++k) {
      const auto [min, max] = test.range(k);
      const auto [scale, zero_point] = test.result(k);
      try {
        const QParams params = compute_qparams(min, max, d.config, d.scale_dtype, d.dtype);
        ASSERT_EQ(scale, params.scale) << test.text() << min << " " << max;
        ASSERT_EQ(zero_point, d.zero_point_dtype ? params.zero_point : 0) << test.text() << min << " " << max;
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::bad_input);
        const bool no_range = !(min <= max && std::isfinite(min) && std::isfinite(max));
        ++(no_range ? expected.num_invalid_scales : expected.num_unheld_scales);
        if (no_range) {
          ASSERT_EQ(scale, 0);
          ASSERT_EQ(zero_point, d.zero_point_dtype ? compute_qparams(0, 0, d.config).zero_point : 0);
        }
      }
    }
    expected.num_coarse_scales = status.num_coarse_scales;
    ASSERT_TRUE(testing::same_status(expected, status)) << test.text() << testing::text_of(status);
    ASSERT_TRUE(test.guards_intact());
  }
}

void refused(const QParamsDescriptor& descriptor, const std::vector<std::string>& words) {
  try {
    ComputeQParamsPlan::select({}, descriptor);
    ADD_FAILURE() << words[0] << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(ComputeQParams, bad_descriptors_are_refused) {
  QParamsDescriptor good;
  good.shape = {4};
  ComputeQParamsPlan::select({}, good);
  QParamsDescriptor d = good;
  d.dtype = DType::f16;
  refused(d, {"dtype", "f16"});
  d = good;
  d.scale_dtype = DType::f64;
  refused(d, {"scale_dtype", "f64"});
  d = good;
  d.shape = {-1};
  refused(d, {"negative", "-1"});
  d = good;
  d.config.q_max = 300;
  refused(d, {"q_max", "300"});
  d = good;
  d.config = QParamsConfig::of_bits(8, true);
  refused(d, {"zero_point_dtype", "asymmetric"});
  d.zero_point_dtype = DType::u8;
  refused(d, {"zero_point_dtype", "u8", "[-128, 127]"});
  d.zero_point_dtype = DType::i4;
  refused(d, {"zero_point_dtype", "i4"});
  d = good;
  d.config.q_min = 0;
  d.config.q_max = 255;
  refused(d, {"zero_point_dtype", "unsigned"});
  d.zero_point_dtype = DType::i8;
  refused(d, {"zero_point_dtype", "i8", "[0, 255]"});
}

TEST(ComputeQParams, bad_tensors_are_refused) {
  QParamsDescriptor descriptor;
  descriptor.shape = {2};
  const auto plan = ComputeQParamsPlan::select({}, descriptor);
  EXPECT_EQ(plan.sku().op, "compute_qparams");
  EXPECT_EQ(plan.sku().dtypes, "f32 -> scale f32");
  std::array<float, 2> min{-1, 0}, max{1, 2}, scale{};
  std::array<int32_t, 2> zero{};
  const auto view = [](auto& values, DType dtype) { return TensorView{values.data(), dtype, {2}, {}, {}}; };
  const ComputeQParams::Args good{view(min, DType::f32), view(max, DType::f32), view(scale, DType::f32), {}};
  EXPECT_FALSE(plan.can_implement(good));
  const auto expect = [&](const ComputeQParams::Args& args, const std::vector<std::string>& words) {
    const auto error = plan.can_implement(args);
    ASSERT_TRUE(error.has_value()) << words[0];
    for (const std::string& word : words)
      EXPECT_NE(std::string(error->what()).find(word), std::string::npos) << error->what();
  };
  ComputeQParams::Args args = good;
  args.zero_point = view(zero, DType::i32);
  expect(args, {"zero_point", "no data"});
  args = good;
  args.scale.data = min.data();
  expect(args, {"scale", "min", "overlap"});
  args = good;
  args.max.shape = {3};
  expect(args, {"max", "[2]", "[3]"});
}

}  // namespace
}  // namespace halfbyte
