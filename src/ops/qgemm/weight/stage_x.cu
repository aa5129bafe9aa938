// qgemm_stage_x: x as kernels load it, in rows that are padded to whole lines of 128 bytes: as it is, or f32
// as three matrices of bf16 (parts.cuh). A thread takes kStageXCols columns of a row.
#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/parts.cuh"
#include "ops/qgemm/weight/stage_x_args.h"

namespace halfbyte::device {

// What a thread takes of x.
struct alignas(16) Taken {
  Memory value[kStageXCols];
};

#if HALFBYTE_DEVICE_ARCH >= 800

__device__ __forceinline__ void store_parts(const Taken& taken, u8* to, i64 part_bytes) {
  Words4 words[3];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Parts<3> parts =
        split_pair({static_cast<float>(taken.value[2 * i]), static_cast<float>(taken.value[2 * i + 1])});
#pragma unroll
    for (int part = 0; part < 3; ++part) words[part].word[i] = parts.part[part];
  }
#pragma unroll
  for (int part = 0; part < 3; ++part) *reinterpret_cast<Words4*>(to + part * part_bytes) = words[part];
}
#endif

extern "C" __global__ void __launch_bounds__(kStageXThreads)
    qgemm_stage_x(const __grid_constant__ QgemmStageXArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  wait_for_earlier();
  const i64 thread = block_index() * kStageXThreads + threadIdx.x, chunks = args.stride / kStageXCols;
  const i64 row = thread / chunks, col = (thread - row * chunks) * kStageXCols;
  if (row >= args.m) return;
  const Memory* const from = static_cast<const Memory*>(args.x) + row * args.cols + col;
  Taken taken = {};
  if (args.aligned && col + kStageXCols <= args.cols) {
    taken = *reinterpret_cast<const Taken*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kStageXCols; ++i)
      if (col + i < args.cols) taken.value[i] = from[i];
  }
  const i64 at = row * args.stride + col;
#if HALFBYTE_DEVICE_ARCH >= 800
  if constexpr (kParts == 3) {
    store_parts(taken, static_cast<u8*>(args.to) + at * 2, args.m * args.stride * 2);
    return;
  }
#endif
  *reinterpret_cast<Taken*>(static_cast<Memory*>(args.to) + at) = taken;
}

}  // namespace halfbyte::device
