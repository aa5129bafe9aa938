#include "cpu/features.h"
#include "ops/qgemm/qgemm_bf16_decode.h"
#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;

constexpr int64_t kGroups[] = {32, 64, 128, 256, 192};

// What a code alone stands for, rounded to bf16.
double value_of(const QgemmCase& test, int64_t row, int64_t col) {
  const formats::Codec& codec = test.problem.codec;
  const int code = load_code(test.problem, test.tensors(), row, col);
  if (codec.kind == formats::Kind::table)
    return round_to(static_cast<double>(codec.book.values[code]), DType::bf16);
  if (codec.kind == formats::Kind::affine) return code;
  return code + codec.q_min - load_group<double>(test.problem, test.tensors(), row, col).zero_point;
}

// Every value of every unit, of both forms, against the scalar definition; padding: zeros, or finite values.
template <bool kTransposed>
void check_decode(const QgemmDescriptor& d, WeightRounding rounding, uint64_t seed) {
  const QgemmCase test(d, seed);
  const QgemmTensors tensors = test.tensors();
  testing::GuardedMemory packed(test.packed, 256);
  QgemmTensors guarded = tensors;
  guarded.weight = packed.data();
  UnitDecoder decoder(test.problem, guarded, rounding);
  int64_t num_bad = 0;
  for (int64_t strip = 0; strip < test.problem.weight.strips; ++strip)
    for (int64_t unit = 0; unit < (d.k + 63) / 64; ++unit) {
      Bf16Tile tiles[2][2];
      std::memset(tiles, 0xFF, sizeof tiles);
      decoder.select(strip, unit);
      decoder.decode<kTransposed>(0, 5, tiles[0], tiles[1]);
      decoder.decode<kTransposed>(5, 16, tiles[0], tiles[1]);
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
              if (row < d.n && col < d.k)
                good = actual == (rounding == WeightRounding::weight_rounded
                                      ? reference_weight(test.problem, tensors, row, col, rounding).value
                                      : value_of(test, row, col));
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
        testing::set_random_extents(random, d);
        if (!testing::is_valid(d)) continue;
        for (const auto rounding : {WeightRounding::code_rounded, WeightRounding::weight_rounded}) {
          check_decode<false>(d, rounding, random());
          check_decode<true>(d, rounding, random());
        }
      }
}

INSTANTIATE_TEST_SUITE_P(, QgemmBf16Decode, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

}  // namespace
}  // namespace halfbyte
