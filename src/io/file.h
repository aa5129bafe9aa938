// Files, read with pread into owned buffers and written all or nothing.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/temporary.h"

namespace halfbyte::io {

// Text for messages: control characters, quotes, invalid UTF-8 and bidirectional controls escaped,
// long text cut in the middle.
std::string printable(std::string_view text);

// A regular file for reading. Thread safe after opening. At most 64 files of a process are open at a time,
// fewer where it may have fewer descriptors: others are closed, and opened again when they are read.
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

  const std::string& path() const;
  uint64_t size() const { return static_cast<uint64_t>(status().st_size); }
  const struct stat& status() const;  // when it was opened
  // Reads exactly bytes.size() bytes, retrying short reads and EINTR. Error(io) on failure,
  // Error(bad_input) "changed while reading" where the file has become shorter.
  void read(uint64_t offset, std::span<std::byte> bytes) const;
  // Error(bad_input) if its size, or the time of the last change of its content or status, differ from when
  // it was opened, or if its path now names another file or none.
  void check_unchanged() const;

 private:
  struct State;
  struct Descriptors;
  InputFile(int fd, std::string path);  // takes over fd

  std::shared_ptr<State> state_;
};

// Reads a whole small file. Error(bad_input) if it is larger than max_bytes, or changes meanwhile.
std::string read_text(const InputFile& file, uint64_t max_bytes);

class OutputDirectory;

// A file that appears under its name complete or not at all. Written to a temporary sibling
// (core/temporary.h), space reserved first, synced, renamed. The destructor removes what was not committed.
class OutputFile {
 public:
  // Reserves `num_bytes`. Error(exists) if `path` exists and not force; with force a file is replaced, and a
  // link to one or to nothing (not followed), but no directory, device, FIFO, socket, link to such, or mount
  // point: Error(exists) names it. Error(io) for no space, permission, a missing parent. The file gets what
  // the umask leaves of `permissions`.
  OutputFile(const std::string& path, uint64_t num_bytes, bool force, unsigned permissions = 0666);
  // A file of a directory that is not visible yet, with missing directories in between: it has its name at
  // once, and stays where it is not committed. `name` is a relative path. Of one that is there already, the
  // content is kept: making it reserves its space.
  OutputFile(const OutputDirectory& directory, const std::string& name, uint64_t num_bytes);
  // One without a name, which goes when it is closed, in a directory; an empty path: in memory. It cannot be
  // committed.
  static std::unique_ptr<OutputFile> unnamed(const std::string& directory, uint64_t num_bytes);
  OutputFile(OutputFile&&) = delete;
  ~OutputFile();
  // Thread safe for disjoint ranges. Nothing may be written after sync().
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // Name of the temporary file, or one by which this process can open it: to read back before commit().
  const std::string& temporary_path() const { return temporary_; }
  // `poll` is called in between, at least once in 16 MiB that are not yet on the disk, and may throw.
  void sync(const std::function<void()>& poll = {});
  // sync() if it was not yet done, then rename: without force an existing target is Error(exists), decided by
  // the rename itself (where the file system has neither a rename that replaces nothing nor hard links, by a
  // look before it); with force what cannot be replaced is Error(exists) again. Then the directory is synced.
  void commit();

 private:
  OutputFile(int fd, std::string path);
  int reserve(uint64_t num_bytes);
  void write_back(const std::function<void()>& poll);
  void discard() noexcept;

  int fd_ = -1;
  const OutputDirectory* directory_ = nullptr;  // of which it is a file
  bool force_, synced_ = false;
  std::string path_, temporary_;
};

// The same for a directory: written as "output" in a temporary sibling directory, renamed when complete. With
// force an existing directory is exchanged, and then removed with all it holds, if check_replaceable
// (io/replaced.h) allows that; links are not followed.
class OutputDirectory {
 public:
  // `side_files`: relative paths that the directory which is replaced may have, besides those of any
  // checkpoint. `unfinished`: what an earlier run left; null: there is nothing.
  OutputDirectory(const std::string& path, bool force, std::vector<std::string> side_files = {},
                  std::unique_ptr<LockedDirectory> unfinished = nullptr);
  // One that another process has made, and commits.
  OutputDirectory(const std::string& path, std::unique_ptr<LockedDirectory> joined);
  OutputDirectory(OutputDirectory&&) = delete;
  ~OutputDirectory();
  const std::string& temporary_path() const { return temporary_; }
  // What the temporary directory lies in.
  LockedDirectory& locked() const { return *directory_; }
  // Of a file in it, the size and the bytes that it has on the disk; zeros where it does not exist.
  struct FileSize {
    uint64_t bytes = 0, allocated = 0;
  };
  FileSize size_of(const std::string& name) const;
  // The directories between it and a file in it.
  void make_parents(const std::string& name) const;
  // Error(io) where the file system has less than `num_bytes` free, or fewer than `num_files` inodes, as far
  // as it says.
  void check_space(uint64_t num_bytes, uint64_t num_files) const;
  // Syncs the directory and those in it; files were synced by their writers.
  void sync();
  // Syncs the names of its files, and its own.
  void sync_names() const;
  // sync() if it was not yet done, then renames it. What force may replace is looked at again. `last` is
  // called right before the rename.
  void commit(const std::function<void()>& last = {});

 private:
  void check_replaced() const;

  bool force_, synced_ = false;
  std::string path_, temporary_;
  std::vector<std::string> side_files_;
  std::unique_ptr<LockedDirectory> directory_;  // that temporary_ lies in
};

// Whether both paths name one existing file or directory (links followed). Error(io) where that cannot be
// told.
bool same_file(const std::string& a, const std::string& b);
// Names of what is in a directory, sorted. Error(io).
std::vector<std::string> list_directory(const std::string& path);
// Whether a directory lies there (links followed); false for what does not exist. Error(io) likewise.
bool is_directory(const std::string& path);

}  // namespace halfbyte::io
