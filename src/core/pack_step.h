// Packing a weight as a step of another operation. Defined in ops/reorder.
#pragma once

#include <memory>

#include "halfbyte/qgemm.hpp"

namespace halfbyte {

// `reorder` to the packed form of views of one description: its kernels are chosen and compiled.
class PackStep {
 public:
  // Of views like this one, which is a right one and has a packed form, but for addresses: those of codes are
  // multiples of `alignment` bytes. `num_threads`: CPU; 0: all.
  static std::shared_ptr<const PackStep> make(ConstWeightView view, int64_t alignment, int num_threads);
  virtual ~PackStep() = default;
  // Of the view only addresses count. All memory is checked. On a CUDA device the work is enqueued.
  virtual void run(const ConstWeightView& view, void* packed, void* stream) const = 0;
};

}  // namespace halfbyte
