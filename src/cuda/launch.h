// Starting kernels. A kernel takes one struct by value, declared in a freestanding header that both sides
// include.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/jit.h"

namespace halfbyte::cuda {

struct Grid {
  int64_t num_blocks =
      0;  // 0: nothing is launched; 2^31 and more: folded, see block_index() in device/memory.cuh
  int threads_per_block = 0;
};

void launch(CUfunction function, Grid grid, void* stream, void* args);  // of the current context

template <class Args>
void launch(CUfunction function, Grid grid, void* stream, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  launch(function, grid, stream, const_cast<void*>(static_cast<const void*>(&args)));
}

// On `stream` of the current context. `to` and `from` may be memory of the device or of the host.
void copy(void* to, const void* from, int64_t num_bytes, void* stream);
void clear(void* memory, int64_t num_bytes, void* stream);  // to 0
void synchronize(void* stream);

}  // namespace halfbyte::cuda
