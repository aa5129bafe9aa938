// Text, tables and files that the tool writes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/output.hpp"

namespace halfbyte::cli {

// Text from a file, fit for a terminal: ASCII, with everything else escaped as in JSON; long text is
// cut in the middle.
std::string printable(std::string_view text);

std::string format_shape(std::span<const int64_t> shape);  // "[256, 768]"
std::string format_bytes(uint64_t num_bytes);              // "6.25 MiB"
std::string format_snr(double snr_db);                     // "20.53", "exact"

enum class Align { left, right };

// Columns as wide as their widest cell. Cells are ASCII.
class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::left;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add_row(std::vector<std::string> cells) {  // what is missing at its end is empty
    cells.resize(columns_.size());
    rows_.push_back(std::move(cells));
  }
  bool empty() const { return rows_.empty(); }
  // Title line and rows, each ended by a newline.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "label   value\n": the line of a summary.
std::string summary_line(std::string_view label, std::string_view value);

// Throws Error(io) where not all could be written.
void write_stdout(std::string_view text);
// Best effort: there is nobody left to tell.
void write_stderr(std::string_view text) noexcept;

// An AtomicFile that an option names: "--json".
class ReportFile {
 public:
  ReportFile(const std::string& option, const std::string& path, bool force);
  void commit(std::string_view text);

 private:
  std::string option_;
  AtomicFile file_;
};

// Whether `path` is the JSON report of a run of this command that has failed.
bool is_failed_report(const std::string& path, const std::string& command);

}  // namespace halfbyte::cli
