// Reads a written file back and compares it with its source. Unpacks the layouts by itself, as their
// specifications say: it shares no packing and no decoding with the code that wrote the file.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "io/output_weight.h"
#include "io/progress.h"

namespace halfbyte::io {

// Differences between a weight and what was decoded.
struct ErrorSums {
  double max_error = 0;
  int64_t max_error_index = 0;  // the first
  double squared_error = 0, squared_source = 0;

  // Elements of the weight from `first_index` on.
  void add(const float* source, const float* decoded, int64_t count, int64_t first_index);
  void merge(const ErrorSums& later);
  double relative_rmse() const;
  double snr_db() const;
};

struct VerifyItem {
  const OutputWeight* source;        // where it is in the checkpoint that was quantized
  const QuantizedWeight* quantized;  // what it became; null if it was copied
  WeightReport* report;              // receives the figures; null where it was given
  // In host memory, of a weight that has no source but was given: what it was, without double quantization,
  // or its bytes.
  const QuantizedTensor* given = nullptr;
  const Tensor* dense = nullptr;
};

// Bytes of buffers that verifying a weight takes on each thread.
int64_t verify_buffer_bytes(const OutputWeight& source, const QuantizedWeight& weight);

struct VerifyFile {
  std::string path;
  std::vector<VerifyItem> items;
};
// Each file must hold its items and nothing else. Copied tensors must be equal; every decoded element must be
// as near to its source as rounding to the nearest level allows, or what was given must decode to the same
// f32. Error(verify) naming tensor, index and values. Threads take parts of all files: of one small file many
// would have few, and make their buffers for it.
void verify_files(const Checkpoint::Impl& source, std::span<const VerifyFile> files, int num_threads,
                  ProgressPhase& progress);

}  // namespace halfbyte::io
