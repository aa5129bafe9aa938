#include "io/json.h"

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

}  // namespace

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
