// The parameters of several groups at a time, one in each lane, compiled once per target. Include after
// highway.h, inside a file that foreach_target.h compiles.
#if defined(HALFBYTE_CPU_GROUP_BATCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_CPU_GROUP_BATCH_INL_H_
#undef HALFBYTE_CPU_GROUP_BATCH_INL_H_
#else
#define HALFBYTE_CPU_GROUP_BATCH_INL_H_
#endif

#include "cpu/simd-inl.h"
#include "formats/qparams.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// Of neighbouring groups of f32 arithmetic: the ranges, and what formats::group_params makes of them.
class GroupBatch {
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  using I = hn::Vec<hn::RebindToSigned<D>>;
  static constexpr D d = {};
  static constexpr hn::RebindToSigned<D> di = {};
  static constexpr int kMost = HWY_MAX_BYTES / sizeof(float);

 public:
  static int64_t size() { return static_cast<int64_t>(hn::Lanes(d)); }

  HWY_ALIGN float min[kMost], max[kMost];  // of the values
  // What decides codes, once it is found; reciprocal: of code_scale.
  HWY_ALIGN float code_scale[kMost], reciprocal[kMost], code_bias[kMost];
  HWY_ALIGN int32_t zero_point[kMost] = {};

  // Of all groups, as formats::store_scale has them; null: there are none.
  struct Arrays {
    void* scales = nullptr;
    uint8_t* zeros = nullptr;
    void* biases = nullptr;
  };

  // Finds the parameters, and writes them for the groups from `group` on. False, and nothing is written,
  // where a group is not plain: it is all zeros, its parameters come near a limit of their types, or its
  // codes to one of the arithmetic that is exact for others (`most_scale`: the largest that it is for). Then
  // they are for formats::group_params.
  HWY_INLINE bool find(const formats::Codec& codec, const Arrays& to, int64_t group, float most_scale) {
    const V low = hn::Add(hn::Load(d, min), hn::Zero(d)), high = hn::Add(hn::Load(d, max), hn::Zero(d));
    const V absmax = hn::Max(hn::Neg(low), high), levels = of(static_cast<float>(codec.levels()));
    auto plain = hn::And(hn::Ge(low, of(-0x1p60f)), hn::Le(high, of(0x1p60f)));
    // As formats::rule_params.
    V scale = hn::Zero(d), bias = hn::Zero(d), least = low;
    V extent = absmax;
    switch (codec.rule) {
      case formats::Rule::absmax:
        scale =
            hn::Div(absmax, of(codec.scale_type == formats::ScaleType::e8m0 ? 4
                               : codec.kind == formats::Kind::table         ? codec.book.max_magnitude
                               : codec.kind == formats::Kind::floating      ? formats::kMaxE4m3
                                                                       : static_cast<float>(codec.q_max)));
        break;
      case formats::Rule::half_range:
        scale = hn::Div(absmax, of(static_cast<float>(codec.levels()) / 2));
        break;
      case formats::Rule::signed_max:
        scale = hn::Div(hn::IfThenElse(hn::Ge(hn::Neg(low), high), low, high),
                        of(static_cast<float>(codec.q_min)));
        break;
      case formats::Rule::minmax:
        if (codec.kind == formats::Kind::integer) {
          least = hn::Min(low, hn::Zero(d));
          extent = hn::Sub(hn::Max(high, hn::Zero(d)), least);
        } else {
          extent = hn::Sub(high, low);
          bias = low;
        }
        scale = hn::Div(extent, levels);
        break;
      case formats::Rule::mlx_edge: {
        extent = hn::Sub(high, low);
        const V step = hn::Div(extent, levels);
        plain = hn::And(plain, hn::Gt(step, of(1e-7f)));
        const auto low_edge = hn::Gt(hn::Abs(low), hn::Abs(high));
        scale = hn::IfThenElse(low_edge, step, hn::Neg(step));
        const V edge = hn::IfThenElse(low_edge, low, high);
        const V q0 = hn::Round(hn::Div(edge, scale));
        const auto is_met = hn::Ne(q0, hn::Zero(d));
        scale = hn::IfThenElse(is_met, hn::Div(edge, q0), scale);
        bias = hn::IfThenElseZero(is_met, edge);
        break;
      }
    }
    plain = hn::And(plain, hn::Ge(extent, of(0x1p-60f)));
    if (codec.eps > 0) {
      const V eps = of(static_cast<float>(codec.eps));
      scale = hn::IfThenElse(hn::Lt(scale, eps), eps, scale);
    }
    if (codec.saturate) scale = hn::Min(scale, of(formats::kMaxE4m3 / codec.global_scale));
    // As formats::stored_params.
    const Stored stored_scale = stored(scale, codec), stored_bias = stored(bias, codec);
    plain = hn::And(plain, hn::And(hn::Ge(hn::Abs(scale), of(stored_scale.least)),
                                   hn::Le(hn::Max(hn::Abs(scale), hn::Abs(bias)), of(stored_scale.most))));
    const V by_scale = codec.unrounded_code_scale ? scale : stored_scale.value;
    const V by_bias = codec.unrounded_code_scale ? bias : stored_bias.value;
    plain = hn::And(plain, hn::Le(by_scale, of(most_scale)));
    // Every quotient is within the range of the corrections of scaled_codes.
    plain =
        hn::And(plain, hn::Lt(hn::Add(absmax, hn::Abs(by_bias)), hn::Mul(hn::Abs(by_scale), of(0x1p19f))));
    if (!hn::AllTrue(d, plain)) return false;
    hn::Store(by_scale, d, code_scale);
    hn::Store(hn::Div(of(1), by_scale), d, reciprocal);
    hn::Store(by_bias, d, code_bias);
    store(stored_scale, codec.scale_type, to.scales, group);
    if (to.biases) store(stored_bias, codec.scale_type, to.biases, group);
    if (codec.asymmetric) {
      const I zero = hn::NearestInt(hn::Max(hn::Neg(levels), hn::Div(least, by_scale)));
      hn::Store(hn::Sub(hn::Set(di, codec.q_min), zero), di, zero_point);
      const hn::Rebind<uint8_t, D> d8;
      if (to.zeros) hn::StoreU(hn::DemoteTo(d8, hn::Neg(zero)), d8, to.zeros + group);
    }
    return true;
  }

 private:
  static HWY_INLINE V of(float value) { return hn::Set(d, value); }

  // What formats::stored makes of a scale or bias whose magnitude is within [least, most], and its bits.
  struct Stored {
    V value;
    I bits;
    float least = 0x1p-70f, most = 0x1p70f;
  };
  static HWY_INLINE Stored stored(V x, const formats::Codec& codec) {
    const I bits = hn::BitCast(di, x);
    switch (codec.scale_type) {
      case formats::ScaleType::f16: {
        const hn::Rebind<hwy::float16_t, D> d16;
        const hn::Rebind<int16_t, D> di16;
        const auto half = hn::DemoteTo(d16, x);
        return {hn::PromoteTo(d, half), hn::PromoteTo(di, hn::BitCast(di16, half)), 0x1p-14f, 0x1p15f};
      }
      case formats::ScaleType::bf16: {
        const I odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 1));
        const I rounded = hn::Add(bits, hn::Add(odd, hn::Set(di, 0x7FFF)));
        return {hn::BitCast(d, hn::And(rounded, hn::Set(di, -0x10000))), hn::ShiftRight<16>(rounded)};
      }
      case formats::ScaleType::e4m3: {
        const V global = of(codec.global_scale);
        const I scaled = hn::BitCast(di, hn::Mul(x, global));
        const I odd = hn::And(hn::ShiftRight<20>(scaled), hn::Set(di, 1));
        const I rounded =
            hn::And(hn::Add(scaled, hn::Add(odd, hn::Set(di, 0x7FFFF))), hn::Set(di, -0x100000));
        return {hn::Div(hn::BitCast(d, rounded), global),
                hn::ShiftRight<20>(hn::Sub(rounded, hn::Set(di, 0x3C000000))), 0x1p-5f / codec.global_scale,
                formats::kMaxE4m3 / codec.global_scale};
      }
      case formats::ScaleType::e8m0: {
        const I power = hn::ShiftRight<23>(hn::Add(bits, hn::Set(di, 0x200000)));
        return {hn::BitCast(d, hn::ShiftLeft<23>(power)), power};
      }
      case formats::ScaleType::f32:
      case formats::ScaleType::f64:
        break;
    }
    return {x, bits};
  }
  static HWY_INLINE void store(const Stored& values, formats::ScaleType type, void* to, int64_t group) {
    switch (formats::scale_bytes(type)) {
      case 4:
        return hn::StoreU(values.bits, di, static_cast<int32_t*>(to) + group);
      case 2: {
        const hn::Rebind<int16_t, D> d16;
        return hn::StoreU(hn::DemoteTo(d16, values.bits), d16, static_cast<int16_t*>(to) + group);
      }
      default: {
        const hn::Rebind<uint8_t, D> d8;
        return hn::StoreU(hn::DemoteTo(d8, values.bits), d8, static_cast<uint8_t*>(to) + group);
      }
    }
  }
};

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_CPU_GROUP_BATCH_INL_H_
