// A stand-in for NVRTC: "compiles" to bytes that follow from source, headers and options.
//   STUB_NVRTC_VERSION      1000 * major + 10 * minor; 13000
//   STUB_NVRTC_GENERATION   a word that goes into what is compiled
//   STUB_NVRTC_SLEEP_MS     how long a compilation takes; 0
//   STUB_NVRTC_RESULT       of nvrtcCompileProgram; 0
//   STUB_NVRTC_LOG_BYTES    size of the log; 0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "stub/stub.h"

namespace {

struct Program {
  uint64_t hash = 0;
  std::string cubin;
};

constexpr int kCapabilities[] = {75, 80, 86, 89, 90, 100, 120};

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  const int version = stub::number("STUB_NVRTC_VERSION", 13000);
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kCapabilities));
  return 0;
}
int nvrtcGetSupportedArchs(int* capabilities) {
  std::ranges::copy(kCapabilities, capabilities);
  return 0;
}
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_OF_STUB"; }

int nvrtcCreateProgram(Program** program, const char* text, const char* name, int num_headers,
                       const char* const* headers, const char* const* include_names) {
  uint64_t hash = stub::fnv1a(text, stub::fnv1a(name));
  for (int i = 0; i < num_headers; ++i) hash = stub::fnv1a(headers[i], stub::fnv1a(include_names[i], hash));
  *program = new Program{hash, ""};
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
  for (int i = 0; i < num_options; ++i) program->hash = stub::fnv1a(options[i], program->hash);
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016lx", static_cast<unsigned long>(program->hash));
  stub::log(std::string("compile ") + digits);
  std::this_thread::sleep_for(std::chrono::milliseconds(stub::number("STUB_NVRTC_SLEEP_MS", 0)));
  const std::string rest = digits + stub::text("STUB_NVRTC_GENERATION") + std::string(200, '.');
  std::snprintf(digits, sizeof digits, "%08zu\n", rest.size());
  program->cubin = std::string(stub::kMagic) + digits + rest;
  return stub::number("STUB_NVRTC_RESULT", 0);
}
int nvrtcGetCUBINSize(Program* program, size_t* num_bytes) {
  *num_bytes = program->cubin.size();
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* cubin) {
  std::ranges::copy(program->cubin, cubin);
  return 0;
}
int nvrtcGetPTXSize(Program* program, size_t* num_bytes) {
  *num_bytes = program->cubin.size() + 1;
  return 0;
}
int nvrtcGetPTX(Program* program, char* ptx) {
  *std::ranges::copy(program->cubin, ptx).out = '\0';
  return 0;
}
int nvrtcGetProgramLogSize(Program*, size_t* num_bytes) {
  *num_bytes = static_cast<size_t>(stub::number("STUB_NVRTC_LOG_BYTES", 0)) + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  size_t num_bytes = 0;
  nvrtcGetProgramLogSize(program, &num_bytes);
  std::fill_n(log, num_bytes - 1, '?');
  log[num_bytes - 1] = '\0';
  return 0;
}

}  // extern "C"
