#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <vector>

#include "core/format.h"
#include "formats/bits.h"
#include "formats/codec.h"
#include "formats/packed.h"
#include "formats/pairwise.h"
#include "halfbyte/error.hpp"
#include "halfbyte/qgemm.hpp"

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

#if defined(__FLT16_MAX__) || defined(__ARM_FP16_FORMAT_IEEE)
// The compiler's own half precision, an independent implementation.
#ifdef __ARM_FP16_FORMAT_IEEE
using Half = __fp16;
#else
using Half = _Float16;
#endif
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
        ASSERT_EQ(to_f16(v), __builtin_bit_cast(u16, static_cast<Half>(v))) << v;
      }
    ASSERT_EQ(to_f16(z), __builtin_bit_cast(u16, static_cast<Half>(z))) << z;
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
  for (int i = 0; i < 16; ++i) EXPECT_EQ(bit_cast<u32>(books::nf4.values[i]), values[i]);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(bit_cast<u32>(books::nf4.edges_f32[i]), edges[i]);
  EXPECT_EQ(books::nf4.zero_code, 7);
}

// Values by code, and codes on and around each middle of two values, of every format.
TEST(Tables, BooksAreThoseOfTheGoldenFile) {
  std::ifstream file(HALFBYTE_SOURCE_DIR "/tests/golden/formats.json");
  const auto golden = nlohmann::json::parse(file);
  const auto number = [](const std::string& hex) {
    return bit_cast<float>(static_cast<u32>(std::stoul(hex, nullptr, 16)));
  };
  for (const FormatInfo& format : all_formats()) {
    if (format.kind != FormatKind::table || format.format == Format::lut4) continue;
    const std::string key = std::string("table_") + format.name;
    ASSERT_TRUE(golden.contains(key)) << "tests/golden/formats.json has no " << key;
    const CodeBook& book = *code_book(format.format);
    for (size_t i = 0; i < 16; ++i)
      EXPECT_EQ(bit_cast<u32>(book.values[i]), bit_cast<u32>(number(golden[key]["values"].at(i))))
          << key << i;
    for (const auto& [hex, code] : golden[key]["codes"].items())
      EXPECT_EQ(table_encode(book, number(hex)), code.get<int>()) << key << " of " << number(hex);
  }
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
  const CodeBook lut = make_code_book(user, code_book(Format::lut4)->tie);
  std::vector<const CodeBook*> all;
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::table)
      all.push_back(format.format == Format::lut4 ? &lut : code_book(format.format));
  ASSERT_GE(all.size(), 4u);
  std::mt19937_64 random(4);
  for (const CodeBook* const tested : all) {
    const CodeBook& book = *tested;
    const auto check = [&](float y) {
      // Distances of two f32 are exact in f64 unless the exponents are far apart.
      if (&book == &lut && std::fabs(y) > 100) return;
      ASSERT_EQ(table_encode(book, y), nearest(book, static_cast<double>(y), book.tie)) << y;
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
  EXPECT_EQ(table_encode(books::fp4_e2m1, 2.5f), 4);    // 2 and 3: codes 4 and 5
  EXPECT_EQ(table_encode(books::fp4_e2m1, -5.0f), 14);  // -4 and -6: codes 14 and 15
  EXPECT_EQ(table_encode(books::fp4, 0.0f), 0);
  EXPECT_EQ(table_encode(books::fp4, -1e-6f), 8);
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

// By the definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; 2^(bits - 127).
TEST(Convert, TypesOfEightBits) {
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    double value = exponent == 0 ? mantissa * 0x1p-9 : std::ldexp(8 + mantissa, exponent - 10);
    if (bits & 128) value = -value;
    const auto byte = static_cast<u8>(bits);
    if ((bits & 127) == 127) {
      EXPECT_TRUE(std::isnan(e4m3_to_f32(byte)));
    } else {
      EXPECT_EQ(bit_cast<u32>(e4m3_to_f32(byte)), bit_cast<u32>(static_cast<float>(value))) << bits;
      EXPECT_EQ(int{to_e4m3(value)}, bits);
    }
    if (bits < 255) {
      EXPECT_EQ(e8m0_to_f32(byte), std::ldexp(1.0f, bits - 127));
      EXPECT_EQ(int{to_e8m0(std::ldexp(1.0f, bits - 127))}, bits);
      EXPECT_EQ(int{to_e8m0(std::ldexp(1.7499999, bits - 127))}, bits);
      EXPECT_EQ(int{to_e8m0(std::ldexp(1.75, bits - 127))}, bits + 1);
    }
    // Ties go to the even code, all else to the nearest.
    if (bits < 126) {
      const float below = e4m3_to_f32(byte), above = e4m3_to_f32(static_cast<u8>(bits + 1));
      const float middle = (below + above) / 2;
      EXPECT_EQ(int{to_e4m3(middle)}, bits % 2 == 0 ? bits : bits + 1);
      EXPECT_EQ(int{to_e4m3(std::nextafter(middle, 0.0f))}, bits);
      EXPECT_EQ(int{to_e4m3(std::nextafter(middle, 1e9f))}, bits + 1);
      EXPECT_EQ(int{to_e4m3(std::nextafter(static_cast<double>(-middle), -1e9))}, bits + 1 + 128);
    }
  }
  EXPECT_EQ(to_e4m3(464.0f), 0x7E);
  for (const float large : {std::nextafter(464.0f, 500.0f), INFINITY, NAN}) EXPECT_EQ(to_e4m3(large), 0x7F);
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
  for (const float large : {0x1.cp127f, INFINITY, NAN}) EXPECT_EQ(to_e8m0(large), 0xFF);
  EXPECT_EQ(to_e8m0(0.0f), 0);
}

TEST(Spec, EveryFormatHasARowAndAWord) {
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
  EXPECT_THROW(quant_shape(spec, 0, INT64_MAX), Error);
  EXPECT_THROW(quant_shape(spec, INT64_MAX, 0), Error);
}

TEST(WeightView, GroupsMayBeLargerThanTheWeight) {
  QuantSpec spec{.format = Format::int4, .granularity = Granularity::flat, .group_size = INT64_MAX};
  spec.scale_dtype = DType::f32;
  EXPECT_EQ(weight_view_bytes(spec, 3, 50, Layout::halfbyte).scales, 4);
  spec.group_size = 149;
  EXPECT_EQ(weight_view_bytes(spec, 3, 50, Layout::halfbyte).scales, 8);
  EXPECT_EQ(weight_view_bytes(spec, 0, 50, Layout::halfbyte).scales, 0);
}

TEST(TensorView, CountsAndContiguity) {
  using V = ConstTensorView;
  EXPECT_EQ(num_elements(V{nullptr, DType::f32, {}, {}, {}}), 1);
  EXPECT_EQ(num_elements(V{nullptr, DType::f32, {3, 0, 5}, {}, {}}), 0);
  EXPECT_THROW(num_elements(V{nullptr, DType::f32, {-1}, {}, {}}), Error);
  EXPECT_THROW(num_elements(V{nullptr, DType::f32, {int64_t{1} << 40, int64_t{1} << 40}, {}, {}}), Error);
  EXPECT_TRUE(is_contiguous(V{nullptr, DType::f32, {3, 4}, {4, 1}, {}}));
  EXPECT_FALSE(is_contiguous(V{nullptr, DType::f32, {3, 4}, {1, 3}, {}}));
  EXPECT_TRUE(is_contiguous(V{nullptr, DType::f32, {1, 4}, {99, 1}, {}}));
}

TEST(TensorView, ExtentsOfAnyRank) {
  Extents extents;
  EXPECT_TRUE(extents.empty());
  for (int64_t i = 0; i < 20; ++i) {
    extents.push_back(i);
    EXPECT_EQ(extents.size(), static_cast<size_t>(i) + 1);
    EXPECT_EQ(extents.back(), i);
  }
  std::vector<int64_t> values = extents;
  EXPECT_EQ(extents, values);
  EXPECT_EQ(Extents(values.begin(), values.begin() + 3), (Extents{0, 1, 2}));
  Extents moved = std::move(extents);
  EXPECT_EQ(moved, values);
  extents = {7, 8};
  EXPECT_EQ(extents, (std::vector<int64_t>{7, 8}));
  EXPECT_FALSE(extents == moved);
  extents[0] = 3;
  extents.front() += 1;
  const std::span<const int64_t> span = extents;
  EXPECT_EQ(span[0], 4);
  const TensorView view{&values, DType::i64, {2, 10}, {}, {}, 160};
  const ConstTensorView read = view;
  EXPECT_EQ(read.data, &values);
  EXPECT_EQ(read.shape, view.shape);
  EXPECT_EQ(read.num_bytes, 160);
}

// The packed layout is stored by others: these numbers, worked out by hand, are version 2 for good.
static_assert(kPackedVersion == 2);
constexpr bool is_at(CodePlace place, int byte, int shift) {
  return place.byte == byte && place.shift == shift;
}
static_assert(is_at(code_place(0, 0, 4), 0, 0) && is_at(code_place(0, 1, 4), 0, 4));
static_assert(is_at(code_place(1, 0, 4), 1, 0) && is_at(code_place(0, 8, 4), 2, 0));
static_assert(is_at(code_place(1, 9, 4), 3, 4) && is_at(code_place(0, 16, 4), 4, 0));
static_assert(is_at(code_place(0, 2, 4), 16, 0) && is_at(code_place(2, 0, 4), 64, 0));
static_assert(is_at(code_place(4, 0, 4), 160, 0) && is_at(code_place(4, 4, 4), 128, 0));  // turned
static_assert(is_at(code_place(31, 63, 4), 991, 4));
static_assert(is_at(code_place(0, 1, 8), 1, 0) && is_at(code_place(1, 0, 8), 2, 0));
static_assert(is_at(code_place(0, 8, 8), 4, 0) && is_at(code_place(0, 16, 8), 8, 0));
static_assert(is_at(code_place(0, 2, 8), 16, 0) && is_at(code_place(0, 32, 8), 1024, 0));
static_assert(is_at(code_place(31, 63, 8), 2015, 0));

static_assert(is_at(code_place(0, 0, 3), 0, 0) && is_at(code_place(0, 2, 3), 0, 6));  // a bit stream
static_assert(is_at(code_place(0, 63, 3), 23, 5) && is_at(code_place(1, 0, 3), 24, 0));
static_assert(is_at(code_place(31, 63, 2), 511, 6) && is_at(code_place(31, 63, 6), 1535, 2));

constexpr PackedLayout kGroups64 = packed_layout(64, 128, 4, 64, 4, false, false, false, false);
static_assert(kGroups64.block_bytes == 1152 && kGroups64.strip_bytes == 2304 && kGroups64.num_bytes == 4608);
static_assert(kGroups64.code(33, 65) == 3457 && kGroups64.scale(0, 0) == 1024 &&
              kGroups64.scale(33, 1) == 4484);
constexpr PackedLayout kInt4Zeros = packed_layout(32, 256, 4, 128, 2, true, false, false, false);
static_assert(kInt4Zeros.block_bytes == 2144 && kInt4Zeros.num_bytes == 4352);
static_assert(kInt4Zeros.scale(5, 1) == 4202 && kInt4Zeros.zero(5, 1) == 4261);
constexpr PackedLayout kAffine8 = packed_layout(32, 64, 8, 32, 2, false, true, false, false);
static_assert(kAffine8.num_bytes == 2304 && kAffine8.scale(3, 1) == 2118 && kAffine8.bias(3, 1) == 2246);
constexpr PackedLayout kNested = packed_layout(32, 64, 4, 64, 4, false, false, true, false);
static_assert(kNested.block_bytes == 1056 && kNested.absmax == 1280 && kNested.map == 1284);
static_assert(kNested.offset == 2308 && kNested.num_bytes == 2560 && kNested.scale(31, 0) == 1055);
constexpr PackedLayout kRows =
    packed_layout(40, 100, 8, 100, 4, false, false, false, false);  // a scale a row
static_assert(kRows.strip_bytes == 4096 && kRows.scales == 8192 && kRows.num_bytes == 8448);
static_assert(kRows.code(32, 64) == 6144 && kRows.scale(33, 0) == 8324);
constexpr PackedLayout kOdd = packed_layout(32, 96, 4, 40, 2, false, true, false, false);  // sections
static_assert(kOdd.scales == 2048 && kOdd.biases == 2304 && kOdd.num_bytes == 2560 &&
              kOdd.bias(1, 1) == 2370);
// A group longer than the row, in a block of its own length; a row as long as a group that has blocks.
constexpr PackedLayout kLong = packed_layout(1, 40, 4, 256, 4, false, false, false, false);
static_assert(kLong.inlined && kLong.block_cols == 128 && kLong.groups == 1 && kLong.num_bytes == 2304);
static_assert(kLong.scale(0, 0) == 2048 && kLong.padded_groups() == 1 && kLong.tiles_per_strip() == 2);
// Groups that are stored as several; of double quantization they are not.
constexpr PackedLayout kThrice = packed_layout(64, 320, 4, 96, 2, true, false, false, false);
static_assert(kThrice.inlined && kThrice.group == 32 && kThrice.repeats == 3 && kThrice.groups == 10);
static_assert(kThrice.weight_groups == 4 && kThrice.scale(33, 3) == kThrice.strip_bytes + 2306);
constexpr PackedLayout kSixteens = packed_layout(64, 100, 4, 48, 2, true, false, false, false);
static_assert(kSixteens.inlined && kSixteens.group == 16 && kSixteens.repeats == 3 && kSixteens.groups == 7);
static_assert(kSixteens.block_bytes == 1024 + 4 * 32 * 3 && kSixteens.padded_groups() == 8);
static_assert(kSixteens.scale(33, 5) == kSixteens.strip_bytes + 1408 + 1024 + 66 &&
              kSixteens.zero(33, 5) == kSixteens.strip_bytes + 1408 + 1024 + 256 + 33);
constexpr PackedLayout kNvfp4 = packed_layout(64, 128, 4, 16, 1, false, false, false, true);
static_assert(kNvfp4.block_bytes == 1024 + 4 * 32 && kNvfp4.scale(33, 5) == 4513);
static_assert(kNvfp4.global_scale == 4608 && kNvfp4.num_bytes == 4864);
constexpr PackedLayout kEight = packed_layout(32, 2048, 4, 1024, 4, false, false, false, false);
static_assert(kEight.group == 128 && kEight.repeats == 8 && kEight.weight_groups == 2);
static_assert(!packed_layout(32, 2048, 4, 1024, 4, false, false, true, false).inlined);
static_assert(packed_layout(32, 2048, 4, 256, 4, false, false, true, false).block_cols == 256);
static_assert(packed_layout(32, 96, 4, 96, 4, false, false, false, false).groups == 1);  // a row
static_assert(packed_layout(1, 64, 4, 64, 4, false, false, false, false).inlined);
constexpr PackedLayout kAffine3 = packed_layout(64, 128, 3, 64, 2, false, true, false, false);
static_assert(kAffine3.block_bytes == 768 + 64 + 64 && kAffine3.tiles_per_strip() == 2);
static_assert(kAffine3.code(33, 66) == 2712 && kAffine3.place_in_unit(33, 66).shift == 6);
static_assert(kAffine3.scale(33, 1) == 3458 && kAffine3.bias(33, 1) == 3522 && kAffine3.num_bytes == 3584);
// Offsets beyond 2^31 and 2^32.
constexpr PackedLayout kHuge = packed_layout(1 << 20, 1 << 20, 8, 32, 4, false, true, false, false);
static_assert(kHuge.strip_bytes == (i64{1} << 25) + (i64{1} << 23));
static_assert(kHuge.num_bytes == (i64{1} << 40) + (i64{1} << 38));
static_assert(kHuge.bias((1 << 20) - 1, (1 << 15) - 1) == kHuge.num_bytes - 4);

// Every code and parameter of a matrix has bits of its own within the memory.
TEST(Packed, PlacesAreDisjoint) {
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const i64 group : {1, 7, 16, 32, 40, 48, 64, 96, 100, 128, 192, 256, 512, 1000})
      for (const auto& [n, k] : {std::pair<i64, i64>{32, 256}, {33, 300}, {70, 65}, {1, 1}})
        for (int parts = 0; parts < 5;
             ++parts) {  // none, zero points, biases, double quantization, global scale
          const PackedLayout p = packed_layout(n, k, bits, group, 1 << (parts + 1) % 3, parts == 1,
                                               parts == 2, parts == 3, parts == 4);
          std::vector<u8> used(static_cast<size_t>(p.num_bytes));
          int64_t overlaps = 0;
          const auto use = [&](i64 byte, int size, int mask) {
            for (i64 i = byte; i < byte + size; ++i) {
              u8& bits_used = used.at(static_cast<size_t>(i));
              overlaps += (bits_used & mask) != 0;
              bits_used = static_cast<u8>(bits_used | mask);
            }
          };
          for (i64 row = 0; row < n; ++row) {
            for (i64 col = 0; col < k; ++col) {
              const int mask = ((1 << bits) - 1) << p.place_in_unit(row, col).shift;
              use(p.code(row, col), 1, mask & 255);
              if (mask > 255) use(p.code(row, col) + 1, 1, mask >> 8);
            }
            for (i64 g = 0; g < p.groups; ++g) {
              use(p.scale(row, g), p.scale_bytes, 255);
              if (p.has_zeros) use(p.zero(row, g), 1, 255);
              if (p.has_biases) use(p.bias(row, g), p.bias_bytes, 255);
            }
          }
          if (p.double_quant) {
            use(p.absmax, static_cast<int>((n * p.groups + 255) / 256) * 4, 255);
            use(p.map, 256 * 4, 255);
            use(p.offset, 4, 255);
          }
          EXPECT_EQ(overlaps, 0) << bits << " bits, group " << group << ", " << n << " x " << k;
          EXPECT_EQ(p.num_bytes % kPackedAlignment, 0);
          EXPECT_EQ(p.block_bytes % 16, 0);  // what bulk copies take
        }
}

TEST(Packed, TilesAreWhereTheirCodesBegin) {
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const i64 group : {32, 64, 192, 256, 100}) {
      const PackedLayout p = packed_layout(70, 700, bits, group, 2, false, true, false, false);
      const int cols = bits == 8 ? 32 : 64;
      for (i64 strip = 0; strip < p.strips; ++strip)
        for (i64 tile = 0; tile < p.tiles_per_strip(); ++tile)
          EXPECT_EQ(p.tile(strip, tile), p.code(strip * 32, tile * cols));
    }
}

// Shared memory has 32 banks of 4 bytes. A warp reads 16 bytes a lane in four turns of 8 lanes, 4 bytes a
// lane in one: without conflict if in each turn no bank is read at two addresses.
TEST(Packed, FragmentsAreReadWithoutBankConflicts) {
  const auto free_of_conflicts = [](std::span<const int> words) {
    int banks = 0;
    for (const int word : words) banks |= 1 << (word % 32);
    return std::popcount(static_cast<u32>(banks)) == static_cast<int>(words.size());
  };
  // Forward: lane g * 4 + t reads slot(8 * half + g, t).
  for (int half = 0; half < 2; ++half)
    for (int turn = 0; turn < 4; ++turn) {
      std::vector<int> words;
      for (int lane = 8 * turn; lane < 8 * turn + 8; ++lane)
        for (int word = 0; word < 4; ++word)
          words.push_back(packed_slot(8 * half + lane / 4, lane % 4) * 4 + word);
      EXPECT_TRUE(free_of_conflicts(words)) << half << " " << turn;
    }
  // Transposed: lane g * 4 + t' of warp w reads word g & 3 of slot(8 * i + t', t) and of slot(8 * i + t' + 4,
  // t).
  for (int warp = 0; warp < 4; ++warp)
    for (int i = 0; i < 2; ++i)
      for (const int upper : {0, 4}) {
        std::vector<int> words;
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = 2 * (warp & 1) + (g >> 2);
          words.push_back(packed_slot(8 * i + lane % 4 + upper, t) * 4 + (g & 3));
        }
        EXPECT_TRUE(free_of_conflicts(words)) << warp << " " << i << " " << upper;
      }
}

}  // namespace
}  // namespace halfbyte
