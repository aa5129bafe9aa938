// Preloaded: a file system without flags of renameat2 and, where PLAIN_RENAME_LINKS is not set, without hard
// links.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

extern "C" {

int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  if (flags == 0) return static_cast<int>(syscall(SYS_renameat2, from_directory, from, to_directory, to, 0));
  errno = EINVAL;
  return -1;
}

int link(const char* from, const char* to) noexcept {
  if (std::getenv("PLAIN_RENAME_LINKS"))
    return static_cast<int>(syscall(SYS_linkat, -100 /* AT_FDCWD */, from, -100, to, 0));
  errno = EPERM;
  return -1;
}

}  // extern "C"
