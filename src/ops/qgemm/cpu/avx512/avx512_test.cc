#include "cpu/features.h"
#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;
using testing::QgemmData;

class QgemmAvx512 : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (!cpu_features().avx512_bf16) GTEST_SKIP() << "the CPU has no AVX-512 with bf16 products";
  }
  QgemmDescriptor descriptor(bool transposed) const {
    QgemmDescriptor d;
    d.spec = testing::qgemm_formats()[GetParam()];
    d.transposed = transposed;
    d.variant = "qgemm_avx512";
    return d;
  }
  // Of 4 bits, forward: whether padding to 16 rows would be a tenth of them.
  static bool is_looked_up(int64_t m) { return m <= 28 || (m <= 68 && 10 * m <= 9 * ((m + 15) / 16 * 16)); }
  // Within the bound, and the same bytes again and for every number of threads.
  static void check(QgemmDescriptor d, uint64_t seed, QgemmData data = QgemmData::random) {
    testing::fit_format(d.spec);
    if (!testing::is_valid(d)) return;
    const bool short_groups = d.spec.granularity == Granularity::group
                                  ? d.spec.group_size == 16
                                  : d.spec.granularity == Granularity::channel && d.k == 16;
    const int bits = info(d.spec.format).bits;
    if ((short_groups && bits != 4) || (d.transposed && d.spec.format == Format::affine6 && d.m <= 4))
      return;  // not taken
    const QgemmCase test(d, seed, data);
    const testing::CpuRun run = testing::run_on_cpu(test, 1);
    const bool symmetric = !d.spec.asymmetric && !has_biases(d.spec) && !d.spec.double_quant;
    const bool scales_weights =
        d.transposed ? !(short_groups && symmetric && d.m <= 4) : short_groups && !is_looked_up(d.m);
    EXPECT_EQ(run.guarantee.weight_rounding,
              scales_weights ? WeightRounding::weight_rounded : WeightRounding::code_rounded);
    EXPECT_TRUE(testing::near_reference(test, run.y, run.guarantee.weight_rounding, data));
    testing::expect_same_bytes(test, run.y, {1, 2, 5});
  }
};

TEST_P(QgemmAvx512, IsNearTheReference) {
  std::mt19937_64 random(GetParam());
  constexpr int64_t kGroups[] = {16, 32, 64, 128, 256, 192, 320};
  constexpr int64_t kRows[] = {1,  2,  3,  4,  5,  8,  9,  12, 16, 17, 23,  28,
                               29, 31, 33, 43, 48, 50, 64, 65, 68, 69, 127, 130};
  for (int i = 0; i < (testing::kSanitized ? 8 : 40); ++i) {
    QgemmDescriptor d = descriptor(i % 2 == 0);
    d.spec.group_size = testing::pick(random, kGroups);
    if (random() % 6 == 0)
      d.spec.granularity = random() % 2 == 0 ? Granularity::channel : Granularity::tensor;
    d.spec.scale_dtype = testing::pick(random, testing::kQgemmDTypes);
    d.spec.double_quant = random() % 4 == 0;
    d.bias = !d.transposed && random() % 2 == 0;
    d.accumulate = random() % 2 == 0;
    if (random() % 2 == 0) d.alignment = 2;
    testing::set_random_extents(random, d, testing::pick(random, kRows));
    check(d, random());
  }
}

// Every group with every regime, over weights of several strips and chunks; the last of them are not whole.
TEST_P(QgemmAvx512, EveryGroupAndNumberOfRows) {
  std::mt19937_64 random(GetParam() + 100);
  for (const int64_t group : {16, 32, 64, 128, 256})
    for (const bool transposed : {false, true})
      for (const int64_t m : {1, 2, 4, 7, 11, 26, 40, 45, 70}) {
        QgemmDescriptor d = descriptor(transposed);
        d.spec.group_size = group;
        d.m = m;
        d.n = transposed ? 171 : 43;
        d.k = transposed ? 100 : 713;
        check(d, random());
      }
}

// Integers times powers of two: f32 sums are exact, and so is the result but for the rounding of the output.
TEST_P(QgemmAvx512, IntegersAreExact) {
  const Format format = testing::qgemm_formats()[GetParam()].format;
  if (format == Format::nf4 || format == Format::fp4) return;  // their values are not short
  std::mt19937_64 random(GetParam() + 200);
  for (int i = 0; i < 16; ++i) {
    QgemmDescriptor d = descriptor(i % 2 == 0);
    d.accumulate = i % 3 == 0;
    testing::set_random_extents(random, d);
    check(d, random(), QgemmData::integers);
  }
}

INSTANTIATE_TEST_SUITE_P(, QgemmAvx512, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

TEST(QgemmPlan, Avx512Refuses) {
  const auto reason = [](auto change) {
    QgemmDescriptor d;
    d.m = 3;
    d.n = 64;
    d.k = 128;
    change(d);
    return testing::reason_of("qgemm_avx512", d);
  };
  using D = QgemmDescriptor;
  if (!cpu_features().avx512_bf16) {
    EXPECT_EQ(reason([](D&) {}), "the CPU does not have AVX-512 with products of bf16");
    return;
  }
  EXPECT_EQ(reason([](D&) {}), "");
  EXPECT_EQ(reason([](D& d) { d.dtype = DType::f16; }), "dtype must be bf16, got f16");
  EXPECT_EQ(reason([](D& d) { d.packed = false; }), "");  // the view is packed first
  EXPECT_EQ(reason([](D& d) { d.spec.group_size = 100; }),
            "groups must be rows, 16 (of 4 bits), 32 or a multiple of 64 columns, got 100");
  EXPECT_EQ(reason([](D& d) { d.spec.format = Format::affine3; }), "");
  EXPECT_EQ(reason([](D& d) { d.spec.format = Format::affine6; }), "");
  EXPECT_EQ(reason([](D& d) {
              d.spec.format = Format::affine6;
              d.transposed = true;
            }),
            "m must be above 4 for transposed products of 6 bits with biases, got 3");
  EXPECT_EQ(reason([](D& d) { d.k = 0; }), "there is nothing to sum");
}

}  // namespace
}  // namespace halfbyte
