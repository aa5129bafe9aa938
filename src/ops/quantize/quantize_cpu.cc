// SIMD kernels of `quantize`.
//
// Per group: range in the integer domain of the bits (one pass, non-finite values show up as the range),
// parameters by formats::group_params, or of as many plain groups as a vector has lanes at once
// (group_batch-inl.h), then codes:
//   integer, affine  the correctly rounded quotient by reciprocal and an exact residual correction
//                    (Markstein): a multiple of the rate of a division, valid away from under- and overflow
//   table            no quotient: x / s > edge is x > T for one T per edge and group, found exactly in f64;
//                    four compares walk the sorted T, or one does with that of the bin that x lies in.
//                    fp4_e2m1: the quotient, rounded as a float. FP4 of bf16: T of |x|, as bf16
//   floating         the same quotient, rounded as a float
// Groups outside the fast range (non-finite values, extreme scales) go to the scalar reference.
#define HWY_WANT_AVX3_DL  // one more copy, for AVX-512 with byte permutes, which these kernels use
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>

#include "core/fork.h"
#include "ops/quantize/quantize_ref.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/group_batch-inl.h"
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// Codes of one flush: half of a 32 KiB L1 with the 16-bit source beside it.
constexpr int64_t kCodes = 4096;

// x as integers of the same order: negative numbers get their magnitude inverted. Bits: those of x, of which
// d may have wider lanes, with sign.
template <class Bits, class D>
HWY_INLINE hn::Vec<D> sortable(D d, hn::Vec<D> bits) {
  constexpr int kShift = sizeof(hn::TFromD<D>) * 8 - 1;
  const auto magnitude = hn::Set(d, std::numeric_limits<Bits>::max());
  return hn::Xor(bits, hn::And(hn::ShiftRight<kShift>(bits), magnitude));
}
template <class T>
T sortable(T bits) {
  return bits < 0 ? static_cast<T>(bits ^ std::numeric_limits<T>::max()) : bits;
}

template <class Type>
struct BitsRange {
  typename Type::Bits min, max;  // sortable; n > 0
};

// Loads n elements, at least a vector, the last ones perhaps twice: take(vector) for each.
template <class D, class Take>
HWY_INLINE void each_vector(D d, const hn::TFromD<D>* x, int64_t n, const Take& take) {
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + N <= n; i += N) take(hn::LoadU(d, x + i));
  if (i < n) take(hn::LoadU(d, x + n - N));
}

// Range of n > 0 elements, NaN and Inf included: they sort beyond all finite values.
template <class Type>
HWY_INLINE BitsRange<Type> bits_range(const typename Type::Memory* x, int64_t n) {
  using Bits = typename Type::Bits;
  const hn::ScalableTag<Bits> d;
  const auto* bits = reinterpret_cast<const Bits*>(x);
  BitsRange<Type> range{std::numeric_limits<Bits>::max(), std::numeric_limits<Bits>::min()};
  if (n >= static_cast<int64_t>(hn::Lanes(d))) {
    auto low = hn::Set(d, range.min), high = hn::Set(d, range.max);
    each_vector(d, bits, n, [&](auto v) HWY_ATTR {
      v = sortable<Bits>(d, v);
      low = hn::Min(low, v);
      high = hn::Max(high, v);
    });
    return {hn::GetLane(hn::MinOfLanes(d, low)), hn::GetLane(hn::MaxOfLanes(d, high))};
  }
  for (int64_t i = 0; i < n; ++i) {
    const Bits v = sortable(bits[i]);
    range.min = std::min(range.min, v);
    range.max = std::max(range.max, v);
  }
  return range;
}

// Of n elements, at least as many as f32 has lanes: in each lane the least and the largest x, sortable, or
// kMagnitudes: the largest |x| alone. Bits of Type, with sign.
template <bool kMagnitudes, class Type, class DI>
HWY_INLINE void lane_ranges(DI di, const typename Type::Memory* x, int64_t n, hn::Vec<DI>& low,
                            hn::Vec<DI>& high) {
  using Bits = typename Type::Bits;
  const auto* bits = reinterpret_cast<const Bits*>(x);
  const auto find = [&](auto d, auto& least, auto& largest) HWY_ATTR {
    least = hn::Set(d, std::numeric_limits<Bits>::max());
    largest = hn::Set(d, kMagnitudes ? Bits{0} : std::numeric_limits<Bits>::min());
    each_vector(d, bits, n, [&](auto v) HWY_ATTR {
      v = kMagnitudes ? hn::And(v, hn::Set(d, std::numeric_limits<Bits>::max())) : sortable<Bits>(d, v);
      if constexpr (!kMagnitudes) least = hn::Min(least, v);
      largest = hn::Max(largest, v);
    });
  };
  if constexpr (sizeof(Bits) == 4) {
    find(di, low, high);
  } else if (const hn::ScalableTag<Bits> d; n >= static_cast<int64_t>(hn::Lanes(d))) {
    hn::Vec<decltype(d)> least, largest;
    find(d, least, largest);
    const auto even = [&](auto both) HWY_ATTR { return hn::ShiftRight<16>(hn::ShiftLeft<16>(both)); };
    const auto lows = hn::BitCast(di, least), highs = hn::BitCast(di, largest);
    low = hn::Min(hn::ShiftRight<16>(lows), even(lows));
    high = hn::Max(hn::ShiftRight<16>(highs), even(highs));
  } else {
    const hn::Rebind<Bits, DI> half;
    hn::Vec<decltype(half)> least, largest;
    find(half, least, largest);
    low = hn::PromoteTo(di, least);
    high = hn::PromoteTo(di, largest);
  }
}

// Lanes of f32 from bits of Type, sign or no sign above them.
template <class Type, class D>
HWY_INLINE hn::Vec<D> values_of_bits(D d, hn::Vec<hn::RebindToSigned<D> > bits) {
  if constexpr (std::is_same_v<Type, BF16>) return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  if constexpr (std::is_same_v<Type, F32>) return hn::BitCast(d, bits);
  if constexpr (std::is_same_v<Type, F16>) {
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<uint16_t, D> du16;
    const hn::RebindToUnsigned<D> du;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::TruncateTo(du16, hn::BitCast(du, bits))));
  }
}

// The bits of infinity, and a scalar value of bits.
template <class Type>
constexpr typename Type::Bits infinity_bits();
template <>
constexpr int16_t infinity_bits<BF16>() {
  return 0x7F80;
}
template <>
constexpr int16_t infinity_bits<F16>() {
  return 0x7C00;
}
template <>
constexpr int32_t infinity_bits<F32>() {
  return 0x7F800000;
}
template <>
constexpr int64_t infinity_bits<F64>() {
  return 0x7FF0000000000000;
}

template <class Type>
typename Type::Compute value_of_sortable(typename Type::Bits v) {
  const auto bits = sortable(v);
  if constexpr (std::is_same_v<Type, BF16>) return formats::bf16_to_f32(static_cast<uint16_t>(bits));
  if constexpr (std::is_same_v<Type, F16>) return formats::f16_to_f32(static_cast<uint16_t>(bits));
  if constexpr (sizeof(bits) >= 4) return formats::bit_cast<typename Type::Compute>(bits);
}

template <class Type>
bool is_finite(const BitsRange<Type>& range) {
  return range.max < infinity_bits<Type>() &&
         range.min > sortable(static_cast<typename Type::Bits>(
                         infinity_bits<Type>() | std::numeric_limits<typename Type::Bits>::min()));
}

// ---- Table formats ----------------------------------------------------------------------------

// What decides x / s > edge[i] for f32 x: x > middle * s, where middle lies half way between the edge and
// the next f32. middle * s is exact in f64 (25 by 24 bits). Equality needs a subnormal quotient; then
// the quotient rounds to the even neighbour, and `nudge` moves the bound down by one unit where that is
// the upper one.
struct TableBounds {
  HWY_ALIGN double middle[16];
  HWY_ALIGN int64_t nudge[16];

  explicit TableBounds(const formats::CodeBook& book) {
    for (int i = 0; i < 15; ++i) {
      const float edge = book.edges_f32[i] + 0.0f;
      const float above = -formats::next_below(-edge);
      middle[i] = (static_cast<double>(edge) + static_cast<double>(above)) / 2;
      const bool odd = (formats::bit_cast<uint32_t>(edge) & 1u) != 0;
      nudge[i] = !odd ? 0 : middle[i] < 0 ? 1 : -1;
    }
    middle[15] = std::numeric_limits<double>::infinity();
    nudge[15] = 0;
    is_symmetric = middle[7] < 0 && middle[7] > -0x1p-140;
    for (int i = 0; i < 7; ++i) is_symmetric = is_symmetric && middle[6 - i] == -middle[8 + i];
#if HALFBYTE_AVX512
    find_bins(book);
#endif
  }
  bool is_symmetric;  // edges lie alike on both sides of zero, which has a code for each

#if HALFBYTE_AVX512
  // 32 bins of x / scale, each with one edge at most: its threshold and those of all bins below tell the
  // rank. No bin ends so near an edge that a product by the reciprocal could mistake one for the other. Where
  // edges lie closer about zero, but alike on both sides of it, bins are of |x| / scale: the rank of a
  // negative x is 15 - that of -x.
  bool has_bins = false, of_magnitudes = false;
  float bins_of_one = 0, bin_of_zero = 0;
  alignas(64) int32_t edge_of_bin[32];  // 15: none
  alignas(64) int32_t rank_of_bin[32];  // edges below
  alignas(64) int32_t code_of_rank[16];

  // Whether BinCode is exact.
  bool takes_bins(float scale) const { return has_bins && scale > 0x1p-90f && scale < 0x1p90f; }

  void find_bins(const formats::CodeBook& book) {
    std::ranges::copy(book.code_of_rank, code_of_rank);
    struct Bins {
      bool of_magnitudes;
      float zero, most;
    };
    for (const Bins& each : {Bins{false, 16, 15.4f}, Bins{true, 0, 31}})
      for (float bins = each.most; bins >= each.most / 2 && !has_bins; bins -= 0.1f) {
        of_magnitudes = each.of_magnitudes;
        bin_of_zero = each.zero;
        bins_of_one = bins / book.max_magnitude;
        has_bins = !of_magnitudes || is_symmetric;
        std::ranges::fill(edge_of_bin, 15);
        std::ranges::fill(rank_of_bin, of_magnitudes ? 8 : 0);
        for (int edge = of_magnitudes ? 8 : 0; edge < 15; ++edge) {
          const double place =
              middle[edge] * static_cast<double>(bins_of_one) + static_cast<double>(each.zero);
          const auto bin = static_cast<int>(std::lround(place));
          if (bin < 0 || bin > 31 || std::abs(place - bin) > 0.499 || edge_of_bin[bin] != 15) {
            has_bins = false;
            break;
          }
          edge_of_bin[bin] = edge;
          std::fill(rank_of_bin + bin + 1, rank_of_bin + 32, edge + 1);
        }
      }
  }

  // Where is_symmetric: the largest bf16 that is not beyond the i-th edge above zero, in the upper half of
  // each lane.
  HWY_INLINE __m512i bf16_thresholds(int i, __m512 scales) const {
    // `middle` has 25 bits: an f32, and a power of two.
    const auto high = static_cast<float>(middle[8 + i]);
    const auto low = static_cast<float>(middle[8 + i] - static_cast<double>(high));
    return _mm512_castps_si512(_mm512_fmadd_round_ps(scales, _mm512_set1_ps(high),
                                                     _mm512_mul_ps(scales, _mm512_set1_ps(low)),
                                                     _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }

  HWY_INLINE __m512 thresholds(float scale) const {
    const __m512d s = _mm512_set1_pd(static_cast<double>(scale));
    const auto half = [&](int i) HWY_ATTR {
      const __m512i product = _mm512_castpd_si512(_mm512_mul_pd(_mm512_load_pd(middle + i), s));
      const __m512d bound = _mm512_castsi512_pd(_mm512_add_epi64(product, _mm512_load_si512(nudge + i)));
      return _mm512_cvt_roundpd_ps(bound, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    };
    return _mm512_insertf32x8(_mm512_castps256_ps512(half(0)), half(8), 1);
  }
  HWY_INLINE void thresholds(float scale, float* HWY_RESTRICT out) const {
    _mm512_store_ps(out, thresholds(scale));
  }
#else
  // The largest f32 that is not beyond each bound, for scale > 0: as many from `first` on as there are lanes
  // of double.
  HWY_INLINE auto thresholds_from(size_t first, float scale) const {
    const hn::ScalableTag<double> d;
    const hn::RebindToSigned<decltype(d)> di;
    const hn::Rebind<float, decltype(d)> df;
    const hn::RebindToSigned<decltype(df)> dfi;
    const auto s = hn::Set(d, static_cast<double>(scale));
    const auto product = hn::BitCast(di, hn::Mul(hn::Load(d, middle + first), s));
    const auto bound = hn::BitCast(d, hn::Add(product, hn::Load(di, nudge + first)));
    const auto nearest = hn::DemoteTo(df, bound);
    const auto bits = hn::BitCast(dfi, nearest), one = hn::Set(dfi, 1);
    const auto below = hn::BitCast(  // where it is beyond the bound it is not +0
        df, hn::IfThenElse(hn::Lt(bits, hn::Zero(dfi)), hn::Add(bits, one), hn::Sub(bits, one)));
    const auto back = hn::PromoteTo(d, nearest);
    return hn::DemoteTo(df, hn::IfThenElse(hn::Gt(back, bound), hn::PromoteTo(d, below), back));
  }
  HWY_INLINE void thresholds(float scale, float* HWY_RESTRICT out) const {
    const hn::Rebind<float, hn::ScalableTag<double> > df;
    for (size_t i = 0; i < 16; i += hn::Lanes(df)) hn::StoreU(thresholds_from(i, scale), df, out + i);
  }
#endif
};

// Ranks of n elements (rounded up to whole vectors), one a byte.
template <class Type>
HWY_INLINE void table_ranks(const typename Type::Memory* HWY_RESTRICT x, int64_t n, const TableBounds& bounds,
                            float scale, uint8_t* HWY_RESTRICT ranks) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
#if HWY_MAX_BYTES >= 32
  // Level k of the search tree as a table of 2^k thresholds, looked up by the path so far. They do not go
  // through memory: a load of several stores waits for all of them.
#if HALFBYTE_AVX512
  const hn::Vec<decltype(d)> t{bounds.thresholds(scale)};
  const auto level = [&](int first, int step) HWY_ATTR {
    return hn::TableLookupLanes(
        t, hn::IndicesFromVec(
               d, hn::And(hn::Add(hn::Set(di, first), hn::Mul(hn::Iota(di, 0), hn::Set(di, step))),
                          hn::Set(di, 15))));
  };
  const auto t0 = level(7, 0), t1 = level(3, 8), t2 = level(1, 4), t3 = level(0, 2);
#else
  const auto low = hn::Combine(d, bounds.thresholds_from(4, scale), bounds.thresholds_from(0, scale));
  const auto high = hn::Combine(d, bounds.thresholds_from(12, scale), bounds.thresholds_from(8, scale));
  const auto odd = hn::ConcatOdd(d, high, low), fourth = hn::ConcatOdd(d, odd, odd);
  const auto t0 = hn::TableLookupLanes(fourth, hn::IndicesFromVec(d, hn::Set(di, 1))),
             t1 = hn::ConcatEven(d, fourth, fourth), t2 = hn::ConcatEven(d, odd, odd),
             t3 = hn::ConcatEven(d, high, low);
#endif
  const auto step = [&](hn::Vec<decltype(di)> path, hn::Vec<decltype(d)> v,
                        hn::Vec<decltype(d)> threshold) HWY_ATTR {
    return hn::Sub(hn::Add(path, path), hn::VecFromMask(di, hn::RebindMask(di, hn::Gt(v, threshold))));
  };
  for (int64_t i = 0; i < n; i += N) {
    const auto v = Type::load(d, x + i);
    auto path = step(hn::Zero(di), v, t0);
    path = step(path, v, hn::TableLookupLanes(t1, hn::IndicesFromVec(d, path)));
    path = step(path, v, hn::TableLookupLanes(t2, hn::IndicesFromVec(d, path)));
    path = step(path, v, hn::TableLookupLanes(t3, hn::IndicesFromVec(d, path)));
    hn::StoreU(hn::DemoteTo(d8, path), d8, ranks + i);
  }
#else
  HWY_ALIGN float thresholds[16];
  bounds.thresholds(scale, thresholds);
  for (int64_t i = 0; i < n; i += N) {
    const auto v = Type::load(d, x + i);
    auto rank = hn::Zero(di);
    for (int k = 0; k < 15; ++k)
      rank = hn::Sub(rank, hn::VecFromMask(di, hn::RebindMask(di, hn::Gt(v, hn::Set(d, thresholds[k])))));
    hn::StoreU(hn::DemoteTo(d8, rank), d8, ranks + i);
  }
#endif
}

// Whether FloatingCode gives the codes of the quotients: their corrections are exact near every edge, and
// none but 0 is so small that it rounds to 0, whose code has no sign.
template <class Type>
constexpr float kMostE2m1Scale = std::is_same_v<Type, F32>    ? 0x1p0f
                                 : std::is_same_v<Type, BF16> ? 0x1p16f
                                                              : 0x1p100f;
template <class Type>
bool has_exact_e2m1(float scale, double absmax) {
  return scale > 0x1p-90f && scale <= kMostE2m1Scale<Type> && absmax < static_cast<double>(scale) * 0x1p20;
}

// f64: the division itself.
HWY_INLINE void table_codes_f64(const double* HWY_RESTRICT x, int64_t n, double scale,
                                const formats::CodeBook& book, uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<double> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, scale);
  HWY_ALIGN int64_t out[HWY_MAX_BYTES / sizeof(int64_t)];
  for (int64_t i = 0; i < n; i += N) {
    const auto y = hn::Div(hn::LoadU(d, x + i), s);
    auto rank = hn::Zero(di);
    for (int k = 0; k < 15; ++k)
      rank = hn::Sub(rank, hn::VecFromMask(di, hn::RebindMask(di, hn::Gt(y, hn::Set(d, book.edges_f64[k])))));
    hn::Store(rank, di, out);
    for (int64_t j = 0; j < N; ++j) codes[i + j] = book.code_of_rank[out[j]];
  }
}

// ---- Codes of quotients -----------------------------------------------------------------------

#if HWY_ARCH_X86
#define HALFBYTE_PACKS_CODES 1
// Four vectors of integers below 2^31, less `low`, as codes from 0 to `most`: bytes, or the nibbles of bytes.
// Integers saturate on their way, which clamps them. They are in their order, or kSplit: the first and the
// last two as load_two has them.
template <bool kNibbles, bool kSplit, class V>
HWY_INLINE void store_four(V v0, V v1, V v2, V v3, int low, int most, uint8_t* HWY_RESTRICT to) {
#if HALFBYTE_AVX512
  const __m512i lows = _mm512_set1_epi16(static_cast<int16_t>(low));
  const __m512i first = _mm512_subs_epi16(_mm512_packs_epi32(v0.raw, v1.raw), lows),
                second = _mm512_subs_epi16(_mm512_packs_epi32(v2.raw, v3.raw), lows);
  // Of each 128 bits four of every vector.
  const __m512i bytes =
      _mm512_min_epu8(_mm512_packus_epi16(first, second), _mm512_set1_epi8(static_cast<char>(most)));
  if constexpr (kNibbles && kSplit) {
    const __m512i pairs = _mm512_or_si512(bytes, _mm512_srli_epi64(bytes, 28));
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, pairs)));
  } else if constexpr (kNibbles) {
    const __m256i pairs = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001)));
    const __m256i order = _mm256_set_epi16(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutexvar_epi16(order, pairs));
  } else if constexpr (kSplit) {
    const __m512i eights = _mm512_shuffle_epi8(
        bytes, _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), eights));
  } else {
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
  }
#else
  const __m256i lows = _mm256_set1_epi16(static_cast<int16_t>(low));
  const __m256i first = _mm256_subs_epi16(_mm256_packs_epi32(v0.raw, v1.raw), lows),
                second = _mm256_subs_epi16(_mm256_packs_epi32(v2.raw, v3.raw), lows);
  const __m256i bytes =
      _mm256_min_epu8(_mm256_packus_epi16(first, second), _mm256_set1_epi8(static_cast<char>(most)));
  if constexpr (kNibbles && kSplit) {
    const __m256i pairs = _mm256_or_si256(bytes, _mm256_srli_epi64(bytes, 28));
    const __m256i order = _mm256_set_epi32(0, 0, 0, 0, 6, 2, 4, 0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(pairs, order)));
  } else if constexpr (kNibbles) {
    const __m256i words = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
    const __m128i pairs = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_shuffle_epi8(pairs, _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0)));
  } else if constexpr (kSplit) {
    const __m256i eights = _mm256_shuffle_epi8(
        bytes,
        _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(eights, 0xD8));
  } else {
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
  }
#endif
}

// The codes of four vectors from x on, kSplit: as load_two has them; code(v, i): those of the i-th.
template <bool kNibbles, bool kSplit, class Type, class D, class Code>
HWY_INLINE void encode_four(D d, const typename Type::Memory* HWY_RESTRICT x, int low, int most,
                            uint8_t* HWY_RESTRICT to, const Code& code) {
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto two = [&](const typename Type::Memory* from) HWY_ATTR -> Two<hn::Vec<D> > {
    if constexpr (kSplit) return load_two<Type>(d, from);
    return {Type::load(d, from), Type::load(d, from + N)};
  };
  const auto first = two(x), second = two(x + 2 * N);
  store_four<kNibbles, kSplit>(code(first.a, 0), code(first.b, 1), code(second.a, 2), code(second.b, 3), low,
                               most, to);
}
#else
#define HALFBYTE_PACKS_CODES 0
#endif

// The integer nearest to v, |v| < 2^30.
template <class V>
HWY_INLINE auto nearest(V v) {
#if HALFBYTE_AVX512
  return hn::Vec<hn::RebindToSigned<hn::DFromV<V> > >{_mm512_cvtps_epi32(v.raw)};
#elif HWY_ARCH_X86
  return hn::Vec<hn::RebindToSigned<hn::DFromV<V> > >{_mm256_cvtps_epi32(v.raw)};
#else
  return hn::NearestInt(v);
#endif
}

// What follows makes integers of f32, by the parameters of a group: store_four and encode_group make codes of
// them.

// rne((x - bias) / scale) + zero; kBias, kZero: else they are 0.
template <bool kBias, bool kZero>
struct ScaledCode {
  using D = hn::ScalableTag<float>;
  hn::Vec<D> s, r, b;
  hn::Vec<hn::RebindToSigned<D> > z;
  HWY_INLINE ScaledCode(float scale, float reciprocal, float bias, int zero)
      : s(hn::Set(D(), scale)),
        r(hn::Set(D(), reciprocal)),
        b(hn::Set(D(), bias)),
        z(hn::Set(hn::RebindToSigned<D>(), zero)) {}
  HWY_INLINE auto operator()(hn::Vec<D> v) const {
    if constexpr (kBias) v = hn::Sub(v, b);
    const auto code = nearest(quotient(v, s, r));
    if constexpr (kZero)
      return hn::Add(code, z);
    else
      return code;
  }
};

// The correctly rounded quotient, saturated, as E2M1 or E4M3. Adding a power of two leaves the digits that a
// code has, to the nearest. No tables, which cost groups of 16 most of their time.
// Of E2M1, 0 has no sign; nor has the quotient of -0, and no other is 0 (has_exact_e2m1). Of E4M3, quotients
// below half of the least value are not exact, but round to 0 as well; the sign is that of x.
template <bool kE2m1>
struct FloatingCode {
  using D = hn::ScalableTag<float>;
  static constexpr int kBits = kE2m1 ? 1 : 3;           // of the mantissa
  static constexpr int kLeast = kE2m1 ? 127 : 127 - 6;  // the least exponent with all of them
  static constexpr int kSign = kE2m1 ? 8 : 0x80, kToSign = kE2m1 ? 28 : 24;
  hn::Vec<D> s, r;
  HWY_INLINE FloatingCode(float scale, float reciprocal)
      : s(hn::Set(D(), scale)), r(hn::Set(D(), reciprocal)) {}
  HWY_INLINE auto operator()(hn::Vec<D> v) const {
    const hn::RebindToSigned<D> di;
    const auto q = quotient(v, s, r);
    const auto y = hn::Min(hn::Abs(q), hn::Set(D(), kE2m1 ? 6.0f : formats::kMaxE4m3));
    const auto least = hn::Set(di, kLeast << 23);
    const auto power = hn::Max(hn::And(hn::BitCast(di, y), hn::Set(di, 0x7F800000)), least);
    const auto shift = hn::Add(power, hn::Set(di, (23 - kBits) << 23));
    const auto digits = hn::Sub(hn::BitCast(di, hn::Add(y, hn::BitCast(D(), shift))), shift);
    const auto magnitude = hn::Add(hn::ShiftRight<23 - kBits>(hn::Sub(power, least)), digits);
    return hn::OrAnd(magnitude, hn::ShiftRight<kToSign>(hn::BitCast(di, kE2m1 ? q : v)), hn::Set(di, kSign));
  }
};

#if HALFBYTE_AVX512
// The code of a table, by bins; x beyond the values of the code book is in the first or the last.
template <bool kOfMagnitudes>
struct BinCode {
  __m512 bins, zero, edges_low, edges_high, below_zero;
  __m512i ranks_low, ranks_high, codes;
  HWY_INLINE BinCode(const TableBounds& bounds, float scale, float reciprocal)
      : bins(_mm512_set1_ps(bounds.bins_of_one * reciprocal)),
        zero(_mm512_set1_ps(bounds.bin_of_zero)),
        ranks_low(_mm512_load_si512(bounds.rank_of_bin)),
        ranks_high(_mm512_load_si512(bounds.rank_of_bin + 16)),
        codes(_mm512_load_si512(bounds.code_of_rank)) {
    const __m512 t = bounds.thresholds(scale);
    edges_low = _mm512_permutexvar_ps(_mm512_load_si512(bounds.edge_of_bin), t);
    edges_high = _mm512_permutexvar_ps(_mm512_load_si512(bounds.edge_of_bin + 16), t);
    below_zero = _mm512_permutexvar_ps(_mm512_set1_epi32(7), t);
  }
  HWY_INLINE hn::Vec<hn::ScalableTag<int32_t> > operator()(hn::Vec<hn::ScalableTag<float> > x) const {
    const __m512 own = kOfMagnitudes ? _mm512_abs_ps(x.raw) : x.raw;
    const __m512 place = _mm512_min_ps(_mm512_max_ps(_mm512_fmadd_ps(own, bins, zero), _mm512_setzero_ps()),
                                       _mm512_set1_ps(31));
    const __m512i bin = _mm512_cvtps_epi32(place);
    const __mmask16 above =
        _mm512_cmp_ps_mask(own, _mm512_permutex2var_ps(edges_low, bin, edges_high), _CMP_GT_OQ);
    __m512i rank = _mm512_permutex2var_epi32(ranks_low, bin, ranks_high);
    rank = _mm512_mask_add_epi32(rank, above, rank, _mm512_set1_epi32(1));
    if (kOfMagnitudes) {
      const __mmask16 negative = _mm512_cmp_ps_mask(x.raw, below_zero, _CMP_LE_OQ);
      rank = _mm512_mask_sub_epi32(rank, negative, _mm512_set1_epi32(15), rank);
    }
    return hn::Vec<hn::ScalableTag<int32_t> >{_mm512_permutexvar_epi32(rank, codes)};
  }
};
#endif

// While n elements at x are worked on, fetches what is read a block later: the processor does not run ahead
// so far. Blocks are read twice, first for their ranges. `block`: elements.
constexpr int64_t kAhead = 2048;            // bytes beyond the block
constexpr int64_t kMostBlock = 128 * 1024;  // bytes: half of a small second-level cache
template <class T>
HWY_INLINE void fetch_ahead(const T* x, int64_t n, int64_t block) {
  x += block + kAhead / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) hwy::Prefetch(x + i);
}

// n rounded up to a multiple of the lanes of f32.
inline int64_t whole_vectors(int64_t n) {
  const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  return (n + N - 1) / N * N;
}

// Codes of n elements (rounded up to whole vectors) of one group, one a byte, or kNibbles: two, where n is a
// multiple of four vectors.
template <bool kNibbles, class Type, class Code>
HWY_INLINE void encode_group(const typename Type::Memory* HWY_RESTRICT x, int64_t n, int low, int most,
                             const Code& code, uint8_t* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
#if HALFBYTE_PACKS_CODES
  for (; i + 4 * N <= n; i += 4 * N)
    encode_four<kNibbles, kEvenOdd<Type>, Type>(d, x + i, low, most, to + (kNibbles ? i / 2 : i),
                                                [&](auto v, int) HWY_ATTR { return code(v); });
#endif
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto lows = hn::Set(di, low), highs = hn::Set(di, low + most);
  for (; i < n; i += N)
    hn::StoreU(hn::DemoteTo(d8, hn::Sub(hn::Min(hn::Max(code(Type::load(d, x + i)), lows), highs), lows)), d8,
               to + i);
}

// Of `count` groups of n elements, each rounded up to whole vectors; code(i): what codes the i-th. kNibbles:
// all are a multiple of four vectors.
template <bool kNibbles, class Type, class MakeCode>
HWY_INLINE void encode_each(const typename Type::Memory* HWY_RESTRICT x, int64_t n, int64_t count, int low,
                            int most, const MakeCode& code, uint8_t* HWY_RESTRICT to) {
#if HALFBYTE_PACKS_CODES
  const hn::ScalableTag<float> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  if (n == N || n == 2 * N) {
    const int64_t groups = 4 * N / n;
    for (int64_t i = 0; i < count; i += groups) {
      const auto* own = x + i * n;
      fetch_ahead(own, groups * n, count * n);
      uint8_t* const out = to + (kNibbles ? i * n / 2 : i * n);
      if (n == N)
        encode_four<kNibbles, false, Type>(d, own, low, most, out,
                                           [&](auto v, int at) HWY_ATTR { return code(i + at)(v); });
      else
        encode_four<kNibbles, kEvenOdd<Type>, Type>(
            d, own, low, most, out, [&](auto v, int at) HWY_ATTR { return code(i + at / 2)(v); });
    }
    return;
  }
#endif
  const int64_t whole = whole_vectors(n);
  for (int64_t i = 0; i < count; ++i) {
    fetch_ahead(x + i * n, n, count * n);
    encode_group<kNibbles, Type>(x + i * n, whole, low, most, code(i), to + (kNibbles ? i * n / 2 : i * n));
  }
}

// The same for f64, by divisions: clamp(rne((x - bias) / scale), low, high) - low.
HWY_INLINE void divided_codes(const double* HWY_RESTRICT x, int64_t n, double scale, double bias, int low,
                              int high, uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<double> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, scale), b = hn::Set(d, bias);
  const auto lo = hn::Set(d, static_cast<double>(low)), hi = hn::Set(d, static_cast<double>(high));
  HWY_ALIGN double out[HWY_MAX_BYTES / sizeof(double)];
  for (int64_t i = 0; i < n; i += N) {
    const auto q = hn::Div(hn::Sub(hn::LoadU(d, x + i), b), s);
    hn::Store(hn::Sub(hn::Round(hn::Min(hi, hn::Max(lo, q))), lo), d, out);
    for (int64_t j = 0; j < N; ++j) codes[i + j] = static_cast<uint8_t>(out[j]);
  }
}

// E4M3 of x / scale, saturated, one a byte; n rounded up to whole vectors. The quotient is that of a
// division.
template <class Type>
HWY_INLINE void divided_e4m3_codes(const typename Type::Memory* HWY_RESTRICT x, int64_t n,
                                   typename Type::Compute scale, uint8_t* HWY_RESTRICT codes) {
  using F = typename Type::Compute;
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto most = hn::Set(d, static_cast<F>(formats::kMaxE4m3));
  HWY_ALIGN F quotients[HWY_MAX_BYTES / sizeof(F)];
  for (int64_t i = 0; i < n; i += N) {
    const auto quotient = hn::Div(Type::load(d, x + i), hn::Set(d, scale));
    hn::Store(hn::Min(most, hn::Max(hn::Neg(most), quotient)), d, quotients);
    for (int64_t j = 0; j < N; ++j) codes[i + j] = formats::to_e4m3(quotients[j]);
  }
}

// Whether the corrections of quotients are exact for |x - bias| <= largest: the residual must not underflow
// where it matters, nor the quotient overflow.
inline bool quotient_is_exact(double scale, double largest) {
  return scale > 0x1p-90 && scale < 0x1p100 && largest < scale * 0x1p20;
}

// Whether groups of |x| <= absmax are for the loops above.
template <class F>
bool in_fast_range(const formats::GroupParams<F>& params, double absmax, formats::Kind kind) {
  const double scale = formats::abs(static_cast<double>(params.code_scale));
  const double largest = absmax + formats::abs(static_cast<double>(params.code_bias));
  if (!formats::is_finite(static_cast<double>(params.code_scale)) || !formats::is_finite(largest))
    return false;
  if (kind == formats::Kind::table || kind == formats::Kind::floating || sizeof(F) == 8)
    return scale > 0 && largest < 0x1p1020;
  return quotient_is_exact(scale, largest);
}

// ---- Packing ----------------------------------------------------------------------------------

#if HALFBYTE_VBMI
// Of eight words with eight codes each: where their bytes are.
struct BytesOfEights {
  alignas(64) uint8_t at[7][64] = {};
  constexpr BytesOfEights() {
    for (int bits = 1; bits < 7; ++bits)
      for (int i = 0; i < 8 * bits; ++i) at[bits][i] = static_cast<uint8_t>(i / bits * 8 + i % bits);
  }
};
constexpr BytesOfEights kBytesOfEights;
#endif

// n codes, one a byte, to the bit stream at `out`; n a multiple of 8.
HWY_INLINE void pack(const uint8_t* HWY_RESTRICT codes, int64_t n, int bits, uint8_t* HWY_RESTRICT out) {
  if (bits == 8) {
    std::memcpy(out, codes, static_cast<size_t>(n));
    return;
  }
  int64_t i = 0;
#if HALFBYTE_VBMI
  if (bits != 4) {
    // Two, four, eight codes beside each other; then the bytes of all eights.
    const __m512i pairs = _mm512_set1_epi16(static_cast<int16_t>(1 | 256 << bits)),
                  fours = _mm512_set1_epi32(1 | 1 << (16 + 2 * bits));
    const __m512i order = _mm512_load_si512(kBytesOfEights.at[bits]);
    const __mmask64 written = ~uint64_t{0} >> (64 - 8 * bits);
    for (; i + 64 <= n; i += 64) {
      const __m512i two = _mm512_maddubs_epi16(pairs, _mm512_loadu_si512(codes + i));
      const __m512i four = _mm512_madd_epi16(two, fours);
      const __m512i low = _mm512_maskz_mov_epi32(0x5555, four);
      const __m512i high = _mm512_sllv_epi64(_mm512_srli_epi64(four, 32), _mm512_set1_epi64(4 * bits));
      _mm512_mask_storeu_epi8(out + i / 8 * bits, written,
                              _mm512_permutexvar_epi8(order, _mm512_or_si512(low, high)));
    }
  }
#endif
  if (bits == 4) {
    const hn::ScalableTag<uint16_t> d16;
    const hn::Rebind<uint8_t, decltype(d16)> d8;
    const auto N = static_cast<int64_t>(hn::Lanes(d16));
    for (; i + 2 * N <= n; i += 2 * N) {
      const auto pairs = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes + i));
      const auto bytes = hn::And(hn::Or(pairs, hn::ShiftRight<4>(pairs)), hn::Set(d16, uint16_t{0xFF}));
      hn::StoreU(hn::TruncateTo(d8, bytes), d8, out + i / 2);
    }
  }
  for (; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    const uint64_t packed = formats::pack8(eight, bits);
    std::memcpy(out + i / 8 * bits, &packed, static_cast<size_t>(bits));
  }
}

#if HALFBYTE_VBMI

// The codes of a table format for groups of bf16 whose largest magnitude is a bf16 m * 2^e. They depend on m,
// the sign of x and d = (bits of the largest magnitude) - (bits of |x|) alone, for each of the 128 m. d is
// cut into buckets of 32 values, a factor of at most 1.25, so that none holds two decision edges: a bucket
// has one code up to its edge and one beyond. 1024 values, eight octaves, are resolved; smaller |x| count as
// the smallest.
struct Bf16Lookup {
  static constexpr int kBuckets = 32, kBucketBits = 5, kWindow = kBuckets << kBucketBits;
  // By sign * 32 + bucket: the last place in the bucket (0 .. 31; 255: no edge) with the first code; the
  // codes.
  alignas(64) uint8_t last[128][64];
  alignas(64) uint8_t near[128][64], far[128][64];
  float scales[128];                     // of m, stored
  uint32_t low = 0x2180, high = 0x4780;  // bf16 bits of the largest magnitudes this holds for: 2^-60, 2^16
  bool signed_zero = false;              // -0 has another code than the smallest negative numbers
  bool usable = false;

  explicit Bf16Lookup(const formats::Codec& codec) {
    const formats::CodeBook& book = codec.book;
    const float largest = book.max_magnitude;
    if (largest < 0x1p-10f || largest > 0x1p10f) return;
    if (codec.scale_type == formats::ScaleType::f16) {  // the rounding of a normal f16 scale has no exponent
      if (largest < 1 || largest > 8) return;
      low = 0x3A80;   // 2^-10
      high = 0x4700;  // 2^15
    }
    signed_zero = formats::table_encode(book, -0x1p-140f) != formats::table_encode(book, -0.0f);
    if (formats::table_encode(book, 0x1p-140f) != formats::table_encode(book, 0.0f)) return;
    const TableBounds bounds(book);
    for (uint32_t m = 0; m < 128; ++m) {
      const uint32_t absmax_bits = 0x3F80 | m, base = absmax_bits - (kWindow - 1);
      const float absmax = formats::bf16_to_f32(static_cast<uint16_t>(absmax_bits));
      scales[m] = formats::group_params(-absmax, absmax, codec).scale;
      HWY_ALIGN float edges[16];
      bounds.thresholds(scales[m], edges);
      for (const int sign : {1, -1}) {
        // Away from zero: rank after rank, each from the first magnitude (in bf16 bits) that has it.
        int rank = formats::table_rank(book, sign * 0x1p-140f);
        int bucket = 0;
        uint8_t* const bucket_last = last[m] + (sign < 0 ? kBuckets : 0);
        uint8_t* const bucket_near = near[m] + (sign < 0 ? kBuckets : 0);
        uint8_t* const bucket_far = far[m] + (sign < 0 ? kBuckets : 0);
        const auto fill_to = [&](int end) {
          for (; bucket < end; ++bucket) {
            bucket_last[bucket] = 255;
            bucket_near[bucket] = bucket_far[bucket] = book.code_of_rank[rank];
          }
        };
        for (int next = rank + sign; next >= 0 && next < 16; next += sign) {
          const float edge = edges[sign > 0 ? rank : next];
          // x > edge, for negative x: |x| >= |edge|; up to the next bf16.
          const uint32_t bits = formats::bit_cast<uint32_t>(edge) & 0x7FFFFFFFu;
          const uint32_t first = sign > 0 ? (bits >> 16) + 1 : (bits + 0xFFFFu) >> 16;
          if (first > absmax_bits) break;
          const auto place = static_cast<int>(first) - static_cast<int>(base);
          if (place < 1) return;  // smaller than what is resolved
          fill_to(place >> kBucketBits);
          const int in_bucket = place & ((1 << kBucketBits) - 1);
          if (bucket > place >> kBucketBits) return;  // two edges in a bucket
          bucket_near[bucket] = book.code_of_rank[rank];
          bucket_far[bucket] = book.code_of_rank[next];
          bucket_last[bucket] = static_cast<uint8_t>(in_bucket - 1);
          if (in_bucket == 0) {
            bucket_last[bucket] = 255;
            bucket_near[bucket] = bucket_far[bucket];
          }
          ++bucket;
          rank = next;
        }
        fill_to(kBuckets);
      }
    }
    usable = true;
  }
};

// |x| of n bf16 values, the largest in each of 32 lanes; n is a multiple of 32.
HWY_INLINE __m512i largest_bf16(const uint16_t* HWY_RESTRICT x, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i largest = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
  for (int64_t i = 32; i < n; i += 32)
    largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  return largest;
}

// The largest lane of each of four vectors, in 16-bit lane 0 of the 128-bit blocks.
HWY_INLINE __m512i largest_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
  const __m512i cd = _mm512_max_epu16(_mm512_shuffle_i64x2(c, d, 0x44), _mm512_shuffle_i64x2(c, d, 0xEE));
  __m512i all = _mm512_max_epu16(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xDD));
  all = _mm512_max_epu16(all, _mm512_shuffle_epi32(all, _MM_PERM_BADC));
  all = _mm512_max_epu16(all, _mm512_shuffle_epi32(all, _MM_PERM_CDAB));
  return _mm512_max_epu16(all, _mm512_srli_epi32(all, 16));
}

// The nibbles of 64 elements (32 bytes), x in two halves.
template <bool kSignedZero>
HWY_INLINE __m256i lookup_nibbles(__m512i x0, __m512i x1, __m512i base, __m512i last, __m512i near,
                                  __m512i far) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF), place = _mm512_set1_epi16(31),
                sign = _mm512_set1_epi16(32);
  if constexpr (kSignedZero) {
    const __m512i minus_zero = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    x0 = _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(x0, minus_zero), x0);
    x1 = _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(x1, minus_zero), x1);
  }
  const __m512i d0 = _mm512_subs_epu16(_mm512_and_si512(x0, magnitude), base);
  const __m512i d1 = _mm512_subs_epu16(_mm512_and_si512(x1, magnitude), base);
  // (sign bit moved to 32) | d / 32
  const __m512i key0 =
      _mm512_ternarylogic_epi32(_mm512_srli_epi16(x0, 10), sign, _mm512_srli_epi16(d0, 5), 0xEA);
  const __m512i key1 =
      _mm512_ternarylogic_epi32(_mm512_srli_epi16(x1, 10), sign, _mm512_srli_epi16(d1, 5), 0xEA);
  const __m512i key = _mm512_packus_epi16(key0, key1);
  const __m512i at = _mm512_packus_epi16(_mm512_and_si512(d0, place), _mm512_and_si512(d1, place));
  const __mmask64 beyond = _mm512_cmpgt_epu8_mask(at, _mm512_permutexvar_epi8(key, last));
  const __m512i codes = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(key, near), beyond, key, far);
  const __m512i bytes = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));  // code + 16 * next code
  // packus took eight elements of each half in turn.
  const __m512i order =
      _mm512_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                      0, 0, 0, 62, 60, 58, 56, 46, 44, 42, 40, 30, 28, 26, 24, 14, 12, 10, 8, 54, 52, 50, 48,
                      38, 36, 34, 32, 22, 20, 18, 16, 6, 4, 2, 0);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi8(order, bytes));
}

// One group of n elements (a multiple of 32) whose largest magnitude is `absmax` (bf16 bits).
template <bool kSignedZero>
HWY_INLINE void lookup_group(const Bf16Lookup& lookup, const uint16_t* HWY_RESTRICT x, int64_t n,
                             uint32_t absmax, uint8_t* HWY_RESTRICT out) {
  const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(absmax - (Bf16Lookup::kWindow - 1)));
  const uint32_t m = absmax & 0x7F;
  const __m512i last = _mm512_load_si512(lookup.last[m]), near = _mm512_load_si512(lookup.near[m]),
                far = _mm512_load_si512(lookup.far[m]);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2),
                        lookup_nibbles<kSignedZero>(_mm512_loadu_si512(x + i), _mm512_loadu_si512(x + i + 32),
                                                    base, last, near, far));
  if (i < n) {
    const __m256i half =
        lookup_nibbles<kSignedZero>(_mm512_loadu_si512(x + i), _mm512_setzero_si512(), base, last, near, far);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2), _mm256_castsi256_si128(half));
  }
}

#endif  // HALFBYTE_VBMI

#if HALFBYTE_AVX512
HWY_INLINE __m512i bf16_magnitude(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)); }

// Adds to each lane how many of seven ascending thresholds |x| is beyond, and 8 where x is below zero: E2M1
// where the thresholds are. All are bf16.
HWY_INLINE __m512i add_e2m1(__m512i sum, __m512i x, const __m512i* t) {
  const __m512i a = bf16_magnitude(x);
  const __mmask32 negative = _mm512_cmpgt_epu16_mask(x, _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  const __mmask32 is_4 = _mm512_cmpgt_epi16_mask(a, t[3]);
  const __mmask32 is_2 = _mm512_cmpgt_epi16_mask(a, _mm512_mask_mov_epi16(t[1], is_4, t[5]));
  const __m512i below = _mm512_mask_mov_epi16(t[0], is_2, t[2]),
                above = _mm512_mask_mov_epi16(t[4], is_2, t[6]);
  const __mmask32 is_1 = _mm512_cmpgt_epi16_mask(a, _mm512_mask_mov_epi16(below, is_4, above));
  sum = _mm512_mask_add_epi16(sum, negative, sum, _mm512_set1_epi16(8));
  sum = _mm512_mask_add_epi16(sum, is_4, sum, _mm512_set1_epi16(4));
  sum = _mm512_mask_add_epi16(sum, is_2, sum, _mm512_set1_epi16(2));
  return _mm512_mask_add_epi16(sum, is_1, sum, _mm512_set1_epi16(1));
}

// The nibbles of n bf16 of one group, a multiple of 64, by thresholds that lie 32 apart.
HWY_INLINE void nibbles_by_thresholds(const uint16_t* HWY_RESTRICT x, int64_t n,
                                      const uint16_t* HWY_RESTRICT thresholds, __m512i code_of_sum,
                                      uint8_t* HWY_RESTRICT out) {
  __m512i t[7];
  for (int i = 0; i < 7; ++i) t[i] = _mm512_set1_epi16(static_cast<int16_t>(thresholds[32 * i]));
  for (int64_t i = 0; i < n; i += 64) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i first = add_e2m1(zero, _mm512_loadu_si512(x + i), t),
                  second = add_e2m1(zero, _mm512_loadu_si512(x + i + 32), t);
    // Of each 128 bits eight of either.
    const __m512i codes = _mm512_shuffle_epi8(code_of_sum, _mm512_packus_epi16(first, second));
    const __m256i pairs = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001)));
    const __m256i order = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), _mm256_permutevar8x32_epi32(pairs, order));
  }
}

// E2M1 codes of bf16 for 16 groups of n = 16 or 32 elements, by comparing the bits of |x| with seven
// thresholds of each group. Elements are transposed: eight vectors, of which the i-th has the i-th of every
// eight elements of 256, so that a lane has a threshold and a word gets codes of its own. Vectors of eights:
// of source vector k and its 128-bit block b they have lane 8 * b + k.
template <int kSize>
class E2m1OfBf16 {
  static_assert(kSize == 16 || kSize == 32);
  static constexpr int kBlocks = kSize / 16, kBlocksOfGroup = kSize / 8;

 public:
  // Reads 16 * kSize elements.
  HWY_INLINE explicit E2m1OfBf16(const uint16_t* HWY_RESTRICT x) {
    for (int block = 0; block < kBlocks; ++block) {
      __m512i in[8], pairs[8], fours[8];
      for (int i = 0; i < 8; ++i) in[i] = _mm512_loadu_si512(x + 256 * block + 32 * i);
      for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = _mm512_unpacklo_epi16(in[2 * i], in[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi16(in[2 * i], in[2 * i + 1]);
      }
      for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; ++half) {
          fours[i + 2 * half] = _mm512_unpacklo_epi32(pairs[i + half], pairs[i + 2 + half]);
          fours[i + 2 * half + 1] = _mm512_unpackhi_epi32(pairs[i + half], pairs[i + 2 + half]);
        }
      for (int i = 0; i < 4; ++i) {
        x_[8 * block + 2 * i] = _mm512_unpacklo_epi64(fours[i], fours[i + 4]);
        x_[8 * block + 2 * i + 1] = _mm512_unpackhi_epi64(fours[i], fours[i + 4]);
      }
    }
  }

  // The largest |x| of each group.
  HWY_INLINE __m512 absmax() const {
    __m512i largest[kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      __m512i all = bf16_magnitude(x_[8 * block]);
      for (int i = 1; i < 8; ++i) all = _mm512_max_epu16(all, bf16_magnitude(x_[8 * block + i]));
      all = _mm512_max_epu16(all, _mm512_shuffle_i64x2(all, all, 0xB1));
      if (kSize == 32) all = _mm512_max_epu16(all, _mm512_shuffle_i64x2(all, all, 0x4E));
      largest[block] = all;
    }
    alignas(64) static constexpr auto kWords = [] {
      std::array<uint16_t, 32> words = {};
      for (unsigned group = 0; group < 16; ++group) {
        const unsigned vector = group * kSize / 32, block = group * kSize % 32 / 8;
        words[2 * group + 1] = static_cast<uint16_t>(vector / 8 * 32 + block * 8 + vector % 8);
      }
      return words;
    }();
    const __m512i words = _mm512_load_si512(kWords.data());
    constexpr __mmask32 kUpper = 0xAAAAAAAA;
    return _mm512_castsi512_ps(
        kBlocks == 1 ? _mm512_maskz_permutexvar_epi16(kUpper, words, largest[0])
                     : _mm512_maskz_permutex2var_epi16(kUpper, largest[0], words, largest[kBlocks - 1]));
  }

  // The nibbles, by what decides x / scale > edge (TableBounds).
  HWY_INLINE void encode(const TableBounds& bounds, const float* HWY_RESTRICT scales,
                         uint8_t* HWY_RESTRICT to) const {
    const __m512 scale = _mm512_load_ps(scales);
    __m512i all[7];
    for (int i = 0; i < 7; ++i) all[i] = bounds.bf16_thresholds(i, scale);
    for (int block = 0; block < kBlocks; ++block) {
      alignas(64) static constexpr auto kWords = [] {
        std::array<std::array<uint16_t, 32>, kBlocks> words = {};
        for (unsigned i = 0; i < kBlocks; ++i)
          for (unsigned lane = 0; lane < 32; ++lane)
            words[i][lane] =
                static_cast<uint16_t>(2 * (((8 * i + lane % 8) * 4 + lane / 8) / kBlocksOfGroup) + 1);
        return words;
      }();
      const __m512i words = _mm512_load_si512(kWords[block].data());
      __m512i t[7];
      for (int i = 0; i < 7; ++i) t[i] = _mm512_permutexvar_epi16(words, all[i]);
      __m512i codes[2];  // of four elements each
      for (int half = 0; half < 2; ++half) {
        __m512i sum = _mm512_setzero_si512();
        for (int i = 3; i >= 0; --i)
          sum = add_e2m1(_mm512_slli_epi16(sum, 4), x_[8 * block + 4 * half + i], t);
        codes[half] = sum;
      }
      const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
      const auto store = [&](int at, __m512i eights) HWY_ATTR {
        _mm512_storeu_si512(to + 128 * block + at, _mm512_permutexvar_epi32(order, eights));
      };
      store(0, _mm512_unpacklo_epi16(codes[0], codes[1]));
      store(64, _mm512_unpackhi_epi16(codes[0], codes[1]));
    }
  }

 private:
  __m512i x_[8 * kBlocks];
};
#endif

// What is made once for a table format and f32 arithmetic.
struct Prepared {
  TableBounds bounds;
#if HALFBYTE_VBMI
  std::optional<Bf16Lookup> lookup;  // usable
#endif

  Prepared(const formats::Codec& codec, bool by_lookup) : bounds(codec.book) {
    (void)by_lookup;
#if HALFBYTE_VBMI
    if (by_lookup && !bounds.is_symmetric && !lookup.emplace(codec).usable) lookup.reset();
#endif
  }
};

// ---- Spans ------------------------------------------------------------------------------------

template <class Type>
class SpanQuantizer {
 public:
  using F = typename Type::Compute;
  using Memory = typename Type::Memory;

  SpanQuantizer(const QuantizeProblem& problem, const QuantizeSpan& span)
      : problem_(problem), codec_(problem.codec), span_(span) {
    x_ = static_cast<const Memory*>(problem.x) + span.row * problem.shape.cols;
    out_ = problem.codes + span.row * problem.shape.row_bytes;
    packed_ = span.begin;
  }

  QuantizeStatus run() {
    const QuantShape& shape = problem_.shape;
    formats::GroupParams<F> params;
    if (span_.params)
      params = convert_params<F>(*span_.params);
    else if (shape.group_size <= kMostBlock / static_cast<int64_t>(sizeof(Memory)))
      block_ = shape.group_size;
    for (int64_t begin = span_.begin; begin < span_.end;) {
      const int64_t n = span_.params ? span_.end - begin : std::min(shape.group_size, span_.end - begin);
      const int64_t group = span_.row * shape.groups_per_row + begin / shape.group_size;
#if HALFBYTE_VBMI
      if constexpr (std::is_same_v<Type, BF16>) {
        const Prepared* const prepared = prepared_of_tables();
        if (prepared != nullptr && prepared->lookup && !span_.params && num_codes_ % 8 == 0) {
          flush();
          const Bf16Lookup* const lookup = &*prepared->lookup;
          const int64_t end = lookup->signed_zero ? lookup_groups<true>(begin, *lookup)
                                                  : lookup_groups<false>(begin, *lookup);
          if (end > begin) {
            begin = packed_ = end;
            continue;
          }
        }
      }
#endif
      if constexpr (sizeof(F) == 4) {
        if (const int64_t end = encode_batch(begin); end > begin) {
          begin = end;
          continue;
        }
      }
      const BitsRange<Type> range = bits_range<Type>(x_ + begin, n);
      const bool finite = is_finite(range);
      const int64_t first = span_.row * shape.cols + begin;
      if (finite && !span_.params) {
        const F min = value_of_sortable<Type>(range.min), max = value_of_sortable<Type>(range.max);
        params = problem_.search ? search_group_cpu(problem_, first, n, min, max)
                                 : formats::group_params(min, max, codec_);
        finish_group(group, params);
      } else if (!finite) {
        const ValueRange values = value_range_ref(problem_.x, problem_.dtype, first, n);
        merge(status_, {values.num_nonfinite, first + values.first_nonfinite, 0});
        if (!span_.params) {
          params =
              group_params_ref(problem_, first, n, static_cast<F>(values.min), static_cast<F>(values.max));
          finish_group(group, params);
        }
      }
      const bool fast = finite && in_fast_range(params, absmax(range), codec_.kind);
      if constexpr (sizeof(F) == 4)
        by_rounding_ = fast && (is_e2m1_ ? has_exact_e2m1<Type>(params.code_scale, absmax(range))
                                         : codec_.kind == formats::Kind::floating &&
                                               quotient_is_exact(params.code_scale, absmax(range)));
      for (int64_t i = begin; i < begin + n; i += kCodes)
        encode(i, std::min(kCodes, begin + n - i), params, fast);
      begin += n;
    }
    flush_all(params);
    return status_;
  }

 private:
  static double absmax(const BitsRange<Type>& range) {
    return std::max(formats::abs(static_cast<double>(value_of_sortable<Type>(range.min))),
                    formats::abs(static_cast<double>(value_of_sortable<Type>(range.max))));
  }

#if HALFBYTE_VBMI
  // Four groups a time from column `begin` on, as long as they are plain; returns the column after them.
  template <bool kSignedZero>
  int64_t lookup_groups(int64_t begin, const Bf16Lookup& lookup) {
    const int64_t n = problem_.shape.group_size;
    const auto* x = reinterpret_cast<const uint16_t*>(x_);
    int64_t group = span_.row * problem_.shape.groups_per_row + begin / n;
    alignas(64) uint16_t absmax[32];
    for (; begin + 4 * n <= span_.end; begin += 4 * n, group += 4) {
      fetch_ahead(x + begin, 4 * n, 4 * n);
      _mm512_store_si512(
          absmax, largest_of_four(largest_bf16(x + begin, n), largest_bf16(x + begin + n, n),
                                  largest_bf16(x + begin + 2 * n, n), largest_bf16(x + begin + 3 * n, n)));
      bool plain = true;
      for (int i = 0; i < 4; ++i) plain = plain && absmax[8 * i] >= lookup.low && absmax[8 * i] < lookup.high;
      if (!plain) break;
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = absmax[8 * i];
        lookup_group<kSignedZero>(lookup, x + begin + i * n, n, bits, out_ + (begin + i * n) / 2);
        const auto scale = formats::bit_cast<float>(formats::bit_cast<uint32_t>(lookup.scales[bits & 0x7F]) +
                                                    ((bits & 0x7F80u) - 0x3F80u) * 0x10000u);
        formats::store_scale(problem_.scales, group + i, scale, codec_.scale_type);
      }
    }
    return begin;
  }
#endif

  // Groups whose parameters are found together, if they are plain; returns the column after them.
  int64_t encode_batch(int64_t begin) {
    // A group may be said to be as long as there are numbers.
    const int64_t n = problem_.shape.group_size, count = GroupBatch::size();
    if (problem_.search || span_.params || n > (span_.end - begin) / count || begin < batched_) return begin;
    const int64_t end = begin + count * n;
    batched_ = end;  // or they are for the groups one by one
    GroupBatch batch;
#if HALFBYTE_AVX512
    if constexpr (std::is_same_v<Type, BF16>)
      if (has_thresholds_ && n < 64 && num_codes_ % 8 == 0)
        return (n == 16 ? encode_e2m1<16>(begin, batch) : encode_e2m1<32>(begin, batch)) ? end : begin;
#endif
    if (n < count) {
      for (int64_t i = 0; i < count; ++i) {
        const BitsRange<Type> range = bits_range<Type>(x_ + begin + i * n, n);
        batch.min[i] = value_of_sortable<Type>(range.min);
        batch.max[i] = value_of_sortable<Type>(range.max);
      }
    } else if (!codec_.asymmetric &&
               (codec_.rule == formats::Rule::absmax || codec_.rule == formats::Rule::half_range)) {
      find_ranges<true>(x_ + begin, n, batch);  // they know no more than one range for both signs
    } else {
      find_ranges<false>(x_ + begin, n, batch);
    }
    const int64_t group = span_.row * problem_.shape.groups_per_row + begin / n;
    if (!batch.find(codec_, {problem_.scales, problem_.zeros, problem_.biases}, group,
                    is_e2m1_ || has_thresholds_ ? kMostE2m1Scale<Type> : 0x1p100f))
      return begin;
    by_rounding_ = is_e2m1_ || codec_.kind == formats::Kind::floating;
    // Whole vectors of each group, which have as many lanes as a batch has groups: what they take of the next
    // group is written again.
    if (n >= count && count * n <= kCodes && (n % count == 0 || end + count <= span_.end)) {
#if HALFBYTE_PACKS_CODES
      // What needs no packing goes where it belongs.
      const bool has_ranks =
          codec_.kind == formats::Kind::table && !by_rounding_ && !has_thresholds_ && !bounds_have_bins();
      const bool is_whole = n == count || n == 2 * count || n % (4 * count) == 0;
      if (!has_ranks && num_codes_ % 8 == 0 && n % count == 0 &&
          (codec_.bits == 8 || (codec_.bits == 4 && is_whole))) {
        flush();
        if (codec_.bits == 8)
          encode_groups<false>(x_ + begin, n, batch, out_ + begin);
        else
          encode_groups<true>(x_ + begin, n, batch, out_ + begin / 2);
        packed_ = end;
        return end;
      }
#endif
      if (num_codes_ + count * n > kCodes + 8) flush();
      uint8_t* const codes = codes_ + num_codes_;
      encode_groups<false>(x_ + begin, n, batch, codes);
      num_codes_ += count * n;
      return end;
    }
    for (int64_t i = 0; i < count; ++i) {
      formats::GroupParams<F> params;
      params.code_scale = batch.code_scale[i];
      params.code_bias = batch.code_bias[i];
      params.zero_point = batch.zero_point[i];
      for (int64_t from = begin + i * n, to = from + n; from < to; from += kCodes)
        encode(from, std::min(kCodes, to - from), params, true);
    }
    return end;
  }

#if HALFBYTE_AVX512
  // Of a batch of groups of n elements, a multiple of 64.
  HWY_INLINE void encode_by_thresholds(const uint16_t* x, int64_t n, const float* scales, uint8_t* codes) {
    alignas(64) uint16_t thresholds[7][32];
    for (int i = 0; i < 7; ++i)
      _mm512_store_si512(thresholds[i], bounds().bf16_thresholds(i, _mm512_load_ps(scales)));
    uint8_t code_of_sum[16];
    for (int i = 0; i < 8; ++i) {
      code_of_sum[i] = codec_.book.code_of_rank[8 + i];
      code_of_sum[8 + i] = codec_.book.code_of_rank[7 - i];
    }
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<__m128i*>(code_of_sum)));
    for (int64_t i = 0; i < GroupBatch::size(); ++i) {
      fetch_ahead(x + i * n, n, GroupBatch::size() * n);
      nibbles_by_thresholds(x + i * n, n, thresholds[0] + 2 * i + 1, table, codes + i * n / 2);
    }
  }

  // A batch of groups of kSize elements, if they are plain.
  template <int kSize>
  bool encode_e2m1(int64_t begin, GroupBatch& batch) {
    const auto* const x = reinterpret_cast<const uint16_t*>(x_) + begin;
    fetch_ahead(x, 16 * kSize, 16 * kSize);
    const E2m1OfBf16<kSize> groups(x);
    const __m512 absmax = groups.absmax();
    _mm512_store_ps(batch.max, absmax);
    _mm512_store_ps(batch.min, _mm512_sub_ps(_mm512_setzero_ps(), absmax));
    if (!batch.find(codec_, {problem_.scales, problem_.zeros, problem_.biases},
                    span_.row * problem_.shape.groups_per_row + begin / kSize, kMostE2m1Scale<Type>))
      return false;
    flush();
    groups.encode(bounds(), batch.code_scale, out_ + begin / 2);
    packed_ = begin + 16 * kSize;
    return true;
  }
#endif

  // Of a batch of groups of n elements, at least as many as it has groups.
  template <bool kMagnitudes>
  HWY_INLINE void find_ranges(const Memory* x, int64_t n, GroupBatch& batch) {
    const hn::ScalableTag<float> d;
    const hn::RebindToSigned<decltype(d)> di;
    hn::Vec<decltype(di)> low[hn::MaxLanes(di)], high[hn::MaxLanes(di)];
    for (size_t i = 0; i < hn::MaxLanes(di); ++i)
      lane_ranges<kMagnitudes, Type>(di, x + static_cast<int64_t>(i) * n, n, low[i], high[i]);
    const auto most = over_lanes(di, high, [](auto a, auto b) HWY_ATTR { return hn::Max(a, b); });
    if constexpr (kMagnitudes) {
      const auto absmax = values_of_bits<Type>(d, most);
      hn::Store(hn::Neg(absmax), d, batch.min);
      hn::Store(absmax, d, batch.max);
    } else {
      const auto least = over_lanes(di, low, [](auto a, auto b) HWY_ATTR { return hn::Min(a, b); });
      hn::Store(values_of_bits<Type>(d, sortable<typename Type::Bits>(di, least)), d, batch.min);
      hn::Store(values_of_bits<Type>(d, sortable<typename Type::Bits>(di, most)), d, batch.max);
    }
  }

  void finish_group(int64_t group, const formats::GroupParams<F>& params) {
    count(status_, params);
    store_params(problem_, group, params);
  }

  // Codes of columns [begin, begin + n), n <= kCodes, appended to codes_.
  void encode(int64_t begin, int64_t n, const formats::GroupParams<F>& params, bool fast) {
    uint8_t* codes = out_ + begin;
    if (codec_.bits == 8 && n % 8 == 0 && num_codes_ % 8 == 0) {  // or where they belong
      flush();
      packed_ = begin + n;
    } else {
      if (num_codes_ + n > kCodes + 8) flush();
      codes = codes_ + num_codes_;
      num_codes_ += n;
    }
    if (!fast) {
      encode_ref(problem_.x, problem_.dtype, span_.row * problem_.shape.cols + begin, n, params, codec_,
                 codes);
      return;
    }
    // Whole vectors from x, the rest through a padded copy: nothing beyond the group is read.
    constexpr int64_t kPiece = 512;
    const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<F>()));
    const int64_t whole = n / N * N;
    for (int64_t i = 0; i < whole; i += kPiece) {
      const int64_t count = std::min(kPiece, whole - i);
      fetch_ahead(x_ + begin + i, count, block_);
      encode_vectors(x_ + begin + i, count, params, codes + i);
    }
    if (whole < n) {
      Memory tail[HWY_MAX_BYTES / sizeof(F)] = {};
      uint8_t last[HWY_MAX_BYTES];
      std::memcpy(tail, x_ + begin + whole, static_cast<size_t>(n - whole) * sizeof(Memory));
      encode_vectors(tail, N, params, last);
      std::memcpy(codes + whole, last, static_cast<size_t>(n - whole));
    }
  }

  // Of whole vectors, by a table and f32 arithmetic.
  HWY_INLINE void table_codes(const Memory* x, int64_t n, float scale, float reciprocal, uint8_t* codes) {
    (void)reciprocal;
#if HALFBYTE_AVX512
    const TableBounds& own = bounds();
    if (own.takes_bins(scale)) {
      if (own.of_magnitudes)
        encode_group<false, Type>(x, n, 0, 15, BinCode<true>(own, scale, reciprocal), codes);
      else
        encode_group<false, Type>(x, n, 0, 15, BinCode<false>(own, scale, reciprocal), codes);
      return;
    }
#endif
    table_ranks<Type>(x, n, bounds(), scale, codes);
    codes_of_ranks(codes, n);
  }
  HWY_INLINE void codes_of_ranks(uint8_t* codes, int64_t n) const {
    const hn::ScalableTag<uint8_t> d;
    const auto table = hn::LoadDup128(d, codec_.book.code_of_rank);
    for (int64_t i = 0, N = static_cast<int64_t>(hn::Lanes(d)); i < n; i += N)
      hn::StoreU(hn::TableLookupBytes(table, hn::LoadU(d, codes + i)), d, codes + i);
  }

  HWY_INLINE void encode_vectors(const Memory* x, int64_t n, const formats::GroupParams<F>& params,
                                 uint8_t* codes) {
    const F scale = params.code_scale;
    [[maybe_unused]] const F reciprocal = 1 / scale;
    switch (codec_.kind) {
      case formats::Kind::table:
        if constexpr (sizeof(F) == 8)
          return table_codes_f64(x, n, scale, codec_.book, codes);
        else if (by_rounding_)
          return encode_group<false, Type>(x, n, 0, 15, FloatingCode<true>(scale, reciprocal), codes);
        else
          return table_codes(x, n, scale, reciprocal, codes);
      case formats::Kind::integer:
        return scaled_codes<false, true>(x, n, params, codec_.q_min, codes);
      case formats::Kind::affine:
        return scaled_codes<true, false>(x, n, params, 0, codes);
      case formats::Kind::floating:
        if constexpr (sizeof(F) == 4)
          if (by_rounding_)
            return encode_group<false, Type>(x, n, 0, 255, FloatingCode<false>(scale, reciprocal), codes);
        return divided_e4m3_codes<Type>(x, n, scale, codes);
    }
  }
  template <bool kBias, bool kZero>
  HWY_INLINE void scaled_codes(const Memory* x, int64_t n, const formats::GroupParams<F>& params, int low,
                               uint8_t* codes) const {
    const F scale = params.code_scale, bias = kBias ? params.code_bias : 0;
    const int zero = kZero ? params.zero_point : 0;
    if constexpr (sizeof(F) == 8)
      divided_codes(x, n, scale, bias, low - zero, low - zero + codec_.levels(), codes);
    else
      encode_group<false, Type>(x, n, low, codec_.levels(),
                                ScaledCode<kBias, kZero>(scale, 1 / scale, bias, zero), codes);
  }

  // The same of all groups of a batch: what all have in common is made once.
  template <bool kNibbles>
  HWY_INLINE void encode_groups(const Memory* x, int64_t n, const GroupBatch& batch, uint8_t* codes) {
    const auto each = [&](int low, int most, const auto& code) HWY_ATTR {
      encode_each<kNibbles, Type>(x, n, GroupBatch::size(), low, most, code, codes);
    };
    const auto *scale = batch.code_scale, *reciprocal = batch.reciprocal;
    switch (codec_.kind) {
      case formats::Kind::table:
#if HALFBYTE_AVX512
        if constexpr (kNibbles && std::is_same_v<Type, BF16>)
          if (has_thresholds_)
            return encode_by_thresholds(reinterpret_cast<const uint16_t*>(x), n, scale, codes);
#endif
        if (is_e2m1_)
          return each(0, 15, [&](int64_t i) HWY_ATTR { return FloatingCode<true>(scale[i], reciprocal[i]); });
#if HALFBYTE_AVX512
        if (const TableBounds& own = bounds(); own.has_bins) {
          if (own.of_magnitudes)
            each(0, 15, [&](int64_t i) HWY_ATTR { return BinCode<true>(own, scale[i], reciprocal[i]); });
          else
            each(0, 15, [&](int64_t i) HWY_ATTR { return BinCode<false>(own, scale[i], reciprocal[i]); });
          return;
        }
#endif
        if constexpr (!kNibbles)
          for (int64_t i = 0; i < GroupBatch::size(); ++i) {
            fetch_ahead(x + i * n, n, GroupBatch::size() * n);
            table_codes(x + i * n, whole_vectors(n), scale[i], reciprocal[i], codes + i * n);
          }
        return;
      case formats::Kind::integer:
        if (!codec_.asymmetric)
          return each(codec_.q_min, codec_.levels(), [&](int64_t i) HWY_ATTR {
            return ScaledCode<false, false>(scale[i], reciprocal[i], 0, 0);
          });
        return each(codec_.q_min, codec_.levels(), [&](int64_t i) HWY_ATTR {
          return ScaledCode<false, true>(scale[i], reciprocal[i], 0, batch.zero_point[i]);
        });
      case formats::Kind::affine:
        return each(0, codec_.levels(), [&](int64_t i) HWY_ATTR {
          return ScaledCode<true, false>(scale[i], reciprocal[i], batch.code_bias[i], 0);
        });
      case formats::Kind::floating:
        if constexpr (!kNibbles)
          each(0, 255, [&](int64_t i) HWY_ATTR { return FloatingCode<false>(scale[i], reciprocal[i]); });
        return;
    }
  }

  // Null for other formats, and where scales are searched, which prepares for that.
  const Prepared* prepared_of_tables() const {
    return problem_.search ? nullptr : static_cast<const Prepared*>(problem_.prepared);
  }
  // Whether codes come of comparing bf16 with the thresholds of a symmetric table.
  bool by_bf16_thresholds() const {
    const int64_t n = problem_.shape.group_size;
    const Prepared* const prepared = prepared_of_tables();
    return HALFBYTE_AVX512 && std::is_same_v<Type, BF16> && prepared != nullptr &&
           prepared->bounds.is_symmetric && (n % 64 == 0 || (is_e2m1_ && (n == 16 || n == 32)));
  }
  bool bounds_have_bins() {
#if HALFBYTE_AVX512
    return bounds().has_bins;
#else
    return false;
#endif
  }
  const TableBounds& bounds() {
    if (const Prepared* const prepared = prepared_of_tables()) return prepared->bounds;
    if (!bounds_) bounds_.emplace(codec_.book);
    return *bounds_;
  }

  // Packs the whole eights and keeps the rest.
  void flush() {
    const int64_t n = num_codes_ / 8 * 8;
    pack(codes_, n, codec_.bits, out_ + packed_ / 8 * codec_.bits);
    std::memcpy(codes_, codes_ + n, 8);
    packed_ += n;
    num_codes_ -= n;
  }

  void flush_all(const formats::GroupParams<F>& params) {
    flush();
    if (num_codes_ == 0) return;
    const int64_t last = formats::packed_bytes(num_codes_, codec_.bits);
    const int zero = formats::zero_code(params, codec_);
    for (int64_t i = num_codes_; i < 8; ++i) codes_[i] = static_cast<uint8_t>(zero);
    uint8_t bytes[8];
    pack(codes_, 8, codec_.bits, bytes);
    std::memcpy(out_ + packed_ / 8 * codec_.bits, bytes, static_cast<size_t>(last));
  }

  const QuantizeProblem& problem_;
  const formats::Codec& codec_;
  const QuantizeSpan span_;
  const bool is_e2m1_ = codec_.book == formats::books::fp4_e2m1;
  const bool has_thresholds_ = by_bf16_thresholds();
  bool by_rounding_ = false;           // of the group, a FloatingCode
  std::optional<TableBounds> bounds_;  // where none are prepared
  const Memory* x_;                    // the row
  uint8_t* out_;                       // codes of the row
  int64_t batched_ = 0;                // columns before this one were tried as a batch
  int64_t block_ = 0;                  // of groups one by one, if it stays in caches
  int64_t packed_;  // columns before this one are in out_; a multiple of 8 while codes_ is in use
  int64_t num_codes_ = 0;
  QuantizeStatus status_;
  alignas(64) uint8_t codes_[kCodes + 8 + HWY_MAX_BYTES];  // one code a byte, and room for whole vectors
};

template <class Type>
ValueRange ValueRangeOf(const void* x, DType dtype, int64_t n) {
  if (n == 0) return {};
  const BitsRange<Type> range = bits_range<Type>(static_cast<const typename Type::Memory*>(x), n);
  if (!is_finite(range)) return value_range_ref(x, dtype, 0, n);
  return {static_cast<double>(value_of_sortable<Type>(range.min)),
          static_cast<double>(value_of_sortable<Type>(range.max)), 0, -1};
}

QuantizeStatus QuantizeSpanCpu(const QuantizeProblem& problem, const QuantizeSpan& span) {
  switch (problem.dtype) {
    case DType::f32:
      return SpanQuantizer<F32>(problem, span).run();
    case DType::f16:
      return SpanQuantizer<F16>(problem, span).run();
    case DType::bf16:
      return SpanQuantizer<BF16>(problem, span).run();
    default:
      return SpanQuantizer<F64>(problem, span).run();
  }
}

std::shared_ptr<const void> PrepareCpu(const QuantizeProblem& problem) {
  const formats::Codec& codec = problem.codec;
  if (codec.kind != formats::Kind::table || problem.dtype == DType::f64) return nullptr;
  // With a global scale, what is stored does not scale with powers of two.
  const bool by_lookup = HALFBYTE_VBMI && problem.dtype == DType::bf16 &&
                         codec.scale_type != formats::ScaleType::e4m3 && problem.shape.group_size % 32 == 0;
  // A lookup costs as much as encoding 100,000 elements: keep the last ones.
  struct Entry {
    formats::Codec codec;
    bool by_lookup = false;
    std::shared_ptr<const Prepared> prepared;
  };
  static auto& mutex = *new ForkSafeMutex;
  static auto& entries = *new std::array<Entry, 4>;
  static size_t oldest = 0;
  const std::lock_guard lock(mutex);
  for (const Entry& entry : entries)
    if (entry.prepared && entry.by_lookup == by_lookup && entry.codec == codec) return entry.prepared;
  Entry& entry = entries[oldest++ % entries.size()];
  entry = {codec, by_lookup, std::make_shared<const Prepared>(codec, by_lookup)};
  return entry.prepared;
}

ValueRange ValueRangeCpu(const void* x, DType dtype, int64_t n) {
  switch (dtype) {
    case DType::f32:
      return ValueRangeOf<F32>(x, dtype, n);
    case DType::f16:
      return ValueRangeOf<F16>(x, dtype, n);
    case DType::bf16:
      return ValueRangeOf<BF16>(x, dtype, n);
    default:
      return ValueRangeOf<F64>(x, dtype, n);
  }
}

#else  // !HALFBYTE_SIMD

QuantizeStatus QuantizeSpanCpu(const QuantizeProblem& problem, const QuantizeSpan& span) {
  return quantize_span_ref(problem, span);
}
std::shared_ptr<const void> PrepareCpu(const QuantizeProblem&) { return nullptr; }
ValueRange ValueRangeCpu(const void* x, DType dtype, int64_t n) { return value_range_ref(x, dtype, 0, n); }

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(QuantizeSpanCpu);
HWY_EXPORT(PrepareCpu);
HWY_EXPORT(ValueRangeCpu);

QuantizeStatus quantize_span_cpu(const QuantizeProblem& problem, const QuantizeSpan& span) {
  return HWY_DYNAMIC_DISPATCH(QuantizeSpanCpu)(problem, span);
}
std::shared_ptr<const void> prepare_quantize_cpu(const QuantizeProblem& problem) {
  if (problem.search) return prepare_search_cpu(problem);
  return HWY_DYNAMIC_DISPATCH(PrepareCpu)(problem);
}
ValueRange value_range_cpu(const void* x, DType dtype, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(ValueRangeCpu)(x, dtype, n);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
