// Temporary names: of what is written before it is complete. All of them are made here, so that nobody can
// guess one, nothing that is there is opened, and a later run can tell what a killed one left.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace halfbyte {

// Whether it has the form of a temporary name, ".NAME.halfbyte-PID-RANDOM": NAME is the beginning of the name
// of what is written, RANDOM 64 bits of the system's random numbers in hexadecimal digits.
bool is_temporary_name(std::string_view name);
// And whether it is one of an output of this name.
bool is_temporary_name_of(std::string_view name, std::string_view output_name);

// "." for a name without a slash.
std::string parent_of(const std::string& path);

// A new file beside `path`, open for reading and writing, and locked (flock) until the last descriptor of it
// is closed: what is locked is in use. Not locked where the file system has no locks. `mode` as open() takes
// it. Throws std::system_error.
struct TemporaryFile {
  int fd;  // the caller's to close
  std::string path;
};
TemporaryFile make_temporary_file(const std::string& path, unsigned mode);

// In a LockedDirectory: what is going to be the output, and a journal of what of it is complete. With both, a
// directory that a run left is unfinished: a later run can go on with it.
inline constexpr const char* kUnfinishedOutput = "output";
inline constexpr const char* kJournal = "journal";

// A new directory beside `path`, of mode 0700. A file "lock" in it is locked as long as this lives, and shows
// that the directory is one of these.
class LockedDirectory {
 public:
  explicit LockedDirectory(const std::string& path);  // throws std::system_error
  LockedDirectory(LockedDirectory&&) = delete;
  ~LockedDirectory();  // remove(), unless it is kept
  // The directory at `path`, which a run left: it is kept. Null, with the reason, where a run uses it, or it
  // is not one of this user's.
  static std::unique_ptr<LockedDirectory> take_over(const std::string& path, std::string& why_not);
  // From share() on, other processes may join it: it is in use as long as one of them lives. What joins
  // leaves it where it is. share() throws std::system_error.
  void share();
  static std::unique_ptr<LockedDirectory> join(const std::string& path, std::string& why_not);
  const std::string& path() const { return path_; }  // empty once it is removed
  // Removes it with all it holds; links in it are not followed. The error of what could not be removed, or 0.
  int remove() noexcept;
  // Whether the destructor leaves it where it is.
  void set_kept(bool kept) { is_kept_ = kept; }
  bool is_kept() const { return is_kept_; }

 private:
  LockedDirectory() = default;
  static std::unique_ptr<LockedDirectory> open(const std::string& path, int lock, std::string& why_not);
  void close() noexcept;

  std::string path_;
  int directory_ = -1, lock_ = -1;
  bool is_kept_ = false;
};

// What is there under a temporary name of the output: removed, if it is one of ours that nobody uses, and is
// not unfinished, or `discards`.
struct LeftoverState {
  bool gone = false;     // somebody else removed it, or it is complete by now
  std::string why_kept;  // empty: it was removed
  bool unfinished = false;
};
LeftoverState remove_leftover(const std::string& directory, const std::string& name,
                              const std::string& output_name, bool discards);

}  // namespace halfbyte
