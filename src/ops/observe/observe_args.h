// What the kernels of `observe` are given: shared by host and device, freestanding.
#pragma once

#include "formats/counts.h"
#include "formats/divider.h"
#include "formats/observer.h"

namespace halfbyte {

// The state on a device, and how it takes up the ranges of a batch.
struct ObserveState {
  void *min, *max;  // f32; f64 of f64 tensors
  formats::i64* num_batches;
  double history;  // the weight of what was seen before, as formats::observed has it; kMean
};
// The mean over batches: the weight of n batches before is n / (n + 1).
inline constexpr double kMean = 2;

}  // namespace halfbyte
