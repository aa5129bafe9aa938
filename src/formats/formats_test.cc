#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/format.h"
#include "formats/bits.h"
#include "formats/codec.h"
#include "formats/pairwise.h"
#include "halfbyte/error.hpp"

namespace halfbyte {
namespace {

using namespace formats;

TEST(Convert, Every16BitValueRoundTrips) {
  for (uint32_t v = 0; v < 0x10000; ++v) {
    const auto bits = static_cast<u16>(v);
    if ((bits & 0x7FFF) <= 0x7F80) {
      EXPECT_EQ(f32_to_bf16(bf16_to_f32(bits)), bits);
    }
    if ((bits & 0x7FFF) <= 0x7C00) {
      EXPECT_EQ(f32_to_f16(f16_to_f32(bits)), bits);
    }
    if ((bits & 0x7FFF) > 0x7F80) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(bf16_to_f32(bits)))));
    }
    if ((bits & 0x7FFF) > 0x7C00) {
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f16_to_f32(bits)))));
    }
  }
}

#ifdef __FLT16_MAX__
// The compiler's own half precision, an independent implementation.
TEST(Convert, F16EqualsTheCompilers) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2'000'000; ++i) {
    const auto x = bit_cast<float>(static_cast<u32>(random()));
    // Around the range of f16, ties between its neighbours included.
    const float y = std::ldexp(static_cast<float>(static_cast<int>(random() % 8192) - 4096),
                               static_cast<int>(random() % 44) - 36);
    const double z = std::ldexp(static_cast<double>(static_cast<int64_t>(random() >> 11)),
                                static_cast<int>(random() % 44) - 80);
    for (const float v : {x, y})
      if (!std::isnan(v)) {
        ASSERT_EQ(to_f16(v), __builtin_bit_cast(u16, static_cast<_Float16>(v))) << v;
      }
    ASSERT_EQ(to_f16(z), __builtin_bit_cast(u16, static_cast<_Float16>(z))) << z;
  }
}
#endif

TEST(Convert, F64RoundsOnceTo16Bits) {
  // 1 + 2^-8 is the tie between two bf16; a little more or less than that is lost by a first rounding to f32.
  EXPECT_EQ(to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3F81);
  EXPECT_EQ(to_bf16(1 + 0x1p-8 - 0x1p-40), 0x3F80);
  EXPECT_EQ(to_bf16(1 + 0x1p-8), 0x3F80);
  EXPECT_EQ(to_bf16(-(1 + 0x1p-8 + 0x1p-40)), 0xBF81);
  EXPECT_EQ(to_f16(1 + 0x1p-11 + 0x1p-40), 0x3C01);
  EXPECT_EQ(to_f16(1 + 0x1p-11 - 0x1p-40), 0x3C00);
}

TEST(Common, RoundHalfEvenEqualsNearbyint) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto x = bit_cast<float>(static_cast<u32>(random()));
    const auto y = static_cast<float>(static_cast<int>(random() % 2000) - 1000) / 2;
    for (const float v : {x, y})
      if (!std::isnan(v)) {
        ASSERT_EQ(round_half_even(v), std::nearbyint(v)) << v;
      }
    const double w = static_cast<double>(y) + 0x1p-40;
    ASSERT_EQ(round_half_even(w), std::nearbyint(w));
  }
  EXPECT_EQ(round_half_even(0.49999997f), 0.0f);
  EXPECT_EQ(next_below(1.0f), std::nextafter(1.0f, 0.0f));
  EXPECT_EQ(next_below(0.0f), -std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(next_below(-1.0), std::nextafter(-1.0, -2.0));
}

// S(begin, begin + 2m) by its definition.
float tree(const std::vector<float>& terms, size_t begin, size_t size) {
  if (begin >= terms.size()) return 0;
  if (size == 1) return terms[begin];
  const float left = tree(terms, begin, size / 2);
  return begin + size / 2 < terms.size() ? left + tree(terms, begin + size / 2, size / 2) : left;
}
TEST(Pairwise, SumsAreThoseOfTheTreeHoweverCut) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (size_t n = 0; n < 300; ++n) {
    std::vector<float> terms(n);
    for (float& term : terms) term = std::ldexp(normal(random), static_cast<int>(random() % 40));
    PairwiseSum<float> one, blocks;
    for (const float term : terms) one.add(term);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) blocks.add_block(tree({terms.data() + i, terms.data() + i + 8}, 0, 8), 3);
    for (; i < n; ++i) blocks.add(terms[i]);
    EXPECT_EQ(one.total(), tree(terms, 0, 512));
    EXPECT_EQ(blocks.total(), one.total());
  }
  PairwiseSum<float> zeros, bad;
  for (int i = 0; i < 5; ++i) zeros.add(-0.0f);
  EXPECT_EQ(bit_cast<u32>(zeros.total()), 0u);
  bad.add(-std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(bit_cast<u32>(bad.total()), 0x7FC00000u);
}

TEST(Bits, PackingIsALittleEndianBitStream) {
  std::mt19937 random(3);
  for (int bits = 2; bits <= 8; ++bits)
    for (int repeat = 0; repeat < 100; ++repeat) {
      u64 codes = 0, stream = 0;
      u8 bytes[8] = {};
      for (int i = 0; i < 8; ++i) {
        const u64 code = random() & ((1u << bits) - 1);
        codes |= code << (8 * i);
        if (i * bits < 64) stream |= code << (i * bits);
        put_code(bytes, i, bits, static_cast<int>(code));
      }
      EXPECT_EQ(pack8(codes, bits), stream);
      EXPECT_EQ(unpack8(stream, bits), codes);
      u64 from_bytes = 0;
      for (int i = 0; i < bits; ++i) from_bytes |= u64{bytes[i]} << (8 * i);
      EXPECT_EQ(from_bytes, stream);
      for (int i = 0; i < 8; ++i)
        EXPECT_EQ(get_code(bytes, i, bits), static_cast<int>((codes >> (8 * i)) & 0xFF));
    }
}

TEST(Tables, Nf4ValuesAndEdgesAreTheKnownBits) {
  const u32 values[16] = {0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F,
                          0xBDBA7871, 0x00000000, 0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A,
                          0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000};
  const u32 edges[15] = {0xBF591CD9, 0xBF1C5271, 0xBEEB8480, 0xBEADEA77, 0xBE703CED,
                         0xBE0D38BC, 0xBD3A7871, 0x3D22FAFF, 0x3DF64862, 0x3E5067E0,
                         0x3E9582D4, 0x3EC753F9, 0x3F006D03, 0x3F248DAF, 0x3F5C89D9};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(bit_cast<u32>(kNf4.values[i]), values[i]);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(bit_cast<u32>(kNf4.edges_f32[i]), edges[i]);
  EXPECT_EQ(kNf4.zero_code, 7);
}

// The rule by exhaustive distance, in exact arithmetic.
int nearest(const CodeBook& book, double y, Tie tie) {
  int best = -1;
  for (int code = 0; code < 16; ++code) {
    if (best < 0) {
      best = code;
      continue;
    }
    const double a = std::fabs(static_cast<double>(book.values[code]) - y);
    const double b = std::fabs(static_cast<double>(book.values[best]) - y);
    const bool same_value = book.values[code] == book.values[best];
    bool better = a < b;
    if (a == b && !same_value) {
      if (tie == Tie::lower) better = book.values[code] < book.values[best];
      if (tie == Tie::toward_zero) better = std::fabs(book.values[code]) < std::fabs(book.values[best]);
      if (tie == Tie::even) better = code % 2 == 0;
    }
    if (a == b && same_value) better = y < 0;  // the later of two zeros is for negative numbers
    if (better) best = code;
  }
  return best;
}

TEST(Tables, EncodingIsTheNearestValueWithTheTieRule) {
  const float user[16] = {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 1e4f, 3e9f};
  const CodeBook lut = make_code_book(user, Tie::lower);
  const struct {
    const CodeBook& book;
    Tie tie;
  } cases[] = {{kNf4, Tie::lower}, {kFp4, Tie::toward_zero}, {kFp4E2m1, Tie::even}, {lut, Tie::lower}};
  std::mt19937_64 random(4);
  for (const auto& [book, tie] : cases) {
    const auto check = [&, &book = book, tie = tie](float y) {
      // Distances of two f32 are exact in f64 unless the exponents are far apart.
      if (&book == &lut && std::fabs(y) > 100) return;
      ASSERT_EQ(table_encode(book, y), nearest(book, static_cast<double>(y), tie)) << y;
    };
    for (int i = 0; i < 15; ++i)
      for (float y = std::nextafter(std::nextafter(book.edges_f32[i], -INFINITY), -INFINITY), n = 0; n < 5;
           ++n, y = std::nextafter(y, INFINITY)) {
        check(y);
      }
    for (int i = 0; i < 15; ++i) {
      const double middle = book.edges_f64[i];
      EXPECT_EQ(table_rank(book, middle), i);
      EXPECT_EQ(table_rank(book, std::nextafter(middle, INFINITY)), i + 1);
    }
    for (int i = 0; i < 100'000; ++i)
      check(static_cast<float>(static_cast<double>(static_cast<int64_t>(random())) * 0x1p-63 *
                               static_cast<double>(book.max_magnitude)));
    check(0.0f);
    check(-0.0f);
  }
  EXPECT_EQ(table_encode(kFp4E2m1, 2.5f), 4);    // 2 and 3: codes 4 and 5
  EXPECT_EQ(table_encode(kFp4E2m1, -5.0f), 14);  // -4 and -6: codes 14 and 15
  EXPECT_EQ(table_encode(kFp4, 0.0f), 0);
  EXPECT_EQ(table_encode(kFp4, -1e-6f), 8);
  // Between 1e4 and 3e9 the midpoint needs more than 24 bits.
  EXPECT_EQ(table_encode(lut, 1500004992.0f), 14);
  EXPECT_EQ(table_encode(lut, 1500005120.0f), 15);
}

TEST(Codec, StoredScalesNeverBecomeZero) {
  EXPECT_EQ(stored_scale(1e-30f, ScaleType::f16), 0x1p-24f);
  EXPECT_EQ(stored_scale(-1e-30f, ScaleType::f16), -0x1p-24f);
  EXPECT_EQ(stored_scale(0x1p-149f, ScaleType::bf16), 0x1p-133f);
  EXPECT_EQ(stored_scale(1e-300, ScaleType::f32), 0x1p-149);
  EXPECT_EQ(stored_scale(0.0f, ScaleType::f16), 0.0f);
  EXPECT_EQ(nonzero_quotient(0x1p-149f, 7.0f), 0x1p-149f);
}

TEST(Spec, EveryFormatHasARowAndAWord) {
  EXPECT_EQ(all_formats().size(), 16u);
  for (const FormatInfo& format : all_formats()) {
    EXPECT_EQ(&find_format(format.name), &format);
    EXPECT_EQ(&info(format.format), &format);
  }
  try {
    find_format("nf5");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_NE(std::string(error.what()).find("unknown format 'nf5': must be one of nf4, fp4"),
              std::string::npos);
  }
  for (const ScaleRule rule : {ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max,
                               ScaleRule::minmax, ScaleRule::mlx_edge})
    EXPECT_EQ(parse_scale_rule(to_string(rule)), rule);
  EXPECT_THROW(parse_scale_rule("max"), Error);
  EXPECT_EQ(parse_dtype("bf16"), DType::bf16);
  EXPECT_THROW(parse_dtype("f8"), Error);
}

TEST(Spec, ShapesOfTheParts) {
  QuantSpec spec{.format = Format::int3, .group_size = 64};
  QuantShape shape = quant_shape(spec, 5, 100);
  EXPECT_EQ(shape.row_bytes, 38);
  EXPECT_EQ(shape.groups_per_row, 2);
  EXPECT_EQ(shape.num_groups, 10);
  spec.granularity = Granularity::channel;
  EXPECT_EQ(quant_shape(spec, 5, 100).num_groups, 5);
  spec.granularity = Granularity::tensor;
  EXPECT_EQ(quant_shape(spec, 5, 100).num_groups, 1);
  spec.granularity = Granularity::flat;
  shape = quant_shape(spec, 5, 100);
  EXPECT_EQ(shape.rows, 1);
  EXPECT_EQ(shape.code_bytes(), 188);
  EXPECT_EQ(shape.num_groups, 8);
  EXPECT_THROW(quant_shape(spec, -1, 4), Error);
  EXPECT_THROW(quant_shape(spec, int64_t{1} << 40, int64_t{1} << 40), Error);
}

TEST(TensorView, CountsAndContiguity) {
  EXPECT_EQ(num_elements({nullptr, DType::f32, {}, {}, {}}), 1);
  EXPECT_EQ(num_elements({nullptr, DType::f32, {3, 0, 5}, {}, {}}), 0);
  EXPECT_THROW(num_elements({nullptr, DType::f32, {-1}, {}, {}}), Error);
  EXPECT_THROW(num_elements({nullptr, DType::f32, {int64_t{1} << 40, int64_t{1} << 40}, {}, {}}), Error);
  EXPECT_TRUE(is_contiguous({nullptr, DType::f32, {3, 4}, {4, 1}, {}}));
  EXPECT_FALSE(is_contiguous({nullptr, DType::f32, {3, 4}, {1, 3}, {}}));
  EXPECT_TRUE(is_contiguous({nullptr, DType::f32, {1, 4}, {99, 1}, {}}));
}

}  // namespace
}  // namespace halfbyte
