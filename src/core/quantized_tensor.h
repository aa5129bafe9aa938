// What the owners of quantized weights have in common.
#pragma once

#include "halfbyte/ops.hpp"

namespace halfbyte {

// Error(usage), naming `op` and the part, where shape, dtypes, devices or numbers of elements do not fit
// together.
void check_quantized(const char* op, const QuantizedTensor& q);

// The shape of a slice. Error(usage) for what is none of `shape`, and where a weight of the spec is not cut
// there.
std::vector<int64_t> check_slice(const char* op, std::span<const int64_t> shape, const Slice& slice);
std::vector<int64_t> check_slice(const char* op, const QuantSpec& spec, std::span<const int64_t> shape,
                                 const Slice& slice);

}  // namespace halfbyte
