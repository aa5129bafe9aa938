#include "io/journal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/directory.h"
#include "core/hash.h"
#include "core/system_call.h"
#include "core/temporary.h"
#include "cpu/parallel.h"

namespace halfbyte::io {
namespace {

using Json = nlohmann::json;

constexpr size_t kHashDigits = 32;
// Of 100,000 weights it has 30 MB.
constexpr uint64_t kMaxBytes = uint64_t{4} << 30;

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  HALFBYTE_FAIL(io, "cannot {} \"{}\": {}", what, printable(path), std::generic_category().message(error));
}

// ASCII, so that names which are no UTF-8 make no error.
std::string text_of(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// As it is read again.
Json normal(const Json& json) { return Json::parse(text_of(json)); }

// What a line says, without its hash; empty where that does not fit.
std::string_view content_of(std::string_view line) {
  const bool fits =
      line.size() > kHashDigits && hash_hex(line.substr(kHashDigits)) == line.substr(0, kHashDigits);
  return fits ? line.substr(kHashDigits) : std::string_view();
}

}  // namespace

Journal::Journal(const std::string& directory, const std::string& name)
    : path_(join(directory, name)), hidden_(path_ + ".hidden") {}

Journal::Journal(const std::string& directory, const Json& identity, int rank)
    : Journal(directory, rank == 0 ? kJournal : fmt::format("{}-{}", kJournal, rank)) {
  // That of a rank of an earlier run, which this one goes on with.
  if (rank > 0 && ::access(path_.c_str(), F_OK) == 0 && read() && difference(identity_, identity).empty())
    return;
  identity_ = normal(identity);
  if (fd_ >= 0) ::close(fd_);
  fd_ = retry_interrupted(
      [&] { return ::open(hidden_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600); });
  if (fd_ < 0) fail("create", hidden_, errno);
  end_ = 0;
  append(text_of(identity_));  // without it the journal would say nothing
  if (::rename(hidden_.c_str(), path_.c_str()) != 0) fail("rename", hidden_, errno);
}

Journal::~Journal() {
  if (fd_ >= 0) ::close(fd_);
}

// False where the first line is damaged.
bool Journal::read() {
  const std::string text =
      read_text(InputFile::open_beneath(parent_of(path_), path_.substr(path_.rfind('/') + 1)), kMaxBytes);
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string_view line = content_of(std::string_view(text).substr(begin, end - begin));
    if (begin == 0) {
      identity_ = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!identity_.is_object()) return false;
    } else if (!take_line(line)) {
      break;
    }
    end_ = end + 1;
  }
  if (end_ == 0) return false;
  fd_ = retry_interrupted([&] { return ::open(path_.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC); });
  if (fd_ < 0) fail("open", path_, errno);
  return true;
}

std::unique_ptr<Journal> Journal::open(const std::string& directory) {
  std::unique_ptr<Journal> journal(new Journal(directory, std::string(kJournal)));
  if (!journal->read()) return nullptr;
  const std::string prefix = fmt::format("{}-", kJournal);
  for (const std::string& name : list_directory(directory)) {
    if (!name.starts_with(prefix) || name.ends_with(".hidden")) continue;
    Journal other(directory, name);
    if (other.read() && other.identity_ == journal->identity_) journal->records_.merge(other.records_);
  }
  return journal;
}

// False for what is no record.
bool Journal::take_line(std::string_view line) {
  const Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object() || !record.contains("name") || !record["name"].is_string()) return false;
  records_[record["name"]] = line;
  return true;
}

void Journal::take(std::string_view lines) {
  for (size_t end = 0; (end = lines.find('\n')) != std::string_view::npos; lines.remove_prefix(end + 1))
    take_line(lines.substr(0, end));
}

Json Journal::find(const std::string& name) const {
  const auto found = records_.find(name);
  return found == records_.end() ? Json() : Json::parse(found->second);
}

void Journal::append(const std::string& json) {
  const std::string text = hash_hex(json) + json + "\n";
  // What an interrupted run had begun.
  if (retry_interrupted([&] { return ::ftruncate(fd_, static_cast<off_t>(end_)); }) != 0)
    fail("truncate", path_, errno);
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = retry_interrupted([&] {
      return ::pwrite(fd_, text.data() + done, text.size() - done, static_cast<off_t>(end_ + done));
    });
    if (count <= 0) fail("write", path_, count < 0 ? errno : EIO);
    done += static_cast<size_t>(count);
  }
  if (retry_interrupted([&] { return ::fsync(fd_); }) != 0) fail("sync", path_, errno);
  end_ += text.size();
}

void Journal::add(const std::string& name, Json record) {
  record["name"] = name;
  std::string line = text_of(record);
  append(line);
  records_[name] = std::move(line);
  added_.push_back(name);
}

std::string Journal::added() const {
  std::string lines;
  for (const std::string& name : added_) lines += records_.at(name) + "\n";
  return lines;
}

void Journal::hide() {
  if (::rename(path_.c_str(), hidden_.c_str()) != 0) fail("rename", path_, errno);
}

bool Journal::show() noexcept {
  return ::rename(hidden_.c_str(), path_.c_str()) == 0 || ::access(path_.c_str(), F_OK) == 0;
}

std::string difference(const Json& there, const Json& here) {
  const Json a = there.flatten(), b = normal(here).flatten();
  const auto value = [](const Json& json, const std::string& key) -> std::string {
    if (!json.contains(key) || json[key].is_null()) return "not set";
    return json[key].is_string() ? json[key].get<std::string>() : text_of(json[key]);
  };
  const auto find = [&](const Json& keys) -> std::string {
    for (const auto& [key, unused] : keys.items())
      if (value(a, key) != value(b, key))
        return fmt::format("{} is {} there and {} here", printable(key.substr(1)), printable(value(a, key)),
                           printable(value(b, key)));
    return "";
  };
  std::string found = find(a);
  return found.empty() ? find(b) : found;
}

Json json_object(std::initializer_list<JsonMember> members) {
  Json object = Json::object();
  for (const JsonMember& member : members) object[member.name] = std::move(member.value);
  return object;
}

Json file_identity(const InputFile& file) {
  const struct stat& status = file.status();
  return json_object({{"bytes", file.size()},
                      {"changed", fmt::format("{}.{:09}", status.st_mtim.tv_sec, status.st_mtim.tv_nsec)}});
}

Json source_identity(const Checkpoint::Impl& input, std::span<const std::string> side_files) {
  Json files = Json::object();
  if (input.path.empty()) return files;  // all is given
  for (const Checkpoint::Impl::File& file : input.files) {
    Json& own = files[file.name] = file_identity(file.input);
    uint64_t header = 0;
    file.input.read(0, std::as_writable_bytes(std::span(&header, 1)));
    std::string text(std::min(file.input.size(), sizeof header + header), '\0');
    file.input.read(0, std::as_writable_bytes(std::span(text)));
    own["header"] = hash_hex(text);
  }
  for (const InputFile& file : input.text_files)
    files[file.path().substr(file.path().rfind('/') + 1)] = file_identity(file);
  for (const std::string& name : side_files) {
    const std::string path = join(input.path, name);
    files[name] = file_identity(InputFile::open_beneath(parent_of(path), name.substr(name.rfind('/') + 1)));
  }
  return files;
}

std::string hash_file(const InputFile& file, int num_threads, ProgressReporter& reporter) {
  constexpr int64_t kPart = int64_t{1} << 20;
  const auto size = static_cast<int64_t>(file.size());
  std::vector<std::string> hashes(static_cast<size_t>(ceil_div(size, kPart)));
  std::vector<std::unique_ptr<std::byte[]>> buffers(static_cast<size_t>(effective_threads(num_threads)));
  parallel_for(std::ssize(hashes), 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
    auto& buffer = buffers[static_cast<size_t>(worker)];
    if (!buffer) buffer.reset(new std::byte[kPart]);
    for (int64_t part = begin; part < end; ++part) {
      const auto count = static_cast<size_t>(std::min(kPart, size - part * kPart));
      file.read(static_cast<uint64_t>(part * kPart), {buffer.get(), count});
      hashes[static_cast<size_t>(part)] = hash_hex({reinterpret_cast<const char*>(buffer.get()), count});
      reporter.poll();
    }
  });
  std::string all;
  for (const std::string& hash : hashes) all += hash;
  return hash_hex(all);
}

std::string exact_text(double value) { return fmt::format("{:a}", value); }

double exact_value(const Json& text) { return std::strtod(text.get<std::string>().c_str(), nullptr); }

Json to_record(const WeightReport& report) {
  Json record = json_object({{"weight", report.name},
                             {"quantized", report.quantized},
                             {"reason", report.reason},
                             {"note", report.note},
                             {"measured", report.measured}});
  if (report.quantized) record["scale_dtype"] = to_string(report.spec.scale_dtype);
  if (!report.measured) return record;
  record["max_error"] = exact_text(report.max_error);
  record["max_error_index"] = report.max_error_index;
  record["relative_rmse"] = exact_text(report.relative_rmse);
  record["snr_db"] = exact_text(report.snr_db);
  return record;
}

void from_record(const Json& record, WeightReport& report) {
  HALFBYTE_CHECK(record.at("weight") == report.name && record.at("quantized") == report.quantized, corrupt,
                 "the journal of the unfinished output is of other weights than \"{}\"",
                 printable(report.name));
  report.note = record.at("note");
  report.measured = record.at("measured");
  if (!report.measured) return;
  report.max_error = exact_value(record.at("max_error"));
  report.max_error_index = record.at("max_error_index");
  report.relative_rmse = exact_value(record.at("relative_rmse"));
  report.snr_db = exact_value(record.at("snr_db"));
}

}  // namespace halfbyte::io
