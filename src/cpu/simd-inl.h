// Helpers of the SIMD kernels, compiled once per target. Include after highway.h, inside a file that
// foreach_target.h compiles.
#if defined(HALFBYTE_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_CPU_SIMD_INL_H_
#undef HALFBYTE_CPU_SIMD_INL_H_
#else
#define HALFBYTE_CPU_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "formats/bits.h"
#include "formats/convert.h"
#include "halfbyte/tensor.hpp"
#include "hwy/highway.h"

// Targets with vectors; the others call the scalar references.
#define HALFBYTE_SIMD (HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)
// 512-bit vectors with 16-bit permutes: vpermw has no portable form in Highway.
#define HALFBYTE_AVX512 (HWY_TARGET <= HWY_AVX3)
// 512-bit vectors with byte permutes over the whole vector.
#define HALFBYTE_VBMI (HWY_TARGET <= HWY_AVX3_DL)

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HALFBYTE_SIMD

// Elements of dtype T as lanes of the type their arithmetic is done in.
struct F32 {
  using Memory = float;
  using Bits = int32_t;
  using Compute = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* x) {
    return hn::LoadU(d, x);
  }
};
struct F64 {
  using Memory = double;
  using Bits = int64_t;
  using Compute = double;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* x) {
    return hn::LoadU(d, x);
  }
};
struct BF16 {
  using Memory = uint16_t;
  using Bits = int16_t;
  using Compute = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* x) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<uint32_t, D> d32;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, x))));
  }
};
struct F16 {
  using Memory = uint16_t;
  using Bits = int16_t;
  using Compute = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* x) {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(x)));
  }
};

// Two vectors of elements, worked on together: of bf16 those with even and with odd numbers, which is how
// they lie in words; else one vector behind the other.
template <class V>
struct Two {
  V a, b;
};
template <class Type>
constexpr bool kEvenOdd = std::is_same_v<Type, BF16>;
template <class Type, class D>
HWY_INLINE Two<hn::Vec<D>> load_two(D d, const typename Type::Memory* x) {
  if constexpr (kEvenOdd<Type>) {
    const hn::RebindToUnsigned<D> du;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(x));
    return {hn::BitCast(d, hn::ShiftLeft<16>(words)),
            hn::BitCast(d, hn::And(words, hn::Set(du, 0xFFFF0000u)))};
  } else {
    return {Type::load(d, x), Type::load(d, x + hn::Lanes(d))};
  }
}

// x / scale by the reciprocal and an exact residual correction (Markstein), correctly rounded where nothing
// under- or overflows.
template <class V>
HWY_INLINE V quotient(V x, V scale, V reciprocal) {
  const V q = hn::Mul(x, reciprocal);
  return hn::MulAdd(hn::NegMulAdd(q, scale, x), reciprocal, q);
}

// Of as many vectors of 32-bit integers as one has lanes: `op` over the lanes of each, in their order.
template <class DI, class V = hn::Vec<DI>, class Op>
HWY_INLINE V over_lanes(DI di, const V* v, const Op& op) {
  constexpr size_t N = hn::MaxLanes(DI());
  const hn::Repartition<int64_t, DI> di64;
  const auto wide = [&](V x) HWY_ATTR { return hn::BitCast(di64, x); };
  V fours[N / 4];  // of each block the lanes of four vectors, one each
  for (size_t i = 0; i < N / 4; ++i) {
    const auto two = [&](V a, V b) HWY_ATTR {
      return op(hn::InterleaveLower(di, a, b), hn::InterleaveUpper(di, a, b));
    };
    const V a = two(v[4 * i], v[4 * i + 1]), b = two(v[4 * i + 2], v[4 * i + 3]);
    fours[i] = op(hn::BitCast(di, hn::InterleaveLower(di64, wide(a), wide(b))),
                  hn::BitCast(di, hn::InterleaveUpper(di64, wide(a), wide(b))));
  }
#if HALFBYTE_AVX512
  const auto halves = [&](V a, V b) HWY_ATTR {
    return op(V{_mm512_shuffle_i64x2(a.raw, b.raw, 0x44)}, V{_mm512_shuffle_i64x2(a.raw, b.raw, 0xEE)});
  };
  const V a = halves(fours[0], fours[1]), b = halves(fours[2], fours[3]);
  return op(V{_mm512_shuffle_i64x2(a.raw, b.raw, 0x88)}, V{_mm512_shuffle_i64x2(a.raw, b.raw, 0xDD)});
#elif HWY_MAX_BYTES == 32
  return op(hn::ConcatLowerLower(di, fours[1], fours[0]), hn::ConcatUpperUpper(di, fours[1], fours[0]));
#else
  return fours[0];
#endif
}

// f32 lanes that are not NaN: bf16, round half to even, in the upper half of each lane; anything in the
// lower.
template <class D32>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D32>> bf16_in_upper_half(D32 /*d*/, hn::Vec<D32> v) {
  const hn::RebindToUnsigned<D32> du32;
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1u));
  return hn::Add(hn::Add(bits, hn::Set(du32, 0x7FFFu)), odd);
}

// f32 lanes to bf16 bits, round half to even, NaN quiet (Highway 1.0.3 truncates).
template <class D32>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D32>> to_bf16(D32 d, hn::Vec<D32> v) {
  const hn::RebindToUnsigned<D32> du32;
  const hn::Rebind<uint16_t, D32> du16;
  const auto quiet = hn::Or(hn::BitCast(du32, v), hn::Set(du32, 0x400000u));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(v));
  return hn::TruncateTo(du16, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, bf16_in_upper_half(d, v))));
}

// Copies n bytes past the caches: `to` is written once and read by nobody soon. Whole cache lines are
// streamed, the ragged ends stored.
HWY_INLINE void stream_copy(uint8_t* to, const uint8_t* from, size_t n) {
  const hn::ScalableTag<uint8_t> d;
  const size_t N = hn::Lanes(d);
  const size_t head = std::min(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + 64 <= n; i += 64)
    for (size_t j = 0; j < 64; j += N) hn::Stream(hn::LoadU(d, from + i + j), d, to + i + j);
  std::memcpy(to + i, from + i, n - i);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_CPU_SIMD_INL_H_
