// What the targets share. Each is a file here with LLVMFuzzerTestOneInput: with clang's libFuzzer, or with
// driver.cc, which knows its command line no more than it needs.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "halfbyte/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace halfbyte::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Ends the process: a finding.
[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "FINDING: %s\n", what);
  std::abort();
}

// To refuse an input is as good as to take it, but for a reason that is no fault of the input.
template <class Body>
bool attempt(const Body& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::bug) fail(error.what());
    return false;
  }
}

// A file in memory that the library opens by its path.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(fd_)) {
    if (fd_ < 0 || ::fchmod(fd_, 0600) != 0) fail("no memory file");
  }
  // `text`, then zeros up to `size`.
  void set(std::string_view text, size_t size) {
    if (::ftruncate(fd_, 0) != 0 || ::ftruncate(fd_, static_cast<off_t>(size)) != 0 ||
        ::pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
      fail("cannot write a memory file");
  }
  void set(std::string_view text) { set(text, text.size()); }
  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

// The end of the data that the header of a file speaks of: the largest number before a `]`, at most 2^20.
inline uint64_t end_of_data(std::string_view json) {
  uint64_t end = 0, number = 0;
  for (const char c : json) {
    if (c >= '0' && c <= '9') {
      number = std::min<uint64_t>(10 * number + static_cast<uint64_t>(c - '0'), uint64_t{1} << 20);
      continue;
    }
    if (c == ']') end = std::max(end, number);
    number = 0;
  }
  return end;
}

inline std::string length_prefix(size_t size) {
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix += static_cast<char>(size >> (8 * i) & 0xff);
  return prefix;
}

}  // namespace halfbyte::fuzz
