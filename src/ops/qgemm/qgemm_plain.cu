// The product of qgemm with plain parameters (docs/kernels.md), with the bytes of qgemm_ref on the CPU: 16
// lanes have an element of y at a time. Of each block of columns each has a sum, and adds its neighbours' to
// it.
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/bits.h"
#include "formats/codec.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

using Memory = Element::Memory;

constexpr int kLanes = 16, kCols = 256;  // as in qgemm_ref

extern "C" __global__ void __launch_bounds__(kThreads)
    halfbyte_qgemm(const Memory* x, const u8* codes, const void* scales, const u8* zeros, const void* biases,
                   const Memory* bias, Memory* y, i64 m, i64 n, i64 k, i64 group_size) {
  constexpr int kPerBlock = kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const i64 groups_per_row = (k + group_size - 1) / group_size, row_bytes = packed_bytes(k, kCodec.bits);
  // The same number of times in all lanes of a warp, since they exchange sums.
  for (i64 block = blockIdx.x; block * kPerBlock < m * n; block += gridDim.x) {
    const i64 own = block * kPerBlock + threadIdx.x / kLanes, index = min(own, m * n - 1);
    const i64 x_row = index / n, w_row = index - x_row * n;
    float sum = 0;
    for (i64 begin = 0; begin < k; begin += kCols) {
      const i64 end = min(k, begin + kCols);
      float part = 0;
#pragma unroll 1
      for (i64 col = begin + lane; col < end; col += kLanes) {
        const i64 group = w_row * groups_per_row + col / group_size;
        const float scale = load_scale<float>(scales, group, kCodec.scale_type);
        float group_bias = 0;
        int zero_point = 0;
        if constexpr (kCodec.kind == Kind::affine)
          group_bias = load_scale<float>(biases, group, kCodec.scale_type);
        if constexpr (kCodec.asymmetric) zero_point = zeros[group] + kCodec.q_min;
        const int code = get_code(codes + w_row * row_bytes, col, kCodec.bits);
        part += load(Element(), x[x_row * k + col]) * decode(code, scale, group_bias, zero_point, kCodec);
      }
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) part += shuffle_xor(part, mask);
      sum += part;
    }
    if (lane != 0 || own != index) continue;
    if (bias != nullptr) sum += load(Element(), bias[w_row]);
    y[index] = store(Element(), sum);
  }
}

}  // namespace halfbyte::device
