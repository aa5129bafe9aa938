// SIMD loops of verifying.
#include "io/verify_span.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "io/verify_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"

#ifndef HALFBYTE_VERIFY_CPU_ONCE
#define HALFBYTE_VERIFY_CPU_ONCE
namespace halfbyte::io {

inline constexpr int kErrorLanes = 16;

// By one element after the other: the ends of what vectors do, and all where there are none.
inline bool level_of(const Levels& levels, const Span& span, uint8_t code, float x, float& y) {
  constexpr float kMost = std::numeric_limits<float>::max();
  y = levels.value[code] * span.scale;
  const float lower = levels.low[code] * span.scale - (levels.low_end[code] * span.at_ends + span.slack);
  const float upper = levels.high[code] * span.scale + (levels.high_end[code] * span.at_ends + span.slack);
  return x >= std::max(lower, -kMost) && x <= std::min(upper, kMost);
}
inline bool step_of(const Steps& steps, uint8_t code, float x, float& y) {
  y = static_cast<float>(code - steps.zero) * steps.scale;
  if (steps.added) y += steps.bias;
  return std::abs(x - y) <= steps.near;
}
struct ErrorLanes {
  double error2[kErrorLanes] = {}, source2[kErrorLanes] = {}, largest[kErrorLanes] = {};

  void add(int lane, float source, float decoded) {
    const double x = source, error = static_cast<double>(decoded) - x;
    error2[lane] += error * error;
    source2[lane] += x * x;
    largest[lane] = std::max(largest[lane], std::abs(error));
  }
};

}  // namespace halfbyte::io
#endif

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;

HWY_INLINE hn::Vec<I> load_codes(const uint8_t* codes) {
  return hn::PromoteTo(I(), hn::LoadU(hn::Rebind<uint8_t, I>(), codes));
}

// 16 values in as many vectors as hold them: up to two.
class Table16 {
 public:
  static constexpr bool kFits = hn::MaxLanes(F()) >= 8;
  // make(first): the vector from that value on.
  template <class Make>
  HWY_INLINE explicit Table16(const Make& make) : low_(make(0)), high_(make(kHigh)) {}
  HWY_INLINE hn::Vec<F> operator[](hn::Vec<I> code) const {
    if constexpr (kHigh == 0) {
      return hn::TableLookupLanes(low_, hn::IndicesFromVec(F(), code));
    } else {
      const auto seven = hn::Set(I(), 7);
      const auto index = hn::IndicesFromVec(F(), hn::And(code, seven));
      return hn::IfThenElse(hn::RebindMask(F(), hn::Gt(code, seven)), hn::TableLookupLanes(high_, index),
                            hn::TableLookupLanes(low_, index));
    }
  }

 private:
  static constexpr int kHigh = hn::MaxLanes(F()) >= 16 ? 0 : 8;
  hn::Vec<F> low_, high_;
};

int64_t decode_levels_in_vectors(const io::Levels& levels, const io::Span& span, const uint8_t* codes,
                                 const float* x, int64_t count, float* y, bool& good) {
  if constexpr (Table16::kFits) {
    constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
    const auto scale = hn::Set(F(), span.scale), slack = hn::Set(F(), span.slack);
    const auto at_ends = hn::Set(F(), span.at_ends), most = hn::Set(F(), std::numeric_limits<float>::max());
    const auto beyond = [&](const float* end) {
      return hn::Add(hn::Mul(hn::Load(F(), end), at_ends), slack);
    };
    const Table16 level([&](int first) { return hn::Mul(hn::Load(F(), levels.value + first), scale); });
    const Table16 lower([&](int first) {
      const auto edge = hn::Mul(hn::Load(F(), levels.low + first), scale);
      return hn::Max(hn::Sub(edge, beyond(levels.low_end + first)), hn::Neg(most));
    });
    const Table16 upper([&](int first) {
      const auto edge = hn::Mul(hn::Load(F(), levels.high + first), scale);
      return hn::Min(hn::Add(edge, beyond(levels.high_end + first)), most);
    });
    auto inside = hn::Eq(hn::Zero(F()), hn::Zero(F()));
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const auto code = load_codes(codes + i);
      const auto own = hn::LoadU(F(), x + i);
      hn::StoreU(level[code], F(), y + i);
      inside = hn::And(inside, hn::And(hn::Ge(own, lower[code]), hn::Le(own, upper[code])));
    }
    good = hn::AllTrue(F(), inside);
    return i;
  } else {
    return 0;
  }
}

int64_t decode_steps_in_vectors(const io::Steps& steps, const uint8_t* codes, const float* x, int64_t count,
                                float* y, bool& good) {
  constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
  const auto scale = hn::Set(F(), steps.scale), bias = hn::Set(F(), steps.bias),
             near = hn::Set(F(), steps.near);
  const auto zero = hn::Set(I(), steps.zero);
  auto inside = hn::Eq(hn::Zero(F()), hn::Zero(F()));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    auto value = hn::Mul(hn::ConvertTo(F(), hn::Sub(load_codes(codes + i), zero)), scale);
    if (steps.added) value = hn::Add(value, bias);
    hn::StoreU(value, F(), y + i);
    inside = hn::And(inside, hn::Le(hn::Abs(hn::Sub(hn::LoadU(F(), x + i), value)), near));
  }
  good = hn::AllTrue(F(), inside);
  return i;
}

template <class T>
int64_t widen(const uint16_t* x, int64_t count, float* y) {
  constexpr auto kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(T::load(F(), x + i), F(), y + i);
  return i;
}
int64_t widen_f16_in_vectors(const uint16_t* x, int64_t count, float* y) { return widen<F16>(x, count, y); }
int64_t widen_bf16_in_vectors(const uint16_t* x, int64_t count, float* y) { return widen<BF16>(x, count, y); }

int64_t total_errors_in_vectors(const float* source, const float* decoded, int64_t count,
                                io::ErrorLanes& lanes) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  constexpr size_t kLanes = hn::MaxLanes(d), kVectors = io::kErrorLanes / kLanes;
  hn::Vec<decltype(d)> error2[kVectors], source2[kVectors], largest[kVectors];
  for (size_t k = 0; k < kVectors; ++k) error2[k] = source2[k] = largest[k] = hn::Zero(d);
  int64_t i = 0;
  for (; i + io::kErrorLanes <= count; i += io::kErrorLanes)
    for (size_t k = 0; k < kVectors; ++k) {
      const auto x = hn::PromoteTo(d, hn::LoadU(df, source + i + k * kLanes));
      const auto error = hn::Sub(hn::PromoteTo(d, hn::LoadU(df, decoded + i + k * kLanes)), x);
      error2[k] = hn::Add(error2[k], hn::Mul(error, error));
      source2[k] = hn::Add(source2[k], hn::Mul(x, x));
      largest[k] = hn::Max(largest[k], hn::Abs(error));
    }
  for (size_t k = 0; k < kVectors; ++k) {
    hn::StoreU(error2[k], d, lanes.error2 + k * kLanes);
    hn::StoreU(source2[k], d, lanes.source2 + k * kLanes);
    hn::StoreU(largest[k], d, lanes.largest + k * kLanes);
  }
  return i;
}

#else

int64_t decode_levels_in_vectors(const io::Levels&, const io::Span&, const uint8_t*, const float*, int64_t,
                                 float*, bool&) {
  return 0;
}
int64_t decode_steps_in_vectors(const io::Steps&, const uint8_t*, const float*, int64_t, float*, bool&) {
  return 0;
}
int64_t widen_f16_in_vectors(const uint16_t*, int64_t, float*) { return 0; }
int64_t widen_bf16_in_vectors(const uint16_t*, int64_t, float*) { return 0; }
int64_t total_errors_in_vectors(const float*, const float*, int64_t, io::ErrorLanes&) { return 0; }

#endif

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {

HWY_EXPORT(decode_levels_in_vectors);
HWY_EXPORT(decode_steps_in_vectors);
HWY_EXPORT(widen_f16_in_vectors);
HWY_EXPORT(widen_bf16_in_vectors);
HWY_EXPORT(total_errors_in_vectors);

namespace io {

bool decode_levels(const Levels& levels, const Span& span, const uint8_t* codes, const float* x,
                   int64_t count, float* y) {
  bool good = true;
  for (int64_t i = HWY_DYNAMIC_DISPATCH(decode_levels_in_vectors)(levels, span, codes, x, count, y, good);
       i < count; ++i)
    good &= level_of(levels, span, codes[i], x[i], y[i]);
  return good;
}

bool decode_steps(const Steps& steps, const uint8_t* codes, const float* x, int64_t count, float* y) {
  bool good = true;
  for (int64_t i = HWY_DYNAMIC_DISPATCH(decode_steps_in_vectors)(steps, codes, x, count, y, good); i < count;
       ++i)
    good &= step_of(steps, codes[i], x[i], y[i]);
  return good;
}

void widen_f16(const void* x, int64_t count, float* y) {
  const auto* const bits = static_cast<const uint16_t*>(x);
  for (int64_t i = HWY_DYNAMIC_DISPATCH(widen_f16_in_vectors)(bits, count, y); i < count; ++i)
    y[i] = formats::f16_to_f32(bits[i]);
}
void widen_bf16(const void* x, int64_t count, float* y) {
  const auto* const bits = static_cast<const uint16_t*>(x);
  for (int64_t i = HWY_DYNAMIC_DISPATCH(widen_bf16_in_vectors)(bits, count, y); i < count; ++i)
    y[i] = formats::bf16_to_f32(bits[i]);
}

ErrorTotals total_errors(const float* source, const float* decoded, int64_t count) {
  ErrorLanes lanes;
  for (int64_t i = HWY_DYNAMIC_DISPATCH(total_errors_in_vectors)(source, decoded, count, lanes); i < count;
       ++i)
    lanes.add(static_cast<int>(i % kErrorLanes), source[i], decoded[i]);
  ErrorTotals totals;
  for (int lane = 0; lane < kErrorLanes; ++lane) {
    totals.squared_error += lanes.error2[lane];
    totals.squared_source += lanes.source2[lane];
    totals.largest = std::max(totals.largest, lanes.largest[lane]);
  }
  return totals;
}

}  // namespace io
}  // namespace halfbyte
#endif  // HWY_ONCE
