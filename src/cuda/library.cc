#include "cuda/library.h"

#include <fmt/format.h>

#include <cstdlib>

namespace halfbyte::cuda {

Library::Library(const std::string& name)
    : name_(name), handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_) return;
  const char* error = dlerror();  // NOLINT(concurrency-mt-unsafe): of the thread, in glibc
  problem_ = error ? error : name + ": cannot be opened";
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing here changes it
  return value ? value : "";
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace halfbyte::cuda
