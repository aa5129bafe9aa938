// SIMD kernels of `dequantize`: codes of a chunk to bytes, values to a buffer in L1, the buffer to memory
// (streamed where the output is large). With AVX-512 and at most 4 bits, 16-bit outputs skip the arithmetic:
// a group has at most 16 values, converted once and looked up with vpermw.
#include <algorithm>

#include "ops/dequantize/dequantize_ref.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dequantize/dequantize_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// Elements of a chunk, which are written at a time, between others that are read. A multiple of 8, so chunks
// start at whole bytes.
constexpr int64_t kChunk = 512;
constexpr int64_t kAhead = 4096;  // bytes of codes that are fetched ahead

// n codes (n rounded up to 8) of a bit stream to one a byte.
HWY_INLINE void unpack(const uint8_t* HWY_RESTRICT packed, int64_t n, int bits, uint8_t* HWY_RESTRICT codes) {
  const int64_t num_bytes = formats::packed_bytes(n, bits);
  if (bits == 8) {
    std::memcpy(codes, packed, static_cast<size_t>(n));
    return;
  }
  int64_t i = 0;
  if (bits == 4) {
    const hn::ScalableTag<uint16_t> d16;
    const hn::Rebind<uint8_t, decltype(d16)> d8;
    const auto N = static_cast<int64_t>(hn::Lanes(d16));
    for (; i + 2 * N <= n; i += 2 * N) {
      const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, packed + i / 2));
      const auto pairs = hn::And(hn::Or(bytes, hn::ShiftLeft<4>(bytes)), hn::Set(d16, uint16_t{0x0F0F}));
      hn::StoreU(pairs, d16, reinterpret_cast<uint16_t*>(codes + i));
    }
  }
  for (; i < n; i += 8) {
    uint64_t eight = 0;
    const int64_t at = i / 8 * bits;
    if (at + 8 <= num_bytes)
      std::memcpy(&eight, packed + at, 8);  // with bits of those that follow
    else
      std::memcpy(&eight, packed + at, static_cast<size_t>(num_bytes - at));
    eight = formats::unpack8(eight, bits);
    std::memcpy(codes + i, &eight, 8);
  }
}

// Values of n codes of one group (rounded up to whole vectors) to a buffer of the output type.
template <class F>
class Decoder {
 public:
  explicit Decoder(const DequantizeProblem& problem) : codec_(problem.codec), dtype_(problem.dtype) {}

  HWY_INLINE void decode(const uint8_t* HWY_RESTRICT codes, int64_t n, const GroupDecode<F>& group,
                         uint8_t* HWY_RESTRICT out) const {
    switch (dtype_) {
      case DType::f32:
        return decode_as<DType::f32>(codes, n, group, out);
      case DType::f16:
        return decode_as<DType::f16>(codes, n, group, out);
      case DType::bf16:
        return decode_as<DType::bf16>(codes, n, group, out);
      default:
        return decode_as<DType::f64>(codes, n, group, out);
    }
  }

 private:
  template <DType kDType>
  HWY_INLINE void decode_as(const uint8_t* HWY_RESTRICT codes, int64_t n, const GroupDecode<F>& group,
                            uint8_t* HWY_RESTRICT out) const {
    const hn::ScalableTag<F> d;
    const auto N = static_cast<int64_t>(hn::Lanes(d));
    const auto scale = hn::Set(d, group.scale), bias = hn::Set(d, group.bias);
    if (codec_.kind == formats::Kind::table) {
      HWY_ALIGN F values[16];
      for (int i = 0; i < 16; ++i) values[i] = static_cast<F>(codec_.book.values[i]) * group.scale;
      for (int64_t i = 0; i < n; i += N) store<kDType>(lookup(d, values, codes + i), i, out);
      return;
    }
    if (codec_.kind == formats::Kind::floating) {
      for (int64_t i = 0; i < n; i += N) store<kDType>(hn::Mul(load_e4m3(d, codes + i), scale), i, out);
      return;
    }
    const bool affine = codec_.kind == formats::Kind::affine;
    const auto zero = hn::Set(d, affine ? F{0} : static_cast<F>(codec_.q_min - group.zero_point));
    const auto value = [&](int64_t i) HWY_ATTR {
      const auto v = hn::Mul(hn::Add(load_codes(d, codes + i), zero), scale);
      return affine ? hn::Add(v, bias) : v;
    };
    if constexpr (kDType == DType::bf16 && sizeof(F) == 4) {
      if (formats::is_finite(group.scale) && formats::is_finite(group.bias)) {  // no value is NaN
        const hn::RebindToUnsigned<decltype(d)> d32;
        const hn::Repartition<uint16_t, decltype(d)> d16;
        const hn::Rebind<int32_t, decltype(d)> di;
        const hn::Rebind<uint16_t, decltype(d)> pairs;
        // Codes with even and odd numbers apart, as they lie in words; rounded in the upper half.
        const auto rounded = [&](auto is_affine, auto code) HWY_ATTR {
          const auto q = hn::ConvertTo(d, code);
          const auto v = is_affine ? hn::Add(hn::Mul(q, scale), bias) : hn::Mul(hn::Add(q, zero), scale);
          const auto bits = hn::BitCast(d32, v);
          const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
          return hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFFu)), odd);
        };
        const auto decode_all = [&](auto is_affine) HWY_ATTR {
          for (int64_t i = 0; i < n; i += 2 * N) {
            const auto words =
                hn::PromoteTo(di, hn::LoadU(pairs, reinterpret_cast<const uint16_t*>(codes + i)));
            const auto even = rounded(is_affine, hn::And(words, hn::Set(di, 255)));
            const auto odd = rounded(is_affine, hn::ShiftRight<8>(words));
            hn::StoreU(hn::OddEven(hn::BitCast(d16, odd), hn::BitCast(d16, hn::ShiftRight<16>(even))), d16,
                       reinterpret_cast<uint16_t*>(out) + i);
          }
        };
        if (affine)
          decode_all(std::true_type());
        else
          decode_all(std::false_type());
        return;
      }
    }
    for (int64_t i = 0; i < n; i += N) store<kDType>(value(i), i, out);
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> load_codes(D d, const uint8_t* codes) {
    const hn::Rebind<uint8_t, D> d8;
    const hn::Rebind<int32_t, D> d32;
    const auto v = hn::PromoteTo(d32, hn::LoadU(d8, codes));
    if constexpr (sizeof(F) == 8)
      return hn::PromoteTo(d, v);
    else
      return hn::ConvertTo(d, v);
  }

  // Their values, as formats::e4m3_to_f32 has them.
  template <class D>
  static HWY_INLINE hn::Vec<D> load_e4m3(D d, const uint8_t* codes) {
    const hn::Rebind<float, D> df;
    const hn::Rebind<uint8_t, D> d8;
    const hn::Rebind<int32_t, D> di;
    const auto code = hn::PromoteTo(di, hn::LoadU(d8, codes));
    const auto magnitude = hn::And(code, hn::Set(di, 0x7F));
    const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(di, 0x80)));
    const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 0x3C000000));
    const auto subnormal = hn::BitCast(di, hn::Mul(hn::ConvertTo(df, magnitude), hn::Set(df, 0x1p-9f)));
    auto bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 8)), subnormal, normal);
    bits = hn::IfThenElse(hn::Eq(magnitude, hn::Set(di, 0x7F)), hn::Set(di, 0x7FC00000), bits);
    const auto value = hn::BitCast(df, hn::Or(bits, sign));
    if constexpr (sizeof(F) == 8)
      return hn::PromoteTo(d, value);
    else
      return value;
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> lookup(D d, const F* HWY_RESTRICT values, const uint8_t* codes) {
#if HWY_MAX_BYTES >= 32
    if constexpr (sizeof(F) == 4) {
      const hn::Rebind<uint8_t, D> d8;
      const hn::Rebind<int32_t, D> d32;
      const auto code = hn::PromoteTo(d32, hn::LoadU(d8, codes));
#if HWY_MAX_BYTES >= 64
      // Behind the last code there may be anything.
      const auto index = hn::IndicesFromVec(d, hn::And(code, hn::Set(d32, 15)));
      return hn::TableLookupLanes(hn::Load(d, values), index);
#else
      const auto index = hn::IndicesFromVec(d, hn::And(code, hn::Set(d32, 7)));
      const auto upper = hn::RebindMask(d, hn::Gt(code, hn::Set(d32, 7)));
      return hn::IfThenElse(upper, hn::TableLookupLanes(hn::Load(d, values + 8), index),
                            hn::TableLookupLanes(hn::Load(d, values), index));
#endif
    }
#endif
    HWY_ALIGN F lanes[HWY_MAX_BYTES / sizeof(F)];
    for (size_t j = 0; j < hn::Lanes(d); ++j) lanes[j] = values[codes[j] & 15];
    return hn::Load(d, lanes);
  }

  template <DType kDType, class V>
  static HWY_INLINE void store(V v, int64_t i, uint8_t* HWY_RESTRICT out) {
    const hn::ScalableTag<F> d;
    if constexpr (kDType == DType::bf16 && sizeof(F) == 4) {
      const hn::Rebind<uint16_t, decltype(d)> d16;
      hn::StoreU(to_bf16(d, v), d16, reinterpret_cast<uint16_t*>(out) + i);
    } else if constexpr (kDType == DType::f16 && sizeof(F) == 4) {
      const hn::Rebind<hwy::float16_t, decltype(d)> d16;
      hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(out) + i);
    } else {
      hn::StoreU(v, d, reinterpret_cast<F*>(out) + i);
    }
  }

  const formats::Codec& codec_;
  const DType dtype_;
};

#if HALFBYTE_AVX512

// The sixteen values of a group of 4-bit codes.
HWY_INLINE __m512 group_values(const formats::Codec& codec, const GroupDecode<float>& group) {
  const __m512 lane = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 scale = _mm512_set1_ps(group.scale);
  switch (codec.kind) {
    case formats::Kind::table:
      return _mm512_mul_ps(_mm512_loadu_ps(codec.book.values), scale);
    case formats::Kind::integer: {
      const __m512 zero = _mm512_set1_ps(static_cast<float>(codec.q_min - group.zero_point));
      return _mm512_mul_ps(_mm512_add_ps(lane, zero), scale);
    }
    default:
      return _mm512_add_ps(_mm512_mul_ps(lane, scale), _mm512_set1_ps(group.bias));
  }
}

// Sixteen f32 to a 16-bit type.
template <DType kDType>
HWY_INLINE __m512i round_to_16(__m512 v) {
  if constexpr (kDType == DType::bf16)
    return _mm512_castsi256_si512(to_bf16(hn::ScalableTag<float>(), hn::Vec<hn::ScalableTag<float>>{v}).raw);
  return _mm512_castsi256_si512(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 4-bit codes of columns [begin, begin + n) of a row, n and the group size multiples of 32, to `out`: f32,
// f16 or bf16. kStream: past the caches; `out` is then at the start of a line.
template <DType kDType, bool kStream>
HWY_INLINE void decode_nibbles(const DequantizeProblem& problem, int64_t row, int64_t begin, int64_t n,
                               uint8_t* out) {
  const formats::Codec codec = problem.codec;
  const uint8_t* packed = problem.codes + row * problem.shape.row_bytes + begin / 2;
  // A group may be said to be as long as there are numbers: the ends of those in the row are no overflow.
  const int64_t group_size =
      problem.one_group ? problem.shape.cols : std::min(problem.shape.group_size, problem.shape.cols);
  int64_t group = group_of(problem, row, begin);
  int64_t end = group_size - begin % group_size;
  const __m512i mask = _mm512_set1_epi32(0x000F000F);
  const auto store = [&](__m512i line) HWY_ATTR {
    if constexpr (kStream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), line);
    else
      _mm512_storeu_si512(out, line);
    out += 64;
  };
  for (int64_t i = 0; i < n; end += group_size, ++group) {
    const __m512 values = group_values(codec, load_group<float>(problem, group));
    __m512i table = {};
    if constexpr (kDType != DType::f32) table = round_to_16<kDType>(values);
    for (const int64_t stop = std::min(n, end); i < stop; i += 32) {
      const __m512i bytes =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2)));
      // Byte b of a lane to the codes of its two elements, low nibble first: (b | b << 12) & mask.
      const __m512i codes = _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), mask, 0xA8);
      if constexpr (kDType == DType::f32) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes));
        const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1));
        store(_mm512_castps_si512(_mm512_permutexvar_ps(low, values)));
        store(_mm512_castps_si512(_mm512_permutexvar_ps(high, values)));
      } else {
        store(_mm512_permutexvar_epi16(codes, table));
      }
    }
  }
}

// As many of the n columns from `begin` as decode_nibbles takes, straight to y; returns how many.
template <DType kDType>
HWY_INLINE int64_t decode_nibbles(const DequantizeProblem& problem, int64_t row, int64_t begin, int64_t n,
                                  uint8_t* y) {
  if (problem.codec.bits != 4 || problem.dtype != kDType) return 0;
  if (!problem.one_group && problem.shape.group_size % 32 != 0) return 0;
  n = n / 32 * 32;
  if (problem.past_caches && reinterpret_cast<uintptr_t>(y) % 64 == 0)
    decode_nibbles<kDType, true>(problem, row, begin, n, y);
  else
    decode_nibbles<kDType, false>(problem, row, begin, n, y);
  return n;
}

#endif  // HALFBYTE_AVX512

template <class F>
HWY_INLINE void dequantize_span(const DequantizeProblem& problem, const DequantizeSpan& span) {
  const formats::Codec& codec = problem.codec;
  const QuantShape& shape = problem.shape;
  const size_t element_bytes = static_cast<size_t>(size_of(problem.dtype));
  const uint8_t* row_codes = problem.codes + span.row * shape.row_bytes;
  uint8_t* y = static_cast<uint8_t*>(problem.y) + static_cast<size_t>(span.row * shape.cols) * element_bytes;
  const Decoder<F> decoder(problem);
  // Room for whole vectors beyond the last element.
  alignas(64) uint8_t codes[kChunk + HWY_MAX_BYTES];
  alignas(64) uint8_t values[kChunk * sizeof(F) + HWY_MAX_BYTES];
  int64_t begin = span.begin;
#if HALFBYTE_AVX512
  if constexpr (sizeof(F) == 4) {
    uint8_t* const to = y + static_cast<size_t>(begin) * element_bytes;
    const int64_t n = span.end - begin;
    begin += decode_nibbles<DType::bf16>(problem, span.row, begin, n, to) +
             decode_nibbles<DType::f16>(problem, span.row, begin, n, to) +
             decode_nibbles<DType::f32>(problem, span.row, begin, n, to);
  }
#endif
  int64_t group = begin < span.end ? group_of(problem, span.row, begin) : 0;
  int64_t left = problem.one_group ? span.end - begin : shape.group_size - begin % shape.group_size;  // of it
  for (; begin < span.end; begin += kChunk) {
    const int64_t n = std::min(kChunk, span.end - begin);
    const uint8_t* from = row_codes + begin / 8 * codec.bits;
    const int64_t num_bytes = (shape.rows - span.row) * shape.row_bytes - begin / 8 * codec.bits;
    for (int64_t i = 0; i < n * codec.bits / 8; i += 64) hwy::Prefetch(from + i + kAhead);
    if (codec.bits != 8 || num_bytes < n + HWY_MAX_BYTES) {
      unpack(from, n, codec.bits, codes);
      from = codes;
    }
    for (int64_t i = 0; i < n;) {
      const int64_t m = std::min(n - i, left);
      decoder.decode(from + i, m, load_group<F>(problem, group),
                     values + static_cast<size_t>(i) * element_bytes);
      i += m;
      left -= m;
      if (left > 0) continue;
      ++group;
      left = shape.group_size;
    }
    uint8_t* to = y + static_cast<size_t>(begin) * element_bytes;
    if (problem.past_caches)
      stream_copy(to, values, static_cast<size_t>(n) * element_bytes);
    else
      std::memcpy(to, values, static_cast<size_t>(n) * element_bytes);
  }
  if (problem.past_caches) hwy::FlushStream();
}

void DequantizeSpanCpu(const DequantizeProblem& problem, const DequantizeSpan& span) {
  if (problem.dtype == DType::f64)
    dequantize_span<double>(problem, span);
  else
    dequantize_span<float>(problem, span);
}

#else  // !HALFBYTE_SIMD

void DequantizeSpanCpu(const DequantizeProblem& problem, const DequantizeSpan& span) {
  dequantize_span_ref(problem, span);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(DequantizeSpanCpu);

void dequantize_span_cpu(const DequantizeProblem& problem, const DequantizeSpan& span) {
  HWY_DYNAMIC_DISPATCH(DequantizeSpanCpu)(problem, span);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
