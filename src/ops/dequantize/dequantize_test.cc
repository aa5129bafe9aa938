#include <sys/mman.h>

#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::Parts;
using testing::Values;

// Random codes and parameters: everything a file may hold, not only what quantize makes.
Parts random_parts(const QuantSpec& spec, int64_t rows, int64_t cols, std::mt19937_64& random) {
  Parts parts(spec, rows, cols);
  for (size_t i = 0; i + Parts::kGuard < parts.codes.size(); ++i)
    parts.codes[i] = static_cast<uint8_t>(random());
  std::normal_distribution<double> normal;
  const formats::ScaleType type = scale_type(spec.scale_dtype);
  const int64_t groups = quant_shape(spec, rows, cols).num_groups;
  for (int64_t i = 0; i < groups; ++i) {
    const double special[] = {0, -0.0, 1e-40, 6e-5, 65504, 3e38, INFINITY, NAN};
    const double scale = random() % 10 == 0 ? special[random() % 8] : normal(random);
    formats::store_scale(parts.scales.data(), i, scale, type);
    if (has_biases(spec)) formats::store_scale(parts.biases.data(), i, normal(random) * 3, type);
    if (has_zeros(spec))
      parts.zeros[static_cast<size_t>(i)] = static_cast<uint8_t>(random() % (1u << info(spec.format).bits));
  }
  if (has_global_scale(spec)) {
    const float special[] = {1, 0, 1e-40f, 3e38f, INFINITY, NAN};
    const float scale =
        random() % 3 == 0 ? special[random() % 6] : static_cast<float>(std::exp(normal(random)));
    std::memcpy(parts.global_scale.data(), &scale, sizeof scale);
  }
  return parts;
}

// The contract, one element at a time.
std::vector<uint8_t> oracle(Parts& parts, DType dtype) {
  const QuantShape shape = quant_shape(parts.spec, parts.rows, parts.cols);
  const formats::Codec codec = make_codec(parts.spec);
  float global = 1;
  if (has_global_scale(parts.spec)) std::memcpy(&global, parts.global_scale.data(), sizeof global);
  std::vector<uint8_t> bytes(static_cast<size_t>(shape.rows * shape.cols * size_of(dtype)));
  for (int64_t row = 0; row < shape.rows; ++row)
    for (int64_t column = 0; column < shape.cols; ++column) {
      const int64_t group = parts.spec.granularity == Granularity::tensor
                                ? 0
                                : row * shape.groups_per_row + column / shape.group_size;
      const int code = formats::get_code(parts.codes.data() + row * shape.row_bytes, column, codec.bits);
      const int zero = has_zeros(parts.spec) ? parts.zeros[static_cast<size_t>(group)] + codec.q_min : 0;
      const int64_t index = row * shape.cols + column;
      const auto value = [&]<class F>(F) {
        const F scale = formats::load_scale<F>(parts.scales.data(), group, codec.scale_type, global);
        const F bias =
            has_biases(parts.spec) ? formats::load_scale<F>(parts.biases.data(), group, codec.scale_type) : 0;
        return formats::decode(code, scale, bias, zero, codec);
      };
      if (dtype == DType::f64) {
        reinterpret_cast<double*>(bytes.data())[index] = value(0.0);
        continue;
      }
      const float v = value(0.0f);
      if (dtype == DType::f32)
        reinterpret_cast<float*>(bytes.data())[index] = v;
      else
        reinterpret_cast<uint16_t*>(bytes.data())[index] =
            dtype == DType::f16 ? formats::to_f16(v) : formats::to_bf16(v);
    }
  return bytes;
}

// Bit equality, where any NaN equals any NaN of the same type: its payload is the processor's choice.
void expect_same(const std::vector<uint8_t>& expected, const uint8_t* actual, DType dtype) {
  if (expected.empty() || std::memcmp(expected.data(), actual, expected.size()) == 0) return;
  const auto n = static_cast<int64_t>(expected.size()) / size_of(dtype);
  const auto load = [&](const uint8_t* bytes, int64_t i) {
    switch (dtype) {
      case DType::f32:
        return static_cast<double>(reinterpret_cast<const float*>(bytes)[i]);
      case DType::f16:
        return static_cast<double>(formats::f16_to_f32(reinterpret_cast<const uint16_t*>(bytes)[i]));
      case DType::bf16:
        return static_cast<double>(formats::bf16_to_f32(reinterpret_cast<const uint16_t*>(bytes)[i]));
      default:
        return reinterpret_cast<const double*>(bytes)[i];
    }
  };
  for (int64_t i = 0; i < n; ++i) {
    const double a = load(expected.data(), i), b = load(actual, i);
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_EQ(formats::bit_cast<uint64_t>(a), formats::bit_cast<uint64_t>(b))
        << "element " << i << ": " << b << " instead of " << a;
  }
}

TEST(Dequantize, EveryFormatDTypeAndLengthEqualsTheOracleOnEveryTarget) {
  std::mt19937_64 random(1);
  const auto most = [](int64_t n) -> uint64_t { return testing::kSanitized ? 29 : n < 300 ? 3 : 15; };
  for (const DType dtype : testing::kFloatDTypes)
    for (QuantSpec spec : testing::all_specs())
      for (int64_t n = 0; n <= 1100; n += 1 + static_cast<int64_t>(random() % most(n))) {
        spec.group_size = n % 3 == 0 ? 64 : n % 3 == 1 ? 32 : 1 + n % 150;
        spec.scale_dtype = n % 5 == 0 ? DType::f16 : n % 5 == 1 ? DType::bf16 : DType::f32;
        testing::fit_format(spec);
        Parts parts = random_parts(spec, 1, n, random);
        const std::vector<uint8_t> expected = oracle(parts, dtype);
        testing::for_each_target([&](const char*) {
          std::vector<uint8_t> actual(expected.size() + 64, 0xA5);
          dequantize(parts.view(), {actual.data(), dtype, {1, n}, {}, {}}, {1});
          expect_same(expected, actual.data(), dtype);
          for (size_t i = expected.size(); i < actual.size(); ++i) ASSERT_EQ(actual[i], 0xA5);
        });
        if (HasFailure()) FAIL() << testing::describe(spec) << ' ' << to_string(dtype) << " n " << n;
      }
}

TEST(Dequantize, EveryGranularityAndThreadCountEqualsTheOracle) {
  std::mt19937_64 random(2);
  const auto specs = testing::all_specs();
  for (int i = 0; i < (testing::kSanitized ? 60 : 600); ++i) {
    QuantSpec spec = specs[random() % specs.size()];
    spec.granularity = static_cast<Granularity>(random() % 4);
    const int64_t sizes[] = {1,  3,  7,   8,   16,  32,   50,
                             64, 96, 100, 128, 256, 1000, std::numeric_limits<int64_t>::max() / 32 * 32};
    spec.group_size = sizes[random() % std::size(sizes)];
    testing::fit_format(spec);
    const auto rows = static_cast<int64_t>(random() % 20), cols = static_cast<int64_t>(random() % 9000);
    const DType dtype = testing::kFloatDTypes[random() % 4];
    Parts parts = random_parts(spec, rows, cols, random);
    const std::vector<uint8_t> expected = oracle(parts, dtype);
    SCOPED_TRACE(fmt::format("{} {} [{}, {}]", testing::describe(spec), to_string(dtype), rows, cols));
    testing::for_each_target([&](const char*) {
      for (const int threads : {1, 2, 16}) {
        std::vector<uint8_t> actual(expected.size(), 0xA5);
        dequantize(parts.view(), {actual.data(), dtype, {rows, cols}, {}, {}}, {threads});
        expect_same(expected, actual.data(), dtype);
      }
    });
    if (HasFailure()) return;
  }
}

// Outputs beyond the caches are streamed: at any alignment.
TEST(Dequantize, StreamedOutputIsTheSame) {
  std::mt19937_64 random(4);
  const int64_t rows = 33, cols = 140001;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    Parts parts = random_parts({.format = Format::nf4}, rows, cols, random);
    const std::vector<uint8_t> expected = oracle(parts, dtype);
    std::vector<uint8_t> actual(expected.size() + 128, 0xA5);
    for (const size_t offset : {size_t{0}, size_t{2}, size_t{36}}) {
      const size_t at = offset / static_cast<size_t>(size_of(dtype)) * static_cast<size_t>(size_of(dtype));
      dequantize(parts.view(), {actual.data() + at, dtype, {rows, cols}, {}, {}});
      expect_same(expected, actual.data() + at, dtype);
    }
    EXPECT_EQ(actual.back(), 0xA5);
  }
}

TEST(Dequantize, ReadsNothingBeyondTheCodes) {
  const size_t page = 4096;
  auto* memory = static_cast<uint8_t*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(memory + page, page, PROT_NONE), 0);
  std::mt19937_64 random(6);
  for (const QuantSpec& spec : testing::all_specs())
    for (int64_t n = 1; n < 300; n += 3) {
      Parts parts = random_parts(spec, 1, n, random);
      const size_t code_bytes = parts.codes.size() - Parts::kGuard;
      QuantizedView view = parts.view();
      view.codes = memory + page - code_bytes;
      std::memcpy(view.codes, parts.codes.data(), code_bytes);
      const std::vector<uint8_t> expected = oracle(parts, DType::bf16);
      testing::for_each_target([&](const char*) {
        std::vector<uint8_t> actual(expected.size(), 0xA5);
        dequantize(view, {actual.data(), DType::bf16, {1, n}, {}, {}}, {1});
        expect_same(expected, actual.data(), DType::bf16);
      });
    }
  munmap(memory, 2 * page);
}

// Requantizing decoded values gives the same codes, where the scale is recovered exactly.
TEST(Dequantize, RequantizingTheDecodedValuesKeepsTheCodes) {
  for (const Format format : {Format::nf4, Format::int4, Format::int8}) {
    QuantSpec spec{.format = format};
    Values x;
    std::mt19937_64 random(8);
    std::normal_distribution<double> normal(0, 0.02);
    for (int i = 0; i < 64 * 200; ++i) x.push_back(normal(random));
    const QuantizedTensor q = quantize(x.view({200, 64}), spec);
    std::vector<float> y(64 * 200);
    dequantize(q, {y.data(), DType::f32, {200, 64}, {}, {}});
    const QuantizedTensor again = quantize({y.data(), DType::f32, {200, 64}, {}, {}}, spec);
    std::vector<float> twice(64 * 200);
    dequantize(again, {twice.data(), DType::f32, {200, 64}, {}, {}});
    for (size_t i = 0; i < y.size(); ++i)
      ASSERT_NEAR(static_cast<double>(y[i]), static_cast<double>(twice[i]), 1e-7) << info(format).name;
    EXPECT_EQ(testing::bytes_of(q.codes), testing::bytes_of(again.codes)) << info(format).name;
  }
}

// The signal to noise ratio of normal weights is known in theory (exact integration; Monte Carlo for
// storage rules): a defect in any codec shows here.
TEST(Quality, SnrOfNormalWeightsIsThatOfTheory) {
  struct Row {
    Format format;
    ScaleRule rule;
    double snr_db[3];  // groups of 32, 64, 128
  };
  const Row rows[] = {
      {Format::nf4, ScaleRule::absmax, {21.18, 20.73, 20.39}},
      {Format::fp4, ScaleRule::absmax, {18.85, 18.28, 17.82}},
      {Format::fp4_e2m1, ScaleRule::absmax, {19.91, 19.52, 19.26}},
      {Format::int8, ScaleRule::absmax, {45.44, 44.54, 43.79}},
      {Format::int4, ScaleRule::absmax, {20.26, 19.36, 18.62}},
      {Format::int4, ScaleRule::half_range, {20.47, 19.76, 19.12}},
      {Format::int3, ScaleRule::absmax, {12.90, 12.00, 11.25}},
      {Format::int2, ScaleRule::absmax, {3.64, 2.88, 2.31}},
      {Format::affine2, ScaleRule::minmax, {8.11, 6.94, 6.01}},
      {Format::affine3, ScaleRule::minmax, {15.51, 14.33, 13.40}},
      {Format::affine4, ScaleRule::minmax, {22.14, 20.95, 20.02}},
      {Format::affine8, ScaleRule::minmax, {46.75, 45.56, 44.63}},
  };
  const size_t n = testing::kSanitized ? size_t{1} << 20 : size_t{1} << 24;
  const double tolerance = testing::kSanitized ? 0.08 : 0.02;
  std::vector<float> x(n), y(n);
  std::mt19937_64 random(20240607);
  for (size_t i = 0; i < n; i += 2) {  // Box and Muller
    const double u = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53,
                 v = static_cast<double>(random() >> 11) * 0x1p-53;
    const double radius = std::sqrt(-2 * std::log(u));
    x[i] = static_cast<float>(radius * std::cos(2 * M_PI * v));
    x[i + 1] = static_cast<float>(radius * std::sin(2 * M_PI * v));
  }
  const auto shape = static_cast<int64_t>(n);
  for (const Row& row : rows)
    for (int g = 0; g < 3; ++g) {
      const QuantSpec spec{.format = row.format, .group_size = int64_t{32} << g};
      dequantize(quantize({x.data(), DType::f32, {shape}, {}, {}}, spec, {row.rule}),
                 {y.data(), DType::f32, {shape}, {}, {}});
      double signal = 0, noise = 0;
      for (size_t i = 0; i < n; ++i) {
        const double d = static_cast<double>(y[i]) - static_cast<double>(x[i]);
        signal += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        noise += d * d;
      }
      // The theory is for unit variance: divide by what the sample has.
      const double snr = 10 * std::log10(signal / noise);
      EXPECT_NEAR(snr, row.snr_db[g], tolerance)
          << info(row.format).name << ' ' << to_string(row.rule) << " g " << spec.group_size;
      RecordProperty(
          fmt::format("snr_{}_{}_g{}", info(row.format).name, to_string(row.rule), spec.group_size).c_str(),
          fmt::format("{:.3f}", snr));
    }
}

}  // namespace
}  // namespace halfbyte
