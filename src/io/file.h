// Files, read with pread into owned buffers and written all or nothing.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace halfbyte::io {

// Text for messages: control characters, quotes, invalid UTF-8 and bidirectional controls escaped,
// long text cut in the middle.
std::string printable(std::string_view text);

// A regular file opened for reading. Thread safe after opening.
class InputFile {
 public:
  InputFile() = default;
  // Follows links (the user named this path). Error(io) if it cannot be opened, Error(bad_input) if
  // it is not a regular file (a FIFO or device is never waited for).
  static InputFile open(const std::string& path);
  // `name` is untrusted (from an index): one path component, an existing file inside the directory `dir`, no
  // link but is_cache_link. Error(bad_input) otherwise.
  static InputFile open_beneath(const std::string& dir, const std::string& name);
  // Whether `name` in `dir`, a snapshot in the cache of the Hugging Face hub or a directory below it, is a
  // link to a blob of the same repository: models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH.
  static bool is_cache_link(const std::string& dir, const std::string& name);
  // Error(bad_input) for any other.
  [[noreturn]] static void refuse_link(const std::string& path);
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  const std::string& path() const { return path_; }
  uint64_t size() const { return static_cast<uint64_t>(stat_.st_size); }
  const struct stat& status() const { return stat_; }
  // Reads exactly bytes.size() bytes, retrying short reads and EINTR. Error(io) on failure,
  // Error(bad_input) "changed while reading" where the file has become shorter.
  void read(uint64_t offset, std::span<std::byte> bytes) const;
  // Error(bad_input) if size or modification time differ from when it was opened, or if its path now
  // names another file or none.
  void check_unchanged() const;

 private:
  InputFile(int fd, std::string path);  // takes over fd

  int fd_ = -1;
  std::string path_;
  struct stat stat_ = {};
};

// Reads a whole small file. Error(bad_input) if it is larger than max_bytes.
std::string read_text(const InputFile& file, uint64_t max_bytes);

// A file that appears under its name complete or not at all. Written to a temporary sibling
// (".NAME.halfbyte-PID-RANDOM", O_EXCL), space reserved first, synced, renamed. The destructor removes
// what was not committed.
class OutputFile {
 public:
  // Reserves `num_bytes`. Error(exists) if `path` exists and not force; Error(io) for no space,
  // permission, a missing parent.
  OutputFile(const std::string& path, uint64_t num_bytes, bool force);
  OutputFile(OutputFile&&) = delete;
  ~OutputFile();
  // Thread safe for disjoint ranges. Nothing may be written after sync().
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // Name of the temporary file: to read back before commit().
  const std::string& temporary_path() const { return temporary_; }
  void sync();
  // sync() if it was not yet done, then rename: without force an existing target is Error(exists),
  // decided by the rename itself; then the directory is synced. With force a link at `path` is
  // replaced, not followed; a directory is Error(exists) even then.
  void commit();

 private:
  int reserve(uint64_t num_bytes);
  void discard() noexcept;

  int fd_ = -1;
  bool force_, synced_ = false;
  std::string path_, temporary_;
};

// The same for a directory: a temporary sibling directory, renamed when complete. With force an
// existing directory is exchanged and then removed with all it holds; links are not followed.
class OutputDirectory {
 public:
  OutputDirectory(const std::string& path, bool force);
  OutputDirectory(OutputDirectory&&) = delete;
  ~OutputDirectory();
  const std::string& temporary_path() const { return temporary_; }
  // Syncs the directory itself (files were synced by their writers) and renames it.
  void commit();

 private:
  bool force_;
  std::string path_, temporary_;
};

// Whether both paths name one existing file or directory (links followed).
bool same_file(const std::string& a, const std::string& b);

}  // namespace halfbyte::io
