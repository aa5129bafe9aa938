#include "io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <climits>
#include <csignal>
#include <mutex>
#include <thread>

#include "io/test_directory.h"

// Fault injection: these definitions stand in for those of the C library in the whole program. Each
// does what the original does unless a test armed a fault.
namespace {

struct Fault {
  int error = 0;                   // errno of calls that fail; 0: none does
  int skip = 0;                    // calls before the first that fails
  int count = 1;                   // calls that fail
  size_t max_transfer = SIZE_MAX;  // bytes of one transfer
  bool fails() {
    if (error == 0) return false;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (skip-- > 0 || count-- <= 0) return false;
    errno = error;
    return true;
  }
};
Fault read_fault, write_fault, allocate_fault, sync_fault, rename_fault, rename_flags_fault;

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
  if (rename_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) noexcept {
  if (rename_flags_fault.fails()) return -1;
  return static_cast<int>(syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
}

}  // extern "C"

namespace halfbyte::io {
namespace {

using Names = std::vector<std::string>;

class File : public testing::Test {
 protected:
  ~File() override {
    for (Fault* fault :
         {&read_fault, &write_fault, &allocate_fault, &sync_fault, &rename_fault, &rename_flags_fault})
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

  const InputFile replaced = open();
  write_file(dir_ / "g", "9876543210");
  std::filesystem::rename(dir_ / "g", dir_ / "f");
  expect_error(ErrorCode::bad_input, "replaced by another file", [&] { replaced.check_unchanged(); });

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
  EXPECT_EQ(read_all(old), "old") << "a reader of the old file must keep it";
  EXPECT_EQ(dir_.names(), (Names{"link", "out"}));
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

TEST_F(Output, target_made_in_the_meantime_is_kept) {
  for (const int rename_error : {0, EINVAL}) {
    OutputFile file(dir_ / "out", 3, false);
    file.write(0, bytes_of("abc"));
    write_file(dir_ / "out", "theirs");
    rename_flags_fault = {.error = rename_error};
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
  for (int round = 0; round < 100; ++round) {
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
  // The second time as on a file system without RENAME_NOREPLACE.
  for (const int rename_error : {0, EINVAL}) {
    rename_flags_fault = {.error = rename_error, .count = INT_MAX};
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

TEST_F(Output, works_where_space_cannot_be_reserved) {
  allocate_fault = {.error = EOPNOTSUPP};
  OutputFile file(dir_ / "out", 10, false);
  EXPECT_EQ(std::filesystem::file_size(file.temporary_path()), 10u);
}

// After a fault at any step the old file is there, or the complete new one if the rename was done.
TEST_F(Output, every_fault_leaves_the_old_file_and_nothing_else) {
  const struct {
    Fault& fault;
    Fault value;
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

TEST_F(OutputTree, force_replaces_the_tree_and_follows_no_link) {
  // The second time as on a file system without RENAME_EXCHANGE.
  for (const int rename_error : {0, EINVAL}) {
    rename_flags_fault = {.error = rename_error, .count = INT_MAX};
    std::filesystem::create_directories(dir_ / "out/deep/er");
    std::filesystem::create_directory(dir_ / "outside");
    write_file(dir_ / "outside/kept", "kept");
    write_file(dir_ / "out/old", "old");
    std::filesystem::create_directory_symlink(dir_ / "outside", dir_ / "out/deep/link");
    write_tree(dir_ / "out", "new", true);
    EXPECT_EQ(read_file(dir_ / "out/file"), "new");
    EXPECT_FALSE(std::filesystem::exists(dir_ / "out/old"));
    EXPECT_EQ(read_file(dir_ / "outside/kept"), "kept");
    EXPECT_EQ(dir_.names(), (Names{"out", "outside"}));
    std::filesystem::remove_all(dir_ / "out");
    write_tree(dir_ / "out", "first", true);
    EXPECT_EQ(read_file(dir_ / "out/file"), "first");
    EXPECT_EQ(dir_.names(), (Names{"out", "outside"}));
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

TEST_F(OutputTree, every_fault_leaves_the_old_tree_and_nothing_else) {
  const struct {
    int flags_error;  // of renameat2
    Fault& fault;
    Fault value;
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
    write_tree(dir_ / "out", "old", false);
    const auto replace = [&] {
      OutputDirectory tree(dir_ / "out", true);
      write_file(tree.temporary_path() + "/file", "new");
      rename_flags_fault = {.error = c.flags_error};
      c.fault = c.value;
      tree.commit();
    };
    expect_error(ErrorCode::io, "out", replace);
    c.fault = {};
    EXPECT_EQ(read_file(dir_ / "out/file"), c.content);
    EXPECT_EQ(dir_.names(), Names{"out"});
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
}

}  // namespace
}  // namespace halfbyte::io
