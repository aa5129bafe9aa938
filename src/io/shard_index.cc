#include "io/shard_index.h"

#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/checks.h"
#include "io/file.h"
#include "io/limits.h"

namespace halfbyte::io {
namespace {

constexpr const char* kWeightMap = "weight_map";
constexpr size_t kOwnValues = 4;  // that an index has besides those of tensors: the document, the map, ...

// Takes what the "weight_map" has.
class MapEvents final : public JsonEvents {
 public:
  explicit MapEvents(ShardIndex& index) : index_(index) {}

  void null() override { refuse(); }
  void boolean(bool) override { refuse(); }
  void negative(int64_t) override { refuse(); }
  void natural(uint64_t) override { refuse(); }
  void real(double, const std::string&) override { refuse(); }
  void begin_array() override { refuse(); }
  void end_array() override {}
  void begin_object() override {
    if (is_open_) refuse();
    is_open_ = true;
  }
  void end_object() override { is_open_ = false; }
  void key(std::string& value) override {
    HALFBYTE_CHECK(index_.entries.size() < kMaxModelTensors, bad_input, "{}: has more than {} tensors",
                   kIndexFile, kMaxModelTensors);
    // The limit of the file is below 2^32 bytes.
    index_.entries.push_back(
        {static_cast<uint32_t>(index_.names.size()), static_cast<uint32_t>(value.size()), 0});
    index_.names += value;
  }
  void string(std::string& value) override {
    if (!is_open_) refuse();
    if (index_.files.empty() || index_.files[last_] != value) {
      const auto [number, added] = numbers_.emplace(value, static_cast<uint32_t>(index_.files.size()));
      if (added) index_.files.push_back(value);
      last_ = number->second;
    }
    index_.entries.back().file = last_;
  }

 private:
  [[noreturn]] void refuse() const {
    HALFBYTE_CHECK(is_open_, bad_input, "{}: \"{}\" must be an object", kIndexFile, kWeightMap);
    HALFBYTE_FAIL(bad_input, "{}: the file of tensor \"{}\" must be a string", kIndexFile,
                  printable(index_.name(index_.entries.back())));
  }

  ShardIndex& index_;
  std::unordered_map<std::string, uint32_t> numbers_;  // of the files
  uint32_t last_ = 0;
  bool is_open_ = false;
};

}  // namespace

ShardIndex parse_shard_index(std::string_view text, const Stop& stop) {
  HALFBYTE_CHECK(text.size() <= kMaxIndexBytes, bad_input, "{}: {} bytes, more than the limit of {}",
                 kIndexFile, text.size(), kMaxIndexBytes);
  ShardIndex index;
  index.names.reserve(text.size());  // grown, it would be there twice
  MapEvents events(index);
  nlohmann::json rest =
      parse_json_without({text, kIndexFile, 0, kMaxJsonDepth, kMaxJsonValues + kMaxModelTensors + kOwnValues},
                         kWeightMap, events, stop);
  json_member(rest, kWeightMap, kIndexFile);
  rest.erase(kWeightMap);
  index.rest = rest.dump();
  const auto name_of = [&](size_t i) { return index.name(index.entries[i]); };
  if (const auto twice = find_duplicate(index.entries.size(), name_of))
    HALFBYTE_FAIL(bad_input, "{}: duplicate key \"{}\"", kIndexFile, printable(name_of(*twice)));
  return index;
}

std::string shard_index_text(std::string_view rest, uint64_t total_bytes,
                             std::span<const std::pair<std::string_view, std::string_view>> files) {
  HALFBYTE_CHECK(files.size() <= kMaxModelTensors, bad_input,
                 "the output would have {} tensors, more than the limit of {}", files.size(),
                 kMaxModelTensors);
  nlohmann::json index = nlohmann::json::object();
  if (!rest.empty()) index = parse_json<nlohmann::json>(rest, kIndexFile);
  if (!index["metadata"].is_object()) index["metadata"] = nlohmann::json::object();
  index["metadata"]["total_size"] = total_bytes;
  index[kWeightMap] = nlohmann::json::object();
  const std::string frame = index.dump(2);
  // Only keys of the document itself have two blanks before them.
  const std::string own = fmt::format("\n  \"{}\": {{", kWeightMap);
  const size_t inside = frame.find(own) + own.size();
  std::string text = frame.substr(0, inside);
  for (const auto& [tensor, file] : files)
    text += fmt::format("{}\n    {}: {}", text.size() == inside ? "" : ",", json_quoted(tensor),
                        json_quoted(file));
  if (!files.empty()) text += "\n  ";
  text += frame.substr(inside);
  text += '\n';
  HALFBYTE_CHECK(text.size() <= kMaxIndexBytes, bad_input,
                 "{} would have {} bytes, more than the limit of {}", kIndexFile, text.size(),
                 kMaxIndexBytes);
  return text;
}

}  // namespace halfbyte::io
