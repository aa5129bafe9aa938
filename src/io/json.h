// JSON documents of a checkpoint. They come from strangers, so parsing is strict, takes time and memory that
// are linear in the text, and keeps to the limits of io/limits.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/limits.h"

namespace halfbyte::io {

// Asked now and then in long work. Throws to end it.
using Stop = std::function<void()>;

// A text and what to say of it in messages: byte 0 of the text is byte `first_byte` of the file.
struct JsonText {
  std::string_view text;
  std::string what;
  uint64_t first_byte = 0;
  int max_depth = kMaxJsonDepth;
  size_t max_values = kMaxJsonValues;
};
// What is in a text, in its order. An event may move from its string, and throws to end the parse.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual void null() = 0;
  virtual void boolean(bool value) = 0;
  virtual void negative(int64_t value) = 0;
  virtual void natural(uint64_t value) = 0;
  virtual void real(double value, const std::string& text) = 0;
  virtual void string(std::string& value) = 0;
  virtual void key(std::string& value) = 0;
  virtual void begin_object() = 0;
  virtual void end_object() = 0;
  virtual void begin_array() = 0;
  virtual void end_array() = 0;
};
// Error(bad_input) naming `what` and the byte for what is not JSON, and `what` for what is beyond a limit.
// Duplicate keys are left to `events`.
void parse_json_events(const JsonText& json, JsonEvents& events, const Stop& stop = {});

// Json: nlohmann::json, or nlohmann::ordered_json to keep the order of the keys. Error(bad_input) as above,
// and naming `what` for duplicate keys.
template <class Json>
Json parse_json(std::string_view text, const std::string& what);
// The same of an object, but that the value of `key` in it goes to `events`; in the document it is null.
nlohmann::json parse_json_without(const JsonText& json, const char* key, JsonEvents& events,
                                  const Stop& stop);

// A place of a key that occurs twice among keys(0) .. keys(count - 1). Sorts by hash first: comparing a
// million long keys is slow.
template <class Keys>
std::optional<size_t> find_duplicate(size_t count, const Keys& keys) {
  struct Key {
    size_t hash, index;
  };
  std::vector<Key> sorted(count);
  for (size_t i = 0; i < count; ++i) sorted[i] = {std::hash<std::string_view>()(keys(i)), i};
  std::ranges::sort(sorted, [&](const Key& a, const Key& b) {
    return a.hash != b.hash ? a.hash < b.hash : std::string_view(keys(a.index)) < keys(b.index);
  });
  const auto same = std::ranges::adjacent_find(sorted, [&](const Key& a, const Key& b) {
    return a.hash == b.hash && std::string_view(keys(a.index)) == keys(b.index);
  });
  return same == sorted.end() ? std::nullopt : std::optional(same->index);
}

// The text as a string in JSON. Error(bad_input) where it is not UTF-8.
std::string json_quoted(std::string_view text);

// NaN, Infinity and -Infinity, which Python writes and JSON does not have, as strings that begin with the
// character U+0001 and "number "; and back, in what nlohmann's dump has made.
std::string with_marked_constants(std::string_view json);
std::string without_marks(std::string_view json);

// Members of `object`. Error(bad_input) naming `what` and the key if it is missing or of another kind.
const nlohmann::json& json_member(const nlohmann::json& object, const char* key, const std::string& what);
int64_t json_integer(const nlohmann::json& object, const char* key, const std::string& what);
double json_number(const nlohmann::json& object, const char* key, const std::string& what);
bool json_flag(const nlohmann::json& object, const char* key, const std::string& what);
std::string json_string(const nlohmann::json& object, const char* key, const std::string& what);
std::vector<int64_t> json_shape(const nlohmann::json& object, const char* key, const std::string& what);

}  // namespace halfbyte::io
