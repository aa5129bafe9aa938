// Decodes a packed weight to f32. Include after highway.h, inside a file that foreach_target.h compiles.
#if defined(HALFBYTE_OPS_QGEMM_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#undef HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#else
#define HALFBYTE_OPS_QGEMM_DECODE_INL_H_
#endif

#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"
#include "ops/qgemm/qgemm.h"
#include "ops/qgemm/qgemm_units.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

using Tag = hn::CappedTag<float, 16>;
using Floats = hn::Vec<Tag>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(Tag()));

constexpr int kRows = formats::kUnitRows, kCols = formats::kUnitCols;

// f32, f16 or bf16 in memory to n floats; n is a multiple of kLanes.
template <class E>
HWY_INLINE void convert(const void* from, int64_t n, float* to) {
  const auto* memory = static_cast<const typename E::Memory*>(from);
  for (int64_t i = 0; i < n; i += kLanes) hn::StoreU(E::load(Tag(), memory + i), Tag(), to + i);
}

class Decoder {
 public:
  // units: of find_units.
  Decoder(const QgemmProblem& problem, const QgemmTensors& tensors, const UnitPlace* units)
      : problem_(problem), memory_(static_cast<const uint8_t*>(tensors.weight)), units_(units) {
    const formats::PackedLayout& layout = problem.weight;
    const int64_t parameters = layout.groups * kRows;
    scales_per_strip_ = layout.inlined ? layout.strip_bytes : parameters * layout.scale_bytes;
    offsets_per_strip_ = layout.inlined ? layout.strip_bytes : parameters * offset_bytes(layout);
    for (int code = 0; code < 16; ++code) {
      uint32_t bits;
      std::memcpy(&bits, &problem.codec.book.values[code], 4);
      for (int byte = 0; byte < 4; ++byte) planes_[byte][code] = static_cast<uint8_t>(bits >> 8 * byte);
    }
  }

  // The 32 x 64 values of a unit: row r to w + r * row_floats, its columns in column_order. Rows beyond the
  // weight are 0. The codes that lie `ahead` bytes further are fetched meanwhile.
  void decode(int64_t strip, int64_t unit, int64_t ahead, float* HWY_RESTRICT w, int64_t row_floats) const {
    const UnitPlace& place = units_[unit];
    const uint8_t* codes = memory_ + place.codes + strip * problem_.weight.strip_bytes;
    Parameters parameters;
    parameters.split = place.groups[0] != place.groups[1];
    load(strip, place, 0, parameters);
    if (parameters.split) load(strip, place, 1, parameters);
    const formats::Codec& codec = problem_.codec;
    if (codec.kind == formats::Kind::table)
      decode_table(codes, parameters, ahead, w, row_floats);
    else if (codec.kind == formats::Kind::integer)
      (codec.bits == 4 ? decode_integers<4, false> : decode_integers<8, false>)(codes, parameters, ahead, w,
                                                                                row_floats);
    else
      (codec.bits == 4 ? decode_integers<4, true> : decode_integers<8, true>)(codes, parameters, ahead, w,
                                                                              row_floats);
  }

 private:
  // Of 32 rows, for each half of the columns of a unit. offsets: biases, or what is subtracted from integers.
  struct Parameters {
    bool split;  // the halves differ; else the first is that of both
    float scales[2][kRows];
    float offsets[2][kRows];
  };

  static int offset_bytes(const formats::PackedLayout& layout) {
    return layout.has_biases ? layout.bias_bytes : 1;
  }

  void load_stored(const uint8_t* from, float* to) const {
    switch (problem_.codec.scale_type) {
      case formats::ScaleType::f16:
        return convert<F16>(from, kRows, to);
      case formats::ScaleType::bf16:
        return convert<BF16>(from, kRows, to);
      default:
        return convert<F32>(from, kRows, to);
    }
  }

  void load(int64_t strip, const UnitPlace& place, size_t half, Parameters& to) const {
    const formats::PackedLayout& layout = problem_.weight;
    const uint8_t* scales = memory_ + place.scales[half] + strip * scales_per_strip_;
    const uint8_t* offsets = memory_ + place.offsets[half] + strip * offsets_per_strip_;
    if (layout.double_quant) {
      const auto* absmax = reinterpret_cast<const float*>(memory_ + layout.absmax);
      const auto* map = reinterpret_cast<const float*>(memory_ + layout.map);
      const float offset = *reinterpret_cast<const float*>(memory_ + layout.offset);
      // Rows of padding have no absmax.
      const int64_t first = strip * kRows, rows = std::min<int64_t>(kRows, layout.n - first);
      for (int64_t r = 0; r < kRows; ++r)
        to.scales[half][r] =
            r < rows
                ? map[scales[r]] * absmax[((first + r) * layout.groups + place.groups[half]) / 256] + offset
                : 0;
    } else {
      load_stored(scales, to.scales[half]);
    }
    if (layout.has_biases)
      load_stored(offsets, to.offsets[half]);
    else if (layout.has_zeros)
      for (int r = 0; r < kRows; ++r) to.offsets[half][r] = static_cast<float>(offsets[r]);
    else
      for (int r = 0; r < kRows; ++r) to.offsets[half][r] = static_cast<float>(-problem_.codec.q_min);
  }

  // For the lanes of a vector of a row; `tile`: which half of a unit of 8-bit codes.
  template <int kBits>
  static HWY_INLINE Floats parameter(const Parameters& from, const float (&of)[2][kRows], int row, int tile) {
    const Floats first = hn::Set(Tag(), of[kBits == 8 && from.split ? tile : 0][row]);
    if (kBits == 8 || !from.split) return first;
    const hn::RebindToUnsigned<Tag> du;
    const auto second =
        hn::TestBit(hn::Iota(du, 0), hn::Set(du, 2u));  // of 4-bit words: columns 32 and later
    return hn::IfThenElse(hn::RebindMask(Tag(), second), hn::Set(Tag(), of[1][row]), first);
  }

  // Words i to i + kLanes of a line of 16, in the same order for all lines.
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<Tag>> load_words(const uint8_t* line, int a, int i) {
    const hn::RebindToUnsigned<Tag> d;
    const auto* words = reinterpret_cast<const uint32_t*>(line);
    const int exchange = formats::packed_slot(a, 0) % 4 * 4;
    if constexpr (kLanes == 16) {
      const hn::Half<decltype(d)> dh;
      return hn::Combine(d, hn::LoadU(dh, words + (8 ^ exchange)), hn::LoadU(dh, words + exchange));
    } else {
      return hn::LoadU(d, words + (i ^ exchange));
    }
  }

  template <int kBits, bool kAffine>
  static HWY_NOINLINE void decode_integers(const uint8_t* codes, const Parameters& parameters, int64_t ahead,
                                           float* HWY_RESTRICT w, int64_t row_floats) {
    const hn::RebindToUnsigned<Tag> du;
    const hn::RebindToSigned<Tag> di;
    for (int tile = 0; tile < kBits / 4; ++tile)
      for (int a = 0; a < kRows / 2; ++a) {
        const uint8_t* line = codes + tile * formats::kTileBytes + a * 64;
        hwy::Prefetch(line + ahead);
        Floats scales[2], offsets[2];
        for (int odd = 0; odd < 2; ++odd) {
          scales[odd] = parameter<kBits>(parameters, parameters.scales, 2 * a + odd, tile);
          offsets[odd] = parameter<kBits>(parameters, parameters.offsets, 2 * a + odd, tile);
        }
        float* const rows = w + 2 * a * row_floats;
        HWY_UNROLL(4)
        for (int i = 0; i < 16; i += kLanes) {
          auto words = load_words(line, a, i);
          HWY_UNROLL(8)
          for (int p = 0; p < 32 / kBits; ++p, words = hn::ShiftRight<kBits>(words)) {
            const auto code =
                hn::ConvertTo(Tag(), hn::BitCast(di, hn::And(words, hn::Set(du, (1u << kBits) - 1))));
            const int odd = p / 2 % 2, vector = p % 2 + 2 * (kBits == 4 ? p / 4 : tile);
            const Floats value = kAffine ? hn::MulAdd(code, scales[odd], offsets[odd])
                                         : hn::Mul(hn::Sub(code, offsets[odd]), scales[odd]);
            hn::StoreU(value, Tag(), rows + odd * row_floats + vector * 16 + i);
          }
        }
      }
  }

  HWY_NOINLINE void decode_table(const uint8_t* codes, const Parameters& parameters, int64_t ahead,
                                 float* HWY_RESTRICT w, int64_t row_floats) const {
#if HALFBYTE_AVX512
    const __m512 table = _mm512_loadu_ps(problem_.codec.book.values);
#else
    const hn::Repartition<uint8_t, Tag> d8;
    const hn::Repartition<uint16_t, Tag> d16;
    alignas(16) constexpr uint8_t kTransposed[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const auto transposed = hn::LoadDup128(d8, kTransposed);
#endif
    for (int a = 0; a < kRows / 2; ++a) {
      const uint8_t* line = codes + a * 64;
      hwy::Prefetch(line + ahead);
      const Floats even = parameter<4>(parameters, parameters.scales, 2 * a, 0);
      const Floats odd = parameter<4>(parameters, parameters.scales, 2 * a + 1, 0);
      float* const rows = w + 2 * a * row_floats;
      HWY_UNROLL(4)
      for (int i = 0; i < 16; i += kLanes) {
        auto words = load_words(line, a, i);
#if HALFBYTE_AVX512
        HWY_UNROLL(8)
        for (int p = 0; p < 8; ++p, words = hn::ShiftRight<4>(words)) {
          const Floats value{_mm512_permutexvar_ps(words.raw, table)};  // by the low four bits
          hn::StoreU(hn::Mul(value, p / 2 % 2 ? odd : even), Tag(),
                     rows + p / 2 % 2 * row_floats + (p % 2 + p / 4 * 2) * 16);
        }
#else
        // The bytes of four words one after the other, so that those of a vector are neighbours; the four
        // bytes of their values are looked up apart.
        const auto bytes = hn::TableLookupBytes(hn::BitCast(d8, words), transposed);
        HWY_UNROLL(2)
        for (int high = 0; high < 2; ++high) {
          const auto shifted = high ? hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, bytes))) : bytes;
          const auto code = hn::And(shifted, hn::Set(d8, uint8_t{15}));
          const auto plane = [&](int byte) HWY_ATTR {
            return hn::TableLookupBytes(hn::LoadDup128(d8, planes_[byte]), code);
          };
          const auto b0 = plane(0), b1 = plane(1), b2 = plane(2), b3 = plane(3);
          const auto low01 = hn::BitCast(d16, hn::InterleaveLower(d8, b0, b1));
          const auto low23 = hn::BitCast(d16, hn::InterleaveLower(d8, b2, b3));
          const auto high01 = hn::BitCast(d16, hn::InterleaveUpper(d8, b0, b1));
          const auto high23 = hn::BitCast(d16, hn::InterleaveUpper(d8, b2, b3));
          const auto store = [&](auto value, Floats scale, int odd_row, int second) HWY_ATTR {
            hn::StoreU(hn::Mul(hn::BitCast(Tag(), value), scale), Tag(),
                       rows + odd_row * row_floats + (high + 2 * second) * 16 + i);
          };
          store(hn::InterleaveLower(d16, low01, low23), even, 0, 0);
          store(hn::InterleaveUpper(d16, low01, low23), odd, 1, 0);
          store(hn::InterleaveLower(d16, high01, high23), even, 0, 1);
          store(hn::InterleaveUpper(d16, high01, high23), odd, 1, 1);
        }
#endif
      }
    }
  }

  const QgemmProblem& problem_;
  const uint8_t* memory_;
  const UnitPlace* units_;
  int64_t scales_per_strip_, offsets_per_strip_;
  alignas(16) uint8_t planes_[4][16];  // of the values of the table: byte b of value i is planes_[b][i]
};

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_OPS_QGEMM_DECODE_INL_H_
