#include "halfbyte/simple.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "ops/testing.h"

namespace halfbyte {
namespace {

template <class T>
constexpr DType dtype_of() {
  return std::is_same_v<T, float> ? DType::f32 : std::is_same_v<T, double> ? DType::f64 : DType::u8;
}
template <class T>
TensorView view(std::vector<T>& values) {
  const auto n = static_cast<int64_t>(values.size());
  return {values.data(), dtype_of<T>(), {n}, {}, {}, n * static_cast<int64_t>(sizeof(T))};
}

struct Encoded {
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;
};

Encoded encode_int4(std::vector<float> x, int64_t group_size, bool symmetric = true) {
  const Int4Config config{group_size, symmetric};
  const auto n = static_cast<int64_t>(x.size());
  const auto groups = static_cast<size_t>(config.num_groups(n));
  Encoded q;
  q.codes.resize(static_cast<size_t>(config.packed_bytes(n)));
  q.scales.resize(groups);
  q.zeros.resize(symmetric ? 0 : groups);
  quantize_int4(view(x), view(q.codes), view(q.scales), symmetric ? TensorView{} : view(q.zeros), n, config);
  return q;
}
std::vector<float> decode_int4(Encoded q, size_t n, int64_t group_size, bool symmetric = true) {
  std::vector<float> y(n);
  dequantize_int4(view(q.codes), view(q.scales), symmetric ? TensorView{} : view(q.zeros), view(y),
                  static_cast<int64_t>(n), {group_size, symmetric});
  return y;
}
Encoded encode_nf4(std::vector<float> x, int64_t group_size = 64) {
  const auto n = static_cast<int64_t>(x.size());
  Encoded q;
  q.codes.resize((x.size() + 1) / 2);
  q.scales.resize(static_cast<size_t>((n + group_size - 1) / group_size));
  quantize_nf4(view(x), view(q.codes), view(q.scales), n, group_size);
  return q;
}
std::vector<float> decode_nf4(Encoded q, size_t n, int64_t group_size = 64) {
  std::vector<float> y(n);
  dequantize_nf4(view(q.codes), view(q.scales), view(y), static_cast<int64_t>(n), group_size);
  return y;
}

template <class Body>
std::string error_of(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

TEST(Simple, NumbersOfGroupsAndBytes) {
  const Int4Config config{.group_size = 32};
  EXPECT_EQ(config.num_groups(128), 4);
  EXPECT_EQ(config.num_groups(129), 5);
  EXPECT_EQ(config.num_groups(0), 0);
  EXPECT_EQ(config.packed_bytes(128), 64);
  EXPECT_EQ(config.packed_bytes(129), 65);
  EXPECT_EQ(config.packed_bytes(1), 1);
  EXPECT_EQ(config.packed_bytes(INT64_MAX), int64_t{1} << 62);
  EXPECT_EQ(error_of(ErrorCode::usage, [] { Int4Config{0}.num_groups(1); }),
            "num_groups: group_size must be positive, got 0 elements");
  EXPECT_EQ(error_of(ErrorCode::usage, [&] { config.packed_bytes(-1); }),
            "packed_bytes: n must not be negative, got -1 elements");
}

TEST(Simple, Nf4GoldenVector) {
  const Encoded q = encode_nf4({-2, -1, -0.5f, -0.0f, 0.1f, 0.5f, 1, 2});
  EXPECT_EQ(q.codes, (std::vector<uint8_t>{0x20, 0x74, 0xA8, 0xFC}));
  EXPECT_EQ(q.scales, std::vector<float>{2});
  const float expected[] = {-2, -1.0501461f, -0.568882763f, 0, 0.159160599f, 0.492224604f, 0.881419659f, 2};
  const std::vector<float> y = decode_nf4(q, 8);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(y[i], expected[i]) << i;

  const Encoded zeros = encode_nf4(std::vector<float>(64, 0.0f));
  EXPECT_EQ(zeros.codes, std::vector<uint8_t>(32, 0x77));
  for (const float value : decode_nf4(zeros, 64)) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
}

// Where other implementations give the lower code: values between a threshold of theirs and the exact one.
TEST(Simple, Nf4ThresholdsAreExact) {
  const struct {
    uint32_t bits;
    int code;
  } rows[] = {{0xBF591CD8, 1},  {0xBF1C5270, 2},  {0xBEADEA76, 4}, {0xBE703CEC, 5},
              {0x3F006D04, 13}, {0x3F5C89DA, 15}, {0x3DF64863, 9}};
  for (const auto& row : rows)
    EXPECT_EQ(encode_nf4({1, std::bit_cast<float>(row.bits)}).codes[0] >> 4, row.code) << row.code;
  // The largest value of each lower code: code = the number of thresholds below x.
  const uint32_t thresholds[] = {0xBF591CD9, 0xBF1C5271, 0xBEEB8480, 0xBEADEA77, 0xBE703CED,
                                 0xBE0D38BC, 0xBD3A7871, 0x3D22FAFF, 0x3DF64862, 0x3E5067E0,
                                 0x3E9582D4, 0x3EC753F9, 0x3F006D03, 0x3F248DAF, 0x3F5C89D9};
  for (int i = 0; i < 15; ++i) {
    const float edge = std::bit_cast<float>(thresholds[i]);
    EXPECT_EQ(encode_nf4({1, edge}).codes[0] >> 4, i);
    EXPECT_EQ(encode_nf4({1, std::nextafter(edge, 1.0f)}).codes[0] >> 4, i + 1);
  }
}

TEST(Simple, Int4SymmetricGoldenVector) {
  const Encoded q = encode_int4({-7, -3.5f, -0.5f, 0.5f, 1.5f, 2.5f, 3.49f, 7}, 8);
  EXPECT_EQ(q.codes, (std::vector<uint8_t>{0x41, 0x88, 0xAA, 0xFB}));
  EXPECT_EQ(q.scales, std::vector<float>{1});
  EXPECT_EQ(decode_int4(q, 8, 8), (std::vector<float>{-7, -4, 0, 0, 2, 2, 3, 7}));
  EXPECT_EQ(std::bit_cast<uint32_t>(encode_int4({1, -1}, 2).scales[0]), 0x3E124925u);
}

TEST(Simple, Int4AsymmetricGoldenVector) {
  const std::vector<float> x{-1, -0.5f, 0, 0.25f, 0.5f, 1, 1.5f, 2};
  const Encoded q = encode_int4(x, 8, false);
  EXPECT_EQ(std::bit_cast<uint32_t>(q.scales[0]), 0x3E4CCCCDu);
  EXPECT_EQ(q.zeros, std::vector<uint8_t>{5});
  EXPECT_EQ(q.codes, (std::vector<uint8_t>{0x30, 0x65, 0xA7, 0xFD}));
  const float expected[] = {-1, -0.4f, 0, 0.2f, 0.4f, 1, 1.6f, 2};
  const std::vector<float> y = decode_int4(q, 8, 8, false);
  for (size_t i = 0; i < 8; ++i) EXPECT_FLOAT_EQ(y[i], expected[i]) << i;
}

TEST(Simple, ConstantGroupsComeBackInBothModes) {
  for (const float value : {0.0f, 3.25f, -3.25f, 1e-30f}) {
    for (const bool symmetric : {true, false}) {
      const std::vector<float> x(16, value);
      for (const float y : decode_int4(encode_int4(x, 16, symmetric), 16, 16, symmetric))
        EXPECT_NEAR(y, value, std::fabs(value) / 14) << value;
    }
  }
}

TEST(Simple, AnyLengthHasATailOfZeros) {
  for (const int64_t group_size : {1, 5, 32}) {
    for (size_t n = 1; n < 70; ++n) {
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i) x[i] = std::sin(static_cast<float>(i * i)) + 0.25f;
      for (const bool symmetric : {true, false}) {
        const Encoded q = encode_int4(x, group_size, symmetric);
        const std::vector<float> y = decode_int4(q, n, group_size, symmetric);
        for (size_t i = 0; i < n; ++i)
          EXPECT_NEAR(y[i], x[i], 0.51f * q.scales[i / static_cast<size_t>(group_size)] + 1e-6f);
        const int code_of_zero = symmetric ? 8 : q.zeros.back();
        EXPECT_TRUE(n % 2 == 0 || q.codes.back() >> 4 == code_of_zero);
      }
      const Encoded q = encode_nf4(x, group_size);
      const std::vector<float> y = decode_nf4(q, n, group_size);
      for (size_t i = 0; i < n; ++i)
        EXPECT_NEAR(y[i], x[i], 0.15191f * q.scales[i / static_cast<size_t>(group_size)]);
      EXPECT_TRUE(n % 2 == 0 || q.codes.back() >> 4 == 7);
    }
  }
  quantize_int4({}, {nullptr, DType::u8, {0}, {}, {}}, {}, {}, 0);
  dequantize_nf4({nullptr, DType::u8, {0}, {}, {}}, {}, {}, 0);
}

TEST(Simple, EveryDTypeOfValuesAndScales) {
  for (const DType dtype : testing::kFloatDTypes) {
    for (const DType scale_dtype : testing::kFloatDTypes) {
      testing::Values x = testing::random_values(dtype, 100, 3);
      std::vector<uint8_t> codes(50);
      std::vector<double> scales(4), y(100);
      const TensorView scales_view{scales.data(), scale_dtype, {4}, {}, {}};
      const auto run = [&] { quantize_nf4(x.view({100}), view(codes), scales_view, 100, 32); };
      if (scale_dtype == DType::f64 && dtype != DType::f64) {
        EXPECT_EQ(error_of(ErrorCode::usage, run),
                  fmt::format("quantize_nf4: scales must not be f64 where x is {}", to_string(dtype)));
        continue;
      }
      run();
      dequantize_nf4(view(codes), scales_view, view(y), 100, 32);
      for (size_t i = 0; i < 100; ++i) {
        double absmax = 0;
        for (size_t j = i / 32 * 32; j < std::min<size_t>(100, i / 32 * 32 + 32); ++j)
          absmax = std::max(absmax, std::fabs(x.exact[j]));
        EXPECT_NEAR(y[i], x.exact[i], 0.16 * absmax) << to_string(dtype) << ' ' << to_string(scale_dtype);
      }
    }
  }
}

TEST(Simple, ErrorsNameTheArgumentItsUnitAndTheValues) {
  std::vector<float> x(129), scales(5), y(129);
  std::vector<uint8_t> codes(65), zeros(5);
  const Int4Config config{.group_size = 32, .symmetric = false};
  const auto run = [&](const TensorView& a, const TensorView& b, const TensorView& c, const TensorView& d) {
    return error_of(ErrorCode::usage, [&] { quantize_int4(a, b, c, d, 129, config); });
  };
  EXPECT_EQ(run(view(x), view(codes), view(scales), view(zeros)), "no error");
  const auto shorter = [](TensorView of) {
    --of.shape[0];
    return of;
  };
  EXPECT_EQ(run(shorter(view(x)), view(codes), view(scales), view(zeros)),
            "quantize_int4: x must have at least 129 elements, got 128");
  EXPECT_EQ(run(view(x), shorter(view(codes)), view(scales), view(zeros)),
            "quantize_int4: codes must have at least 65 bytes, got 64");
  EXPECT_EQ(run(view(x), view(codes), shorter(view(scales)), view(zeros)),
            "quantize_int4: scales must have at least 5 elements, got 4");
  EXPECT_EQ(run(view(x), view(codes), view(scales), shorter(view(zeros))),
            "quantize_int4: zeros must have at least 5 elements, got 4");
  TensorView cut = view(x);
  cut.num_bytes = 515;
  EXPECT_EQ(run(cut, view(codes), view(scales), view(zeros)),
            "quantize_int4: x must have at least 129 elements, but its memory of 515 bytes holds 128");
  cut = view(x);
  cut.data = nullptr;
  EXPECT_EQ(run(cut, view(codes), view(scales), view(zeros)),
            "quantize_int4: x needs 129 elements but has no data");
  cut = view(x);
  cut.strides = {2};
  EXPECT_EQ(run(cut, view(codes), view(scales), view(zeros)), "quantize_int4: x must be contiguous");
  EXPECT_EQ(run(view(x), view(x), view(scales), view(zeros)), "quantize_int4: codes must be u8, got f32");
  EXPECT_EQ(run(view(codes), view(codes), view(scales), view(zeros)),
            "quantize_int4: x must be f32, f16, bf16 or f64, got u8");
  cut = view(codes);
  cut.device = {DeviceKind::cuda, 1};
  EXPECT_EQ(run(view(x), cut, view(scales), view(zeros)),
            "quantize_int4: codes must be on cpu as the others, got cuda:1");
  EXPECT_NE(run(view(x), view(codes), view(x), view(zeros)).find("quantize_int4: scales must not overlap x"),
            std::string::npos);
  EXPECT_EQ(error_of(ErrorCode::usage,
                     [&] { dequantize_int4(view(codes), view(scales), {}, view(y), 129, config); }),
            "dequantize_int4: zeros must be u8, got f32");
  EXPECT_EQ(error_of(ErrorCode::usage, [&] { quantize_nf4(view(x), view(codes), view(scales), 129, 0); }),
            "quantize_nf4: group_size must be positive, got 0 elements");
  EXPECT_EQ(error_of(ErrorCode::usage, [&] { dequantize_nf4(view(codes), view(scales), view(y), -1); }),
            "dequantize_nf4: n must not be negative, got -1 elements");
}

TEST(Simple, ValuesNearTheLargestAreHeld) {
  const std::vector<float> x{3.4e38f, -3.3e38f, 1e38f, 0};
  const Encoded q = encode_int4(x, 4);
  const std::vector<float> y = decode_int4(q, 4, 4);
  for (size_t i = 0; i < 4; ++i) EXPECT_LE(std::abs(y[i] / 2 - x[i] / 2), 1.25e37f) << y[i];
}

TEST(Simple, DataThatCannotBeHeldIsAnError) {
  EXPECT_EQ(error_of(ErrorCode::bad_input,
                     [] {
                       encode_nf4({1, 2, NAN, INFINITY});
                     }),
            "quantize_nf4: x has 2 elements that are not finite, the first at index 2");
  std::vector<float> x{1e30f, 1};
  std::vector<uint8_t> codes(1), scales(2);
  EXPECT_EQ(error_of(ErrorCode::bad_input,
                     [&] {
                       quantize_int4(view(x), view(codes), {scales.data(), DType::f16, {1}, {}, {}}, {}, 2);
                     }),
            "quantize_int4: f16 cannot hold 1 of the 1 scales");
}

}  // namespace
}  // namespace halfbyte
