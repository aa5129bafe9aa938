#include "core/directory.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <string_view>

namespace halfbyte {

std::vector<std::string> names_in(const std::string& directory, std::error_code& error) {
  struct Close {
    void operator()(DIR* open) const { ::closedir(open); }
  };
  error.clear();
  std::vector<std::string> names;
  std::unique_ptr<DIR, Close> entries;
  do {
    entries.reset(::opendir(directory.c_str()));
  } while (!entries && errno == EINTR);
  if (!entries && errno == ENOMEM) throw std::bad_alloc();
  // An error and the end are told apart by errno alone.
  while (entries && (errno = 0) == 0) {
    const dirent* const entry = ::readdir(entries.get());  // NOLINT(concurrency-mt-unsafe): of `entries`
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) {
    error.assign(errno, std::generic_category());
    return {};
  }
  std::ranges::sort(names);
  return names;
}

std::string join(std::string_view directory, std::string_view name) {
  std::string path(directory);
  if (!path.ends_with('/')) path += '/';
  return path += name;
}

}  // namespace halfbyte
