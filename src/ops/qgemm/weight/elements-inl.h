// Elements of x, bias and y of a product, as floats. Include after highway.h, inside a file that
// foreach_target.h compiles.
#if defined(HALFBYTE_OPS_QGEMM_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFBYTE_OPS_QGEMM_ELEMENTS_INL_H_
#undef HALFBYTE_OPS_QGEMM_ELEMENTS_INL_H_
#else
#define HALFBYTE_OPS_QGEMM_ELEMENTS_INL_H_
#endif

#include <algorithm>

#include "ops/qgemm/weight/decode-inl.h"
#include "ops/qgemm/weight/weight.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

#if HALFBYTE_SIMD

HWY_INLINE void store(F32, Floats v, float* to) { hn::StoreU(v, Tag(), to); }
HWY_INLINE void store(BF16, Floats v, uint16_t* to) {
  hn::StoreU(to_bf16(Tag(), v), hn::Rebind<uint16_t, Tag>(), to);
}
HWY_INLINE void store(F16, Floats v, uint16_t* to) {
  const hn::Rebind<hwy::float16_t, Tag> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(to));
}

// Elements [index, index + n) of x to floats, the last vector filled up with 0.
template <class E>
void load_elements(const void* x, int64_t index, int64_t n, float* to) {
  const auto* from = static_cast<const typename E::Memory*>(x) + index;
  const int64_t whole = n / kLanes * kLanes;
  convert<E>(from, whole, to);
  if (whole == n) return;
  typename E::Memory rest[kLanes] = {};
  std::copy(from + whole, from + n, rest);
  convert<E>(rest, kLanes, to + whole);
}

// Sums to columns [col, col + n) of a row of y, with bias and what was there.
template <class E>
void store_sums(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t col, int64_t n,
                const float* sums) {
  const int64_t index = row * problem.out_cols() + col;
  auto* const y = static_cast<typename E::Memory*>(tensors.y) + index;
  const auto* const bias = static_cast<const typename E::Memory*>(tensors.bias);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats sum = hn::LoadU(Tag(), sums + i);
    if (problem.bias) sum = hn::Add(sum, E::load(Tag(), bias + col + i));
    if (problem.accumulate) sum = hn::Add(sum, E::load(Tag(), y + i));
    store(E(), sum, y + i);
  }
  for (; i < n; ++i) {
    float sum = sums[i];
    if (problem.bias) sum += load_element<float>(tensors.bias, col + i, problem.dtype);
    if (problem.accumulate) sum += load_element<float>(tensors.y, index + i, problem.dtype);
    store_element(tensors.y, index + i, sum, problem.f32_sums ? DType::f32 : problem.dtype);
  }
}

// The same for the dtypes of a problem. load_x: elements [index, index + n) of x; store_y: of row `row` of y,
// f32 where the problem asks for sums.
inline void load_x(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t index, int64_t n,
                   float* to) {
  switch (problem.dtype) {
    case DType::f32:
      return load_elements<F32>(tensors.x, index, n, to);
    case DType::f16:
      return load_elements<F16>(tensors.x, index, n, to);
    default:
      return load_elements<BF16>(tensors.x, index, n, to);
  }
}
inline void store_y(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t col,
                    int64_t n, const float* sums) {
  switch (problem.f32_sums ? DType::f32 : problem.dtype) {
    case DType::f32:
      return store_sums<F32>(problem, tensors, row, col, n, sums);
    case DType::f16:
      return store_sums<F16>(problem, tensors, row, col, n, sums);
    default:
      return store_sums<BF16>(problem, tensors, row, col, n, sums);
  }
}

#endif  // HALFBYTE_SIMD

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HALFBYTE_OPS_QGEMM_ELEMENTS_INL_H_
