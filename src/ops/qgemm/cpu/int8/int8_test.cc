#include "ops/qgemm/weight/int8.h"

#include <atomic>
#include <cstring>

#include "ops/qgemm/cpu/int8/int8_tiles.h"
#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;

class QgemmInt8 : public ::testing::TestWithParam<size_t> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam()]; }
  void SetUp() override {
    if (info(format().format).kind == FormatKind::floating) GTEST_SKIP() << "its codes are no integers";
  }
  QgemmDescriptor descriptor() const {
    QgemmDescriptor d;
    d.spec = format();
    d.math = QgemmMath::int8;
    return d;
  }
  // Near the reference, and the same bytes from the scalar variant and each target, for every number of
  // threads.
  static void check(const QgemmDescriptor& d, uint64_t seed) {
    QgemmCase test(d, seed);
    test.descriptor.variant = "qgemm_ref";
    const testing::CpuRun expected = testing::run_on_cpu(test, 1);
    EXPECT_EQ(expected.guarantee.math, DType::i8);
    EXPECT_TRUE(testing::near_reference(test, expected.y, WeightRounding::code_rounded));
    testing::expect_same_bytes(test, expected.y, {3});
    if (!testing::reason_of("qgemm_int8", d).empty()) return;
    test.descriptor.variant = "qgemm_int8";
    testing::for_each_target([&](const char* target) {
      if (!testing::reason_of("qgemm_int8", d).empty()) return;  // the scalar one
      SCOPED_TRACE(target);
      testing::expect_same_bytes(test, expected.y, {1, 2, 5});
    });
  }
};

TEST_P(QgemmInt8, EveryTargetGivesTheBytesOfTheReference) {
  std::mt19937_64 random(GetParam());
  constexpr int64_t kGroups[] = {16, 32, 48, 64, 96, 100, 128, 160, 192, 256, 320};
  constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33, 63, 64, 65, 71, 130};
  for (int i = 0; i < (testing::kSanitized ? 8 : 40); ++i) {
    QgemmDescriptor d = descriptor();
    d.spec.group_size = testing::pick(random, kGroups);
    if (random() % 6 == 0)
      d.spec.granularity = random() % 2 == 0 ? Granularity::channel : Granularity::tensor;
    d.spec.scale_dtype = testing::pick(random, testing::kQgemmDTypes);
    d.spec.double_quant = random() % 4 == 0;
    testing::fit_format(d.spec);
    d.dtype = testing::pick(random, testing::kQgemmDTypes);
    d.bias = random() % 2 == 0;
    d.accumulate = random() % 2 == 0;
    if (random() % 2 == 0) d.alignment = size_of(d.dtype);
    testing::set_random_extents(random, d, testing::pick(random, kRows));
    if (testing::is_valid(d)) check(d, random());
  }
}

TEST_P(QgemmInt8, EveryGroupAndNumberOfRows) {
  std::mt19937_64 random(GetParam() + 100);
  for (const int64_t group : {16, 32, 64, 96, 128, 256})
    for (const int64_t m : {1, 2, 3, 4, 6, 8, 11, 70}) {
      QgemmDescriptor d = descriptor();
      d.spec.group_size = group;
      testing::fit_format(d.spec);
      d.m = m;
      d.n = 43;
      d.k = 713;
      if (testing::is_valid(d)) check(d, random());
    }
}

TEST_P(QgemmInt8, ViewsArePackedFirst) {
  QgemmDescriptor d = descriptor();
  d.spec.group_size = 64;
  testing::fit_format(d.spec);
  d.packed = false;
  d.m = 3;
  d.n = 40;
  d.k = 192;
  const QgemmCase test(d, GetParam());
  const testing::CpuRun run = testing::run_on_cpu(test, 2);
  EXPECT_TRUE(testing::near_reference(test, run.y, WeightRounding::code_rounded));
}

// With x of -127 to 127, of which each unit has the greatest, and scales that are powers of two, nothing is
// rounded: integers come out to the bit.
TEST_P(QgemmInt8, IntegersAreExact) {
  const Format of = format().format;
  if (of == Format::nf4 || of == Format::fp4) return;  // their values are rounded
  std::mt19937_64 random(GetParam() + 200);
  QgemmDescriptor d = descriptor();
  d.dtype = DType::f32;
  d.spec.scale_dtype = DType::f32;
  testing::fit_format(d.spec);
  d.m = 5;
  d.n = 70;
  d.k = 300;
  QgemmCase test(d, random(), testing::QgemmData::integers);
  auto* const x = reinterpret_cast<float*>(test.x.bytes.data());
  for (int64_t i = 0; i < d.m * d.k; ++i)
    x[i] = i % d.k % 64 == 0 ? 127 : static_cast<float>(static_cast<int>(random() % 255) - 127);
  testing::for_each_target([&](const char* target) {
    SCOPED_TRACE(target);
    EXPECT_TRUE(testing::near_reference(test, testing::run_on_cpu(test, 1).y, WeightRounding::none,
                                        testing::QgemmData::integers));
  });
}

INSTANTIATE_TEST_SUITE_P(, QgemmInt8, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

// The bound of docs/qgemm.md against the product with x and weights as they are.
TEST(QgemmInt8Error, IsWithinTheBound) {
  std::mt19937_64 random(1);
  for (const Format format :
       {Format::nf4, Format::fp4, Format::int4, Format::affine4, Format::int8, Format::nvfp4}) {
    QgemmDescriptor d{.m = 4, .n = 48, .k = 512, .dtype = DType::f32, .math = QgemmMath::int8};
    d.spec.format = format;
    testing::fit_format(d.spec);
    const QgemmCase test(d, random());
    const std::vector<uint8_t> y = testing::run_on_cpu(test, 1).y;
    QgemmProblem exact = test.problem;
    exact.math = QgemmMath::automatic;
    const auto* const x = reinterpret_cast<const float*>(test.x.bytes.data());
    const Int8Table table = int8_table(test.problem.codec);
    double worst_of_values = 0;
    if (test.problem.codec.kind == formats::Kind::table)
      for (size_t code = 0; code < 16; ++code)
        worst_of_values =
            std::max(worst_of_values,
                     std::fabs(static_cast<double>(table.values[code]) * static_cast<double>(table.unit) -
                               static_cast<double>(test.problem.codec.book.values[code])));
    for (int64_t m = 0; m < d.m; ++m)
      for (int64_t row = 0; row < d.n; ++row) {
        double expected = 0, bound = 0;
        for (int64_t unit = 0; unit < d.k; unit += 64) {
          double most = 0;
          for (int64_t col = unit; col < unit + 64; ++col)
            most = std::max(most, static_cast<double>(std::fabs(x[m * d.k + col])));
          for (int64_t col = unit; col < unit + 64; ++col) {
            const double weight =
                reference_weight(exact, test.tensors(), row, col, WeightRounding::none).value;
            const double scale = std::fabs(load_group<double>(exact, test.tensors(), row, col).scale);
            const auto of_x = static_cast<double>(x[m * d.k + col]);
            expected += of_x * weight;
            bound += most / 254 * (std::fabs(weight) + scale * worst_of_values) +
                     std::fabs(of_x) * scale * worst_of_values;
          }
        }
        const auto actual = load_element<double>(y.data(), m * d.n + row, DType::f32);
        EXPECT_LE(std::fabs(actual - expected), bound * 1.001) << info(format).name;
      }
  }
}

TEST(QgemmInt8X, ScalesOfEveryMagnitude) {
  EXPECT_EQ(int8_scale(127).scale, 1);
  EXPECT_EQ(int8_scale(127).reciprocal, 1);
  EXPECT_EQ(int8_scale(0).scale, 0x1p-100f / 127);
  EXPECT_EQ(int8_scale(0x1p-126f).scale, int8_scale(0).scale);
  EXPECT_TRUE(std::isfinite(int8_scale(std::numeric_limits<float>::max()).reciprocal));
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_TRUE(std::isnan(int8_scale(bad).scale));
    EXPECT_EQ(int8_scale(bad).reciprocal, 0);
  }
  // Nothing is rounded to more than 127.
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; ++i) {
    const auto most = std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7F800000));
    if (most < 0x1p-100f) continue;
    EXPECT_EQ(std::nearbyint(most * int8_scale(most).reciprocal), 127) << most;
  }
}

TEST(QgemmInt8X, NanAndInfinityGiveNanInTheirRow) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    QgemmDescriptor d{.m = 3, .n = 40, .k = 130, .dtype = DType::f32, .math = QgemmMath::int8};
    d.spec.format = Format::int4;
    QgemmCase test(d, 1);
    reinterpret_cast<float*>(test.x.bytes.data())[d.k + 129] = bad;
    for (const char* variant : {"qgemm_int8", "qgemm_ref"}) {
      if (!testing::reason_of(variant, d).empty()) continue;
      test.descriptor.variant = variant;
      const std::vector<uint8_t> y = testing::run_on_cpu(test, 1).y;
      for (int64_t i = 0; i < d.m * d.n; ++i)
        EXPECT_EQ(std::isnan(load_element<float>(y.data(), i, DType::f32)), i / d.n == 1) << variant;
    }
  }
}

// Tiles of AMX, simulated: few machines have them. Where one does, the tests above are of its own.
class QgemmInt8Tiles : public QgemmInt8 {
 protected:
  QgemmInt8Tiles() { set_int8_tiles(&kSimulated); }
  ~QgemmInt8Tiles() override { set_int8_tiles(nullptr); }

  static inline std::atomic<int> num_sums = 0, num_begun = 0, num_ended = 0;

 private:
  static inline thread_local bool is_begun = false;
  static inline thread_local uint8_t unit[64 * 32];

  static constexpr Int8Tiles kSimulated = {
      [] {
        EXPECT_FALSE(is_begun);
        is_begun = true;
        ++num_begun;
      },
      [] {
        EXPECT_TRUE(is_begun);
        is_begun = false;
        ++num_ended;
      },
      [](const uint8_t* weight) { std::memcpy(unit, weight, sizeof unit); },
      [](const int8_t* x, int32_t* to) {
        EXPECT_TRUE(is_begun);
        ++num_sums;
        for (int i = 0; i < Int8Tiles::kXRows; ++i)
          for (int row = 0; row < 32; ++row) {
            int32_t sum = 0;
            for (int col = 0; col < 64; ++col)
              sum += unit[col / 4 * 128 + 4 * row + col % 4] * x[64 * i + col];
            to[32 * i + row] = sum;
          }
      }};
};

TEST_P(QgemmInt8Tiles, GiveTheBytesOfTheReference) {
  bool has_bytes_of_words = false;  // the one target that takes tiles
  testing::for_each_target([&](const char* target) {
    if (std::string_view(target) == "AVX3_DL") has_bytes_of_words = true;
  });
  std::mt19937_64 random(GetParam() + 200);
  for (const int64_t group : {32, 64})  // of 32 columns the products are no tiles
    for (const int64_t m : {9, 16, 17, 67}) {
      QgemmDescriptor d = descriptor();
      d.spec.group_size = group;
      testing::fit_format(d.spec);
      d.m = m;
      d.n = 75;
      d.k = 713;
      num_sums = 0;
      if (!testing::is_valid(d)) continue;
      check(d, random());
      if (has_bytes_of_words && d.spec.group_size % 64 == 0) {
        EXPECT_GT(num_sums, 0);
      }
    }
  EXPECT_EQ(num_begun, num_ended);
}
INSTANTIATE_TEST_SUITE_P(, QgemmInt8Tiles, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

TEST(QgemmPlan, Int8Refuses) {
  QgemmDescriptor d{.m = 3, .n = 64, .k = 128, .math = QgemmMath::int8};
  d.transposed = true;
  EXPECT_THROW(check_descriptor(d), Error);
  d.transposed = false;
  check_descriptor(d);
  EXPECT_EQ(testing::reason_of("qgemm_simd", d), "math must not be int8");
  d.spec.format = Format::fp8;
  testing::fit_format(d.spec);
  EXPECT_THROW(check_descriptor(d), Error);
  d = {.m = 3, .n = 64, .k = 128};
  EXPECT_EQ(testing::reason_of("qgemm_int8", d), "math must be int8, got auto");
  d.math = QgemmMath::int8;
  d.spec.group_size = 100;
  const std::string reason = testing::reason_of("qgemm_int8", d);
  if (reason == "the CPU has none of the vectors that it is compiled for") return;
  EXPECT_EQ(reason, "groups must be multiples of 16 columns, or rows, got 100");
}

}  // namespace
}  // namespace halfbyte
