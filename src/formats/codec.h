// How a format turns the statistics of a group into its parameters, a value into a code and a code
// into a value. F is float, or double for f64 data.
#pragma once

#include "formats/convert.h"
#include "formats/tables.h"

namespace halfbyte::formats {

enum class Kind : u8 { table, integer, affine, floating };
enum class Rule : u8 { absmax, half_range, signed_max, minmax, mlx_edge };

// A format with all its choices made: what a kernel needs to know of a QuantSpec.
struct Codec {
  Kind kind = Kind::table;
  Rule rule = Rule::absmax;
  ScaleType scale_type = ScaleType::f32;
  u8 bits = 4;
  bool asymmetric = false;            // integer with a zero point
  bool unrounded_code_scale = false;  // codes from the parameters before they are rounded to scale_type
  i32 q_min = -8, q_max = 7;          // integer: bounds of the signed codes, stored as q - q_min
  CodeBook book = {};                 // table formats
  double eps = 0;                     // no scale is less (rules absmax, half_range, minmax of integers)
  float global_scale = 1;             // scale_type e4m3: what stored scales are divided by
  bool saturate = false;  // scale_type e4m3: a scale that is too large for global_scale is the largest

  constexpr bool operator==(const Codec&) const = default;

  HALFBYTE_FN int levels() const { return q_max - q_min; }  // largest stored code
  HALFBYTE_FN int highest_code() const {
    return kind == Kind::table ? book.code_of_rank[15] : kind == Kind::floating ? kLargestE4m3 : levels();
  }
};

// The parameters of a group. `scale` and `bias` are stored; codes are decided by code_scale, code_bias.
template <class F>
struct GroupParams {
  F scale = 0, bias = 0;
  F code_scale = 0, code_bias = 0;
  int zero_point = 0;  // signed; stored as zero_point - q_min
  bool held = true;  // false: scale_type cannot hold the scale or bias, or the code of a value is not finite
  bool coarse = false;  // the stored scale keeps fewer than 8 significant bits
};

// The value of a stored code.
template <class F>
HALFBYTE_FN F decode(int code, F scale, F bias, int zero_point, const Codec& codec) {
  switch (codec.kind) {
    case Kind::table:
      return static_cast<F>(codec.book.values[code]) * scale;
    case Kind::integer:
      return static_cast<F>(code + codec.q_min - zero_point) * scale;
    case Kind::floating:
      return static_cast<F>(e4m3_to_f32(static_cast<u8>(code))) * scale;
    case Kind::affine:
      break;
  }
  return static_cast<F>(code) * scale + bias;
}

// `scale` as stored, never 0 for a scale that is not 0. What is stored as e4m3 is never 0: readers take that
// for a fault. A group of zeros has 1/8, as compressed-tensors writes it.
template <class F>
HALFBYTE_FN F stored_scale(F scale, ScaleType type, float global_scale = 1) {
  const F result = stored(scale, type, global_scale);
  if (result != 0 || (scale == 0 && type != ScaleType::e4m3)) return result;
  F smallest = 0;
  switch (type) {
    case ScaleType::e4m3:
      return static_cast<F>(scale == 0 ? 0x1p-3f : 0x1p-9f) / static_cast<F>(global_scale);
    case ScaleType::e8m0:
      break;  // has no 0
    case ScaleType::f16:
      smallest = static_cast<F>(5.9604644775390625e-8);
      break;  // 2^-24
    case ScaleType::bf16:
      smallest = static_cast<F>(bf16_to_f32(1));
      break;  // 2^-133
    case ScaleType::f32:
      smallest = static_cast<F>(bit_cast<float>(static_cast<u32>(1)));
      break;  // 2^-149
    case ScaleType::f64:
      smallest = bit_cast<F>(static_cast<typename Float<F>::Bits>(1));
      break;
  }
  return scale < 0 ? -smallest : smallest;
}

// a / b where the true quotient is not 0: an underflow gives the smallest subnormal.
template <class F>
HALFBYTE_FN F nonzero_quotient(F a, F b) {
  const F quotient = a / b;
  if (quotient != 0) return quotient;
  const F smallest = bit_cast<F>(static_cast<typename Float<F>::Bits>(1));
  return (a < 0) != (b < 0) ? -smallest : smallest;
}

// Whether what is stored of a scale has fewer than 8 significant bits.
template <class F>
HALFBYTE_FN bool is_coarse(F scale, const Codec& codec) {
  const F smallest = static_cast<F>(codec.scale_type == ScaleType::f16    ? 0x1p-17
                                    : codec.scale_type == ScaleType::bf16 ? 0x1p-126
                                                                          : 0);
  return scale != 0 && abs(scale) < smallest;
}
// What maps the scale of a group of this absmax, the largest of the tensor, to the largest e4m3: 448 * 6 /
// absmax, within the normal f32. 1 for a tensor of zeros. Source: compressed-tensors.
template <class F>
HALFBYTE_FN float global_scale_of(F absmax) {
  if (absmax == 0) return 1;
  constexpr F kLeast = static_cast<F>(0x1p-126f), kMost = static_cast<F>(Float<float>::kMax);
  return static_cast<float>(clamp(static_cast<F>(2688) / absmax, kLeast, kMost));
}
// (max - min) / levels without overflow; 0 only for an empty range.
template <class F>
HALFBYTE_FN F range_step(F min, F max, F levels) {
  const F range = max - min;
  if (!is_finite(range)) return max / levels - min / levels;
  return range == 0 ? 0 : nonzero_quotient(range, levels);
}

// What a rule makes of a group, before it is stored.
template <class F>
struct RuleParams {
  F scale = 0, bias = 0;
  F min = 0;                  // of the range that the codes cover
  bool may_underflow = true;  // a scale too small for its type is a loss
};

// The statistics of a group (of its finite values; min > max if there are none) by the rule of the codec.
// Sources of the rules: absmax, half_range: PyTorch's observers and compressed-tensors; signed_max:
// GGML's Q4_0; mlx_edge: the affine quantizer of MLX, CPU form.
template <class F>
HALFBYTE_FN RuleParams<F> rule_params(F min, F max, const Codec& codec) {
  if (min > max) min = max = 0;
  min += 0;  // -0 becomes +0
  max += 0;
  const F absmax = formats::max(-min, max);
  const F levels = static_cast<F>(codec.levels());
  F scale = 0, bias = 0;
  bool may_underflow = true;
  switch (codec.rule) {
    case Rule::absmax: {
      // A power of two is that of absmax over that of the largest value, 4: rounding it decides the rest.
      const F largest = codec.scale_type == ScaleType::e8m0 ? 4
                        : codec.kind == Kind::table         ? static_cast<F>(codec.book.max_magnitude)
                        : codec.kind == Kind::floating      ? static_cast<F>(kMaxE4m3)
                                                            : static_cast<F>(codec.q_max);
      if (absmax != 0) scale = nonzero_quotient(absmax, largest);
      break;
    }
    case Rule::half_range:
      if (absmax != 0) scale = nonzero_quotient(absmax, levels / 2);
      break;
    case Rule::signed_max:  // where both ends are equally far, the negative one
      if (absmax != 0) scale = nonzero_quotient(-min >= max ? min : max, static_cast<F>(codec.q_min));
      break;
    case Rule::minmax:
      if (codec.kind == Kind::integer) {
        min = formats::min(min, static_cast<F>(0));
        max = formats::max(max, static_cast<F>(0));
        scale = range_step(min, max, levels);
      } else {
        bias = min;
        scale = max == min ? 1 : range_step(min, max, levels);
      }
      break;
    case Rule::mlx_edge: {
      const F floor = static_cast<F>(1e-7f);
      const F step = range_step(min, max, levels);
      may_underflow = step > floor;
      scale = formats::max(step, floor);
      const bool low_edge = abs(min) > abs(max);
      if (!low_edge) scale = -scale;
      const F edge = low_edge ? min : max;
      const F q0 = round_half_even(edge / scale);
      if (q0 != 0) {
        scale = edge / q0;
        bias = edge;
      }
      break;
    }
  }
  if (codec.eps > 0 && scale < static_cast<F>(codec.eps)) scale = static_cast<F>(codec.eps);
  if (codec.saturate)
    scale = formats::min(scale, static_cast<F>(kMaxE4m3) / static_cast<F>(codec.global_scale));
  return {scale, bias, min, may_underflow};
}

// What decides codes, once scale and bias are as they are stored.
template <class F>
HALFBYTE_FN void decide_codes(GroupParams<F>& params, const RuleParams<F>& by_rule, bool unrounded,
                              const Codec& codec) {
  params.code_scale = unrounded ? by_rule.scale : params.scale;
  params.code_bias = unrounded ? by_rule.bias : params.bias;
  if (codec.asymmetric) {
    const F levels = static_cast<F>(codec.levels());
    // min / scale is in [-levels - 1, 0] up to the rounding of the scale; a coarse scale may exceed it.
    const F low = params.code_scale == 0 ? 0 : formats::max(-levels, by_rule.min / params.code_scale);
    params.zero_point = codec.q_min - static_cast<int>(round_half_even(low));
  }
}

// The parameters as the codec stores them, but for `held`.
template <class F>
HALFBYTE_FN GroupParams<F> stored_params(const RuleParams<F>& by_rule, const Codec& codec) {
  GroupParams<F> params;
  params.scale = stored_scale(by_rule.scale, codec.scale_type, codec.global_scale);
  params.bias = stored(by_rule.bias, codec.scale_type);
  params.coarse = by_rule.may_underflow && is_coarse(by_rule.scale, codec);
  decide_codes(params, by_rule, codec.unrounded_code_scale, codec);
  return params;
}

// Where a finite x lies among the codes of an affine format, in [0, levels].
template <class F>
HALFBYTE_FN F affine_position(F x, const GroupParams<F>& params, const Codec& codec) {
  const F scale = params.code_scale;
  F distance = x - params.code_bias;
  F quotient = distance / scale;
  if (!is_finite(distance)) {  // overflow: halving is exact up here
    distance = x / 2 - params.code_bias / 2;
    quotient = distance / (scale / 2);
  }
  return clamp(quotient, static_cast<F>(0), static_cast<F>(codec.levels()));
}

// The stored code (0 .. levels) of a finite x.
template <class F>
HALFBYTE_FN int encode(F x, const GroupParams<F>& params, const Codec& codec) {
  const F scale = params.code_scale;
  switch (codec.kind) {
    case Kind::table:
      return scale == 0 ? codec.book.zero_code : table_encode(codec.book, x / scale);
    case Kind::integer: {
      if (scale == 0) return params.zero_point - codec.q_min;
      // Clamping before rounding gives the same: the bounds are integers.
      const F low = static_cast<F>(codec.q_min - params.zero_point);
      const F high = static_cast<F>(codec.q_max - params.zero_point);
      return static_cast<int>(round_half_even(clamp(x / scale, low, high)) - low);
    }
    case Kind::floating: {
      constexpr F kMost = static_cast<F>(kMaxE4m3);
      return scale == 0 ? 0 : to_e4m3(clamp(x / scale, -kMost, kMost));
    }
    case Kind::affine:
      break;
  }
  return static_cast<int>(round_half_even(affine_position(x, params, codec)));
}

// Whether scale and bias, as stored, and all that codes are decoded to are finite.
template <class F>
HALFBYTE_FN bool is_held(const GroupParams<F>& params, const Codec& codec) {
  const auto finite = [&](int code) {
    return is_finite(decode(code, params.scale, params.bias, params.zero_point, codec));
  };
  return is_finite(params.scale) && is_finite(params.bias) && finite(0) && finite(codec.highest_code());
}

// Likewise of the codes of 0 and of the values in [min, max] (none if min > max), which need not be all codes
// of integers: with rule absmax no value has the code -8 of int4.
template <class F>
HALFBYTE_FN bool is_held(const GroupParams<F>& params, F min, F max, const Codec& codec) {
  if (is_held(params, codec)) return true;
  if (codec.kind != Kind::integer || !is_finite(params.scale)) return false;
  const auto finite = [&](F x) {
    return is_finite(decode(encode(x, params, codec), params.scale, params.bias, params.zero_point, codec));
  };
  return finite(formats::min(min, static_cast<F>(0))) && finite(formats::max(max, static_cast<F>(0)));
}

// The parameters of a group in the range [min, max], from what a rule makes of it. Where absmax alone decides
// the scale, it is held if it is for values in all of [-absmax, absmax]: kernels know no more of such a
// group.
template <class F>
HALFBYTE_FN GroupParams<F> held_params(const RuleParams<F>& by_rule, F min, F max, const Codec& codec) {
  GroupParams<F> params = stored_params(by_rule, codec);
  if (!codec.asymmetric && (codec.rule == Rule::absmax || codec.rule == Rule::half_range)) {
    max = formats::max(-min, max);
    min = -max;
  }
  params.held = is_held(params, min, max, codec);
  return params;
}

// Scale, bias and zero point of a group by its statistics, see rule_params.
template <class F>
HALFBYTE_FN GroupParams<F> group_params(F min, F max, const Codec& codec) {
  return held_params(rule_params(min, max, codec), min, max, codec);
}

// The code of zero: what padding and non-finite elements get.
template <class F>
HALFBYTE_FN int zero_code(const GroupParams<F>& params, const Codec& codec) {
  return encode(static_cast<F>(0), params, codec);
}

}  // namespace halfbyte::formats
