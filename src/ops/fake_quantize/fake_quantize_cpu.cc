// SIMD kernels of `fake_quantize`, forward and backward by a mask.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/fake_quantize/fake_quantize_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "grouped/linear-inl.h"
#include "ops/fake_quantize/fake_quantize.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

#if HALFBYTE_AVX512
// Of integers of four bits: low, low + 1, ... low + 15, each times the scale, in bf16, at its low four bits
// and 16 further.
HWY_INLINE __m512i values_of_16(float low, float scale) {
  const hn::ScalableTag<float> d;
  const __m512i first = _mm512_set1_epi32(static_cast<int>(low));
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i behind = _mm512_and_si512(_mm512_sub_epi32(lane, first), _mm512_set1_epi32(15));
  const __m512 integers = _mm512_cvtepi32_ps(_mm512_add_epi32(first, behind));
  const hn::Vec<decltype(d)> values{_mm512_mul_ps(integers, _mm512_set1_ps(scale))};
  return _mm512_broadcast_i64x4(to_bf16(d, values).raw);
}
#endif

// y, and the mask as bytes, 0 where the gradient does not pass. False where an element is not finite; y and
// the mask of NaN are then open.
enum class Way { fast, exact, table };  // fast: see quotient
template <class Type, bool kPerColumn, Way kWay, bool kMask>
HWY_INLINE bool fake_quantize_segment(const Source<typename Type::Memory>& x, int64_t begin, int64_t end,
                                      const Scales<typename Type::Compute>& scales,
                                      const TableValues<typename Type::Compute>& table, int64_t k,
                                      typename Type::Memory* HWY_RESTRICT y, uint8_t* HWY_RESTRICT mask) {
  using F = typename Type::Compute;
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  using V = hn::Vec<decltype(d)>;
  struct Group {
    V scale, inverse, low, high, least, most;
  };
  const auto one = hn::Set(d, F{1});
  const auto group_at = [&](int64_t i) HWY_ATTR {
    Group g;
    g.scale = scale_at<kPerColumn>(d, scales.scale, i);
    g.inverse = scale_at<kPerColumn>(d, scales.inverse, i);
    g.low = scale_at<kPerColumn>(d, scales.low, i);
    g.high = scale_at<kPerColumn>(d, scales.high, i);
    if constexpr (kWay == Way::fast && kMask) {  // bounds of x whose quotients are beyond those of the others
      g.least = hn::Mul(hn::Sub(g.low, one), g.scale);
      g.most = hn::Mul(hn::Add(g.high, one), g.scale);
    } else if constexpr (kWay == Way::fast) {  // low * scale, rounded, has the quotient low
      g.least = hn::Mul(g.low, g.scale);
      g.most = hn::Mul(g.high, g.scale);
    }
    return g;
  };
  // Adding and taking away this rounds half to even, and leaves no -0.
  const auto magic = hn::Set(d, F(sizeof(F) == 4 ? 0x1.8p23 : 0x1.8p52));
  auto finite = hn::Zero(d), finite_too = finite;  // NaN where an element is not
  Group g = group_at(k);
  struct Result {
    V value;
    hn::Mask<decltype(d)> within;
  };
  const auto work_out = [&](V v, V& seen) HWY_ATTR -> Result {
    seen = hn::MulAdd(v, hn::Zero(d), seen);
    V rounded, value;
    if constexpr (kWay == Way::fast) {
      const auto q = quotient(hn::Min(g.most, hn::Max(g.least, v)), g.scale, g.inverse);
      rounded = hn::Sub(hn::Add(q, magic), magic);
      value = kMask ? hn::Min(g.high, hn::Max(g.low, rounded)) : rounded;
    } else if constexpr (kWay == Way::exact) {
      rounded = hn::Add(hn::Round(hn::Div(v, g.scale)), hn::Zero(d));
      value = hn::Min(g.high, hn::Max(g.low, rounded));
    } else {
      rounded = hn::Div(v, g.scale);
      value = table.nearest(d, rounded);
    }
    const auto within = kWay == Way::table ? hn::And(hn::Ge(rounded, g.low), hn::Le(rounded, g.high))
                                           : hn::Eq(rounded, value);
    value = hn::Mul(value, g.scale);
    if constexpr (kWay != Way::fast)
      value = hn::IfThenElseZero(hn::Ne(g.inverse, hn::Zero(d)), value);  // scales that are 0
    return {value, within};
  };
  const auto* const from = x.at(begin, end, N);
  int64_t i = begin;
#if HALFBYTE_AVX512
  if constexpr (!kPerColumn && kWay == Way::fast && !kMask && kEvenOdd<Type>) {
    if (end - begin >= kPart / 2 && scales.high[k] - scales.low[k] < 16) {  // the table pays
      const __m512i values = values_of_16(scales.low[k], scales.scale[k]);
      const auto place = [&](V v, V& seen) HWY_ATTR {  // the quotient, rounded, in the low bits
        seen = hn::MulAdd(v, hn::Zero(d), seen);
        const auto q = quotient(hn::Min(g.most, hn::Max(g.least, v)), g.scale, g.inverse);
        return _mm512_castps_si512(hn::Add(q, magic).raw);
      };
      for (; i + 2 * N <= end; i += 2 * N) {
        const auto v = load_two<Type>(d, from + (i - begin));
        const __m512i even = place(v.a, finite), odd = _mm512_slli_epi32(place(v.b, finite_too), 16);
        const __m512i index = _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
        _mm512_storeu_si512(y + i, _mm512_permutexvar_epi16(index, values));
      }
    }
  }
#endif
  if constexpr (!kPerColumn)
    for (; i + 2 * N <= end; i += 2 * N) {
      const auto v = load_two<Type>(d, from + (i - begin));
      const Result a = work_out(v.a, finite), b = work_out(v.b, finite_too);
      store_two<Type>(d, a.value, b.value, y + i);
      if constexpr (kMask) store_mask_bytes_of_two<Type>(d, a.within, b.within, mask + i);
    }
  for (; i < end; i += N) {
    if constexpr (kPerColumn) g = group_at(i);
    const Result r = work_out(Type::load(d, from + (i - begin)), finite);
    store<Type>(d, r.value, y + i);
    if constexpr (kMask) store_mask_bytes(d, r.within, mask + i);
  }
  finite = hn::Add(finite, finite_too);
  return hn::AllTrue(d, hn::Eq(finite, finite));
}

// n bytes, 0 or not, and up to 7 behind them that are overwritten, to bits.
HWY_INLINE void pack_mask(uint8_t* bytes, int64_t n, uint8_t* bits) {
  const hn::ScalableTag<uint8_t> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  std::fill_n(bytes + n, (8 - n % 8) % 8, uint8_t{0});
  for (int64_t i = 0; i < n; i += N)
    hn::StoreMaskBits(d, hn::Ne(hn::LoadU(d, bytes + i), hn::Zero(d)), bits + i / 8);
}
// n elements, 0 where the bit is not set.
template <class T>
HWY_INLINE void select_by_mask(const T* HWY_RESTRICT from, const uint8_t* bits, int64_t n,
                               T* HWY_RESTRICT to) {
  const hn::ScalableTag<T> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d)), step = std::max<int64_t>(N, 8);
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    uint64_t word = 0;  // LoadMaskBits may read 8 bytes
    std::memcpy(&word, bits + i / 8, static_cast<size_t>(step / 8));
    for (int64_t j = 0; j < step; j += N, word >>= N % 64) {
      const auto passes = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&word));
      hn::StoreU(hn::IfThenElseZero(passes, hn::LoadU(d, from + i + j)), d, to + i + j);
    }
  }
  for (; i < n; ++i) to[i] = bits[i / 8] >> i % 8 & 1 ? from[i] : T{0};
}

template <class Type>
class FakeWorker : public LinearWorker<Type> {
  using Base = LinearWorker<Type>;
  using Base::grid_, Base::problem_, Base::tensors_, Base::scales_, Base::x_, Base::y_, Base::codes_;
  using Base::source, Base::write, Base::write_y, Base::for_each_segment, Base::one_by_one, Base::value_of;
  using typename Base::F, typename Base::Memory, typename Base::Place;

 public:
  using Base::Base;

  void run(const Tile& tile) {
    const bool is_table = problem_.codec.kind == formats::Kind::table;
    this->walk(tile, [&](const Place& place, int64_t n) {
      if (is_table)
        forward<Way::table>(place, n);
      else if (sizeof(F) == 4 && scales_.fast)
        forward<sizeof(F) == 4 ? Way::fast : Way::exact>(place, n);
      else
        forward<Way::exact>(place, n);
    });
  }

 private:
  template <Way kWay>
  void forward(const Place& place, int64_t n) {
    if (problem_.has_mask)
      forward<kWay, true>(place, n);
    else
      forward<kWay, false>(place, n);
  }
  template <Way kWay, bool kMask>
  void forward(const Place& place, int64_t n) {
    const Source<Memory> x = source(tensors_.x, tensors_.x_strides, place, n, x_);
    const int64_t index = grid_.index(place);
    bool finite = true;
    for_each_segment(
        place.column, n,
        [&](auto per_column, int64_t begin, int64_t end, int64_t k) HWY_ATTR {
          if (!scales_.far) {
            finite &= fake_quantize_segment<Type, per_column, kWay, kMask>(x, begin, end, scales_, table_, k,
                                                                           y_, codes_);
            return;
          }
          one_by_one(per_column, begin, end, k, [&](int64_t i, const auto& params) {
            const F value = value_of(x[i]);
            codes_[i] = linear_ref::is_within(value, params, problem_.codec) ? 1 : 0;
            linear_ref::store_element(y_, problem_.dtype, i,
                                      linear_ref::fake_quantize(value, params, problem_.codec));
          });
          finite = false;  // perhaps
        },
        [&](int64_t begin, int64_t end) HWY_ATTR {
          if (!finite) mend(x, begin, end, index);
          finite = true;
          write_y(place, begin, end);
          if (kMask) write_mask(index + begin, begin, end);
        });
  }
  // Counts what is not finite, and keeps NaN.
  void mend(const Source<Memory>& x, int64_t begin, int64_t end, int64_t index) {
    for (int64_t i = begin; i < end; ++i) {
      const F value = value_of(x[i]);
      if (formats::is_finite(value)) continue;
      this->count_nonfinite(index + i);
      if (!std::isnan(value)) continue;
      std::memcpy(&y_[i], &x[i], sizeof(Memory));
      codes_[i] = 0;
    }
  }
  // Elements [begin, end) of codes_, the first of which is number `index` of all and begins at a byte.
  void write_mask(int64_t index, int64_t begin, int64_t end) {
    pack_mask(codes_ + begin, end - begin, bits_);
    const CodeStorage& mask = problem_.mask;
    std::memcpy(
        static_cast<uint8_t*>(tensors_.mask) + index / mask.cols * mask.row_bytes + index % mask.cols / 8,
        bits_, static_cast<size_t>((end - begin + 7) / 8));
  }

  const TableValues<F> table_{problem_.codec.book};
  HWY_ALIGN uint8_t bits_[kPart / 8 + kPad];
};

QuantizeStatus FakeQuantizeCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return run_tiles<FakeWorker>(problem, tensors);
}

// Gradients are moved as they are: T is an unsigned integer of their size.
template <class T>
void mask_gradients(const LinearProblem& problem, const LinearTensors& tensors) {
  constexpr int64_t kPiece = 1 << 16;  // elements
  const CodeStorage& mask = problem.mask;
  const int64_t n = problem.num_elements();
  if (n == 0) return;
  const bool whole = mask.cols % 8 == 0;  // rows are whole bytes, one sequence
  const int64_t cols = whole ? n : mask.cols, row_bytes = whole ? n / 8 : mask.row_bytes;
  const int64_t pieces = (cols - 1) / kPiece + 1;
  const bool past_caches = n * static_cast<int64_t>(sizeof(T)) >= linear::kStreamBytes;
  parallel_for(n / cols * pieces, std::max<int64_t>(1, kPiece / cols), problem.num_threads,
               [&](int64_t first, int64_t last, int) {
                 HWY_ALIGN T buffer[kPart];
                 for (int64_t piece = first; piece < last; ++piece) {
                   const int64_t row = piece / pieces, begin = piece % pieces * kPiece;
                   const int64_t end = std::min(cols, begin + kPiece);
                   const auto* const bits = static_cast<const uint8_t*>(tensors.mask) + row * row_bytes;
                   for (int64_t i = begin; i < end; i += kPart) {
                     const int64_t m = std::min(kPart, end - i);
                     const T* const dy = static_cast<const T*>(tensors.dy) + row * cols + i;
                     T* const dx = static_cast<T*>(tensors.y) + row * cols + i;
                     for (int64_t j = 0; j < m; j += 64 / static_cast<int64_t>(sizeof(T)))
                       hwy::Prefetch(dy + kAhead + j);
                     select_by_mask(dy, bits + i / 8, m, buffer);
                     if (past_caches)
                       stream_copy(reinterpret_cast<uint8_t*>(dx), reinterpret_cast<const uint8_t*>(buffer),
                                   static_cast<size_t>(m) * sizeof(T));
                     else
                       std::memcpy(dx, buffer, static_cast<size_t>(m) * sizeof(T));
                   }
                 }
                 if (past_caches) hwy::FlushStream();
               });
}

void MaskGradientsCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  switch (size_of(problem.dtype)) {
    case 2:
      return mask_gradients<uint16_t>(problem, tensors);
    case 4:
      return mask_gradients<uint32_t>(problem, tensors);
    default:
      return mask_gradients<uint64_t>(problem, tensors);
  }
}

#else  // !HALFBYTE_SIMD

QuantizeStatus FakeQuantizeCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return linear_ref::run(problem, tensors);
}
void MaskGradientsCpu(const LinearProblem& problem, const LinearTensors& tensors) {
  linear_ref::mask_gradients(problem, tensors);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(FakeQuantizeCpu);
HWY_EXPORT(MaskGradientsCpu);

QuantizeStatus fake_quantize_cpu(const LinearProblem& problem, const LinearTensors& tensors) {
  return HWY_DYNAMIC_DISPATCH(FakeQuantizeCpu)(problem, tensors);
}
void mask_gradients_cpu(const LinearProblem& problem, const LinearTensors& tensors) {
  HWY_DYNAMIC_DISPATCH(MaskGradientsCpu)(problem, tensors);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
