// The gradient of routing weights: a block multiplies the sums of a row, which a product left in parts, with
// a row of forward_x. Lanes are added up, then warps, each in one order.
#include "cuda/device/bulk.cuh"
#include "cuda/device/reduce.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/sum_args.h"

namespace halfbyte::device {

constexpr int kWarps = kQgemmSumThreads / 32;

extern "C" __global__ void __launch_bounds__(kQgemmSumThreads)
    qgemm_routing_grad(const __grid_constant__ QgemmSumArgs args) {
  __shared__ float warp_sums[kWarps];
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  wait_for_earlier();
  const i64 row = block_index();
  if (row >= args.m) return;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* const from = static_cast<const Sum::Memory*>(args.partials) + row * args.stride;
  const Memory* const x = static_cast<const Memory*>(args.forward_x) + row * args.out_cols;
  float total = 0;
  for (i64 col = thread; col < args.out_cols; col += kQgemmSumThreads) {
    Sum::Memory sum = from[col];
    for (i64 part = 1; part < args.parts; ++part) sum = sum + from[part * args.m * args.stride + col];
    total = __fmaf_rn(static_cast<float>(sum), load(Element(), x[col]), total);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
  if (thread % 32 == 0) warp_sums[thread / 32] = total;
  __syncthreads();
  if (thread != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) total += warp_sums[warp];
  args.routing_grad[row] = total;
}

}  // namespace halfbyte::device
