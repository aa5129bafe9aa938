// Adds up what the splits of qgemm_sm80 left, in their order.
#include "ops/qgemm/sm80/sm80.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kQgemmSm80SumThreads)
    qgemm_sm80_sum(const __grid_constant__ QgemmSm80Args args) {
#if HALFBYTE_DEVICE_ARCH >= 800
  const i64 pairs = args.out_stride / 2;
  const i64 pair = block_index() * kQgemmSm80SumThreads + threadIdx.x;
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  wait_for_earlier();
  if (pair >= args.m * pairs) return;
  const FloatPair* from = reinterpret_cast<const FloatPair*>(args.partials) + pair;
  FloatPair sums = *from;
  for (i64 split = 1; split < args.splits; ++split) {
    from += args.m * pairs;
    const FloatPair more = *from;
    sums.first += more.first;
    sums.second += more.second;
  }
  const i64 row = pair / pairs, col = (pair - row * pairs) * 2;
  finish(args, row * args.out_cols + col, col + 1 < args.out_cols, load_bias(args, col), sums);
#endif
}

}  // namespace halfbyte::device
