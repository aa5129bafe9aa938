#include "io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <unordered_set>

#include "core/checks.h"
#include "io/file.h"

namespace halfbyte::io {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kMaxOrderedKeys = 32768;

bool is_int64(const nlohmann::json& value) {
  return value.is_number_unsigned() ? value.get<uint64_t>() <= INT64_MAX : value.is_number_integer();
}

// Python writes these, which JSON does not have.
constexpr std::string_view kConstants[] = {"NaN", "Infinity", "-Infinity"};
// Calls `text(part)` for what is outside of strings, and `string(part)` for these with their quotes.
template <class Text, class String>
void for_each_part(std::string_view json, const Text& text, const String& string) {
  for (size_t begin = 0; begin < json.size();) {
    size_t end = std::min(json.find('"', begin), json.size());
    text(json.substr(begin, end - begin));
    begin = end;
    if (begin == json.size()) return;
    for (++end; end < json.size() && json[end] != '"'; ++end)
      if (json[end] == '\\') ++end;
    end = std::min(end + 1, json.size());
    string(json.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace

std::string with_marked_constants(std::string_view json) {
  std::string result;
  const auto keep = [&](std::string_view part) { result += part; };
  for_each_part(
      json,
      [&](std::string_view part) {
        while (!part.empty()) {
          const auto own =
              std::ranges::find_if(kConstants, [&](std::string_view one) { return part.starts_with(one); });
          const size_t size = own == std::end(kConstants) ? 1 : own->size();
          if (own == std::end(kConstants))
            result += part.front();
          else
            result += "\"\\u0001number " + std::string(*own) + "\"";
          part.remove_prefix(size);
        }
      },
      keep);
  return result;
}

std::string without_marks(std::string_view json) {
  std::string result;
  for_each_part(
      json, [&](std::string_view part) { result += part; },
      [&](std::string_view part) {
        constexpr std::string_view kWritten = "\"\\u0001number ";
        result += part.starts_with(kWritten) ? part.substr(kWritten.size(), part.size() - kWritten.size() - 1)
                                             : part;
      });
  return result;
}

template <class Json>
Json parse_json(std::string_view text, const std::string& what) {
  // The library takes a NUL as the end of the text.
  HALFBYTE_CHECK(text.find('\0') == std::string_view::npos, bad_input, "{}: not JSON: NUL at byte {}", what,
                 text.find('\0'));
  constexpr bool kOrdered = std::is_same_v<Json, nlohmann::ordered_json>;
  std::vector<std::unordered_set<std::string>> keys;  // of the objects being parsed
  const auto on_event = [&](int depth, auto event, Json& value) {
    using Event = decltype(event);
    HALFBYTE_CHECK(depth <= kMaxDepth, bad_input, "{}: nested deeper than {} levels", what, kMaxDepth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event != Event::key) return true;
    const auto& key = value.template get_ref<const std::string&>();
    HALFBYTE_CHECK(keys.back().insert(key).second, bad_input, "{}: duplicate key \"{}\"", what,
                   printable(key));
    HALFBYTE_CHECK(!kOrdered || keys.back().size() <= kMaxOrderedKeys, bad_input,
                   "{}: an object with more than {} keys", what, kMaxOrderedKeys);
    return true;
  };
  try {
    return Json::parse(text, typename Json::parser_callback_t(on_event));
  } catch (const nlohmann::json::parse_error& error) {
    HALFBYTE_FAIL(bad_input, "{}: not valid JSON at byte {}", what, error.byte);
  } catch (const nlohmann::json::exception&) {
    HALFBYTE_FAIL(bad_input, "{}: not valid JSON: number out of range", what);
  }
}
template nlohmann::json parse_json(std::string_view, const std::string&);
template nlohmann::ordered_json parse_json(std::string_view, const std::string&);

const nlohmann::json& json_member(const nlohmann::json& object, const char* key, const std::string& what) {
  HALFBYTE_CHECK(object.is_object(), bad_input, "{}: expected an object, got {}", what, object.type_name());
  const auto member = object.find(key);
  HALFBYTE_CHECK(member != object.end(), bad_input, "{}: no \"{}\"", what, key);
  return *member;
}

int64_t json_integer(const nlohmann::json& object, const char* key, const std::string& what) {
  const nlohmann::json& value = json_member(object, key, what);
  HALFBYTE_CHECK(is_int64(value), bad_input, "{}: \"{}\" must be an integer, got {}", what, key,
                 value.type_name());
  return value.get<int64_t>();
}

double json_number(const nlohmann::json& object, const char* key, const std::string& what) {
  const nlohmann::json& value = json_member(object, key, what);
  HALFBYTE_CHECK(value.is_number(), bad_input, "{}: \"{}\" must be a number, got {}", what, key,
                 value.type_name());
  return value.get<double>();
}

bool json_flag(const nlohmann::json& object, const char* key, const std::string& what) {
  const nlohmann::json& value = json_member(object, key, what);
  HALFBYTE_CHECK(value.is_boolean(), bad_input, "{}: \"{}\" must be true or false, got {}", what, key,
                 value.type_name());
  return value.get<bool>();
}

std::string json_string(const nlohmann::json& object, const char* key, const std::string& what) {
  const nlohmann::json& value = json_member(object, key, what);
  HALFBYTE_CHECK(value.is_string(), bad_input, "{}: \"{}\" must be a string, got {}", what, key,
                 value.type_name());
  return value.get<std::string>();
}

std::vector<int64_t> json_shape(const nlohmann::json& object, const char* key, const std::string& what) {
  const nlohmann::json& value = json_member(object, key, what);
  HALFBYTE_CHECK(value.is_array(), bad_input, "{}: \"{}\" must be an array, got {}", what, key,
                 value.type_name());
  std::vector<int64_t> shape;
  for (const nlohmann::json& extent : value) {
    HALFBYTE_CHECK(is_int64(extent), bad_input, "{}: \"{}\" must hold integers, got {}", what, key,
                   extent.type_name());
    shape.push_back(extent.get<int64_t>());
  }
  return shape;
}

}  // namespace halfbyte::io
