// Reads memory by bulk copies into kStages stages of kStageBytes in shared memory: what other kernels are
// compared with. sm_90 and later; does nothing before.
#include "benchmark/benchmark_args.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/memory.cuh"
#include "halfbyte_config.h"

namespace halfbyte::device {

// One thread of a block copies pieces of kStageBytes, a grid of blocks apart.
extern "C" __global__ void __launch_bounds__(kReadBulkThreads)
    read_bulk(const __grid_constant__ ReadArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  extern __shared__ __align__(128) u8 stages[];
  __shared__ Barrier arrived[kStages];
  if (threadIdx.x != 0) return;
  if (args.early) let_next_start();
  for (int stage = 0; stage < kStages; ++stage) init_barrier(&arrived[stage], 1);
  fence_barrier_init();
  const i64 num_pieces = (args.num_bytes + kStageBytes - 1) / kStageBytes;
  const auto start = [&](i64 piece, int stage) {
    const i64 at = piece * kStageBytes;
    const u32 num_bytes = static_cast<u32>(min<i64>(kStageBytes, args.num_bytes - at));
    arrive_expecting(&arrived[stage], num_bytes);
    copy_bulk_once(stages + stage * kStageBytes, static_cast<const u8*>(args.from) + at, num_bytes,
                   &arrived[stage]);
  };
  i64 next = blockIdx.x;
  for (int stage = 0; stage < kStages && next < num_pieces; ++stage, next += gridDim.x) start(next, stage);
  int stage = 0;
  u32 parity = 0;
  for (i64 piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    wait(&arrived[stage], parity);
    if (next < num_pieces) start(next, stage);
    next += gridDim.x;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (args.early) wait_for_earlier();
#endif
}

}  // namespace halfbyte::device
