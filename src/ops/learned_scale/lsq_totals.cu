// Adds up the partial sums of groups that several blocks or warps share: a thread adds kLsqRun pieces of a
// group, the threads of a block the runs.
#include "ops/learned_scale/lsq.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kLsqTotalsThreads)
    lsq_totals(const __grid_constant__ LsqTotalsArgs args) {
  __shared__ F sums[kLsqTotalsThreads];
  const LsqCommon& common = args.common;
  const int in_side = threadIdx.x % static_cast<u32>(args.side),
            run = threadIdx.x / static_cast<u32>(args.side);
  const i64 sides = (common.num_groups + args.side - 1) / args.side;
  const i64 rest = block_index() / args.out_pieces, span = block_index() - rest * args.out_pieces;
  const i64 sum = rest / sides, group = (rest - sum * sides) * args.side + in_side;
  if (sum >= kSums) return;  // a block as a whole
  wait_for_earlier();
  const i64 band = group / common.band_groups, in_band = group - band * common.band_groups;
  const i64 bands = common.num_groups / common.band_groups;

  F pieces[kLsqRun];
  const i64 first = (span * args.runs + run) * kLsqRun;
  const F* const from = static_cast<const F*>(common.partials) +
                        (sum * bands + band) * common.pieces * common.band_groups + in_band;
#pragma unroll
  for (int i = 0; i < kLsqRun; ++i)
    pieces[i] = group < common.num_groups && first + i < common.pieces
                    ? from[(first + i) * common.band_groups]
                    : F{0};
  sums[threadIdx.x] = tree_sum(pieces);
  for (int step = 1; step < args.runs; step *= 2) {
    __syncthreads();
    if (run % (2 * step) == 0) sums[threadIdx.x] = sums[threadIdx.x] + sums[threadIdx.x + step * args.side];
  }
  if (run != 0 || group >= common.num_groups) return;
  if (args.out_pieces == 1)
    store_gradient(common, group, static_cast<int>(sum), sums[threadIdx.x]);
  else
    static_cast<F*>(
        args.out)[((sum * bands + band) * args.out_pieces + span) * common.band_groups + in_band] =
        sums[threadIdx.x];
}

}  // namespace halfbyte::device
