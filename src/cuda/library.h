// Shared libraries that are found while the program runs.
#pragma once

#include <dlfcn.h>

#include <span>
#include <string>
#include <vector>

namespace halfbyte::cuda {

// Never closed: threads and destructors may be in its code until the process ends.
class Library {
 public:
  // `name` with a slash is a path; without one it is looked for as the loader does.
  explicit Library(const std::string& name);

  // Why it could not be opened; empty if it is open.
  const std::string& problem() const { return problem_; }
  // False if it has no such function.
  template <class Function>
  bool find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    return function != nullptr;
  }
  // The file that a function of it comes from.
  template <class Function>
  std::string path_of(Function* function) const {
    Dl_info info;
    const bool found = dladdr(reinterpret_cast<void*>(function), &info) != 0 && info.dli_fname != nullptr;
    return found ? info.dli_fname : name_;
  }

 private:
  std::string name_, problem_;
  void* handle_;
};

// The value of an environment variable, "" where it is not set.
std::string environment(const char* name);

// Where a library of the CUDA toolkit may be, in search order: the environment variable (then nothing else);
// the nvidia wheels in what add_site_packages (device.hpp) was given; its names, as the loader finds them;
// CUDA_HOME, /usr/local/cuda; the nvidia wheels in the site-packages of VIRTUAL_ENV, CONDA_PREFIX, the
// python3 on PATH, /usr/local, /usr and ~/.local.
std::vector<std::string> library_candidates(const char* variable, std::span<const char* const> names);

// The first of library_candidates of which `load(name, found)` says no problem; else a Found whose `problem`
// is what was tried. `what`: "cuBLAS".
template <class Found, class Load>
Found search_libraries(const std::string& what, const char* variable, std::span<const char* const> names,
                       const Load& load) {
  std::string tried;
  for (const std::string& name : library_candidates(variable, names)) {
    Found found;
    const std::string problem = load(name, found);
    if (problem.empty()) return found;
    tried += (tried.empty() ? "" : "; ") + problem;
  }
  Found none;
  none.problem = "no " + what + " (" + variable + " may give its path). Tried: " + tried;
  return none;
}

// 13000 -> "13.0": versions of CUDA are 1000 * major + 10 * minor.
std::string version_text(int version);

}  // namespace halfbyte::cuda
