// The packed form of a weight that qgemm reads: from its public description to its layout.
#pragma once

#include "formats/packed.h"
#include "halfbyte/format.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// Granularity::tensor: each row has the one scale. Throws Error(usage) where there is no packed form, see
// packed_weight_bytes.
formats::PackedLayout packed_layout_of(const QuantSpec& spec, int64_t rows, int64_t cols);

// In bytes, of the memory of a packed weight: that of its sections, which kernels of CUDA rely on. Those of
// the CPU load nothing wider than 64 bytes, which is what allocators of other programs give.
inline int64_t packed_alignment(Device device) {
  return device.kind == DeviceKind::cuda ? formats::kPackedAlignment : 64;
}

}  // namespace halfbyte
