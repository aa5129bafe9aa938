// Adds up the parts of sums that the blocks of a variant left, in their order, and makes outputs of them.
#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/sum_args.h"

namespace halfbyte::device {

// A thread makes two neighbours.
__device__ __forceinline__ void add_parts(const QgemmSumArgs& args, i64 pair, F32) {
  const i64 pairs = args.stride / 2;
  if (pair >= args.m * pairs) return;
  const FloatPair* from = static_cast<const FloatPair*>(args.partials) + pair;
  FloatPair sums = *from;
  for (i64 part = 1; part < args.parts; ++part) {
    from += args.m * pairs;
    const FloatPair more = *from;
    sums.first += more.first;
    sums.second += more.second;
  }
  const i64 row = pair / pairs, col = (pair - row * pairs) * 2;
  finish(args, row * args.out_cols + col, col + 1 < args.out_cols, load_bias(args, col), sums);
}

// A thread makes one.
__device__ __forceinline__ void add_parts(const QgemmSumArgs& args, i64 i, F64) {
  const i64 count = args.m * args.out_cols;
  if (i >= count) return;
  const Sum::Memory* const partials = static_cast<const Sum::Memory*>(args.partials);
  Sum::Memory sum = partials[i];
  for (i64 part = 1; part < args.parts; ++part) sum = sum + partials[part * count + i];
  write_sum(args, i / args.out_cols, i % args.out_cols, sum);
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
