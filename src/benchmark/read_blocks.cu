// Reads memory with 16-byte loads, kLoads of a thread in flight: what other kernels are compared with.
#include "benchmark/benchmark_args.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/memory.cuh"
#include "halfbyte_config.h"

namespace halfbyte::device {

// A block reads tiles of kThreads * kLoads words, a grid of blocks apart.
extern "C" __global__ void __launch_bounds__(kThreads) read_blocks(const __grid_constant__ ReadArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  if (args.early) let_next_start();
#endif
  constexpr i64 kTile = static_cast<i64>(kThreads) * kLoads;
  const Words4* const from = static_cast<const Words4*>(args.from);
  const i64 num_words = args.num_bytes / 16;
  u32 all = 0;
  for (i64 tile = blockIdx.x; tile * kTile < num_words; tile += gridDim.x) {
    const Words4* const at = from + tile * kTile + threadIdx.x;
    const i64 left = num_words - tile * kTile - threadIdx.x;
    Words4 words[kLoads] = {};
    if (left > (kLoads - 1) * kThreads) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[i] = load_once(at + i * kThreads);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (i * kThreads < left) words[i] = load_once(at + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      all ^= words[i].word[0] ^ words[i].word[1] ^ words[i].word[2] ^ words[i].word[3];
  }
  if (all == 0x9e3779b9u) *args.never = all;
#if HALFBYTE_DEVICE_ARCH >= 900
  if (args.early) wait_for_earlier();
#endif
}

}  // namespace halfbyte::device
