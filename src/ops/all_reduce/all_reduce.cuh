// What the kernels of `all_reduce` share: members that write into the memory of each other.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/all_reduce/all_reduce_args.h"

namespace halfbyte::device {

// First of all: x is there, and what is behind may begin, such as the next product to read its weight, while
// this waits for others.
__device__ __forceinline__ void begin_run() {
  wait_for_earlier();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By all threads: the number of this run.
__device__ __forceinline__ u32 number_of_run(const AllReduceArgs& args) {
  u32 run = *reinterpret_cast<volatile u32*>(&args.state->run) + 1;
  if (run == 0) run = 2;  // of the same parity; what nobody wrote has 0
  __syncthreads();
  if (threadIdx.x == 0 && atomicInc(&args.state->ticket, gridDim.x - 1) == gridDim.x - 1)
    *reinterpret_cast<volatile u32*>(&args.state->run) = run;  // all blocks have read it
  return run;
}

// Of something that waits: whether it must end.
__device__ __forceinline__ bool is_aborted(const AllReduceArgs& args, u32 tries) {
  return tries % 4096 == 0 && *args.aborted != 0;
}

// The elements of a word of x, and back.
__device__ __forceinline__ float value(u32 word, int i) {
  if constexpr (sizeof(Element::Memory) == 4)
    return bit_cast<float>(word);
  else
    return load(Element(), static_cast<u16>(word >> (i * 16)));
}
constexpr int kPerWord = 4 / sizeof(Element::Memory);
__device__ __forceinline__ u32 word_of(F32, const float* values) { return bit_cast<u32>(values[0]); }
template <class Half>
__device__ __forceinline__ u32 word_of(Half, const float* values) {
  return store_pair(Half(), values[0], values[1]);
}

}  // namespace halfbyte::device
