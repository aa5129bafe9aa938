#include "halfbyte/output.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include "core/checks.h"
#include "core/directory.h"
#include "core/temporary.h"
#include "io/file.h"

namespace halfbyte {
namespace {

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

struct Identity {
  dev_t device;
  ino_t inode;
  bool operator==(const Identity&) const = default;
};
// Of what lies at `path`, links not followed.
std::optional<Identity> identity_of(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) == 0) return Identity{status.st_dev, status.st_ino};
  HALFBYTE_CHECK(errno == ENOENT, io, "cannot stat \"{}\": {}", io::printable(path),
                 std::generic_category().message(errno));
  return std::nullopt;
}

}  // namespace

std::vector<Leftover> remove_leftovers(const std::string& output, bool discards) {
  const std::string path = without_slashes(output), parent = parent_of(path);
  const std::string name = path.substr(path.rfind('/') + 1);
  std::vector<std::string> names;
  std::error_code error;
  for (std::string& found : names_in(parent, error))
    if (is_temporary_name_of(found, name)) names.push_back(std::move(found));
  std::vector<Leftover> leftovers;
  for (const std::string& found : names)
    if (LeftoverState state = remove_leftover(parent, found, name, discards); !state.gone)
      leftovers.push_back({join(parent, found), std::move(state.why_kept), state.unfinished});
  return leftovers;
}

struct AtomicFile::Impl {
  std::string path;
  std::optional<Identity> replaced;
  io::OutputFile file;
  Impl(const std::string& path, bool force) : path(path), replaced(identity_of(path)), file(path, 0, force) {}
};

AtomicFile::AtomicFile(const std::string& path, bool force) {
  remove_leftovers(path);
  impl_ = std::make_unique<Impl>(path, force);
}
AtomicFile::AtomicFile(AtomicFile&&) noexcept = default;
AtomicFile& AtomicFile::operator=(AtomicFile&&) noexcept = default;
AtomicFile::~AtomicFile() = default;

void AtomicFile::commit(std::string_view bytes) {
  HALFBYTE_CHECK(identity_of(impl_->path) == impl_->replaced, exists,
                 "output \"{}\" was written by somebody else in the meantime", io::printable(impl_->path));
  impl_->file.write(0, std::as_bytes(std::span(bytes)));
  impl_->file.commit();
}

struct WorkDirectory::Impl {
  LockedDirectory directory;
};

WorkDirectory::WorkDirectory(const std::string& output) {
  try {
    impl_.reset(new Impl{LockedDirectory(without_slashes(output))});
  } catch (const std::system_error& error) {
    HALFBYTE_FAIL(io, "cannot make a directory beside \"{}\": {}", io::printable(output),
                  error.code().message());
  }
}
WorkDirectory::WorkDirectory(WorkDirectory&&) noexcept = default;
WorkDirectory& WorkDirectory::operator=(WorkDirectory&&) noexcept = default;
WorkDirectory::~WorkDirectory() = default;

const std::string& WorkDirectory::path() const { return impl_->directory.path(); }

}  // namespace halfbyte
