// What the kernels of fake_quantize_learned_backward share: an element or a chunk of them, and where its sums
// go.
#pragma once

#include "cuda/device/sum.cuh"
#include "grouped/linear.cuh"
#include "ops/learned_scale/learned_scale_args.h"

namespace halfbyte::device {

// The sums of a group: for its scale, and for a learned zero point.
constexpr int kSums = kZeroType == ZeroType::f32 || kZeroType == ZeroType::f64 ? 2 : 1;
constexpr int kChunk = 16 / sizeof(Memory);

struct Sums {
  F sum[kSums];
};

// ---- Elements, any values

// Terms of a sequence of 2^kLevels, added up pairwise as they come.
template <int kLevels>
class TreeSum {
 public:
  // Number i of them.
  __device__ __forceinline__ void add(F term, int i) {
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool carries = (i & ((1 << level) - 1)) == (1 << level) - 1;  // the terms so far fill this level
      const bool second = (i >> level & 1) != 0;
      const F sum = parts_[level] + term;
      parts_[level] = carries && !second ? term : parts_[level];
      term = carries && second ? sum : term;
    }
    total_ = term;
  }
  // After the last one.
  __device__ __forceinline__ F total() const { return total_; }

 private:
  F parts_[kLevels] = {};
  F total_ = 0;
};

// Stores dx; `index`: of the element.
__device__ __forceinline__ Sums run_element(const LinearCommon& common, const Group& group, i64 index) {
  const F x = load_element(common.data.x, index);
  const Memory dy = static_cast<const Memory*>(common.data.dy)[index];
  LsqTerms<F> terms;
  if constexpr (kTable)
    terms = lsq_table_terms(x, load(Element(), dy), group.scale, static_cast<F>(lowest_of(common.table)),
                            static_cast<F>(highest_of(common.table)),
                            [&](F quotient) { return any_table_value(common.table, quotient); });
  else
    terms = lsq_terms<CodePosition>(x, load(Element(), dy), group.scale, group.zero_point, common.q_min,
                                    common.q_max);
  static_cast<Memory*>(common.data.y)[index] = terms.passes ? dy : Memory{};
  Sums sums = {terms.scale};
  if constexpr (kSums == 2) sums.sum[1] = terms.zero;
  return sums;
}

// ---- Chunks

// Whether one of the elements is not 0 but less than 2^-100: never of f16; f64 is not asked.
template <class Type, int n>
__device__ __forceinline__ bool has_tiny(Type, const Words4 (&)[n]) {
  return false;
}
template <int n>
__device__ __forceinline__ bool has_tiny(F32, const Words4 (&words)[n]) {
  u32 least = 0xFFFFFFFFu;  // of twice the bits of the magnitudes less one: 0 is the largest
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) least = min(least, (words[i / 4].word[i % 4] << 1) - 1);
  return least < (27u << 24) - 1;
}
template <int n>
__device__ __forceinline__ bool has_tiny(BF16, const Words4 (&words)[n]) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) {  // bit 15 of each half: not 0, and not at least 2^-100, which is 0x0D80
    const u32 magnitudes = words[i / 4].word[i % 4] & 0x7FFF7FFFu;
    found |= (magnitudes + 0x7FFF7FFFu) & ~(magnitudes + 0x72807280u);
  }
  return (found & 0x80008000u) != 0;
}
// Whether quotient() is the correctly rounded quotient of every element, where is_fast promises one that
// rounds to the same integer: nothing underflows. |x| must stay below the limit, and nothing may be tiny.
__device__ __forceinline__ float limit_of(const Group& group) {
  return group.scale < 0x1p20f ? group.limit : 0;
}
template <int n>
__device__ __forceinline__ bool is_exact(const ChunkOf<Element, n>& x, const OneGroup& groups) {
  return unpack(magnitude_range(x)).high < limit_of(groups.group) && !has_tiny(Element(), x.words);
}

// An element whose quotient is exact.
struct FastTerms {
  bool passes;
  float scale, zero;
};
__device__ __forceinline__ FastTerms fast_terms(float x, float dy, const Group& group, float low,
                                                float high) {
  const float q = quotient(x, group.scale, group.reciprocal);
  float value, place;
  if constexpr (kTable) {
    value = table_value(q);
    place = q;
  } else {
    value = place = __fsub_rn(__fadd_rn(q, kRoundToInteger), kRoundToInteger);
  }
  const float nearest = fminf(fmaxf(place, low), high);
  const bool passes = nearest == place;
  return {passes, __fmul_rn(dy, passes ? __fsub_rn(value, q) : nearest), passes ? 0.0f : dy};
}
// dy of element i becomes dx.
template <int n>
__device__ __forceinline__ void mask_element(ChunkOf<Element, n>& dy, int i, bool passes) {
  if constexpr (sizeof(Memory) == 2)
    dy.words[i / 8].word[i / 2 % 4] &= passes ? 0xFFFFFFFFu : i % 2 ? 0x0000FFFFu : 0xFFFF0000u;
  else
    dy.words[i / 4].word[i % 4] = passes ? dy.words[i / 4].word[i % 4] : 0;
}

template <class Chunk>
__device__ __forceinline__ Chunk load_gradients(const LinearCommon& common, i64 chunk) {
  Chunk dy;
#pragma unroll
  for (int i = 0; i < Chunk::kWords4; ++i)  // dx may be dy
    dy.words[i] = load_to_write(static_cast<const Words4*>(common.data.dy) + chunk * Chunk::kWords4 + i);
  return dy;
}
template <bool once = true, class Chunk>
__device__ __forceinline__ void store_gradients(const LinearCommon& common, const Chunk& dx, i64 chunk) {
  Words4* const to = static_cast<Words4*>(common.data.y) + chunk * Chunk::kWords4;
#pragma unroll
  for (int i = 0; i < Chunk::kWords4; ++i) {
    if constexpr (once)
      store_once(to + i, dx.words[i]);
    else
      to[i] = dx.words[i];
  }
}

// ---- Groups

__device__ __forceinline__ void store_gradient(const LsqCommon& common, i64 group, int sum, F total) {
  const F factor = static_cast<F>(common.factor);
  if (sum == 0) {
    static_cast<F*>(common.dscale)[group] = lsq_scale_gradient(total, factor);
  } else {
    F scale = load_scale(common.linear, group);
    if (!(scale >= 0 && scale <= Float<F>::kMax)) scale = 0;
    static_cast<F*>(common.dzero)[group] = lsq_zero_gradient(total, scale, factor);
  }
}
// The total of a piece of a group.
__device__ __forceinline__ void store_piece(const LsqCommon& common, i64 group, i64 piece, int sum, F total) {
  if (common.pieces == 1) return store_gradient(common, group, sum, total);
  i64 band = group, in_band = 0;
  if (common.band_groups != 1) {
    band = group / common.band_groups;
    in_band = group - band * common.band_groups;
  }
  const i64 bands = common.num_groups / common.band_groups;
  static_cast<F*>(
      common.partials)[((sum * bands + band) * common.pieces + piece) * common.band_groups + in_band] = total;
}

}  // namespace halfbyte::device
