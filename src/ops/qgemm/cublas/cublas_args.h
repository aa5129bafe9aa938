// What the kernel of variant qgemm_cublas is given: shared by host and device, freestanding.
#pragma once

#include "formats/packed.h"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte {

inline constexpr int kQgemmCublasThreads = 256;
inline constexpr int kQgemmCublasUnitThreads = 64;  // of a unit of the packed weight
inline constexpr int kQgemmCublasUnits =
    kQgemmCublasThreads / kQgemmCublasUnitThreads;  // of a block, of one strip

// A slice of the weight: rows [row, end_row), columns [col, end_col); row is a multiple of 32, col of 64, the
// ends of 8. All fit into 31 bits.
struct QgemmCublasArgs {
  WeightArgs weight;
  CodeValuesArgs values;  // of codes of 4 bits
  void* to;               // [end_row - row][stride]
  formats::u32 stride;
  formats::u32 row, end_row, col, end_col;
  formats::Divider blocks_per_strip;
};

}  // namespace halfbyte
