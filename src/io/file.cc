#include "io/file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/checks.h"

namespace halfbyte::io {
namespace {

constexpr size_t kMaxPrintableBytes = 200;

[[noreturn]] void fail_io(std::string_view action, const std::string& path, int error) {
  const bool no_space = error == ENOSPC || error == EDQUOT || error == EFBIG;
  HALFBYTE_FAIL(io, "cannot {} \"{}\": {}{}", action, printable(path), no_space ? "no space: " : "",
                std::generic_category().message(error));
}

[[noreturn]] void fail_exists(const std::string& path, const char* what) {
  HALFBYTE_FAIL(exists, "output \"{}\" {}", printable(path), what);
}

// A NUL would silently end the path that the kernel sees.
const char* c_path(const std::string& path) {
  HALFBYTE_CHECK(path.find('\0') == std::string::npos, usage, "path \"{}\" contains a NUL byte",
                 printable(path));
  return path.c_str();
}

// st_mode of what an output would replace, links not followed; 0 if there is nothing.
mode_t target_mode(const std::string& path) {
  struct stat status;
  if (::lstat(c_path(path), &status) == 0) return status.st_mode;
  if (errno != ENOENT) fail_io("write", path, errno);
  return 0;
}

// Calls a system call until no signal interrupts it.
template <class Call>
auto retry(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

void sync_directory(const std::string& path) {
  const Descriptor directory{retry([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); })};
  if (directory.fd < 0) fail_io("open directory", path, errno);
  // Some file systems cannot sync directories and say EINVAL.
  if (retry([&] { return ::fsync(directory.fd); }) < 0 && errno != EINVAL)
    fail_io("sync directory", path, errno);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// ".NAME.halfbyte-PID-RANDOM" beside `path`; a long name is cut to stay below NAME_MAX.
std::string temporary_sibling(const std::string& path) {
  uint64_t random = 0;
  if (retry([&] { return ::getrandom(&random, sizeof random, 0); }) != sizeof random)
    fail_io("get random bytes for", path, errno);
  const std::string name = path.substr(path.rfind('/') + 1).substr(0, 200);
  return fmt::format("{}/.{}.halfbyte-{}-{:016x}", parent_of(path), name, ::getpid(), random);
}

// Each returns 0 or errno.
int rename_flags(const std::string& from, const std::string& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}
int rename_plain(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}
// NFS and some FUSE file systems know no flags of renameat2.
bool flags_unsupported(int error) { return error == EINVAL || error == ENOSYS; }

// link() refuses an existing target just as atomically.
int publish_file(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_NOREPLACE);
  if (!flags_unsupported(error)) return error;
  if (::link(temporary.c_str(), path.c_str()) != 0) return errno;
  ::unlink(temporary.c_str());
  return 0;
}

// rename() itself refuses a target that is a file or a directory with content.
int publish_directory(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_NOREPLACE);
  if (!flags_unsupported(error)) return error;
  struct stat status;
  if (::lstat(path.c_str(), &status) == 0) return EEXIST;
  return rename_plain(temporary, path);
}

// Afterwards `temporary` is the old directory, if there was one.
int exchange_directory(const std::string& temporary, const std::string& path) {
  const int error = rename_flags(temporary, path, RENAME_EXCHANGE);
  if (error == ENOENT) return publish_directory(temporary, path);
  if (!flags_unsupported(error)) return error;
  const std::string old = temporary_sibling(path);
  const int aside_error = rename_plain(path, old);
  if (aside_error == ENOENT) return publish_directory(temporary, path);
  if (aside_error != 0) return aside_error;
  const int rename_error = rename_plain(temporary, path);
  if (rename_error != 0) {
    rename_plain(old, path);
    return rename_error;
  }
  return rename_plain(old, temporary);
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
  const std::string target = fs::read_symlink(fs::path(dir) / name, error).string();
  size_t levels = 0;  // up to the repository
  while (target.compare(3 * levels, 3, "../") == 0) ++levels;
  constexpr std::string_view kBlobs = "blobs/";
  if (error || levels < 2 || target.compare(3 * levels, kBlobs.size(), kBlobs) != 0) return "";
  const std::string blob = target.substr(3 * levels + kBlobs.size());
  if (blob.empty() || blob.starts_with('.') || blob.find('/') != std::string::npos) return "";
  fs::path snapshots = fs::canonical(dir, error);
  for (size_t i = 1; i < levels; ++i) snapshots = snapshots.parent_path();
  const fs::path repository = snapshots.parent_path();
  const bool is_cache = !error && snapshots.filename() == "snapshots" &&
                        repository.filename().string().starts_with("models--") &&
                        !fs::is_symlink(repository / "blobs", error);
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

InputFile::InputFile(int fd, std::string path) : InputFile() {
  fd_ = fd;
  path_ = std::move(path);
  if (::fstat(fd_, &stat_) != 0) fail_io("stat", path_, errno);
  HALFBYTE_CHECK(S_ISREG(stat_.st_mode), bad_input, "\"{}\" is {}, not a regular file", printable(path_),
                 S_ISDIR(stat_.st_mode)    ? "a directory"
                 : S_ISFIFO(stat_.st_mode) ? "a FIFO"
                                           : "a device");
}

InputFile InputFile::open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const int fd = retry([&] { return ::open(c_path(path), O_RDONLY | O_NONBLOCK | O_CLOEXEC); });
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
  const Descriptor directory{retry([&] { return ::open(c_path(dir), O_PATH | O_DIRECTORY | O_CLOEXEC); })};
  if (directory.fd < 0) fail_io("open directory", dir, errno);
  std::string path = (dir.ends_with('/') ? dir : dir + '/') + name;
  const auto open = [&](const std::string& file) {
    return retry(
        [&] { return ::openat(directory.fd, file.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC); });
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

InputFile::InputFile(InputFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), stat_(other.stat_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(stat_, other.stat_);
  return *this;
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void InputFile::read(uint64_t offset, std::span<std::byte> bytes) const {
  // One call transfers 2 GiB at most.
  while (!bytes.empty()) {
    const ssize_t count =
        retry([&] { return ::pread(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count < 0) fail_io(fmt::format("read at byte {} of", offset), path_, errno);
    HALFBYTE_CHECK(count > 0, bad_input,
                   "\"{}\" changed while reading: it had {} bytes, now it ends at byte {}", printable(path_),
                   size(), offset);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

void InputFile::check_unchanged() const {
  // By path, not descriptor: this sees also that another file took the name.
  struct stat now;
  const bool found = ::stat(path_.c_str(), &now) == 0;
  HALFBYTE_CHECK(found, bad_input, "\"{}\" changed while reading: it was removed", printable(path_));
  HALFBYTE_CHECK(now.st_dev == stat_.st_dev && now.st_ino == stat_.st_ino, bad_input,
                 "\"{}\" changed while reading: it was replaced by another file", printable(path_));
  HALFBYTE_CHECK(now.st_size == stat_.st_size, bad_input,
                 "\"{}\" changed while reading: it had {} bytes and has {} now", printable(path_),
                 stat_.st_size, now.st_size);
  HALFBYTE_CHECK(now.st_mtim.tv_sec == stat_.st_mtim.tv_sec && now.st_mtim.tv_nsec == stat_.st_mtim.tv_nsec,
                 bad_input, "\"{}\" changed while reading: it was written to", printable(path_));
}

std::string read_text(const InputFile& file, uint64_t max_bytes) {
  HALFBYTE_CHECK(file.size() <= max_bytes, bad_input, "\"{}\" has {} bytes, more than the limit of {}",
                 printable(file.path()), file.size(), max_bytes);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

OutputFile::OutputFile(const std::string& path, uint64_t num_bytes, bool force) : force_(force), path_(path) {
  const mode_t mode = target_mode(path_);
  if (S_ISDIR(mode)) fail_exists(path_, "is an existing directory");
  if (mode != 0 && !force_) fail_exists(path_, "exists, and replacing it was not asked for");
  if (path_.empty() || path_.ends_with('/')) fail_io("write", path_, EISDIR);
  temporary_ = temporary_sibling(path_);
  fd_ = retry(
      [&] { return ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666); });
  if (fd_ < 0) fail_io("create a temporary file for", path_, errno);
  const int error = reserve(num_bytes);
  if (error != 0) {
    discard();
    fail_io(fmt::format("reserve {} bytes for", num_bytes), path_, error);
  }
}

// Returns 0 or errno. fallocate, not posix_fallocate: that one writes to every block where the file
// system cannot reserve.
int OutputFile::reserve(uint64_t num_bytes) {
  if (num_bytes == 0) return 0;
  if (num_bytes > INT64_MAX) return EFBIG;
  const off_t length = static_cast<off_t>(num_bytes);
  if (retry([&] { return ::fallocate(fd_, 0, 0, length); }) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) return errno;
  return retry([&] { return ::ftruncate(fd_, length); }) == 0 ? 0 : errno;
}

void OutputFile::discard() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count =
        retry([&] { return ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (count < 0) fail_io(fmt::format("write at byte {} of", offset), path_, errno);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

void OutputFile::sync() {
  if (retry([&] { return ::fsync(fd_); }) < 0) fail_io("sync", path_, errno);
  synced_ = true;
}

void OutputFile::commit() {
  if (!synced_) sync();
  // Network file systems report late write errors here.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail_io("close", path_, errno);
  check_renamed(force_ ? rename_plain(temporary_, path_) : publish_file(temporary_, path_), path_);
  temporary_.clear();
  sync_directory(parent_of(path_));
}

OutputDirectory::OutputDirectory(const std::string& path, bool force) : force_(force), path_(path) {
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
  const mode_t mode = target_mode(path_);
  if (mode != 0 && !S_ISDIR(mode)) fail_exists(path_, "exists and is not a directory");
  if (mode != 0 && !force_) fail_exists(path_, "exists, and replacing it was not asked for");
  if (path_.empty()) fail_io("make directory", path_, ENOENT);
  temporary_ = temporary_sibling(path_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) fail_io("create a temporary directory for", path_, errno);
}

OutputDirectory::~OutputDirectory() {
  std::error_code ignored;
  if (!temporary_.empty()) std::filesystem::remove_all(temporary_, ignored);
}

void OutputDirectory::commit() {
  sync_directory(temporary_);
  check_renamed(force_ ? exchange_directory(temporary_, path_) : publish_directory(temporary_, path_), path_);
  sync_directory(parent_of(path_));
  const std::string old = std::exchange(temporary_, {});
  std::error_code error;
  if (force_) std::filesystem::remove_all(old, error);
  HALFBYTE_CHECK(!error, io,
                 "output \"{}\" is complete, but its old content, now \"{}\", cannot be removed: {}",
                 printable(path_), printable(old), error.message());
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat status_a, status_b;
  return ::stat(a.c_str(), &status_a) == 0 && ::stat(b.c_str(), &status_b) == 0 &&
         status_a.st_dev == status_b.st_dev && status_a.st_ino == status_b.st_ino;
}

}  // namespace halfbyte::io
