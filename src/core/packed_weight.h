// The packed form of a weight that qgemm reads: from its public description to its layout.
#pragma once

#include "formats/packed.h"
#include "halfbyte/format.hpp"

namespace halfbyte {

// Granularity::tensor: each row has the one scale. Throws Error(usage) where there is no packed form, see
// packed_weight_bytes.
formats::PackedLayout packed_layout_of(const QuantSpec& spec, int64_t rows, int64_t cols);

}  // namespace halfbyte
