// What the kernels of linear quantization share: parameters of groups, and the operations on a chunk. Codes
// by a reciprocal and one residual correction where that gives the correctly rounded quotient, else by
// formats::encode.
#pragma once

#include "formats/codec.h"
#include "grouped/linear_args.h"
#include "grouped/linear_table.cuh"
#include "grouped/ranges.cuh"

namespace halfbyte::device {

constexpr bool kFast = sizeof(F) == 4 && !(kTable && !kTableFits);
constexpr bool kPackedZeros = kZeroType == ZeroType::nibble;
// Zero points may be far: others are bytes, or clamped.
constexpr bool kFarZeros = kZeroType == ZeroType::i32 || kZeroType == ZeroType::any;
using CodePosition = Select<kFarZeros, i64, int>;

// ---- Parameters

struct Group {
  F scale;  // 0 where it is none
  int zero_point;
  F reciprocal,
      limit;  // of the fast way: 1 / scale, and what |x| must stay below; 0 where the scale is extreme or the
              // zero point far
};
// A limit that says that nothing of the group needs to be clamped.
constexpr float kNoClamp = 0x1p126f;

// Scales are f32 or have the type of the elements, which an argument says; or, where kByteScales, they are
// bytes of a type that the kernel is compiled for.
constexpr ScaleType kElementScale = Element::kScaleType;
__device__ __forceinline__ bool has_element_scales(const LinearCommon& common) {
  return common.scale_type == kElementScale;
}
constexpr bool kHasGlobalScale = kByteScales && kByteScale == ScaleType::e4m3;
__device__ __forceinline__ float global_scale(const LinearCommon& common) {
  if constexpr (!kHasGlobalScale) return 1;
  return common.tensor_range != nullptr ? global_scale_of(static_cast<F>(absmax_of(*common.tensor_range)))
                                        : *common.global_scale;
}
template <ZeroType type>
struct ZeroTypeOf {};
// body(ZeroTypeOf<type>()) for the type that is an argument. Gradients do not know the bits of codes.
template <class Body>
__device__ __forceinline__ void branch_by_zero_type(const LinearCommon& common, const Body& body) {
  constexpr ZeroType kLearned = sizeof(F) == 8 ? ZeroType::f64 : ZeroType::f32;
  if (common.zero_type == ZeroType::none) {
    body(ZeroTypeOf<ZeroType::none>());
  } else if (common.zero_type == ZeroType::i32) {
    body(ZeroTypeOf<ZeroType::i32>());
  } else if constexpr (kFake) {
    body(ZeroTypeOf<kLearned>());
  } else if (kOp != LinearOp::backward || common.zero_type == ZeroType::byte) {
    body(ZeroTypeOf<ZeroType::byte>());
  } else {
    body(ZeroTypeOf<ZeroType::nibble>());
  }
}
// The same without a branch where the kernel has the type as a constant, as kernels of 4-bit codes have.
template <class Body>
__device__ __forceinline__ void with_zero_type(const LinearCommon& common, const Body& body) {
  if constexpr (kZeroType != ZeroType::any)
    body(ZeroTypeOf<kZeroType>());
  else
    branch_by_zero_type(common, body);
}

__device__ __forceinline__ bool has_packed_zeros(const LinearCommon& common) {
  if constexpr (kZeroType == ZeroType::any && kOp == LinearOp::backward && !kFake)
    return common.zero_type == ZeroType::nibble;
  return kPackedZeros;
}
// The number of a zero point; among packed ones rows are whole bytes.
__device__ __forceinline__ i64 zero_index_of(const LinearCommon& common, i64 index) {
  if (has_packed_zeros(common) && common.zero_cols % 2 != 0) return index + index / common.zero_cols;
  return index;
}
// What the fast way needs besides scale and zero point.
__device__ __forceinline__ void prepare(Group& group) {
  if constexpr (kFast) {
    const bool usual = group.scale > 0x1p-90f && group.scale < 0x1p100f;
    group.reciprocal = normal_reciprocal(group.scale);
    group.limit = usual ? group.scale * 0x1p20f : 0;
  }
}

// What a group takes from memory: loaded early, so that it is there when it is used. It is as it was stored,
// since what is made of it waits for it, and must not come before other loads.
using StoredScale = Select<kByteScales, u8, Select<sizeof(Memory) == 2, u32, F>>;
struct Loaded {
  StoredScale scale;
  int zero_point;  // packed: its byte
  u32 zero_shift;  // where it begins there
};
// Of a kind that is an argument, without a branch: behind one, loads that came before would be sent later.
template <class Index>
__device__ __forceinline__ StoredScale load_stored_scale(const LinearCommon& common, Index index) {
  const bool whole = !has_element_scales(common);
  if constexpr (kByteScales)
    return static_cast<const u8*>(common.data.scales)[index];
  else if constexpr (sizeof(Memory) == 2)
    return load_half_or_word(
        static_cast<const u8*>(common.data.scales) + static_cast<u64>(index) * (whole ? 4u : 2u), whole);
  else
    return whole ? formats::load_scale<F>(common.data.scales, index, ScaleType::f32)
                 : formats::load_scale<F>(common.data.scales, index, kElementScale);
}
__device__ __forceinline__ F scale_of(const LinearCommon& common, StoredScale stored) {
  if constexpr (kByteScales)
    return formats::load_scale<F>(&stored, 0, kByteScale, global_scale_or_nan(global_scale(common)));
  else if constexpr (kElementScale == ScaleType::bf16 && kOp == LinearOp::dequantize)
    return bit_cast<float>(static_cast<u32>(stored)
                           << (has_element_scales(common) ? 16 : 0));  // in fewer registers
  else if constexpr (sizeof(Memory) == 2)
    return has_element_scales(common) ? load(Element(), static_cast<Memory>(stored))
                                      : bit_cast<float>(stored);
  else
    return stored;
}
__device__ __forceinline__ F load_scale(const LinearCommon& common, i64 index) {
  return scale_of(common, load_stored_scale(common, index));
}
__device__ __forceinline__ int zero_point_of(const LinearCommon& common, const Loaded& loaded) {
  if constexpr (kFake || kZeroType == ZeroType::i32) return loaded.zero_point;
  const int bits = has_packed_zeros(common) ? loaded.zero_point >> loaded.zero_shift & 15 : loaded.zero_point;
  return (bits ^ common.zero_sign) - common.zero_sign;
}
// Of n groups: a branch on how they are stored is one for all, so that all are on their way at once. `zeros`:
// zero_index_of(index).
template <int n, class Index>
__device__ __forceinline__ void load_parameters(const LinearCommon& common, const Index (&indices)[n],
                                                const Index (&zeros)[n], Loaded (&loaded)[n]) {
  const auto load_zeros = [&](const auto* from, const auto& value_of) {
#pragma unroll
    for (int i = 0; i < n; ++i) loaded[i].zero_point = value_of(from[indices[i]]);
  };
  const auto as_int = [](auto value) { return static_cast<int>(value); };
  const void* const zero_points = common.data.zeros;
  with_zero_type(common, [&]<ZeroType type>(ZeroTypeOf<type>) {
    if constexpr (type == ZeroType::none) {
#pragma unroll
      for (int i = 0; i < n; ++i) loaded[i].zero_point = 0;
    } else if constexpr (type == ZeroType::i32) {
      load_zeros(static_cast<const int*>(zero_points), as_int);
    } else if constexpr (type == ZeroType::byte) {
      load_zeros(static_cast<const u8*>(zero_points), as_int);
    } else if constexpr (type == ZeroType::nibble) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        loaded[i].zero_point = static_cast<const u8*>(zero_points)[zeros[i] >> 1];
        loaded[i].zero_shift = static_cast<u32>(zeros[i] & 1) * 4;
      }
    } else {
      load_zeros(static_cast<const F*>(zero_points), [](F value) { return learned_zero_point(value); });
    }
  });
  // As a branch, in fewer registers; the loads before are few.
  if constexpr (!kByteScales && sizeof(Memory) == 2 && n > 4) {
    const auto load_scales = [&](const auto* from) {
#pragma unroll
      for (int i = 0; i < n; ++i) loaded[i].scale = static_cast<StoredScale>(from[indices[i]]);
    };
    if (has_element_scales(common))
      load_scales(static_cast<const Memory*>(common.data.scales));
    else
      load_scales(static_cast<const u32*>(common.data.scales));
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) loaded[i].scale = load_stored_scale(common, indices[i]);
  }
}
template <int n, class Index>
__device__ __forceinline__ void load_parameters(const LinearCommon& common, const Index (&indices)[n],
                                                Loaded (&loaded)[n]) {
  Index zeros[n];
#pragma unroll
  for (int i = 0; i < n; ++i) zeros[i] = indices[i];
  if (has_packed_zeros(common) && common.zero_cols % 2 != 0) {
#pragma unroll
    for (int i = 0; i < n; ++i) zeros[i] = static_cast<Index>(zero_index_of(common, indices[i]));
  }
  load_parameters(common, indices, zeros, loaded);
}
__device__ __forceinline__ Loaded load_parameters(const LinearCommon& common, i64 index) {
  Loaded loaded[1];
  load_parameters(common, {index}, loaded);
  return loaded[0];
}
// `is_first()`: whether the caller has the first element of the group, so that each is counted once.
template <class IsFirst>
__device__ __forceinline__ Group make_group(const LinearCommon& common, const Loaded& loaded,
                                            const IsFirst& is_first) {
  Group group{};
  group.scale = scale_of(common, loaded.scale);
  if (!(group.scale >= 0 && group.scale <= Float<F>::kMax)) {
    group.scale = 0;
    if (common.given && is_first()) atomic_add(&common.counts->num_invalid_scales, 1);
  }
  if (kZeroType == ZeroType::any ? common.zero_type != ZeroType::none : kZeroType != ZeroType::none) {
    group.zero_point = zero_point_of(common, loaded);
    if (kFake && kZeroType != ZeroType::i32 && common.zero_type != ZeroType::i32) {  // learned
      const int zero_point = clamp(group.zero_point, common.q_min, common.q_max);
      if (group.zero_point != zero_point && common.given && is_first())
        atomic_add(&common.counts->num_invalid_zero_points, 1);
      group.zero_point = zero_point;
    }
  }
  prepare(group);
  if (kFarZeros && is_far(group.zero_point)) group.limit = 0;
  return group;
}
template <class IsFirst>
__device__ __forceinline__ Group load_group(const LinearCommon& common, i64 index, const IsFirst& is_first) {
  return make_group(common, load_parameters(common, index), is_first);
}

// 2^(kBits * i) summed over the codes of a word.
template <int kBits>
constexpr u32 kOnes = kBits == 8 ? 0x01010101u : 0x11111111u;

// Bounds of the quotient: q_min and q_max less the zero point, or of the table.
__device__ __forceinline__ float least_of(const LinearCommon& common, const Group& group) {
  return kTable ? lowest_of(common.table) : static_cast<float>(common.q_min - group.zero_point);
}
__device__ __forceinline__ float most_of(const LinearCommon& common, const Group& group) {
  return kTable ? highest_of(common.table) : static_cast<float>(common.q_max - group.zero_point);
}

// The groups of a chunk: one for all elements, or one for each.
struct OneGroup {
  Group group;
  float low, high;  // bounds of the quotient
  __device__ __forceinline__ OneGroup(const LinearCommon& common, const Group& g)
      : group(g), low(least_of(common, g)), high(most_of(common, g)) {}
  __device__ __forceinline__ F scale(int) const { return group.scale; }
  __device__ __forceinline__ F reciprocal(int) const { return group.reciprocal; }
  __device__ __forceinline__ int zero_point(int) const { return group.zero_point; }
  __device__ __forceinline__ bool are_far() const { return kFarZeros && is_far(group.zero_point); }
  __device__ __forceinline__ float least(const LinearCommon&, int) const { return low; }
  __device__ __forceinline__ float most(const LinearCommon&, int) const { return high; }
  // The zero points of the codes of a word, each in its bits.
  template <int kBits>
  __device__ __forceinline__ u32 zero_word(int) const {
    return static_cast<u32>(group.zero_point) * kOnes<kBits>;
  }
};
template <int n>
struct ManyGroups {
  F scales[n], reciprocals[n];  // scale 0 also where it is extreme: the fast way then takes no x
  int zero_points[n];
  float lows[n], highs[n];
  u32 zero_words[2];
  bool far = false;  // a zero point is

  __device__ __forceinline__ F scale(int i) const { return scales[i]; }
  __device__ __forceinline__ F reciprocal(int i) const { return reciprocals[i]; }
  __device__ __forceinline__ int zero_point(int i) const { return zero_points[i]; }
  __device__ __forceinline__ bool are_far() const { return kFarZeros && far; }
  __device__ __forceinline__ float least(const LinearCommon&, int i) const { return lows[i]; }
  __device__ __forceinline__ float most(const LinearCommon&, int i) const { return highs[i]; }
  template <int kBits>
  __device__ __forceinline__ u32 zero_word(int w) const {
    return zero_words[w];
  }
  template <int kBits>
  __device__ __forceinline__ void set(const LinearCommon& common, int i, const Group& group, bool fast_way) {
    static_assert(n * kBits <= 64);
    scales[i] = kFast && fast_way && group.limit == 0 ? 0 : group.scale;
    reciprocals[i] = group.reciprocal;
    zero_points[i] = group.zero_point;
    if (kFarZeros) far = far || is_far(group.zero_point);
    lows[i] = least_of(common, group);
    highs[i] = most_of(common, group);
    const u32 zero = static_cast<u32>(group.zero_point) << (i * kBits % 32);
    u32& word = zero_words[i * kBits / 32];
    word = i * kBits % 32 == 0 ? zero : word + zero;
  }
};

// ---- Elements, any values

__device__ __forceinline__ Codec codec_of(const LinearCommon& common) {
  Codec codec;
  codec.kind = Kind::integer;
  codec.scale_type = kByteScales ? kByteScale : has_element_scales(common) ? kElementScale : ScaleType::f32;
  codec.q_min = common.q_min;
  codec.q_max = common.q_max;
  return codec;
}

__device__ __forceinline__ void count_nonfinite(F x, const LinearCommon& common, i64 index) {
  if (!formats::is_finite(x)) {
    atomic_add(&common.counts->num_nonfinite, 1);
    atomic_max(&common.counts->first_nonfinite_key, ~static_cast<u64>(index));
  }
}
// NaN has the code of 0.
__device__ __forceinline__ int encode_number(F x, const Group& group, const LinearCommon& common) {
  if constexpr (kZeroType == ZeroType::none) {  // the same in fewer registers
    GroupParams<F> params;
    params.code_scale = group.scale;
    return x == x ? encode(x, params, codec_of(common)) + common.q_min : 0;
  } else {
    return linear_code<CodePosition>(x == x ? x : 0, group.scale, group.zero_point, common.q_min,
                                     common.q_max);
  }
}

// The code as it is stored in the low bits; `index`: of the element, row-major.
__device__ __forceinline__ u32 encode_element(F x, const Group& group, const LinearCommon& common,
                                              i64 index) {
  count_nonfinite(x, common, index);
  return static_cast<u32>(encode_number(x, group, common));
}
__device__ __forceinline__ F decode_element(int q, const Group& group) {
  return code_distance<F, CodePosition>(q, group.zero_point) * group.scale;
}
// An element of fake_quantize: NaN is kept.
__device__ __forceinline__ Memory fake_element(Memory element, const Group& group, const LinearCommon& common,
                                               i64 index) {
  const F x = load(Element(), element);
  count_nonfinite(x, common, index);
  if (x != x) return element;
  if constexpr (kTable)
    return group.scale == 0 ? Memory{}
                            : store(Element(), any_table_value(common.table, x / group.scale) * group.scale);
  else
    return store(Element(), decode_element(encode_number(x, group, common), group));
}
// Whether the gradient passes.
__device__ __forceinline__ bool is_within(F x, const Group& group, const LinearCommon& common) {
  if (x != x) return false;
  if (group.scale == 0) return true;
  if constexpr (kTable) {
    const F value = x / group.scale;
    return static_cast<F>(lowest_of(common.table)) <= value &&
           value <= static_cast<F>(highest_of(common.table));
  }
  const F rounded = round_half_even(x / group.scale);
  if constexpr (kFarZeros) {
    const i64 position = code_position(rounded, group.zero_point);
    return common.q_min <= position && position <= common.q_max;
  } else {
    return static_cast<F>(common.q_min - group.zero_point) <= rounded &&
           rounded <= static_cast<F>(common.q_max - group.zero_point);
  }
}

// ---- Chunks

// |x| of all elements is below the limits of their groups: quotients stay below 2^22, and no residual
// underflows where it matters. NaN is not.
template <int n>
__device__ __forceinline__ bool is_fast(const ChunkOf<Element, n>& x, const OneGroup& groups) {
  return unpack(magnitude_range(x)).high < groups.group.limit;
}
template <int n>
__device__ __forceinline__ bool is_fast(const ChunkOf<Element, n>& x, const ManyGroups<n>& groups) {
  bool fast = true;
#pragma unroll
  for (int i = 0; i < n; ++i) fast = fast && fabsf(x[i]) < groups.scale(i) * 0x1p20f;
  return fast;
}

// The codes of n elements, in words: less than one takes its low bits.
template <int n, int kBits>
struct Codes {
  static constexpr int kWord = 32 / kBits;  // codes in a word
  static constexpr int kWords = (n + kWord - 1) / kWord, kBytes = n * kBits / 8;
  u32 word[kWords];

  __device__ __forceinline__ void load(const void* from, i64 chunk) {
    if constexpr (kBytes == 16) {
      const Words4 words = load_once(static_cast<const Words4*>(from) + chunk);
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = words.word[w];
    } else if constexpr (kBytes == 8) {
      const u64 bits = load_once(static_cast<const u64*>(from) + chunk);
      word[0] = static_cast<u32>(bits);
      word[1] = static_cast<u32>(bits >> 32);
    } else if constexpr (kBytes == 4) {
      word[0] = load_once(static_cast<const u32*>(from) + chunk);
    } else if constexpr (kBytes == 2) {
      word[0] = static_cast<const u16*>(from)[chunk];
    } else {
      word[0] = static_cast<const u8*>(from)[chunk];
    }
  }
  __device__ __forceinline__ void store_once(void* to, i64 chunk) const {
    if constexpr (kBytes == 16)
      device::store_once(static_cast<Words4*>(to) + chunk, {{word[0], word[1], word[2], word[3]}});
    else
      store(to, chunk);
  }
  __device__ __forceinline__ void store(void* to, i64 chunk) const {
    if constexpr (kBytes == 16)
      static_cast<Words4*>(to)[chunk] = {{word[0], word[1], word[2], word[3]}};
    else if constexpr (kBytes == 8)
      static_cast<u64*>(to)[chunk] = word[0] | static_cast<u64>(word[1]) << 32;
    else if constexpr (kBytes == 4)
      static_cast<u32*>(to)[chunk] = word[0];
    else if constexpr (kBytes == 2)
      static_cast<u16*>(to)[chunk] = static_cast<u16>(word[0]);
    else
      static_cast<u8*>(to)[chunk] = static_cast<u8>(word[0]);
  }
};

// Of a chunk that is_fast. Without `clamp` no code may be beyond q_min and q_max.
template <int kBits, bool clamp, int n, class Groups>
__device__ __forceinline__ Codes<n, kBits> quantize_chunk(const ChunkOf<Element, n>& x, const Groups& groups,
                                                          const LinearCommon& common) {
  using Result = Codes<n, kBits>;
  Result codes;
#pragma unroll
  for (int w = 0; w < Result::kWords; ++w) {
    // q - code_min of each code: what rounding adds is taken away for all of them at once.
    u32 sum = groups.template zero_word<kBits>(w) -
              (static_cast<u32>(common.code_min) + kRoundToIntegerBits) * kOnes<kBits>;
#pragma unroll
    for (int j = 0; j < min(n, Result::kWord); ++j) {
      const int i = w * Result::kWord + j;
      float q = quotient(x[i], groups.scale(i), groups.reciprocal(i));
      if constexpr (clamp) q = fminf(fmaxf(q, groups.least(common, i)), groups.most(common, i));
      sum += bit_cast<u32>(__fadd_rn(q, kRoundToInteger)) << (kBits * j);
    }
    codes.word[w] = sum ^ common.sign_bits;
  }
  return codes;
}

// n elements of y are stored. No zero point is far.
template <int kBits, int n, class Groups>
__device__ __forceinline__ void dequantize_chunk(Codes<n, kBits> codes, const Groups& groups,
                                                 const LinearCommon& common, i64 chunk) {
  F values[n];
#pragma unroll
  for (int w = 0; w < Codes<n, kBits>::kWords; ++w) codes.word[w] ^= common.sign_bits;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const u32 code = codes.word[i * kBits / 32] >> (kBits * i % 32) & ((1u << kBits) - 1);  // from code_min
    const int zero = groups.zero_point(i) - common.code_min;
    if constexpr (sizeof(F) == 4)  // integers below 2^23 as floats plus 2^23, without conversions
      values[i] =
          __fmul_rn(__fsub_rn(bit_cast<float>(0x4B000000u | code), 0x1p23f + static_cast<float>(zero)),
                    groups.scale(i));
    else
      values[i] = static_cast<F>(static_cast<int>(code) - zero) * groups.scale(i);
  }
  constexpr int kWords4 = ChunkOf<Element, n>::kWords4;
#pragma unroll
  for (int k = 0; k < kWords4; ++k)
    store_once(static_cast<Words4*>(common.data.y) + chunk * kWords4 + k,
               round_chunk(Element(), values + k * (n / kWords4)));
}

// Of a chunk that is_fast. n elements of y are stored, and their mask. Without `clamp` no code may be beyond
// q_min and q_max.
template <bool clamp, int n, class Groups>
__device__ __forceinline__ void fake_quantize_chunk(const ChunkOf<Element, n>& x, const Groups& groups,
                                                    const LinearCommon& common, i64 chunk) {
  F values[n];
  u32 mask = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float y = quotient(x[i], groups.scale(i), groups.reciprocal(i));
    bool within = true;
    if constexpr (kTable) {
      values[i] = table_value(y);
      within = groups.least(common, i) <= y && y <= groups.most(common, i);
    } else {
      const float rounded = __fsub_rn(__fadd_rn(y, kRoundToInteger), kRoundToInteger);
      values[i] = clamp ? fminf(fmaxf(rounded, groups.least(common, i)), groups.most(common, i)) : rounded;
      within = !clamp || values[i] == rounded;
    }
    values[i] = __fmul_rn(values[i], groups.scale(i));
    if constexpr (kMask) mask |= (within ? 1u : 0u) << i;
  }
  constexpr int kWords4 = ChunkOf<Element, n>::kWords4;
#pragma unroll
  for (int k = 0; k < kWords4; ++k)
    store_once(static_cast<Words4*>(common.data.y) + chunk * kWords4 + k,
               round_chunk(Element(), values + k * (n / kWords4)));
  if constexpr (kMask) {
#pragma unroll
    for (int k = 0; k < n / 8; ++k)
      static_cast<u8*>(common.data.mask)[chunk * (n / 8) + k] = static_cast<u8>(mask >> (8 * k));
  }
}

// Of a chunk that is_fast.
template <int n, class Groups>
__device__ __forceinline__ void backward_chunk(const ChunkOf<Element, n>& x, const ChunkOf<Element, n>& dy,
                                               const Groups& groups, const LinearCommon& common, i64 chunk) {
  bool within[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float y = quotient(x[i], groups.scale(i), groups.reciprocal(i));
    const float rounded = kTable ? y : __fsub_rn(__fadd_rn(y, kRoundToInteger), kRoundToInteger);
    within[i] = groups.least(common, i) <= rounded && rounded <= groups.most(common, i);
  }
  constexpr int kWords4 = ChunkOf<Element, n>::kWords4;
#pragma unroll
  for (int k = 0; k < kWords4; ++k) {
    Words4 dx;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int i = (k * 16 + w * 4) / static_cast<int>(sizeof(Memory));  // the first element of the word
      if constexpr (sizeof(Memory) == 2)
        dx.word[w] = dy.words[k].word[w] & ((within[i] ? 0xFFFFu : 0) | (within[i + 1] ? 0xFFFF0000u : 0));
      else
        dx.word[w] = within[i] ? dy.words[k].word[w] : 0;
    }
    store_once(static_cast<Words4*>(common.data.y) + chunk * kWords4 + k, dx);
  }
}

// Whether some chunks are for run_slow.
template <LinearOp op>
constexpr bool kMayBeSlow = op != LinearOp::dequantize || kFarZeros;

// Any n elements from `index` on, whose codes and mask begin at a byte; `group_of(i)`: the group of element
// i.
template <LinearOp op, int kBits, class GroupOf>
__device__ __forceinline__ void run_slow(const LinearCommon& common, i64 index, int n,
                                         const GroupOf& group_of) {
  u32 byte = 0;
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const Group group = group_of(i);
    F x{};
    if constexpr (op != LinearOp::dequantize) x = load_element(common.data.x, index + i);
    if constexpr (op == LinearOp::dequantize) {
      const u32 bits = static_cast<const u8*>(common.data.codes)[(index + i) * kBits / 8] >> (i * kBits % 8);
      const int code = static_cast<int>((bits ^ common.sign_bits) & ((1u << kBits) - 1)) + common.code_min;
      static_cast<Memory*>(common.data.y)[index + i] = store(Element(), decode_element(code, group));
    } else if constexpr (op == LinearOp::fake_quantize) {
      static_cast<Memory*>(common.data.y)[index + i] =
          fake_element(static_cast<const Memory*>(common.data.x)[index + i], group, common, index + i);
      if constexpr (kMask) {
        byte |= (is_within(x, group, common) ? 1u : 0u) << (i % 8);
        if (i % 8 != 7) continue;
        static_cast<u8*>(common.data.mask)[(index + i) / 8] = static_cast<u8>(byte);
        byte = 0;
      }
    } else if constexpr (op == LinearOp::quantize) {
      const u32 code = encode_element(x, group, common, index + i) & ((1u << kBits) - 1);
      byte |= code << (i * kBits % 8);
      if ((i + 1) * kBits % 8 != 0) continue;
      static_cast<u8*>(common.data.codes)[(index + i) * kBits / 8] = static_cast<u8>(byte);
      byte = 0;
    } else {
      static_cast<Memory*>(common.data.y)[index + i] =
          is_within(x, group, common) ? static_cast<const Memory*>(common.data.dy)[index + i] : Memory{};
    }
  }
}

// What an operation reads of a chunk, so that many chunks can be on their way, and what it does with it.
template <LinearOp op, int kBits, int n>
struct Work {
  using Chunk = ChunkOf<Element, n>;
  Select<op == LinearOp::dequantize, Codes<n, kBits>, Chunk> read;  // codes or x
  Select<op == LinearOp::backward, Chunk, u8> dy;

  __device__ __forceinline__ void load(const LinearPointers& data, i64 chunk) {
    if constexpr (op == LinearOp::dequantize)
      read.load(data.codes, chunk);
    else if constexpr (op == LinearOp::fake_quantize)
      read = load_chunk_to_write<Chunk>(data.x, chunk);  // y may be x
    else
      read = load_chunk<Chunk>(data.x, chunk);
    if constexpr (op == LinearOp::backward) dy = load_chunk_to_write<Chunk>(data.dy, chunk);  // dx may be dy
  }
  // False, and nothing is done, where run_slow must do it.
  template <class Groups>
  __device__ __forceinline__ bool finish(const LinearCommon& common, i64 chunk, const Groups& groups) const {
    if constexpr (op == LinearOp::dequantize) {
      if (groups.are_far()) return false;
      dequantize_chunk(read, groups, common, chunk);
      return true;
    } else if constexpr (kFast) {
      if (!is_fast(read, groups)) return false;
      if constexpr (op == LinearOp::backward)
        backward_chunk(read, dy, groups, common, chunk);
      else if constexpr (op == LinearOp::fake_quantize)
        fake_quantize_chunk<true>(read, groups, common, chunk);
      else
        quantize_chunk<kBits, true>(read, groups, common).store_once(common.data.codes, chunk);
      return true;
    }
    return false;
  }
};

}  // namespace halfbyte::device
