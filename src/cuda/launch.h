// Starting kernels. A kernel takes one struct by value, declared in a freestanding header that both sides
// include. A stream is the caller's: one of another device is refused with Error(usage), here and nowhere
// else.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/jit.h"

namespace halfbyte::cuda {

inline bool is_aligned(const void* pointer, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(num_bytes) == 0;
}

struct Grid {
  // 0: nothing is launched; 2^31 and more: folded, see block_index() in device/memory.cuh.
  int64_t num_blocks = 0;
  int threads_per_block = 0;
  int shared_bytes = 0;        // dynamic shared memory of a block
  int blocks_per_cluster = 1;  // divides num_blocks
};

// Before launches with more than 48 KB of dynamic shared memory; in the current context.
// What other callers were given for the function stays.
void allow_shared_bytes(CUfunction function, int shared_bytes);

void launch(CUfunction function, Grid grid, void* stream, void* args);  // of the current context

// The same; it may start before the kernel before it on the stream has ended, see Clear.
void launch_early(CUfunction function, Grid grid, void* stream, void* args);

template <class Args>
void launch(CUfunction function, Grid grid, void* stream, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  launch(function, grid, stream, const_cast<void*>(static_cast<const void*>(&args)));
}
template <class Args>
void launch_early(CUfunction function, Grid grid, void* stream, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  launch_early(function, grid, stream, const_cast<void*>(static_cast<const void*>(&args)));
}

// On `stream` of the current context. `to` and `from` may be memory of the device or of the host.
void copy(void* to, const void* from, int64_t num_bytes, void* stream);
void fill(void* memory, uint8_t value, int64_t num_bytes, void* stream);
// Some bytes by value: no memory of the host must outlive the call. `to`: a multiple of 4 for 4 bytes or
// more.
void set(void* to, const void* value, int64_t num_bytes, void* stream);
void synchronize(void* stream);

}  // namespace halfbyte::cuda
