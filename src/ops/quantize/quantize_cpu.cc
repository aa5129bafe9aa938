// SIMD kernels of `quantize`.
//
// Per group: range in the integer domain of the bits (one pass, non-finite values show up as the range),
// parameters by formats::group_params, or of as many plain groups as a vector has lanes at once
// (group_batch-inl.h), then codes:
//   integer, affine  the correctly rounded quotient by reciprocal and an exact residual correction
//                    (Markstein): a multiple of the rate of a division, valid away from under- and overflow
//   table            no quotient: x / s > edge is x > T for one T per edge and group, found exactly in f64;
//                    four compares walk the sorted T, or one does with that of the bin that x lies in.
//                    fp4_e2m1: the quotient, rounded as a float
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
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"
#include "ops/quantize/group_batch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// Codes of one flush: half of a 32 KiB L1 with the 16-bit source beside it.
constexpr int64_t kCodes = 4096;

// x as integers of the same order: negative numbers get their magnitude inverted.
template <class D>
HWY_INLINE hn::Vec<D> sortable(D d, hn::Vec<D> bits) {
  using T = hn::TFromD<D>;
  constexpr int kShift = sizeof(T) * 8 - 1;
  const auto magnitude = hn::Set(d, std::numeric_limits<T>::max());
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

// Range of n > 0 elements, NaN and Inf included: they sort beyond all finite values.
template <class Type>
HWY_INLINE BitsRange<Type> bits_range(const typename Type::Memory* x, int64_t n) {
  using Bits = typename Type::Bits;
  const hn::ScalableTag<Bits> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto* bits = reinterpret_cast<const Bits*>(x);
  auto low = hn::Set(d, std::numeric_limits<Bits>::max());
  auto high = hn::Set(d, std::numeric_limits<Bits>::min());
  int64_t i = 0;
  for (; i + N <= n; i += N) {
    const auto v = sortable(d, hn::LoadU(d, bits + i));
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  }
  if (i > 0) {
    if (i < n) {  // the last N once more
      const auto v = sortable(d, hn::LoadU(d, bits + n - N));
      low = hn::Min(low, v);
      high = hn::Max(high, v);
      i = n;
    }
    low = hn::MinOfLanes(d, low);
    high = hn::MaxOfLanes(d, high);
  }
  BitsRange<Type> range{hn::GetLane(low), hn::GetLane(high)};
  for (; i < n; ++i) {
    const Bits v = sortable(bits[i]);
    range.min = std::min(range.min, v);
    range.max = std::max(range.max, v);
  }
  return range;
}

// The bits of the largest magnitude of n elements, likewise.
template <class Type>
HWY_INLINE typename Type::Bits largest_magnitude(const typename Type::Memory* x, int64_t n) {
  using Bits = typename Type::Bits;
  const hn::ScalableTag<Bits> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto* bits = reinterpret_cast<const Bits*>(x);
  const auto magnitude = hn::Set(d, std::numeric_limits<Bits>::max());
  auto largest = hn::Zero(d);
  int64_t i = 0;
  for (; i + N <= n; i += N) largest = hn::Max(largest, hn::And(hn::LoadU(d, bits + i), magnitude));
  if (i > 0 && i < n) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, bits + n - N), magnitude));
    i = n;
  }
  Bits result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < n; ++i) result = std::max(result, static_cast<Bits>(bits[i] & std::numeric_limits<Bits>::max()));
  return result;
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
#if HALFBYTE_AVX512
    find_bins(book);
#endif
  }

#if HALFBYTE_AVX512
  // 32 bins of x / scale, each with one edge at most: its threshold and those of all bins below tell the
  // rank. No bin ends so near an edge that a product by the reciprocal could mistake one for the other. Where
  // edges lie closer about zero, but alike on both sides of it, bins are of |x| / scale: the rank of a
  // negative x is 15 - that of -x.
  bool has_bins = false, of_magnitudes = false;
  float bins_of_one = 0, bin_of_zero = 0;
  alignas(64) int32_t edge_of_bin[32];  // 15: none
  alignas(64) int32_t rank_of_bin[32];  // edges below

  void find_bins(const formats::CodeBook& book) {
    bool alike = middle[7] < 0 && middle[7] > -0x1p-140;
    for (int i = 0; i < 7; ++i) alike = alike && middle[6 - i] == -middle[8 + i];
    struct Bins {
      bool of_magnitudes;
      float zero, most;
    };
    for (const Bins& each : {Bins{false, 16, 15.4f}, Bins{true, 0, 31}})
      for (float bins = each.most; bins >= each.most / 2 && !has_bins; bins -= 0.1f) {
        of_magnitudes = each.of_magnitudes;
        bin_of_zero = each.zero;
        bins_of_one = bins / book.max_magnitude;
        has_bins = !of_magnitudes || alike;
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

#if HALFBYTE_AVX512
// Ranks of n elements (rounded up to whole vectors), one a byte, by bins; x beyond the values of the code
// book is in the first or the last.
template <bool kOfMagnitudes, class Type>
HWY_INLINE void ranks_by_bins(const typename Type::Memory* HWY_RESTRICT x, int64_t n,
                              const TableBounds& bounds, float scale, float reciprocal,
                              uint8_t* HWY_RESTRICT ranks) {
  const hn::ScalableTag<float> d;
  const __m512 t = bounds.thresholds(scale);
  const auto* const edges = bounds.edge_of_bin;
  const auto* const ranks_below = bounds.rank_of_bin;
  const __m512 t0 = _mm512_permutexvar_ps(_mm512_load_si512(edges), t),
               t1 = _mm512_permutexvar_ps(_mm512_load_si512(edges + 16), t);
  const __m512 below_zero = _mm512_permutexvar_ps(_mm512_set1_epi32(7), t);
  const __m512i r0 = _mm512_load_si512(ranks_below), r1 = _mm512_load_si512(ranks_below + 16);
  const __m512 bins = _mm512_set1_ps(bounds.bins_of_one * reciprocal),
               zero = _mm512_set1_ps(bounds.bin_of_zero);
  const __m512 least = _mm512_setzero_ps(), most = _mm512_set1_ps(31);
  const __m512 to_integer = _mm512_set1_ps(0x1.8p23f);  // the last bits of a sum with it
  const __m512i one = _mm512_set1_epi32(1), fifteen = _mm512_set1_epi32(15);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = Type::load(d, x + i).raw;
    const __m512 own = kOfMagnitudes ? _mm512_abs_ps(v) : v;
    const __m512 place = _mm512_min_ps(_mm512_max_ps(_mm512_fmadd_ps(own, bins, zero), least), most);
    const __m512i bin = _mm512_castps_si512(_mm512_add_ps(place, to_integer));
    const __mmask16 above = _mm512_cmp_ps_mask(own, _mm512_permutex2var_ps(t0, bin, t1), _CMP_GT_OQ);
    __m512i rank = _mm512_permutex2var_epi32(r0, bin, r1);
    rank = _mm512_mask_add_epi32(rank, above, rank, one);
    if (kOfMagnitudes) {
      const __mmask16 negative = _mm512_cmp_ps_mask(v, below_zero, _CMP_LE_OQ);
      rank = _mm512_mask_sub_epi32(rank, negative, fifteen, rank);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(ranks + i), _mm512_cvtepi32_epi8(rank));
  }
}
#endif

// Ranks of n elements (rounded up to whole vectors), one a byte.
template <class Type>
HWY_INLINE void table_ranks(const typename Type::Memory* HWY_RESTRICT x, int64_t n, const TableBounds& bounds,
                            float scale, float reciprocal, uint8_t* HWY_RESTRICT ranks) {
#if HALFBYTE_AVX512
  if (bounds.has_bins && scale > 0x1p-90f && scale < 0x1p90f)
    return bounds.of_magnitudes ? ranks_by_bins<true, Type>(x, n, bounds, scale, reciprocal, ranks)
                                : ranks_by_bins<false, Type>(x, n, bounds, scale, reciprocal, ranks);
#endif
  (void)reciprocal;
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

// v / s, correctly rounded; r: 1 / s. Exact within limits, see quotient_is_exact and has_exact_e2m1.
template <class V>
HWY_INLINE V quotient(V v, V s, V r) {
  const V q = hn::Mul(v, r);
  return hn::MulAdd(hn::NegMulAdd(q, s, v), r, q);
}

// Codes of fp4_e2m1 for n elements (rounded up to whole vectors), one a byte: the correctly rounded quotient,
// as in scaled_codes, rounded as formats::nearest_e2m1 does it. No tables, which cost groups of 16 most of
// their time.
template <class Type>
HWY_INLINE void e2m1_codes(const typename Type::Memory* HWY_RESTRICT x, int64_t n, float scale,
                           float reciprocal, uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto s = hn::Set(d, scale), r = hn::Set(d, reciprocal), most = hn::Set(d, 6.0f);
  const auto one = hn::Set(di, 0x3F800000);
  for (int64_t i = 0, N = static_cast<int64_t>(hn::Lanes(d)); i < n; i += N) {
    const auto v = Type::load(d, x + i);
    const auto q = quotient(v, s, r);
    const auto y = hn::Min(hn::Abs(q), most);
    const auto power = hn::Max(hn::And(hn::BitCast(di, y), hn::Set(di, 0x7F800000)), one);
    const auto shift = hn::BitCast(d, hn::Add(power, hn::Set(di, 22 << 23)));
    const auto bits = hn::BitCast(di, hn::Sub(hn::Add(y, shift), shift));
    // From 1 on, the exponent and the first digit; below, only 1/2 has a digit.
    const auto normal = hn::Sub(hn::ShiftRight<22>(bits), hn::Set(di, 0xFC));
    const auto subnormal = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 1));
    const auto code = hn::IfThenElse(hn::Lt(bits, one), subnormal, normal);
    const auto sign = hn::IfThenElseZero(hn::RebindMask(di, hn::Lt(q, hn::Zero(d))), hn::Set(di, 8));
    hn::StoreU(hn::DemoteTo(d8, hn::Or(code, sign)), d8, codes + i);
  }
}
// Whether that gives the codes of the quotients: their corrections are exact near every edge, and none but 0
// is so small that it rounds to 0, whose code has no sign.
template <class Type>
constexpr float kMostE2m1Scale = std::is_same_v<Type, F32>    ? 0x1p0f
                                 : std::is_same_v<Type, BF16> ? 0x1p16f
                                                              : 0x1p100f;
template <class Type>
bool has_exact_e2m1(float scale, double absmax) {
  return scale > 0x1p-90f && scale <= kMostE2m1Scale<Type> && absmax < static_cast<double>(scale) * 0x1p20;
}

// f64: the division itself.
HWY_INLINE void table_ranks_f64(const double* HWY_RESTRICT x, int64_t n, double scale,
                                const formats::CodeBook& book, uint8_t* HWY_RESTRICT ranks) {
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
    for (int64_t j = 0; j < N; ++j) ranks[i + j] = static_cast<uint8_t>(out[j]);
  }
}

// ---- Integer and affine formats ---------------------------------------------------------------

#if HWY_ARCH_X86
#define HALFBYTE_PACKS_BYTES 1
// Four vectors of integers below 2^31, less `low`, as bytes from 0 to `most`, in their order. Integers
// saturate on their way, which clamps them.
template <class V>
HWY_INLINE void store_bytes(V v0, V v1, V v2, V v3, int low, int most, uint8_t* HWY_RESTRICT to) {
#if HALFBYTE_AVX512
  const __m512i lows = _mm512_set1_epi16(static_cast<int16_t>(low));
  const __m512i first = _mm512_subs_epi16(_mm512_packs_epi32(v0.raw, v1.raw), lows),
                second = _mm512_subs_epi16(_mm512_packs_epi32(v2.raw, v3.raw), lows);
  // Of each 128 bits four of every vector.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second));
  _mm512_storeu_si512(to, _mm512_min_epu8(bytes, _mm512_set1_epi8(static_cast<char>(most))));
#else
  const __m256i lows = _mm256_set1_epi16(static_cast<int16_t>(low));
  const __m256i first = _mm256_subs_epi16(_mm256_packs_epi32(v0.raw, v1.raw), lows),
                second = _mm256_subs_epi16(_mm256_packs_epi32(v2.raw, v3.raw), lows);
  const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_min_epu8(bytes, _mm256_set1_epi8(static_cast<char>(most))));
#endif
}
#else
#define HALFBYTE_PACKS_BYTES 0
#endif

// clamp(rne((x - bias) / scale), low, high) - low, one a byte; n rounded up to whole vectors. kBias: else it
// is 0.
template <class Type, bool kBias>
HWY_INLINE void scaled_codes(const typename Type::Memory* HWY_RESTRICT x, int64_t n,
                             typename Type::Compute scale, typename Type::Compute reciprocal,
                             typename Type::Compute bias, int low, int high, uint8_t* HWY_RESTRICT codes) {
  using F = typename Type::Compute;
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, scale), b = hn::Set(d, bias);
  const auto lo = hn::Set(d, static_cast<F>(low)), hi = hn::Set(d, static_cast<F>(high));
  if constexpr (sizeof(F) == 4) {
    const hn::RebindToSigned<decltype(d)> di;
    const hn::Rebind<uint8_t, decltype(d)> d8;
    const auto r = hn::Set(d, reciprocal);
    const auto scaled = [&](int64_t i) HWY_ATTR {
      auto v = Type::load(d, x + i);
      if constexpr (kBias) v = hn::Sub(v, b);
      return quotient(v, s, r);
    };
    int64_t i = 0;
#if HALFBYTE_PACKS_BYTES
    for (; i + 4 * N <= n; i += 4 * N)
      store_bytes(hn::NearestInt(scaled(i)), hn::NearestInt(scaled(i + N)), hn::NearestInt(scaled(i + 2 * N)),
                  hn::NearestInt(scaled(i + 3 * N)), low, high - low, codes + i);
#endif
    const auto offset = hn::Set(di, low);
    for (; i < n; i += N) {
      const auto code = hn::Sub(hn::NearestInt(hn::Min(hi, hn::Max(lo, scaled(i)))), offset);
      hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
    }
  } else {
    HWY_ALIGN double out[HWY_MAX_BYTES / sizeof(double)];
    for (int64_t i = 0; i < n; i += N) {
      const auto q = hn::Div(hn::Sub(Type::load(d, x + i), b), s);
      hn::Store(hn::Sub(hn::Round(hn::Min(hi, hn::Max(lo, q))), lo), d, out);
      for (int64_t j = 0; j < N; ++j) codes[i + j] = static_cast<uint8_t>(out[j]);
    }
  }
}

// ---- Floating formats -------------------------------------------------------------------------

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

// The same by the correctly rounded quotient, as in scaled_codes, within the range of that
// (quotient_is_exact). Smaller ones than half of the least value are none, but round to 0 as well; its sign
// is that of x.
template <class Type>
HWY_INLINE void e4m3_codes(const typename Type::Memory* HWY_RESTRICT x, int64_t n, float scale,
                           float reciprocal, uint8_t* HWY_RESTRICT codes) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, scale), r = hn::Set(d, reciprocal), most = hn::Set(d, formats::kMaxE4m3);
  const auto code_of = [&](int64_t i) HWY_ATTR {
    const auto v = Type::load(d, x + i);
    const auto q = quotient(v, s, r);
    const auto y = hn::Min(hn::Abs(q), most);
    // Adding 2^20 times its power of two, 2^-6 for smaller ones, leaves the digits that a code has, to the
    // nearest.
    const auto power =
        hn::Max(hn::And(hn::BitCast(di, y), hn::Set(di, 0x7F800000)), hn::Set(di, (127 - 6) << 23));
    const auto shift = hn::Add(power, hn::Set(di, 20 << 23));
    const auto digits = hn::Sub(hn::BitCast(di, hn::Add(y, hn::BitCast(d, shift))), shift);
    const auto exponent = hn::Sub(hn::ShiftRight<20>(power), hn::Set(di, (127 - 6) << 3));
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di, v)), hn::Set(di, 0x80));
    return hn::Or(hn::Add(exponent, digits), sign);
  };
  int64_t i = 0;
#if HALFBYTE_PACKS_BYTES
  for (; i + 4 * N <= n; i += 4 * N)
    store_bytes(code_of(i), code_of(i + N), code_of(i + 2 * N), code_of(i + 3 * N), 0, 255, codes + i);
#endif
  const hn::Rebind<uint8_t, decltype(d)> d8;
  for (; i < n; i += N) hn::StoreU(hn::DemoteTo(d8, code_of(i)), d8, codes + i);
}

// Whether the corrections of scaled_codes and e4m3_codes are exact for |x - bias| <= largest: the residual
// must not underflow where it matters, nor the quotient overflow.
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

// Elements ahead: 2 KiB, the latency of memory (100 ns) at the rate of a core (15 GB/s) and some margin.
constexpr int64_t kPrefetch = 1024;

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

// What is made once for a table format and f32 arithmetic.
struct Prepared {
  TableBounds bounds;
#if HALFBYTE_VBMI
  std::optional<Bf16Lookup> lookup;  // usable
#endif

  Prepared(const formats::Codec& codec, bool by_lookup) : bounds(codec.book) {
    (void)by_lookup;
#if HALFBYTE_VBMI
    if (by_lookup && !lookup.emplace(codec).usable) lookup.reset();
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
    if (span_.params) params = convert_params<F>(*span_.params);
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
      // The work on a batch takes longer than the reads the processor runs ahead: fetch what comes after.
      for (int64_t i = 0; i < 4 * n; i += 32) hwy::Prefetch(x + begin + i + kPrefetch);
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
    // Of rules that know no more than it, one range for both signs.
    const bool by_magnitude = !codec_.asymmetric && (codec_.rule == formats::Rule::absmax ||
                                                     codec_.rule == formats::Rule::half_range);
    HWY_ALIGN Memory low[HWY_MAX_BYTES / sizeof(float)], high[HWY_MAX_BYTES / sizeof(float)];
    const auto memory = [](typename Type::Bits bits) { return formats::bit_cast<Memory>(bits); };
    for (int64_t i = 0; i < count; ++i) {
      if (by_magnitude) {
        high[i] = memory(largest_magnitude<Type>(x_ + begin + i * n, n));
      } else {
        const BitsRange<Type> range = bits_range<Type>(x_ + begin + i * n, n);
        low[i] = memory(sortable(range.min));
        high[i] = memory(sortable(range.max));
      }
    }
    const hn::ScalableTag<float> d;
    const auto most = Type::load(d, high);
    hn::Store(by_magnitude ? hn::Neg(most) : Type::load(d, low), d, batch.min);
    hn::Store(most, d, batch.max);
    const int64_t group = span_.row * problem_.shape.groups_per_row + begin / n;
    if (!batch.find(problem_, group, is_e2m1_ ? kMostE2m1Scale<Type> : 0x1p100f)) return begin;
    by_rounding_ = is_e2m1_ || codec_.kind == formats::Kind::floating;
    if (n % count == 0 && count * n <= kCodes) {  // a vector has as many lanes as a batch has groups
      if (num_codes_ + count * n > kCodes + 8) flush();
      uint8_t* const codes = codes_ + num_codes_;
      encode_groups(x_ + begin, n, batch, codes);
      if (codec_.kind == formats::Kind::table && !by_rounding_) codes_of_ranks(codes, count * n);
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

  void finish_group(int64_t group, const formats::GroupParams<F>& params) {
    count(status_, params);
    store_params(problem_, group, params);
  }

  // Codes of columns [begin, begin + n), n <= kCodes, appended to codes_.
  void encode(int64_t begin, int64_t n, const formats::GroupParams<F>& params, bool fast) {
    if (num_codes_ + n > kCodes + 8) flush();
    uint8_t* codes = codes_ + num_codes_;
    num_codes_ += n;
    if (!fast) {
      encode_ref(problem_.x, problem_.dtype, span_.row * problem_.shape.cols + begin, n, params, codec_,
                 codes);
      return;
    }
    // Whole vectors from x, the rest through a padded copy: nothing beyond the group is read.
    const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<F>()));
    const int64_t whole = n / N * N;
    encode_vectors(x_ + begin, whole, params, codes);
    if (whole < n) {
      Memory tail[HWY_MAX_BYTES / sizeof(F)] = {};
      std::memcpy(tail, x_ + begin + whole, static_cast<size_t>(n - whole) * sizeof(Memory));
      encode_vectors(tail, N, params, codes + whole);
    }
    if (codec_.kind == formats::Kind::table && !by_rounding_) codes_of_ranks(codes, n);
  }

  // Of whole vectors.
  HWY_INLINE void codes_of_ranks(uint8_t* codes, int64_t n) const {
    const hn::ScalableTag<uint8_t> d;
    const auto table = hn::LoadDup128(d, codec_.book.code_of_rank);
    for (int64_t i = 0, N = static_cast<int64_t>(hn::Lanes(d)); i < n; i += N)
      hn::StoreU(hn::TableLookupBytes(table, hn::LoadU(d, codes + i)), d, codes + i);
  }

  HWY_INLINE void encode_vectors(const Memory* x, int64_t n, const formats::GroupParams<F>& params,
                                 uint8_t* codes) {
    const F scale = params.code_scale, reciprocal = 1 / scale;
    switch (codec_.kind) {
      case formats::Kind::table:
        if constexpr (sizeof(F) == 8)
          return table_ranks_f64(x, n, scale, codec_.book, codes);
        else if (by_rounding_)
          return e2m1_codes<Type>(x, n, scale, reciprocal, codes);
        else
          return table_ranks<Type>(x, n, bounds(), scale, reciprocal, codes);
      case formats::Kind::integer:
        return scaled_codes<Type, false>(x, n, scale, reciprocal, 0, codec_.q_min - params.zero_point,
                                         codec_.q_max - params.zero_point, codes);
      case formats::Kind::affine:
        return scaled_codes<Type, true>(x, n, scale, reciprocal, params.code_bias, 0, codec_.levels(), codes);
      case formats::Kind::floating:
        if constexpr (sizeof(F) == 4)
          if (by_rounding_) return e4m3_codes<Type>(x, n, scale, reciprocal, codes);
        return divided_e4m3_codes<Type>(x, n, scale, codes);
    }
  }

  // The same of all groups of a batch, each of whole vectors: what all have in common is made once.
  HWY_INLINE void encode_groups(const Memory* x, int64_t n, const GroupBatch& batch, uint8_t* codes) {
    const auto each = [&](const auto& body) HWY_ATTR {
      for (int64_t i = 0; i < GroupBatch::size(); ++i)
        body(x + i * n, batch.code_scale[i], batch.reciprocal[i], i, codes + i * n);
    };
    using Codes = uint8_t*;
    switch (codec_.kind) {
      case formats::Kind::table:
        if (is_e2m1_)
          return each([&](const Memory* own, float scale, float reciprocal, int64_t, Codes to)
                          HWY_ATTR { e2m1_codes<Type>(own, n, scale, reciprocal, to); });
        return each([&](const Memory* own, float scale, float reciprocal, int64_t, Codes to)
                        HWY_ATTR { table_ranks<Type>(own, n, bounds(), scale, reciprocal, to); });
      case formats::Kind::integer:
        if (!codec_.asymmetric)
          return each([&](const Memory* own, float scale, float reciprocal, int64_t, Codes to) HWY_ATTR {
            scaled_codes<Type, false>(own, n, scale, reciprocal, 0, codec_.q_min, codec_.q_max, to);
          });
        return each([&](const Memory* own, float scale, float reciprocal, int64_t i, Codes to) HWY_ATTR {
          const int zero = batch.zero_point[i];
          scaled_codes<Type, false>(own, n, scale, reciprocal, 0, codec_.q_min - zero, codec_.q_max - zero,
                                    to);
        });
      case formats::Kind::affine:
        return each([&](const Memory* own, float scale, float reciprocal, int64_t i, Codes to) HWY_ATTR {
          scaled_codes<Type, true>(own, n, scale, reciprocal, batch.code_bias[i], 0, codec_.levels(), to);
        });
      case formats::Kind::floating:
        return each([&](const Memory* own, float scale, float reciprocal, int64_t, Codes to)
                        HWY_ATTR { e4m3_codes<Type>(own, n, scale, reciprocal, to); });
    }
  }

  // Null for other formats, and where scales are searched, which prepares for that.
  const Prepared* prepared_of_tables() const {
    return problem_.search ? nullptr : static_cast<const Prepared*>(problem_.prepared);
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
  bool by_rounding_ = false;           // of the group: e2m1_codes, e4m3_codes
  std::optional<TableBounds> bounds_;  // where none are prepared
  const Memory* x_;                    // the row
  uint8_t* out_;                       // codes of the row
  int64_t batched_ = 0;                // columns before this one were tried as a batch
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
