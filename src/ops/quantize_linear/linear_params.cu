// Scales and zero points of linear quantization from the ranges of the groups: a thread has a group, or the two whose
// zero points share a byte.
#include "ops/quantize_linear/linear.cuh"
#include "ops/quantize_linear/linear_params.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    linear_params(const __grid_constant__ LinearParamsArgs args) {
  const i64 item = block_index() * kLinearThreads + threadIdx.x;
  const LinearCommon& common = args.common;
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
    // A group without finite elements has the range of 0.
    const F low = keys.low == 0 ? 0 : static_cast<F>(from_order_key(keys.low));
    const F high = keys.high == 0 ? 0 : static_cast<F>(from_order_key(keys.high));
    const Group group = store_group(common, index + k, -low, high);
    byte |= (static_cast<u32>(group.zero_point) & 15) << (4 * k);
  }
  if (kPackedZeros && index < args.num_scales) static_cast<u8*>(common.data.zeros)[item] = static_cast<u8>(byte);
}

}  // namespace halfbyte::device
