#include "process_group.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "halfbyte/error.hpp"
#include "output.h"

namespace halfbyte::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kLibrary = "libhalfbyte_mpi.so";

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing here changes it
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}
int number_in(const char* name) {
  return static_cast<int>(std::strtol(variable(name).value_or("").c_str(), nullptr, 10));
}

std::vector<std::string> candidates() {
  if (auto path = variable("HALFBYTE_MPI")) return {*std::move(path)};
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  return {(folder / kLibrary).string(), kLibrary};  // the latter by the run path, too: where the library lies
}

}  // namespace

int num_launched_processes() {
  if (variable("HALFBYTE_MPI") == "") return 1;
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const int count = number_in(name); count > 0) return count;
  return variable("PMIX_RANK") ? std::max(1, number_in("SLURM_NTASKS")) : 1;
}

std::shared_ptr<ProcessGroup> process_group() {
  const int count = num_launched_processes();
  if (count < 2) return nullptr;
  std::string why;
  for (const std::string& path : candidates()) {
    // Never closed: MPI may have threads.
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
    if (library == nullptr) {
      why += (why.empty() ? "" : "; ") +
             std::string(::dlerror());  // NOLINT(concurrency-mt-unsafe): of the thread
      continue;
    }
    auto* const make = reinterpret_cast<ProcessGroup* (*)()>(::dlsym(library, "halfbyte_mpi_group"));
    if (make == nullptr)
      throw Error(ErrorCode::usage, fmt::format("\"{}\" is no {}", printable(path), kLibrary));
    return std::shared_ptr<ProcessGroup>(make());
  }
  throw Error(
      ErrorCode::usage,
      fmt::format(
          "{} processes were started, which MPI connects, and {} cannot be opened ({}): build it with "
          "-DHALFBYTE_MPI=ON, or start one process",
          count, kLibrary, why));
}

}  // namespace halfbyte::cli
