// fake_quantize with plain parameters (docs/kernels.md): a thread has an element at a time.
#include "ops/fake_quantize/fake_quantize_plain.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    halfbyte_fake_quantize(const Memory* x, Memory* y, const void* scales, const void* zeros,
                           QuantizeCounts* counts, int q_min, int q_max, i64 outer, i64 axis, i64 inner,
                           i64 group_outer, i64 group_axis, i64 group_inner) {
  const LinearCommon common = common_of(scales, zeros, counts, q_min, q_max);
  const PlainGroups groups = {axis, inner, group_outer, group_axis, group_inner};
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < outer * axis * inner; i += stride)
    y[i] = fake_element(x[i], groups.load(common, i), common, i);
}

}  // namespace halfbyte::device
