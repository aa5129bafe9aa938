#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/checks.h"
#include "io/test_directory.h"

namespace halfbyte::io {
namespace {

using namespace std::string_literals;

std::string length_field(uint64_t length) {
  std::string field;
  for (int i = 0; i < 8; ++i) field += static_cast<char>(length >> (8 * i) & 0xff);
  return field;
}

std::string safetensors(const std::string& json, size_t num_data_bytes) {
  return length_field(json.size()) + json + std::string(num_data_bytes, 'd');
}

SafetensorsHeader parse(const std::string& json, size_t num_data_bytes) {
  return parse_safetensors_header(json, 8 + json.size() + num_data_bytes, "f");
}

void expect_bad(const std::string& text, const std::string& json, size_t num_data_bytes = 0) {
  SCOPED_TRACE(json.substr(0, 200));
  expect_error(ErrorCode::bad_input, text, [&] { parse(json, num_data_bytes); });
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         offsets + "]}";
}
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{" + entry("w", dtype, shape, offsets) + "}";
}

StoredTensor tensor(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
  StoredTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = shape;
  return tensor;
}

// What every accepted header must satisfy, checked without the code under test.
void check_invariants(const SafetensorsHeader& header, const std::string& bytes) {
  static const std::map<std::string, uint64_t> kBits = {
      {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},        {"U8", 8},          {"I8", 8},
      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
      {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
      {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  uint64_t position = 0;
  for (int i = 7; i >= 0; --i) position = position << 8 | static_cast<uint8_t>(bytes[i]);
  position += 8;
  std::set<std::string> names;
  for (const StoredTensor& tensor : header.tensors) {
    ASSERT_TRUE(names.insert(tensor.name).second);
    ASSERT_LE(tensor.shape.size(), 32u);
    unsigned __int128 bits = kBits.at(tensor.dtype);
    for (const int64_t extent : tensor.shape) {
      ASSERT_GE(extent, 0);
      bits *= static_cast<uint64_t>(extent);
      ASSERT_LE(bits >> 64, 0u);
    }
    ASSERT_EQ(bits, static_cast<unsigned __int128>(tensor.num_bytes) * 8);
    ASSERT_EQ(tensor.offset, position);
    position += tensor.num_bytes;
  }
  ASSERT_EQ(position, bytes.size());
}

// Accepted with all invariants, or refused as bad input. Returns whether it was accepted.
bool survives(const std::string& path, const std::string& bytes) {
  write_file(path, bytes);
  try {
    check_invariants(read_safetensors_header(InputFile::open(path), "f"), bytes);
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_input) << error.what();
    return false;
  }
}

TEST(SafetensorsReader, reads_tensors_in_data_order_and_metadata) {
  const std::string json = "{" + entry("b", "BF16", "2,3", "4,16") +
                           ",\"__metadata__\":{\"z\":\"1\",\"a\":\"\"}," + entry("a", "F32", "", "0,4") + "}";
  const SafetensorsHeader header = parse(json, 16);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].shape, std::vector<int64_t>{});
  EXPECT_EQ(header.tensors[0].offset, 8 + json.size());
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].dtype, "BF16");
  EXPECT_EQ(header.tensors[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.tensors[1].file, "f");
  EXPECT_EQ(header.tensors[1].offset, 8 + json.size() + 4);
  EXPECT_EQ(header.tensors[1].num_bytes, 12u);
  const std::vector<std::pair<std::string, std::string>> metadata = {{"z", "1"}, {"a", ""}};
  EXPECT_EQ(header.metadata, metadata);
}

TEST(SafetensorsReader, unknown_keys_of_an_entry_are_ignored) {
  const std::string prefix = R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],)";
  for (const char* value :
       {"null", "true", "-1.5e3", "\"text\"", "[]", "{}", "[[1,-2],null,{}]", "{\"shape\":[7]}"})
    EXPECT_EQ(parse(prefix + "\"x\":" + value + ",\"y\":1}}", 1).tensors.size(), 1u) << value;
}

// The ids of the rows are those of the catalogue of faults.

TEST(SafetensorsReader, F1_not_a_safetensors_file) {
  TestDirectory dir;
  for (size_t size = 0; size < 8; ++size) {
    write_file(dir / "f", std::string(size, '\0'));
    const InputFile file = InputFile::open(dir / "f");
    expect_error(ErrorCode::bad_input,
                 "f: " + std::to_string(size) + " bytes are too short for a safetensors file",
                 [&] { read_safetensors_header(file, "f"); });
  }
}

TEST(SafetensorsReader, F2_header_length) {
  TestDirectory dir;
  const auto expect = [&](const std::string& text, uint64_t length, size_t num_following_bytes) {
    write_file(dir / "f", length_field(length) + std::string(num_following_bytes, ' '));
    const InputFile file = InputFile::open(dir / "f");
    expect_error(ErrorCode::bad_input, text, [&] { read_safetensors_header(file, "f"); });
  };
  expect("header length 0 is below 2", 0, 8);
  expect("header length 1 is below 2", 1, 8);
  expect("header length 9 does not fit into the 16 bytes of the file", 9, 8);
  expect("header length 100000000 does not fit", 100'000'000, 8);
  expect("header length 100000001 exceeds the limit of 100000000 bytes", 100'000'001, 8);
  for (const uint64_t length : {UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 8, uint64_t{1} << 63})
    expect("exceeds the limit", length, 8);
  expect_bad("header length 0 is below 2", "");
  expect_error(ErrorCode::bad_input, "does not fit", [] { parse_safetensors_header("{}", 9, "f"); });
}

TEST(SafetensorsReader, F3_not_json) {
  for (const char* json :
       {"{]", "{,}", "{\"w\"}", "{\"w\":}", "{ ", "{}}", "{} x", "{/* */}", "{//\n}", "{'w':{}}",
        "{\"w\":NaN}", "{\"w\":Infinity}", "{\"w\":{\"shape\":[01]}}", "{\"w\":{\"shape\":[+1]}}",
        "{\"\\x\":{}}", "{\"\\ud800\":{}}", "{\"\\udc00\":{}}", "{\"a\nb\":{}}", "{\"w\":{\"x\":1e999}}"})
    expect_bad("f: the header is not valid JSON at byte ", json);
  expect_bad("at byte 13: ", "{\"w\":?}");
  expect_bad("not valid JSON", "{" + entry("w", "U8", "0", "0,0") + ",}");
  expect_bad("not valid JSON", "{" + entry("w", "U8", "0,", "0,0") + "}");
  for (const char* name :
       {"\xff", "\xc0\x80", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x80"})
    expect_bad("ill-formed UTF-8", "{" + entry(name, "U8", "0", "0,0") + "}");
  expect_bad("NUL at byte 9", "{\0}"s);
  expect_bad("NUL at byte 10", "{}\0"s);
  expect_bad("NUL at byte 11", "{\"w\0\":{}}"s);
}

TEST(SafetensorsReader, F3_nested_too_deep) {
  expect_bad("deeper than 4 levels", "{\"w\":{\"x\":[[[]]]}}");
  expect_bad("deeper than 4 levels", "{\"w\":{\"x\":{\"x\":{\"x\":{}}}}}");
  expect_bad("is an array, not an object", "{\"w\":" + std::string(1'000'000, '['));
}

TEST(SafetensorsReader, F4_around_the_object) {
  for (const char* json : {"{}", " {}", "\t\n\r {}", "{}      ", "{}\n"})
    EXPECT_TRUE(parse(json, 0).tensors.empty());
  expect_bad("does not start with { but with byte 0xef", "\xef\xbb\xbf{}");
  for (const char* json : {"[]", "\"w\"", "12", "null", "\v{}", "x{}"})
    expect_bad("does not start with {", json);
  for (const char* json : {" 12", " \"text\"", " null", " []"}) expect_bad("not an object", json);
  expect_bad("NUL", "{}\0\0"s);
}

TEST(SafetensorsReader, F5_duplicate_keys) {
  const std::string w = entry("w", "U8", "0", "0,0");
  expect_bad("tensor \"w\" occurs twice", "{" + w + "," + w + "}");
  expect_bad("tensor \"w\" occurs twice",
             "{" + w + "," + entry("v", "U8", "0", "0,0") + "," + entry("\\u0077", "F32", "0", "0,0") + "}");
  expect_bad("duplicate key \"__metadata__\"", "{\"__metadata__\":{},\"__metadata__\":{}}");
  expect_bad("duplicate key \"__metadata__\"", "{\"__metadata__\":{}," + w + ",\"__metadat\\u0061__\":{}}");
  expect_bad("duplicate key \"k\" in __metadata__", R"({"__metadata__":{"k":"1","j":"2","\u006b":"1"}})");
  expect_bad("tensor \"w\" has the key \"dtype\" twice",
             R"({"w":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  expect_bad("has the key \"shape\" twice",
             R"({"w":{"dtype":"U8","shape":[4],"shap\u0065":[0],"data_offsets":[0,0]}})");
  expect_bad("has the key \"data_offsets\" twice",
             R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,9],"data_offsets":[0,0]}})");
  expect_bad("has the key \"x\" twice",
             R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1,"x":1}})");
}

TEST(SafetensorsReader, F6_offsets) {
  expect_bad("tensor \"w\" has reversed data_offsets [4, 0]", one("U8", "4", "4,0"), 4);
  for (const char* value :
       {"-1", "-0", "0.0", "0.5", "1e3", "18446744073709551616", "null", "true", "\"0\"", "[]", "{}"}) {
    expect_bad("tensor \"w\" has ", one("U8", "4", value + ",4"s), 4);
    expect_bad(" in data_offsets, not an unsigned 64-bit integer", one("U8", "4", value + ",4"s), 4);
    expect_bad(" in shape, not an unsigned 64-bit integer", one("U8", value, "0,4"), 4);
  }
  expect_bad("has 0 data_offsets instead of 2", one("U8", "4", ""), 4);
  expect_bad("has 1 data_offsets instead of 2", one("U8", "4", "0"), 4);
  expect_bad("has more than 2 data_offsets", one("U8", "4", "0,4,4"), 4);
  expect_bad("ends at byte 4 of the data, which has only 3 bytes", one("U8", "4", "0,4"), 3);
  expect_bad("has data_offsets [0, 4], 4 bytes, but shape [2, 1] of F32 needs 8", one("F32", "2,1", "0,4"),
             4);
  expect_bad("needs 4", one("U8", "4", "0,18446744073709551615"), 4);
}

TEST(SafetensorsReader, F6_malformed_entry) {
  expect_bad("tensor \"w\" has no dtype", R"({"w":{"shape":[0],"data_offsets":[0,0]}})");
  expect_bad("tensor \"w\" has no shape", R"({"w":{"dtype":"U8","data_offsets":[0,0]}})");
  expect_bad("tensor \"w\" has no data_offsets", R"({"w":{"dtype":"U8","shape":[0]}})");
  expect_bad("tensor \"w\" has no dtype", "{\"w\":{}}");
  // Nothing is left over from the entry before.
  expect_bad("tensor \"v\" has no shape",
             "{" + entry("w", "U8", "0", "0,0") + R"(,"v":{"dtype":"U8","data_offsets":[0,0]}})");
  expect_bad("dtype is 8, not a string", R"({"w":{"dtype":8}})");
  expect_bad("dtype is an array, not a string", R"({"w":{"dtype":["U8"]}})");
  expect_bad("shape is \"4\", not an array", R"({"w":{"shape":"4"}})");
  expect_bad("shape is an object, not an array", R"({"w":{"shape":{}}})");
  expect_bad("data_offsets is null, not an array", R"({"w":{"data_offsets":null}})");
  for (const char* value : {"null", "1", "\"U8\"", "[\"U8\",[0],[0,0]]"})
    expect_bad("the value of \"w\" is ", "{\"w\":"s + value + "}");
  std::string keys;
  for (int i = 0; i < 17; ++i) keys += (i ? ",\"" : "\"") + std::to_string(i) + "\":0";
  expect_bad("has more than 16 keys", "{\"w\":{" + keys + "}}");
}

TEST(SafetensorsReader, F7_data_must_be_tiled) {
  const auto two = [](const std::string& a, const std::string& b) {
    return "{" + entry("a", "U8", "4", a) + "," + entry("b", "U8", "4", b) + "}";
  };
  EXPECT_EQ(parse(two("4,8", "0,4"), 8).tensors[0].name, "b");
  expect_bad("tensor \"b\" begins at 2: it overlaps \"a\", which ends at 4", two("0,4", "2,6"), 8);
  expect_bad("it overlaps", two("0,4", "0,4"), 4);
  expect_bad("tensor \"b\" begins at 6: gap of 2 bytes after \"a\", which ends at 4", two("0,4", "6,10"), 10);
  expect_bad("tensor \"a\" is the first of the data but begins at 1, not at 0", two("1,5", "5,9"), 9);
  expect_bad("f: 3 bytes after the last tensor, which ends at 8", two("0,4", "4,8"), 11);
  expect_bad("1 bytes after the last tensor, which ends at 0", "{}", 1);
}

TEST(SafetensorsReader, F8_shape_overflow) {
  for (const char* shape : {"2,18446744073709551614", "18446744073709551615,2,0", "0,18446744073709551615,2",
                            "9223372036854775808"})
    expect_bad("more than 2^63 - 1", one("U8", shape, "0,0"));
  for (const char* shape : {"2,9223372036854775807", "9223372036854775807,2",
                            "4194305,4194305,211106198978564", "211106198978564,4194305,4194305"})
    expect_bad("is too large", one("F32", shape, "0,4"), 4);
  // With a 0 among them the product is 0 for every order.
  for (const char* shape :
       {"0,9223372036854775807,2", "9223372036854775807,2,0", "9223372036854775807,0,9223372036854775807"})
    EXPECT_EQ(parse(one("F32", shape, "0,0"), 0).tensors[0].num_bytes, 0u);
}

TEST(SafetensorsReader, F9_empty_tensors_and_ranks) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_EQ(parse(one("F32", "", "0,4"), 4).tensors[0].num_bytes, 4u);
  EXPECT_EQ(parse(one("F32", "0", "0,0"), 0).tensors.size(), 1u);
  // At the start, between two others and at the end, in any order of the header.
  EXPECT_EQ(parse("{" + entry("e", "F32", "2,0", "4,4") + "," + entry("b", "U8", "4", "4,8") + "," +
                      entry("d", "F32", "0", "8,8") + "," + entry("a", "U8", "4", "0,4") + "," +
                      entry("c", "F32", "0", "0,0") + "," + entry("f", "F64", "0", "4,4") + "}",
                  8)
                .tensors.size(),
            6u);
  expect_bad("it overlaps", "{" + entry("a", "U8", "4", "0,4") + "," + entry("b", "U8", "0", "2,2") + "}", 4);
  expect_bad("gap of 1 bytes", "{" + entry("a", "U8", "4", "0,4") + "," + entry("b", "U8", "0", "5,5") + "}",
             4);

  std::string ones = "1";
  for (int rank = 2; rank <= 32; ++rank) ones += ",1";
  EXPECT_EQ(parse(one("U8", ones, "0,1"), 1).tensors[0].shape.size(), 32u);
  expect_bad("has more than 32 dimensions", one("U8", ones + ",1", "0,1"), 1);
}

TEST(SafetensorsReader, F10_dtypes) {
  const struct {
    const char* word;
    int bits;
  } rows[] = {{"BOOL", 8},        {"U8", 8},   {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
              {"F8_E4M3FNUZ", 8}, {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},
              {"F8_E5M2FNUZ", 8}, {"U32", 32}, {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64},
              {"U64", 64},        {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  for (const auto& row : rows) {
    EXPECT_EQ(safetensors_dtype_bits(row.word), row.bits);
    EXPECT_EQ(parse(one(row.word, "8", "0," + std::to_string(row.bits)), row.bits).tensors[0].dtype,
              row.word);
  }
  for (const char* word : {"U4", "I4", "f32", "", "F32 ", "float32", "U8\\u0000"})
    expect_bad("tensor \"w\" has unknown dtype", one(word, "1", "0,4"), 4);
  expect_bad("unknown dtype \"a\\x1b[2J\"", one("a\\u001b[2J", "1", "0,4"), 4);
  EXPECT_EQ(safetensors_dtype_bits("U4"), 0);

  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i8, DType::u8, DType::i32,
                            DType::u32, DType::i64})
    EXPECT_EQ(dtype_from_safetensors(dtype_to_safetensors(dtype)), dtype);
  EXPECT_STREQ(dtype_to_safetensors(DType::bf16), "BF16");
  for (const char* word : {"BOOL", "F8_E4M3", "U4"}) EXPECT_EQ(dtype_from_safetensors(word), std::nullopt);
}

TEST(SafetensorsReader, F11_part_of_a_byte) {
  expect_bad("does not fill whole bytes: shape [3] of F4 is 12 bits", one("F4", "3", "0,2"), 2);
  expect_bad("shape [2] of F6_E2M3 is 12 bits", one("F6_E2M3", "2", "0,2"), 2);
  EXPECT_EQ(parse(one("F6_E3M2", "4", "0,3"), 3).tensors[0].num_bytes, 3u);
  EXPECT_EQ(parse(one("F4", "3,0", "0,0"), 0).tensors[0].num_bytes, 0u);
}

TEST(SafetensorsReader, F12_unaligned_data) {
  for (size_t padding = 0; padding < 64; ++padding) {
    const std::string json = one("F64", "1", "0,8") + std::string(padding, ' ');
    EXPECT_EQ(parse(json, 8).tensors[0].offset, 8 + json.size());
  }
}

TEST(SafetensorsReader, F13_large_headers) {
  std::string json = "{";
  for (int i = 0; i < 10'000; ++i)
    json += (i ? "," : "") +
            entry("t" + std::to_string(i), "U8", "1", std::to_string(i) + "," + std::to_string(i + 1));
  EXPECT_EQ(parse(json + "}", 10'000).tensors.size(), 10'000u);
  for (int i = 10'000; i < 262'145; ++i)
    json += "," + entry("t" + std::to_string(i), "U8", "0", "10000,10000");
  expect_bad("has more than 262144 tensors", json + "}");
  EXPECT_TRUE(parse("{}" + std::string(10'000'000, ' '), 0).tensors.empty());
  EXPECT_EQ(parse("{" + entry(std::string(1'000'000, 'n'), "U8", "0", "0,0") + "}", 0).tensors[0].name.size(),
            1'000'000u);
  expect_bad("line breaks or tabs between two strings at byte 1048585",
             "{" + std::string(10'000'000, '\n') + "?");
}

TEST(SafetensorsReader, can_be_stopped) {
  std::string json = "{";
  for (int i = 0; i < 50'000; ++i) json += entry("t" + std::to_string(i), "U8", "0", "0,0") + ",";
  json.back() = '}';
  int asked = 0;
  const auto stop = [&] { HALFBYTE_CHECK(++asked < 3, cancelled, "stopped"); };
  expect_error(ErrorCode::cancelled, "stopped",
               [&] { parse_safetensors_header(json, 8 + json.size(), "f", stop); });
  EXPECT_EQ(asked, 3);
}

TEST(SafetensorsReader, F14_names_are_text_and_escaped_in_messages) {
  const auto name_of = [](const std::string& name) {
    return parse("{" + entry(name, "U8", "0", "0,0") + "}", 0).tensors[0].name;
  };
  EXPECT_EQ(name_of(""), "");
  EXPECT_EQ(name_of("\\u0000"), "\0"s);
  EXPECT_EQ(name_of("../x"), "../x");
  EXPECT_EQ(name_of("\\ud83d\\ude42"), "🙂");
  expect_bad("tensor \"\\x1b[2J\\u202e\\x00\" has no shape",
             "{\"\\u001b[2J\\u202e\\u0000\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}");
  expect_bad("...(1000000 bytes)...", "{" + entry(std::string(1'000'000, 'n'), "U8", "1", "0,0") + "}");
  expect_error(ErrorCode::bad_input, "\\x1b[2J: the header",
               [] { parse_safetensors_header("{]", 10, "\x1b[2J"); });
}

TEST(SafetensorsReader, F15_metadata) {
  for (const char* value : {"1", "-1", "0.5", "null", "true", "[]", "{}"})
    expect_bad("the value of \"k\" in __metadata__ is ", "{\"__metadata__\":{\"k\":"s + value + "}}");
  for (const char* value : {"1", "\"text\"", "[]"})
    expect_bad("the value of \"__metadata__\" is ", "{\"__metadata__\":"s + value + "}");
  const std::string large(10'000'000, 'm');
  EXPECT_EQ(parse("{\"__metadata__\":{\"k\":\"" + large + "\"}}", 0).metadata[0].second, large);
  EXPECT_TRUE(parse("{\"__metadata__\":{}}", 0).metadata.empty());
  EXPECT_TRUE(parse("{\"__metadata__\":null}", 0).metadata.empty());
  // A tensor may have the names of the fields.
  EXPECT_EQ(parse("{" + entry("dtype", "U8", "0", "0,0") + "}", 0).tensors[0].name, "dtype");
}

// A header that uses every part of the grammar.
std::string small_file() {
  return safetensors("{\"__metadata__\":{\"k\":\"v\"}," + entry("a", "F32", "1,2", "0,8") + "," +
                         entry("b\\n", "F4", "2", "8,9") + "," + entry("c", "U8", "0", "9,9") + "} ",
                     9);
}

TEST(SafetensorsReader, F17_truncated_at_every_byte) {
  TestDirectory dir;
  const std::string bytes = small_file();
  EXPECT_TRUE(survives(dir / "f", bytes));
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(survives(dir / "f", bytes.substr(0, size))) << size;
}

TEST(SafetensorsReader, F17_every_bit_flipped) {
  TestDirectory dir;
  const std::string bytes = small_file();
  const size_t header_bytes = bytes.size() - 9;
  for (size_t bit = 0; bit < 8 * header_bytes; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    survives(dir / "f", flipped);
  }
}

TEST(SafetensorsReader, F17_every_byte_replaced_removed_or_doubled) {
  TestDirectory dir;
  const std::string bytes = small_file();
  const std::string json = bytes.substr(8, bytes.size() - 8 - 9);
  for (size_t i = 0; i < json.size(); ++i) {
    std::string changed = json;
    for (const char c : "\"{}[]:,0129-.e \\\n\x80\xff"s) {
      changed[i] = c;
      survives(dir / "f", safetensors(changed, 9));
    }
    survives(dir / "f", safetensors(json.substr(0, i) + json.substr(i + 1), 9));
    survives(dir / "f", safetensors(json.substr(0, i) + json[i] + json.substr(i), 9));
  }
}

TEST(SafetensorsReader, F18_changed_while_reading) {
  TestDirectory dir;
  write_file(dir / "f", small_file());
  const InputFile file = InputFile::open(dir / "f");
  std::filesystem::resize_file(dir / "f", 20);
  expect_error(ErrorCode::bad_input, "changed while reading", [&] { read_safetensors_header(file, "f"); });
}

TEST(SafetensorsWriter, golden_example) {
  std::vector<StoredTensor> tensors = {tensor("w", "U8", {6, 1})};
  const SafetensorsLayout layout = lay_out_safetensors(tensors, {{"format", "pt"}});
  EXPECT_EQ(layout.prefix,
            "\x58\0\0\0\0\0\0\0"s
            R"({"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[6,1],"data_offsets":[0,6]}}  )");
  EXPECT_EQ(layout.prefix.size(), 8u + 88u);
  EXPECT_EQ(layout.file_bytes, 102u);
  EXPECT_EQ(tensors[0].offset, 96u);
  EXPECT_EQ(tensors[0].num_bytes, 6u);
}

TEST(SafetensorsWriter, orders_by_size_then_name_whatever_the_order_given) {
  std::vector<StoredTensor> tensors = {
      tensor("z", "I64", {1}), tensor("b", "BF16", {3}), tensor("a", "U8", {0, 2}),    tensor("f", "F4", {6}),
      tensor("a2", "F16", {}), tensor("y", "F64", {1}),  tensor("six", "F6_E2M3", {4})};
  std::vector<StoredTensor> reversed(tensors.rbegin(), tensors.rend());
  const SafetensorsLayout layout = lay_out_safetensors(tensors, {});
  std::vector<std::string> names;
  for (const StoredTensor& tensor : tensors) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"y", "z", "a2", "b", "a", "six", "f"}));
  EXPECT_EQ(lay_out_safetensors(reversed, {}).prefix, layout.prefix);
}

TEST(SafetensorsWriter, what_it_lays_out_reads_back) {
  std::vector<StoredTensor> tensors = {tensor("", "F32", {2, 3}), tensor("\"\\\n\x1b\0🙂"s, "U8", {5}),
                                       tensor("../x", "F4", {3, 2}), tensor("scalar", "F64", {}),
                                       tensor("empty", "BF16", {0, 7})};
  const std::vector<std::pair<std::string, std::string>> metadata = {{"z", "\"1\""}, {"a", "\0"s}};
  const SafetensorsLayout layout = lay_out_safetensors(tensors, metadata);
  EXPECT_EQ(layout.prefix.size() % 8, 0u);
  const SafetensorsHeader header =
      parse_safetensors_header(std::string_view(layout.prefix).substr(8), layout.file_bytes, "f");
  EXPECT_EQ(header.metadata, metadata);
  ASSERT_EQ(header.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(header.tensors[i].name, tensors[i].name);
    EXPECT_EQ(header.tensors[i].dtype, tensors[i].dtype);
    EXPECT_EQ(header.tensors[i].shape, tensors[i].shape);
    EXPECT_EQ(header.tensors[i].offset, tensors[i].offset);
    EXPECT_EQ(header.tensors[i].num_bytes, tensors[i].num_bytes);
  }
}

TEST(SafetensorsWriter, no_tensors) {
  std::vector<StoredTensor> tensors;
  const SafetensorsLayout layout = lay_out_safetensors(tensors, {});
  EXPECT_EQ(layout.prefix, "\x08\0\0\0\0\0\0\0{}      "s);
  EXPECT_EQ(layout.file_bytes, 16u);
}

TEST(SafetensorsWriter, refuses_what_no_reader_would_take) {
  const auto refuse = [](const std::string& text, std::vector<StoredTensor> tensors) {
    expect_error(ErrorCode::bad_input, text, [&] { lay_out_safetensors(tensors, {}); });
  };
  refuse("tensor \"w\" would be written twice", {tensor("w", "U8", {1}), tensor("w", "F32", {1})});
  refuse("does not fill whole bytes", {tensor("w", "F4", {1})});
  refuse("is too large", {tensor("w", "F32", {INT64_MAX})});
  refuse("larger than 2^63 - 1 bytes",
         {tensor("a", "U8", {1, INT64_MAX / 4}), tensor("b", "U8", {INT64_MAX / 4}),
          tensor("c", "U8", {INT64_MAX / 4}), tensor("d", "U8", {INT64_MAX / 4}),
          tensor("e", "U8", {INT64_MAX / 4})});
  refuse("the safetensors header would have", {tensor(std::string(kMaxHeaderBytes, 'n'), "U8", {0})});
}

}  // namespace
}  // namespace halfbyte::io
