#include <sys/mman.h>

#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::EncodedSpec;
using testing::Parts;
using testing::Values;

void expect_equal(const Parts& expected, const Parts& actual) {
  EXPECT_TRUE(actual.guards_intact());
  EXPECT_TRUE(expected.same_bytes(actual));
  EXPECT_EQ(expected.status.num_nonfinite, actual.status.num_nonfinite);
  EXPECT_EQ(expected.status.first_nonfinite, actual.status.first_nonfinite);
  EXPECT_EQ(expected.status.num_unheld_scales, actual.status.num_unheld_scales);
  EXPECT_EQ(expected.status.num_coarse_scales, actual.status.num_coarse_scales);
}

TEST(Quantize, EveryFormatDTypeAndLengthEqualsTheOracleOnEveryTarget) {
  // All lengths of a few vectors and groups, then every seventh.
  const auto step = [](int64_t n) { return testing::kSanitized ? 13 : n < 300 ? 1 : 7; };
  uint64_t seed = 1;
  for (const DType dtype : testing::kFloatDTypes) {
    for (EncodedSpec spec : testing::all_specs()) {
      Values x = testing::random_values(dtype, 1100, ++seed);
      for (int64_t n = 0; n <= 1100; n += step(n)) {
        spec.group_size = n % 3 == 0 ? 64 : n % 3 == 1 ? 32 : 1 + n % 150;
        spec.scale_dtype = n % 5 == 0 ? DType::f16 : n % 5 == 1 ? DType::bf16 : DType::f32;
        testing::fit_format(spec);
        const Parts expected = testing::oracle_quantize(x, spec, 1, n);
        testing::for_each_target([&](const char*) {
          expect_equal(expected, testing::quantize_parts(x, spec, 1, n));
          if (::testing::Test::HasFailure())
            FAIL() << testing::describe(spec) << ' ' << to_string(dtype) << " n " << n;
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Quantize, EveryGranularityGroupSizeAndThreadCountEqualsTheOracle) {
  std::mt19937_64 random(7);
  const int cases = testing::kSanitized ? 60 : 600;
  const auto specs = testing::all_specs();
  for (int i = 0; i < cases; ++i) {
    EncodedSpec spec = specs[random() % specs.size()];
    spec.granularity = static_cast<Granularity>(random() % 4);
    const int64_t sizes[] = {1, 3, 7, 8, 16, 32, 50, 64, 96, 100, 128, 256, 1000};
    spec.group_size = sizes[random() % 13];
    const DType scale_dtypes[] = {DType::f32, DType::f16, DType::bf16};
    spec.scale_dtype = scale_dtypes[random() % 3];
    if (random() % 2 && info(spec.format).kind == FormatKind::affine)
      spec.encoding.code_scale = CodeScale::unrounded;
    const DType dtype = testing::kFloatDTypes[random() % 4];
    if (dtype == DType::f64 && random() % 2) spec.scale_dtype = DType::f64;
    testing::fit_format(spec);
    const auto rows = static_cast<int64_t>(random() % 40), cols = static_cast<int64_t>(random() % 3000);
    Values x = testing::random_values(dtype, rows * cols, random());
    SCOPED_TRACE(fmt::format("{} {} [{}, {}]", testing::describe(spec), to_string(dtype), rows, cols));
    const Parts expected = testing::oracle_quantize(x, spec, rows, cols);
    testing::for_each_target([&](const char*) {
      for (const int threads : {1, 2, 3, 16})
        expect_equal(expected, testing::quantize_parts(x, spec, rows, cols, threads));
    });
    if (HasFailure()) return;
  }
}

// Many plain groups in a row, whose parameters are found together, some that are not between them, and values
// beside the bounds of codes.
TEST(Quantize, NeighbouringGroupsEqualTheOracle) {
  std::mt19937_64 random(21);
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  const auto specs = testing::all_specs();
  const int cases = testing::kSanitized ? 60 : 900;
  for (int i = 0; i < cases; ++i) {
    EncodedSpec spec = specs[static_cast<size_t>(i) % specs.size()];
    const int64_t sizes[] = {8, 16, 24, 32, 48, 64, 100, 128, 300};
    spec.group_size = sizes[random() % 9];
    spec.scale_dtype = std::array{DType::f32, DType::f16, DType::bf16}[random() % 3];
    if (random() % 2 && info(spec.format).kind == FormatKind::affine)
      spec.encoding.code_scale = CodeScale::unrounded;
    testing::fit_format(spec);
    const formats::Codec codec = make_codec(spec, spec.encoding);
    const DType dtype = testing::kFloatDTypes[random() % 3];
    const int64_t group = spec.group_size, cols = 50 * group + static_cast<int64_t>(random() % 40), rows = 2;
    const bool all_plain = random() % 2;
    Values x;
    x.dtype = dtype;
    double least = 0, most = 0;
    formats::GroupParams<float> params;
    for (int64_t at = 0; at < rows * cols; ++at) {
      const int64_t in_group = at % cols % group;
      double value = uniform(least, most);
      if (in_group == 0) {
        const double size = std::exp2(uniform(-9, 9));
        least = -size * uniform(0.1, 1), most = size * uniform(0.1, 1);
        if (const auto kind = random() % 60; !all_plain && kind < 5) {
          if (kind == 0) least = most = 0;
          if (kind == 1) least = most;
          if (kind == 2) least *= 0x1p-30, most *= 0x1p-30;
          if (kind == 3) least = most / 2;  // of one sign
          if (kind == 4) most = least / 3;
        }
        params = formats::group_params(static_cast<float>(least), static_cast<float>(most), codec);
        value = least;
      } else if (in_group == 1) {
        value = most;
      } else if (random() % 2) {
        // Between two codes, and a few units of the dtype away from that.
        const double scale = static_cast<double>(params.code_scale);
        double place = static_cast<double>(random() % 16) + 0.5 - (random() % 2 ? 8 : 0);
        if (codec.kind == formats::Kind::table)
          place = static_cast<double>(codec.book.edges_f32[random() % 15]);
        value = place * scale + static_cast<double>(params.code_bias);
        value *= 1 + (static_cast<double>(random() % 7) - 3) * (dtype == DType::f32 ? 0x1p-24 : 0x1p-9);
        value = std::clamp(value, std::min(least, most), std::max(least, most));
      }
      x.push_back(value);
    }
    SCOPED_TRACE(fmt::format("{} {} [{}, {}]", testing::describe(spec), to_string(dtype), rows, cols));
    const Parts expected = testing::oracle_quantize(x, spec, rows, cols);
    testing::for_each_target(
        [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, rows, cols)); });
    if (HasFailure()) return;
  }
}

// As long as there are numbers, and so long that a number of groups of it is more than that.
TEST(Quantize, GroupsLongerThanAnyRow) {
  for (const int64_t size : {int64_t{1} << 59, int64_t{1} << 60, std::numeric_limits<int64_t>::max()}) {
    const EncodedSpec spec = {{.format = Format::int4, .group_size = size}};
    Values x = testing::random_values(DType::f32, 1000, 3);
    const Parts expected = testing::oracle_quantize(x, spec, 2, 500);
    testing::for_each_target(
        [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 2, 500)); });
  }
}

// Scales of e4m3, and beside them: half way between two, exactly and a unit off.
TEST(Quantize, ScalesHalfWayBetweenTwo) {
  const EncodedSpec spec = {{.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3}};
  Values x;
  for (int code = 0; code < 0x7E; ++code)
    for (const float unit : {-0x1p-23f, 0.0f, 0x1p-23f}) {
      const float middle = (formats::e4m3_to_f32(static_cast<uint8_t>(code)) +
                            formats::e4m3_to_f32(static_cast<uint8_t>(code + 1))) /
                           2;
      for (int i = 0; i < 16; ++i)
        x.push_back(i == 3 ? 6 * static_cast<double>(middle * (1 + unit)) : i / 16.0);
    }
  for (int i = 0; i < 32; ++i) x.push_back(2688);  // the global scale is 1
  const auto cols = std::ssize(x.exact);
  const Parts expected = testing::oracle_quantize(x, spec, 1, cols);
  testing::for_each_target(
      [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 1, cols)); });
}

TEST(Quantize, NonFiniteElementsAreCountedAndGetTheCodeOfZero) {
  std::mt19937_64 random(11);
  const auto specs = testing::all_specs();
  for (const DType dtype : testing::kFloatDTypes) {
    for (const EncodedSpec& spec : specs) {
      Values clean = testing::random_values(dtype, 512, random());
      Values x;
      x.dtype = dtype;
      for (size_t i = 0; i < 512; ++i) {
        const double bad[] = {NAN, INFINITY, -INFINITY};
        x.push_back(i % 97 == 40 ? bad[random() % 3] : i >= 448 ? static_cast<double>(NAN) : clean.exact[i]);
      }
      const Parts expected = testing::oracle_quantize(x, spec, 1, 512);
      EXPECT_EQ(expected.status.first_nonfinite, 40);
      EXPECT_GE(expected.status.num_nonfinite, 5 + 64 - 1);
      testing::for_each_target(
          [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 1, 512)); });
      EXPECT_THROW(quantize(x.view({512}), spec, spec.encoding), Error);
      if (HasFailure()) FAIL() << testing::describe(spec) << ' ' << to_string(dtype);
    }
  }
}

// All bf16 values against many scales: four groups a time, each holding every value that is not larger than
// the one that sets its scale.
TEST(Quantize, AllBf16ValuesAgainstManyScales) {
  const int num_scales = testing::kSanitized ? 8 : 1536;
  const int64_t n = 0x10000;
  std::mt19937_64 random(3);
  std::vector<uint16_t> scales;  // half of them where weights are, half anywhere
  for (int i = 0; i < num_scales; ++i)
    scales.push_back(static_cast<uint16_t>(i % 2 ? 1 + random() % 0x7F7F : 0x3800 + random() % 0x800));
  std::vector<EncodedSpec> specs(6);
  specs[0].format = Format::nf4;
  specs[1].format = Format::fp4;
  specs[2].format = Format::int4;
  specs[3].format = Format::affine4;
  specs[3].encoding.scale_rule = ScaleRule::minmax;
  specs[4].format = Format::int8;
  specs[4].encoding.scale_rule = ScaleRule::half_range;
  specs[5].format = Format::fp8;
  std::vector<uint16_t> x(4 * n);
  std::vector<uint8_t> expected(4 * n);
  for (EncodedSpec spec : specs) {
    spec.granularity = Granularity::flat;
    spec.group_size = n;
    const formats::Codec codec = make_codec(spec, spec.encoding);
    for (size_t first = 0; first < scales.size(); first += 4) {
      for (size_t group = 0; group < 4; ++group) {
        const uint16_t largest = scales[first + group];
        const float absmax = formats::bf16_to_f32(largest);
        const auto params = formats::group_params(-absmax, absmax, codec);
        for (size_t v = 0; v < n; ++v) {
          const auto bits = static_cast<uint16_t>((v & 0x7FFF) <= largest ? v : largest);
          x[group * n + v] = bits;
          expected[group * n + v] =
              static_cast<uint8_t>(formats::encode(formats::bf16_to_f32(bits), params, codec));
        }
      }
      testing::for_each_target([&](const char* target) {
        if (std::string_view(target) == "SCALAR") return;  // the rule itself, slowly
        Parts actual(spec, 1, 4 * n);
        quantize({x.data(), DType::bf16, {1, 4 * n}, {}, {}}, actual.view(), spec.encoding, {1});
        for (int64_t i = 0; i < 4 * n; ++i) {
          const int code = formats::get_code(actual.codes.data(), i, codec.bits);
          if (code != expected[static_cast<size_t>(i)])
            FAIL() << testing::describe(spec) << " value " << x[static_cast<size_t>(i)] << " scale "
                   << scales[first + static_cast<size_t>(i / n)] << ": " << code << " instead of "
                   << int{expected[static_cast<size_t>(i)]};
        }
      });
      if (HasFailure()) return;
    }
  }
}

// Groups of one row have the same largest magnitude; all values up to it are in some.
TEST(Quantize, AllBf16ValuesInShortGroups) {
  const int64_t rows = testing::kSanitized ? 2 : 24;
  std::mt19937_64 random(31);
  for (const auto& [format, group_size] :
       std::initializer_list<std::pair<Format, int64_t>>{{Format::nvfp4, 16},
                                                         {Format::mxfp4, 32},
                                                         {Format::fp4, 64},
                                                         {Format::fp4, 192},
                                                         {Format::nf4, 64}}) {
    EncodedSpec spec;
    spec.format = format;
    spec.group_size = group_size;
    testing::fit_format(spec);
    const int64_t cols = (0x10000 / (group_size - 1) + 1) * group_size;
    Values x;
    x.dtype = DType::bf16;
    for (int64_t row = 0; row < rows; ++row) {
      const auto largest =
          static_cast<uint32_t>(row % 4 == 3 ? 1 + random() % 0x7F7F : 0x3C00 + random() % 0x200);
      for (int64_t i = 0, next = static_cast<int64_t>(random() & 0xFFFF); i < cols; ++i) {
        const bool is_first = i % group_size == 0;
        auto bits = static_cast<uint32_t>((is_first ? largest : next++) & 0xFFFF);
        if ((bits & 0x7FFF) > largest) bits = largest | (bits & 0x8000);
        x.push_back(static_cast<double>(formats::bf16_to_f32(static_cast<uint16_t>(bits))));
      }
    }
    const Parts expected = testing::oracle_quantize(x, spec, rows, cols);
    testing::for_each_target([&](const char* target) {
      if (std::string_view(target) == "SCALAR") return;  // the rule itself, slowly
      expect_equal(expected, testing::quantize_parts(x, spec, rows, cols, 1));
    });
    if (HasFailure()) FAIL() << testing::describe(spec);
  }
}

// Enough elements for the kernels that prepare thresholds first.
TEST(Quantize, LargeBf16TablesEqualTheOracle) {
  std::mt19937_64 random(13);
  for (EncodedSpec spec : testing::all_specs()) {
    if (info(spec.format).kind != FormatKind::table) continue;
    for (const DType scale_dtype : {DType::f32, DType::f16, DType::bf16})
      for (const int64_t group_size : {32, 64, 96, 128, 256, 4096}) {
        spec.scale_dtype = scale_dtype;
        spec.group_size = group_size;
        spec.granularity = group_size % 64 == 0 ? Granularity::group : Granularity::flat;
        testing::fit_format(spec);
        const int64_t rows = 9, cols = 8192 + 64 + static_cast<int64_t>(random() % 3);
        Values x = testing::random_values(DType::bf16, rows * cols, random());
        if (group_size == 96)
          x.bytes[2 * 70001] = 0x80, x.bytes[2 * 70001 + 1] = 0x7F, x.exact[70001] = INFINITY;
        const Parts expected = testing::oracle_quantize(x, spec, rows, cols);
        testing::for_each_target([&](const char*) {
          for (const int threads : {1, 3})
            expect_equal(expected, testing::quantize_parts(x, spec, rows, cols, threads));
        });
        if (HasFailure()) FAIL() << testing::describe(spec);
      }
  }
}

// f32 values within two units of every decision threshold.
TEST(Quantize, NeighboursOfEveryThreshold) {
  std::mt19937_64 random(5);
  const int num_scales = testing::kSanitized ? 20 : 2000;
  for (EncodedSpec spec : testing::all_specs()) {
    if (info(spec.format).scale_dtype) continue;  // has no groups of a row
    spec.granularity = Granularity::channel;
    for (int s = 0; s < num_scales / 10; ++s) {
      const double exponent =
          s % 4 == 0 ? static_cast<double>(random() % 240) - 120 : static_cast<double>(random() % 10) - 8;
      const auto absmax = static_cast<float>(
          std::ldexp(1 + static_cast<double>(random() % (1 << 23)) / (1 << 23), static_cast<int>(exponent)));
      const formats::Codec codec = make_codec(spec, spec.encoding);
      const auto params = formats::group_params(-absmax, absmax, codec);
      Values x;
      x.push_back(static_cast<double>(absmax));
      x.push_back(-static_cast<double>(absmax));
      const auto add = [&](double threshold) {
        const auto nearest = static_cast<float>(threshold);
        if (std::fabs(nearest) >= absmax) return;
        float v = std::nextafter(std::nextafter(nearest, -INFINITY), -INFINITY);
        for (int i = 0; i < 5; ++i, v = std::nextafter(v, INFINITY)) x.push_back(static_cast<double>(v));
      };
      const auto scale = static_cast<double>(params.code_scale);
      if (codec.kind == formats::Kind::table)
        for (const double edge : codec.book.edges_f64) add(edge * scale);
      else
        for (int q = -260; q <= 260; ++q) add((q + 0.5) * scale + static_cast<double>(params.code_bias));
      const auto n = static_cast<int64_t>(x.exact.size());
      const Parts expected = testing::oracle_quantize(x, spec, 1, n);
      testing::for_each_target(
          [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 1, n)); });
      if (HasFailure()) FAIL() << testing::describe(spec) << " absmax " << absmax;
    }
  }
}

// And what is so small that its quotient is 0, or nearly: the code of 0 has no sign.
TEST(Quantize, NeighboursOfEveryThresholdOfBlockFloats) {
  std::mt19937_64 random(6);
  const int num_tensors = testing::kSanitized ? 10 : 400;
  for (EncodedSpec spec : {EncodedSpec{{.format = Format::nvfp4}}, EncodedSpec{{.format = Format::mxfp4}}}) {
    testing::fit_format(spec);
    for (int t = 0; t < num_tensors; ++t) {
      const auto draw = [&](int exponent) {
        return static_cast<float>(
            std::ldexp(1 + static_cast<double>(random() % (1 << 23)) / (1 << 23), exponent));
      };
      const int exponent =
          t % 4 == 0 ? static_cast<int>(random() % 240) - 120 : static_cast<int>(random() % 12) - 8;
      const float largest = draw(exponent);
      formats::Codec codec = make_codec(spec, spec.encoding);
      if (spec.format == Format::nvfp4) codec.global_scale = formats::global_scale_of(largest);
      Values x;
      for (int group = 0; group < 8; ++group) {
        const float absmax = group == 0 ? largest : std::min(largest, draw(exponent - group));
        const float scale = formats::group_params(-absmax, absmax, codec).code_scale;
        x.push_back(static_cast<double>(group % 2 == 0 ? absmax : -absmax));
        for (int64_t i = 1; i < spec.group_size; ++i) {
          float v = static_cast<float>(codec.book.edges_f64[random() % 15] * static_cast<double>(scale));
          for (auto steps = random() % 3; steps > 0; --steps)
            v = std::nextafter(v, i % 2 == 0 ? INFINITY : -INFINITY);
          if (i % 5 == 0) v = std::copysign(std::ldexp(1.0f, -149 + static_cast<int>(random() % 8)), v);
          if (i % 7 == 0) v = -0.0f;
          x.push_back(std::fabs(v) < absmax ? static_cast<double>(v) : 0.0);
        }
      }
      const auto n = static_cast<int64_t>(x.exact.size());
      const Parts expected = testing::oracle_quantize(x, spec, 1, n);
      testing::for_each_target(
          [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 1, n)); });
      if (HasFailure()) FAIL() << testing::describe(spec) << " absmax " << largest;
    }
  }
}

TEST(Quantize, ReadsNothingBeyondItsInputAndWritesEveryByte) {
  const size_t page = 4096;
  auto* memory = static_cast<uint8_t*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(memory + page, page, PROT_NONE), 0);
  for (const DType dtype : testing::kFloatDTypes) {
    for (const EncodedSpec& spec : testing::all_specs()) {
      for (int64_t n = 1; n < 200; n += 7) {
        Values x = testing::random_values(dtype, n, static_cast<uint64_t>(n));
        uint8_t* at_end = memory + page - x.bytes.size();
        std::memcpy(at_end, x.bytes.data(), x.bytes.size());
        const Parts expected = testing::oracle_quantize(x, spec, 1, n);
        testing::for_each_target([&](const char*) {
          for (const uint8_t poison : {uint8_t{0}, uint8_t{0xFF}}) {
            Parts actual(spec, 1, n);
            std::fill(actual.codes.begin(), actual.codes.end() - Parts::kGuard, poison);
            quantize({at_end, dtype, {1, n}, {}, {}}, actual.view(), spec.encoding, {1});
            EXPECT_TRUE(expected.same_bytes(actual)) << testing::describe(spec) << " n " << n;
          }
        });
      }
    }
  }
  munmap(memory, 2 * page);
}

TEST(Quantize, GroupsAreIndependentAndScalingByAPowerOfTwoKeepsTheCodes) {
  for (EncodedSpec spec : testing::all_specs()) {
    if (spec.encoding.scale_rule == ScaleRule::mlx_edge) continue;  // its scale has a fixed floor
    Values x, doubled;
    std::mt19937_64 random(9);
    std::normal_distribution<double> normal;
    for (int i = 0; i < 1024; ++i) x.push_back(normal(random));
    for (const double v : x.exact) doubled.push_back(v * 0x1p20);
    const Parts a = testing::quantize_parts(x, spec, 4, 256),
                b = testing::quantize_parts(doubled, spec, 4, 256);
    EXPECT_EQ(a.codes, b.codes) << testing::describe(spec);
    const Parts one_row = testing::quantize_parts(x, spec, 1, 1024);
    EXPECT_EQ(a.codes, one_row.codes) << testing::describe(spec);
    EXPECT_EQ(a.scales, one_row.scales) << testing::describe(spec);
  }
}

TEST(Quantize, DegenerateGroupsRoundTrip) {
  for (const DType dtype : testing::kFloatDTypes) {
    for (const EncodedSpec& spec : testing::all_specs()) {
      const double smallest = dtype == DType::f16    ? 0x1p-24
                              : dtype == DType::bf16 ? 0x1p-133
                              : dtype == DType::f32  ? 0x1p-149
                                                     : 0x1p-149;
      for (const double constant : {0.0, -0.0, 1.0, -1.0, 3.140625, 1000.0, smallest, -smallest}) {
        // The user's table has its largest magnitude on one side only.
        if (spec.format == Format::lut4 && constant > 0) continue;
        Values x;
        x.dtype = dtype;
        for (int i = 0; i < 64; ++i) x.push_back(constant);
        const QuantizedTensor q = quantize(x.view({64}), spec, spec.encoding);
        std::vector<double> y(64, 12345.0);
        dequantize(q, {y.data(), DType::f64, {64}, {}, {}});
        for (const double v : y) {
          SCOPED_TRACE(fmt::format("{} {} constant {}", testing::describe(spec), to_string(dtype), constant));
          if (constant == 0) {
            ASSERT_EQ(v, 0.0);
            ASSERT_FALSE(std::signbit(v));
          } else if (spec.encoding.scale_rule == ScaleRule::half_range) {
            // The grid is centred between codes: the end of the range is half a step away.
            ASSERT_NEAR(v, constant, std::fabs(constant) / 2);
          } else if (spec.format == Format::mxfp4) {
            // A power of two is not what makes the constant a level.
            ASSERT_NEAR(v, constant, std::fabs(constant) * (std::fabs(constant) < 1e-30 ? 1 : 1.0 / 7));
          } else {
            ASSERT_NEAR(v, constant,
                        std::fabs(constant) * 1e-6 + (std::fabs(constant) < 1e-30 ? std::fabs(constant) : 0));
          }
        }
      }
    }
  }
}

TEST(Quantize, HugeRangesDoNotOverflow) {
  for (const Format format : {Format::affine4, Format::int4}) {
    const EncodedSpec spec{{.format = format, .asymmetric = format == Format::int4}, {ScaleRule::minmax}};
    Values x, beyond;
    for (int i = 0; i < 64; ++i) {
      x.push_back(-3e38 + i * (3.3e38 / 63));
      beyond.push_back(-3e38 +
                       i * (6e38 / 63));  // 15 * scale is beyond f32: reported, not written as infinity
    }
    std::vector<float> y(64);
    dequantize(quantize(x.view({64}), spec, spec.encoding), {y.data(), DType::f32, {64}, {}, {}});
    for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(static_cast<double>(y[i]), x.exact[i], 1.2e37) << i;
    if (format == Format::affine4) {
      EXPECT_EQ(testing::quantize_parts(beyond, spec, 1, 64).status.num_unheld_scales, 1);
    }
    EXPECT_EQ(testing::oracle_quantize(beyond, spec, 1, 64).codes,
              testing::quantize_parts(beyond, spec, 1, 64).codes);
  }
}

// A code that no value has, like -8 of int4 with rule absmax, does not count: a group is held if and only if
// all its values are decoded to finite ones; where absmax alone decides the scale, those of its negative too.
TEST(Quantize, OnlyCodesOfValuesMustBeFinite) {
  constexpr double kMost = 3.4028234663852886e38;
  int held = 0, unheld = 0;
  const auto check = [&](const EncodedSpec& spec, const std::vector<double>& values) {
    const auto n = static_cast<int64_t>(values.size());
    const bool by_absmax =
        spec.encoding.scale_rule == ScaleRule::absmax || spec.encoding.scale_rule == ScaleRule::half_range;
    bool finite = true;
    int64_t num_unheld = 0;
    for (const double sign : {1.0, -1.0}) {
      if (sign < 0 && !by_absmax) continue;
      Values x;
      for (const double value : values) x.push_back(sign * value);
      testing::Parts parts = testing::quantize_parts(x, spec, 1, n);
      if (sign > 0) num_unheld = parts.status.num_unheld_scales;
      std::vector<float> y(values.size());
      dequantize(parts.view(), {y.data(), DType::f32, {1, n}, {}, {}});
      finite &= std::all_of(y.begin(), y.end(), [](float value) { return std::isfinite(value); });
    }
    EXPECT_EQ(num_unheld, finite ? 0 : 1) << testing::describe(spec) << " " << values[0] << " " << values[1];
    ++(finite ? held : unheld);
    return finite;
  };
  for (const FormatInfo& format : all_formats()) {
    if (format.kind != FormatKind::integer) continue;
    for (const ScaleRule rule :
         {ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max, ScaleRule::minmax})
      for (const DType scale_dtype : {DType::f32, DType::bf16}) {
        const EncodedSpec spec{
            {.format = format.format, .asymmetric = rule == ScaleRule::minmax, .scale_dtype = scale_dtype},
            {rule}};
        for (double a = 2.5e38; a < kMost; a *= 1.004)
          for (const double b : {0.0, 1.0, -a / 3, a / 9}) {
            const bool positive = check(spec, {a, b, 1e37}), negative = check(spec, {-a, b, 1e37});
            if (rule == ScaleRule::absmax && scale_dtype == DType::f32) {
              EXPECT_TRUE(positive && negative) << a;
            }
          }
      }
  }
  EXPECT_GT(held, 1000);
  EXPECT_GT(unheld, 100);
  const EncodedSpec spec{{.format = Format::int4, .scale_dtype = DType::f32}, {ScaleRule::absmax}};
  EXPECT_TRUE(check(spec, {3.3e38, -3.3e38, 0, kMost}));
}

TEST(Quantize, ScalesThatADTypeCannotHoldOrOnlyCoarselyAreCounted) {
  EncodedSpec spec{{.format = Format::int8, .scale_dtype = DType::f16}};
  const auto status = [&](double scale) {
    Values x;
    for (int i = 0; i < 128; ++i) x.push_back(scale * 127 * (i % 2 ? 1 : -1));
    return testing::quantize_parts(x, spec, 1, 128).status;
  };
  EXPECT_EQ(status(1e7).num_unheld_scales, 2);
  EXPECT_EQ(status(1e-7).num_unheld_scales, 0);
  EXPECT_EQ(status(1e-7).num_coarse_scales, 2);
  EXPECT_EQ(status(1e-3).num_coarse_scales, 0);
  spec.scale_dtype = DType::bf16;
  EXPECT_EQ(status(1e-7).num_coarse_scales, 0);
  EXPECT_EQ(status(1e-40).num_coarse_scales, 2);
  Values huge;
  for (int i = 0; i < 64; ++i) huge.push_back(1e7 * 127);
  spec.scale_dtype = DType::f16;
  EXPECT_THROW(quantize(huge.view({64}), spec, spec.encoding), Error);
}

TEST(Quantize, GivenRangeEqualsThatOfTheWholeTensor) {
  for (EncodedSpec spec : testing::all_specs()) {
    spec.granularity = Granularity::tensor;
    testing::fit_format(spec);
    const bool one_scale = spec.granularity == Granularity::tensor;
    Values x = testing::random_values(DType::bf16, 64 * 100, 21);
    const Parts whole = testing::quantize_parts(x, spec, 64, 100);
    ValueRange range;
    for (int64_t row = 0; row < 64; row += 16) {
      const ValueRange part = value_range({x.bytes.data() + row * 200, DType::bf16, {16, 100}, {}, {}});
      range.min = std::min(range.min, part.min);
      range.max = std::max(range.max, part.max);
    }
    std::vector<uint8_t> codes, scales;
    for (int64_t row = 0; row < 64; row += 16) {
      Parts part(spec, 16, 100);
      quantize({x.bytes.data() + row * 200, DType::bf16, {16, 100}, {}, {}}, part.view(), spec.encoding, {1},
               &range);
      codes.insert(codes.end(), part.codes.begin(), part.codes.end() - Parts::kGuard);
      scales.insert(scales.end(), part.scales.begin(), part.scales.end() - Parts::kGuard);
      if (one_scale) scales.resize(part.scales.size() - Parts::kGuard);  // those of all blocks are the same
      EXPECT_TRUE(!one_scale || part.scales == whole.scales);
      EXPECT_EQ(part.global_scale, whole.global_scale);
    }
    scales.insert(scales.end(), Parts::kGuard, Parts::kPoison);
    EXPECT_EQ(scales, whole.scales) << testing::describe(spec);
    codes.insert(codes.end(), Parts::kGuard, Parts::kPoison);
    EXPECT_EQ(codes, whole.codes) << testing::describe(spec);
  }
}

TEST(Quantize, LargeGroupsAreSplitBetweenThreadsWithTheSameBytes) {
  const int64_t n = (int64_t{1} << 20) + 4096 + 24;
  for (EncodedSpec spec : {EncodedSpec{{.format = Format::nf4}},
                           EncodedSpec{{.format = Format::affine3}, {ScaleRule::minmax}}}) {
    spec.granularity = Granularity::flat;
    spec.group_size = (int64_t{1} << 20) + 16;
    Values x = testing::random_values(DType::bf16, n, 2);
    const Parts expected = testing::oracle_quantize(x, spec, 1, n);
    for (const int threads : {1, 2, 5})
      expect_equal(expected, testing::quantize_parts(x, spec, 1, n, threads));
  }
}

// ---- Golden facts -------------------------------------------------------------------------------

std::vector<int> codes_of(const std::vector<double>& values, const EncodedSpec& spec,
                          DType dtype = DType::f32, std::vector<float>* scales = nullptr) {
  Values x;
  x.dtype = dtype;
  for (const double v : values) x.push_back(v);
  const QuantizedTensor q = quantize(x.view({static_cast<int64_t>(values.size())}), spec, spec.encoding);
  const std::vector<uint8_t> codes_of_q = testing::bytes_of(q.codes);
  const int bits = info(spec.format).bits;
  std::vector<int> codes;
  for (size_t i = 0; i < values.size(); ++i) {
    int code = formats::get_code(codes_of_q.data(), static_cast<int64_t>(i), bits);
    if (info(spec.format).kind == FormatKind::integer) code -= 1 << (bits - 1);
    codes.push_back(code);
  }
  if (scales != nullptr && spec.scale_dtype == DType::f32)
    for (int64_t i = 0; i < q.scales.num_elements(); ++i)
      scales->push_back(reinterpret_cast<const float*>(q.scales.data())[i]);
  return codes;
}

TEST(QuantizeGolden, Nf4) {
  std::vector<float> scales;
  EXPECT_EQ(codes_of({-2, -1, -.5, -0.0, .1, .5, 1, 2}, {}, DType::f32, &scales),
            (std::vector{0, 2, 4, 7, 8, 10, 12, 15}));
  EXPECT_EQ(scales, std::vector<float>{2});
  Values x;
  for (const double v : {-2., -1., -.5, -0., .1, .5, 1., 2.}) x.push_back(v);
  const QuantizedTensor q = quantize(x.view({8}), EncodedSpec{});
  EXPECT_EQ(testing::bytes_of(q.codes), (std::vector<uint8_t>{0x20, 0x74, 0xA8, 0xFC}));
  std::vector<float> y(8);
  dequantize(q, {y.data(), DType::f32, {8}, {}, {}});
  EXPECT_EQ(y, (std::vector<float>{-2, -1.0501461f, -0.568882763f, 0, 0.159160599f, 0.492224604f,
                                   0.881419659f, 2}));
}

TEST(QuantizeGolden, Nf4ThresholdsTakeTheUpperCodeJustAboveTheExactMidpoint) {
  const uint32_t values[] = {0xBF591CD8, 0xBF1C5270, 0xBEADEA76, 0xBE703CEC,
                             0x3F006D04, 0x3F5C89DA, 0x3DF64863};
  const int codes[] = {1, 2, 4, 5, 13, 15, 9};
  for (int i = 0; i < 7; ++i) {
    const auto v = static_cast<double>(formats::bit_cast<float>(values[i]));
    EXPECT_EQ(codes_of({1, v}, {})[1], codes[i]) << i;
  }
}

TEST(QuantizeGolden, IntegerRounding) {
  EncodedSpec int4{{.format = Format::int4}};
  EXPECT_EQ(codes_of({-7, -3.5, -.5, .5, 1.5, 2.5, 3.49, 7}, int4), (std::vector{-7, -4, 0, 0, 2, 2, 3, 7}));
  EncodedSpec int8{{.format = Format::int8}};
  std::vector<float> scales;
  EXPECT_EQ(codes_of({-1, -.5, .00390625, .1, .25, .5, .75, 1}, int8, DType::f32, &scales),
            (std::vector{-127, -64, 0, 13, 32, 64, 95, 127}));
  EXPECT_EQ(formats::bit_cast<uint32_t>(scales[0]), 0x3C010204u);
  EncodedSpec asymmetric{{.format = Format::int4, .asymmetric = true}, {ScaleRule::minmax}};
  scales.clear();
  // Offset codes 0 3 5 6 7 10 13 15 with zero point 5.
  EXPECT_EQ(codes_of({-1, -.5, 0, .25, .5, 1, 1.5, 2}, asymmetric, DType::f32, &scales),
            (std::vector{-8, -5, -3, -2, -1, 2, 5, 7}));
  EXPECT_EQ(formats::bit_cast<uint32_t>(scales[0]), 0x3E4CCCCDu);
  // Division, not multiplication by the reciprocal: 0.0015 / 0.001 is 1.5 in f32, and f64 is f64.
  EncodedSpec given{{.format = Format::int8, .granularity = Granularity::tensor}};
  const auto code_with_scale = [&](double value, double scale, DType dtype) {
    Values x;
    x.dtype = dtype;
    x.push_back(value);
    given.scale_dtype = dtype;
    const ValueRange range{-scale * 127, scale * 127, 0, -1};
    const Parts parts = testing::quantize_parts(x, given, 1, 1, 1, &range);
    return int{parts.codes[0]} - 128;
  };
  EXPECT_EQ(code_with_scale(0.15, 0.1, DType::f64), 1);
  EXPECT_EQ(code_with_scale(2.5000000001, 1, DType::f64), 3);
  EXPECT_EQ(code_with_scale(2.5000000001, 1, DType::f32), 2);
}

// The golden file has it from torch: x_i = (i - 20) / 16, and numbers by themselves.
TEST(QuantizeGolden, Fp8) {
  Values x;
  for (int i = 0; i < 32; ++i) x.push_back((i - 20) / 16.0);
  const QuantSpec spec{.format = Format::fp8, .granularity = Granularity::channel};
  const QuantizedTensor q = quantize(x.view({32}), spec);
  const auto hex = [](const Tensor& part) {
    return fmt::format("{:02x}", fmt::join(testing::bytes_of(part), ""));
  };
  EXPECT_EQ(hex(q.scales), "6edb363b");
  EXPECT_EQ(hex(q.codes), "fefdfdfcfbfafaf9f8f7f6f5f3f2f0eeebe8e3db005b63686b6e707273757677");
  // Saturated, ties to even codes, with the sign of what rounds to 0.
  Values numbers;
  for (const double value : {-0.0, 1e-30, -1e-30, 0x1p-10, 0x1.001p-10, 464.0, 465.0, 1e9, 3 * 0x1p-10})
    numbers.push_back(value);
  const ValueRange range{-448, 448, 0, -1};
  Parts parts = testing::quantize_parts(
      numbers, QuantSpec{.format = Format::fp8, .granularity = Granularity::tensor}, 1, 9, 1, &range);
  EXPECT_EQ(std::vector(parts.codes.begin(), parts.codes.begin() + 9),
            (std::vector<uint8_t>{128, 0, 128, 0, 1, 126, 126, 126, 2}));
  float y[9];
  dequantize(parts.view(), {y, DType::f32, {1, 9}, {}, {}});
  EXPECT_TRUE(std::signbit(y[0]) && y[0] == 0);
  EXPECT_EQ(y[5], 448);
}

// Of x_i = (i - 20) / 16: compressed-tensors 0.18, nvfp4-pack-quantized and mxfp4-pack-quantized.
TEST(QuantizeGolden, BlockFloatVectors) {
  Values x;
  for (int i = 0; i < 32; ++i) x.push_back((i - 20) / 16.0);
  const auto hex = [](const Tensor& part) {
    return fmt::format("{:02x}", fmt::join(testing::bytes_of(part), ""));
  };
  EncodedSpec spec{{.format = Format::nvfp4}};
  testing::fit_format(spec);
  QuantizedTensor q = quantize(x.view({32}), spec);
  EXPECT_EQ(hex(q.global_scale), "66660645");
  EXPECT_EQ(hex(q.scales), "7e77");
  EXPECT_EQ(hex(q.codes), "ffffeeeededdccbcbc9a103254657677");
  std::vector<float> y(32);
  dequantize(q, {y.data(), DType::f32, {32}, {}, {}});
  EXPECT_EQ(std::vector(y.begin(), y.begin() + 4), (std::vector<float>{-1.25f, -1.25f, -1.25f, -1.25f}));
  EXPECT_FLOAT_EQ(y[4], -0.8333333f);
  spec.format = Format::mxfp4;
  testing::fit_format(spec);
  q = quantize(x.view({32}), spec);
  EXPECT_EQ(hex(q.scales), "7d");
  EXPECT_EQ(hex(q.codes), "eeeeeededdccccabaa89002122434454");
  EXPECT_EQ(q.global_scale.num_elements(), 0);
}

TEST(Quantize, BlockFloatsAtTheEdges) {
  EncodedSpec nvfp4{{.format = Format::nvfp4}}, mxfp4{{.format = Format::mxfp4}};
  testing::fit_format(nvfp4);
  testing::fit_format(mxfp4);
  const auto group = [](Values& x, const EncodedSpec& spec, double value) {
    for (int64_t i = 0; i < spec.group_size; ++i) x.push_back(i % 3 == 1 ? value : 0);
  };
  const auto decoded = [](Parts& parts) {
    std::vector<double> y(static_cast<size_t>(parts.cols));
    dequantize(parts.view(), {y.data(), DType::f64, {1, parts.cols}, {}, {}});
    return y;
  };
  const auto global_of = [](const Parts& parts) {
    float value = 0;
    std::memcpy(&value, parts.global_scale.data(), sizeof value);
    return value;
  };
  testing::for_each_target([&](const char*) {
    // A group of zeros has a scale that is not 0; a tensor of zeros the global scale 1.
    Values x;
    group(x, nvfp4, 0);
    Parts parts = testing::quantize_parts(x, nvfp4, 1, 16);
    EXPECT_EQ(global_of(parts), 1);
    EXPECT_EQ(parts.scales[0], 0x20);
    // A group too small for a normal scale has the smallest: 2^-9.
    group(x, nvfp4, -3);
    group(x, nvfp4, 3 * 0x1p-20);
    parts = testing::quantize_parts(x, nvfp4, 1, 48);
    EXPECT_EQ(global_of(parts), 896);
    EXPECT_EQ(std::vector(parts.scales.begin(), parts.scales.begin() + 3),
              (std::vector<uint8_t>{0x20, 0x7E, 0x01}));
    EXPECT_EQ(decoded(parts)[17], -3);
    EXPECT_TRUE(parts.status.ok());
    // Blocks with the range of the whole are as the whole, and a smaller range does not hold them.
    const ValueRange range{-3, 0x1p-16, 0, -1}, small{-1, 1, 0, -1};
    Values block;
    group(block, nvfp4, -3);
    EXPECT_EQ(testing::quantize_parts(block, nvfp4, 1, 16, 1, &range).scales[0], 0x7E);
    EXPECT_EQ(testing::quantize_parts(block, nvfp4, 1, 16, 1, &small).status.num_unheld_scales, 1);
    // The largest and the smallest values.
    for (const double value : {double{FLT_MAX}, double{FLT_MIN}, 0x1p-149, 1e-36}) {
      Values single;
      group(single, nvfp4, value);
      parts = testing::quantize_parts(single, nvfp4, 1, 16);
      EXPECT_TRUE(std::isfinite(global_of(parts)) && global_of(parts) > 0) << value;
      if (value >= FLT_MIN) {
        EXPECT_NEAR(decoded(parts)[1] / value, 1, 0.07) << value;
      }
    }
    for (const auto& [value, exponent] : std::initializer_list<std::pair<double, int>>{{0, 0},
                                                                                       {1, 125},
                                                                                       {1.749, 125},
                                                                                       {1.75, 126},
                                                                                       {2, 126},
                                                                                       {0x1p-149, 0},
                                                                                       {0x1.8p-126, 0},
                                                                                       {0x1.cp-125, 1}}) {
      Values single;
      group(single, mxfp4, value);
      parts = testing::quantize_parts(single, mxfp4, 1, 32);
      EXPECT_EQ(int{parts.scales[0]}, exponent) << value;
    }
    Values most;
    group(most, mxfp4, FLT_MAX);  // 6 * 2^126
    EXPECT_EQ(testing::quantize_parts(most, mxfp4, 1, 32).status.num_unheld_scales, 1);
  });
}

TEST(QuantizeGolden, CompressedTensorsVectors) {
  const std::vector<double> w = {0.7, -0.8, 0.05, 0.0, -0.33, 0.66, 0.12, -0.5,
                                 0.1, 0.2,  0.3,  0.4, 0.5,   0.6,  0.7,  0.8};
  EncodedSpec spec{{.format = Format::int4, .group_size = 8}, {ScaleRule::half_range}};
  std::vector<float> scales;
  EXPECT_EQ(codes_of(w, spec, DType::f32, &scales),
            (std::vector{7, -8, 0, 0, -3, 6, 1, -5, 1, 2, 3, 4, 5, 6, 7, 7}));
  EXPECT_FLOAT_EQ(scales[0], 0.1066666692f);
  spec.asymmetric = true;
  spec.encoding.scale_rule = ScaleRule::minmax;
  scales.clear();
  EXPECT_EQ(codes_of(w, spec, DType::f32, &scales),
            (std::vector{7, -8, 0, 0, -3, 7, 1, -5, -6, -4, -2, 0, 1, 3, 5, 7}));
  EXPECT_FLOAT_EQ(scales[0], 0.1000000015f);
  EXPECT_FLOAT_EQ(scales[1], 0.0533333346f);
}

TEST(QuantizeGolden, AffineVectors) {
  EncodedSpec spec{{.format = Format::affine4}, {ScaleRule::minmax}};
  std::vector<float> scales;
  EXPECT_EQ(codes_of({0, .5, 1.5, 2.5, 3.5, 7.5, 14.5, 15}, spec, DType::f32, &scales),
            (std::vector{0, 0, 2, 2, 4, 8, 14, 15}));
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(codes_of({3.14, 3.14, 3.14}, spec, DType::f32, &scales), (std::vector{0, 0, 0}));
  EXPECT_EQ(scales[1], 1.0f);
  EXPECT_EQ(codes_of({-3, -2.5, -2, -1}, spec), (std::vector{0, 4, 7, 15}));
  spec.encoding.scale_rule = ScaleRule::mlx_edge;
  spec.encoding.code_scale = CodeScale::unrounded;
  scales.clear();
  EXPECT_EQ(codes_of({-1, -.5, 0, .25, .5, 1, 1.5, 2}, spec, DType::f32, &scales),
            (std::vector{15, 12, 10, 9, 8, 5, 2, 0}));
  EXPECT_FLOAT_EQ(scales[0], -0.2f);
  EXPECT_EQ(codes_of({-3, -2.5, -2, -1}, spec), (std::vector{0, 4, 7, 15}));
  EXPECT_EQ(codes_of({1, 2, 2.5, 3}, spec), (std::vector{15, 7, 4, 0}));
  scales.clear();
  EXPECT_EQ(codes_of({0, 0, 0, 0}, spec, DType::f32, &scales), (std::vector{0, 0, 0, 0}));
  EXPECT_EQ(scales[0], -1e-7f);
}

// How codes are chosen is no part of how they are read.
TEST(Quantize, DefaultsOfEveryFormatWork) {
  Values x = testing::random_values(DType::f32, 128, 1);
  std::vector<float> y(128);
  for (const FormatInfo& format : all_formats())
    for (const bool asymmetric : {false, true}) {
      if (format.format == Format::lut4 || (asymmetric && format.kind != FormatKind::integer)) continue;
      QuantSpec spec{.format = format.format, .asymmetric = asymmetric};
      testing::fit_format(spec);
      const QuantizedTensor q = quantize(x.view({2, 64}), spec);
      const QuantizedTensor same = quantize(x.view({2, 64}), spec, {default_scale_rule(spec)});
      EXPECT_EQ(testing::bytes_of(q.codes), testing::bytes_of(same.codes)) << testing::describe(spec);
      EXPECT_EQ(testing::bytes_of(q.scales), testing::bytes_of(same.scales)) << testing::describe(spec);
      dequantize(q, {y.data(), DType::f32, {2, 64}, {}, {}});
    }
}

TEST(QuantizeGolden, BadArgumentsAreNamed) {
  Values x = testing::random_values(DType::f32, 64, 1);
  const auto message = [&](const QuantSpec& spec, const Encoding& encoding = {}) {
    try {
      quantize(x.view({64}), spec, encoding);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(message({.group_size = 0}).find("group_size must be positive, got 0"), std::string::npos);
  EXPECT_NE(message({.asymmetric = true}).find("asymmetric needs an integer format, got nf4"),
            std::string::npos);
  EXPECT_NE(message({}, {ScaleRule::minmax}).find("scale rule minmax does not fit format nf4"),
            std::string::npos);
  EXPECT_NE(message({.scale_dtype = DType::i8}).find("got i8"), std::string::npos);
  EXPECT_NE(message({.scale_dtype = DType::f64}).find("f64 scales need f64 data, got f32"),
            std::string::npos);
  EXPECT_NE(message({.format = Format::lut4}).find("ascending"), std::string::npos);
  EXPECT_NE(message({.format = Format::nvfp4}).find("scale dtype of nvfp4 must be f8_e4m3, got f32"),
            std::string::npos);
  EXPECT_NE(message({.format = Format::mxfp4, .scale_dtype = DType::f8_e8m0})
                .find("mxfp4 has granularity group and group_size 32, got group and 64"),
            std::string::npos);
}

// As of plans: nothing beyond the memory that a view tells of, and no overlap of what is written.
TEST(Quantize, MemoryOfArguments) {
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto says = [&](const auto& call, const char* text) {
    const std::string found = message(call);
    EXPECT_NE(found.find(text), std::string::npos) << found;
  };
  std::vector<float> x(4 * 64, 0.5F);
  TensorView given{x.data(), DType::f32, {4, 64}};
  given.num_bytes = 1020;
  says([&] { quantize(given, QuantSpec{}); }, "quantize: x needs 1024 bytes, its memory has 1020");
  says([&] { value_range(given); }, "value_range: x needs 1024 bytes, its memory has 1020");
  const QuantizedTensor q = quantize({x.data(), DType::f32, {4, 64}}, QuantSpec{});
  says([&] { dequantize(q, given); }, "dequantize: y needs 1024 bytes, its memory has 1020");

  given.num_bytes = -1;
  std::vector<uint8_t> memory(4 * 64 / 2 + 4 * sizeof(float));
  QuantizedView out{.spec = QuantSpec{}, .rows = 4, .cols = 64};
  out.codes = memory.data();
  const auto try_scales = [&](size_t at) {
    out.scales = memory.data() + at;
    return message([&] { quantize(given, out, Encoding{}); });
  };
  EXPECT_EQ(try_scales(128), "accepted");
  EXPECT_NE(try_scales(124).find("out.scales must not overlap out.codes"), std::string::npos);
  auto* const bytes = reinterpret_cast<uint8_t*>(x.data());
  out.codes = bytes;
  EXPECT_NE(try_scales(0).find("out.codes must not overlap x"), std::string::npos);

  ConstQuantizedView in = q.view();
  in.codes = bytes;
  says([&] { dequantize(in, given); }, "in.codes must not overlap y");

  DoubleQuantizedView nested{bytes, x.data() + 200, 0};
  says([&] { double_quantize(x.data(), 64, nested); }, "codes must not overlap scales");
  says([&] { double_dequantize(nested, 64, x.data()); }, "codes must not overlap scales");
}

}  // namespace
}  // namespace halfbyte
