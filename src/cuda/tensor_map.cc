#include "cuda/tensor_map.h"

#include "core/checks.h"

namespace halfbyte::cuda {

formats::TensorMap matrix_map(const void* address, int64_t rows, int64_t cols, int64_t row_stride,
                              int box_rows, int box_cols) {
  const auto encode = driver().cuTensorMapEncodeTiled;
  HALFBYTE_CHECK(encode != nullptr, device, "tensor maps need a driver for CUDA 12.0 or later");
  // CU_TENSOR_MAP_DATA_TYPE_UINT16, INTERLEAVE_NONE, SWIZZLE_64B or 128B, L2_PROMOTION_L2_256B,
  // FLOAT_OOB_FILL_NONE.
  constexpr int kUint16 = 1, kNoInterleave = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromote256 = 3, kZeros = 0;
  const unsigned long long extents[] = {static_cast<unsigned long long>(cols),
                                        static_cast<unsigned long long>(rows)};
  const unsigned long long strides[] = {static_cast<unsigned long long>(row_stride) *
                                        2};  // bytes, from the second
  const unsigned box[] = {static_cast<unsigned>(box_cols), static_cast<unsigned>(box_rows)}, steps[] = {1, 1};
  formats::TensorMap map;
  check(encode(&map, kUint16, 2, const_cast<void*>(address), extents, strides, box, steps, kNoInterleave,
               box_cols == 32 ? kSwizzle64 : kSwizzle128, kPromote256, kZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace halfbyte::cuda
