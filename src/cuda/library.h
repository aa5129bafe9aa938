// Shared libraries that are found while the program runs.
#pragma once

#include <dlfcn.h>

#include <string>

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

// 13000 -> "13.0": versions of CUDA are 1000 * major + 10 * minor.
std::string version_text(int version);

}  // namespace halfbyte::cuda
