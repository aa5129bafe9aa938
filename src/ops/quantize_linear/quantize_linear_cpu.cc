// SIMD kernels of `quantize_linear` and `dequantize_linear`.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize_linear/quantize_linear_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "grouped/linear-inl.h"
#include "ops/quantize_linear/quantize_linear.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// Codes, the low 8 bits of them. False where an element is not finite; the code of NaN is then open.
// kFast: see quotient; what under- or overflows is far below 1/2 or was clamped.
template <class Type, bool kPerColumn, bool kFast>
HWY_INLINE bool quantize_segment(const Source<typename Type::Memory>& x, int64_t begin, int64_t end,
                                 const Scales<typename Type::Compute>& scales, int64_t k,
                                 uint8_t* HWY_RESTRICT codes) {
  using F = typename Type::Compute;
  const hn::ScalableTag<F> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<int32_t, decltype(d)> di;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  using V = hn::Vec<decltype(d)>;
  struct Group {
    V scale, inverse, low, high;
    hn::Vec<decltype(du)> zero;
  };
  const auto group_at = [&](int64_t i) HWY_ATTR {
    Group g;
    g.scale = scale_at<kPerColumn>(d, scales.scale, i);
    g.inverse = scale_at<kPerColumn>(d, scales.inverse, i);
    g.low = scale_at<kPerColumn>(d, scales.low, i);
    g.high = scale_at<kPerColumn>(d, scales.high, i);
    const auto zero = scale_at<kPerColumn>(di, scales.zero, i);
    if constexpr (sizeof(F) == 8)
      g.zero = hn::BitCast(du, hn::PromoteTo(hn::RebindToSigned<decltype(d)>(), zero));
    else
      g.zero = hn::BitCast(du, zero);
    return g;
  };
  // Adding this rounds half to even, to an integer in the low bits.
  const auto magic = hn::Set(d, F(sizeof(F) == 4 ? 0x1.8p23 : 0x1.8p52));
  auto finite = hn::Zero(d);  // NaN where an element is not
  Group g = group_at(k);
  const auto* const from = x.at(begin, end, N);
  for (int64_t i = begin; i < end; i += N) {
    if constexpr (kPerColumn) g = group_at(i);
    const auto v = Type::load(d, from + (i - begin));
    finite = hn::MulAdd(v, hn::Zero(d), finite);
    V q;
    if constexpr (kFast) {
      const auto w = hn::Min(g.high, hn::Max(g.low, v));
      q = quotient(w, g.scale, g.inverse);
    } else {
      q = hn::Min(g.high, hn::Max(g.low, hn::Div(v, g.scale)));
    }
    const auto code = hn::Add(hn::BitCast(du, hn::Add(q, magic)), g.zero);
    store_low_bytes(du, code, codes + i);
  }
  return hn::AllTrue(d, hn::Eq(finite, finite));
}

// Codes as bytes, flipped by sign_bit; the zero points are larger by it. The difference is exact.
template <class Type, bool kPerColumn>
HWY_INLINE void dequantize_segment(const Source<uint8_t>& codes, int64_t begin, int64_t end,
                                   const Scales<typename Type::Compute>& scales, int64_t k, uint8_t flip,
                                   typename Type::Memory* HWY_RESTRICT y) {
  using F = typename Type::Compute;
  const hn::ScalableTag<F> d;
  const hn::Rebind<int32_t, decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto zero_at = [&](int64_t i) HWY_ATTR {
    if constexpr (sizeof(F) == 8)
      return scale_at<kPerColumn>(d, scales.low, i);
    else
      return scale_at<kPerColumn>(di, scales.zero, i);
  };
  auto scale = scale_at<kPerColumn>(d, scales.scale, k);
  auto zero = zero_at(k);
  const uint8_t* const from = codes.at(begin, end, N);
  for (int64_t i = begin; i < end; i += N) {
    if constexpr (kPerColumn) {
      scale = scale_at<true>(d, scales.scale, i);
      zero = zero_at(i);
    }
    const auto q = hn::PromoteTo(di, hn::Xor(hn::LoadU(d8, from + (i - begin)), hn::Set(d8, flip)));
    if constexpr (sizeof(F) == 8)
      store<Type>(d, hn::Mul(hn::Sub(hn::PromoteTo(d, q), zero), scale), y + i);
    else
      store<Type>(d, hn::Mul(hn::ConvertTo(d, hn::Sub(q, zero)), scale), y + i);
  }
}

template <class Type>
class QuantizeWorker : public LinearWorker<Type> {
  using Base = LinearWorker<Type>;
  using Base::grid_, Base::problem_, Base::tensors_, Base::scales_, Base::x_, Base::y_, Base::codes_;
  using Base::source, Base::write, Base::write_y, Base::for_each_segment, Base::one_by_one, Base::value_of;
  using typename Base::F, typename Base::Memory, typename Base::Place;

 public:
  using Base::Base;

  void run(const Tile& tile) {
    this->walk(tile, [&](const Place& place, int64_t n) {
      if (problem_.op == LinearOp::quantize)
        quantize(place, n);
      else
        dequantize(place, n);
    });
  }

 private:
  void quantize(const Place& place, int64_t n) {
    const Source<Memory> x = source(tensors_.x, tensors_.x_strides, place, n, x_);
    const int64_t index = grid_.index(place);
    const LinearStrides& strides = tensors_.code_strides;
    const bool packed = is_packed(problem_.codes.dtype);
    auto* const codes = static_cast<uint8_t*>(tensors_.codes);
    uint8_t* const to =
        packed ? packed_at(codes, problem_.codes, index) : codes + Grid::offset(strides, place);
    bool finite = true;
    const bool fast = scales_.fast;
    for_each_segment(
        place.column, n,
        [&](auto per_column, int64_t begin, int64_t end, int64_t k) HWY_ATTR {
          if (scales_.far) {
            one_by_one(per_column, begin, end, k, [&](int64_t i, const auto& params) {
              codes_[i] = static_cast<uint8_t>(linear_ref::quantize(value_of(x[i]), params, problem_.codec));
            });
            finite = false;  // perhaps
          } else if (sizeof(F) == 4 && fast) {
            finite &= quantize_segment<Type, per_column, sizeof(F) == 4>(x, begin, end, scales_, k, codes_);
          } else {
            finite &= quantize_segment<Type, per_column, false>(x, begin, end, scales_, k, codes_);
          }
        },
        [&](int64_t begin, int64_t end) HWY_ATTR {
          if (!finite) mend(x, begin, end, place.column, index);
          finite = true;
          if (!packed) return write(codes_ + begin, end - begin, to + begin * strides.inner, strides.inner);
          codes_[end] = 0;
          pack(codes_ + begin, end - begin, packed_);
          write(packed_, (end - begin + 1) / 2, to + begin / 2, 1);
        });
  }

  // Counts what is not finite, and gives NaN its code. Element 0 is at `column` of its line, number `index`
  // of all.
  void mend(const Source<Memory>& x, int64_t begin, int64_t end, int64_t column, int64_t index) {
    for (int64_t i = begin; i < end; ++i) {
      const F value = value_of(x[i]);
      if (formats::is_finite(value)) continue;
      this->count_nonfinite(index + i);
      const int64_t k = grid_.num_scales(column, column + i + 1) - 1;
      if (std::isnan(value))
        codes_[i] = static_cast<uint8_t>(linear_ref::quantize(value, scales_.params(k), problem_.codec));
    }
  }

  void dequantize(const Place& place, int64_t n) {
    const auto* const codes = static_cast<const uint8_t*>(tensors_.codes);
    const int64_t index = grid_.index(place);
    const bool packed = is_packed(problem_.codes.dtype);
    if (packed) unpack_rows(codes, problem_.codes, index, n, codes_);
    const Source<uint8_t> from =
        packed ? Source<uint8_t>(codes_, n, 0) : source(codes, tensors_.code_strides, place, n, codes_);
    const uint8_t flip = sign_bit(problem_.codes.dtype);
    for_each_segment(
        place.column, n,
        [&](auto per_column, int64_t begin, int64_t end, int64_t k) HWY_ATTR {
          if (scales_.far)
            dequantize_far(from, per_column, begin, end, k, flip);
          else
            dequantize_segment<Type, per_column>(from, begin, end, scales_, k, flip, y_);
        },
        [&](int64_t begin, int64_t end) HWY_ATTR { write_y(place, begin, end); });
  }

  // One by one; beside the other way, as the compiler makes that slower otherwise.
  HWY_NOINLINE void dequantize_far(const Source<uint8_t>& codes, bool per_column, int64_t begin, int64_t end,
                                   int64_t k, uint8_t flip) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = per_column ? i : k;
      const auto zero = static_cast<int>(static_cast<uint32_t>(scales_.zero[at]) - flip);
      const F distance = code_distance<F>((codes[i] ^ flip) - flip, zero);
      linear_ref::store_element(y_, problem_.dtype, i, distance * scales_.scale[at]);
    }
  }

  HWY_ALIGN uint8_t packed_[kChunk / 2 + kPad];
};

QuantizeStatus QuantizeLinearCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return run_tiles<QuantizeWorker>(problem, tensors);
}

#else  // !HALFBYTE_SIMD

QuantizeStatus QuantizeLinearCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return linear_ref::run(problem, tensors);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(QuantizeLinearCpu);

QuantizeStatus quantize_linear_cpu(const LinearProblem& problem, const LinearTensors& tensors) {
  if (problem.op == LinearOp::backward) return linear_backward_cpu(problem, tensors);
  return HWY_DYNAMIC_DISPATCH(QuantizeLinearCpu)(problem, tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
