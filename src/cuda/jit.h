// From the text of a kernel to a loaded function: memory cache, disk cache, NVRTC.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "cuda/embedded.h"

namespace halfbyte::cuda {

// A kernel and its specialisation.
struct KernelSpec {
  std::string_view source;  // name of an embedded file
  std::string function;     // extern "C" in it
  std::string config;       // text of "halfbyte_config.h": named types and constants
  bool operator==(const KernelSpec&) const = default;
};

// The function, loaded on the device. The first call for a spec compiles it (or takes it from the disk
// cache), later ones find it in memory. Thread safe: one thread compiles, the others wait for it.
// Throws Error(device): NVRTC missing or too old for the device; Error(bug) with the log where the
// source does not compile.
CUfunction get_kernel(const Context& context, const KernelSpec& spec);

// What get_kernel does on a miss of both caches, needs NVRTC only: for tests and offline compilation.
struct Compilation {
  std::vector<char> cubin;
  std::string log;  // of the compiler; of ptxas too where verbose
};
Compilation compile(const KernelSpec& spec, const std::string& target, bool verbose = false);

}  // namespace halfbyte::cuda
