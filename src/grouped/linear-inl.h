// What the SIMD kernels of linear quantization and fake quantization share. Include after highway.h, inside a
// file that foreach_target.h compiles.
//
// A problem is walked as a grid of lines, in tiles that threads share out, in chunks of a line that stay in
// L1. Along a line either groups of columns share a scale, or each column has its own (`per_column`). The
// scales of a chunk are converted once, and again only where the next chunk has others: tiles of per_column
// problems are narrow, so that all lines of one use the same. Chunks of tensors with other strides than 1 are
// gathered and scattered, which leaves one kernel for all.
#if defined(HALFBYTE_LINEAR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_LINEAR_INL_H_
#undef HALFBYTE_LINEAR_INL_H_
#else
#define HALFBYTE_LINEAR_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "core/counts.h"
#include "cpu/group_batch-inl.h"
#include "cpu/simd-inl.h"
#include "grouped/linear_grid.h"
#include "grouped/linear_ref.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

using linear::Grid;
using linear::kScales;
using linear::round_up;
using linear::Tile;

constexpr int64_t kChunk = 4096;         // elements: 16 KiB of f32
constexpr int64_t kPart = 512;           // elements that are written at a time, between others that are read
constexpr int64_t kAhead = 2048;         // elements that are fetched ahead
constexpr int64_t kPad = HWY_MAX_BYTES;  // room for a whole vector beyond the last element

// ---- Memory -----------------------------------------------------------------------------------

// n elements `stride` apart, from or to a buffer.
template <class T>
void gather(const void* from, int64_t stride, int64_t n, void* to) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = static_cast<const T*>(from)[i * stride];
}
template <class T>
void scatter(const void* from, int64_t stride, int64_t n, void* to) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i * stride] = static_cast<const T*>(from)[i];
}

// Elements that can be read as whole vectors: the last ones from a copy. What lies `ahead` elements further
// is fetched while these are worked on.
template <class Memory>
class Source {
 public:
  Source(const Memory* x, int64_t n, int64_t ahead)
      : x_(x), n_(n), copied_(std::max<int64_t>(0, n - kLanes)), ahead_(ahead) {
    std::memcpy(tail_, x + copied_, static_cast<size_t>(n - copied_) * sizeof(Memory));
  }
  // Of elements [begin, end), which are not the last or less than a vector of N.
  HWY_INLINE const Memory* at(int64_t begin, int64_t end, int64_t N) const {
    for (int64_t i = begin; i < end; i += 64 / static_cast<int64_t>(sizeof(Memory)))
      hwy::Prefetch(x_ + i + ahead_);
    return round_up(end - begin, N) <= n_ - begin ? x_ + begin : tail_ + (begin - copied_);
  }
  const Memory& operator[](int64_t i) const { return x_[i]; }

 private:
  static constexpr int64_t kLanes = HWY_MAX_BYTES / 4;
  const Memory* x_;
  int64_t n_, copied_, ahead_;
  Memory tail_[2 * kLanes] = {};
};

// n nibbles from the low half of `packed`, one a byte.
HWY_INLINE void unpack(const uint8_t* HWY_RESTRICT packed, int64_t n, uint8_t* HWY_RESTRICT out) {
  const hn::ScalableTag<uint16_t> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto N = static_cast<int64_t>(hn::Lanes(d16));
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    const auto bytes = hn::PromoteTo(d16, hn::LoadU(d8, packed + i / 2));
    const auto pairs = hn::And(hn::Or(bytes, hn::ShiftLeft<4>(bytes)), hn::Set(d16, uint16_t{0x0F0F}));
    hn::StoreU(pairs, d16, reinterpret_cast<uint16_t*>(out + i));
  }
  for (; i < n; ++i) out[i] = i % 2 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
}
// The low halves of n bytes, and of one more where n is odd, to nibbles.
HWY_INLINE void pack(const uint8_t* HWY_RESTRICT codes, int64_t n, uint8_t* HWY_RESTRICT packed) {
  const hn::ScalableTag<uint16_t> d16;
  const hn::Rebind<uint8_t, decltype(d16)> d8;
  const auto N = static_cast<int64_t>(hn::Lanes(d16));
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    const auto pairs = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes + i));
    const auto low = hn::And(pairs, hn::Set(d16, uint16_t{0x0F}));
    const auto high = hn::And(hn::ShiftRight<4>(pairs), hn::Set(d16, uint16_t{0xF0}));
    hn::StoreU(hn::TruncateTo(d8, hn::Or(low, high)), d8, packed + i / 2);
  }
  for (; i < n; i += 2) packed[i / 2] = static_cast<uint8_t>((codes[i] & 15) | codes[i + 1] << 4);
}
// Element `index` of packed integers; it must begin at a byte where written.
template <class Byte>
HWY_INLINE Byte* packed_at(Byte* data, const CodeStorage& codes, int64_t index) {
  return data + index / codes.cols * codes.row_bytes + index % codes.cols / 2;
}
// n packed integers from `index` on, through the ends of rows.
HWY_INLINE void unpack_rows(const void* data, const CodeStorage& codes, int64_t index, int64_t n,
                            uint8_t* out) {
  while (n > 0) {
    const uint8_t* from = packed_at(static_cast<const uint8_t*>(data), codes, index);
    int64_t m = std::min(n, codes.cols - index % codes.cols);
    if (index % codes.cols % 2 != 0) {
      *out = *from >> 4;
      m = 1;
    } else {
      for (int64_t i = 0; i < m; i += 128) hwy::Prefetch(from + (i + kAhead) / 2);
      unpack(from, m, out);
    }
    out += m, index += m, n -= m;
  }
}
// Integers of at most 8 bits, xor this, are unsigned and larger by it.
inline uint8_t sign_bit(DType dtype) { return dtype == DType::i8 ? 0x80 : dtype == DType::i4 ? 8 : 0; }

// ---- Elements ---------------------------------------------------------------------------------

struct F32AsF64 {  // scales of f64 tensors
  using Memory = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const float* x) {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), x));
  }
};

// v is not NaN: a finite scale times an integer.
template <class Type, class D>
HWY_INLINE void store(D d, hn::Vec<D> v, typename Type::Memory* y) {
  if constexpr (std::is_same_v<Type, BF16>) {  // to_bf16 without its care for NaN
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
    const hn::Rebind<uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(rounded)), d16, y);
  } else if constexpr (std::is_same_v<Type, F16>) {
    const hn::Rebind<hwy::float16_t, D> d16;
    hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(y));
  } else {
    hn::StoreU(v, d, y);
  }
}

// Elements of `from` where the mask is set, else 0.
template <class Type, class D, class M>
HWY_INLINE void select(D d, M mask, const typename Type::Memory* from, typename Type::Memory* to) {
  if constexpr (sizeof(typename Type::Memory) == 2) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, from));
    hn::StoreU(hn::TruncateTo(d16, hn::IfThenElseZero(hn::RebindMask(du, mask), bits)), d16, to);
  } else {
    hn::StoreU(hn::IfThenElseZero(mask, hn::LoadU(d, from)), d, to);
  }
}

// No value is NaN.
template <class Type, class D>
HWY_INLINE void store_two(D d, hn::Vec<D> a, hn::Vec<D> b, typename Type::Memory* y) {
  if constexpr (kEvenOdd<Type>) {
    const hn::Repartition<uint16_t, D> d16;
    const auto even = hn::BitCast(d16, hn::ShiftRight<16>(bf16_in_upper_half(d, a)));
    hn::StoreU(hn::OddEven(hn::BitCast(d16, bf16_in_upper_half(d, b)), even), d16, y);
  } else {
    store<Type>(d, a, y);
    store<Type>(d, b, y + hn::Lanes(d));
  }
}
// Elements of `from` where a mask is set, else 0.
template <class Type, class D, class M>
HWY_INLINE void select_two(D d, M a, M b, const typename Type::Memory* from, typename Type::Memory* to) {
  if constexpr (kEvenOdd<Type>) {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<uint16_t, D> d16;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(from));
    const auto even = hn::IfThenElseZero(hn::RebindMask(du, a), words);
    const auto odd = hn::IfThenElseZero(hn::RebindMask(du, b), words);
    hn::StoreU(hn::OddEven(hn::BitCast(d16, odd), hn::BitCast(d16, even)), d16, to);
  } else {
    select<Type>(d, a, from, to);
    select<Type>(d, b, from + hn::Lanes(d), to + hn::Lanes(d));
  }
}

// The low bytes of unsigned lanes (Highway 1.0.3 takes the wrong ones of u32 for AVX3_DL).
template <class D>
HWY_INLINE void store_low_bytes(D /*d*/, hn::Vec<D> v, uint8_t* to) {
#if HALFBYTE_AVX512
  if constexpr (sizeof(hn::TFromD<D>) == 4)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v.raw));
  else
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(v.raw));
#else
  const hn::Rebind<uint8_t, D> d8;
  hn::StoreU(hn::TruncateTo(d8, v), d8, to);
#endif
}

// A mask as bytes, 0 or not.
template <class D, class M>
HWY_INLINE void store_mask_bytes(D /*d*/, M mask, uint8_t* to) {
#if HALFBYTE_AVX512
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_movm_epi8(mask.raw));
    return;
  }
#endif
  const hn::RebindToUnsigned<D> du;
  store_low_bytes(du, hn::IfThenElseZero(hn::RebindMask(du, mask), hn::Set(du, 1u)), to);
}
template <class Type, class D, class M>
HWY_INLINE void store_mask_bytes_of_two(D d, M a, M b, uint8_t* to) {
  if constexpr (kEvenOdd<Type>) {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<uint16_t, D> d16;
    const hn::Rebind<uint8_t, decltype(d16)> d8;
    const auto even = hn::IfThenElseZero(hn::RebindMask(du, a), hn::Set(du, 1u));
    const auto odd = hn::IfThenElseZero(hn::RebindMask(du, b), hn::Set(du, 0x10000u));
    hn::StoreU(hn::TruncateTo(d8, hn::BitCast(d16, hn::Or(even, odd))), d8, to);
  } else {
    store_mask_bytes(d, a, to);
    store_mask_bytes(d, b, to + hn::Lanes(d));
  }
}

// The scales of a chunk, as the kernels use them.
template <class F>
struct Scales {
  int64_t first = -1, count = 0;
  bool fast;  // f32: a quotient can be had by reciprocal and residual, see quotient
  bool far;   // elements are to be worked on one by one: of f32, as a zero point is far
  HWY_ALIGN F scale[kScales + kPad], inverse[kScales + kPad];  // a scale that is 0: 1, with inverse 0
  // Bounds of rne(x / scale), of tables of x / scale; quantize, fast: of x. Dequantize of f64: low is the
  // zero point, larger by sign_bit.
  HWY_ALIGN F low[kScales + kPad], high[kScales + kPad];
  HWY_ALIGN int32_t zero[kScales + kPad];  // dequantize: likewise, modulo 2^32

  formats::GroupParams<F> params(int64_t i) const {
    formats::GroupParams<F> result;
    result.code_scale = inverse[i] == 0 ? 0 : scale[i];
    result.zero_point = zero[i];
    return result;
  }

  // Those numbered first, first + stride, ...; counts what are none.
  void load(const LinearProblem& problem, const LinearTensors& tensors, int64_t index, int64_t stride,
            int64_t n, QuantizeStatus& status) {
    const hn::ScalableTag<F> d;
    const hn::Rebind<int32_t, decltype(d)> di;
    const auto N = static_cast<int64_t>(hn::Lanes(d));
    const formats::Codec& codec = problem.codec;
    first = index;
    count = n;
    load_scales(tensors.scale, codec.scale_type, stride, global_scale_of(tensors));
    load_zeros(problem, tensors, stride, status);
    const auto one = hn::Set(d, F{1}), infinity = hn::Set(d, std::numeric_limits<F>::infinity());
    const auto q_min = hn::Set(d, static_cast<F>(codec.q_min)),
               q_max = hn::Set(d, static_cast<F>(codec.q_max));
    const bool is_table = codec.kind == formats::Kind::table;
    const auto lowest = hn::Set(d, static_cast<F>(codec.book.values[codec.book.code_of_rank[0]]));
    const auto highest = hn::Set(d, static_cast<F>(codec.book.values[codec.book.code_of_rank[15]]));
    fast = sizeof(F) == 4;
    far = false;
    for (int64_t i = 0; i < n; i += N) {
      const auto inside = hn::FirstN(d, static_cast<size_t>(n - i));
      auto s = hn::Load(d, scale + i);
      const auto valid = hn::And(hn::Ge(s, hn::Zero(d)), hn::Lt(s, infinity));
      status.num_invalid_scales += static_cast<int64_t>(hn::CountTrue(d, hn::AndNot(valid, inside)));
      s = hn::IfThenElseZero(valid, s);
      const auto none = hn::Eq(s, hn::Zero(d));
      if (problem.op != LinearOp::dequantize && !hn::AllFalse(d, none)) {
        hn::Store(s, d, scale + i);
        for (int64_t j = i; j < std::min(n, i + N); ++j)
          if (scale[j] == 0) load_none(problem, j);
      }
      const auto zeros = hn::Load(di, zero + i);
      if (sizeof(F) == 4 && tensors.zero) {
        const auto most = hn::Set(di, kMostNear);
        const auto beyond = hn::Or(hn::Gt(zeros, most), hn::Lt(zeros, hn::Neg(most)));
        far = far || !hn::AllFalse(di, hn::And(beyond, hn::FirstN(di, static_cast<size_t>(n - i))));
      }
      const auto z = to_float(d, zeros);
      if (problem.op == LinearOp::dequantize) {
        hn::Store(s, d, scale + i);
        const int flip = sign_bit(problem.codes.dtype);
        if constexpr (sizeof(F) == 8)
          hn::Store(hn::Add(z, hn::Set(d, static_cast<F>(flip))), d, low + i);
        else
          hn::Store(hn::Add(zeros, hn::Set(di, flip)), di, zero + i);
        continue;
      }
      // A scale of 0: a quotient of 0 for quantize, within every bound for the others.
      const auto open = problem.op == LinearOp::quantize ? hn::Zero(d) : infinity;
      s = hn::IfThenElse(none, one, s);
      const auto usual = hn::And(hn::Gt(s, hn::Set(d, F(0x1p-90))), hn::Lt(s, hn::Set(d, F(0x1p100))));
      fast = fast && hn::AllFalse(d, hn::AndNot(usual, inside));
      if (problem.op == LinearOp::fake_quantize) fast = fast && hn::AllFalse(d, hn::And(none, inside));
      hn::Store(s, d, scale + i);
      hn::Store(hn::IfThenZeroElse(none, hn::Div(one, s)), d, inverse + i);
      const auto least = is_table ? lowest : hn::Sub(q_min, z);
      const auto most = is_table ? highest : hn::Sub(q_max, z);
      hn::Store(hn::IfThenElse(none, hn::Neg(open), least), d, low + i);
      hn::Store(hn::IfThenElse(none, open, most), d, high + i);
    }
    if (!fast || problem.op != LinearOp::quantize) return;
    for (int64_t i = 0; i < n; i += N) {  // bounds of x: low * scale, rounded, has the quotient low
      const auto s = hn::Load(d, scale + i);
      hn::Store(hn::Mul(s, hn::Load(d, low + i)), d, low + i);
      hn::Store(hn::Mul(s, hn::Load(d, high + i)), d, high + i);
    }
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> to_float(D d, hn::Vec<hn::Rebind<int32_t, D>> v) {
    if constexpr (sizeof(F) == 8)
      return hn::PromoteTo(d, v);
    else
      return hn::ConvertTo(d, v);
  }

 private:
  // Number i is a scale of 0: its code is that of a quotient of 0.
  void load_none(const LinearProblem& problem, int64_t i) {
    const int code = std::clamp(zero[i], problem.codec.q_min, problem.codec.q_max);
    if (problem.op == LinearOp::quantize) zero[i] = code;                     // gives the same
    if (problem.op == LinearOp::fake_quantize && zero[i] > code) far = true;  // y is -0
  }
  void load_scales(const void* data, formats::ScaleType type, int64_t stride, float global_scale) {
    if (stride == 1 && type == formats::ScaleType::f32)
      return convert<std::conditional_t<sizeof(F) == 4, F32, F32AsF64>>(data, type);
    if constexpr (sizeof(F) == 4) {
      if (stride == 1 && type == formats::ScaleType::f16) return convert<F16>(data, type);
      if (stride == 1 && type == formats::ScaleType::bf16) return convert<BF16>(data, type);
    } else {
      if (stride == 1 && type == formats::ScaleType::f64) return convert<F64>(data, type);
    }
    for (int64_t i = 0; i < count; ++i)
      scale[i] = formats::load_scale<F>(data, first + i * stride, type, global_scale);
  }
  template <class Type>
  void convert(const void* data, formats::ScaleType type) {
    const hn::ScalableTag<F> d;
    const auto N = static_cast<int64_t>(hn::Lanes(d));
    const auto* from = static_cast<const typename Type::Memory*>(data) + first;
    int64_t i = 0;
    for (; i + N <= count; i += N) hn::Store(Type::load(d, from + i), d, scale + i);
    for (; i < count; ++i) scale[i] = formats::load_scale<F>(data, first + i, type);
  }
  void load_zeros(const LinearProblem& problem, const LinearTensors& tensors, int64_t stride,
                  QuantizeStatus& status) {
    if (!tensors.zero) {
      std::fill_n(zero, count, 0);
    } else if (stride == 1 && is_packed(problem.zeros.dtype)) {
      const int flip = sign_bit(problem.zeros.dtype);
      uint8_t nibbles[kScales];
      unpack_rows(tensors.zero, problem.zeros, first, count, nibbles);
      for (int64_t i = 0; i < count; ++i) zero[i] = (nibbles[i] ^ flip) - flip;
    } else if (stride == 1 && problem.zeros.dtype == DType::i32) {
      std::copy_n(static_cast<const int32_t*>(tensors.zero) + first, count, zero);
    } else {
      for (int64_t i = 0; i < count; ++i)
        zero[i] = linear_ref::load_integer(tensors.zero, problem.zeros, first + i * stride);
    }
    if (!problem.learns_zeros()) return;
    for (int64_t i = 0; i < count; ++i) {
      const int clamped = std::clamp(zero[i], problem.codec.q_min, problem.codec.q_max);
      status.num_invalid_zero_points += zero[i] != clamped ? 1 : 0;
      zero[i] = clamped;
    }
  }
};

// ---- Kernels: elements [begin, end) of a chunk, whole vectors of them. The scale of all is number k, or
// that of element i is number i. ---------------------------------------------------------------------

template <bool kPerColumn, class D, class T>
HWY_INLINE hn::Vec<D> scale_at(D d, const T* array, int64_t i) {
  if constexpr (kPerColumn)
    return hn::LoadU(d, array + i);
  else
    return hn::Set(d, array[i]);
}

// The values of a table, by rank.
template <class F>
class TableValues {
 public:
  explicit TableValues(const formats::CodeBook& book) : is_e2m1_(book == formats::books::fp4_e2m1) {
    for (int i = 0; i < 16; ++i) {
      values_[i] = static_cast<F>(book.values[book.code_of_rank[i]]);
      if (i == 15)
        edges_[i] = std::numeric_limits<F>::infinity();
      else if constexpr (sizeof(F) == 8)
        edges_[i] = book.edges_f64[i];
      else
        edges_[i] = book.edges_f32[i];
    }
    for (int level = 0, size = 1; level < 4; ++level, size *= 2)
      for (int i = 0; i < size; ++i) levels_[level][i] = edges_[(2 * i + 1) * 8 / size - 1];
  }

  // The value nearest to v; of NaN any.
  template <class D>
  HWY_INLINE hn::Vec<D> nearest(D d, hn::Vec<D> v) const {
    if constexpr (sizeof(F) == 4) {
      if (is_e2m1_) return nearest_e2m1(d, v);
#if HALFBYTE_AVX512
      __m512i rank = _mm512_setzero_si512();
      for (const auto& level : levels_) {
        const __mmask16 above =
            _mm512_cmp_ps_mask(v.raw, _mm512_permutexvar_ps(rank, _mm512_load_ps(level)), _CMP_GT_OQ);
        rank = _mm512_add_epi32(rank, rank);
        rank = _mm512_mask_add_epi32(rank, above, rank, _mm512_set1_epi32(1));
      }
      return hn::Vec<D>{_mm512_permutexvar_ps(rank, _mm512_load_ps(values_))};
#endif
    }
    auto value = hn::Set(d, values_[0]);
    for (int i = 0; i < 15; ++i)
      value = hn::IfThenElse(hn::Gt(v, hn::Set(d, edges_[i])), hn::Set(d, values_[i + 1]), value);
    return value;
  }

 private:
  // Adding a power of two leaves the digits that a value has, to the nearest. 0 has no sign.
  template <class D>
  static HWY_INLINE hn::Vec<D> nearest_e2m1(D d, hn::Vec<D> v) {
    const hn::RebindToSigned<D> di;
    const auto y = hn::Min(hn::Abs(v), hn::Set(d, 6.0f));
    const auto power = hn::Max(hn::And(hn::BitCast(di, y), hn::Set(di, 0x7F800000)), hn::Set(di, 127 << 23));
    const auto shift = hn::BitCast(d, hn::Add(power, hn::Set(di, 22 << 23)));
    return hn::Add(hn::CopySignToAbs(hn::Sub(hn::Add(y, shift), shift), v), hn::Zero(d));
  }

  alignas(64) F edges_[16], values_[16];  // edges_[i]: of ranks i and i + 1
  alignas(64) F levels_[4][16];           // of a search for the rank: at the path so far
  bool is_e2m1_;
};

// Smallest and largest finite element of each scale, joined to `low` and `high`.
template <class Type, bool kPerColumn>
HWY_INLINE void range_segment(const Source<typename Type::Memory>& x, int64_t begin, int64_t end,
                              typename Type::Compute* low, typename Type::Compute* high, int64_t k) {
  const hn::ScalableTag<typename Type::Compute> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto infinity = hn::Set(d, std::numeric_limits<typename Type::Compute>::infinity());
  auto lowest = infinity, highest = hn::Neg(infinity);
  const auto* const from = x.at(begin, end, N);
  for (int64_t i = begin; i < end; i += N) {
    const auto v = Type::load(d, from + (i - begin));
    auto counts = hn::Lt(hn::Abs(v), infinity);
    if (i + N > end) counts = hn::And(counts, hn::FirstN(d, static_cast<size_t>(end - i)));
    const auto bottom = hn::IfThenElse(counts, v, infinity),
               top = hn::IfThenElse(counts, v, hn::Neg(infinity));
    if constexpr (kPerColumn) {
      hn::StoreU(hn::Min(hn::LoadU(d, low + i), bottom), d, low + i);
      hn::StoreU(hn::Max(hn::LoadU(d, high + i), top), d, high + i);
    } else {
      lowest = hn::Min(lowest, bottom);
      highest = hn::Max(highest, top);
    }
  }
  if constexpr (!kPerColumn) {
    low[k] = std::min(low[k], hn::GetLane(hn::MinOfLanes(d, lowest)));
    high[k] = std::max(high[k], hn::GetLane(hn::MaxOfLanes(d, highest)));
  }
}

// The same of as many neighbouring groups of f32 arithmetic as a vector has lanes, each of kVectors vectors.
template <class Type, int kVectors>
HWY_INLINE void ranges_of_short_groups(const typename Type::Memory* x, float* low, float* high) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  constexpr size_t N = hn::MaxLanes(d);
  const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  hn::Vec<decltype(di)> lows[N], highs[N];
  for (size_t i = 0; i < N; ++i) {
    auto lowest = infinity, highest = hn::Neg(infinity);
    for (int j = 0; j < kVectors; ++j, x += N) {
      const auto v = Type::load(d, x);
      const auto counts = hn::Lt(hn::Abs(v), infinity);
      lowest = hn::Min(lowest, hn::IfThenElse(counts, v, infinity));
      highest = hn::Max(highest, hn::IfThenElse(counts, v, hn::Neg(infinity)));
    }
    lows[i] = hn::BitCast(di, lowest);
    highs[i] = hn::BitCast(di, highest);
  }
  const auto floats = [&](hn::Vec<decltype(di)> v) HWY_ATTR { return hn::BitCast(d, v); };
  const auto least = over_lanes(
      di, lows, [&](auto a, auto b) HWY_ATTR { return hn::BitCast(di, hn::Min(floats(a), floats(b))); });
  const auto most = over_lanes(
      di, highs, [&](auto a, auto b) HWY_ATTR { return hn::BitCast(di, hn::Max(floats(a), floats(b))); });
  hn::StoreU(floats(least), d, low);
  hn::StoreU(floats(most), d, high);
}

// ---- Tiles ------------------------------------------------------------------------------------

// What a thread has to work on tiles. An operation derives from it.
template <class Type>
class LinearWorker {
 public:
  using F = typename Type::Compute;
  using Memory = typename Type::Memory;

  explicit LinearWorker(const Grid& grid) : grid_(grid), problem_(grid.problem), tensors_(grid.tensors) {}

  // Calls body(place, n) for the chunks of a tile: n elements, whose scales are loaded.
  template <class Body>
  void walk(const Tile& tile, const Body& body) {
    for (int64_t begin = tile.column, end = begin; begin < tile.end_column; begin = end) {
      int64_t n = grid_.per_column ? kScales : kChunk;
      if (grid_.group_cols < kChunk / kScales) n = (kScales - 1) * grid_.group_cols / grid_.unit * grid_.unit;
      if (grid_.odd_cols != 0) n = std::min(n, grid_.odd_cols - begin % grid_.odd_cols);
      end = std::min(tile.end_column, begin + n);
      for (int64_t line = tile.line; line < tile.end_line; ++line)
        load_and_run({tile.outer, line, begin}, end - begin, body);
    }
    if (grid_.past_caches) hwy::FlushStream();
  }

  // Calls emit(first scale, count, low, high) with the ranges of scales in the tile.
  template <class Emit>
  void ranges(const Tile& tile, const Emit& emit) {
    const int64_t width =
        grid_.group_cols * std::max<int64_t>(1, std::min(kScales, kChunk / grid_.group_cols));
    F* const low = scales_.low;
    F* const high = scales_.high;
    for (int64_t line = tile.line, next = line; line < tile.end_line; line = next) {
      next = std::min(tile.end_line, (line / grid_.group_lines + 1) * grid_.group_lines);
      for (int64_t column = tile.column, end = column; column < tile.end_column; column = end) {
        end = std::min(tile.end_column, (column / grid_.group_cols) * grid_.group_cols + width);
        const int64_t count = grid_.num_scales(column, end);
        if (short_ranges({tile.outer, line, column}, end - column, count)) {
          emit(grid_.scale_index({tile.outer, line, column}), count, low, high);
          continue;
        }
        std::fill_n(low, count, std::numeric_limits<F>::infinity());
        std::fill_n(high, count, -std::numeric_limits<F>::infinity());
        for (int64_t l = line; l < next; ++l)
          for (int64_t begin = column; begin < end; begin += kChunk) {
            const int64_t n = std::min(kChunk, end - begin);
            const Source<Memory> x = source(tensors_.x, tensors_.x_strides, {tile.outer, l, begin}, n, x_);
            const int64_t first = grid_.num_scales(column, begin + 1) - 1;
            for_each_segment(
                begin, n,
                [&](auto per_column, int64_t from, int64_t to, int64_t k)
                    HWY_ATTR { range_segment<Type, per_column>(x, from, to, low, high, first + k); },
                [](int64_t, int64_t) {});
          }
        emit(grid_.scale_index({tile.outer, line, column}), count, low, high);
      }
    }
    scales_.first = -1;
  }

  // Counts what are none of the scales [first, first + n).
  void check(int64_t first, int64_t n) { scales_.load(problem_, tensors_, first, 1, n, status); }

  QuantizeStatus status;

 protected:
  using Place = Grid::Place;

  // n elements of a tensor, through `buffer` where they do not lie side by side.
  template <class T>
  Source<T> source(const void* data, const LinearStrides& strides, const Place& place, int64_t n,
                   T* buffer) const {
    const auto* from = static_cast<const T*>(data) + Grid::offset(strides, place);
    if (strides.inner == 1) return {from, n, grid_.per_column ? strides.axis : kAhead};
    gather<T>(from, strides.inner, n, buffer);
    return {buffer, n, 0};
  }
  template <class T>
  void write(const T* from, int64_t n, T* to, int64_t stride) const {
    if (stride != 1)
      scatter<T>(from, stride, n, to);
    else if (grid_.past_caches)
      stream_copy(reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from),
                  static_cast<size_t>(n) * sizeof(T));
    else
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
  }

  // Calls body(per_column, begin, end, k) for the elements of n columns with scale k of the chunk, and
  // done(begin, end) for each part of them.
  template <class Body, class Done>
  HWY_INLINE void for_each_segment(int64_t column, int64_t n, const Body& body, const Done& done) const {
    const auto N = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<F>()));
    int64_t group_end = grid_.per_column ? n : grid_.group_cols - column % grid_.group_cols;
    for (int64_t begin = 0, end = 0, k = 0, part = 0; begin < n; begin = end) {
      end = std::min({n, group_end, part + kPart});
      const int64_t whole = round_up(end - begin, N) <= n - begin ? end : begin + (end - begin) / N * N;
      for (int64_t from = begin, to = whole > begin ? whole : end; from < end; from = to, to = end)
        if (grid_.per_column)
          body(std::true_type(), from, to, from);
        else
          body(std::false_type(), from, to, k);
      if (end == group_end) group_end += grid_.group_cols, ++k;
      if (end < n && end < part + kPart) continue;
      done(part, end);
      part = end;
    }
  }

  // Calls body(i, params) for elements [begin, end), whose scale is number k, or number i.
  template <class Body>
  void one_by_one(bool per_column, int64_t begin, int64_t end, int64_t k, const Body& body) const {
    for (int64_t i = begin; i < end; ++i) body(i, scales_.params(per_column ? i : k));
  }
  F value_of(const Memory& element) const { return linear_ref::load_element<F>(&element, problem_.dtype, 0); }

  // Counts an element that is not finite, number `index` of all.
  void count_nonfinite(int64_t index) {
    if (status.num_nonfinite++ == 0 || index < status.first_nonfinite) status.first_nonfinite = index;
  }
  void write_y(const Place& place, int64_t begin, int64_t end) const {
    const LinearStrides& strides = tensors_.y_strides;
    write(y_ + begin, end - begin,
          static_cast<Memory*>(tensors_.y) + Grid::offset(strides, place) + begin * strides.inner,
          strides.inner);
  }

  const Grid& grid_;
  const LinearProblem& problem_;
  const LinearTensors& tensors_;
  Scales<F> scales_;
  HWY_ALIGN Memory x_[kChunk + kPad], dy_[kChunk + kPad], y_[kChunk + kPad];
  HWY_ALIGN uint8_t codes_[kChunk + kPad];

 private:
  // Of whole groups of one or two vectors, one behind the other, as many as there are lanes, or a multiple.
  // False: they are for range_segment.
  bool short_ranges(const Place& place, int64_t n, int64_t count) {
    if constexpr (sizeof(F) == 4) {
      constexpr auto N = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<float>()));
      const bool one = grid_.group_cols == N, two = grid_.group_cols == 2 * N;
      if ((!one && !two) || grid_.group_lines != 1 || tensors_.x_strides.inner != 1 || count % N != 0 ||
          n != count * grid_.group_cols)
        return false;
      const auto* x = static_cast<const Memory*>(tensors_.x) + Grid::offset(tensors_.x_strides, place);
      for (int64_t i = 0; i < count; i += N, x += N * grid_.group_cols)
        if (one)
          ranges_of_short_groups<Type, 1>(x, scales_.low + i, scales_.high + i);
        else
          ranges_of_short_groups<Type, 2>(x, scales_.low + i, scales_.high + i);
      return true;
    } else {
      return false;
    }
  }

  template <class Body>
  void load_and_run(const Place& place, int64_t n, const Body& body) {
    const int64_t first = grid_.scale_index(place);
    const int64_t count = grid_.num_scales(place.column, place.column + n);
    QuantizeStatus counted_before;
    if (first != scales_.first || count != scales_.count)
      scales_.load(problem_, tensors_, first, grid_.scale.inner, count, counted_before);
    body(place, n);
  }
};

// Stores those of `count` groups: first, first + stride and so on.
template <class F>
HWY_NOINLINE void store_params(const linear_ref::ParamsOfRanges<F>& params, int64_t first, int64_t stride,
                               int64_t count, const F* low, const F* high, QuantizeStatus& status) {
  int64_t i = 0;
  if constexpr (sizeof(F) == 4)
    if (stride == 1 && params.are_of_ranges())
      for (GroupBatch batch; i + GroupBatch::size() <= count; i += GroupBatch::size()) {
        std::copy_n(low + i, GroupBatch::size(), batch.min);
        std::copy_n(high + i, GroupBatch::size(), batch.max);
        if (batch.find(params.codec(), {params.scales()}, first + i, std::numeric_limits<float>::infinity()))
          params.store_zeros(first + i, batch.zero_point, GroupBatch::size());
        else
          for (int64_t j = i; j < i + GroupBatch::size(); ++j)
            params.store(first + j, low[j], high[j], status);
      }
  for (; i < count; ++i) params.store(first + i * stride, low[i], high[i], status);
}

// All of a problem: the scales, where they are computed, and the tiles, each by a Worker<Type>.
template <class Type, template <class> class Worker>
QuantizeStatus run_tiles(const LinearProblem& problem, const LinearTensors& tensors) {
  using F = typename Type::Compute;
  QuantizeStatus total;
  if (problem.num_elements() == 0) {
    if (problem.computed) linear_ref::compute_params<F>(problem, tensors, total);
    return total;
  }
  const Grid grid(problem, tensors);
  std::mutex mutex;  // of total, absmax, low and high: held for moments at the end of a tile
  const auto finish = [&](const Worker<Type>& worker) {
    const std::lock_guard lock(mutex);
    merge(total, worker.status);
  };
  if (!problem.computed) {
    parallel_for(problem.num_scales, linear::kTask, problem.num_threads,
                 [&](int64_t begin, int64_t end, int) {
                   Worker<Type> worker(grid);
                   for (; begin < end; begin += kScales) worker.check(begin, std::min(kScales, end - begin));
                   finish(worker);
                 });
  } else if (problem.observed) {
    ++*tensors.observer.num_batches;
  }
  if (problem.computed_global_scale) {
    F absmax = 0;
    grid.for_each_tile([&](const Tile& tile) {
      F largest = 0;
      Worker<Type>(grid).ranges(tile, [&](int64_t, int64_t count, const F* low, const F* high) {
        for (int64_t i = 0; i < count; ++i) largest = std::max({largest, -low[i], high[i]});
      });
      const std::lock_guard lock(mutex);
      absmax = std::max(absmax, largest);
    });
    *tensors.global_scale = formats::global_scale_of(absmax);
  }
  const linear_ref::ParamsOfRanges<F> params(problem, tensors);
  if (problem.computed && !grid.fused()) {
    Scratch own;
    Scratch& scratch = tensors.scratch ? *tensors.scratch : own;
    F *const low = scratch.take<F>(problem.num_scales), *const high = scratch.take<F>(problem.num_scales);
    std::fill_n(low, problem.num_scales, std::numeric_limits<F>::infinity());
    std::fill_n(high, problem.num_scales, -std::numeric_limits<F>::infinity());
    grid.for_each_tile([&](const Tile& tile) {
      Worker<Type>(grid).ranges(tile, [&](int64_t first, int64_t count, const F* lows, const F* highs) {
        const std::lock_guard lock(mutex);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t index = first + i * grid.scale.inner;
          low[index] = std::min(low[index], lows[i]);
          high[index] = std::max(high[index], highs[i]);
        }
      });
    });
    for (int64_t i = 0; i < problem.num_scales; ++i) params.store(i, low[i], high[i], total);
  }
  grid.for_each_tile([&](const Tile& tile) {
    Worker<Type> worker(grid);
    if (grid.fused())
      worker.ranges(tile, [&](int64_t first, int64_t count, const F* low, const F* high) {
        store_params(params, first, grid.scale.inner, count, low, high, worker.status);
      });
    worker.run(tile);
    finish(worker);
  });
  return total;
}

template <template <class> class Worker>
QuantizeStatus run_tiles(const LinearProblem& problem, const LinearTensors& tensors) {
  switch (problem.dtype) {
    case DType::f32:
      return run_tiles<F32, Worker>(problem, tensors);
    case DType::f16:
      return run_tiles<F16, Worker>(problem, tensors);
    case DType::bf16:
      return run_tiles<BF16, Worker>(problem, tensors);
    default:
      return run_tiles<F64, Worker>(problem, tensors);
  }
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_LINEAR_INL_H_
