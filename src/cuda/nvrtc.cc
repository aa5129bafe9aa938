#include "cuda/nvrtc.h"

#include <algorithm>

#include "core/checks.h"
#include "cuda/driver.h"
#include "cuda/library.h"

namespace halfbyte::cuda {
namespace {

constexpr int kMinVersion = 12000;  // the first that knows C++20
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

// "sm_90", and with a suffix what only this capability (a), or all of its family (f), runs.
std::vector<std::string> targets_of(const std::vector<int>& capabilities, int version) {
  constexpr int kVersionOfFamilies = 12090;
  std::vector<std::string> targets;
  for (const int capability : capabilities) {
    if (capability < kMinCapability) continue;
    targets.push_back(fmt::format("sm_{}", capability));
    if (capability >= 90) targets.push_back(targets.back() + "a");
    if (capability >= 100 && version >= kVersionOfFamilies)
      targets.push_back(fmt::format("sm_{}f", capability));
  }
  return targets;
}

// Returns why `name` is no usable NVRTC; empty if it is one.
std::string load(const std::string& name, Nvrtc& nvrtc) {
  const Library library(name);
  if (!library.problem().empty()) return library.problem();
#define HALFBYTE_FIND(function, parameters) \
  if (!library.find(#function, nvrtc.function)) return fmt::format("{}: lacks {}", name, #function);
  HALFBYTE_NVRTC_FUNCTIONS(HALFBYTE_FIND)
  HALFBYTE_FIND(nvrtcGetErrorString, )
#undef HALFBYTE_FIND
  int major = 0, minor = 0, count = 0;
  nvrtc.nvrtcVersion(&major, &minor);
  const int version = 1000 * major + 10 * minor;
  if (version < kMinVersion)
    return fmt::format("{}: is of CUDA {}, older than {}", name, version_text(version),
                       version_text(kMinVersion));
  nvrtc.nvrtcGetNumSupportedArchs(&count);
  std::vector<int> capabilities(static_cast<size_t>(std::max(count, 0)));
  nvrtc.nvrtcGetSupportedArchs(capabilities.data());
  nvrtc.targets = targets_of(capabilities, version);
  nvrtc.version = version;
  nvrtc.path = library.path_of(nvrtc.nvrtcVersion);
  return "";
}

// The first that the driver runs the code of: one of no later major version. Else the first, whose code the
// driver may refuse.
Nvrtc search_nvrtc() {
  const int driver_major = find_driver().version / 1000;  // 0: there is no driver
  Nvrtc first;
  std::string tried;
  for (const std::string& name : nvrtc_candidates()) {
    Nvrtc nvrtc;
    const std::string problem = load(name, nvrtc);
    if (!problem.empty())
      tried += (tried.empty() ? "" : "; ") + problem;
    else if (driver_major == 0 || nvrtc.version / 1000 <= driver_major)
      return nvrtc;
    else if (first.version == 0)
      first = nvrtc;
  }
  if (first.version == 0)
    first.problem =
        fmt::format("no NVRTC of CUDA 12 or 13 (HALFBYTE_NVRTC may give its path). Tried: {}", tried);
  return first;
}

}  // namespace

std::vector<std::string> nvrtc_candidates() { return library_candidates("HALFBYTE_NVRTC", kNames); }

const Nvrtc& find_nvrtc() {
  static const Nvrtc& found = *new Nvrtc(search_nvrtc());  // never destroyed: see find_driver
  return found;
}

const Nvrtc& nvrtc() {
  const Nvrtc& found = find_nvrtc();
  HALFBYTE_CHECK(found.problem.empty(), device, "{}", found.problem);
  return found;
}

std::string problem_with(const Nvrtc& nvrtc, const std::string& target) {
  if (!nvrtc.problem.empty()) return nvrtc.problem;
  if (std::ranges::find(nvrtc.targets, target) != nvrtc.targets.end()) return "";
  return fmt::format("NVRTC {} ({}) does not compile for {}, only for {}: another version is needed",
                     version_text(nvrtc.version), nvrtc.path, target, fmt::join(nvrtc.targets, " "));
}

}  // namespace halfbyte::cuda
