// Adds up what the splits of qgemm_sm80 left, in their order.
#include "ops/qgemm/qgemm_sm80.cuh"

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
  struct alignas(8) Sums {
    float first, second;
  };
  const Sums* from = reinterpret_cast<const Sums*>(args.partials) + pair;
  Sums sums = *from;
  for (i64 split = 1; split < args.splits; ++split) {
    from += args.m * pairs;
    const Sums more = *from;
    sums.first += more.first;
    sums.second += more.second;
  }
  const i64 row = pair / pairs;
  finish(args, row, (pair - row * pairs) * 2, sums.first, sums.second);
#endif
}

}  // namespace halfbyte::device
