#include "io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>
#include <utility>

#include "core/checks.h"
#include "io/file.h"
#include "io/limits.h"

namespace halfbyte::io {
namespace {

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

// What the JSON library takes silently (NUL as the end) or makes costly: it spells out each control character
// since the last string in its errors.
void check_text(const JsonText& json) {
  size_t num_controls = 0;
  for (size_t i = 0; i < json.text.size(); ++i) {
    const char c = json.text[i];
    if (c == '"') num_controls = 0;
    if (static_cast<uint8_t>(c) >= ' ') continue;
    HALFBYTE_CHECK(c != '\0', bad_input, "{} has a NUL at byte {}", json.what, json.first_byte + i);
    HALFBYTE_CHECK(++num_controls <= kMaxBlankControls, bad_input,
                   "{} has more than {} line breaks or tabs between two strings at byte {}", json.what,
                   kMaxBlankControls, json.first_byte + i);
  }
}

// Stands between the parser of the JSON library and JsonEvents. Its functions have the names that the library
// wants.
class Forwarder {
 public:
  Forwarder(const JsonText& json, JsonEvents& events, const Stop& stop)
      : json_(json), events_(events), stop_(stop) {}

  bool null() { return value(), events_.null(), true; }
  bool boolean(bool value_of) { return value(), events_.boolean(value_of), true; }
  bool number_integer(int64_t number) { return value(), events_.negative(number), true; }
  bool number_unsigned(uint64_t number) { return value(), events_.natural(number), true; }
  bool number_float(double number, const std::string& text) {
    return value(), events_.real(number, text), true;
  }
  bool string(std::string& text) { return value(), events_.string(text), true; }
  bool binary(nlohmann::json::binary_t&) { return false; }  // not in JSON
  bool key(std::string& text) { return events_.key(text), true; }
  bool start_object(size_t) { return enter(), events_.begin_object(), true; }
  bool start_array(size_t) { return enter(), events_.begin_array(), true; }
  bool end_object() { return --depth_, events_.end_object(), true; }
  bool end_array() { return --depth_, events_.end_array(), true; }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& exception) {
    // Without what the library puts around the reason: its own name, line, column and the token.
    std::string_view reason = exception.what();
    reason.remove_prefix(std::min(reason.find("syntax error"), reason.size()));
    reason = reason.substr(0, reason.find("; last read"));
    HALFBYTE_FAIL(bad_input, "{} is not valid JSON at byte {}: {}", json_.what,
                  json_.first_byte + position - 1, reason.empty() ? "number out of range" : reason);
  }

 private:
  static constexpr size_t kValuesPerStop = size_t{1} << 14;

  void value() {
    HALFBYTE_CHECK(++num_values_ <= json_.max_values, bad_input, "{} has more than {} values", json_.what,
                   json_.max_values);
    if (stop_ && num_values_ % kValuesPerStop == 0) stop_();
  }
  void enter() {
    value();
    HALFBYTE_CHECK(++depth_ <= json_.max_depth, bad_input, "{} is nested deeper than {} levels", json_.what,
                   json_.max_depth);
  }

  const JsonText& json_;
  JsonEvents& events_;
  const Stop& stop_;
  int depth_ = 0;
  size_t num_values_ = 0;
};

// Makes a document of its events. What is open, and what it has so far, lies on two stacks, so an array or an
// object is made once, of its size.
template <class Json>
class Builder final : public JsonEvents {
 public:
  explicit Builder(const std::string& what) : what_(what) {}
  Json take() { return std::move(members_.front().value); }

  void null() override { add(nullptr); }
  void boolean(bool value) override { add(value); }
  void negative(int64_t value) override { add(value); }
  void natural(uint64_t value) override { add(value); }
  void real(double value, const std::string&) override { add(value); }
  void string(std::string& value) override { add(std::move(value)); }
  void key(std::string& value) override { key_ = std::move(value); }
  void begin_object() override { begin(); }
  void begin_array() override { begin(); }

  void end_object() override {
    const std::span<Member> members = end();
    const auto key_of = [&](size_t i) -> const std::string& { return members[i].key; };
    if (const auto twice = find_duplicate(members.size(), key_of))
      HALFBYTE_FAIL(bad_input, "{}: duplicate key \"{}\"", what_, printable(key_of(*twice)));
    typename Json::object_t object;
    if constexpr (std::is_same_v<Json, nlohmann::ordered_json>) {
      object.reserve(members.size());
      // Not emplace() of the object, which looks for the key.
      for (Member& member : members)
        object.Container::emplace_back(std::move(member.key), std::move(member.value));
    } else {
      for (Member& member : members) object.emplace(std::move(member.key), std::move(member.value));
    }
    close(std::move(object));
  }
  void end_array() override {
    const std::span<Member> members = end();
    typename Json::array_t array;
    array.reserve(members.size());
    for (Member& member : members) array.push_back(std::move(member.value));
    close(std::move(array));
  }

 private:
  struct Member {  // NOLINT(bugprone-exception-escape): as nlohmann says, a value that moves throws nothing
    std::string key;
    Json value;
  };

  template <class Value>
  void add(Value&& value) {
    members_.push_back({std::move(key_), Json(std::forward<Value>(value))});
    key_.clear();
  }
  // The place of what is open is that of an empty value, which keeps its key.
  void begin() {
    add(nullptr);
    open_.push_back(members_.size());
  }
  std::span<Member> end() { return std::span(members_).subspan(open_.back()); }
  template <class Value>
  void close(Value&& value) {
    members_.resize(open_.back());
    open_.pop_back();
    members_.back().value = Json(std::forward<Value>(value));
  }

  const std::string& what_;
  std::string key_;
  std::vector<Member> members_;
  std::vector<size_t> open_;  // where their members begin
};

// Sends the value of one key of the document to other events; in its place there is null.
class Splitter final : public JsonEvents {
 public:
  Splitter(JsonEvents& document, std::string_view own_key, JsonEvents& own)
      : document_(document), own_key_(own_key), own_(own) {}

  void null() override {
    scalar([](JsonEvents& to) { to.null(); });
  }
  void boolean(bool value) override {
    scalar([=](JsonEvents& to) { to.boolean(value); });
  }
  void negative(int64_t value) override {
    scalar([=](JsonEvents& to) { to.negative(value); });
  }
  void natural(uint64_t value) override {
    scalar([=](JsonEvents& to) { to.natural(value); });
  }
  void real(double value, const std::string& text) override {
    scalar([&](JsonEvents& to) { to.real(value, text); });
  }
  void string(std::string& value) override {
    scalar([&](JsonEvents& to) { to.string(value); });
  }
  void key(std::string& value) override {
    if (depth_ == 1) is_own_ = value == own_key_;
    to(depth_ > 1).key(value);
  }
  void begin_object() override {
    begin([](JsonEvents& to) { to.begin_object(); });
  }
  void begin_array() override {
    begin([](JsonEvents& to) { to.begin_array(); });
  }
  void end_object() override {
    end([](JsonEvents& to) { to.end_object(); });
  }
  void end_array() override {
    end([](JsonEvents& to) { to.end_array(); });
  }

 private:
  JsonEvents& to(bool inside) { return is_own_ && inside ? own_ : document_; }
  template <class Event>
  void scalar(const Event& event) {
    event(to(true));
    if (is_own_ && depth_ == 1) document_.null();
  }
  template <class Event>
  void begin(const Event& event) {
    event(to(true));
    ++depth_;
  }
  template <class Event>
  void end(const Event& event) {
    --depth_;
    event(to(depth_ > 0));
    if (is_own_ && depth_ == 1) document_.null();
  }

  JsonEvents& document_;
  const std::string_view own_key_;
  JsonEvents& own_;
  int depth_ = 0;
  bool is_own_ = false;  // of the key of the document that was seen last
};

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

void parse_json_events(const JsonText& json, JsonEvents& events, const Stop& stop) {
  check_text(json);
  Forwarder forwarder(json, events, stop);
  nlohmann::json::sax_parse(json.text.data(), json.text.data() + json.text.size(), &forwarder);
}

template <class Json>
Json parse_json(std::string_view text, const std::string& what) {
  Builder<Json> builder(what);
  parse_json_events({text, what}, builder);
  return builder.take();
}
template nlohmann::json parse_json(std::string_view, const std::string&);
template nlohmann::ordered_json parse_json(std::string_view, const std::string&);

nlohmann::json parse_json_without(const JsonText& json, const char* key, JsonEvents& events,
                                  const Stop& stop) {
  Builder<nlohmann::json> builder(json.what);
  Splitter splitter(builder, key, events);
  parse_json_events(json, splitter, stop);
  return builder.take();
}

std::string json_quoted(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    HALFBYTE_FAIL(bad_input, "\"{}\" is not UTF-8, and JSON holds nothing else", printable(text));
  }
}

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
