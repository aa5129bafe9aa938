// Adds up the parts of sums that the blocks of a variant left, in their order, and makes outputs of them. Of
// experts, a sum of a row may then be multiplied by its routing weight, and those of a token are added up, in
// the order of its slots.
#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/sum_args.h"

namespace halfbyte::device {

__device__ __forceinline__ FloatPair operator+(const FloatPair& a, const FloatPair& b) {
  return {a.first + b.first, a.second + b.second};
}
__device__ __forceinline__ FloatPair operator*(const FloatPair& a, float b) {
  return {a.first * b, a.second * b};
}

// Number `i` of the sums of a row of `count`, from all parts.
template <class T>
__device__ __forceinline__ T sum_parts(const QgemmSumArgs& args, i64 row, i64 i, i64 count) {
  const T* from = static_cast<const T*>(args.partials) + row * count + i;
  T sum = *from;
  for (i64 part = 1; part < args.parts; ++part) {
    from += args.m * count;
    sum = sum + *from;
  }
  return sum;
}
// The product of a row, from column `col` on: as many as T has.
template <class T>
struct Product {
  static __device__ __forceinline__ T of(const QgemmSumArgs& args, i64 row, i64 col) {
    const T value = sum_parts<T>(args, row, col, args.stride);
    if (!kExperts || !args.swiglu) return value;
    return value / (1 + exp(-value)) * sum_parts<T>(args, row, args.out_cols + col, args.stride);
  }
};
template <>
struct Product<FloatPair> {
  static __device__ __forceinline__ FloatPair of(const QgemmSumArgs& args, i64 row, i64 col) {
    if (!kExperts || !args.swiglu) return sum_parts<FloatPair>(args, row, col / 2, args.stride / 2);
    return {Product<float>::of(args, row, col),
            col + 1 < args.out_cols ? Product<float>::of(args, row, col + 1) : 0};
  }
};
// The same for a row of y.
template <class T>
__device__ __forceinline__ T sum_slots(const QgemmSumArgs& args, i64 row, i64 col) {
  if constexpr (!kExperts) return Product<T>::of(args, row, col);
  T total{};
  for (i32 j = 0; j < args.slots; ++j) {
    const i64 slot = row * args.slots + j;
    T sum = Product<T>::of(args, slot, col);
    if (args.experts.routing_weights != nullptr) sum = sum * args.experts.routing_weights[slot];
    total = j == 0 ? sum : total + sum;
  }
  return total;
}
// Whether there are sums of a row of y: not where its expert has fewer.
__device__ __forceinline__ bool has_sums(const QgemmSumArgs& args, i64 row) {
  if constexpr (!kExperts) return true;
  const i32 rows = args.experts.rows_per_expert;
  return rows == 0 || row % rows < args.experts.offsets[row / rows];
}

// A thread makes two neighbours.
__device__ __forceinline__ void add_parts(const QgemmSumArgs& args, i64 pair, F32) {
  const i64 pairs = (args.out_cols + 1) / 2;
  const i64 row = pair / pairs, col = (pair - row * pairs) * 2;
  if (row * args.slots >= args.m || !has_sums(args, row)) return;
  finish(args, row * args.out_cols + col, col + 1 < args.out_cols, load_bias(args, col),
         sum_slots<FloatPair>(args, row, col));
}

// A thread makes one.
__device__ __forceinline__ void add_parts(const QgemmSumArgs& args, i64 i, F64) {
  const i64 row = i / args.out_cols, col = i - row * args.out_cols;
  if (row * args.slots >= args.m || !has_sums(args, row)) return;
  write_sum(args, row, col, sum_slots<Sum::Memory>(args, row, col));
}

extern "C" __global__ void __launch_bounds__(kQgemmSumThreads)
    qgemm_sum(const __grid_constant__ QgemmSumArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  wait_for_earlier();
  add_parts(args, block_index() * kQgemmSumThreads + threadIdx.x, Total());
}

}  // namespace halfbyte::device
