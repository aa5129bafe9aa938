// Zeros in a workspace; the kernel after it may start at once and wait for them (wait_for_earlier).
#include "cuda/device/memory.cuh"
#include "formats/counts.h"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kClearThreads)
    clear_workspace(const __grid_constant__ ClearArgs args) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const i64 word = block_index() * kClearThreads + threadIdx.x;
  if (word < args.num_words) args.words[word] = 0;
}

}  // namespace halfbyte::device
