// dequantize with plain parameters (docs/kernels.md): a thread has 8 elements of a row at a time, whose codes
// begin at a byte.
#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"
#include "formats/bits.h"
#include "formats/codec.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

using F = Element::Compute;
using Memory = Element::Memory;

constexpr int kChunk = 8;

extern "C" __global__ void __launch_bounds__(kThreads)
    HALFBYTE_KERNEL(const u8* codes, const void* scales, const u8* zeros, const void* biases, Memory* y,
                    i64 rows, i64 cols, i64 group_size) {
  const i64 chunks_per_row = (cols + kChunk - 1) / kChunk, row_bytes = packed_bytes(cols, kCodeBits);
  const i64 groups_per_row = (cols + group_size - 1) / group_size;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 chunk = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; chunk < rows * chunks_per_row;
       chunk += stride) {
    const i64 row = chunk / chunks_per_row, begin = (chunk - row * chunks_per_row) * kChunk;
    const i64 end = min(cols, begin + kChunk);
    i64 in_row = begin / group_size, next = begin;  // the next group of the row, and where it is needed
    F scale = 0, bias = 0;
    int zero_point = 0;
#pragma unroll 1
    for (i64 col = begin; col < end; ++col) {
      if (col == next) {
        const i64 group = row * groups_per_row + in_row;
        scale = load_scale<F>(scales, group, kCodec.scale_type);
        if constexpr (kCodec.kind == Kind::affine) bias = load_scale<F>(biases, group, kCodec.scale_type);
        if constexpr (kCodec.asymmetric) zero_point = zeros[group] + kCodec.q_min;
        next = ++in_row * group_size;
      }
      const int code = get_code(codes + row * row_bytes, col, kCodeBits);
      y[row * cols + col] = store(Element(), decode(code, scale, bias, zero_point, kCodec));
    }
  }
}

}  // namespace halfbyte::device
