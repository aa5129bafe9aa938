#ifdef __x86_64__

#include "cpu/features.h"
#include "ops/qgemm/cpu/amx/amx-inl.h"
#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;

constexpr int64_t kGroups[] = {16, 32, 64, 128, 256, 192};

// What a code alone stands for, rounded to bf16.
double value_of(const QgemmCase& test, int64_t row, int64_t col) {
  const formats::Codec& codec = test.problem.codec;
  const int code = load_code(test.problem, test.tensors(), row, col);
  if (codec.kind == formats::Kind::table)
    return round_to(static_cast<double>(codec.book.values[code]), DType::bf16);
  if (codec.kind == formats::Kind::affine) return code;
  if (codec.kind == formats::Kind::floating)
    return static_cast<double>(formats::e4m3_to_f32(static_cast<uint8_t>(code)));
  return code + codec.q_min - load_group<double>(test.problem, test.tensors(), row, col).zero_point;
}

// Every value of every unit, of both forms, against the scalar definition. Weights of groups that are all
// padding are 0, other padding is finite.
template <bool kTransposed>
void check_decode(const QgemmCase& test, WeightRounding rounding) {
  const QgemmDescriptor& d = test.descriptor;
  const formats::PackedLayout& layout = test.problem.weight;
  const QgemmTensors tensors = test.tensors();
  testing::GuardedMemory packed(test.packed, 256);
  QgemmTensors guarded = tensors;
  guarded.weight = packed.data();
  UnitDecoder decoder(test.problem, guarded, rounding);
  int64_t num_bad = 0;
  for (int64_t strip = 0; strip < layout.strips; ++strip)
    for (int64_t unit = 0; unit < (d.k + 63) / 64; ++unit) {
      Bf16Tile tiles[2][2];
      std::memset(tiles, 0xFF, sizeof tiles);
      decoder.select(strip, unit);
      decoder.decode<kTransposed>(0, 1, tiles[0], tiles[1]);
      decoder.decode<kTransposed>(1, 4, tiles[0], tiles[1]);
      for (int j = 0; j < 2; ++j)
        for (int i = 0; i < 2; ++i)
          for (int line = 0; line < 16; ++line)
            for (int at = 0; at < 32; ++at) {
              const int64_t row = strip * 32 + (kTransposed ? 2 * line + at % 2 : 16 * i + line);
              const int64_t col =
                  unit * 64 + (kTransposed ? transposed_column(j, i, at / 2)
                                           : forward_column(test.problem.codec.bits, j, at / 2, at % 2));
              const auto actual = static_cast<double>(formats::bf16_to_f32(tiles[j][i].lines[line][at]));
              bool good = std::isfinite(actual);
              const bool weight_rounded = rounding == WeightRounding::weight_rounded;
              if (row < d.n && col < d.k)
                good = actual ==
                       (weight_rounded
                            ? round_to(reference_weight(test.problem, tensors, row, col, rounding).value *
                                           load_global_scale(test.problem, tensors),
                                       DType::bf16)
                            : value_of(test, row, col));
              else if (weight_rounded &&
                       (row >= d.n || (layout.inlined && col >= layout.groups * layout.group)))
                good = actual == 0;
              if (!good && num_bad++ == 0)
                ADD_FAILURE() << testing::describe(d) << ": [" << row << ", " << col << "] is " << actual;
            }
    }
  EXPECT_EQ(num_bad, 0);
}

class QgemmBf16Decode : public ::testing::TestWithParam<size_t> {};

TEST_P(QgemmBf16Decode, IsTheDefinition) {
  if (!cpu_features().avx512_bf16) GTEST_SKIP() << "needs AVX-512 with BF16";
  std::mt19937_64 random(GetParam());
  for (const int64_t group : kGroups)
    for (const DType scale_dtype : {DType::f32, DType::f16, DType::bf16})
      for (const bool double_quant : {false, true}) {
        QgemmDescriptor d;
        d.spec = testing::qgemm_formats()[GetParam()];
        d.spec.group_size = group;
        d.spec.scale_dtype = scale_dtype;
        d.spec.double_quant = double_quant;
        if (random() % 4 == 0) d.spec.granularity = Granularity::channel;
        testing::fit_format(d.spec);
        testing::set_random_extents(random, d);
        if (!testing::is_valid(d)) continue;
        if (info(d.spec.format).bits != 4 && (group == 16 || d.k == 16)) continue;  // not taken
        for (const auto rounding : {WeightRounding::code_rounded, WeightRounding::weight_rounded}) {
          check_decode<false>(QgemmCase(d, random()), rounding);
          check_decode<true>(QgemmCase(d, random()), rounding);
        }
      }
}

// Products halfway between two values of bf16, and biases too small to show beside them in f32: they decide.
TEST(QgemmBf16DecodeAffine, IsRoundedOnce) {
  if (!cpu_features().avx512_bf16) GTEST_SKIP() << "needs AVX-512 with BF16";
  for (const Format format : {Format::affine4, Format::affine8}) {
    QgemmDescriptor d;
    d.spec.format = format;
    d.m = 1;
    d.n = d.k = 64;
    QgemmCase test(d, 1);
    for (int64_t row = 0; row < d.n; ++row) {
      const float scale = row % 4 < 2 ? 129 : -131, bias = row % 2 == 0 ? 0x1p-30f : -0x1p-30f;
      std::memcpy(test.packed.data() + test.problem.weight.scale(row, 0), &scale, sizeof scale);
      std::memcpy(test.packed.data() + test.problem.weight.bias(row, 0), &bias, sizeof bias);
    }
    check_decode<false>(test, WeightRounding::weight_rounded);
    check_decode<true>(test, WeightRounding::weight_rounded);
  }
}

INSTANTIATE_TEST_SUITE_P(, QgemmBf16Decode, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

// ---- Products, with tiles that are emulated, and those of the machine if it has them

// The instructions of AMX as its manual has them: products of even and of odd elements are summed apart, by
// fma to nearest even; then the two sums are added, and that to the tile. What is less than 2^-126 is 0.
class EmulatedTiles {
 public:
  explicit EmulatedTiles(int line_bytes = 64) : line_bytes_(line_bytes) {}

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof tiles_[kTile]);
  }
  template <int kTile, class Tile>
  void load(const Tile& tile) {
    static_assert(sizeof(Tile) == sizeof tiles_[kTile]);
    std::memcpy(tiles_[kTile], &tile, sizeof tile);
  }
  template <int kTile>
  void store(F32Tile& tile) {
    std::memcpy(&tile, tiles_[kTile], sizeof tile);
  }
  template <int kTile>
  void load_columns(const uint32_t* from) {
    zero<kTile>();
    for (size_t line = 0; line < 16; ++line)
      std::memcpy(tiles_[kTile] + 64 * line, from + line * line_bytes_ / 4, line_bytes_);
  }
  template <int kTile>
  void store_columns(float* to) {
    for (size_t line = 0; line < 16; ++line)
      std::memcpy(to + line * line_bytes_ / 4, tiles_[kTile] + 64 * line, line_bytes_);
  }
  template <int kSum, int kA, int kB>
  HALFBYTE_AVX512 void multiply() {  // for the speed of its fma
    F32Tile sum;
    Bf16Tile a, b;
    store<kSum>(sum);
    std::memcpy(&a, tiles_[kA], sizeof a);
    std::memcpy(&b, tiles_[kB], sizeof b);
    for (int line = 0; line < 16; ++line) {
      float sums[16][2] = {};
      for (int pair = 0; pair < 16; ++pair)
        for (int i = 0; i < 2; ++i) {
          const float x = flushed(formats::bf16_to_f32(a.lines[line][2 * pair + i]));
          for (int col = 0; col < 16; ++col)
            sums[col][i] = flushed(
                __builtin_fmaf(x, flushed(formats::bf16_to_f32(b.lines[pair][2 * col + i])), sums[col][i]));
        }
      for (int col = 0; col < 16; ++col) {
        float& to = sum.lines[line][col];
        to = flushed(flushed(to) + flushed(sums[col][0] + sums[col][1]));
      }
    }
    load<kSum>(sum);
  }

 private:
  HALFBYTE_AVX512 static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? x * 0 : x; }
  size_t line_bytes_;  // of a line of tiles of columns
  uint8_t tiles_[8][1024];
};

std::vector<uint8_t> run_kernel(const QgemmCase& test, const QgemmKernel& kernel) {
  return testing::run_guarded(
      test, kernel.workspace_bytes(),
      [&](const QgemmTensors& tensors, void* workspace) { kernel.run(tensors, nullptr, workspace); });
}

// Within the bound and the same for every number of threads, of emulated tiles and of those of the machine.
void check_product(const QgemmDescriptor& d, uint64_t seed,
                   testing::QgemmData data = testing::QgemmData::random) {
  const QgemmCase test(d, seed, data);
  ASSERT_EQ(refuse_amx(test.problem), "") << testing::describe(d);
  const auto check = [&](const char* tiles, const auto& make) {
    QgemmProblem problem = test.problem;
    problem.num_threads = 1;
    const std::shared_ptr<const QgemmKernel> kernel = make(problem);
    const std::vector<uint8_t> y = run_kernel(test, *kernel);
    EXPECT_TRUE(testing::near_reference(test, y, kernel->guarantee().weight_rounding, data)) << tiles;
    problem.num_threads = 3;
    EXPECT_TRUE(y == run_kernel(test, *make(problem)))
        << testing::describe(d) << ": with 3 threads, " << tiles;
  };
  check("emulated", [](const QgemmProblem& problem) {
    return std::make_shared<AmxKernel<EmulatedTiles>>(problem, "emulated");
  });
  if (cpu_features().amx_bf16) check("of the machine", kQgemmAmx.run);
}

QgemmDescriptor descriptor(int64_t m, int64_t n, int64_t k, bool transposed) {
  QgemmDescriptor d;
  d.m = m;
  d.n = n;
  d.k = k;
  d.transposed = transposed;
  d.alignment = 2;
  return d;
}

class QgemmAmx : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (!cpu_features().avx512_bf16) GTEST_SKIP() << "needs AVX-512 with BF16";
  }
  QgemmDescriptor random_descriptor(std::mt19937_64& random) const {
    QgemmDescriptor d;
    QgemmProblem problem;
    do {
      d = testing::random_qgemm(random, testing::qgemm_formats()[GetParam()], true);
      testing::set_random_extents(random, d);
      d.alignment = 2;
      d.dtype = DType::bf16;
      d.math = QgemmMath::automatic;
      if (random() % 4 == 0) d.spec.group_size = 192;
      testing::fit_format(d.spec);
    } while (!testing::is_valid(d) || !refuse_amx(make_qgemm_problem({}, d, 1)).empty());
    return d;
  }
};

TEST_P(QgemmAmx, IsNearTheReference) {
  std::mt19937_64 random(GetParam());
  for (int i = 0; i < (testing::kSanitized ? 6 : 30); ++i) check_product(random_descriptor(random), random());
}

TEST_P(QgemmAmx, IntegersAreExact) {
  if (testing::qgemm_formats()[GetParam()].format == Format::nf4 ||
      testing::qgemm_formats()[GetParam()].format == Format::fp4)
    return;  // their values are not short
  std::mt19937_64 random(GetParam() + 100);
  for (int i = 0; i < (testing::kSanitized ? 3 : 10); ++i)
    check_product(random_descriptor(random), random(), testing::QgemmData::integers);
}

// Forward, the codes of few rows are rounded alone: tiles of every number of columns and of groups at once,
// one and two of them, and what is too much.
TEST_P(QgemmAmx, OneAndTwoTilesOfRows) {
  std::mt19937_64 random(GetParam() + 200);
  for (const int64_t group : {16, 32, 64, 128, 192, 1 << 20})
    for (const int64_t m : {1, 2, 3, 5, 8, 9, 15, 16, 17, 32, 33}) {
      if (testing::kSanitized && random() % 4 != 0) continue;
      QgemmDescriptor d = random_descriptor(random);
      d.m = m;
      d.n = 33 + static_cast<int64_t>(random() % 40);
      d.k = 40 + static_cast<int64_t>(random() % 700);
      d.transposed = false;
      d.spec.group_size = group;
      if (group > d.k) d.spec.granularity = Granularity::channel;
      testing::fit_format(d.spec);
      if (testing::is_valid(d) && refuse_amx(make_qgemm_problem({}, d, 1)).empty())
        check_product(d, random());
    }
}

// Transposed, one tile of rows: units take turns, of which a thread has one, some, or too many for a turn. x
// of very few is multiplied with the scales, in three parts: codes are rounded alone, too.
TEST_P(QgemmAmx, TransposedFewRows) {
  std::mt19937_64 random(GetParam() + 300);
  for (const int64_t group : {16, 64, 128, 192, 1 << 20})
    for (const int64_t m : {1, 2, 3, 4, 5, 6, 11, 16, 17}) {
      if (testing::kSanitized && random() % 4 != 0) continue;
      QgemmDescriptor d = random_descriptor(random);
      d.m = m;
      d.n = random() % 4 == 0 ? 1 + static_cast<int64_t>(random() % 4)
                              : 33 + static_cast<int64_t>(random() % 300);
      d.k = 40 + static_cast<int64_t>(random() % (random() % 5 == 0 ? 1500 : 300));
      d.transposed = true;
      d.spec.group_size = group;
      if (group > d.k) d.spec.granularity = Granularity::channel;
      testing::fit_format(d.spec);
      if (!testing::is_valid(d) || !refuse_amx(make_qgemm_problem({}, d, 1)).empty()) continue;
      const QgemmProblem problem = make_qgemm_problem({}, d, 1);
      const bool has_parts = m <= 5 && d.n >= 3 && problem.codec.bits == 4 && !problem.codec.asymmetric &&
                             !problem.weight.has_biases &&
                             (problem.group >= 64 || problem.weight.groups == 1);
      EXPECT_EQ(AmxKernel<EmulatedTiles>(problem, "").guarantee().weight_rounding,
                has_parts ? WeightRounding::code_rounded : WeightRounding::weight_rounded)
          << testing::describe(d);
      check_product(d, random());
    }
}

INSTANTIATE_TEST_SUITE_P(, QgemmAmx, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

// What is not finite stays what it is: parts of it are not taken away from each other.
TEST(QgemmAmxBlocks, TransposedFewRowsOfInfinity) {
  if (!cpu_features().avx512_bf16) GTEST_SKIP() << "needs AVX-512 with BF16";
  QgemmCase test(descriptor(2, 40, 64, true), 1);
  auto* const x = reinterpret_cast<uint16_t*>(test.x.bytes.data());
  x[3] = 0x7F80;       // infinity, of the first row
  x[40 + 5] = 0x7FC0;  // NaN, of the second
  const AmxKernel<EmulatedTiles> kernel(test.problem, "emulated");
  const std::vector<uint8_t> y = run_kernel(test, kernel);
  const auto* const values = reinterpret_cast<const uint16_t*>(y.data());
  int num_infinite = 0;
  for (int i = 0; i < 64; ++i) {
    num_infinite += (values[i] & 0x7FFF) == 0x7F80;
    EXPECT_TRUE(std::isnan(formats::bf16_to_f32(values[64 + i])));
  }
  EXPECT_GT(num_infinite, 50);  // all but those of a code that is 0
}

// More than one task along every axis, blocks of as many tiles as there may be, and not quite.
TEST(QgemmAmxBlocks, Large) {
  if (!cpu_features().avx512_bf16) GTEST_SKIP() << "needs AVX-512 with BF16";
  for (const auto& [m, n, k, transposed] : {std::tuple{8, 70, 1500, false},
                                            {40, 1070, 290, false},
                                            {530, 70, 330, false},
                                            {1050, 33, 40, false},
                                            {8, 1500, 70, true},
                                            {40, 290, 1070, true},
                                            {530, 330, 100, true}})
    check_product(descriptor(m, n, k, transposed), 1);
}

TEST(QgemmAmxBlocks, Refuses) {
  const auto reason = [](auto change) {
    QgemmDescriptor d = descriptor(1, 64, 300, false);
    change(d);
    return refuse_amx(make_qgemm_problem({}, d, 1));
  };
  using D = QgemmDescriptor;
  EXPECT_EQ(reason([](D&) {}), "");
  EXPECT_EQ(reason([](D& d) { d.dtype = DType::f16; }), "dtype must be bf16, got f16");
  EXPECT_EQ(reason([](D& d) { d.dtype = DType::f32; }), "dtype must be bf16, got f32");
  EXPECT_EQ(reason([](D& d) { d.packed = false; }), "the weight must be packed");
  EXPECT_EQ(reason([](D& d) { d.spec.group_size = 100; }),
            "groups must be rows, 16 (of 4 bits), 32 or a multiple of 64 columns, got 100");
  EXPECT_EQ(reason([](D& d) { d.spec.format = Format::affine3; }), "");
  EXPECT_EQ(reason([](D& d) { d.k = 0; }), "there is nothing to sum");
  EXPECT_EQ(reason([](D& d) { d.k = int64_t{1} << 31; }), "k must be at most 2147483647, got 2147483648");
  if (cpu_features().amx_bf16) return;
  EXPECT_EQ(testing::reason_of("qgemm_amx", descriptor(1, 64, 300, false)),
            "the CPU does not have AMX tiles of bf16, or the system does not give them to this process");
}

}  // namespace
}  // namespace halfbyte

#endif  // __x86_64__
