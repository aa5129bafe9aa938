// What the owners of quantized weights have in common.
#pragma once

#include "halfbyte/ops.hpp"

namespace halfbyte {

// Error(usage), naming `op` and the part, where shape, dtypes, devices or numbers of elements do not fit
// together.
void check_quantized(const char* op, const QuantizedTensor& q);

}  // namespace halfbyte
