// Text, tables and files that the tool writes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
  void add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
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

// A text file that appears complete or not at all. Its temporary sibling is opened at once, so that
// a path that cannot be written is known before hours of work.
class ReportFile {
 public:
  // `option` names the file in messages: "--json". Error(exists) if `path` exists and not force, Error(usage)
  // if it exists and is not a regular file.
  ReportFile(const std::string& option, const std::string& path, bool force);
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  ~ReportFile();
  // Error(exists) if something else has been put there since, such as the output of the run itself.
  void commit(std::string_view text);

 private:
  struct Identity {
    dev_t device;
    ino_t inode;
    bool operator==(const Identity&) const = default;
  };
  // Of what lies at `path_`, empty if nothing does.
  std::optional<Identity> existing() const;

  std::string path_, name_, temporary_;  // name_: with the option, for messages
  std::optional<Identity> replaced_;
  int fd_ = -1;
};

}  // namespace halfbyte::cli
