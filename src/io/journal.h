// The journal of an unfinished output: which run it is of, and what of it is complete. Each line is a record
// of JSON behind its hash, written at once and synced; what follows the last whole line does not count. It
// lies beside the output, in the LockedDirectory of both (core/temporary.h).
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint.h"
#include "io/progress.h"

namespace halfbyte::io {

class Journal {
 public:
  // Begins one, of this process among several (rank), or goes on with that of the rank. `identity` is what
  // two runs must have in common, so that one goes on with the output of the other. Error(io).
  Journal(const std::string& directory, const nlohmann::json& identity, int rank = 0);
  Journal(Journal&&) = delete;
  ~Journal();
  // That of a directory, with the records of those of the other ranks; null where its first line is damaged.
  // Error(io).
  static std::unique_ptr<Journal> open(const std::string& directory);

  const nlohmann::json& identity() const { return identity_; }
  size_t num_records() const { return records_.size(); }
  bool contains(const std::string& name) const { return records_.contains(name); }
  // Null where there is none of this name.
  nlohmann::json find(const std::string& name) const;
  // Takes the place of an earlier one of this name. Error(io).
  void add(const std::string& name, nlohmann::json record);
  // Those that were added, a line each; and such lines of another process, which its own journal has.
  std::string added() const;
  void take(std::string_view lines);
  // From hide() to show(), what it is of does not count as unfinished. hide(): Error(io).
  void hide();
  bool show() noexcept;  // false where it cannot

 private:
  Journal(const std::string& directory, const std::string& name);
  bool read();
  bool take_line(std::string_view line);
  void append(const std::string& json);

  std::string path_, hidden_;
  int fd_ = -1;
  uint64_t end_ = 0;  // of the last whole line
  nlohmann::json identity_;
  // Lines, which take a sixth of the memory of what they say.
  std::map<std::string, std::string> records_;
  std::vector<std::string> added_;  // names
};

// The first difference of two identities: "options/group_size is 64 there and 32 here"; empty: there is none.
std::string difference(const nlohmann::json& there, const nlohmann::json& here);

// What tells the files of an input from others: their names, sizes and times of change, and the headers of
// those that hold tensors.
nlohmann::json source_identity(const Checkpoint::Impl& input, std::span<const std::string> side_files);
nlohmann::json file_identity(const InputFile& file);

// Of the whole content, by the hashes of its parts. Reads it once.
std::string hash_file(const InputFile& file, int num_threads, ProgressReporter& reporter);

// What a report says of a weight after its file is written, and what another run can know no more.
nlohmann::json to_record(const WeightReport& report);
// Error(corrupt) for the record of another weight. Like exact_value(), throws nlohmann::json::exception for
// what is no such record.
void from_record(const nlohmann::json& record, WeightReport& report);

// An object of these members. nlohmann's own constructor (3.11.2) loses what it has where memory ends, and
// operator[] of a null value leaves a broken one.
struct JsonMember {
  const char* name;
  mutable nlohmann::json value;  // moves to the object
};
nlohmann::json json_object(std::initializer_list<JsonMember> members);

// A value of an option, null where it is not set.
template <class T>
nlohmann::json option_json(const std::optional<T>& option) {
  if (!option) return nullptr;
  if constexpr (std::is_enum_v<T>)
    return to_string(*option);
  else
    return *option;
}

// Floats as text that loses nothing, infinities too.
std::string exact_text(double value);
double exact_value(const nlohmann::json& text);

}  // namespace halfbyte::io
