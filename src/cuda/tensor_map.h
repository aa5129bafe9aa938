// Tensor maps: how the bulk copy engine of sm_90 and later walks a matrix, load_tile() in device/bulk.cuh.
#pragma once

#include <cstdint>

#include "cuda/driver.h"
#include "formats/common.h"

namespace halfbyte::cuda {

// A row-major matrix of 16-bit elements in memory of the device, copied in boxes of box_rows x box_cols
// elements: 64, 128 bytes a row, with the 128-byte swizzle that wgmma reads (swizzle_128 in
// device/wgmma.cuh), or 32, 64 bytes a row, with the 64-byte swizzle (swizzle_64 there). What lies beyond
// rows and cols comes as zeros. `address`: a multiple of 16 bytes; row_stride: in elements, a multiple of 8;
// rows, cols >= 1; box_rows: 1 to 256. Throws Error(device) where the driver is older than CUDA 12.0.
formats::TensorMap matrix_map(const void* address, int64_t rows, int64_t cols, int64_t row_stride,
                              int box_rows, int box_cols = 64);

}  // namespace halfbyte::cuda
