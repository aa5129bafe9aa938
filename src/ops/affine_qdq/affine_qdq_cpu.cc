// SIMD kernel of `affine_qdq_backward`. The sums are the levels of a binary tree over the elements of a
// group: the first level is worked out while elements and codes are loaded, by vectors of those with even and
// odd numbers, which is how nibbles, pairs of bytes and of bf16 lie in words; the others go over a buffer in
// L1. Groups of a power of two have the same levels, so that the buffer has many of them.
#include <algorithm>

#include "ops/affine_qdq/affine_qdq_ref.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine_qdq/affine_qdq_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
//
#include "cpu/simd-inl.h"
#include "cpu/sum-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

constexpr int64_t kChunk = 4096;  // elements, a power of two
constexpr int kChunkLevel = 12;
constexpr int64_t kAhead = 2048;  // elements that are fetched ahead

template <class V>
struct EvenOdd {
  V even, odd;
};

// 2 N elements.
template <class D>
HWY_INLINE EvenOdd<hn::Vec<D>> load_pairs(BF16, D d, const uint16_t* x) {
  const hn::Rebind<uint32_t, D> d32;
  const auto words = hn::LoadU(d32, reinterpret_cast<const uint32_t*>(x));
  return {hn::BitCast(d, hn::ShiftLeft<16>(words)),
          hn::BitCast(d, hn::And(words, hn::Set(d32, 0xFFFF0000u)))};
}
template <class Type, class D>
HWY_INLINE EvenOdd<hn::Vec<D>> load_pairs(Type, D d, const typename Type::Memory* x) {
  const auto a = Type::load(d, x), b = Type::load(d, x + hn::Lanes(d));
  return {hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a)};
}
// 2 N codes, in nibbles or bytes.
template <bool kNibbles, class D>
HWY_INLINE EvenOdd<hn::Vec<D>> load_codes(D d, const uint8_t* codes) {
  const hn::Rebind<int32_t, D> d32;
  if constexpr (kNibbles) {
    const hn::Rebind<uint8_t, D> d8;
    const auto pairs = hn::PromoteTo(d32, hn::LoadU(d8, codes));
    return {hn::ConvertTo(d, hn::And(pairs, hn::Set(d32, 15))), hn::ConvertTo(d, hn::ShiftRight<4>(pairs))};
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const auto pairs = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes)));
    return {hn::ConvertTo(d, hn::And(pairs, hn::Set(d32, 255))), hn::ConvertTo(d, hn::ShiftRight<8>(pairs))};
  }
}

// The sums of neighbours, of q * dy and of dy.
template <class V>
struct Sums {
  V products, plain;
};
template <class D>
HWY_INLINE Sums<hn::Vec<D>> join(D d, const Sums<hn::Vec<D>>& a, const Sums<hn::Vec<D>>& b) {
  return {pair_sums(d, a.products, b.products), pair_sums(d, a.plain, b.plain)};
}
// Of pairs, in 2 N elements.
template <bool kNibbles, class Type, class D>
HWY_INLINE Sums<hn::Vec<D>> sums_of_2(Type type, D d, const typename Type::Memory* dy, const uint8_t* codes) {
  const auto x = load_pairs(type, d, dy);
  const auto q = load_codes<kNibbles>(d, codes);
  return {hn::Add(hn::Mul(q.even, x.even), hn::Mul(q.odd, x.odd)), hn::Add(x.even, x.odd)};
}
// Of eight, in 8 N elements.
template <bool kNibbles, class Type, class D>
HWY_INLINE Sums<hn::Vec<D>> sums_of_8(Type type, D d, const typename Type::Memory* dy, const uint8_t* codes) {
  const size_t N = hn::Lanes(d), step = 2 * N / (kNibbles ? 2 : 1);
  const auto pairs = [&](size_t i)
                         HWY_ATTR { return sums_of_2<kNibbles>(type, d, dy + i * 2 * N, codes + i * step); };
  return join(d, join(d, pairs(0), pairs(1)), join(d, pairs(2), pairs(3)));
}

// The first three levels of the trees over n elements from dy on.
template <bool kNibbles, class Type>
HWY_INLINE void first_levels(Type type, const typename Type::Memory* HWY_RESTRICT dy,
                             const uint8_t* HWY_RESTRICT codes, int64_t n, float* HWY_RESTRICT products,
                             float* HWY_RESTRICT plain) {
  const hn::ScalableTag<float> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kPerByte = kNibbles ? 2 : 1;
  const auto store = [&](const Sums<hn::Vec<decltype(d)>>& sums, int64_t i) HWY_ATTR {
    hn::StoreU(sums.products, d, products + i / 8);
    hn::StoreU(sums.plain, d, plain + i / 8);
  };
  int64_t i = 0;
  for (; i + 8 * N <= n; i += 8 * N) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(*dy));
    for (int64_t k = 0; k < 8 * N; k += kLine) hwy::Prefetch(dy + i + k + kAhead);
    for (int64_t k = 0; k < 8 * N; k += 64 * kPerByte) hwy::Prefetch(codes + (i + k + 2 * kAhead) / kPerByte);
    store(sums_of_8<kNibbles>(type, d, dy + i, codes + i / kPerByte), i);
  }
  if (i == n) return;
  // Zeros behind the end change nothing.
  alignas(64) typename Type::Memory x_end[8 * HWY_MAX_BYTES / 4] = {};
  alignas(64) uint8_t q_end[8 * HWY_MAX_BYTES / 4] = {};
  std::memcpy(x_end, dy + i, static_cast<size_t>(n - i) * sizeof(*dy));
  std::memcpy(q_end, codes + i / kPerByte, static_cast<size_t>((n - i + kPerByte - 1) / kPerByte));
  store(sums_of_8<kNibbles>(type, d, x_end, q_end), i);
}

// What a span of groups is worked out with.
template <class Type>
class Backward {
 public:
  Backward(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row)
      : problem_(problem),
        args_(args),
        shape_(problem.shape),
        dy_(static_cast<const typename Type::Memory*>(args.dy) + row * shape_.cols),
        codes_(args.codes + row * shape_.row_bytes),
        first_group_(row * shape_.groups_per_row) {}

  void run(int64_t begin, int64_t end) {
    const int64_t size = shape_.group_size;
    const bool together = size >= 8 && size <= kChunk && (size & (size - 1)) == 0;
    while (begin < end) {
      const int64_t whole = std::min<int64_t>(end, shape_.cols / size) - begin;  // groups that are not short
      int64_t done = 1;
      if (together && whole > 0) {
        done = std::min(whole, kChunk / size);
        const int64_t n = done * size;
        load(begin * size, n);
        reduce(products_, n, size);
        reduce(plain_, n, size);
      } else {
        one_group(begin * size, std::min<int64_t>(shape_.cols, (begin + 1) * size));
      }
      finish(args_.scales, first_group_ + begin, done, products_);
      finish(args_.biases, first_group_ + begin, done, plain_);
      begin += done;
    }
  }

 private:
  // The first levels of n <= kChunk elements from a column on.
  HWY_INLINE void load(int64_t column, int64_t n) {
    const Type type;
    const int bits = problem_.code_bits;
    if (bits == 8) return first_levels<false>(type, dy_ + column, codes_ + column, n, products_, plain_);
    if (bits == 4 && column % 2 == 0)
      return first_levels<true>(type, dy_ + column, codes_ + column / 2, n, products_, plain_);
    const int64_t begin = column / 8 * 8;
    for (int64_t i = begin; i < column + n; i += 8) {
      uint64_t eight = 0;
      const int64_t at = i / 8 * bits;
      if (at + 8 <= shape_.row_bytes)
        std::memcpy(&eight, codes_ + at, 8);  // with bits of those that follow
      else
        std::memcpy(&eight, codes_ + at, static_cast<size_t>(shape_.row_bytes - at));
      eight = formats::unpack8(eight, bits);
      std::memcpy(unpacked_ + (i - begin), &eight, 8);
    }
    first_levels<false>(type, dy_ + column, unpacked_ + (column - begin), n, products_, plain_);
  }

  // The sums of n / 8 times 8 elements to those of groups of `size`.
  static HWY_INLINE void reduce(float* terms, int64_t n, int64_t size) {
    for (int64_t count = n / 8; size > 8; size /= 2) count = halve(terms, count, terms);
  }

  HWY_INLINE void one_group(int64_t begin, int64_t end) {
    const auto block_sums = [&](int64_t at, int64_t n) HWY_ATTR {
      load(at, n);
      return Sums<float>{tree_sum(products_, (n + 7) / 8), tree_sum(plain_, (n + 7) / 8)};
    };
    if (end - begin <= kChunk) {
      const Sums<float> sums = block_sums(begin, end - begin);
      products_[0] = sums.products;
      plain_[0] = sums.plain;
      return;
    }
    formats::PairwiseSum<float> products, plain;
    for (int64_t at = begin; at < end; at += kChunk) {
      const Sums<float> sums = block_sums(at, std::min(kChunk, end - at));
      products.add_block(sums.products, kChunkLevel);
      plain.add_block(sums.plain, kChunkLevel);
    }
    products_[0] = products.total();
    plain_[0] = plain.total();
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> one_nan(D d, hn::Vec<D> v) {
    return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, formats::quiet_nan<float>()), v);
  }

  HWY_INLINE void finish(const AffineTrained& to, int64_t first, int64_t n, const float* sums) const {
    const hn::ScalableTag<float> d;
    const auto N = static_cast<int64_t>(hn::Lanes(d));
    const formats::AdamFactors& f = args_.adam;
    const auto set = [&](float x) HWY_ATTR { return hn::Set(d, x); };
    int64_t i = 0;
    for (; i + N <= n; i += N) {
      const int64_t at = first + i;
      const auto g = one_nan(d, hn::Add(hn::LoadU(d, sums + i), hn::Zero(d)));
      if (to.gradients != nullptr) hn::StoreU(g, d, to.gradients + at);
      if (!problem_.adam) continue;
      const auto m = hn::Add(hn::Mul(set(f.beta1), hn::LoadU(d, to.m + at)), hn::Mul(set(f.rest1), g));
      const auto v =
          hn::Add(hn::Mul(set(f.beta2), hn::LoadU(d, to.v + at)), hn::Mul(hn::Mul(set(f.rest2), g), g));
      const auto root = hn::Add(hn::Div(hn::Sqrt(v), set(f.root)), set(f.epsilon));
      const auto value = hn::Sub(hn::LoadU(d, to.values + at), hn::Div(hn::Mul(set(f.step_size), m), root));
      hn::StoreU(one_nan(d, value), d, to.values + at);
      hn::StoreU(one_nan(d, m), d, to.m + at);
      hn::StoreU(one_nan(d, v), d, to.v + at);
    }
    for (; i < n; ++i) affine_finish_ref(to, first + i, formats::total_of(sums[i]), problem_.adam, f);
  }

  const AffineProblem& problem_;
  const AffineBackwardArgs& args_;
  const AffineShape& shape_;
  const typename Type::Memory* dy_;
  const uint8_t* codes_;
  int64_t first_group_;
  // Room for a whole vector behind the last.
  alignas(64) float products_[kChunk / 8 + HWY_MAX_BYTES / 4];
  alignas(64) float plain_[kChunk / 8 + HWY_MAX_BYTES / 4];
  uint8_t unpacked_[kChunk + 16];
};

void AffineBackwardSpanCpu(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row,
                           int64_t begin, int64_t end) {
  switch (problem.dtype) {
    case DType::f32:
      return Backward<F32>(problem, args, row).run(begin, end);
    case DType::f16:
      return Backward<F16>(problem, args, row).run(begin, end);
    default:
      return Backward<BF16>(problem, args, row).run(begin, end);
  }
}

#else  // !HALFBYTE_SIMD

void AffineBackwardSpanCpu(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row,
                           int64_t begin, int64_t end) {
  affine_backward_ref(problem, args, row, begin, end);
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
HWY_EXPORT(AffineBackwardSpanCpu);

void affine_backward_span_cpu(const AffineProblem& problem, const AffineBackwardArgs& args, int64_t row,
                              int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(AffineBackwardSpanCpu)(problem, args, row, begin, end);
}

}  // namespace halfbyte
#endif  // HWY_ONCE
