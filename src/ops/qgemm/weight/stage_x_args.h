// What the kernel qgemm_stage_x is given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

inline constexpr int kStageXThreads = 256;
inline constexpr int kStageXCols = 8;  // of a thread

// x [m, cols] becomes [parts][m][stride]: rows are padded with 0 to `stride`, a multiple of kStageXCols.
struct QgemmStageXArgs {
  const void* x;
  void* to;
  formats::i64 m, cols, stride;
  bool aligned;  // what a thread takes of x is aligned to 16 bytes
};

}  // namespace halfbyte
