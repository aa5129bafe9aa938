#include "core/temporary.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "core/system_call.h"

namespace halfbyte {
namespace {

constexpr std::string_view kMark = ".halfbyte-";
constexpr const char* kLock = "lock";
constexpr const char* kInUse = "a run that has not ended uses it";
constexpr size_t kRandomDigits = 16;
// Of NAME. With what is around it, this fits into the 143 bytes that eCryptfs leaves of a name.
constexpr size_t kMaxNameBytes = 100;
// A name that is taken, or a file that a cleaning run has removed before it was locked, is tried again.
constexpr int kMaxAttempts = 100;

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

// The beginning of a name, whole UTF-8 sequences: some file systems refuse others.
std::string_view name_part(std::string_view name) {
  if (name.size() <= kMaxNameBytes) return name;
  size_t end = kMaxNameBytes;
  for (int i = 0; i < 3 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80; ++i) --end;
  return name.substr(0, end);
}

std::string temporary_sibling(const std::string& path) {
  uint64_t random = 0;
  const ssize_t count = retry_interrupted([&] { return ::getrandom(&random, sizeof random, 0); });
  if (count != sizeof random) fail(count < 0 ? errno : EIO);
  const std::string_view name = name_part(std::string_view(path).substr(path.rfind('/') + 1));
  return fmt::format("{}/.{}{}{}-{:0{}x}", parent_of(path), name, kMark, ::getpid(), random, kRandomDigits);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex_digit(char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); }

// NAME of ".NAME.halfbyte-PID-RANDOM"; empty for any other.
std::string_view name_of_temporary(std::string_view name) {
  const size_t mark = name.rfind(kMark);
  if (!name.starts_with('.') || mark == std::string_view::npos || mark < 2) return {};
  const std::string_view tail = name.substr(mark + kMark.size());
  const size_t dash = tail.find('-');
  if (dash == std::string_view::npos || dash == 0) return {};
  const std::string_view pid = tail.substr(0, dash), random = tail.substr(dash + 1);
  const bool is_one = std::ranges::all_of(pid, is_digit) && random.size() == kRandomDigits &&
                      std::ranges::all_of(random, is_hex_digit);
  return is_one ? name.substr(1, mark - 1) : std::string_view();
}

// Whether a file of this process still has a name: a cleaning run may have taken it for abandoned.
bool has_name(int fd) {
  struct stat status;
  return ::fstat(fd, &status) != 0 || status.st_nlink > 0;
}

// False where another process holds it. A file system without locks locks nothing.
bool lock_new(int fd, int kind = LOCK_EX) {
  return retry_interrupted([&] { return ::flock(fd, kind | LOCK_NB); }) == 0 || errno != EWOULDBLOCK;
}

// Each of the following removes entries of an open directory, so that nobody can lead it elsewhere. They
// return 0 or errno, that of the first entry which could not be removed.
int remove_entry(int directory, const char* name) noexcept;

// Allocates nothing: it cleans up after want of memory too.
int remove_entries(int directory, const char* but) noexcept {
  alignas(dirent64) char buffer[4096];
  // What is removed may hide what comes behind it, so again until there is nothing to remove.
  for (bool removed_one = true; removed_one;) {
    removed_one = false;
    if (::lseek(directory, 0, SEEK_SET) < 0) return errno;
    int first = 0;
    for (;;) {
      const ssize_t count = retry_interrupted([&] { return ::getdents64(directory, buffer, sizeof buffer); });
      if (count < 0) return errno;
      if (count == 0) break;
      for (ssize_t at = 0; at < count;) {
        const auto* entry = reinterpret_cast<const dirent64*>(buffer + at);
        at += entry->d_reclen;
        const std::string_view name = entry->d_name;
        if (name == "." || name == ".." || (but && name == but)) continue;
        const int error = remove_entry(directory, entry->d_name);
        removed_one = removed_one || error == 0;
        if (first == 0) first = error;
      }
    }
    if (!removed_one) return first;
  }
  return 0;
}

int remove_entry(int directory, const char* name) noexcept {
  if (retry_interrupted([&] { return ::unlinkat(directory, name, 0); }) == 0 || errno == ENOENT) return 0;
  if (errno != EISDIR && errno != EPERM) return errno;
  const int unlink_error = errno;
  const int below = retry_interrupted(
      [&] { return ::openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
  if (below < 0) return errno == ENOTDIR ? unlink_error : errno;
  const int error = remove_entries(below, nullptr);
  ::close(below);
  if (error != 0) return error;
  const bool removed = retry_interrupted([&] { return ::unlinkat(directory, name, AT_REMOVEDIR); }) == 0;
  return removed || errno == ENOENT ? 0 : errno;
}

// The lock goes after what it stands for, so that what is left of an interrupted removal is still known.
int remove_locked(int directory, const std::string& path) noexcept {
  const int error = remove_entries(directory, kLock);
  if (error != 0) return error;
  if (const int lock_error = remove_entry(directory, kLock); lock_error != 0) return lock_error;
  const bool removed = retry_interrupted([&] { return ::rmdir(path.c_str()); }) == 0;
  return removed || errno == ENOENT ? 0 : errno;
}

// File systems that only this machine writes to. On others a lock may be of one machine alone.
bool is_local(int fd) {
  constexpr uint32_t kLocal[] = {EXT4_SUPER_MAGIC,      XFS_SUPER_MAGIC,
                                 BTRFS_SUPER_MAGIC,     TMPFS_MAGIC,
                                 RAMFS_MAGIC,           F2FS_SUPER_MAGIC,
                                 MSDOS_SUPER_MAGIC,     EXFAT_SUPER_MAGIC,
                                 OVERLAYFS_SUPER_MAGIC, ECRYPTFS_SUPER_MAGIC,
                                 0x2fc12fc1 /* ZFS */,  0x7366746e /* NTFS3 */,
                                 0x3153464a /* JFS */,  0xca451a4e /* bcachefs */};
  struct statfs status;
  return retry_interrupted([&] { return ::fstatfs(fd, &status); }) == 0 &&
         std::ranges::find(kLocal, static_cast<uint32_t>(status.f_type)) != std::end(kLocal);
}

// Why a lock cannot be had that shows that nobody uses what it is of, or with `on_this_machine` nobody here;
// empty: it is held now.
std::string why_not_locked(int fd, bool on_this_machine = false) {
  if (!on_this_machine && !is_local(fd))
    return "other machines may use its file system, so whether a run needs it is not known";
  if (retry_interrupted([&] { return ::flock(fd, LOCK_EX | LOCK_NB); }) == 0) return "";
  return errno == EWOULDBLOCK
             ? kInUse
             : fmt::format("it cannot be locked: {}", std::generic_category().message(errno));
}

bool is_same(int directory, const std::string& name, const struct stat& status) {
  struct stat now;
  return ::fstatat(directory, name.c_str(), &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_dev == status.st_dev &&
         now.st_ino == status.st_ino;
}

LeftoverState kept(std::string why) { return {false, std::move(why)}; }
LeftoverState kept(int error) {
  return error == ENOENT ? LeftoverState{true, ""} : kept(std::generic_category().message(error));
}

LeftoverState remove_leftover_file(int parent, const std::string& name, const std::string& output_name,
                                   int fd, const struct stat& status) {
  // Where a link stands in for a rename, a run ended between the two names: it is complete, and has both.
  const bool published = status.st_nlink == 2 && is_same(parent, output_name, status);
  if (status.st_nlink != 1 && !published) return kept("it has other names too");
  if (std::string why = why_not_locked(fd); !why.empty()) return kept(std::move(why));
  if (!is_same(parent, name, status)) return {true, ""};
  const int error = remove_entry(parent, name.c_str());
  return error == 0 ? LeftoverState{} : kept(error);
}

int open_lock(int directory) {
  return retry_interrupted(
      [&] { return ::openat(directory, kLock, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); });
}
// Why it is none of a LockedDirectory of this status; empty if it is.
std::string why_no_lock(int lock, const struct stat& directory) {
  struct stat status;
  if (::fstat(lock, &status) != 0) return std::generic_category().message(errno);
  const bool is_one = S_ISREG(status.st_mode) && status.st_uid == directory.st_uid && status.st_size == 0;
  return is_one ? "" : "its file \"lock\" is not one of halfbyte's";
}

// Whether a run can go on with what a directory holds.
bool is_unfinished(int directory) {
  struct stat journal, output;
  return ::fstatat(directory, kJournal, &journal, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(journal.st_mode) &&
         ::fstatat(directory, kUnfinishedOutput, &output, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISDIR(output.st_mode);
}

LeftoverState remove_leftover_directory(int parent, const std::string& name, int fd,
                                        const struct stat& status, bool discards) {
  const Descriptor lock{open_lock(fd)};
  if (lock.fd < 0 && errno != ENOENT) return kept(errno);
  bool unfinished = false;
  if (lock.fd >= 0) {
    if (std::string why = why_no_lock(lock.fd, status); !why.empty()) return kept(std::move(why));
    unfinished = is_unfinished(fd);
    // What is asked for by name needs no proof that other machines do not use it.
    std::string why = why_not_locked(lock.fd, unfinished && discards);
    if (why.empty() && unfinished && !discards) why = "it is unfinished, and some of its files are complete";
    if (!why.empty()) return {false, std::move(why), unfinished};
    if (!is_same(parent, name, status)) return {true, ""};
    if (const int error = remove_entries(fd, kLock); error != 0) return kept(error);
    if (const int error = remove_entry(fd, kLock); error != 0) return kept(error);
  }
  // Without its lock it is one of ours only while it is empty: a run ended between two calls.
  if (retry_interrupted([&] { return ::unlinkat(parent, name.c_str(), AT_REMOVEDIR); }) == 0)
    return {false, "", unfinished};
  return errno == ENOTEMPTY || errno == EEXIST ? kept("it has no file \"lock\", so it may not be halfbyte's")
                                               : kept(errno);
}

}  // namespace

bool is_temporary_name(std::string_view name) { return !name_of_temporary(name).empty(); }

bool is_temporary_name_of(std::string_view name, std::string_view output_name) {
  const std::string_view part = name_of_temporary(name);
  return !part.empty() && part == name_part(output_name);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

TemporaryFile make_temporary_file(const std::string& path, unsigned mode) {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    std::string name = temporary_sibling(path);
    const int fd = retry_interrupted(
        [&] { return ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode); });
    if (fd < 0 && errno != EEXIST) fail(errno);
    if (fd < 0) continue;
    if (lock_new(fd) && has_name(fd)) return {fd, std::move(name)};
    ::close(fd);
  }
  fail(EEXIST);
}

LockedDirectory::LockedDirectory(const std::string& path) {
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    path_ = temporary_sibling(path);
    if (retry_interrupted([&] { return ::mkdir(path_.c_str(), 0700); }) != 0) {
      if (errno != EEXIST) fail(errno);
      continue;
    }
    directory_ = retry_interrupted(
        [&] { return ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); });
    if (directory_ >= 0)
      lock_ = retry_interrupted([&] {
        return ::openat(directory_, kLock, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
      });
    const int error = lock_ < 0 ? errno : 0;
    if (error == 0 && lock_new(lock_) && has_name(lock_)) return;
    close();
    if (error != 0 && error != ENOENT) {  // ENOENT: a cleaning run saw it while it was empty
      ::rmdir(path_.c_str());
      fail(error);
    }
  }
  fail(EEXIST);
}

LockedDirectory::~LockedDirectory() {
  if (is_kept_)
    close();
  else
    remove();
}

int LockedDirectory::remove() noexcept {
  int error = 0;
  if (directory_ >= 0) error = remove_locked(directory_, path_);
  close();
  path_.clear();
  return error;
}

void LockedDirectory::close() noexcept {
  for (int* fd : {&lock_, &directory_})
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
}

std::unique_ptr<LockedDirectory> LockedDirectory::take_over(const std::string& path, std::string& why_not) {
  return open(path, LOCK_EX, why_not);
}

std::unique_ptr<LockedDirectory> LockedDirectory::join(const std::string& path, std::string& why_not) {
  return open(path, LOCK_SH, why_not);
}

void LockedDirectory::share() {
  // Linux gives up one lock before it takes the other. Who comes between finds a journal, and keeps what it
  // is of.
  const bool is_shared = retry_interrupted([&] { return ::flock(lock_, LOCK_SH | LOCK_NB); }) == 0;
  if (!is_shared && errno == EWOULDBLOCK) fail(errno);
}

std::unique_ptr<LockedDirectory> LockedDirectory::open(const std::string& path, int lock_kind,
                                                       std::string& why_not) {
  const auto refuse = [&](std::string why) {
    why_not = std::move(why);
    return nullptr;
  };
  Descriptor directory{retry_interrupted(
      [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); })};
  struct stat status;
  if (directory.fd < 0 || ::fstat(directory.fd, &status) != 0)
    return refuse(std::generic_category().message(errno));
  if (status.st_uid != ::geteuid())
    return refuse(fmt::format("it belongs to user {}, not {}", status.st_uid, ::geteuid()));
  Descriptor lock{open_lock(directory.fd)};
  if (lock.fd < 0) return refuse(std::generic_category().message(errno));
  if (std::string why = why_no_lock(lock.fd, status); !why.empty()) return refuse(std::move(why));
  // A file system without locks locks nothing, as when it was made.
  if (!lock_new(lock.fd, lock_kind)) return refuse(kInUse);
  if (!has_name(lock.fd)) return refuse("another run has removed it");
  std::unique_ptr<LockedDirectory> taken(new LockedDirectory);
  taken->path_ = path;
  taken->is_kept_ = true;
  taken->directory_ = std::exchange(directory.fd, -1);
  taken->lock_ = std::exchange(lock.fd, -1);
  return taken;
}

LeftoverState remove_leftover(const std::string& directory, const std::string& name,
                              const std::string& output_name, bool discards) {
  const Descriptor parent{
      retry_interrupted([&] { return ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); })};
  if (parent.fd < 0) return kept(errno);
  struct stat status;
  if (::fstatat(parent.fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return kept(errno);
  if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
    return kept("it is neither a file nor a directory");
  if (status.st_uid != ::geteuid())
    return kept(fmt::format("it belongs to user {}, not {}", status.st_uid, ::geteuid()));
  const bool is_directory = S_ISDIR(status.st_mode);
  const int flags = is_directory ? O_RDONLY | O_DIRECTORY : O_RDWR;  // NFS locks only what may be written
  const Descriptor found{retry_interrupted(
      [&] { return ::openat(parent.fd, name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); })};
  if (found.fd < 0) return kept(errno);
  struct stat opened;
  if (::fstat(found.fd, &opened) != 0) return kept(errno);
  if (opened.st_dev != status.st_dev || opened.st_ino != status.st_ino) return {true, ""};
  return is_directory ? remove_leftover_directory(parent.fd, name, found.fd, opened, discards)
                      : remove_leftover_file(parent.fd, name, output_name, found.fd, opened);
}

}  // namespace halfbyte
