#include "io/file.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/directory.h"
#include "core/fork.h"
#include "core/system_call.h"
#include "io/replaced.h"

namespace halfbyte::io {
namespace {

constexpr size_t kMaxPrintableBytes = 200;
constexpr const char* kDescriptors = "/proc/self/fd/";  // of files without a name

[[noreturn]] void fail_io(std::string_view action, const std::string& path, int error) {
  const bool no_space = error == ENOSPC || error == EDQUOT || error == EFBIG;
  HALFBYTE_FAIL(io, "cannot {} \"{}\": {}{}", action, printable(path), no_space ? "no space: " : "",
                std::generic_category().message(error));
}

[[noreturn]] void fail_exists(const std::string& path, std::string_view what) {
  HALFBYTE_FAIL(exists, "output \"{}\" {}", printable(path), what);
}

// A NUL would silently end the path that the kernel sees.
const char* c_path(const std::string& path) {
  HALFBYTE_CHECK(path.find('\0') == std::string::npos, usage, "path \"{}\" contains a NUL byte",
                 printable(path));
  return path.c_str();
}

bool is_missing(int error) { return error == ENOENT || error == ENOTDIR; }

// Of what an output would replace, links not followed; 0 if there is nothing.
mode_t target_mode(const std::string& path) {
  struct stat status;
  if (retry_interrupted([&] { return ::lstat(c_path(path), &status); }) == 0) return status.st_mode;
  if (errno != ENOENT) fail_io("write", path, errno);
  return 0;
}

const char* kind_of(mode_t mode) {
  return S_ISREG(mode)    ? "a file"
         : S_ISDIR(mode)  ? "a directory"
         : S_ISLNK(mode)  ? "a link"
         : S_ISFIFO(mode) ? "a FIFO"
         : S_ISSOCK(mode) ? "a socket"
                          : "a device";
}

// No rename replaces one: it fails, but only after all the work.
bool is_mount_point(const std::string& path) {
  struct statx status, parent;
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, 0, &status) != 0) return false;
  if ((status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  // Linux before 5.8: a mount of the same file system elsewhere is not seen.
  return ::statx(AT_FDCWD, parent_of(path).c_str(), 0, 0, &parent) == 0 &&
         (status.stx_dev_major != parent.stx_dev_major || status.stx_dev_minor != parent.stx_dev_minor);
}

// Why a file is not put in the place of what is there; empty if it may be with force.
std::string why_not_replaced_by_file(const std::string& path, mode_t mode) {
  if (S_ISDIR(mode)) return "is an existing directory, and a file does not replace one";
  struct stat target;
  if (S_ISLNK(mode) && ::stat(path.c_str(), &target) == 0 && !S_ISREG(target.st_mode))
    return fmt::format("is a link to {}, which is never replaced", kind_of(target.st_mode));
  if (!S_ISLNK(mode) && !S_ISREG(mode)) return fmt::format("is {}, which is never replaced", kind_of(mode));
  return is_mount_point(path) ? "is a mount point, which cannot be replaced" : "";
}

// `entry`, which must be readable, lies in it: where the directory is not, the whole file system is synced.
void sync_directory(const std::string& path, const std::string& entry) {
  const auto open = [](const std::string& name, int flags) {
    return retry_interrupted([&] { return ::open(name.c_str(), O_RDONLY | O_CLOEXEC | flags); });
  };
  const Descriptor directory(open(path, O_DIRECTORY));
  int error = directory.fd < 0 ? errno : 0;
  if (error == 0 && retry_interrupted([&] { return ::fsync(directory.fd); }) < 0) error = errno;
  if (error == EACCES) {
    const Descriptor inside(open(entry, O_NOFOLLOW | O_NONBLOCK));
    error = inside.fd < 0 || retry_interrupted([&] { return ::syncfs(inside.fd); }) < 0 ? errno : 0;
  }
  // Some file systems cannot sync directories and say EINVAL.
  if (error != 0 && error != EINVAL) fail_io("sync directory", path, error);
}

// A directory and those below it, which `entry` stands for as above.
void sync_tree(const std::string& path, const std::string& entry) {
  for (const std::string& name : list_directory(path))
    if (is_directory(join(path, name))) sync_tree(join(path, name), entry);
  sync_directory(path, entry);
}

// Each returns 0 or errno.
int rename_flags(const std::string& from, const std::string& to, unsigned flags) {
  return retry_interrupted(
             [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags); }) == 0
             ? 0
             : errno;
}
int rename_plain(const std::string& from, const std::string& to) {
  return retry_interrupted([&] { return ::rename(from.c_str(), to.c_str()); }) == 0 ? 0 : errno;
}
// NFS and some FUSE file systems know no flags of renameat2.
bool flags_unsupported(int error) { return error == EINVAL || error == ENOSYS; }
// FAT and some FUSE file systems have no hard links.
bool links_unsupported(int error) { return error == EPERM || error == EOPNOTSUPP || error == ENOSYS; }

// Renames where nothing is there. A directory with content refuses by itself to be replaced. Of a file
// nothing but the look before it prevents that, and a lock of the directory that a run of halfbyte may have
// come between.
int rename_to_nothing(const std::string& temporary, const std::string& path) {
  const Descriptor directory{
      retry_interrupted([&] { return ::open(parent_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); })};
  // Others may lock it for as long as they like: they are not waited for without end.
  for (int attempt = 0; attempt < 1000 && directory.fd >= 0; ++attempt) {
    if (::flock(directory.fd, LOCK_EX | LOCK_NB) == 0 || (errno != EWOULDBLOCK && errno != EINTR)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  struct stat status;
  if (retry_interrupted([&] { return ::lstat(path.c_str(), &status); }) == 0) return EEXIST;
  return errno == ENOENT ? rename_plain(temporary, path) : errno;
}

// link() refuses an existing target just as atomically.
int publish_file(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_NOREPLACE);
  if (!flags_unsupported(error)) return error;
  if (retry_interrupted([&] { return ::link(temporary.c_str(), path.c_str()); }) != 0)
    return links_unsupported(errno) ? rename_to_nothing(temporary, path) : errno;
  ::unlink(temporary.c_str());
  return 0;
}

int publish_directory(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_NOREPLACE);
  return flags_unsupported(error) ? rename_to_nothing(temporary, path) : error;
}

// Afterwards the old directory, if there was one, is beside `temporary`, or has its name.
int exchange_directory(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_EXCHANGE);
  if (error == ENOENT) return publish_directory(temporary, path);
  if (!flags_unsupported(error)) return error;
  const std::string old = temporary + ".old";
  int plain_error = rename_plain(path, old);
  if (plain_error == ENOENT) return publish_directory(temporary, path);
  if (plain_error == 0) plain_error = rename_plain(temporary, path);
  // Also where moving it aside failed: a network file system may tell an error of what it has done.
  if (plain_error != 0) rename_plain(old, path);
  return plain_error;
}

// Whether something else, or nothing, has the name of what had this status.
bool is_gone(const std::string& path, const struct stat& before) {
  struct stat now;
  if (::lstat(path.c_str(), &now) != 0) return errno == ENOENT;
  return now.st_dev != before.st_dev || now.st_ino != before.st_ino;
}

void check_renamed(int error, const std::string& path) {
  if (error == 0) return;
  if (error == EEXIST || error == ENOTEMPTY || error == EISDIR || error == ENOTDIR)
    fail_exists(path, "was made by another process in the meantime");
  fail_io("rename the finished output to", path, error);
}

// Bytes of the UTF-8 sequence that starts `text` and its code point; 0 if it is invalid.
size_t decode_utf8(std::string_view text, uint32_t& code_point) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  code_point = lead;
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  code_point = lead & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code_point = code_point << 6 | (byte(i) & 0x3fu);
  }
  const bool overlong = (length == 3 && code_point < 0x800) || (length == 4 && code_point < 0x10000);
  const bool surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
  return overlong || surrogate || code_point > 0x10ffff ? 0 : length;
}

bool is_control(uint32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x61c || c == 0x200e || c == 0x200f ||
         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
}

std::string escape(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    uint32_t code_point = 0;
    const size_t length = decode_utf8(text.substr(i), code_point);
    if (length == 0) {
      out += fmt::format("\\x{:02x}", static_cast<uint8_t>(text[i]));
      ++i;
      continue;
    }
    if (is_control(code_point)) {
      out += code_point < 0x80 ? fmt::format("\\x{:02x}", code_point) : fmt::format("\\u{:04x}", code_point);
    } else {
      if (code_point == '"' || code_point == '\'' || code_point == '\\') out += '\\';
      out += text.substr(i, length);
    }
    i += length;
  }
  return out;
}

// In the cache of the Hugging Face hub, models--NAME/snapshots/REVISION/FILE is a link to ../../blobs/HASH, a
// file of the same repository. The target of the link if it is such a one; otherwise empty.
std::string blob_of(const std::string& dir, const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::string target = fs::read_symlink(join(dir, name), error).string();
  size_t levels = 0;  // up to the repository
  while (target.compare(3 * levels, 3, "../") == 0) ++levels;
  constexpr std::string_view kBlobs = "blobs/";
  if (error == std::errc::io_error) fail_io("read link", join(dir, name), error.value());
  if (error || levels < 2 || target.compare(3 * levels, kBlobs.size(), kBlobs) != 0) return "";
  const std::string blob = target.substr(3 * levels + kBlobs.size());
  if (blob.empty() || blob.starts_with('.') || blob.find('/') != std::string::npos) return "";
  fs::path snapshots = fs::canonical(dir, error);
  for (size_t i = 1; i < levels; ++i) snapshots = snapshots.parent_path();
  const fs::path repository = snapshots.parent_path();
  const bool is_cache = !error && snapshots.filename() == "snapshots" &&
                        repository.filename().string().starts_with("models--") &&
                        !fs::is_symlink(join(repository.native(), "blobs"), error);
  if (error == std::errc::io_error) fail_io("resolve", dir, error.value());
  return is_cache ? target : "";
}

}  // namespace

std::string printable(std::string_view text) {
  if (text.size() <= kMaxPrintableBytes) return escape(text);
  // Cut between characters: a UTF-8 sequence has at most 3 continuation bytes.
  const auto is_continuation = [&](size_t i) { return (static_cast<uint8_t>(text[i]) & 0xc0) == 0x80; };
  size_t head = kMaxPrintableBytes / 2, tail = text.size() - kMaxPrintableBytes / 2;
  for (int i = 0; i < 3 && is_continuation(head); ++i) --head;
  for (int i = 0; i < 3 && is_continuation(tail); ++i) ++tail;
  return fmt::format("{}...({} bytes)...{}", escape(text.substr(0, head)), text.size(),
                     escape(text.substr(tail)));
}

// ---- Input

struct InputFile::State {
  std::string path;
  struct stat stat = {};
  std::shared_ptr<const Descriptor> descriptor = {};  // guarded by that of Descriptors; null: closed
  uint64_t last_use = 0;

  State(std::string path, int fd);
  ~State();
};

// Those of all input files of the process.
struct InputFile::Descriptors {
  // Half of what the process may have, as it needs others.
  static size_t most() {
    constexpr size_t kMost = 64;
    struct rlimit limit;
    return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? std::min<size_t>(kMost, limit.rlim_cur / 2) : kMost;
  }

  ForkSafeMutex mutex;
  std::vector<State*> open;
  uint64_t num_uses = 0;

  static Descriptors& instance() {
    static auto& descriptors = *new Descriptors;  // never destroyed: files may be closed later
    return descriptors;
  }

  // Closes the one that was not used for the longest time. False if none is open.
  bool close_one() {
    const auto oldest = std::ranges::min_element(open, {}, &State::last_use);
    if (oldest == open.end()) return false;
    (*oldest)->descriptor.reset();  // whoever reads keeps it until then
    open.erase(oldest);
    return true;
  }

  // A descriptor, or a negative number with errno, as `call` gives it; others are closed where there are too
  // many.
  template <class Call>
  int open_with(const Call& call) {
    while (true) {
      const int fd = retry_interrupted(call);
      if (fd >= 0 || (errno != EMFILE && errno != ENFILE)) return fd;
      const int error = errno;
      const std::lock_guard lock(mutex);
      if (!close_one()) {
        errno = error;
        return fd;
      }
    }
  }

  void add(State& state, std::shared_ptr<const Descriptor> descriptor) {
    const std::lock_guard lock(mutex);
    if (state.descriptor) return;  // another thread was faster
    while (open.size() >= most() && close_one()) {
    }
    open.push_back(&state);
    state.descriptor = std::move(descriptor);
    state.last_use = ++num_uses;
  }

  std::shared_ptr<const Descriptor> use(State& state) {
    const std::lock_guard lock(mutex);
    state.last_use = ++num_uses;
    return state.descriptor;
  }

  void remove(State& state) {
    const std::lock_guard lock(mutex);
    std::erase(open, &state);
  }
};

namespace {

// O_NONBLOCK: opening a FIFO must not wait for its writer.
constexpr int kReadFlags = O_RDONLY | O_NONBLOCK | O_CLOEXEC;

// Error(bad_input) where the file is not that which was opened.
void check_same(const std::string& path, const struct stat& then, const struct stat& now) {
  const auto same = [](const timespec& a, const timespec& b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
  };
  const char* const what = "changed while reading: it";
  HALFBYTE_CHECK(now.st_dev == then.st_dev && now.st_ino == then.st_ino, bad_input,
                 "\"{}\" {} was replaced by another file", printable(path), what);
  HALFBYTE_CHECK(now.st_size == then.st_size, bad_input, "\"{}\" {} had {} bytes and has {} now",
                 printable(path), what, then.st_size, now.st_size);
  HALFBYTE_CHECK(same(now.st_mtim, then.st_mtim), bad_input, "\"{}\" {} was written to", printable(path),
                 what);
  HALFBYTE_CHECK(same(now.st_ctim, then.st_ctim), bad_input,
                 "\"{}\" {} was written to, renamed, linked, or got another owner or mode (ctime)",
                 printable(path), what);
}

[[noreturn]] void fail_removed(const std::string& path) {
  HALFBYTE_FAIL(bad_input, "\"{}\" changed while reading: it was removed", printable(path));
}

}  // namespace

InputFile::State::State(std::string its_path, int fd) : path(std::move(its_path)) {
  auto own = std::make_shared<const Descriptor>(fd);
  if (::fstat(fd, &stat) != 0) fail_io("stat", path, errno);
  HALFBYTE_CHECK(S_ISREG(stat.st_mode), bad_input, "\"{}\" is {}, not a regular file", printable(path),
                 kind_of(stat.st_mode));
  Descriptors::instance().add(*this, std::move(own));
}

InputFile::State::~State() { Descriptors::instance().remove(*this); }

InputFile::InputFile(int fd, std::string path) : state_(std::make_shared<State>(std::move(path), fd)) {}

const std::string& InputFile::path() const { return state_->path; }
const struct stat& InputFile::status() const { return state_->stat; }

InputFile InputFile::open(const std::string& path) {
  const int fd = Descriptors::instance().open_with([&] { return ::open(c_path(path), kReadFlags); });
  if (fd < 0) {
    HALFBYTE_CHECK(errno != ENXIO, bad_input, "\"{}\" is a socket or a device, not a regular file",
                   printable(path));
    fail_io("open", path, errno);
  }
  return InputFile(fd, path);
}

InputFile InputFile::open_beneath(const std::string& dir, const std::string& name) {
  HALFBYTE_CHECK(!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
                     name.find('\0') == std::string::npos,
                 bad_input, "file name \"{}\" is not the name of a file within directory \"{}\"",
                 printable(name), printable(dir));
  Descriptors& descriptors = Descriptors::instance();
  const Descriptor directory(
      descriptors.open_with([&] { return ::open(c_path(dir), O_PATH | O_DIRECTORY | O_CLOEXEC); }));
  if (directory.fd < 0) fail_io("open directory", dir, errno);
  std::string path = (dir.ends_with('/') ? dir : dir + '/') + name;
  const auto open = [&](const std::string& file) {
    return descriptors.open_with(
        [&] { return ::openat(directory.fd, file.c_str(), kReadFlags | O_NOFOLLOW); });
  };
  int fd = open(name);
  if (fd < 0 && errno == ELOOP) {
    const std::string blob = blob_of(dir, name);
    if (blob.empty()) refuse_link(path);
    fd = open(blob);
    HALFBYTE_CHECK(fd >= 0 || errno != ELOOP, bad_input, "\"{}\" is a link to a link", printable(path));
  }
  if (fd < 0) {
    HALFBYTE_CHECK(errno != ENOENT && errno != ENAMETOOLONG, bad_input, "\"{}\" does not exist",
                   printable(path));
    HALFBYTE_CHECK(errno != ENXIO, bad_input, "\"{}\" is a socket or a device, not a regular file",
                   printable(path));
    fail_io("open", path, errno);
  }
  return InputFile(fd, std::move(path));
}

bool InputFile::is_cache_link(const std::string& dir, const std::string& name) {
  return !blob_of(dir, name).empty();
}

void InputFile::refuse_link(const std::string& path) {
  HALFBYTE_FAIL(
      bad_input,
      "\"{}\" is a link, and below a model directory only those of a Hugging Face cache are followed, from "
      "models--NAME/snapshots/REVISION to ../../blobs (make a real copy with cp -rL)",
      printable(path));
}

void InputFile::read(uint64_t offset, std::span<std::byte> bytes) const {
  Descriptors& descriptors = Descriptors::instance();
  std::shared_ptr<const Descriptor> descriptor = descriptors.use(*state_);
  if (!descriptor) {
    const int fd = descriptors.open_with([&] { return ::open(path().c_str(), kReadFlags); });
    if (fd < 0 && errno == ENOENT) fail_removed(path());
    if (fd < 0) fail_io("open", path(), errno);
    descriptor = std::make_shared<const Descriptor>(fd);
    struct stat now;
    if (::fstat(fd, &now) != 0) fail_io("stat", path(), errno);
    check_same(path(), status(), now);
    descriptors.add(*state_, descriptor);
  }
  // One call transfers 2 GiB at most.
  while (!bytes.empty()) {
    const ssize_t count = retry_interrupted(
        [&] { return ::pread(descriptor->fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count < 0) fail_io(fmt::format("read at byte {} of", offset), path(), errno);
    HALFBYTE_CHECK(count > 0, bad_input,
                   "\"{}\" changed while reading: it had {} bytes, now it ends at byte {}", printable(path()),
                   size(), offset);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

void InputFile::check_unchanged() const {
  // By path, not descriptor: this sees also that another file took the name.
  struct stat now;
  if (retry_interrupted([&] { return ::stat(path().c_str(), &now); }) != 0) {
    if (!is_missing(errno)) fail_io("stat", path(), errno);
    fail_removed(path());
  }
  check_same(path(), status(), now);
}

std::string read_text(const InputFile& file, uint64_t max_bytes) {
  HALFBYTE_CHECK(file.size() <= max_bytes, bad_input, "\"{}\" has {} bytes, more than the limit of {}",
                 printable(file.path()), file.size(), max_bytes);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  file.check_unchanged();
  return text;
}

OutputFile::OutputFile(const std::string& path, uint64_t num_bytes, bool force, unsigned permissions)
    : force_(force), path_(path) {
  const mode_t mode = target_mode(path_);
  if (mode != 0) {
    if (const std::string why = why_not_replaced_by_file(path_, mode); !why.empty()) fail_exists(path_, why);
    if (!force_) fail_exists(path_, "exists, and replacing it was not asked for");
  }
  if (path_.empty() || path_.ends_with('/')) fail_io("write", path_, EISDIR);
  try {
    TemporaryFile made = make_temporary_file(path_, permissions);
    fd_ = made.fd;
    temporary_ = std::move(made.path);
  } catch (const std::system_error& error) {
    fail_io("create a temporary file for", path_, error.code().value());
  }
  const int error = reserve(num_bytes);
  if (error != 0) {
    discard();
    fail_io(fmt::format("reserve {} bytes for", num_bytes), path_, error);
  }
}

OutputFile::OutputFile(const OutputDirectory& directory, const std::string& name, uint64_t num_bytes)
    : directory_(&directory), force_(false), path_(join(directory.temporary_path(), name)) {
  directory.make_parents(name);
  temporary_ = path_;
  fd_ = retry_interrupted(
      [&] { return ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666); });
  if (fd_ < 0) fail_io("create", path_, errno);
  // Memory file systems look at each page: 0.2 s for a GiB that they have already.
  struct stat status;
  const bool is_reserved = ::fstat(fd_, &status) == 0 && static_cast<uint64_t>(status.st_size) == num_bytes &&
                           static_cast<uint64_t>(status.st_blocks) * 512 >= num_bytes;
  int error = is_reserved ? 0 : reserve(num_bytes);
  // What was reserved before may be more.
  if (error == 0 && retry_interrupted([&] { return ::ftruncate(fd_, static_cast<off_t>(num_bytes)); }) != 0)
    error = errno;
  if (error == 0) return;
  discard();
  fail_io(fmt::format("reserve {} bytes for", num_bytes), path_, error);
}

OutputFile::OutputFile(int fd, std::string path)
    : fd_(fd), force_(false), path_(std::move(path)), temporary_(fmt::format("{}{}", kDescriptors, fd)) {}

std::unique_ptr<OutputFile> OutputFile::unnamed(const std::string& directory, uint64_t num_bytes) {
  const std::string place = directory.empty() ? "memory" : directory;
  int fd = retry_interrupted([&] {
    return directory.empty() ? ::memfd_create("halfbyte", MFD_CLOEXEC)
                             : ::open(c_path(directory), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  });
  if (fd < 0 && !directory.empty() && (errno == EOPNOTSUPP || errno == EISDIR)) try {
      // Network file systems have none without a name: it loses its own at once.
      const TemporaryFile made = make_temporary_file(join(directory, "sample"), 0600);
      fd = made.fd;
      ::unlink(made.path.c_str());
    } catch (const std::system_error& error) {
      errno = error.code().value();
    }
  if (fd < 0) fail_io("create a file in", place, errno);
  std::unique_ptr<OutputFile> file(new OutputFile(fd, place));
  const int error = file->reserve(num_bytes);
  if (error != 0) fail_io(fmt::format("reserve {} bytes in", num_bytes), place, error);
  return file;
}

// Returns 0 or errno. fallocate, not posix_fallocate: that one writes to every block where the file
// system cannot reserve.
int OutputFile::reserve(uint64_t num_bytes) {
  if (num_bytes == 0) return 0;
  if (num_bytes > INT64_MAX) return EFBIG;
  const off_t length = static_cast<off_t>(num_bytes);
  if (retry_interrupted([&] { return ::fallocate(fd_, 0, 0, length); }) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) return errno;
  return retry_interrupted([&] { return ::ftruncate(fd_, length); }) == 0 ? 0 : errno;
}

// Unlocked last: another run may remove what is not locked, and take the name for another.
void OutputFile::discard() noexcept {
  const bool has_name = !temporary_.empty() && !temporary_.starts_with(kDescriptors);
  if (has_name && directory_ == nullptr) ::unlink(temporary_.c_str());
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  temporary_.clear();
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = retry_interrupted(
        [&] { return ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count <= 0) fail_io(fmt::format("write at byte {} of", offset), path_, count < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

// Nothing can stop fsync() of gigabytes: it finds them on the disk.
void OutputFile::write_back(const std::function<void()>& poll) {
  constexpr off_t kPart = off_t{16} << 20;
  constexpr off_t kAhead = 8 * kPart;  // so that the disk always has work
  constexpr unsigned kStart = SYNC_FILE_RANGE_WRITE;
  constexpr unsigned kWait = SYNC_FILE_RANGE_WAIT_BEFORE | kStart | SYNC_FILE_RANGE_WAIT_AFTER;
  struct stat status;
  if (::fstat(fd_, &status) != 0) fail_io("stat", path_, errno);
  for (off_t begin = -kAhead; begin < status.st_size; begin += kPart) {
    poll();
    const auto sync = [&](off_t at, unsigned flags) {
      return at < 0 || at >= status.st_size ||
             retry_interrupted([&] { return ::sync_file_range(fd_, at, kPart, flags); }) == 0;
    };
    if (sync(begin + kAhead, kStart) && sync(begin, kWait)) continue;
    // fsync() need not say an error again. Not every file system has the call.
    if (errno != EINVAL && errno != ENOSYS && errno != ESPIPE && errno != EOPNOTSUPP)
      fail_io("sync", path_, errno);
    return;
  }
  poll();
}

void OutputFile::sync(const std::function<void()>& poll) {
  if (poll) write_back(poll);
  if (retry_interrupted([&] { return ::fsync(fd_); }) < 0) fail_io("sync", path_, errno);
  synced_ = true;
}

void OutputFile::commit() {
  if (!synced_) sync();
  // Keeps the lock until the file has its name.
  const Descriptor lock{::fcntl(fd_, F_DUPFD_CLOEXEC, 0)};
  if (lock.fd < 0) fail_io("keep open", path_, errno);
  // Network file systems report late write errors here.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail_io("close", path_, errno);
  if (directory_ != nullptr) return;
  if (const mode_t mode = force_ ? target_mode(path_) : 0; mode != 0)
    if (const std::string why = why_not_replaced_by_file(path_, mode); !why.empty())
      fail_exists(path_, why + ": another process made it in the meantime");
  const std::string parent = parent_of(path_);  // want of memory must not be an error after the rename
  check_renamed(force_ ? rename_plain(temporary_, path_) : publish_file(temporary_, path_), path_);
  temporary_.clear();
  sync_directory(parent, path_);
}

OutputDirectory::OutputDirectory(const std::string& path, bool force, std::vector<std::string> side_files,
                                 std::unique_ptr<LockedDirectory> unfinished)
    : force_(force), path_(path), side_files_(std::move(side_files)), directory_(std::move(unfinished)) {
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
  check_replaced();
  if (path_.empty()) fail_io("make directory", path_, ENOENT);
  const bool has_output = directory_ != nullptr;
  try {
    if (!directory_) directory_ = std::make_unique<LockedDirectory>(path_);
  } catch (const std::system_error& error) {
    fail_io("create a temporary directory for", path_, error.code().value());
  }
  temporary_ = join(directory_->path(), kUnfinishedOutput);
  if (!has_output && retry_interrupted([&] { return ::mkdir(temporary_.c_str(), 0777); }) != 0)
    fail_io("create a temporary directory for", path_, errno);
}

OutputDirectory::OutputDirectory(const std::string& path, std::unique_ptr<LockedDirectory> joined)
    : force_(false),
      path_(path),
      temporary_(join(joined->path(), kUnfinishedOutput)),
      directory_(std::move(joined)) {}

OutputDirectory::FileSize OutputDirectory::size_of(const std::string& name) const {
  struct stat status;
  if (::lstat(join(temporary_, name).c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  return {static_cast<uint64_t>(status.st_size), static_cast<uint64_t>(status.st_blocks) * 512};
}

OutputDirectory::~OutputDirectory() = default;

void OutputDirectory::check_replaced() const {
  const mode_t mode = target_mode(path_);
  if (mode == 0) return;
  if (!S_ISDIR(mode)) fail_exists(path_, fmt::format("exists and is not a directory but {}", kind_of(mode)));
  if (!force_) fail_exists(path_, "exists, and replacing it was not asked for");
  if (is_mount_point(path_))
    fail_exists(path_, "is a mount point, which cannot be replaced: name a directory in it");
  check_replaceable(path_, side_files_);
  // What is moved to another directory must be writable.
  if (::faccessat(AT_FDCWD, path_.c_str(), W_OK | X_OK, AT_EACCESS) != 0)
    fail_io("replace directory", path_, errno);
}

void OutputDirectory::make_parents(const std::string& name) const {
  for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
    const std::string parent = "/" + name.substr(0, slash);
    const bool made = retry_interrupted([&] { return ::mkdir((temporary_ + parent).c_str(), 0777); }) == 0;
    if (!made && errno != EEXIST) fail_io("make directory", path_ + parent, errno);
  }
}

void OutputDirectory::check_space(uint64_t num_bytes, uint64_t num_files) const {
  struct statvfs space;
  // What a file system does not know, it says as 0.
  if (retry_interrupted([&] { return ::statvfs(temporary_.c_str(), &space); }) != 0 || space.f_blocks == 0)
    return;
  const uint64_t free_bytes = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  HALFBYTE_CHECK(num_bytes <= free_bytes, io,
                 "cannot write \"{}\": no space: it needs {} bytes, and its file system has {}",
                 printable(path_), num_bytes, free_bytes);
  HALFBYTE_CHECK(space.f_files == 0 || num_files <= space.f_favail, io,
                 "cannot write \"{}\": no space: it needs {} inodes, and its file system has {}",
                 printable(path_), num_files, space.f_favail);
}

void OutputDirectory::sync() {
  sync_tree(temporary_, temporary_);
  synced_ = true;
}

void OutputDirectory::sync_names() const {
  sync_tree(temporary_, temporary_);
  sync_directory(directory_->path(), temporary_);
  sync_directory(parent_of(directory_->path()), directory_->path());
}

void OutputDirectory::commit(const std::function<void()>& last) {
  if (!synced_) sync();
  if (force_) check_replaced();
  const bool has_old = force_ && target_mode(path_) != 0;
  const std::string parent = parent_of(path_), old = directory_->path();  // as in OutputFile::commit
  struct stat output;
  if (retry_interrupted([&] { return ::lstat(temporary_.c_str(), &output); }) != 0)
    fail_io("stat", temporary_, errno);
  if (last) last();
  const int rename_error =
      force_ ? exchange_directory(temporary_, path_) : publish_directory(temporary_, path_);
  // A network file system may tell an error of a rename that it has done.
  if (rename_error == 0 || is_gone(temporary_, output))
    directory_->set_kept(false);  // what is there now is the older output, if any
  check_renamed(rename_error, path_);
  sync_directory(parent, path_);
  const int error = directory_->remove();
  HALFBYTE_CHECK(!has_old || error == 0, io,
                 "output \"{}\" is complete, but its old content, in \"{}\", cannot be removed: {}",
                 printable(path_), printable(old), std::generic_category().message(error));
}

namespace {

// Whether there is something; its status. Links are followed.
bool find(const std::string& path, struct stat& status) {
  if (retry_interrupted([&] { return ::stat(c_path(path), &status); }) == 0) return true;
  if (!is_missing(errno)) fail_io("stat", path, errno);
  return false;
}

}  // namespace

bool same_file(const std::string& a, const std::string& b) {
  struct stat status_a, status_b;
  return find(a, status_a) && find(b, status_b) && status_a.st_dev == status_b.st_dev &&
         status_a.st_ino == status_b.st_ino;
}

std::vector<std::string> list_directory(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names = names_in(path, error);
  HALFBYTE_CHECK(!error, io, "cannot list directory \"{}\": {}", printable(path), error.message());
  return names;
}

bool is_directory(const std::string& path) {
  struct stat status;
  return find(path, status) && S_ISDIR(status.st_mode);
}

}  // namespace halfbyte::io
