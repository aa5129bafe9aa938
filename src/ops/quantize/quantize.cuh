// What the kernels of `quantize` share: ranges, parameters and codes of chunks of 8 elements. Codes by a
// reciprocal and one residual correction (Markstein: the correctly rounded quotient), table formats by
// table.cuh; chunks with non-finite elements or extreme scales by formats::encode.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/table.cuh"
#include "cuda/device/types.cuh"
#include "formats/bits.h"
#include "formats/codec.h"
#include "halfbyte_config.h"
#include "ops/quantize/quantize_args.h"

namespace halfbyte::device {

using F = Element::Compute;  // what is computed in
using Memory = Element::Memory;

constexpr int kChunk = kQuantizeChunk;
constexpr bool kPairs = sizeof(Memory) == 2;
constexpr bool kFastType = sizeof(F) == 4;
constexpr bool kAffine = kCodec.kind == Kind::affine;
constexpr bool kTable = kCodec.kind == Kind::table;
constexpr bool kFloating = kCodec.kind == Kind::floating;
constexpr int kBits = kCodec.bits;

// The scale of most types is at most 2^-8 below absmax / max_magnitude.
constexpr int kLargestQuotient = kCodec.scale_type == ScaleType::e4m3   ? 9   // of 128: 17 / 16
                                 : kCodec.scale_type == ScaleType::e8m0 ? 22  // 7 / 6
                                                                        : 1;
constexpr TableBins kBins = kTable ? make_table_bins(kCodec.book, kLargestQuotient) : TableBins{};
constexpr bool kFast = kFastType && !(kTable && kBins.num_edges > TableBins::kMaxEdges);
// Up to this scale no quotient of a negative element underflows to 0, which has another code.
constexpr float kLargestSignedScale = !(kTable && kBins.signed_zero) ? 0x1p100f : kPairs ? 0x1p16f : 1.0f;
__device__ const TableBins kDeviceBins = kBins;

using Chunk = ChunkOf<Element, kChunk>;

__device__ __forceinline__ F load_element(const void* x, i64 index) {
  return load(Element(), static_cast<const Memory*>(x)[index]);
}

// ---- Scale rules: an argument

// Without a zero point: of these formats and of affine ones there are several rules.
constexpr bool kSignedInteger = kCodec.kind == Kind::integer && !kCodec.asymmetric;
constexpr Rule kFirstRule = kTable || kFloating || kSignedInteger ? Rule::absmax : Rule::minmax;

// The parameters depend on the largest magnitude alone.
__device__ __forceinline__ bool is_symmetric(const QuantizeArgs& args) {
  return kTable || kFloating || (kSignedInteger && args.rule != Rule::signed_max);
}
// Other rules bring the largest quotient into the codes but for rounding (then the group is slow).
__device__ __forceinline__ bool clamps_high(const QuantizeArgs& args) {
  return (kAffine || kSignedInteger) && args.rule != kFirstRule;
}

// ---- Ranges

// add(the range of a chunk), in the form that costs least.
template <class Add>
__device__ __forceinline__ auto with_range(const QuantizeArgs& args, const Chunk& x, const Add& add) {
  if constexpr (kPairs)
    if (is_symmetric(args)) return add(magnitude_range(x));
  return add(signed_range(x));
}

// Of the finite elements among the first n of x.
template <class Load>
__device__ __forceinline__ Range<F> finite_range(int n, const Load& x) {
  Range<F> range = no_range<F>();
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const F value = x(i);
    if (formats::is_finite(value)) range = join(range, Range<F>{-value, value});
  }
  return range;
}

// ---- Parameters

// What encoding needs of a group.
struct Encoding {
  F scale, bias;  // code_scale, code_bias
  F reciprocal;
  int zero_point;
  bool slow;  // formats::encode must do it
};

// The largest float that rounds to n or less.
constexpr float limit_of(int n) {
  const float tie = static_cast<float>(n) + 0.5f;  // goes to the even one
  return n % 2 == 0 ? tie : next_below(tie);
}

// Whether all elements within the range can be encoded by `quotient`: no residual underflows where it
// matters, and what is not clamped lies within the codes.
__device__ __forceinline__ bool is_fast(const QuantizeArgs& args, const Range<F>& range, const Encoding& e) {
  if constexpr (!kFast) {
    return false;
  } else {
    const float scale = formats::abs(e.scale);
    const float magnitude = max(range.low, range.high), largest = magnitude + formats::abs(e.bias);
    bool within;
    if (kFloating) {  // codes saturate
      within = true;
    } else if (is_symmetric(args)) {
      constexpr float kLowest = limit_of(-kCodec.q_min), kHighest = limit_of(kCodec.q_max);
      const float limit = kTable ? kBins.limit : clamps_high(args) ? kLowest : kHighest;
      within = fabsf(quotient(magnitude, e.scale, e.reciprocal)) <= limit;
    } else {
      const float b = quotient(range.high - e.bias, e.scale, e.reciprocal);
      const float a = quotient(-range.low - e.bias, e.scale, e.reciprocal);
      const float offset = static_cast<float>(kAffine ? 0 : e.zero_point - kCodec.q_min);
      within =
          round_half_even(min(a, b)) + offset >= 0 &&
          (clamps_high(args) || round_half_even(max(a, b)) + offset <= static_cast<float>(kCodec.levels()));
    }
    return within && scale > 0x1p-90f && scale <= kLargestSignedScale && scale < 0x1p100f &&
           largest < scale * 0x1p20f;
  }
}

// kCodec has neither the rule nor how parameters are stored: arguments have. Of each there is code of its
// own, as a codec that is no constant would take memory.
constexpr Codec with_rule(Rule rule) {
  Codec codec = kCodec;
  codec.rule = rule;
  return codec;
}
template <Rule kRule>
constexpr Codec kWithRule = with_rule(kRule);
__device__ __forceinline__ RuleParams<F> params_by_rule(Rule rule, const Range<F>& range) {
  if constexpr (kSignedInteger) {
    if (rule == Rule::half_range) return rule_params(-range.low, range.high, kWithRule<Rule::half_range>);
    if (rule == Rule::signed_max) return rule_params(-range.low, range.high, kWithRule<Rule::signed_max>);
  }
  if constexpr (kAffine)
    if (rule == Rule::mlx_edge) return rule_params(-range.low, range.high, kWithRule<Rule::mlx_edge>);
  return rule_params(-range.low, range.high, kWithRule<kFirstRule>);
}

constexpr bool kHasGlobalScale = kCodec.scale_type == ScaleType::e4m3;
__device__ __forceinline__ float global_scale(const QuantizeArgs& args) {
  if constexpr (kHasGlobalScale) {
    return global_scale_of(static_cast<F>(absmax_of(*args.tensor_range)));
  } else {
    return 1;
  }
}

// Rounds scale and bias to args.scale_type and stores them as those of group `index`: a branch for both.
// `global` is global_scale(args).
template <ScaleType kType>
__device__ __forceinline__ void store_params(const QuantizeArgs& args, i64 index,
                                             const RuleParams<F>& by_rule, bool store, float global,
                                             GroupParams<F>& params) {
  params.scale = stored_scale(by_rule.scale, kType, global);
  if constexpr (kAffine) params.bias = stored(by_rule.bias, kType);
  if (!store) return;
  if (kHasGlobalScale && index == 0) *args.global_scale = global;
  store_scale(args.scales, index, params.scale, kType, global);
  if constexpr (kAffine) store_scale(args.biases, index, params.bias, kType);
}
__device__ __forceinline__ void store_params(const QuantizeArgs& args, i64 index,
                                             const RuleParams<F>& by_rule, bool store, float global,
                                             GroupParams<F>& params) {
  if constexpr (scale_bytes(kCodec.scale_type) == 1)  // the only one of the format
    return store_params<kCodec.scale_type>(args, index, by_rule, store, global, params);
  switch (args.scale_type) {
    case ScaleType::f16:
      return store_params<ScaleType::f16>(args, index, by_rule, store, global, params);
    case ScaleType::bf16:
      return store_params<ScaleType::bf16>(args, index, by_rule, store, global, params);
    case ScaleType::f64:
      if constexpr (!kFastType)
        return store_params<ScaleType::f64>(args, index, by_rule, store, global, params);
    default:
      return store_params<ScaleType::f32>(args, index, by_rule, store, global, params);
  }
}

// So far from the bounds of every type of scales that nothing is lost: most groups need no more questions.
__device__ __forceinline__ bool is_usual(const GroupParams<F>& params) {
  if (kTable && kCodec.book.max_magnitude > 0x1p64f) return false;
  const F scale = formats::abs(params.scale);
  return scale >= static_cast<F>(0x1p-14f) && scale <= static_cast<F>(0x1p14f) &&
         (!kAffine || formats::abs(params.bias) <= static_cast<F>(0x1p14f));
}

constexpr Codec stored_as(ScaleType type) {
  Codec codec = kCodec;
  codec.scale_type = type;
  return codec;
}
template <ScaleType kType>
constexpr Codec kStoredAs = stored_as(kType);
// Counts what is wrong with the parameters of a group.
__device__ __forceinline__ void count_losses(const QuantizeArgs& args, const RuleParams<F>& by_rule,
                                             const Range<F>& range, const GroupParams<F>& params) {
  Range<F> held = range;  // as group_params has it
  if (is_symmetric(args)) held.low = held.high = max(range.low, range.high);
  if (!is_held(params, -held.low, held.high, kCodec)) atomic_add(&args.counts->num_unheld_scales, 1);
  const bool coarse = args.scale_type == ScaleType::f16 ? is_coarse(by_rule.scale, kStoredAs<ScaleType::f16>)
                      : args.scale_type == ScaleType::bf16
                          ? is_coarse(by_rule.scale, kStoredAs<ScaleType::bf16>)
                          : is_coarse(by_rule.scale, kCodec);
  if (by_rule.may_underflow && coarse) atomic_add(&args.counts->num_coarse_scales, 1);
}

// Works out the parameters of group `index`, stores them and counts what is wrong with them.
__device__ __forceinline__ Encoding finish_group(const QuantizeArgs& args, i64 index, const Range<F>& range,
                                                 bool store) {
  const RuleParams<F> by_rule = params_by_rule(args.rule, range);
  GroupParams<F> params;
  store_params(args, index, by_rule, store, global_scale(args), params);
  decide_codes(params, by_rule, args.unrounded_code_scale, kCodec);
  if (store) {
    if constexpr (kCodec.asymmetric) args.zeros[index] = static_cast<u8>(params.zero_point - kCodec.q_min);
    if (!is_usual(params)) count_losses(args, by_rule, range, params);
  }
  Encoding e{params.code_scale, params.code_bias, 0, params.zero_point, true};
  if constexpr (kFast) e.reciprocal = 1.0f / params.code_scale;
  e.slow = !is_fast(args, range, e);
  return e;
}

// ---- Codes

// The codes of a chunk: 8 * kBits bits.
struct Packed {
  static constexpr int kLow = 4 * kBits > 16 ? 4 : 8;  // codes in `low`, the others in `high`
  u32 low, high;
  static __device__ __forceinline__ Packed of(u64 bits) {
    constexpr int kShift = kLow == 8 ? 32 : 4 * kBits;
    return {static_cast<u32>(bits & ((1ull << kShift) - 1)), static_cast<u32>(bits >> kShift)};
  }
  __device__ __forceinline__ u64 bits() const {
    return low | static_cast<u64>(high) << (kLow == 8 ? 32 : 4 * kBits);
  }
};

// 2^(kBits * i) summed over n codes.
constexpr u32 ones(int n) {
  u32 sum = 0;
  for (int i = 0; i < n; ++i) sum |= 1u << (kBits * i);
  return sum;
}

// The edges and ranks of this lane's bin.
struct LaneBins {
  float edges[TableBins::kMaxEdges];
  u32 rank;
};
__device__ __forceinline__ LaneBins load_bins(int lane) {
  LaneBins bins = {};
  if constexpr (kTable && kFast) {
#pragma unroll
    for (int i = 0; i < kBins.num_edges; ++i)
      bins.edges[i] = bit_cast<float>(load_table(reinterpret_cast<const u32*>(&kDeviceBins.edges[i][lane])));
    bins.rank = load_table(&kDeviceBins.rank[lane]);
  }
  return bins;
}

// Exchanges ranks for codes in each of eight nibbles.
__device__ __forceinline__ u32 codes_of_ranks(u32 ranks) {
  u32 same = 0, codes = kBins.code_of_rank_0 * 0x11111111u;
#pragma unroll
  for (int bit = 0; bit < 4; ++bit) {
    if (kBins.code_of_rank_bit[bit] == 1 << bit)
      same |= 0x11111111u << bit;
    else
      codes ^= (ranks >> bit & 0x11111111u) * kBins.code_of_rank_bit[bit];
  }
  return (ranks & same) ^ codes;
}

// 1 if a < b, from the sign of the difference: an addition more than a comparison can have for its result.
__device__ __forceinline__ u32 one_if_less(float a, float b) { return bit_cast<u32>(__fsub_rn(a, b)) >> 31; }

// The codes of fp8 for two quotients, neither NaN; what is too large is the largest.
__device__ __forceinline__ u32 to_e4m3_pair(float low, float high) {
#if HALFBYTE_DEVICE_ARCH >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto code = [](float y) -> u32 { return f32_to_e4m3(clamp(y, -kMaxE4m3, kMaxE4m3)); };
  return code(low) | code(high) << 8;
#endif
}

// Of a chunk of a group that is not slow; all lanes of the warp take part.
template <bool kClampHigh>
__device__ __forceinline__ Packed encode_fast(const Chunk& x, const Encoding& e, const LaneBins& bins) {
  u32 sums[2] = {0, 0};
  if constexpr (kTable) {
    // The bin from x itself, within 1e-5 bins, so that the lookup does not wait for the quotient.
    const float bins_per_x = e.reciprocal * kBins.bins_per_unit;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float y = quotient(x[i], e.scale, e.reciprocal);
      const float t = kBins.sign_magnitude ? fabsf(y) : y, from = kBins.sign_magnitude ? fabsf(x[i]) : x[i];
      const int bin = static_cast<int>(
          bit_cast<u32>(__fmaf_rn(from, bins_per_x, kRoundToInteger + static_cast<float>(kBins.center))));
      u32 rank = shuffle(bins.rank, bin);
#pragma unroll
      for (int k = 0; k < kBins.num_edges; ++k) rank += one_if_less(shuffle(bins.edges[k], bin), t);
      if (kBins.sign_magnitude) rank |= bit_cast<u32>(y) >> 28 & 8u;  // the quotient of -0 is +0
      sums[0] += rank << (4 * i);
    }
    return {codes_of_ranks(sums[0]), 0};
  } else if constexpr (kFloating) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      const auto y = [&](int k) {  // the quotient of -0 is +0
        float signed_quotient;
        asm("copysign.f32 %0, %1, %2;"
            : "=f"(signed_quotient)
            : "f"(x[k]), "f"(quotient(x[k], e.scale, e.reciprocal)));
        return signed_quotient;
      };
      sums[i / Packed::kLow] |= to_e4m3_pair(y(i), y(i + 1)) << (kBits * (i % Packed::kLow));
    }
    return {sums[0], sums[1]};
  } else {
    const u32 offset = static_cast<u32>(kAffine ? 0 : e.zero_point - kCodec.q_min) - kRoundToIntegerBits;
    const float high = static_cast<float>(kAffine ? kCodec.levels() : kCodec.q_max - e.zero_point);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float y = quotient(kAffine ? __fsub_rn(x[i], e.bias) : x[i], e.scale, e.reciprocal);
      if constexpr (kClampHigh) y = min(y, high);
      const u32 bits = bit_cast<u32>(__fadd_rn(y, kRoundToInteger));
      sums[i / Packed::kLow] += bits << (kBits * (i % Packed::kLow));
    }
    return {sums[0] + offset * ones(Packed::kLow),
            Packed::kLow == kChunk ? 0 : sums[1] + offset * ones(kChunk - Packed::kLow)};
  }
}

// Of any chunk; the codes behind its n elements are those of zero. `index` is that of the first element.
template <class Load, class EncodingOf>
__device__ __forceinline__ u64 encode_slow(const QuantizeArgs& args, i64 index, int n, const Load& x,
                                           const EncodingOf& encoding) {
  u64 codes = 0;
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    const Encoding e = encoding(min(i, n - 1));
    GroupParams<F> params;
    params.code_scale = e.scale;
    params.code_bias = e.bias;
    params.zero_point = e.zero_point;
    F value = i < n ? x(i) : 0;
    if (!formats::is_finite(value)) {
      atomic_add(&args.counts->num_nonfinite, 1);
      atomic_max(&args.counts->first_nonfinite_key, ~static_cast<u64>(index + i));
      value = 0;
    }
    codes |= static_cast<u64>(encode(value, params, kCodec)) << (kBits * i);
  }
  return codes;
}

}  // namespace halfbyte::device
