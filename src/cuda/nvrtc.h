// The compiler of device code (NVRTC), found at run time. The types are those of nvrtc.h.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace halfbyte::cuda {

using nvrtcResult = int;
using nvrtcProgram = struct nvrtcProgram_st*;

struct Nvrtc {
  std::string path;                  // empty if there is none
  int version = 0;                   // 1000 * major + 10 * minor
  std::string problem;               // why there is none; empty if there is
  std::vector<std::string> targets;  // that it compiles for: "sm_75", "sm_90a"

#define HALFBYTE_NVRTC_FUNCTIONS(X)                                                                   \
  X(nvrtcVersion, (int* major, int* minor))                                                           \
  X(nvrtcGetNumSupportedArchs, (int* count))                                                          \
  X(nvrtcGetSupportedArchs, (int* capabilities))                                                      \
  X(nvrtcCreateProgram, (nvrtcProgram * program, const char* text, const char* name, int num_headers, \
                         const char* const* headers, const char* const* include_names))               \
  X(nvrtcDestroyProgram, (nvrtcProgram * program))                                                    \
  X(nvrtcCompileProgram, (nvrtcProgram program, int num_options, const char* const* options))         \
  X(nvrtcGetCUBINSize, (nvrtcProgram program, size_t * num_bytes))                                    \
  X(nvrtcGetCUBIN, (nvrtcProgram program, char* cubin))                                               \
  X(nvrtcGetPTXSize, (nvrtcProgram program, size_t * num_bytes))                                      \
  X(nvrtcGetPTX, (nvrtcProgram program, char* ptx))                                                   \
  X(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t * num_bytes))                               \
  X(nvrtcGetProgramLog, (nvrtcProgram program, char* log))
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HALFBYTE_DECLARE(name, parameters) nvrtcResult(*name) parameters = nullptr;
  HALFBYTE_NVRTC_FUNCTIONS(HALFBYTE_DECLARE)
#undef HALFBYTE_DECLARE
  const char* (*nvrtcGetErrorString)(nvrtcResult result) = nullptr;
};

// Loaded once per process: the first of nvrtc_candidates() that opens, has all functions and is of CUDA 12.0
// or later (for C++20). A failure is remembered in `problem`.
const Nvrtc& find_nvrtc();
// The same; throws Error(device) with the problem where there is none.
const Nvrtc& nvrtc();
// Why it does not compile for `target` ("sm_90a"), as there is none or it does not know it; empty if it does.
std::string problem_with(const Nvrtc& nvrtc, const std::string& target);

// As library_candidates, HALFBYTE_NVRTC first.
std::vector<std::string> nvrtc_candidates();

}  // namespace halfbyte::cuda
