// Searched scales: the bytes of the oracle on every target, what they gain, and that they never lose.
#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::EncodedSpec;
using testing::Parts;
using testing::Values;

TEST(ScaleSearch, TheNearestE2m1IsThatOfTheCodeBook) {
  const formats::CodeBook& book = formats::books::fp4_e2m1;
  const auto check = [&](uint32_t bits) {
    const auto y = formats::bit_cast<float>(bits);
    ASSERT_EQ(formats::nearest_e2m1(y), book.values[formats::table_encode(book, y)]) << y;
  };
  for (uint64_t bits = 0; bits < 0x7F800000; bits += 997) check(static_cast<uint32_t>(bits));
  for (const float edge : book.edges_f32)
    for (uint32_t near = 0; edge > 0 && near < 9; ++near) check(formats::bit_cast<uint32_t>(edge) + near - 4);
}

TEST(ScaleSearch, TheNearerOfAPairIsTheValueOfTheCode) {
  const formats::CodeBook& book = formats::books::nf4;
  const float limit = 1.256f;
  const auto pairs = formats::SearchPairs::of(book, limit);
  ASSERT_TRUE(pairs.usable);
  const auto check = [&](float y) {
    const auto bin = static_cast<int>(std::lrint(y * pairs.per_unit + formats::SearchPairs::kCenter));
    ASSERT_TRUE(bin >= 0 && bin < formats::SearchPairs::kBins) << y;
    const float low = std::abs(y - pairs.low[bin]), high = std::abs(y - pairs.high[bin]);
    ASSERT_EQ(std::min(low, high), std::abs(y - book.values[formats::table_encode(book, y)])) << y;
  };
  for (int i = -1'000'000; i <= 1'000'000; ++i) check(limit * static_cast<float>(i) / 1'000'000);
  for (const float edge : book.edges_f32) {
    float y = edge;
    for (int i = 0; i < 4; ++i) y = formats::next_below(y);
    for (int i = 0; i < 9; ++i, y = -formats::next_below(-y)) check(y);
  }
  // Two edges in a bin: 0.01 and 0.03.
  formats::CodeBook close = book;
  close.edges_f32[7] = 0.01f;
  close.edges_f32[8] = 0.03f;
  EXPECT_FALSE(formats::SearchPairs::of(close, limit).usable);
  // An edge away from the middle.
  formats::CodeBook moved = book;
  moved.edges_f32[3] += 0.01f;
  EXPECT_FALSE(formats::SearchPairs::of(moved, limit).usable);
}

void expect_equal(const Parts& expected, const Parts& actual) {
  EXPECT_TRUE(actual.guards_intact());
  EXPECT_TRUE(expected.same_bytes(actual));
  EXPECT_TRUE(testing::same_status(expected.status, actual.status)) << testing::text_of(actual.status);
}

// Weights over many octaves, some 0.
std::vector<float> random_weights(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> weights;
  for (int64_t i = 0; i < n; ++i)
    weights.push_back(random() % 8 == 0 ? 0.0f
                                        : std::ldexp(1.0f + static_cast<float>(random() % 1000) / 1000,
                                                     static_cast<int>(random() % 40) - 20));
  return weights;
}

Values normal_values(DType dtype, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Values values;
  values.dtype = dtype;
  for (int64_t i = 0; i < n; ++i) values.push_back(normal(random));
  return values;
}

// x as it decodes from what quantize made of it.
std::vector<double> decoded(Values& x, const EncodedSpec& spec, int64_t rows, int64_t cols,
                            const Importance& importance = {}) {
  Parts parts = testing::quantize_parts(x, spec, rows, cols, 1, nullptr, importance);
  std::vector<double> y(static_cast<size_t>(rows * cols));
  dequantize(parts.view(), {y.data(), DType::f64, {rows, cols}, {}, {}}, {1});
  return y;
}
double squared(double x) { return x * x; }
double snr_db(Values& x, const EncodedSpec& spec, int64_t rows, int64_t cols) {
  const std::vector<double> y = decoded(x, spec, rows, cols);
  double error = 0, signal = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    error += squared(y[i] - x.exact[i]);
    signal += squared(x.exact[i]);
  }
  return 10 * std::log10(signal / error);
}

TEST(ScaleSearch, EveryFormatDTypeAndShapeEqualsTheOracleOnEveryTarget) {
  std::mt19937_64 random(3);
  const int cases = testing::kSanitized ? 40 : 500;
  const auto specs = testing::searched_specs();
  for (int i = 0; i < cases; ++i) {
    EncodedSpec spec = specs[static_cast<size_t>(i) % specs.size()];
    const Granularity granularities[] = {Granularity::channel, Granularity::group, Granularity::flat};
    spec.granularity = granularities[random() % 3];
    const int64_t sizes[] = {1, 7, 8, 16, 32, 50, 64, 100, 128, 256, 1000, 3000};
    spec.group_size = sizes[random() % 12];
    const DType scale_dtypes[] = {DType::f32, DType::f16, DType::bf16};
    spec.scale_dtype = scale_dtypes[random() % 3];
    const DType dtype = testing::kFloatDTypes[random() % 4];
    if (dtype == DType::f64 && random() % 2) spec.scale_dtype = DType::f64;
    testing::fit_format(spec);
    const bool is_long = i % 10 == 0;  // more than kSearchTile * kSearchParts
    const auto rows = static_cast<int64_t>(is_long ? 1 : random() % 5),
               cols = static_cast<int64_t>(is_long ? 9000 + random() % 300 : random() % 500);
    Values x = i % 3 == 0 ? normal_values(dtype, rows * cols, random())
                          : testing::random_values(dtype, rows * cols, random());
    if (i % 7 == 0 && !x.exact.empty()) {
      Values broken;
      broken.dtype = dtype;
      for (size_t k = 0; k < x.exact.size(); ++k)
        broken.push_back(k % 61 == 5 ? (k % 2 ? INFINITY : static_cast<double>(NAN)) : x.exact[k]);
      x = broken;
    }
    const std::vector<float> weights = random_weights(std::max<int64_t>(1, cols), random());
    Importance importance;
    if (i % 2) importance = {weights.data(), std::max<int64_t>(1, cols), cols == 0 ? 0 : i % cols};
    SCOPED_TRACE(
        fmt::format("case {}: {} {} [{}, {}]", i, testing::describe(spec), to_string(dtype), rows, cols));
    const Parts expected = testing::oracle_quantize(x, spec, rows, cols, nullptr, importance);
    testing::for_each_target([&](const char*) {
      for (const int threads : {1, 3})
        expect_equal(expected, testing::quantize_parts(x, spec, rows, cols, threads, nullptr, importance));
    });
    if (HasFailure()) return;
  }
}

// Rounding such scales moves values further beyond the code book than that of others.
TEST(ScaleSearch, ScalesNearTheLeastF16EqualTheOracle) {
  const formats::CodeBook& book = formats::books::nf4;
  for (int octave = -24; octave <= -10; ++octave) {
    Values x;  // one value of a group is far from what is best for the others: the least factor
    for (int group = 0; group < 64; ++group)
      for (int i = 0; i < 64; ++i)
        x.push_back(std::ldexp(1 + group / 64.0, octave) * (i == 9 ? 1 : 0.8 * book.values[i % 16]));
    EncodedSpec spec;
    spec.format = Format::nf4;
    spec.scale_dtype = DType::f16;
    spec.encoding.search = true;
    const Parts expected = testing::oracle_quantize(x, spec, 64, 64);
    testing::for_each_target(
        [&](const char*) { expect_equal(expected, testing::quantize_parts(x, spec, 64, 64, 1)); });
  }
}

// docs/numerics.md has the table.
TEST(ScaleSearch, GainsOnANormalDistribution) {
  struct Row {
    Format format;
    bool asymmetric;
    int64_t group_size;
    ScaleRule rule;
    double plain, searched;  // dB
  };
  constexpr Row kRows[] = {
      {Format::int4, false, 128, ScaleRule::half_range, 19.11, 19.92},
      {Format::int4, false, 128, ScaleRule::signed_max, 19.72, 20.29},
      {Format::int4, true, 128, ScaleRule::minmax, 19.95, 20.47},
      {Format::int8, false, 128, ScaleRule::half_range, 43.7, 44.1},
      {Format::nf4, false, 64, ScaleRule::absmax, 20.73, 21.40},
      {Format::fp4, false, 64, ScaleRule::absmax, 18.2, 18.9},
      {Format::affine2, false, 64, ScaleRule::minmax, 6.9, 9.7},
      {Format::affine4, false, 64, ScaleRule::minmax, 20.95, 21.70},
      {Format::affine4, false, 64, ScaleRule::mlx_edge, 20.83, 21.55},
      {Format::nvfp4, false, 16, ScaleRule::absmax, 20.44, 21.81},
      {Format::mxfp4, false, 32, ScaleRule::absmax, 19.03, 19.05},
  };
  const int64_t rows = 256, cols = testing::kSanitized ? 256 : 4096;
  Values x = normal_values(DType::f32, rows * cols, 1);
  for (const Row& row : kRows) {
    EncodedSpec spec;
    spec.format = row.format;
    spec.asymmetric = row.asymmetric;
    spec.group_size = row.group_size;
    spec.scale_dtype = DType::f16;
    testing::fit_format(spec);
    spec.encoding.scale_rule = row.rule;
    const double plain = snr_db(x, spec, rows, cols);
    spec.encoding.search = true;
    const double searched = snr_db(x, spec, rows, cols);
    std::printf("%-45s %.2f -> %.2f dB\n", testing::describe(spec).c_str(), plain, searched);
    if (testing::kSanitized) continue;
    EXPECT_NEAR(plain, row.plain, 0.1) << testing::describe(spec);
    EXPECT_GT(searched, row.searched - 0.05) << testing::describe(spec);
  }
}

// By the error that is minimised, but for the rounding of its sum: plain scales are among the candidates.
TEST(ScaleSearch, NoGroupIsWorseThanWithTheScaleOfTheRule) {
  std::mt19937_64 random(5);
  for (const EncodedSpec& searched : testing::searched_specs()) {
    for (const bool weighted : {false, true}) {
      EncodedSpec plain = searched;
      if (!info(plain.format).scale_dtype) plain.group_size = 1 + static_cast<int64_t>(random() % 200);
      EncodedSpec spec = plain;
      plain.encoding.search = false;
      const int64_t rows = 20, cols = 480, size = spec.group_size;
      Values x = testing::random_values(DType::f32, rows * cols, random());
      const std::vector<float> weights = random_weights(cols, random());
      const std::vector<double> before = decoded(x, plain, rows, cols),
                                after =
                                    decoded(x, spec, rows, cols,
                                            weighted ? Importance{weights.data(), cols, 0} : Importance{});
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t begin = 0; begin < cols; begin += size) {
          const int64_t end = std::min(cols, begin + size);
          double absmax = 0;
          for (int64_t col = begin; col < end; ++col)
            absmax = std::max(absmax, std::fabs(x.exact[static_cast<size_t>(row * cols + col)]));
          const double rounding = 1e-6 * absmax;  // of an error
          double plain_error = 0, error = 0, slack = 1e-40;
          for (int64_t col = begin; col < end; ++col) {
            const auto i = static_cast<size_t>(row * cols + col);
            const double weight = weighted ? static_cast<double>(weights[static_cast<size_t>(col)]) : 1;
            const double before_error = std::fabs(before[i] - x.exact[i]),
                         after_error = std::fabs(after[i] - x.exact[i]);
            plain_error += weight * squared(before_error);
            error += weight * squared(after_error);
            slack += weight * rounding * (2 * before_error + 2 * after_error + rounding);
          }
          ASSERT_LE(error, plain_error * (1 + 1e-5) + slack)
              << testing::describe(spec) << " row " << row << " column " << begin
              << (weighted ? " weighted" : "");
        }
    }
  }
}

TEST(ScaleSearch, ImportanceThatIsAllEqualChangesNothing) {
  Values x = normal_values(DType::bf16, 16 * 256, 7);
  for (EncodedSpec spec : testing::searched_specs()) {
    const std::vector<float> weights(256, 0.25f);
    expect_equal(testing::quantize_parts(x, spec, 16, 256),
                 testing::quantize_parts(x, spec, 16, 256, 1, nullptr, {weights.data(), 256, 0}));
    if (HasFailure()) FAIL() << testing::describe(spec);
  }
}

TEST(ScaleSearch, TheOnlyImportantColumnGetsTheLeastError) {
  const int64_t rows = 200, cols = 64, column = 37;
  Values x = normal_values(DType::f32, rows * cols, 9);
  std::vector<float> weights(static_cast<size_t>(cols), 0.0f);
  weights[column] = 3;
  EncodedSpec spec;
  spec.encoding.search = true;
  const std::vector<double> alike = decoded(x, spec, rows, cols),
                            chosen = decoded(x, spec, rows, cols, {weights.data(), cols, 0});
  double error_alike = 0, error_chosen = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const auto i = static_cast<size_t>(row * cols + column);
    error_alike += squared(alike[i] - x.exact[i]);
    error_chosen += squared(chosen[i] - x.exact[i]);
  }
  EXPECT_LT(error_chosen, error_alike / 10);
}

// Blocks of a flat weight begin within a row.
TEST(ScaleSearch, ImportanceOfABlockBeginsWithItsFirstColumn) {
  const int64_t rows = 6, cols = 96, size = 64, begin = 2 * size;
  Values x = normal_values(DType::f32, rows * cols, 11);
  const std::vector<float> weights = random_weights(cols, 12);
  EncodedSpec spec;
  spec.granularity = Granularity::flat;
  spec.group_size = size;
  spec.encoding.search = true;
  const Parts whole = testing::quantize_parts(x, spec, rows, cols, 1, nullptr, {weights.data(), cols, 0});
  Values rest;
  rest.dtype = x.dtype;
  for (size_t i = begin; i < x.exact.size(); ++i) rest.push_back(x.exact[i]);
  const Parts block = testing::quantize_parts(rest, spec, 1, rows * cols - begin, 1, nullptr,
                                              {weights.data(), cols, begin % cols});
  EXPECT_TRUE(std::equal(block.scales.begin(), block.scales.end(), whole.scales.begin() + begin / size * 4));
  EXPECT_TRUE(std::equal(block.codes.begin(), block.codes.end(), whole.codes.begin() + begin / 2));
}

TEST(ScaleSearch, BadArgumentsAreNamed) {
  Values x = normal_values(DType::f32, 64, 13);
  const auto message = [&](EncodedSpec spec, const Importance& importance) -> std::string {
    try {
      testing::quantize_parts(x, spec, 1, 64, 1, nullptr, importance);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EncodedSpec spec;
  spec.encoding.search = true;
  std::vector<float> weights(64, 1.0f);
  EXPECT_EQ(message(spec, {weights.data(), 64, 64}),
            "quantize: importance.first must be in [0, count), got 64 of 64");
  weights[5] = -1;
  EXPECT_EQ(message(spec, {weights.data(), 64, 0}),
            "quantize: importance must be finite and not negative, got -1 at index 5");
  weights[5] = NAN;
  EXPECT_EQ(message(spec, {weights.data(), 64, 0}),
            "quantize: importance must be finite and not negative, got nan at index 5");
  EncodedSpec plain = spec;
  plain.encoding.search = false;
  EXPECT_EQ(message(plain, {weights.data(), 64, 0}),
            "quantize: importance is for searched scales: encoding.search is false");
  spec.granularity = Granularity::tensor;
  EXPECT_EQ(
      message(spec, {}),
      "encoding: search needs a scale for each channel or group, got granularity tensor, whose one scale "
      "takes all elements at once");
  spec.granularity = Granularity::group;
  spec.format = Format::fp8;
  EXPECT_EQ(message(spec, {}),
            "encoding: search is for formats of code books, integers and affine codes, got fp8");
  spec.format = Format::affine4;
  spec.encoding.code_scale = CodeScale::unrounded;
  EXPECT_EQ(message(spec, {}),
            "encoding: search needs code_scale stored, got unrounded: errors are those of stored scales");
}

}  // namespace
}  // namespace halfbyte
