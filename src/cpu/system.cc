#define HWY_WANT_AVX3_DL  // reported like the targets that kernels are compiled for
#include "halfbyte/system.hpp"

#include "cpu/parallel.h"
#include "halfbyte/version.hpp"
#include "hwy/highway.h"

namespace halfbyte {

SystemInfo system_info() {
  SystemInfo info;
  info.version = kVersion;
  for (int64_t targets = HWY_TARGETS; targets != 0; targets &= targets - 1)  // a lower bit is a better target
    info.compiled_targets.push_back(hwy::TargetName(targets & -targets));
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  info.simd_target = hwy::TargetName(usable & -usable);
  info.num_threads = max_threads();
  return info;
}

}  // namespace halfbyte
