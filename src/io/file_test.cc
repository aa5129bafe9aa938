#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/checks.h"
#include "halfbyte/output.hpp"
#include "io/test_directory.h"

// Fault injection: these definitions stand in for those of the C library in the whole program. Each
// does what the original does unless a test armed a fault.
namespace {

struct CallFault {
  int error = 0;                   // errno of calls that fail; 0: none does
  int skip = 0;                    // calls before the first that fails
  int count = 1;                   // calls that fail
  size_t max_transfer = SIZE_MAX;  // bytes of one transfer
  bool late = false;               // a rename fails when it is done
  bool fails() {
    if (error == 0) return false;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (skip-- > 0 || count-- <= 0) return false;
    errno = error;
    return true;
  }
};
CallFault read_fault, write_fault, allocate_fault, sync_fault, rename_fault, rename_flags_fault, link_fault,
    stat_fault;

int renamed(CallFault& fault, int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  const bool fails = fault.fails();
  if (fails && !fault.late) return -1;
  const auto result = static_cast<int>(syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
  if (fails) errno = fault.error;
  return fails ? -1 : result;
}

std::vector<uint64_t> random_numbers;  // the next ones; empty: those of the system

}  // namespace

extern "C" {

ssize_t pread(int fd, void* buffer, size_t count, off_t offset) {
  if (read_fault.fails()) return -1;
  return syscall(SYS_pread64, fd, buffer, std::min(count, read_fault.max_transfer), offset);
}
ssize_t pwrite(int fd, const void* buffer, size_t count, off_t offset) {
  if (write_fault.fails()) return -1;
  return syscall(SYS_pwrite64, fd, buffer, std::min(count, write_fault.max_transfer), offset);
}
int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (allocate_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, length));
}
int fsync(int fd) {
  if (sync_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_fsync, fd));
}
int rename(const char* from, const char* to) noexcept {
  return renamed(rename_fault, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int link(const char* from, const char* to) noexcept {
  if (link_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int stat(const char* path, struct stat* status) noexcept {
  if (stat_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, status, 0));
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) noexcept {
  return renamed(rename_flags_fault, from_dir, from, to_dir, to, flags);
}
int sync_file_range(int fd, off_t offset, off_t length, unsigned flags) {
  if (halfbyte::before_sync_range) halfbyte::before_sync_range();
  return static_cast<int>(syscall(SYS_sync_file_range, fd, offset, length, flags));
}
ssize_t getrandom(void* buffer, size_t length, unsigned flags) {
  if (random_numbers.empty()) return syscall(SYS_getrandom, buffer, length, flags);
  std::memcpy(buffer, &random_numbers.front(), sizeof(uint64_t));
  random_numbers.erase(random_numbers.begin());
  return sizeof(uint64_t);
}

}  // extern "C"

namespace halfbyte::io {
namespace {

using Names = std::vector<std::string>;

class File : public testing::Test {
 protected:
  ~File() override {
    for (CallFault* fault : {&read_fault, &write_fault, &allocate_fault, &sync_fault, &rename_fault,
                             &rename_flags_fault, &link_fault, &stat_fault})
      *fault = {};
  }
  TestDirectory dir_;
};
using Input = File;
using Output = File;
using OutputTree = File;

// A file system of its own, unmounted at the end.
class Mount {
 public:
  Mount(const std::string& path, const char* options) : path_(path) {
    std::filesystem::create_directory(path);
    mounted_ = ::mount("tmpfs", path.c_str(), "tmpfs", 0, options) == 0;
  }
  ~Mount() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  bool make_read_only() {
    return ::mount("tmpfs", path_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0;
  }

 private:
  std::string path_;
  bool mounted_ = false;
};

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

void write_output(const std::string& path, const std::string& text, bool force) {
  OutputFile file(path, text.size(), force);
  file.write(0, bytes_of(text));
  file.commit();
}

std::string read_all(const InputFile& file) { return read_text(file, UINT64_MAX); }

TEST(Printable, keeps_plain_text) {
  EXPECT_EQ(printable("model.layers.0.weight"), "model.layers.0.weight");
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("Grüße 重み 🙂"), "Grüße 重み 🙂");
}

TEST(Printable, escapes_what_a_terminal_or_reader_could_take_for_more) {
  EXPECT_EQ(printable("a\x1b[2J\n\t\x7f"), "a\\x1b[2J\\x0a\\x09\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\"'\\"), "\\\"\\'\\\\");
  EXPECT_EQ(printable("\xc2\x85"), "\\u0085");  // C1: next line
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "cod.exe"),
            "\\u202ecod.exe");  // right-to-left override
  EXPECT_EQ(printable("\xe2\x81\xa6\xe2\x81\xa9\xe2\x80\x8e\xe2\x80\x8f"), "\\u2066\\u2069\\u200e\\u200f");
}

TEST(Printable, escapes_invalid_utf8_bytewise) {
  EXPECT_EQ(printable("\xff\xfe"), "\\xff\\xfe");
  EXPECT_EQ(printable("\xc0\x80"), "\\xc0\\x80");                    // overlong
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(printable("\xe2\x80"), "\\xe2\\x80");                    // cut short
}

TEST(Printable, cuts_long_text_in_the_middle_between_characters) {
  const std::string text = printable(std::string(1 << 20, 'a') + "end");
  EXPECT_EQ(text, std::string(100, 'a') + "...(1048579 bytes)..." + std::string(97, 'a') + "end");
  for (int shift = 0; shift < 4; ++shift) {
    std::string smileys(shift, 'x');
    for (int i = 0; i < 100; ++i) smileys += "🙂";
    EXPECT_EQ(printable(smileys).find('\\'), std::string::npos);
  }
}

TEST_F(Input, reads_any_range) {
  write_file(dir_ / "f", "0123456789");
  const InputFile file = InputFile::open(dir_ / "f");
  EXPECT_EQ(file.size(), 10u);
  std::string text(4, ' ');
  file.read(3, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "3456");
  file.read(10, {});
  EXPECT_EQ(read_text(file, 10), "0123456789");
  expect_error(ErrorCode::bad_input, "10 bytes, more than the limit of 9", [&] { read_text(file, 9); });
}

TEST_F(Input, follows_links_that_the_user_named) {
  write_file(dir_ / "f", "text");
  std::filesystem::create_symlink("f", dir_ / "link");
  EXPECT_EQ(read_all(InputFile::open(dir_ / "link")), "text");
}

TEST_F(Input, moves) {
  write_file(dir_ / "a", "a");
  write_file(dir_ / "b", "b");
  InputFile file = InputFile::open(dir_ / "a");
  InputFile other = std::move(file);
  EXPECT_EQ(read_all(other), "a");
  other = InputFile::open(dir_ / "b");
  EXPECT_EQ(read_all(other), "b");
}

TEST_F(Input, missing_is_io_with_path_and_reason) {
  expect_error(ErrorCode::io, "no-such-file\": No such file or directory",
               [&] { InputFile::open(dir_ / "no-such-file"); });
  expect_error(ErrorCode::usage, "NUL", [&] { InputFile::open(std::string("a\0b", 3)); });
}

TEST_F(Input, no_descriptor_left_is_io) {
  write_file(dir_ / "f", "text");
  rlimit old;
  getrlimit(RLIMIT_NOFILE, &old);
  const rlimit none = {0, old.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  expect_error(ErrorCode::io, "Too many open files", [&] { InputFile::open(dir_ / "f"); });
  setrlimit(RLIMIT_NOFILE, &old);
}

// Checkpoints have up to a thousand shards, processes often 256 descriptors.
TEST_F(Input, more_files_than_descriptors) {
  constexpr int kFiles = 300;
  for (int i = 0; i < kFiles; ++i) write_file(dir_ / fmt::format("f{}", i), fmt::format("{:04}", i));
  rlimit old;
  getrlimit(RLIMIT_NOFILE, &old);
  const rlimit few = {40, old.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  std::vector<InputFile> files;
  for (int i = 0; i < kFiles; ++i)
    files.push_back(i % 2 ? InputFile::open(dir_ / fmt::format("f{}", i))
                          : InputFile::open_beneath(dir_.path(), fmt::format("f{}", i)));
  const auto read = [&](int begin) {
    for (int i = begin; i < kFiles; i += 3) {
      std::string text(4, ' ');
      files[static_cast<size_t>(i)].read(0, std::as_writable_bytes(std::span(text)));
      EXPECT_EQ(text, fmt::format("{:04}", i));
    }
  };
  std::thread first(read, 0), second(read, 1);
  read(2);
  first.join();
  second.join();
  setrlimit(RLIMIT_NOFILE, &old);
}

TEST_F(Input, gives_up_a_descriptor_where_all_are_taken) {
  std::vector<InputFile> files;
  for (const char* name : {"f0", "f1"}) {
    write_file(dir_ / name, name);
    files.push_back(InputFile::open(dir_ / name));
  }
  write_file(dir_ / "f2", "f2");
  const int next = ::dup(STDERR_FILENO);
  ::close(next);
  rlimit old;
  getrlimit(RLIMIT_NOFILE, &old);
  const rlimit taken = {static_cast<rlim_t>(next), old.rlim_max};
  setrlimit(RLIMIT_NOFILE, &taken);
  std::string text(2, ' ');
  EXPECT_NO_THROW(files.push_back(InputFile::open(dir_ / "f2")));
  for (size_t i = 0; i < files.size(); ++i) {
    EXPECT_NO_THROW(files[i].read(0, std::as_writable_bytes(std::span(text))));
    EXPECT_EQ(text, fmt::format("f{}", i));
  }
  setrlimit(RLIMIT_NOFILE, &old);
}

TEST_F(Input, a_file_opened_again_is_the_same_or_refused) {
  std::vector<InputFile> files;
  for (int i = 0; i < 70; ++i) {
    write_file(dir_ / fmt::format("f{}", i), "0123");
    files.push_back(InputFile::open(dir_ / fmt::format("f{}", i)));
  }
  write_file(dir_ / "other", "0123");
  std::filesystem::rename(dir_ / "other", dir_ / "f0");
  std::filesystem::remove(dir_ / "f1");
  ::chmod((dir_ / "f2").c_str(), 0600);
  std::string text(4, ' ');
  const auto read = [&](size_t i) { files[i].read(0, std::as_writable_bytes(std::span(text))); };
  expect_error(ErrorCode::bad_input, "replaced by another file", [&] { read(0); });
  expect_error(ErrorCode::bad_input, "was removed", [&] { read(1); });
  expect_error(ErrorCode::bad_input, "ctime", [&] { read(2); });
  read(3);
  EXPECT_EQ(text, "0123");
}

TEST_F(Input, only_regular_files_and_never_waits) {
  ASSERT_EQ(::mkfifo((dir_ / "fifo").c_str(), 0666), 0);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  (dir_ / "socket").copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);

  expect_error(ErrorCode::bad_input, "is a FIFO, not a regular file",
               [&] { InputFile::open(dir_ / "fifo"); });
  expect_error(ErrorCode::bad_input, "is a directory, not a regular", [&] { InputFile::open(dir_.path()); });
  expect_error(ErrorCode::bad_input, "is a device, not a regular", [&] { InputFile::open("/dev/zero"); });
  expect_error(ErrorCode::bad_input, "is a socket or a device", [&] { InputFile::open(dir_ / "socket"); });
  expect_error(ErrorCode::bad_input, "FIFO", [&] { InputFile::open_beneath(dir_.path(), "fifo"); });
  expect_error(ErrorCode::bad_input, "socket", [&] { InputFile::open_beneath(dir_.path(), "socket"); });
  ::close(socket);
}

// models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH
TEST_F(Input, beneath_follows_the_links_of_a_cache_into_its_own_blobs_only) {
  namespace fs = std::filesystem;
  const fs::path hub = dir_ / "hub", repository = hub / "models--a--b",
                 snapshot = repository / "snapshots/r1";
  for (const fs::path& path :
       {repository / "blobs", snapshot / "sub", hub / "other/snapshots/r1", hub / "blobs"})
    fs::create_directories(path);
  for (const fs::path& blob : {repository / "blobs/abc", hub / "blobs/abc", hub / "other/secret"})
    write_file(blob, "data");
  const auto link = [&](const fs::path& path, const std::string& target) {
    fs::create_symlink(target, path);
    return InputFile::open_beneath(path.parent_path(), path.filename());
  };
  EXPECT_EQ(read_all(link(snapshot / "a", "../../blobs/abc")), "data");
  EXPECT_EQ(read_all(link(snapshot / "sub/a", "../../../blobs/abc")), "data");
  EXPECT_TRUE(InputFile::is_cache_link(snapshot, "a"));
  fs::create_directory_symlink(snapshot, dir_ / "named");  // a path that the user gives may be a link
  EXPECT_EQ(read_all(InputFile::open_beneath(dir_ / "named", "a")), "data");

  int number = 0;
  for (const char* target :
       {"../../../blobs/abc", "../blobs/abc", "../../blobs/../blobs/abc", "../../blobs/.hidden",
        "../../blobs/", "../../../other/secret", "../../refs/main", "sub/a", "a", "/etc/passwd"})
    expect_error(ErrorCode::bad_input, "is a link, and below a model directory only",
                 [&] { link(snapshot / std::to_string(number++), target); });
  expect_error(ErrorCode::bad_input, "does not exist", [&] { link(snapshot / "gone", "../../blobs/gone"); });
  fs::create_symlink("../../other/secret", repository / "blobs/indirect");
  expect_error(ErrorCode::bad_input, "is a link to a link",
               [&] { link(snapshot / "x", "../../blobs/indirect"); });
  // No snapshot of a cache.
  expect_error(ErrorCode::bad_input, "is a link",
               [&] { link(hub / "other/snapshots/r1/a", "../../blobs/abc"); });
  expect_error(ErrorCode::bad_input, "is a link", [&] { link(repository / "blobs/a", "../../blobs/abc"); });
}

TEST_F(Input, beneath_takes_one_component_and_no_link) {
  std::filesystem::create_directory(dir_ / "model");
  write_file(dir_ / "secret", "secret");
  write_file(dir_ / "model/shard", "data");
  std::filesystem::create_symlink("../secret", dir_ / "model/link");
  std::filesystem::create_symlink("shard", dir_ / "model/inner");
  for (const std::string& model : {dir_ / "model", dir_ / "model/"}) {
    const InputFile file = InputFile::open_beneath(model, "shard");
    EXPECT_EQ(read_all(file), "data");
    EXPECT_EQ(file.path(), dir_ / "model/shard");
  }
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../secret"), dir_ / "secret",
        std::string("./shard"), std::string("sha\0rd", 6)})
    expect_error(ErrorCode::bad_input, "is not the name of a file within directory",
                 [&] { InputFile::open_beneath(dir_ / "model", name); });
  for (const char* name : {"link", "inner"})
    expect_error(ErrorCode::bad_input, "is a link, and below a model directory only",
                 [&] { InputFile::open_beneath(dir_ / "model", name); });
  expect_error(ErrorCode::bad_input, "model/gone\" does not exist",
               [&] { InputFile::open_beneath(dir_ / "model", "gone"); });
  expect_error(ErrorCode::bad_input, "does not exist",
               [&] { InputFile::open_beneath(dir_ / "model", std::string(300, 'x')); });
  expect_error(ErrorCode::io, "No such file", [&] { InputFile::open_beneath(dir_ / "gone", "shard"); });
}

TEST_F(Input, retries_short_reads_and_interrupts) {
  write_file(dir_ / "f", "0123456789");
  const InputFile file = InputFile::open(dir_ / "f");
  read_fault = {.error = EINTR, .skip = 2, .count = 3, .max_transfer = 3};
  EXPECT_EQ(read_all(file), "0123456789");
}

TEST_F(Input, every_failing_read_is_io_with_its_offset) {
  write_file(dir_ / "f", "0123456789");
  const InputFile file = InputFile::open(dir_ / "f");
  for (int k = 0; k < 4; ++k) {
    read_fault = {.error = EIO, .skip = k, .max_transfer = 3};
    expect_error(ErrorCode::io, "at byte " + std::to_string(3 * k) + " of", [&] { read_all(file); });
  }
}

TEST_F(Input, shrunk_while_reading) {
  write_file(dir_ / "f", "0123456789");
  const InputFile file = InputFile::open(dir_ / "f");
  std::filesystem::resize_file(dir_ / "f", 4);
  expect_error(ErrorCode::bad_input, "changed while reading: it had 10 bytes, now it ends at byte 4",
               [&] { read_all(file); });
}

TEST_F(Input, check_unchanged_sees_every_change) {
  const auto open = [&] {
    write_file(dir_ / "f", "0123456789");
    return InputFile::open(dir_ / "f");
  };
  open().check_unchanged();

  const InputFile grown = open();
  std::filesystem::resize_file(dir_ / "f", 11);
  expect_error(ErrorCode::bad_input, "had 10 bytes and has 11 now", [&] { grown.check_unchanged(); });

  const InputFile rewritten = open();
  const timespec times[2] = {{0, UTIME_OMIT}, {1, 5}};
  ::utimensat(AT_FDCWD, (dir_ / "f").c_str(), times, 0);
  expect_error(ErrorCode::bad_input, "it was written to", [&] { rewritten.check_unchanged(); });

  const InputFile touched = open();  // as after a write whose time was set back
  ::chmod((dir_ / "f").c_str(), 0600);
  expect_error(ErrorCode::bad_input, "ctime", [&] { touched.check_unchanged(); });

  const InputFile replaced = open();
  write_file(dir_ / "g", "9876543210");
  std::filesystem::rename(dir_ / "g", dir_ / "f");
  expect_error(ErrorCode::bad_input, "replaced by another file", [&] { replaced.check_unchanged(); });

  const InputFile unknown = open();
  stat_fault = {.error = EIO};
  expect_error(ErrorCode::io, "cannot stat", [&] { unknown.check_unchanged(); });
  stat_fault = {.error = EINTR, .count = 2};
  unknown.check_unchanged();

  const InputFile removed = open();
  std::filesystem::remove(dir_ / "f");
  expect_error(ErrorCode::bad_input, "it was removed", [&] { removed.check_unchanged(); });
}

TEST_F(Output, appears_complete_at_commit) {
  {
    OutputFile file(dir_ / "out", 6, false);
    file.write(3, bytes_of("def"));
    file.write(0, bytes_of("abc"));
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
    EXPECT_EQ(dir_.names().size(), 1u);
    EXPECT_EQ(std::filesystem::path(file.temporary_path()).filename().string().rfind(".out.halfbyte-", 0),
              0u);
    file.sync();
    EXPECT_EQ(read_file(file.temporary_path()), "abcdef");
    file.commit();
    EXPECT_EQ(dir_.names(), Names{"out"});
  }
  EXPECT_EQ(read_file(dir_ / "out"), "abcdef");
  EXPECT_EQ(dir_.names(), Names{"out"});
}

TEST_F(Output, destructor_removes_what_was_not_committed) {
  { OutputFile(dir_ / "out", 100, false).write(0, bytes_of("abc")); }
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(Output, permissions_follow_the_umask) {
  const mode_t old = ::umask(027);
  write_output(dir_ / "out", "abc", false);
  ::umask(old);
  EXPECT_EQ(InputFile::open(dir_ / "out").status().st_mode & 0777u, 0640u);
}

TEST_F(Output, names_of_any_bytes_and_length) {
  for (const std::string& name : {std::string("\xff\xfe\n"), std::string(255, 'n')}) {
    write_output(dir_ / name, "abc", false);
    EXPECT_EQ(dir_.names(), Names{name});
    std::filesystem::remove(dir_ / name);
  }
  expect_error(ErrorCode::io, "File name too long",
               [&] { write_output(dir_ / std::string(256, 'n'), "abc", false); });
  expect_error(ErrorCode::io, "File name too long",
               [&] { OutputFile(dir_ / std::string(5000, 'n'), 0, false); });
}

TEST_F(Output, relative_to_the_working_directory) {
  const auto old = std::filesystem::current_path();
  std::filesystem::current_path(dir_.path());
  write_output("out", "abc", false);
  std::filesystem::current_path(old);
  EXPECT_EQ(read_file(dir_ / "out"), "abc");
}

TEST_F(Output, existing_target_is_refused_without_force) {
  write_file(dir_ / "out", "old");
  expect_error(ErrorCode::exists, "out\" exists", [&] { OutputFile(dir_ / "out", 3, false); });
  std::filesystem::create_symlink("nowhere", dir_ / "dangling");
  expect_error(ErrorCode::exists, "exists", [&] { OutputFile(dir_ / "dangling", 3, false); });
  EXPECT_EQ(read_file(dir_ / "out"), "old");
  EXPECT_EQ(dir_.names(), (Names{"dangling", "out"}));
}

TEST_F(Output, force_replaces_file_or_link) {
  write_file(dir_ / "out", "old");
  std::filesystem::create_symlink("out", dir_ / "link");
  const InputFile old = InputFile::open(dir_ / "out");
  write_output(dir_ / "link", "new link", true);
  EXPECT_EQ(read_file(dir_ / "out"), "old");
  EXPECT_EQ(read_file(dir_ / "link"), "new link");
  write_output(dir_ / "out", "new", true);
  EXPECT_EQ(read_file(dir_ / "out"), "new");
  std::string kept(3, ' ');
  old.read(0, std::as_writable_bytes(std::span(kept)));
  EXPECT_EQ(kept, "old") << "a reader of the old file must keep it";
  EXPECT_EQ(dir_.names(), (Names{"link", "out"}));
}

void make_socket(const std::string& path) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {AF_UNIX, {}};
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ::close(fd);
}

// Nor what a link leads to: renaming over it would remove it for everybody.
TEST_F(Output, what_is_no_file_is_never_replaced) {
  const auto working = std::filesystem::current_path();
  std::filesystem::current_path(dir_.path());  // the path of a socket is short
  ASSERT_EQ(::mkfifo("fifo", 0600), 0);
  make_socket("socket");
  std::filesystem::create_directory("directory");
  std::filesystem::create_symlink("/dev/null", "null");
  for (const char* name : {"fifo", "socket", "directory"})
    std::filesystem::create_symlink(name, std::string("link to ") + name);
  const bool device = ::mknod("device", S_IFCHR | 0600, makedev(1, 3)) == 0;
  const struct {
    const char *name, *text;
  } cases[] = {{"fifo", "is a FIFO, which is never replaced"},
               {"socket", "is a socket,"},
               {"null", "is a link to a device,"},
               {"link to fifo", "is a link to a FIFO,"},
               {"link to socket", "is a link to a socket,"},
               {"link to directory", "is a link to a directory,"},
               {"device", "is a device,"}};
  const Names before = dir_.names();
  for (const auto& [name, text] : cases) {
    if (name == std::string("device") && !device) continue;
    for (const bool force : {false, true}) {
      expect_error(ErrorCode::exists, text, [&] { OutputFile(name, 3, force); });
      expect_error(ErrorCode::exists, "is not a directory but a", [&] { OutputDirectory(name, force); });
    }
  }
  OutputFile late("late", 0, true);
  ASSERT_EQ(::mkfifo("late", 0600), 0);
  expect_error(ErrorCode::exists, "is a FIFO, which is never replaced: another process",
               [&] { late.commit(); });
  std::filesystem::remove("late");
  std::filesystem::current_path(working);
  EXPECT_EQ(dir_.names().size(), before.size() + 1);  // with that of `late`
}

TEST_F(Output, mount_points_are_refused_before_the_work) {
  const Mount disk(dir_ / "disk", "size=1m");
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs";
  expect_error(ErrorCode::exists, "is a mount point", [&] { OutputDirectory(dir_ / "disk", true); });
  // One of the same file system has the device of its parent.
  for (const char* name : {"directory", "mounted directory"}) std::filesystem::create_directory(dir_ / name);
  for (const char* name : {"file", "mounted file"}) write_file(dir_ / name, "old");
  for (const std::string name : {"directory", "file"})
    ASSERT_EQ(::mount((dir_ / name).c_str(), (dir_ / ("mounted " + name)).c_str(), nullptr, MS_BIND, nullptr),
              0);
  expect_error(ErrorCode::exists, "is a mount point",
               [&] { OutputDirectory(dir_ / "mounted directory", true); });
  expect_error(ErrorCode::exists, "is a mount point", [&] { OutputFile(dir_ / "mounted file", 3, true); });
  for (const char* name : {"mounted directory", "mounted file"}) ::umount2((dir_ / name).c_str(), MNT_DETACH);
  EXPECT_EQ(dir_.names(), (Names{"directory", "disk", "file", "mounted directory", "mounted file"}));
}

TEST_F(Output, directory_as_target_exists_even_with_force) {
  std::filesystem::create_directory(dir_ / "out");
  for (const bool force : {false, true}) {
    expect_error(ErrorCode::exists, "directory", [&] { OutputFile(dir_ / "out", 3, force); });
    expect_error(ErrorCode::exists, "directory", [&] { OutputFile(dir_ / "out/", 3, force); });
  }
  // It comes after the check of the constructor.
  OutputFile late(dir_ / "late", 0, true);
  std::filesystem::create_directory(dir_ / "late");
  expect_error(ErrorCode::exists, "another process", [&] { late.commit(); });
}

// What a file system lacks: nothing; a rename that replaces nothing, as NFS; hard links as well, as some of
// FUSE.
const struct Lacks {
  int rename_error, link_error;
} kFileSystems[] = {{0, 0}, {EINVAL, 0}, {EINVAL, EPERM}, {ENOSYS, EOPNOTSUPP}};
void pretend(const Lacks& lacks) {
  rename_flags_fault = {.error = lacks.rename_error, .count = INT_MAX};
  link_fault = {.error = lacks.link_error, .count = INT_MAX};
}

TEST_F(Output, appears_complete_on_every_file_system) {
  for (const Lacks& lacks : kFileSystems) {
    pretend(lacks);
    write_output(dir_ / "out", "abc", false);
    EXPECT_EQ(read_file(dir_ / "out"), "abc");
    EXPECT_EQ(dir_.names(), Names{"out"});
    std::filesystem::remove(dir_ / "out");
  }
}

TEST_F(Output, target_made_in_the_meantime_is_kept) {
  for (const Lacks& lacks : kFileSystems) {
    OutputFile file(dir_ / "out", 3, false);
    file.write(0, bytes_of("abc"));
    write_file(dir_ / "out", "theirs");
    pretend(lacks);
    expect_error(ErrorCode::exists, "another process", [&] { file.commit(); });
    EXPECT_EQ(read_file(dir_ / "out"), "theirs");
    std::filesystem::remove(dir_ / "out");
  }
}

TEST_F(Output, missing_parent_is_io) {
  expect_error(ErrorCode::io, "No such file or directory", [&] { OutputFile(dir_ / "gone/out", 3, false); });
  expect_error(ErrorCode::io, "Is a directory", [&] { OutputFile(dir_ / "new/", 3, false); });
  expect_error(ErrorCode::io, "", [&] { OutputFile("", 3, false); });
  write_file(dir_ / "file", "");
  expect_error(ErrorCode::io, "Not a directory", [&] { OutputFile(dir_ / "file/out", 3, false); });
}

// Of many writers of one name exactly one wins, whole; the others are told.
void race(const TestDirectory& dir, const auto& write) {
  constexpr int kNumWriters = 8;
  for (int round = 0; round < 50; ++round) {
    std::barrier ready(kNumWriters);
    std::atomic<int> num_winners = 0, num_losers = 0, winner = -1;
    std::vector<std::thread> threads;
    for (int i = 0; i < kNumWriters; ++i)
      threads.emplace_back([&, i] {
        try {
          write(i, ready);
          ++num_winners;
          winner = i;
        } catch (const Error& error) {
          ready.arrive_and_drop();
          num_losers += error.code() == ErrorCode::exists;
        }
      });
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(num_winners, 1);
    ASSERT_EQ(num_losers, kNumWriters - 1);
    ASSERT_EQ(dir.names(), Names{"out"});
    const bool tree = std::filesystem::is_directory(dir / "out");
    ASSERT_EQ(read_file(dir / (tree ? "out/file" : "out")),
              std::string(1000, static_cast<char>('a' + winner)));
    std::filesystem::remove_all(dir / "out");
  }
}

TEST_F(Output, one_of_many_writers_wins) {
  for (const Lacks& lacks : kFileSystems) {
    pretend(lacks);
    race(dir_, [&](int i, auto& ready) {
      OutputFile file(dir_ / "out", 1000, false);
      file.write(0, bytes_of(std::string(1000, static_cast<char>('a' + i))));
      ready.arrive_and_wait();
      file.commit();
    });
  }
}

TEST_F(Output, retries_short_writes_and_interrupts) {
  write_fault = {.error = EINTR, .skip = 2, .count = 3, .max_transfer = 3};
  allocate_fault = {.error = EINTR};
  sync_fault = {.error = EINTR, .count = 2};
  write_output(dir_ / "out", "0123456789", false);
  EXPECT_EQ(read_file(dir_ / "out"), "0123456789");
}

// Some file systems say so instead of an error.
TEST_F(Output, a_write_of_nothing_is_an_error) {
  write_fault = {.max_transfer = 0};
  expect_error(ErrorCode::io, "write at byte 0 of", [&] { write_output(dir_ / "out", "abc", false); });
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(Output, works_where_space_cannot_be_reserved) {
  allocate_fault = {.error = EOPNOTSUPP};
  OutputFile file(dir_ / "out", 10, false);
  EXPECT_EQ(std::filesystem::file_size(file.temporary_path()), 10u);
}

// After a fault at any step the old file is there, or the complete new one if the rename was done.
TEST_F(Output, every_fault_leaves_the_old_file_and_nothing_else) {
  const struct {
    CallFault& fault;
    CallFault value;
    const char* text;
    const char* content;
  } cases[] = {
      {allocate_fault, {.error = ENOSPC}, "reserve 3 bytes for", "old"},
      {allocate_fault, {.error = EDQUOT}, "no space: Disk quota", "old"},
      {write_fault, {.error = ENOSPC}, "no space: No space left", "old"},
      {write_fault, {.error = ENOSPC, .skip = 1, .max_transfer = 2}, "write at byte 2 of", "old"},
      {write_fault, {.error = EFBIG}, "no space: File too large", "old"},
      {write_fault, {.error = EIO}, "Input/output error", "old"},
      {sync_fault, {.error = EIO}, "sync", "old"},
      {sync_fault, {.error = ENOSPC}, "no space", "old"},
      {rename_fault, {.error = EIO}, "rename the finished output to", "old"},
      {sync_fault, {.error = EIO, .skip = 1}, "sync directory", "new"},
  };
  for (const auto& c : cases) {
    write_file(dir_ / "out", "old");
    c.fault = c.value;
    expect_error(ErrorCode::io, c.text, [&] { write_output(dir_ / "out", "new", true); });
    c.fault = {};
    EXPECT_EQ(read_file(dir_ / "out"), c.content) << c.text;
    EXPECT_EQ(dir_.names(), Names{"out"}) << c.text;
  }
}

TEST_F(Output, directories_that_cannot_be_synced_are_fine) {
  sync_fault = {.error = EINVAL, .skip = 1};
  write_output(dir_ / "out", "abc", false);
  EXPECT_EQ(read_file(dir_ / "out"), "abc");
}

TEST_F(Output, full_disk_is_found_before_the_first_write) {
  const Mount disk(dir_ / "disk", "size=1m");
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs";
  write_output(dir_ / "disk/out", std::string(500'000, 'a'), false);
  expect_error(ErrorCode::io, "no space", [&] { OutputFile(dir_ / "disk/out", 900'000, true); });
  expect_error(ErrorCode::io, "no space", [&] { OutputFile(dir_ / "disk/new", 900'000, false); });
  // Not reserved: it fails within.
  expect_error(ErrorCode::io, "no space", [&] {
    OutputFile file(dir_ / "disk/new", 0, false);
    file.write(0, bytes_of(std::string(900'000, 'b')));
  });
  EXPECT_EQ(read_file(dir_ / "disk/out"), std::string(500'000, 'a'));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_ / "disk"), {}), 1);
}

TEST_F(Output, more_bytes_than_a_file_can_have_is_io) {
  expect_error(ErrorCode::io, "no space", [&] { OutputFile(dir_ / "out", UINT64_MAX, false); });
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(Output, file_size_limit_is_io) {
  rlimit old;
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small = {1000, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  expect_error(ErrorCode::io, "no space: File too large", [&] { OutputFile(dir_ / "out", 2000, false); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(Output, unnamed_has_no_name_and_can_be_read_back) {
  for (const std::string& directory : {std::string(dir_ / ""), std::string()}) {
    const auto file = OutputFile::unnamed(directory, 5);
    const char text[] = "abcde";
    file->write(0, std::as_bytes(std::span(text, 5)));
    file->sync([] {});
    EXPECT_EQ(dir_.names(), Names{});
    EXPECT_EQ(read_text(InputFile::open(file->temporary_path()), 5), "abcde");
  }
  EXPECT_EQ(dir_.names(), Names{});
  expect_error(ErrorCode::io, "missing\": No such file or directory",
               [&] { OutputFile::unnamed(dir_ / "missing", 5); });
}

TEST_F(Output, read_only_directory_is_io) {
  Mount disk(dir_ / "disk", "size=1m");
  if (!disk.mounted() || !disk.make_read_only()) GTEST_SKIP() << "cannot mount a tmpfs";
  expect_error(ErrorCode::io, "disk/out\": Read-only file system",
               [&] { OutputFile(dir_ / "disk/out", 3, false); });
  expect_error(ErrorCode::io, "disk/out\": Read-only file system",
               [&] { OutputDirectory(dir_ / "disk/out", false); });
}

void write_tree(const std::string& path, const std::string& text, bool force) {
  OutputDirectory tree(path, force);
  write_output(tree.temporary_path() + "/file", text, false);
  tree.commit();
}

TEST_F(OutputTree, appears_complete_at_commit) {
  {
    OutputDirectory tree(dir_ / "out/", false);
    write_output(tree.temporary_path() + "/file", "abc", false);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
    tree.commit();
  }
  EXPECT_EQ(read_file(dir_ / "out/file"), "abc");
  EXPECT_EQ(dir_.names(), Names{"out"});
}

TEST_F(OutputTree, destructor_removes_what_was_not_committed) {
  {
    OutputDirectory tree(dir_ / "out", false);
    write_output(tree.temporary_path() + "/file", "abc", false);
  }
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(OutputTree, existing_target_is_refused_without_force) {
  std::filesystem::create_directory(dir_ / "empty");
  expect_error(ErrorCode::exists, "empty\" exists", [&] { OutputDirectory(dir_ / "empty/", false); });
  write_file(dir_ / "file", "old");
  std::filesystem::create_directory_symlink("empty", dir_ / "link");
  for (const bool force : {false, true})
    for (const char* name : {"file", "link"})
      expect_error(ErrorCode::exists, "is not a directory", [&] { OutputDirectory(dir_ / name, force); });
  expect_error(ErrorCode::io, "No such file", [&] { OutputDirectory(dir_ / "gone/out", false); });
  expect_error(ErrorCode::io, "No such file", [&] { OutputDirectory("", false); });
  EXPECT_EQ(dir_.names(), (Names{"empty", "file", "link"}));
}

using Files = std::map<std::string, std::string>;

void make_tree(const std::string& path, const Files& files) {
  std::filesystem::create_directories(path);
  for (const auto& [name, text] : files) {
    std::filesystem::create_directories(std::filesystem::path(path + "/" + name).parent_path());
    if (!name.ends_with('/')) write_file(path + "/" + name, text);
  }
}

// A checkpoint, and nothing that it does not have.
TEST_F(OutputTree, force_replaces_checkpoints_only) {
  const std::string index = R"({"weight_map": {"a": "model-1.safetensors", "b": "x.safetensors"}})";
  const std::vector<std::string> side_files = {"side.py", "deep/er/side.txt"};
  const Files model = {{"model.safetensors", ""}, {"config.json", "{}"}};
  const Files sharded = {
      {"model.safetensors.index.json", index}, {"model-1.safetensors", ""}, {"x.safetensors", ""}};
  const auto with = [](Files files, const std::string& name) {
    files[name] = "mine";
    return files;
  };
  const struct {
    Files files;
    const char* refused;  // what the error says; empty: it is replaced
  } cases[] = {
      {{}, ""},
      {model, ""},
      {sharded, ""},
      {with(model, "tokenizer.json"), ""},
      {with(model, "side.py"), ""},
      {with(model, "deep/er/side.txt"), ""},
      {with(model, ".model.safetensors.halfbyte-1-0123456789abcdef"), ""},
      {{{"only.safetensors", ""}}, ""},
      {with(model, "mine"), "it holds \"mine\""},
      {with(model, "deep/mine"), "it holds \"deep/mine\""},
      {with(model, "deep/er/"), ""},
      {with(model, "other/"), "it holds the directory \"other\""},
      {with(model, "deep/er/config.json"), "it holds \"deep/er/config.json\""},
      {with(model, "pytorch_model.bin"), "it holds \"pytorch_model.bin\""},
      {with(model, ".model.safetensors.halfbyte-1-0123"), "it holds \".model.safetensors.halfbyte-1-0123\""},
      {with(sharded, "y.safetensors"), "it holds \"y.safetensors\""},
      {with(model, "y.safetensors"), "2 .safetensors files"},
      {with(model, "model.safetensors.index.json"), "its index is none"},
      {{{"config.json", "{}"}}, "it holds \"config.json\" and no checkpoint"},
      {{{"mine", "mine"}}, "it holds \"mine\" and no checkpoint"},
  };
  for (const auto& [files, refused] : cases) {
    make_tree(dir_ / "out", files);
    const auto replace = [&] {
      OutputDirectory tree(dir_ / "out", true, side_files);
      tree.commit();
    };
    if (*refused == '\0') {
      replace();
      EXPECT_TRUE(std::filesystem::is_empty(dir_ / "out"));
    } else {
      expect_error(ErrorCode::exists, refused, replace);
      for (const auto& [name, text] : files) {
        EXPECT_TRUE(std::filesystem::exists(dir_ / ("out/" + name)));
        if (!name.ends_with('/')) {
          EXPECT_EQ(read_file(dir_ / ("out/" + name)), text);
        }
      }
      // What comes during the work is kept as well.
      std::filesystem::remove_all(dir_ / "out");
      make_tree(dir_ / "out", model);
      OutputDirectory tree(dir_ / "out", true, side_files);
      make_tree(dir_ / "out", files);
      if (files.contains("model.safetensors"))
        expect_error(ErrorCode::exists, refused, [&] { tree.commit(); });
    }
    EXPECT_EQ(dir_.names(), Names{"out"});
    std::filesystem::remove_all(dir_ / "out");
  }
  make_tree(dir_ / "out", model);
  std::filesystem::create_symlink("model.safetensors", dir_ / "out/vocab.txt");
  expect_error(ErrorCode::exists, "\"vocab.txt\" in it is not a regular file",
               [&] { OutputDirectory(dir_ / "out", true); });
}

// What others have put under the name that would be next is neither opened, followed nor waited for.
TEST_F(OutputTree, temporary_names_are_random_and_nobody_else_has_them) {
  const auto name = [&](uint64_t random) {
    return fmt::format("{}/.out.halfbyte-{}-{:016x}", dir_.path(), ::getpid(), random);
  };
  constexpr uint64_t kFree = 0xfedcba9876543210;
  write_file(dir_ / "theirs", "theirs");
  std::filesystem::create_symlink("theirs", name(1));
  std::filesystem::create_directory(name(2));
  write_file(name(3), "theirs");
  ASSERT_EQ(::mkfifo(name(4).c_str(), 0600), 0);
  const Names before = dir_.names();
  random_numbers = {1, 2, 3, 4, kFree};
  EXPECT_EQ(OutputFile(dir_ / "out", 3, false).temporary_path(), name(kFree));
  random_numbers = {1, 2, 3, 4, kFree};
  EXPECT_EQ(OutputDirectory(dir_ / "out", false).temporary_path(), name(kFree) + "/output");
  EXPECT_EQ(dir_.names(), before);
  EXPECT_EQ(read_file(dir_ / "theirs"), "theirs");
  EXPECT_TRUE(std::filesystem::is_empty(name(2)));
  EXPECT_EQ(read_file(name(3)), "theirs");
}

// A file synced in a directory that is not is lost with the power.
TEST_F(OutputTree, syncs_nested_directories) {
  const char* const synced[] = {"output/a/b\"", "output/a\"", "output\""};
  for (int i = 0; i < 3; ++i) {
    OutputDirectory tree(dir_ / "out", false);
    make_tree(tree.temporary_path(), {{"a/b/file", "abc"}});
    sync_fault = {.error = EIO, .skip = i};
    expect_error(ErrorCode::io, synced[i], [&] { tree.commit(); });
  }
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(OutputTree, force_replaces_the_tree_and_follows_no_link) {
  // The second time as on a file system without RENAME_EXCHANGE.
  for (const int rename_error : {0, EINVAL}) {
    rename_flags_fault = {.error = rename_error, .count = INT_MAX};
    std::filesystem::create_directory(dir_ / "out");
    write_file(dir_ / "out/model.safetensors", "old");
    write_file(dir_ / "out/README.md", "old");
    write_tree(dir_ / "out", "new", true);
    EXPECT_EQ(read_file(dir_ / "out/file"), "new");
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out/README.md"));
    EXPECT_EQ(dir_.names(), Names{"out"});
    for (const bool empty : {false, true}) {
      std::filesystem::remove_all(dir_ / "out");
      if (empty) std::filesystem::create_directory(dir_ / "out");
      write_tree(dir_ / "out", "first", true);
      EXPECT_EQ(read_file(dir_ / "out/file"), "first");
      EXPECT_EQ(dir_.names(), Names{"out"});
    }
    std::filesystem::remove_all(dir_ / "out");
  }
}

TEST_F(OutputTree, target_made_in_the_meantime_is_kept) {
  for (const int rename_error : {0, EINVAL}) {
    for (const bool empty : {false, true}) {
      OutputDirectory tree(dir_ / "out", false);
      std::filesystem::create_directory(dir_ / "out");
      if (!empty) write_file(dir_ / "out/theirs", "theirs");
      rename_flags_fault = {.error = rename_error};
      expect_error(ErrorCode::exists, "another process", [&] { tree.commit(); });
      EXPECT_EQ(std::filesystem::exists(dir_ / "out/theirs"), !empty);
      std::filesystem::remove_all(dir_ / "out");
    }
  }
}

TEST_F(OutputTree, one_of_many_writers_wins) {
  for (const int rename_error : {0, EINVAL}) {
    rename_flags_fault = {.error = rename_error, .count = INT_MAX};
    race(dir_, [&](int i, auto& ready) {
      OutputDirectory tree(dir_ / "out", false);
      write_output(tree.temporary_path() + "/file", std::string(1000, static_cast<char>('a' + i)), false);
      ready.arrive_and_wait();
      tree.commit();
    });
  }
}

TEST_F(OutputTree, files_keep_what_was_reserved_and_written) {
  OutputDirectory tree(dir_ / "out", false);
  for (const char* name : {"a", "sub/deep/b"}) {
    OutputFile(tree, name, 9);
    EXPECT_EQ(std::filesystem::file_size(tree.temporary_path() + "/" + name), 9u);
    OutputFile(tree, name, 3).write(0, bytes_of("abc"));
    OutputFile(tree, name, 6).write(3, bytes_of("def"));
    OutputFile file(tree, name, 5);
    file.commit();
    EXPECT_EQ(read_file(file.temporary_path()), "abcde");
  }
  tree.commit();
  EXPECT_EQ(read_file(dir_ / "out/a"), "abcde");
  EXPECT_EQ(read_file(dir_ / "out/sub/deep/b"), "abcde");
  EXPECT_EQ(dir_.names(), Names{"out"});
}

TEST_F(OutputTree, space_is_checked) {
  const OutputDirectory tree(dir_ / "out", false);
  tree.check_space(1, 1);
  expect_error(ErrorCode::io, "no space: it needs 1152921504606846976 bytes",
               [&] { tree.check_space(uint64_t{1} << 60, 1); });
  const Mount mount(dir_ / "small", "size=64k,nr_inodes=9");
  if (!mount.mounted()) GTEST_SKIP() << "mount needs a privileged user";
  const OutputDirectory small(dir_ / "small/out", false);
  small.check_space(40000, 5);
  expect_error(ErrorCode::io, "no space: it needs 70000 bytes", [&] { small.check_space(70000, 5); });
  expect_error(ErrorCode::io, "no space: it needs 10 inodes", [&] { small.check_space(1, 10); });
}

TEST_F(Output, sync_can_be_stopped) {
  const std::string part(size_t{1} << 20, 'x');
  int calls = 0;
  for (const int last : {INT_MAX, 3}) {
    OutputFile file(dir_ / "out", 40 << 20, false);
    for (uint64_t i = 0; i < 40; ++i) file.write(i << 20, bytes_of(part));
    calls = 0;
    const auto sync = [&] { file.sync([&] { HALFBYTE_CHECK(++calls < last, cancelled, "stopped"); }); };
    if (last == INT_MAX) {
      sync();
      EXPECT_GE(calls, 4);  // 40 MiB are three parts
    } else {
      expect_error(ErrorCode::cancelled, "stopped", sync);
    }
  }
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(OutputTree, every_fault_leaves_the_old_tree_and_nothing_else) {
  const struct {
    int flags_error;  // of renameat2
    CallFault& fault;
    CallFault value;
    const char* content;
  } cases[] = {
      {0, sync_fault, {.error = EIO}, "old"},             // of the tree
      {0, sync_fault, {.error = EIO, .skip = 1}, "new"},  // of its parent
      {EIO, rename_fault, {}, "old"},
      {EINVAL, rename_fault, {.error = EIO}, "old"},             // moving the old tree aside
      {EINVAL, rename_fault, {.error = EIO, .skip = 1}, "old"},  // the new tree into its place
  };
  for (const auto& c : cases) {
    std::filesystem::remove_all(dir_ / "out");
    make_tree(dir_ / "out", {{"model.safetensors", "old"}});
    const auto replace = [&] {
      OutputDirectory tree(dir_ / "out", true);
      write_file(tree.temporary_path() + "/model.safetensors", "new");
      rename_flags_fault = {.error = c.flags_error};
      c.fault = c.value;
      tree.commit();
    };
    expect_error(ErrorCode::io, "out", replace);
    c.fault = {};
    EXPECT_EQ(read_file(dir_ / "out/model.safetensors"), c.content);
    EXPECT_EQ(dir_.names(), Names{"out"});
  }
}

// As a network file system may tell them.
TEST_F(OutputTree, a_rename_that_fails_when_it_is_done_leaves_nothing_else) {
  const struct {
    bool force;
    CallFault flags, plain;
    const char* content;
  } cases[] = {
      {false, {.error = EIO, .late = true}, {}, "new"},
      {false, {.error = EINVAL}, {.error = EIO, .late = true}, "new"},
      {true, {.error = EIO, .late = true}, {}, "new"},
      {true, {.error = EINVAL}, {.error = EIO, .late = true}, "old"},  // moving the old tree aside
      {true, {.error = EINVAL}, {.error = EIO, .skip = 1, .late = true}, "new"},
  };
  for (const auto& c : cases) {
    for (const bool kept : {false, true}) {
      SCOPED_TRACE(fmt::format("force {}, kept {}", c.force, kept));
      for (const std::string& name : dir_.names()) std::filesystem::remove_all(dir_ / name);
      if (c.force) make_tree(dir_ / "out", {{"model.safetensors", "old"}});
      const auto write = [&] {
        OutputDirectory tree(dir_ / "out", c.force);
        tree.locked().set_kept(kept);
        write_file(tree.temporary_path() + "/model.safetensors", "new");
        rename_flags_fault = c.flags;
        rename_fault = c.plain;
        tree.commit();
      };
      expect_error(ErrorCode::io, "Input/output error", write);
      rename_flags_fault = rename_fault = {};
      EXPECT_EQ(read_file(dir_ / "out/model.safetensors"), c.content);
      // What did not get its name is kept where that was asked for.
      EXPECT_EQ(dir_.names().size(), kept && c.content == std::string("old") ? 2u : 1u);
    }
  }
}

// ---- What runs leave that are killed

// Runs `body` in a process that ends by SIGKILL when it is done.
void kill_after(const auto& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the body failed";
}

using Left = File;

TEST_F(Left, is_removed_by_the_next_run) {
  kill_after([&] { new OutputFile(dir_ / "out", 100, false); });
  kill_after([&] {
    make_tree((new OutputDirectory(dir_ / "out", false))->temporary_path(), {{"a/b", "c"}});
  });
  kill_after([&] { new OutputDirectory(dir_ / "another", false); });
  EXPECT_EQ(dir_.names().size(), 3u);
  const std::vector<Leftover> left = remove_leftovers(dir_ / "out/");
  ASSERT_EQ(left.size(), 2u);
  for (const Leftover& one : left) EXPECT_EQ(one.why_kept, "") << one.path;
  ASSERT_EQ(dir_.names().size(), 1u);
  EXPECT_TRUE(dir_.names()[0].starts_with(".another.halfbyte-"));
  EXPECT_EQ(remove_leftovers(dir_ / "out").size(), 0u);
  EXPECT_EQ(remove_leftovers(dir_ / "nowhere/out").size(), 0u);
}

TEST_F(Left, is_kept_while_a_run_lives) {
  OutputFile file(dir_ / "out", 3, false);
  const OutputDirectory tree(dir_ / "out", false);
  const std::vector<Leftover> left = remove_leftovers(dir_ / "out");
  ASSERT_EQ(left.size(), 2u);
  for (const Leftover& one : left) EXPECT_EQ(one.why_kept, "a run that has not ended uses it");
  file.write(0, bytes_of("abc"));
  file.commit();
  EXPECT_EQ(read_file(dir_ / "out"), "abc");
  EXPECT_EQ(remove_leftovers(dir_ / "out").size(), 1u);
}

// Names alone prove nothing.
TEST_F(Left, is_kept_where_it_may_not_be_ours) {
  const auto name = [](int i) { return fmt::format(".out.halfbyte-1-{:016x}", i); };
  make_tree(dir_ / name(1), {{"file", "mine"}});
  make_tree(dir_ / name(2), {{"lock", "mine"}});
  write_file(dir_ / "mine", "mine");
  std::filesystem::create_hard_link(dir_ / "mine", dir_ / name(3));
  std::filesystem::create_symlink("mine", dir_ / name(4));
  ASSERT_EQ(::mkfifo((dir_ / name(5)).c_str(), 0600), 0);
  make_tree(dir_ / name(6), {{"lock", ""}, {"a/b", "ours"}});
  make_tree(dir_ / name(7), {});
  write_file(dir_ / name(8), "ours");
  for (const char* other :
       {".out.halfbyte-1-0", ".out.halfbyte-x-0123456789abcdef", ".out-1-0123456789abcdef",
        ".outer.halfbyte-1-0123456789abcdef", "out.halfbyte-1-0123456789abcdef"})
    write_file(dir_ / other, "mine");
  const char* const why[] = {"it has no file \"lock\"",
                             "its file \"lock\" is not",
                             "it has other names",
                             "it is neither a file nor",
                             "it is neither a file nor",
                             "",
                             "",
                             ""};
  const std::vector<Leftover> left = remove_leftovers(dir_ / "out");
  ASSERT_EQ(left.size(), std::size(why));
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(left[i].path.ends_with(name(static_cast<int>(i) + 1)));
    EXPECT_EQ(left[i].why_kept.substr(0, std::strlen(why[i])), why[i]);
    EXPECT_EQ(left[i].why_kept.empty(), !*why[i]);
    std::error_code ignored;
    EXPECT_NE(std::filesystem::exists(std::filesystem::symlink_status(left[i].path, ignored)), !*why[i]);
  }
  EXPECT_EQ(read_file(dir_ / "mine"), "mine");
  EXPECT_EQ(dir_.names().size(), 5u + 5u + 1u);
}

TEST_F(Left, of_another_user_is_kept) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root";
  const std::string name = dir_ / ".out.halfbyte-1-0123456789abcdef";
  write_file(name, "theirs");
  ASSERT_EQ(::chown(name.c_str(), 65534, 65534), 0);
  const std::vector<Leftover> left = remove_leftovers(dir_ / "out");
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0].why_kept, "it belongs to user 65534, not 0");
  EXPECT_TRUE(std::filesystem::exists(name));
}

// Cleaning runs and starting ones at once: no run loses what it writes.
TEST_F(Left, cleaning_harms_no_run_that_starts) {
  std::atomic<bool> stop = false;
  std::thread cleaner([&] {
    while (!stop) remove_leftovers(dir_ / "out");
  });
  for (int i = 0; i < 60; ++i) {
    write_output(dir_ / "out", "abc", true);
    EXPECT_EQ(read_file(dir_ / "out"), "abc");
    std::filesystem::remove(dir_ / "out");
    write_tree(dir_ / "out", "abc", false);
    EXPECT_EQ(read_file(dir_ / "out/file"), "abc");
    std::filesystem::remove_all(dir_ / "out");
  }
  stop = true;
  cleaner.join();
  EXPECT_EQ(dir_.names(), Names{});
}

TEST_F(Left, names_of_every_length_are_known_again) {
  for (const std::string& name : {std::string("n"), std::string(255, 'n'), std::string("\xff\n"),
                                  std::string(99, 'n') + "\xf0\x9f\x99\x82"}) {
    kill_after([&] { new OutputFile(dir_ / name, 0, false); });
    ASSERT_EQ(dir_.names().size(), 1u);
    EXPECT_LE(dir_.names()[0].size(), 143u);
    EXPECT_EQ(remove_leftovers(dir_ / name).size(), 1u);
    EXPECT_EQ(dir_.names(), Names{});
  }
}

TEST_F(File, same_file_follows_links) {
  write_file(dir_ / "a", "");
  write_file(dir_ / "b", "");
  std::filesystem::create_symlink("a", dir_ / "soft");
  std::filesystem::create_hard_link(dir_ / "a", dir_ / "hard");
  EXPECT_TRUE(same_file(dir_ / "a", dir_ / "a"));
  EXPECT_TRUE(same_file(dir_ / "a", dir_ / "soft"));
  EXPECT_TRUE(same_file(dir_ / "hard", dir_ / "soft"));
  EXPECT_TRUE(same_file(dir_.path(), dir_ / "."));
  EXPECT_FALSE(same_file(dir_ / "a", dir_ / "b"));
  EXPECT_FALSE(same_file(dir_ / "gone", dir_ / "gone"));
  for (const int skip : {0, 1}) {
    stat_fault = {.error = EIO, .skip = skip};
    expect_error(ErrorCode::io, "cannot stat", [&] { same_file(dir_ / "a", dir_ / "a"); });
  }
  stat_fault = {.error = EIO};
  expect_error(ErrorCode::io, "cannot stat", [&] { is_directory(dir_.path()); });
}

}  // namespace
}  // namespace halfbyte::io
