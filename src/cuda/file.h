// What the files of compiled kernels (cache, packs) are read and written with.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/system_call.h"

namespace halfbyte::cuda {

// Integers are as in memory: little-endian.
inline void append_size(std::string& bytes, uint64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// False where not all bytes could be read: an error, or the file is shorter.
inline bool read_all(int fd, uint64_t offset, std::span<char> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = retry_interrupted(
        [&] { return ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return true;
}

inline bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = retry_interrupted([&] { return ::write(fd, bytes.data(), bytes.size()); });
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

}  // namespace halfbyte::cuda
