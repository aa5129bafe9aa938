// What the kernel qgemm_stage_x is given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

inline constexpr int kStageXThreads = 256;
inline constexpr int kStageXCols = 8;  // of a thread
// Of 16 bits, 128 bytes: else tensor copies of 64 columns take two lines of the second-level cache for each.
inline constexpr int kStageXLine = 64;

// x [m, cols] becomes [parts][m][stride]: rows are padded with 0 to `stride`, a multiple of kStageXLine.
struct QgemmStageXArgs {
  const void* x;
  void* to;
  formats::i64 m, cols, stride;
  bool aligned;  // what a thread takes of x is aligned to 16 bytes
};

}  // namespace halfbyte
