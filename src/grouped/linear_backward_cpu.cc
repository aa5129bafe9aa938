// SIMD kernels of the gradient that passes where nothing was clamped, of integers and of tables.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "grouped/linear_backward_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "grouped/linear-inl.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

template <class Type, bool kPerColumn>
HWY_INLINE void backward_segment(const Source<typename Type::Memory>& x,
                                 const Source<typename Type::Memory>& dy, int64_t begin, int64_t end,
                                 const Scales<typename Type::Compute>& scales, int64_t k,
                                 typename Type::Memory* HWY_RESTRICT dx) {
  const hn::ScalableTag<typename Type::Compute> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  auto scale = scale_at<kPerColumn>(d, scales.scale, k);
  auto low = scale_at<kPerColumn>(d, scales.low, k), high = scale_at<kPerColumn>(d, scales.high, k);
  const auto* const from = x.at(begin, end, N);
  const auto* const gradient = dy.at(begin, end, N);
  const auto passes = [&](hn::Vec<decltype(d)> v) HWY_ATTR {
    const auto q = hn::Round(hn::Div(v, scale));
    return hn::And(hn::Ge(q, low), hn::Le(q, high));
  };
  int64_t i = begin;
  if constexpr (!kPerColumn)
    for (; i + 2 * N <= end; i += 2 * N) {
      const auto v = load_two<Type>(d, from + (i - begin));
      select_two<Type>(d, passes(v.a), passes(v.b), gradient + (i - begin), dx + i);
    }
  for (; i < end; i += N) {
    if constexpr (kPerColumn) {
      scale = scale_at<true>(d, scales.scale, i);
      low = scale_at<true>(d, scales.low, i);
      high = scale_at<true>(d, scales.high, i);
    }
    select<Type>(d, passes(Type::load(d, from + (i - begin))), gradient + (i - begin), dx + i);
  }
}

// By a table: whether gradients pass, as bytes.
template <class Type, bool kPerColumn>
HWY_INLINE void table_backward_segment(const Source<typename Type::Memory>& x, int64_t begin, int64_t end,
                                       const Scales<typename Type::Compute>& scales, int64_t k,
                                       uint8_t* HWY_RESTRICT mask) {
  const hn::ScalableTag<typename Type::Compute> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const auto* const from = x.at(begin, end, N);
  for (int64_t i = begin; i < end; i += N) {
    const int64_t at = kPerColumn ? i : k;
    const auto v = hn::Div(Type::load(d, from + (i - begin)), scale_at<kPerColumn>(d, scales.scale, at));
    const auto within = hn::And(hn::Ge(v, scale_at<kPerColumn>(d, scales.low, at)),
                                hn::Le(v, scale_at<kPerColumn>(d, scales.high, at)));
    store_mask_bytes(d, within, mask + i);
  }
}

template <class Type>
class BackwardWorker : public LinearWorker<Type> {
  using Base = LinearWorker<Type>;
  using Base::problem_, Base::tensors_, Base::scales_, Base::x_, Base::dy_, Base::y_, Base::codes_;
  using Base::source, Base::write_y, Base::for_each_segment, Base::one_by_one, Base::value_of;
  using typename Base::Memory, typename Base::Place;

 public:
  using Base::Base;

  void run(const Tile& tile) {
    const bool is_table = problem_.codec.kind == formats::Kind::table;
    this->walk(tile, [&](const Place& place, int64_t n) {
      if (is_table)
        table(place, n);
      else
        integers(place, n);
    });
  }

 private:
  void integers(const Place& place, int64_t n) {
    const Source<Memory> x = source(tensors_.x, tensors_.x_strides, place, n, x_);
    const Source<Memory> dy = source(tensors_.dy, tensors_.dy_strides, place, n, dy_);
    for_each_segment(
        place.column, n,
        [&](auto per_column, int64_t begin, int64_t end, int64_t k) HWY_ATTR {
          if (!scales_.far) return backward_segment<Type, per_column>(x, dy, begin, end, scales_, k, y_);
          one_by_one(per_column, begin, end, k, [&](int64_t i, const auto& params) {
            y_[i] = linear_ref::is_within(value_of(x[i]), params, problem_.codec) ? dy[i] : Memory{0};
          });
        },
        [&](int64_t begin, int64_t end) HWY_ATTR { write_y(place, begin, end); });
  }

  void table(const Place& place, int64_t n) {
    const Source<Memory> x = source(tensors_.x, tensors_.x_strides, place, n, x_);
    const Source<Memory> dy = source(tensors_.dy, tensors_.dy_strides, place, n, dy_);
    for_each_segment(
        place.column, n,
        [&](auto per_column, int64_t begin, int64_t end, int64_t k)
            HWY_ATTR { table_backward_segment<Type, per_column>(x, begin, end, scales_, k, codes_); },
        [&](int64_t begin, int64_t end) HWY_ATTR {
          const Memory* const from = &dy[begin];
          for (int64_t i = begin; i < end; ++i) y_[i] = codes_[i] != 0 ? from[i - begin] : Memory{0};
          write_y(place, begin, end);
        });
  }
};

QuantizeStatus LinearBackwardCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return run_tiles<BackwardWorker>(problem, tensors);
}

#else  // !HALFBYTE_SIMD

QuantizeStatus LinearBackwardCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return linear_ref::run(problem, tensors);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(LinearBackwardCpu);

QuantizeStatus linear_backward_cpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return HWY_DYNAMIC_DISPATCH(LinearBackwardCpu)(problem, tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
