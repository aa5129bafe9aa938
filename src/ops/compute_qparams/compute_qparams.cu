// Scales and zero points from ranges: a thread has one.
#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/compute_qparams/compute_qparams_args.h"

namespace halfbyte::device {

using F = Element::Compute;

extern "C" __global__ void __launch_bounds__(kThreads)
    compute_qparams(const __grid_constant__ ComputeQParamsArgs args) {
  const i64 i = block_index() * kThreads + threadIdx.x;
  if (i >= args.n) return;
  const QParamsRule rule = {args.rule,  args.scale_type, args.rule == Rule::minmax,
                            args.q_min, args.q_max,      args.eps};
  bool valid = true;
  const GroupParams<F> params =
      observed_qparams(static_cast<const F*>(args.min)[i], static_cast<const F*>(args.max)[i], rule, valid);
  store_scale(args.scale, i, params.scale, args.scale_type);
  store_zero_point(args.zero_point, args.zero_type, i, params.zero_point);
  if (!valid) atomic_add(&args.counts->num_invalid_scales, 1);
  if (!params.held) atomic_add(&args.counts->num_unheld_scales, 1);
  if (params.coarse) atomic_add(&args.counts->num_coarse_scales, 1);
}

}  // namespace halfbyte::device
