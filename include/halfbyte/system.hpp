// What this build and this machine can do.
#pragma once

#include <string>
#include <vector>

#include "halfbyte/export.h"

namespace halfbyte {

struct SystemInfo {
  std::string version;
  std::string simd_target;  // that CPU kernels run on here: "AVX3_DL", "AVX2", "SCALAR", ...
  std::vector<std::string> compiled_targets;  // that this build has kernels for, best first
  int num_threads = 0;                        // that operations use by default
};
HALFBYTE_API SystemInfo system_info();

}  // namespace halfbyte
