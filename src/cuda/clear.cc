#include "cuda/clear.h"

#include "cuda/config.h"
#include "formats/counts.h"

namespace halfbyte::cuda {

KernelSpec clear_kernel() { return {"cuda/device/clear.cu", "clear_workspace", config_text("")}; }

Clear::Clear(const Context& context) {
  // Graphs keep such launches since CUDA 12.3.
  if (context.capability >= 90 && driver().version >= 12030) function_ = get_kernel(context, clear_kernel());
}

void Clear::operator()(void* workspace, int64_t num_bytes, void* stream) const {
  if (function_ == nullptr) return fill(workspace, 0, num_bytes, stream);
  const int64_t num_words = num_bytes / 4;
  cuda::launch(function_, {(num_words + kClearThreads - 1) / kClearThreads, kClearThreads}, stream,
               ClearArgs{static_cast<formats::u32*>(workspace), num_words});
}

}  // namespace halfbyte::cuda
