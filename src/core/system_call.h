// What every use of system calls needs.
#pragma once

#include <unistd.h>

#include <cerrno>

namespace halfbyte {

// Calls a system call until no signal interrupts it. Its result; errno as it left it.
template <class Call>
auto retry_interrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Closed at the end.
struct Descriptor {
  int fd = -1;
  explicit Descriptor(int opened) : fd(opened) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace halfbyte
