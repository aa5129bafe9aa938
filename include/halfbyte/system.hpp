// What this build and this machine can do.
#pragma once

#include <string>
#include <vector>

#include "halfbyte/export.h"

namespace halfbyte {

struct SystemInfo {
  std::string version;
  std::string simd_target;  // what CPU kernels use on this machine: "AVX3_DL", "AVX2", "SCALAR", ...
  std::vector<std::string> compiled_targets;  // what this build has kernels for, best first
  int num_threads = 0;                        // the default of operations
};
HALFBYTE_API SystemInfo system_info();

}  // namespace halfbyte
