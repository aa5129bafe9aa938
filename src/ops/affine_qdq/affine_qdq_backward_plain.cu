// affine_qdq_backward with plain parameters (docs/kernels.md): a warp has a group at a time.
#include "ops/affine_qdq/affine_groups.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    halfbyte_affine_qdq_backward(const u8* codes, const Memory* dy, float* dscales, float* dbiases, i64 rows,
                                 i64 cols, i64 group_size) {
  AffineGroupsArgs args{};
  args.common.codes = codes;
  args.common.dy = dy;
  args.common.scales.gradients = dscales;
  args.common.biases.gradients = dbiases;
  args.shape = {rows, cols, packed_bytes(cols, kBits), group_size, (cols + group_size - 1) / group_size};
  const i64 stride = static_cast<i64>(gridDim.x) * (kThreads / 32);
  for (i64 group = static_cast<i64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       group < rows * args.shape.groups_per_row; group += stride)
    run_group(args, group);
}

}  // namespace halfbyte::device
