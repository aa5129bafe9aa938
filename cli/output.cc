#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
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
    if (written <= 0) return written < 0 ? errno : EIO;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kMaxLength = 200;
  const auto is_plain = [](char c) { return ' ' <= c && c <= '~' && c != '"' && c != '\\'; };
  std::string escaped(text);
  if (!std::all_of(text.begin(), text.end(), is_plain)) {
    const std::string json =
        nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
    escaped = json.substr(1, json.size() - 2);
  }
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
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string_view text = cell(i);
      const size_t padding = widths[i] - text.size(), left = columns_[i].align == Align::left ? 0 : padding;
      if (i > 0) result += "  ";
      result.append(left, ' ').append(text).append(padding - left, ' ');
    }
    result.erase(result.find_last_not_of(' ') + 1);
    result += '\n';
  };
  add_line([&](size_t i) { return std::string_view(columns_[i].title); });
  for (const auto& row : rows_) add_line([&](size_t i) { return std::string_view(row[i]); });
  return result;
}

std::string summary_line(std::string_view label, std::string_view value) {
  return fmt::format("{:<12} {}\n", label, value);
}

void write_stdout(std::string_view text) {
  if (const int error = write_all(STDOUT_FILENO, text)) throw_io("cannot write to standard output", error);
}

void write_stderr(std::string_view text) noexcept { write_all(STDERR_FILENO, text); }

namespace {

// Runs `action`; the option goes before what it throws.
template <class Action>
auto naming(const std::string& option, const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    const char* const hint =
        error.code() == ErrorCode::exists ? " (--force replaces files; - is standard output)" : "";
    throw Error(error.code(), fmt::format("{}: {}{}", option, error.what(), hint));
  }
}

}  // namespace

ReportFile::ReportFile(const std::string& option, const std::string& path, bool force)
    : option_(option), file_(naming(option, [&] { return AtomicFile(path, force); })) {}

bool is_failed_report(const std::string& path, const std::string& command) {
  constexpr uintmax_t kMaxBytes = 1 << 20;  // one of a failure is short
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) > kMaxBytes)
    return false;
  std::ifstream file(path);
  const auto report = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  return report.is_object() && report.contains("schema_version") &&
         report.value("ok", nlohmann::json()) == false &&
         report.value("command", nlohmann::json()) == command;
}

void ReportFile::commit(std::string_view text) {
  naming(option_, [&] { file_.commit(text); });
}

}  // namespace halfbyte::cli
