#include "cuda/library.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <system_error>

#include "core/checks.h"
#include "core/directory.h"
#include "halfbyte/device.hpp"

namespace halfbyte::cuda {
namespace {

namespace fs = std::filesystem;

// Entries of a directory whose names start with `prefix`, sorted; none if it cannot be read.
std::vector<std::string> entries(const std::string& directory, const std::string& prefix) {
  std::vector<std::string> result;
  std::error_code error;
  for (const std::string& name : names_in(directory, error))
    if (name.starts_with(prefix)) result.push_back(join(directory, name));
  return result;
}

// The directory above the bin/ that holds the python3 on PATH; empty if there is none. Links are not
// followed: the python3 of a virtual environment is a link, and the environment is what is asked for.
std::string python_prefix() {
  std::istringstream path(environment("PATH"));
  std::error_code error;
  for (std::string directory; std::getline(path, directory, ':');)
    if (directory.starts_with('/') && fs::exists(directory + "/python3", error))
      return fs::path(directory).lexically_normal().parent_path();
  return {};
}

void add_existing(const std::string& directory, std::span<const char* const> names,
                  std::vector<std::string>& candidates) {
  std::error_code error;
  for (const char* name : names)
    if (const std::string path = join(directory, name); fs::exists(path, error)) candidates.push_back(path);
}

// What add_site_packages has added.
struct SitePackages {
  std::mutex mutex;
  std::vector<std::string> directories;
};
SitePackages& site_packages() {
  static SitePackages& added = *new SitePackages;  // never destroyed: threads may ask until the process ends
  return added;
}

void add_packages(const std::string& packages, std::span<const char* const> names,
                  std::vector<std::string>& candidates) {
  for (const std::string& wheel : entries(join(packages, "nvidia"), ""))
    add_existing(join(wheel, "lib"), names, candidates);
}

void add_wheels(const std::string& prefix, std::span<const char* const> names,
                std::vector<std::string>& candidates) {
  if (!prefix.starts_with('/')) return;
  for (const std::string& python : entries(join(prefix, "lib"), "python3"))
    for (const char* packages : {"site-packages", "dist-packages"})
      add_packages(join(python, packages), names, candidates);
}

}  // namespace

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

std::vector<std::string> library_candidates(const char* variable, std::span<const char* const> names) {
  if (const std::string own = environment(variable); !own.empty()) return {own};
  std::vector<std::string> candidates;
  {
    SitePackages& added = site_packages();
    const std::lock_guard lock(added.mutex);
    for (const std::string& packages : added.directories) add_packages(packages, names, candidates);
  }
  candidates.insert(candidates.end(), names.begin(), names.end());
  if (const std::string home = environment("CUDA_HOME"); !home.empty())
    add_existing(home + "/lib64", names, candidates);
  add_existing("/usr/local/cuda/lib64", names, candidates);
  std::vector<std::string> prefixes = {environment("VIRTUAL_ENV"), environment("CONDA_PREFIX"),
                                       python_prefix(), "/usr/local", "/usr"};
  if (const std::string home = environment("HOME"); !home.empty()) prefixes.push_back(home + "/.local");
  for (auto prefix = prefixes.begin(); prefix != prefixes.end(); ++prefix)
    if (std::find(prefixes.begin(), prefix, *prefix) == prefix) add_wheels(*prefix, names, candidates);
  return candidates;
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace halfbyte::cuda

namespace halfbyte {

void add_site_packages(const std::string& directory) {
  HALFBYTE_CHECK(directory.starts_with('/'), usage,
                 "add_site_packages: directory must be absolute, got \"{}\"", directory);
  cuda::SitePackages& added = cuda::site_packages();
  const std::lock_guard lock(added.mutex);
  added.directories.emplace_back(directory);
}

}  // namespace halfbyte
