// Tensors of other libraries, as DLPack 1.x describes them.
#pragma once

#include <string_view>
#include <vector>

#include "halfbyte/dlpack.h"
#include "halfbyte/export.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// A TensorView of the same memory. Devices: kDLCPU and kDLCUDAHost become the CPU, kDLCUDA and kDLCUDAManaged
// the CUDA device. Dtypes: float 16, 32, 64; bfloat 16; float8 e4m3fn, e8m0fnu; int 4, 8, 32, 64; uint 4, 8,
// 32; one lane. 4-bit tensors are packed. A row of 4-bit elements begins at a byte here, but not in DLPack,
// so several rows of odd length are refused. Throws Error(usage), naming `name`, the rule and the value, for
// anything else, for a negative extent, a null shape, more than 32 dimensions, and an address that is not a
// multiple of the size of its elements.
HALFBYTE_API TensorView from_dlpack(const DLTensor& tensor, std::string_view name = "tensor");

// The other direction. The result points to the memory of `view`, and to `storage`, which gets the shape and
// strides. Both must live, unchanged, as long as the result. Throws Error(usage) for 4-bit rows as above.
HALFBYTE_API DLTensor to_dlpack(const TensorView& view, std::vector<int64_t>& storage);

// {kDLCPU, 0}, {kDLCUDA, index}.
HALFBYTE_API DLDevice to_dlpack(Device device);
// Throws Error(usage) for the devices that from_dlpack refuses for tensors.
HALFBYTE_API Device from_dlpack(DLDevice device, std::string_view name = "device");

}  // namespace halfbyte
