// The loops of verifying: the same on every SIMD target, and what one element after the other gives.
#include "io/verify_span.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "formats/convert.h"
#include "ops/testing.h"

namespace halfbyte::io {
namespace {

constexpr int64_t kCounts[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 129, 1000};

std::vector<float> normal(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> of;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = of(random);
  return values;
}
std::vector<uint8_t> random_codes(int64_t count, int levels) {
  std::mt19937 random(7);
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random() % static_cast<uint32_t>(levels));
  return codes;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(
      a, b, {}, [](float of) { return std::bit_cast<uint32_t>(of); },
      [](float of) { return std::bit_cast<uint32_t>(of); });
}

TEST(VerifySpan, LevelsAndWhatIsOutsideOfThem) {
  Levels levels;
  for (int c = 0; c < 16; ++c) {
    levels.value[c] = static_cast<float>(c * c) - 60.5f;
    levels.low[c] = levels.value[c] - 1;
    levels.high[c] = levels.value[c] + 2;
    levels.low_end[c] = c == 0 ? 1 : 0;
    levels.high_end[c] = c == 15 ? 1 : 0;
  }
  const Span span = {0.75f, 0.125f, 8};
  const auto lower = [&](uint8_t c) { return levels.low[c] * 0.75f - (c == 0 ? 8.125f : 0.125f); };
  const auto upper = [&](uint8_t c) { return levels.high[c] * 0.75f + (c == 15 ? 8.125f : 0.125f); };
  halfbyte::testing::for_each_target([&](const char*) {
    for (const int64_t count : kCounts) {
      const auto codes = random_codes(count, 16);
      std::vector<float> x(codes.size()), want(codes.size()), y(codes.size(), -1);
      for (size_t i = 0; i < codes.size(); ++i) {
        want[i] = levels.value[codes[i]] * span.scale;
        x[i] = i % 2 == 0 ? lower(codes[i]) : upper(codes[i]);
      }
      EXPECT_TRUE(decode_levels(levels, span, codes.data(), x.data(), count, y.data()));
      EXPECT_TRUE(same_bits(y, want));
      for (size_t i = 0; i < x.size(); i += 5)
        for (const float wrong :
             {upper(codes[i]) + 0.0625f, lower(codes[i]) - 0.0625f, NAN, INFINITY, -INFINITY}) {
          std::vector<float> other = x;
          other[i] = wrong;
          EXPECT_FALSE(decode_levels(levels, span, codes.data(), other.data(), count, y.data())) << i;
        }
    }
    // No bound is so wide that what is not finite passes.
    const Span wide = {3e38f, 3e38f, 3e38f};
    const auto codes = random_codes(64, 16);
    for (const float wrong : {INFINITY, -INFINITY, NAN}) {
      std::vector<float> x(64), y(64);
      x[40] = wrong;
      EXPECT_FALSE(decode_levels(levels, wide, codes.data(), x.data(), 64, y.data()));
    }
  });
}

TEST(VerifySpan, Steps) {
  halfbyte::testing::for_each_target([&](const char*) {
    for (const bool added : {false, true})
      for (const int64_t count : kCounts) {
        const Steps steps = {0.37f, added ? -1.3f : 0, added ? 0 : 131, added, 0.2f};
        const auto codes = random_codes(count, 256);
        std::vector<float> x(codes.size()), want(codes.size()), y(codes.size(), -1);
        for (size_t i = 0; i < codes.size(); ++i) {
          want[i] = static_cast<float>(codes[i] - steps.zero) * steps.scale;
          if (added) want[i] += steps.bias;
          x[i] = want[i] + (i % 2 == 0 ? 0.19f : -0.19f);
        }
        EXPECT_TRUE(decode_steps(steps, codes.data(), x.data(), count, y.data()));
        EXPECT_TRUE(same_bits(y, want));
        for (size_t i = 0; i < x.size(); i += 5)
          for (const float wrong : {want[i] + 0.3f, want[i] - 0.3f, NAN}) {
            std::vector<float> other = x;
            other[i] = wrong;
            EXPECT_FALSE(decode_steps(steps, codes.data(), other.data(), count, y.data())) << i;
          }
      }
  });
}

TEST(VerifySpan, EveryHalf) {
  std::vector<uint16_t> bits(65536 + 3);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> f16(bits.size()), bf16(bits.size());
  for (size_t i = 0; i < bits.size(); ++i)
    f16[i] = formats::f16_to_f32(bits[i]), bf16[i] = formats::bf16_to_f32(bits[i]);
  halfbyte::testing::for_each_target([&](const char*) {
    std::vector<float> y(bits.size());
    widen_f16(bits.data(), std::ssize(bits), y.data());
    for (size_t i = 0; i < bits.size(); ++i)
      EXPECT_TRUE(std::isnan(f16[i]) ? std::isnan(y[i])
                                     : y[i] == f16[i] && std::signbit(y[i]) == std::signbit(f16[i]));
    widen_bf16(bits.data(), std::ssize(bits), y.data());
    EXPECT_TRUE(same_bits(y, bf16));
  });
}

TEST(VerifySpan, ErrorsAreTheSameOnEveryTarget) {
  for (const int64_t count : kCounts) {
    const auto source = normal(count, 1), decoded = normal(count, 2);
    double error2 = 0, source2 = 0, largest = 0;
    for (size_t i = 0; i < source.size(); ++i) {
      const double x = source[i], error = decoded[i] - x;
      error2 += error * error, source2 += x * x, largest = std::max(largest, std::abs(error));
    }
    std::vector<ErrorTotals> all;
    halfbyte::testing::for_each_target(
        [&](const char*) { all.push_back(total_errors(source.data(), decoded.data(), count)); });
    for (const ErrorTotals& own : all) {
      EXPECT_EQ(own.squared_error, all.front().squared_error);
      EXPECT_EQ(own.squared_source, all.front().squared_source);
      EXPECT_EQ(own.largest, largest);
      EXPECT_NEAR(own.squared_error, error2, 1e-12 * error2);
      EXPECT_NEAR(own.squared_source, source2, 1e-12 * source2);
    }
  }
}

}  // namespace
}  // namespace halfbyte::io
