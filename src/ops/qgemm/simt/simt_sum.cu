// The sums that blocks of qgemm_simt_tiles left, added up in the order of the axis.
#include "ops/qgemm/simt/simt.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kSimtThreads)
    qgemm_simt_sum(const __grid_constant__ SimtArgs args) {
  let_next_kernel_start();
  wait_for_earlier();
  const i64 i = block_index() * kSimtThreads + threadIdx.x, count = args.m * args.out_cols;
  if (i >= count) return;
  const F* const partials = static_cast<const F*>(args.partials);
  F sum = partials[i];
  for (int split = 1; split < args.splits; ++split) sum = sum + partials[split * count + i];
  write_sum(args, i / args.out_cols, i % args.out_cols, sum);
}

}  // namespace halfbyte::device
