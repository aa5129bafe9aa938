#include "output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>

#include "halfbyte/error.hpp"

namespace halfbyte::cli {

namespace {

[[noreturn]] void throw_io(const std::string& what, int error) {
  throw Error(ErrorCode::io, fmt::format("{}: {}", what, std::generic_category().message(error)));
}

// Returns 0 or the errno of the failure.
int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kMaxLength = 200;
  const std::string json =
      nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  std::string escaped = json.substr(1, json.size() - 2);
  if (escaped.size() <= kMaxLength) return escaped;
  const size_t half = (kMaxLength - 3) / 2;
  return escaped.substr(0, half) + "..." + escaped.substr(escaped.size() - half);
}

std::string format_shape(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string format_bytes(uint64_t num_bytes) {
  if (num_bytes < 1024) return fmt::format("{} B", num_bytes);
  double value = static_cast<double>(num_bytes);
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.2f} {}", value, unit);
}

std::string format_snr(double snr_db) {
  return std::isinf(snr_db) && snr_db > 0 ? "exact" : fmt::format("{:.2f}", snr_db);
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(column.title.size());
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());

  std::string result;
  const auto add_line = [&](const auto& cell) {
    std::string line;
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) line += "  ";
      line += columns_[i].align == Align::left ? fmt::format("{:<{}}", cell(i), widths[i])
                                               : fmt::format("{:>{}}", cell(i), widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + "\n";
  };
  add_line([&](size_t i) { return columns_[i].title; });
  for (const auto& row : rows_) add_line([&](size_t i) { return row[i]; });
  return result;
}

std::string summary_line(std::string_view label, std::string_view value) {
  return fmt::format("{:<12} {}\n", label, value);
}

void write_stdout(std::string_view text) {
  if (const int error = write_all(STDOUT_FILENO, text)) throw_io("cannot write to standard output", error);
}

void write_stderr(std::string_view text) noexcept { write_all(STDERR_FILENO, text); }

std::optional<ReportFile::Identity> ReportFile::existing() const {
  struct stat status;
  if (::lstat(path_.c_str(), &status) != 0) return std::nullopt;
  // Renaming over a device or a pipe would remove it.
  if (!S_ISREG(status.st_mode))
    throw Error(ErrorCode::usage, fmt::format("{}: not a regular file (use - for standard output)", name_));
  return Identity{status.st_dev, status.st_ino};
}

ReportFile::ReportFile(const std::string& option, const std::string& path, bool force)
    : path_(path), name_(fmt::format("{} {}", option, printable(path))), replaced_(existing()) {
  if (replaced_ && !force)
    throw Error(ErrorCode::exists, fmt::format("{}: exists already (use --force to replace it)", name_));
  const size_t name = path.rfind('/') + 1;  // 0 where there is no slash
  temporary_ = fmt::format("{}.{}.halfbyte-{}", path.substr(0, name), path.substr(name), ::getpid());
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd_ < 0) throw_io(name_ + ": cannot create", errno);
}

ReportFile::~ReportFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void ReportFile::commit(std::string_view text) {
  if (existing() != replaced_) throw Error(ErrorCode::exists, name_ + ": was written by somebody else");
  int error = write_all(fd_, text);
  if (error == 0 && ::fsync(fd_) != 0) error = errno;
  if (error == 0 && ::rename(temporary_.c_str(), path_.c_str()) != 0) error = errno;
  if (error != 0) throw_io(name_ + ": cannot write", error);
  ::close(fd_);
  fd_ = -1;
}

}  // namespace halfbyte::cli
