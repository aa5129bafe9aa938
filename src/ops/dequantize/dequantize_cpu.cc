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

// Where Unpacker finds the bytes of its eights, for each number of bits.
struct UnpackerPlaces {
  HWY_ALIGN uint32_t words[8][HWY_MAX_BYTES / 4] = {};
  HWY_ALIGN uint8_t bytes[8][HWY_MAX_BYTES] = {};  // of 16, from the first of the words
  constexpr UnpackerPlaces() {
    for (uint32_t bits = 2; bits < 8; ++bits)
      for (uint32_t block = 0; block < HWY_MAX_BYTES / 16; ++block) {
        const uint32_t begin = block * 2 * bits;
        for (uint32_t i = 0; i < 4; ++i)
          words[bits][4 * block + i] = std::min<uint32_t>(begin / 4 + i, HWY_MAX_BYTES / 4 - 1);
        for (uint32_t i = 0; i < 16; ++i)  // behind the `bits` that count there may be any
          bytes[bits][16 * block + i] =
              static_cast<uint8_t>(std::min(begin % 4 + i / 8 * bits + i % 8, uint32_t{15}));
      }
  }
};
constexpr UnpackerPlaces kPlaces;

// Codes of 2, 3, 5, 6 or 7 bits, a vector at a time: the bytes of eight codes are brought to 64 bits, which
// are halved until each code has a byte.
class Unpacker {
  using D = hn::ScalableTag<uint8_t>;
  static constexpr D d = {};
  static constexpr hn::Repartition<uint16_t, D> d16 = {};
  static constexpr hn::Repartition<uint32_t, D> d32 = {};
  static constexpr hn::Repartition<uint64_t, D> d64 = {};

 public:
  explicit Unpacker(int bits) : bits_(bits) {}
  // Codes at a time, and how many bytes are read for them.
  static int64_t size() { return static_cast<int64_t>(hn::Lanes(d)); }

  HWY_INLINE void unpack(const uint8_t* HWY_RESTRICT packed, uint8_t* HWY_RESTRICT codes) const {
    const auto words = hn::TableLookupLanes(hn::BitCast(d32, hn::LoadU(d, packed)),
                                            hn::SetTableIndices(d32, kPlaces.words[bits_]));
    const auto eights =
        hn::BitCast(d64, hn::TableLookupBytes(hn::BitCast(d, words), hn::Load(d, kPlaces.bytes[bits_])));
    const auto fours =
        hn::OddEven(hn::BitCast(d32, hn::ShiftLeftSame(eights, 32 - 4 * bits_)), hn::BitCast(d32, eights));
    const auto pairs =
        hn::OddEven(hn::BitCast(d16, hn::ShiftLeftSame(fours, 16 - 2 * bits_)), hn::BitCast(d16, fours));
    const auto each = hn::OddEven(hn::BitCast(d, hn::ShiftLeftSame(pairs, 8 - bits_)), hn::BitCast(d, pairs));
    hn::StoreU(hn::And(each, hn::Set(d, static_cast<uint8_t>((1 << bits_) - 1))), d, codes);
  }

 private:
  int bits_;
};

// n codes (n rounded up to 8) of a bit stream to one a byte; `num_bytes` can be read.
HWY_INLINE void unpack(const uint8_t* HWY_RESTRICT packed, int64_t num_bytes, int64_t n, int bits,
                       const Unpacker& unpacker, uint8_t* HWY_RESTRICT codes) {
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
  } else {
    const int64_t N = Unpacker::size();
    for (; i + N <= n && i / 8 * bits + N <= num_bytes; i += N)
      unpacker.unpack(packed + i / 8 * bits, codes + i);
  }
  for (; i < n; i += 8) {
    uint64_t eight = 0;
    const int64_t at = i / 8 * bits;
    if (at + 8 <= num_bytes)
      std::memcpy(&eight, packed + at, 8);  // with bits of those that follow
    else
      std::memcpy(&eight, packed + at, static_cast<size_t>(std::min<int64_t>(bits, num_bytes - at)));
    eight = formats::unpack8(eight, bits);
    std::memcpy(codes + i, &eight, 8);
  }
}

// Values of E4M3 codes, as formats::e4m3_to_f32 has them.
template <class D>
HWY_INLINE hn::Vec<D> load_e4m3(D d, const uint8_t* codes) {
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
  if constexpr (sizeof(hn::TFromD<D>) == 8)
    return hn::PromoteTo(d, value);
  else
    return value;
}

// The same of those that are not NaN, times 2^-8, which f16 holds with the same digits.
template <class D>
HWY_INLINE hn::Vec<D> load_e4m3_over_256(D d, const uint8_t* codes) {
  const hn::Rebind<int8_t, D> di8;
  const hn::Rebind<int16_t, D> di16;
  const hn::Rebind<hwy::float16_t, D> d16;
  const auto code = hn::PromoteTo(di16, hn::LoadU(di8, reinterpret_cast<const int8_t*>(codes)));
  const auto half = hn::And(hn::ShiftLeft<7>(code), hn::Set(di16, static_cast<int16_t>(0xBF80)));
  return hn::PromoteTo(d, hn::BitCast(d16, half));
}
// Whether some of n codes, or of those up to whole vectors, are NaN.
HWY_INLINE bool has_nan_e4m3(const uint8_t* codes, int64_t n) {
  const hn::ScalableTag<uint8_t> d;
  const auto magnitude = hn::Set(d, uint8_t{0x7F});
  auto most = hn::Zero(d);
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(hn::Lanes(d)))
    most = hn::Max(most, hn::And(hn::LoadU(d, codes + i), magnitude));
  return !hn::AllFalse(d, hn::Eq(most, magnitude));
}

// The scales of n groups from `group` on, which are E4M3.
HWY_NOINLINE void convert_e4m3_scales(const DequantizeProblem& problem, int64_t group, int64_t n, float* to) {
  const hn::ScalableTag<float> d;
  const auto* const scales = static_cast<const uint8_t*>(problem.scales) + group;
  const auto global = hn::Set(d, problem.codec.global_scale);
  int64_t i = 0;
  for (const auto N = static_cast<int64_t>(hn::Lanes(d)); i + N <= n; i += N)
    hn::StoreU(hn::Div(load_e4m3(d, scales + i), global), d, to + i);
  for (; i < n; ++i)
    to[i] = formats::load_scale<float>(scales, i, formats::ScaleType::e4m3, problem.codec.global_scale);
}

// The parameters of groups, one after the other. Scales of E4M3, which groups of 16 have, are converted
// several at a time; `scales` is room for them.
constexpr int64_t kScales = 64;
template <class F>
class Groups {
 public:
  Groups(const DequantizeProblem& problem, int64_t first, float* scales)
      : problem_(problem),
        converts_(sizeof(F) == 4 && problem.codec.scale_type == formats::ScaleType::e4m3 && !problem.biases),
        group_(first),
        scales_(scales) {}

  // Of the next group.
  HWY_INLINE GroupDecode<F> next() {
    const int64_t group = group_++;
    if (!converts_) return load_group<F>(problem_, group);
    if (group >= converted_) {
      converted_ = problem_.one_group ? 1 : problem_.shape.rows * problem_.shape.groups_per_row;
      converted_ = std::min(converted_, group + kScales);
      first_ = group;
      convert_e4m3_scales(problem_, group, converted_ - group, scales_);
    }
    return {static_cast<F>(scales_[group - first_]), 0,
            problem_.zeros ? problem_.zeros[group] + problem_.codec.q_min : 0};
  }

 private:
  const DequantizeProblem& problem_;
  const bool converts_;
  int64_t group_, first_ = 0, converted_ = 0;  // scales_: of groups [first_, converted_)
  float* scales_;
};

#if HALFBYTE_AVX512

// The values of a group for sixteen codes.
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

#endif  // HALFBYTE_AVX512

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
#if HALFBYTE_AVX512
    // Of up to 4 bits all values of the group, by which its codes are looked up.
    if constexpr (sizeof(F) == 4 && (kDType == DType::bf16 || kDType == DType::f16))
      if (codec_.bits <= 4) {
        const __m512i values = round_to_16<kDType>(group_values(codec_, group));
        for (int64_t i = 0; i < n; i += 32)
          _mm512_storeu_si512(
              reinterpret_cast<uint16_t*>(out) + i,
              _mm512_permutexvar_epi16(
                  _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i))),
                  values));
        return;
      }
#endif
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
      if constexpr (sizeof(F) == 4) {
        const F times_256 = group.scale * 256;
        if (formats::is_finite(times_256) && !has_nan_e4m3(codes, n)) {
          const auto by = hn::Set(d, times_256);
          const auto value = [&](int64_t i)
                                 HWY_ATTR { return hn::Mul(load_e4m3_over_256(d, codes + i), by); };
          if constexpr (kDType == DType::bf16) {
            const hn::Repartition<uint16_t, decltype(d)> d16;
            for (int64_t i = 0; i < n; i += 2 * N)
              hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, bf16_in_upper_half(d, value(i + N))),
                                       hn::BitCast(d16, bf16_in_upper_half(d, value(i)))),
                         d16, reinterpret_cast<uint16_t*>(out) + i);
          } else {
            for (int64_t i = 0; i < n; i += N) store<kDType>(value(i), i, out);
          }
          return;
        }
      }
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
        const hn::Repartition<uint16_t, decltype(d)> d16;
        const hn::Rebind<int32_t, decltype(d)> di;
        const hn::Rebind<uint16_t, decltype(d)> pairs;
        // Codes with even and odd numbers apart, as they lie in words; rounded in the upper half.
        const auto rounded = [&](auto is_affine, auto code) HWY_ATTR {
          const auto q = hn::ConvertTo(d, code);
          return bf16_in_upper_half(
              d, is_affine ? hn::Add(hn::Mul(q, scale), bias) : hn::Mul(hn::Add(q, zero), scale));
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

// 4-bit codes of columns [begin, begin + n) of a row, n a multiple of 32 and the group size of 16, or of 32
// for !kSixteen, to `out`: f32, f16 or bf16. kStream: past the caches; `out` is then at the start of a line.
template <DType kDType, bool kStream, bool kSixteen>
HWY_INLINE void decode_nibbles(const DequantizeProblem& problem, int64_t row, int64_t begin, int64_t n,
                               uint8_t* out) {
  const formats::Codec codec = problem.codec;
  const uint8_t* packed = problem.codes + row * problem.shape.row_bytes + begin / 2;
  // A group may be said to be as long as there are numbers: the ends of those in the row are no overflow.
  const int64_t group_size =
      problem.one_group ? problem.shape.cols : std::min(problem.shape.group_size, problem.shape.cols);
  HWY_ALIGN float scales[kScales];
  int64_t group = group_of(problem, row, begin);
  Groups<float> groups(problem, group, scales);
  int64_t end = group_size - begin % group_size;
  const __m512i mask = _mm512_set1_epi32(0x000F000F);
  const auto store = [&](__m512i line) HWY_ATTR {
    if constexpr (kStream)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), line);
    else
      _mm512_storeu_si512(out, line);
    out += 64;
  };
  const auto load = [&](int64_t i) HWY_ATTR {  // 32 codes, as words
    const __m512i bytes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2)));
    // Byte b of a lane to the codes of its two elements, low nibble first: (b | b << 12) & mask.
    return _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), mask, 0xA8);
  };
  // The first and the last 16 of them are of one group each.
  const auto store_two = [&](__m512i codes, auto first, auto second) HWY_ATTR {
    if constexpr (kDType == DType::f32) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes));
      const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1));
      store(_mm512_castps_si512(_mm512_permutexvar_ps(low, first)));
      store(_mm512_castps_si512(_mm512_permutexvar_ps(high, second)));
    } else {
      const __m512i in_second = _mm512_maskz_set1_epi16(0xFFFF0000, 32);
      store(_mm512_permutex2var_epi16(first, _mm512_or_si512(codes, in_second), second));
    }
  };
  const auto values_of = [&](const GroupDecode<float>& group) HWY_ATTR {
    const __m512 values = group_values(codec, group);
    if constexpr (kDType == DType::f32)
      return values;
    else
      return round_to_16<kDType>(values);
  };
  decltype(values_of({})) before = {};
  bool is_shared = false;  // the 32 codes at i: with the group before
  for (int64_t i = 0; i < n; end += group_size, ++group) {
    const auto values = values_of(kSixteen ? groups.next() : load_group<float>(problem, group));
    if (kSixteen && is_shared) {
      store_two(load(i), before, values);
      i += 32;
    }
    for (const int64_t stop = std::min(n, end); i + 32 <= stop; i += 32) {
      if constexpr (kDType == DType::f32)
        store_two(load(i), values, values);
      else
        store(_mm512_permutexvar_epi16(load(i), values));
    }
    if constexpr (kSixteen) {
      is_shared = i < end;
      before = values;
    }
  }
}

// As many of the n columns from `begin` as decode_nibbles takes, straight to y; returns how many.
template <DType kDType>
HWY_INLINE int64_t decode_nibbles(const DequantizeProblem& problem, int64_t row, int64_t begin, int64_t n,
                                  uint8_t* y) {
  if (problem.codec.bits != 4 || problem.dtype != kDType || begin % 32 != 0) return 0;
  if (!problem.one_group && problem.shape.group_size % 16 != 0) return 0;
  n = n / 32 * 32;
  if (n == 0) return 0;
  const auto decode = [&](auto streams) HWY_ATTR {
    if (problem.one_group || problem.shape.group_size % 32 == 0)
      decode_nibbles<kDType, streams, false>(problem, row, begin, n, y);
    else
      decode_nibbles<kDType, streams, true>(problem, row, begin, n, y);
  };
  if (problem.past_caches && reinterpret_cast<uintptr_t>(y) % 64 == 0)
    decode(std::true_type());
  else
    decode(std::false_type());
  return n;
}

#endif  // HALFBYTE_AVX512

template <class F>
HWY_INLINE void decode_chunks(const DequantizeProblem& problem, const DequantizeSpan& span) {
  const formats::Codec& codec = problem.codec;
  const QuantShape& shape = problem.shape;
  const size_t element_bytes = static_cast<size_t>(size_of(problem.dtype));
  const uint8_t* row_codes = problem.codes + span.row * shape.row_bytes;
  uint8_t* y = static_cast<uint8_t*>(problem.y) + static_cast<size_t>(span.row * shape.cols) * element_bytes;
  const Decoder<F> decoder(problem);
  const Unpacker unpacker(codec.bits);
  HWY_ALIGN float scales[kScales];
  Groups<F> groups(problem, group_of(problem, span.row, span.begin), scales);
  GroupDecode<F> group = groups.next();
  int64_t left =
      problem.one_group ? span.end - span.begin : shape.group_size - span.begin % shape.group_size;  // of it
  // Room for whole vectors beyond the last element.
  alignas(64) uint8_t codes[kChunk + HWY_MAX_BYTES];
  alignas(64) uint8_t values[kChunk * sizeof(F) + HWY_MAX_BYTES];
  for (int64_t begin = span.begin; begin < span.end; begin += kChunk) {
    const int64_t n = std::min(kChunk, span.end - begin);
    const uint8_t* from = row_codes + begin / 8 * codec.bits;
    const int64_t num_bytes = (shape.rows - span.row) * shape.row_bytes - begin / 8 * codec.bits;
    for (int64_t i = 0; i < n * codec.bits / 8; i += 64) hwy::Prefetch(from + i + kAhead);
    if (codec.bits != 8 || num_bytes < n + HWY_MAX_BYTES) {
      unpack(from, num_bytes, n, codec.bits, unpacker, codes);
      from = codes;
    }
    for (int64_t i = 0; i < n;) {
      const int64_t m = std::min(n - i, left);
      decoder.decode(from + i, m, group, values + static_cast<size_t>(i) * element_bytes);
      i += m;
      left -= m;
      if (left > 0 || begin + i == span.end) continue;
      group = groups.next();
      left = shape.group_size;
    }
    uint8_t* to = y + static_cast<size_t>(begin) * element_bytes;
    if (problem.past_caches)
      stream_copy(to, values, static_cast<size_t>(n) * element_bytes);
    else
      std::memcpy(to, values, static_cast<size_t>(n) * element_bytes);
  }
}

template <class F>
HWY_INLINE void dequantize_span(const DequantizeProblem& problem, const DequantizeSpan& span) {
  int64_t begin = span.begin;
#if HALFBYTE_AVX512
  if constexpr (sizeof(F) == 4) {
    uint8_t* const to = static_cast<uint8_t*>(problem.y) +
                        static_cast<size_t>((span.row * problem.shape.cols + begin) * size_of(problem.dtype));
    const int64_t n = span.end - begin;
    begin += decode_nibbles<DType::bf16>(problem, span.row, begin, n, to) +
             decode_nibbles<DType::f16>(problem, span.row, begin, n, to) +
             decode_nibbles<DType::f32>(problem, span.row, begin, n, to);
  }
#endif
  if (begin < span.end) decode_chunks<F>(problem, {span.row, begin, span.end});
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
