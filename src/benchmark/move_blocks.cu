// Reads and writes memory and does nothing else: what other kernels are compared with.
#include "benchmark/benchmark_args.h"
#include "cuda/device/memory.cuh"
#include "halfbyte_config.h"

namespace halfbyte::device {

constexpr int kReadsEach = (kReads + kMoveThreads - 1) / kMoveThreads,
              kWritesEach = (kWrites + kMoveThreads - 1) / kMoveThreads;

// A block reads kReads words and writes kWrites; all its reads are in flight before the first write.
extern "C" __global__ void __launch_bounds__(kMoveThreads)
    move_blocks(const __grid_constant__ MoveArgs args) {
  const int thread = static_cast<int>(threadIdx.x);
  const i64 first_read = static_cast<i64>(blockIdx.x) * kReads,
            first_write = static_cast<i64>(blockIdx.x) * kWrites;
  const Words4* const from = static_cast<const Words4*>(args.from) + first_read;
  Words4* const to = static_cast<Words4*>(args.to) + first_write;
  Words4 words[kReadsEach];
#pragma unroll
  for (int i = 0; i < kReadsEach; ++i) {
    const int at = i * kMoveThreads + thread;
    words[i] = {};
    if (at < kReads && first_read + at < args.num_reads) words[i] = load_once(from + at);
  }
  // What is written depends on all that was read.
#pragma unroll
  for (int i = kWritesEach; i < kReadsEach; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) words[i % kWritesEach].word[k] ^= words[i].word[k];
#pragma unroll
  for (int i = 0; i < kWritesEach; ++i) {
    const int at = i * kMoveThreads + thread;
    if (at >= kWrites || first_write + at >= args.num_writes) continue;
    if constexpr (kStream)
      store_once(to + at, words[i % kReadsEach]);
    else
      to[at] = words[i % kReadsEach];
  }
}

}  // namespace halfbyte::device
