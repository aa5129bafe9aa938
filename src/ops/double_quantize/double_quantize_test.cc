#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "halfbyte/ops.hpp"

namespace halfbyte {
namespace {

TEST(DoubleQuantize, Golden) {
  const std::vector<float> scales = {.8f, .5f, .9f, .6f};
  std::vector<uint8_t> codes(4, 0xA5);
  float absmax = -1;
  DoubleQuantizedView view{codes.data(), &absmax, 0};
  double_quantize(scales.data(), 4, view);
  EXPECT_NEAR(view.offset, 0.7f, 1e-6f);
  EXPECT_NEAR(absmax, 0.20000005f, 1e-6f);
  EXPECT_EQ(codes, (std::vector<uint8_t>{219, 0, 255, 35}));
  std::vector<float> back(4);
  double_dequantize(view, 4, back.data());
  const float expected[] = {.80016f, .50141f, .9f, .59984f};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(back[i], expected[i], 1e-5f);
}

TEST(DoubleQuantize, MapFollowsItsRecipe) {
  const float* map = double_quant_map();
  EXPECT_EQ(map[127], 0.0f);
  EXPECT_EQ(map[255], 1.0f);
  EXPECT_FLOAT_EQ(map[0], -0.99296874f);
  std::vector<double> recipe = {0, 1};
  for (int e = 0; e < 7; ++e) {
    const int parts = 1 << e;
    for (int i = 0; i < parts; ++i) {
      const double middle = 0.1 + 0.9 * (i + 0.5) / parts;
      recipe.push_back(middle * std::pow(10.0, e - 6));
      recipe.push_back(-recipe.back());
    }
  }
  std::sort(recipe.begin(), recipe.end());
  ASSERT_EQ(recipe.size(), 256u);
  for (size_t i = 0; i < 256; ++i)
    EXPECT_NEAR(static_cast<double>(map[i]), recipe[i], 2e-7 * std::fabs(recipe[i])) << i;
}

TEST(DoubleQuantize, NearestEntryAnyLengthEveryByteWritten) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(0.01f, 0.3f);
  const float* map = double_quant_map();
  for (const int64_t n : {0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 10000}) {
    std::vector<float> scales(static_cast<size_t>(n)), back(static_cast<size_t>(n) + 1, 7.0f);
    for (float& s : scales) s = uniform(random);
    std::vector<uint8_t> codes(static_cast<size_t>(n) + 1, 0xA5);
    std::vector<float> absmax(static_cast<size_t>(n / 256 + 2), 7.0f);
    DoubleQuantizedView view{codes.data(), absmax.data(), 0};
    double_quantize(scales.data(), n, view);
    double_dequantize(view, n, back.data());
    EXPECT_EQ(codes.back(), 0xA5);
    EXPECT_EQ(back.back(), 7.0f);
    for (size_t i = 0; i < scales.size(); ++i) {
      const float block = absmax[i / 256], r = scales[i] - view.offset;
      double best = INFINITY;
      for (int code = 0; code < 256; ++code)
        best = std::min(best, std::fabs(static_cast<double>(map[code]) * block - r));
      EXPECT_NEAR(std::fabs(static_cast<double>(map[codes[i]]) * block - r), best, 1e-8) << i;
    }
  }
}

TEST(DoubleQuantize, EqualScalesAreExact) {
  const std::vector<float> scales(300, 0.125f);
  std::vector<uint8_t> codes(300);
  std::vector<float> absmax(2), back(300);
  DoubleQuantizedView view{codes.data(), absmax.data(), 0};
  double_quantize(scales.data(), 300, view);
  double_dequantize(view, 300, back.data());
  EXPECT_EQ(back, scales);
}

}  // namespace
}  // namespace halfbyte
