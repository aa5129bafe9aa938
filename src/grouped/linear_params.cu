// Scales and zero points of linear quantization, or of an observer's state, from the ranges of the groups: a
// thread has a group, or the two whose zero points share a byte.
#include "grouped/linear.cuh"
#include "grouped/linear_params.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    HALFBYTE_KERNEL(const __grid_constant__ LinearParamsArgs args) {
  const i64 item = block_index() * kLinearThreads + threadIdx.x;
  const LinearCommon& common = args.common;
  if constexpr (kOp == LinearOp::fake_quantize) {
    if (item == 0 && common.observer.num_batches != nullptr) ++*common.observer.num_batches;
  }
  if (item == 0) store_global_scale(common);  // also where there are no groups
  i64 index = item;
  int n = 1;
  if constexpr (kPackedZeros) {
    const i64 row = item / common.zero_row_bytes, column = (item - row * common.zero_row_bytes) * 2;
    index = row * common.zero_cols + column;
    n = column + 1 < common.zero_cols ? 2 : 1;
  }
  u32 byte = 0;
#pragma unroll 1
  for (int k = 0; k < n && index + k < args.num_scales; ++k) {
    const RangeKeys keys = args.ranges[index + k];
    // A group without finite elements has the range of 0; of fake_quantize none.
    constexpr F kNone = kOp == LinearOp::fake_quantize ? -bit_cast<F>(Float<F>::kInfinity) : 0;
    const F low = keys.low == 0 ? kNone : static_cast<F>(from_order_key(keys.low));
    const F high = keys.high == 0 ? kNone : static_cast<F>(from_order_key(keys.high));
    const Group group = make_params(common, index + k, -low, high, true);
    byte |= (static_cast<u32>(group.zero_point) & 15) << (4 * k);
  }
  if (kPackedZeros && index < args.num_scales)
    static_cast<u8*>(common.data.zeros)[item] = static_cast<u8>(byte);
}

}  // namespace halfbyte::device
