// Whether a quantized checkpoint keeps the rules that its readers rely on, and mending what can be mended
// without the weights that it was made from. docs/verify.md has the rules.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"

namespace halfbyte {

struct Fault {
  std::string rule;  // "scale-zero", "global-scale-mismatch", ...
  std::string name;  // of the tensor, module or file
  std::string text;  // what is wrong, with the values; printable
};

// All faults, by rule and name; none: the checkpoint keeps the rules. What is damaged so that nothing else
// can be checked is one fault, "file" or "index". Reads every scale and every dense weight once. Throws
// Error(io) where files cannot be read, and Error(cancelled).
HALFBYTE_API std::vector<Fault> verify_checkpoint(const std::string& path,
                                                  const ProgressFunction& progress = {});

// Weights of nvfp4 that runtimes multiply by as one have one global scale. Where a checkpoint gives them
// several, readers take one of them for all, and the others decode wrongly.
struct RepairedWeight {
  std::string name;
  float global_scale_before = 0, global_scale = 0;  // divisors, as in QuantShape
  int64_t num_scales = 0;
};
struct RepairReport {
  std::vector<RepairedWeight> weights;
};

// A copy of the checkpoint in which weights of one product have the least of their global scales (the largest
// weight_scale_2 of modelopt), and the scales of groups of the others are multiplied by (least / own) and
// rounded to e4m3, not to 0. Codes and all other bytes stay. The output appears complete or not at all, as
// that of quantize_checkpoint. Throws Error(usage) where there is nothing to mend, Error(exists) for an
// output that is not replaced (force: as QuantizeOptions), and what Checkpoint::open throws.
HALFBYTE_API RepairReport repair_checkpoint(const std::string& input, const std::string& output,
                                            bool force = false, const ProgressFunction& progress = {});

}  // namespace halfbyte
