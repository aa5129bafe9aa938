// quantize with plain parameters (docs/kernels.md): a block has 8 groups of a row at a time, whose codes
// begin at a byte. A warp finds the parameters of one; then threads have 8 elements at a time.
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/bits.h"
#include "formats/codec.h"
#include "formats/counts.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

using F = Element::Compute;
using Memory = Element::Memory;

constexpr int kChunk = 8, kGroups = kThreads / 32;
static_assert(kGroups % kChunk == 0);

// Of a multiprocessor: without this the compiler spills registers for more of them.
constexpr int kMinBlocks = 2;
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    halfbyte_quantize(const Memory* x, u8* codes, void* scales, u8* zeros, void* biases,
                      QuantizeCounts* counts, i64 rows, i64 cols, i64 group_size) {
  __shared__ F code_scales[kGroups], code_biases[kGroups];
  __shared__ int zero_points[kGroups];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const i64 groups_per_row = (cols + group_size - 1) / group_size,
            row_bytes = packed_bytes(cols, kCodec.bits);
  const i64 units_per_row = (groups_per_row + kGroups - 1) / kGroups;
  for (i64 unit = blockIdx.x; unit < rows * units_per_row; unit += gridDim.x) {
    const i64 row = unit / units_per_row, first = (unit - row * units_per_row) * kGroups;
    const i64 size = min(group_size, cols), begin = first * size, end = min(cols, begin + kGroups * size);
    const i64 from = begin + warp * size, to = min(end, from + size);
    if (from < to) {
      Range<F> range = no_range<F>();
#pragma unroll 1
      for (i64 col = from + lane; col < to; col += 32) {
        const F value = load(Element(), x[row * cols + col]);
        if (formats::is_finite(value)) {
          range = join(range, Range<F>{-value, value});
        } else {
          atomic_add(&counts->num_nonfinite, 1);
          atomic_max(&counts->first_nonfinite_key, ~static_cast<u64>(row * cols + col));
        }
      }
#pragma unroll
      for (int mask = 1; mask < 32; mask *= 2) range = join(range, shuffle_xor(range, mask));
      if (lane == 0) {
        const GroupParams<F> params = group_params(-range.low, range.high, kCodec);
        const i64 group = row * groups_per_row + first + warp;
        store_scale(scales, group, params.scale, kCodec.scale_type);
        if constexpr (kCodec.kind == Kind::affine) store_scale(biases, group, params.bias, kCodec.scale_type);
        if constexpr (kCodec.asymmetric) zeros[group] = static_cast<u8>(params.zero_point - kCodec.q_min);
        if (!params.held) atomic_add(&counts->num_unheld_scales, 1);
        if (params.coarse) atomic_add(&counts->num_coarse_scales, 1);
        code_scales[warp] = params.code_scale;
        code_biases[warp] = params.code_bias;
        zero_points[warp] = params.zero_point;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (i64 col = begin + kChunk * threadIdx.x; col < end; col += kChunk * kThreads) {
      u64 eight = 0;  // codes, one a byte; behind the row those of 0
      auto group = static_cast<int>((col - begin) / size);
      i64 next = begin + (group + 1) * size;  // where the next group begins
#pragma unroll 1
      for (int i = 0; i < kChunk; ++i) {
        if (col + i == next && next < end) {
          ++group;
          next += size;
        }
        GroupParams<F> params;
        params.code_scale = code_scales[group];
        params.code_bias = code_biases[group];
        params.zero_point = zero_points[group];
        F value = col + i < end ? load(Element(), x[row * cols + col + i]) : 0;
        if (!formats::is_finite(value)) value = 0;
        eight |= static_cast<u64>(encode(value, params, kCodec)) << (8 * i);
      }
      const u64 bits = pack8(eight, kCodec.bits);
      const i64 byte = col / kChunk * kCodec.bits;
#pragma unroll
      for (int i = 0; i < kCodec.bits; ++i)
        if (byte + i < row_bytes) codes[row * row_bytes + byte + i] = static_cast<u8>(bits >> (8 * i));
    }
    __syncthreads();
  }
}

}  // namespace halfbyte::device
