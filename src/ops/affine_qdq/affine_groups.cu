// affine_qdq_backward of any groups: a warp has one.
#include "ops/affine_qdq/affine_groups.cuh"

namespace halfbyte::device {

// Of a multiprocessor: with codes of 8 bits the compiler takes the registers of one for the step of Adam.
// Before sm_80 one has 1024 threads.
#if HALFBYTE_DEVICE_ARCH >= 800
constexpr int kMinBlocks = 6;
#else
constexpr int kMinBlocks = 4;
#endif
extern "C" __global__ void __launch_bounds__(kAffineThreads, kMinBlocks)
    affine_groups(const __grid_constant__ AffineGroupsArgs args) {
  const i64 group = block_index() * (kAffineThreads / 32) + threadIdx.x / 32;
  if (group < args.shape.rows * args.shape.groups_per_row) run_group(args, group);
}

}  // namespace halfbyte::device
