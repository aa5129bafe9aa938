#define HWY_WANT_AVX3_DL  // reported like the targets that kernels are compiled for

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/system.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "core/plan_device.h"
#include "cpu/parallel.h"
#include "halfbyte/system.hpp"
#include "halfbyte/version.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

const char* NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

HWY_EXPORT(NameOfTarget);

}  // namespace

// Asked as kernels are, of the choice that Highway keeps: hwy::SupportedTargets() executes CPUID each time,
// which in a virtual machine takes 20 microseconds.
const char* simd_target() { return HWY_DYNAMIC_DISPATCH(NameOfTarget)(); }

SystemInfo system_info() {
  SystemInfo info;
  info.version = kVersion;
  for (int64_t targets = HWY_TARGETS; targets != 0; targets &= targets - 1)  // a lower bit is a better target
    info.compiled_targets.push_back(hwy::TargetName(targets & -targets));
  info.simd_target = simd_target();
  info.num_threads = max_threads();
  return info;
}

}  // namespace halfbyte
#endif  // HWY_ONCE
