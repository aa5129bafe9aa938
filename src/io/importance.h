// The importance of the input channels of weights, from a file: tensors F32 [columns of the weight], under
// the names of the weights.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "io/block_worker.h"
#include "io/checkpoint.h"

namespace halfbyte::io {

class ImportanceFile {
 public:
  // Throws as Checkpoint::open.
  explicit ImportanceFile(const std::string& path);

  // Error(bad_input) that names the weights that it has no tensor for, or the first whose tensor is of
  // another dtype or length, or has a value that is negative or not finite.
  void check(std::span<const QuantizedWeight* const> weights) const;

  // What tells it from other files.
  nlohmann::json identity() const;

  // That of a block of a weight that was checked, on the device of the worker, as long as that reads no
  // other.
  Importance read(const QuantizedWeight& weight, const Block& block, BlockWorker& worker) const;

 private:
  std::span<const float> values(const QuantizedWeight& weight, Buffer& buffer) const;

  const Checkpoint file_;
};

}  // namespace halfbyte::io
