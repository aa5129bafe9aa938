// Files that appear under their names complete or not at all, and what runs that were killed left beside
// them. Everything in halfbyte that writes a file or a directory does it in this way (docs/output.md).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/error.hpp"

namespace halfbyte {

// What a run that was killed left: ".NAME.halfbyte-PID-RANDOM" beside the output NAME.
struct Leftover {
  std::string path;
  std::string why_kept;     // empty: it was removed
  bool unfinished = false;  // a checkpoint of which some files are complete: Unfinished of checkpoint.hpp
};
// Looks for what earlier runs left beside `output`, which need not exist, and removes what is provably of
// halfbyte and of this user and used by nobody: a run that lives holds a lock of it. The rest is kept, with
// the reason, and so is what is unfinished, unless `discards`. What writes a checkpoint, a kernel pack or an
// AtomicFile calls this first. Empty where the directory cannot be read.
HALFBYTE_API std::vector<Leftover> remove_leftovers(const std::string& output, bool discards = false);

// A file that is written at once and appears complete or not at all. Its temporary sibling is made by the
// constructor, so that a path that cannot be written is known before the work.
class AtomicFile {
 public:
  // Error(exists) if `path` exists and not force; with force a file or a link (not followed) is replaced, and
  // anything else is Error(exists). Error(io) for permission, a missing parent.
  HALFBYTE_API AtomicFile(const std::string& path, bool force);
  HALFBYTE_API AtomicFile(AtomicFile&&) noexcept;
  HALFBYTE_API AtomicFile& operator=(AtomicFile&&) noexcept;
  HALFBYTE_API ~AtomicFile();  // leaves nothing of what was not committed
  // Writes, syncs and renames it; once. Error(exists) if something else has been put at `path` since, also
  // with force. Error(io) for no space.
  HALFBYTE_API void commit(std::string_view bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A new directory beside `output`, of mode 0700 and with a name that nobody guesses. Removed at the end with
// all it holds; after a kill, by remove_leftovers(output). Error(io) where it cannot be made.
class WorkDirectory {
 public:
  HALFBYTE_API explicit WorkDirectory(const std::string& output);
  HALFBYTE_API WorkDirectory(WorkDirectory&&) noexcept;
  HALFBYTE_API WorkDirectory& operator=(WorkDirectory&&) noexcept;
  HALFBYTE_API ~WorkDirectory();
  HALFBYTE_API const std::string& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfbyte
