#include "io/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "io/limits.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

namespace halfbyte::io {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::string repeated(std::string_view text, size_t count) {
  std::string result;
  result.reserve(count * text.size());
  for (size_t i = 0; i < count; ++i) result += text;
  return result;
}

template <class Body>
void expect_refused(const char* text, const Body& body) {
  try {
    body();
    FAIL() << "not refused: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_input);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}
template <class Json>
void expect_bad(const char* text, std::string_view document) {
  expect_refused(text, [&] { parse_json<Json>(document, "doc"); });
}

TEST(Json, GivesWhatTheLibraryGives) {
  for (const char* text :
       {"null", "true", "-1", "18446744073709551615", "-9223372036854775808", "1.5e3", R"("\u00e9\n")", "[]",
        "{}", R"([[], {}, [1, [2, {"b": [3], "a": null}], false], "x"])",
        R"({"z": {"y": {}, "b": [1]}, "a": 1, "m": ""})"}) {
    EXPECT_EQ(parse_json<json>(text, "doc"), json::parse(text)) << text;
    EXPECT_EQ(parse_json<ordered_json>(text, "doc").dump(), ordered_json::parse(text).dump()) << text;
  }
}

TEST(Json, DuplicateKeys) {
  for (const char* text : {R"({"a": 1, "b": 2, "a": 3})", R"([{"x": {"a": [], "b": {}, "\u0061": 1}}])"}) {
    expect_bad<json>("doc: duplicate key \"a\"", text);
    expect_bad<ordered_json>("doc: duplicate key \"a\"", text);
  }
  // Of different objects they are none.
  EXPECT_EQ(parse_json<json>(R"({"a": {"a": 1}, "b": {"a": 1}})", "doc").size(), 2u);
}

TEST(Json, Depth) {
  const size_t depth = kMaxJsonDepth;
  parse_json<json>(repeated("[", depth) + repeated("]", depth), "doc");
  parse_json<json>(repeated("{\"\":", depth) + "1" + repeated("}", depth), "doc");
  expect_bad<json>("doc is nested deeper than 64 levels",
                   repeated("[", depth + 1) + repeated("]", depth + 1));
  expect_bad<ordered_json>("doc is nested deeper than 64 levels", repeated("{\"\":", 1'000'000));
}

TEST(Json, NumberOfValues) {
  EXPECT_EQ(parse_json<json>("[" + repeated("0,", kMaxJsonValues - 2) + "0]", "doc").size(),
            kMaxJsonValues - 1);
  expect_bad<json>("doc has more than 524288 values", "[" + repeated("0,", kMaxJsonValues - 1) + "0]");
  expect_bad<json>("doc has more than 524288 values", "[" + repeated("{},", kMaxJsonValues) + "0]");
}

TEST(Json, ManyKeysInTheirOrder) {
  std::string text = "{";
  for (int i = 200'000; i > 0; --i) text += fmt::format("\"{}\":{{\"a\":{}}},", i, i);
  text.back() = '}';
  const auto object = parse_json<ordered_json>(text, "doc");
  EXPECT_EQ(object.size(), 200'000u);
  EXPECT_EQ(object.begin().key(), "200000");
  EXPECT_EQ(object.dump(), text);
}

TEST(Json, NamesTheByte) {
  expect_bad<json>("doc is not valid JSON at byte 4", "[1, }");
  expect_bad<json>("number out of range", "[1e400]");
  expect_bad<json>("doc has a NUL at byte 3", std::string_view("[1]\0", 4));
  expect_bad<json>("doc has more than 1048576 line breaks or tabs", repeated("\n", kMaxBlankControls + 1));
}

TEST(ShardIndex, TakesTheMapApart) {
  const ShardIndex index = parse_shard_index(
      R"({"a": {"weight_map": [1]}, "weight_map": {"x": "f", "y\u0079": "g", "": "f"}, "metadata": {"n": 1.5}})");
  EXPECT_EQ(index.files, (std::vector<std::string>{"f", "g"}));
  ASSERT_EQ(index.entries.size(), 3u);
  EXPECT_EQ(index.name(index.entries[0]), "x");
  EXPECT_EQ(index.name(index.entries[1]), "yy");
  EXPECT_EQ(index.name(index.entries[2]), "");
  EXPECT_EQ(index.entries[1].file, 1u);
  EXPECT_EQ(index.entries[2].file, 0u);
  EXPECT_EQ(json::parse(index.rest), json::parse(R"({"a": {"weight_map": [1]}, "metadata": {"n": 1.5}})"));
}

TEST(ShardIndex, Refuses) {
  const auto refused = [](const char* text, std::string_view index) {
    expect_refused(text, [&] { parse_shard_index(index); });
  };
  refused("no \"weight_map\"", "{}");
  refused("expected an object, got array", R"([{"weight_map": {}}])");
  for (const char* value : {"1", "-1", "1.5", "\"x\"", "[]", "null", "true"})
    refused("\"weight_map\" must be an object", fmt::format("{{\"weight_map\": {}}}", value));
  for (const char* value : {"1", "-1", "1.5", "{}", "[]", "null", "true"})
    refused("the file of tensor \"t\" must be a string",
            fmt::format("{{\"weight_map\": {{\"t\": {}}}}}", value));
  refused("duplicate key \"weight_map\"", R"({"weight_map": {}, "weight_map": {}})");
  refused("duplicate key \"t\"", R"({"weight_map": {"t": "a", "u": "a", "\u0074": "a"}})");
  refused("duplicate key \"m\"", R"({"m": 1, "weight_map": {}, "m": 2})");
  std::string many = R"({"weight_map": {)";
  for (size_t i = 0; i <= kMaxModelTensors; ++i) many += fmt::format("\"{}\":\"\",", i);
  many.back() = '}';
  refused("more than 1048576 tensors", many + "}");
}

TEST(ShardIndex, WritesWhatItReads) {
  const std::string rest =
      R"({"metadata":{"total_size":1,"x":["\n  \"weight_map\": {"]},"z":{"weight_map":{}}})";
  json expected = json::parse(rest);
  expected["metadata"]["total_size"] = 77;
  expected["weight_map"] = {{"a\"b", "f1"}, {"c", "f2"}};
  const std::vector<std::pair<std::string_view, std::string_view>> files = {{"a\"b", "f1"}, {"c", "f2"}};
  EXPECT_EQ(shard_index_text(rest, 77, files), expected.dump(2) + "\n");
  EXPECT_EQ(parse_shard_index(shard_index_text(rest, 77, files)).entries.size(), 2u);
  expected = {{"metadata", {{"total_size", 0}}}, {"weight_map", json::object()}};
  EXPECT_EQ(shard_index_text("", 0, {}), expected.dump(2) + "\n");
  const std::string long_name(kMaxIndexBytes, 'n');
  const std::vector<std::pair<std::string_view, std::string_view>> large = {{long_name, "f"}};
  expect_refused("more than the limit of 100000000", [&] { shard_index_text("", 0, large); });
  const std::vector<std::pair<std::string_view, std::string_view>> many(kMaxModelTensors + 1);
  expect_refused("1048577 tensors, more than the limit of 1048576", [&] { shard_index_text("", 0, many); });
}

TEST(ShardIndex, CanBeStopped) {
  std::string text = R"({"weight_map": {)";
  for (int i = 0; i < 100'000; ++i) text += fmt::format("\"{}\":\"f\",", i);
  text.back() = '}';
  int asked = 0;
  const auto stop = [&] {
    if (++asked == 3) HALFBYTE_FAIL(cancelled, "stopped");
  };
  EXPECT_THROW(parse_shard_index(text + "}", stop), Error);
  EXPECT_EQ(asked, 3);
}

// What is written must be read: the limits are the same.
TEST(SafetensorsLayout, KeepsToTheLimitsOfReading) {
  const auto refused = [](const char* text, std::vector<StoredTensor> tensors,
                          std::vector<std::pair<std::string, std::string>> metadata) {
    expect_refused(text, [&] { lay_out_safetensors(tensors, metadata); });
  };
  std::vector<StoredTensor> many(kMaxFileTensors + 1);
  for (size_t i = 0; i < many.size(); ++i)
    many[i].name = std::to_string(i), many[i].dtype = "U8", many[i].shape = {0};
  refused("262145 tensors, more than the limit of 262144", many, {});
  many.pop_back();
  const SafetensorsLayout layout = lay_out_safetensors(many, {});
  EXPECT_EQ(parse_safetensors_header(std::string_view(layout.prefix).substr(8), layout.file_bytes, "f")
                .tensors.size(),
            kMaxFileTensors);
  StoredTensor tensor{"t", "U8", std::vector<int64_t>(kMaxRank + 1, 1), "", 0, 0};
  refused("33 dimensions, more than the limit of 32", {tensor}, {});
  tensor.shape.pop_back();
  tensor.name = "\xff";
  refused("is not UTF-8", {tensor}, {});
  refused("__metadata__ would have 1048577 keys", {},
          std::vector<std::pair<std::string, std::string>>(kMaxMetadataEntries + 1));
}

}  // namespace
}  // namespace halfbyte::io
