// What the stand-ins for libcuda and NVRTC share. They are told by environment variables what to do.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace stub {

// What the stub NVRTC makes: this, the size of the rest in 8 digits, a line break, the rest.
inline constexpr std::string_view kMagic = "stub cubin ";

inline int number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

inline std::string text(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

inline uint64_t fnv1a(std::string_view bytes, uint64_t hash = 0xcbf29ce484222325u) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

// Appends a line to the file STUB_LOG, whole even where processes do it at once.
inline void log(const std::string& line) {
  const int fd = ::open(text("STUB_LOG").c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string bytes = line + "\n";
  if (::write(fd, bytes.data(), bytes.size()) < 0) std::abort();
  ::close(fd);
}

}  // namespace stub
