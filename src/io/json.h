// JSON documents of a checkpoint. They come from strangers, so parsing is strict.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace halfbyte::io {

// Json: nlohmann::json, or nlohmann::ordered_json to keep the order of the keys. Error(bad_input)
// naming `what` and the byte for what is not JSON; duplicate keys, deep nesting and objects of more than
// 32768 keys where their order is kept (which costs time quadratic in their number) are refused too.
template <class Json>
Json parse_json(std::string_view text, const std::string& what);

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
