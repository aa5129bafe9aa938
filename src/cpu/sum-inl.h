// Pairwise sums (formats/pairwise.h) by vectors. Include after highway.h, inside a file that foreach_target.h
// compiles.
#if defined(HALFBYTE_CPU_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_CPU_SUM_INL_H_
#undef HALFBYTE_CPU_SUM_INL_H_
#else
#define HALFBYTE_CPU_SUM_INL_H_
#endif

#include "cpu/simd-inl.h"
#include "formats/pairwise.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

// The sums of neighbours: those of a, then those of b.
template <class D>
HWY_INLINE hn::Vec<D> pair_sums(D d, hn::Vec<D> a, hn::Vec<D> b) {
  return hn::Add(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
}

// One level of the tree: terms 2i and 2i + 1 of n become number i; an odd last one stays. Returns how many
// there are now. `to` may be `from`.
template <class F>
HWY_INLINE int64_t halve(const F* from, int64_t n, F* to) {
  const hn::ScalableTag<F> d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N)
    hn::StoreU(pair_sums(d, hn::LoadU(d, from + i), hn::LoadU(d, from + i + N)), d, to + i / 2);
  for (; i + 2 <= n; i += 2) to[i / 2] = from[i] + from[i + 1];
  if (i < n) to[i / 2] = from[i];
  return (n + 1) / 2;
}

// The sum of n > 0 terms, which are overwritten.
template <class F>
HWY_INLINE F tree_sum(F* terms, int64_t n) {
  while (n > 1) n = halve(terms, n, terms);
  return terms[0];
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_CPU_SUM_INL_H_
