// What the kernels of linear quantization share: parameters of groups, and the three operations on a chunk. Codes by a
// reciprocal and one residual correction where that gives the correctly rounded quotient, else by formats::encode.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/codec.h"
#include "halfbyte_config.h"
#include "ops/quantize_linear/quantize_linear_args.h"

namespace halfbyte::device {

using F = Element::Compute;  // what is computed in
using Memory = Element::Memory;

constexpr int kChunk = linear_chunk(sizeof(Memory));
using Chunk = ChunkOf<Element, kChunk>;
constexpr bool kFast = sizeof(F) == 4;

__device__ __forceinline__ F load_element(const void* x, i64 index) {
  return load(Element(), static_cast<const Memory*>(x)[index]);
}

// ---- Parameters

struct Group {
  F scale;  // 0 where it is none
  int zero_point;
  // Of the fast way: 1 / scale, and what |x| must stay below; 0 where the scale is extreme.
  F reciprocal, limit;
};

__device__ __forceinline__ F load_scale_of(const LinearCommon& common, i64 index) {
  if constexpr (sizeof(F) == 8) {
    if (common.scale_type == ScaleType::f64) return static_cast<const double*>(common.data.scales)[index];
  } else if constexpr (sizeof(Memory) == 2) {
    if (common.scale_type != ScaleType::f32) return load_element(common.data.scales, index);
  }
  return static_cast<const float*>(common.data.scales)[index];
}

__device__ __forceinline__ int load_zero_point(const LinearCommon& common, i64 index) {
  const void* const zeros = common.data.zeros;
  switch (common.zero_type) {
    case ZeroType::none:
      return 0;
    case ZeroType::i32:
      return static_cast<const int*>(zeros)[index];
    case ZeroType::i8:
      return static_cast<const signed char*>(zeros)[index];
    case ZeroType::u8:
      return static_cast<const u8*>(zeros)[index];
    case ZeroType::i4:
    case ZeroType::u4:
      break;
  }
  const i64 row = index / common.zero_cols;
  const int column = static_cast<int>(index - row * common.zero_cols);
  const int nibble =
      static_cast<const u8*>(zeros)[row * common.zero_row_bytes + column / 2] >> (column % 2 * 4) & 15;
  return common.zero_type == ZeroType::i4 ? (nibble ^ 8) - 8 : nibble;
}

// What the fast way needs besides scale and zero point.
__device__ __forceinline__ void prepare(Group& group) {
  if constexpr (kFast) {
    const bool usual = group.scale > 0x1p-90f && group.scale < 0x1p100f;
    group.reciprocal = __frcp_rn(group.scale);
    group.limit = usual ? group.scale * 0x1p20f : 0;
  }
}

// `is_first()`: whether the caller has the first element of the group, so that each is counted once.
template <class IsFirst>
__device__ __forceinline__ Group load_group(const LinearCommon& common, i64 index, const IsFirst& is_first) {
  Group group{};
  group.scale = load_scale_of(common, index);
  if (!(group.scale >= 0 && group.scale <= Float<F>::kMax)) {
    group.scale = 0;
    if (common.given && is_first()) atomic_add(&common.counts->num_invalid_scales, 1);
  }
  const int zero_point = load_zero_point(common, index);
  group.zero_point = clamp(zero_point, common.q_min, common.q_max);
  if (group.zero_point != zero_point && common.given && is_first())
    atomic_add(&common.counts->num_invalid_zero_points, 1);
  prepare(group);
  return group;
}

// The groups of a chunk: one for all elements, or one for each. `at` is for indices that the compiler does not know.
struct OneGroup {
  Group group;
  __device__ __forceinline__ const Group& operator[](int) const { return group; }
  __device__ __forceinline__ const Group& at(const LinearCommon&, int) const { return group; }
};
struct ManyGroups {
  Group groups[kChunk];
  i64 first;  // number of the first scale
  __device__ __forceinline__ const Group& operator[](int i) const { return groups[i]; }
  __device__ __forceinline__ Group at(const LinearCommon& common, int i) const {
    return load_group(common, first + i, [] { return false; });
  }
};

// ---- Elements, any values

__device__ __forceinline__ Codec codec_of(const LinearCommon& common) {
  Codec codec;
  codec.kind = Kind::integer;
  codec.scale_type = common.scale_type;
  codec.q_min = common.q_min;
  codec.q_max = common.q_max;
  return codec;
}

// The code as it is stored in the low bits; `index`: of the element, row-major.
__device__ __forceinline__ u32 encode_element(F x, const Group& group, const LinearCommon& common, i64 index) {
  int q = group.zero_point;
  if (!formats::is_finite(x)) {
    atomic_add(&common.counts->num_nonfinite, 1);
    atomic_max(&common.counts->first_nonfinite_key, ~static_cast<u64>(index));
  }
  if (x == x) {
    GroupParams<F> params;
    params.code_scale = group.scale;
    params.zero_point = group.zero_point;
    q = encode(x, params, codec_of(common)) + common.q_min;
  }
  return static_cast<u32>(q);
}
__device__ __forceinline__ F decode_element(int q, const Group& group) {
  return static_cast<F>(q - group.zero_point) * group.scale;
}
// Whether the gradient passes.
__device__ __forceinline__ bool is_within(F x, const Group& group, const LinearCommon& common) {
  if (x != x) return false;
  if (group.scale == 0) return true;
  const F rounded = round_half_even(x / group.scale);
  return static_cast<F>(common.q_min - group.zero_point) <= rounded &&
         rounded <= static_cast<F>(common.q_max - group.zero_point);
}

// ---- Chunks

// Adding it to |x| < 2^22 leaves x, rounded half to even, in the low bits.
constexpr float kRoundToInteger = 0x1.8p23f;
constexpr u32 kRoundToIntegerBits = 0x4B400000u;

// |x| of all elements is below the limits of their groups: quotients stay below 2^22, and no residual underflows where
// it matters. NaN is not.
__device__ __forceinline__ bool is_fast(const Chunk& x, const OneGroup& groups) {
  return unpack(magnitude_range(x)).high < groups.group.limit;
}
__device__ __forceinline__ bool is_fast(const Chunk& x, const ManyGroups& groups) {
  bool fast = true;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) fast = fast && fabsf(x[i]) < groups[i].limit;
  return fast;
}

// kBits of each code, the first lowest.
template <int kBits, class Groups>
__device__ __forceinline__ u64 quantize_chunk(const Chunk& x, const Groups& groups, const LinearCommon& common,
                                              i64 index) {
  if constexpr (kFast) {
    if (is_fast(x, groups)) {
      constexpr int kWord = 32 / kBits;  // codes in a word
      u32 words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const Group& group = groups[i];
        const int offset = group.zero_point - common.code_min;
        const float low = static_cast<float>(common.q_min - group.zero_point);
        const float high = static_cast<float>(common.q_max - group.zero_point);
        const float y = fminf(fmaxf(quotient(x[i], group.scale, group.reciprocal), low), high);
        const u32 bits = bit_cast<u32>(__fadd_rn(y, kRoundToInteger));
        words[i / kWord] += (bits + (static_cast<u32>(offset) - kRoundToIntegerBits)) << (kBits * (i % kWord));
      }
      return (words[0] ^ common.sign_bits) | static_cast<u64>(words[1] ^ common.sign_bits) << 32;
    }
  }
  u64 codes = 0;
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i)
    codes |= static_cast<u64>(encode_element(load_element(common.data.x, index + i), groups.at(common, i), common, index + i) &
                              ((1u << kBits) - 1))
             << (kBits * i);
  return codes;
}

template <int kBits, class Groups>
__device__ __forceinline__ Words4 dequantize_chunk(u64 codes, const Groups& groups, const LinearCommon& common) {
  F values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const u32 word = static_cast<u32>(codes >> (i * kBits / 32 * 32)) ^ common.sign_bits;
    const u32 code = word >> (kBits * i % 32) & ((1u << kBits) - 1);  // from code_min
    const int zero = groups[i].zero_point - common.code_min;
    if constexpr (sizeof(F) == 4)  // integers below 2^23 as floats plus 2^23, without conversions
      values[i] = __fmul_rn(__fsub_rn(bit_cast<float>(0x4B000000u | code), 0x1p23f + static_cast<float>(zero)),
                            groups[i].scale);
    else
      values[i] = static_cast<F>(static_cast<int>(code) - zero) * groups[i].scale;
  }
  return round_chunk(Element(), values);
}

template <class Groups>
__device__ __forceinline__ Words4 backward_chunk(const Chunk& x, const Words4& dy, const Groups& groups,
                                                 const LinearCommon& common, i64 index) {
  bool within[kChunk];
  bool fast = false;
  if constexpr (kFast) {
    fast = is_fast(x, groups);
    if (fast) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const Group& group = groups[i];
        const float y = quotient(x[i], group.scale, group.reciprocal);
        const float rounded = __fsub_rn(__fadd_rn(y, kRoundToInteger), kRoundToInteger);
        within[i] = static_cast<float>(common.q_min - group.zero_point) <= rounded &&
                    rounded <= static_cast<float>(common.q_max - group.zero_point);
      }
    }
  }
  u32 passed = 0;  // a bit an element
  if (!fast) {
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i)
      passed |= static_cast<u32>(is_within(load_element(common.data.x, index + i), groups.at(common, i), common)) << i;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) within[i] = (passed >> i & 1) != 0;
  }
  Words4 dx;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Memory) == 2)
      dx.word[i] = dy.word[i] & ((within[2 * i] ? 0xFFFFu : 0) | (within[2 * i + 1] ? 0xFFFF0000u : 0));
    else
      dx.word[i] = within[i * 4 / static_cast<int>(sizeof(Memory))] ? dy.word[i] : 0;
  }
  return dx;
}

// The codes of chunk number `chunk`.
template <int kBits>
__device__ __forceinline__ u64 load_codes(const void* codes, i64 chunk) {
  constexpr int kCodesBits = kChunk * kBits;
  if constexpr (kCodesBits == 64) return load_once(static_cast<const u64*>(codes) + chunk);
  if constexpr (kCodesBits == 32) return load_once(static_cast<const u32*>(codes) + chunk);
  if constexpr (kCodesBits == 16) return static_cast<const u16*>(codes)[chunk];
  return static_cast<const u8*>(codes)[chunk];
}
template <int kBits>
__device__ __forceinline__ void store_codes(void* to, i64 chunk, u64 codes) {
  constexpr int kCodesBits = kChunk * kBits;
  if constexpr (kCodesBits == 64) static_cast<u64*>(to)[chunk] = codes;
  if constexpr (kCodesBits == 32) static_cast<u32*>(to)[chunk] = static_cast<u32>(codes);
  if constexpr (kCodesBits == 16) static_cast<u16*>(to)[chunk] = static_cast<u16>(codes);
  if constexpr (kCodesBits == 8) static_cast<u8*>(to)[chunk] = static_cast<u8>(codes);
}

// What an operation reads of a chunk, so that many chunks can be on their way, and what it does with it.
template <LinearOp op, int kBits>
struct Work {
  static constexpr bool kReadsX = op != LinearOp::dequantize;
  Select<kReadsX, Chunk, u64> read;  // x or codes
  Select<op == LinearOp::backward, Words4, u8> dy;

  __device__ __forceinline__ void load(const LinearPointers& data, i64 chunk) {
    if constexpr (kReadsX)
      read = load_chunk<Chunk>(data.x, chunk);
    else
      read = load_codes<kBits>(data.codes, chunk);
    if constexpr (op == LinearOp::backward) dy = load_once(static_cast<const Words4*>(data.dy) + chunk);
  }
  template <class Groups>
  __device__ __forceinline__ void finish(const LinearCommon& common, i64 chunk, const Groups& groups) const {
    if constexpr (op == LinearOp::quantize)
      store_codes<kBits>(common.data.codes, chunk, quantize_chunk<kBits>(read, groups, common, chunk * kChunk));
    else if constexpr (op == LinearOp::dequantize)
      store_once(static_cast<Words4*>(common.data.y) + chunk, dequantize_chunk<kBits>(read, groups, common));
    else
      store_once(static_cast<Words4*>(common.data.y) + chunk,
                 backward_chunk(read, dy, groups, common, chunk * kChunk));
  }
};

}  // namespace halfbyte::device
