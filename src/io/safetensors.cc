#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <compare>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "io/container.h"
#include "io/limits.h"

namespace halfbyte::io {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr std::string_view kMetadata = "__metadata__";

struct DTypeRow {
  std::string_view word;
  int bits;
  std::optional<DType> dtype;
};
constexpr DTypeRow kDTypes[] = {
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"BOOL", 8, {}},
    {"U8", 8, DType::u8},
    {"I8", 8, DType::i8},
    {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, DType::f8_e4m3},
    {"F8_E8M0", 8, DType::f8_e8m0},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},
    {"I32", 32, DType::i32},
    {"U32", 32, DType::u32},
    {"F32", 32, DType::f32},
    {"C64", 64, {}},
    {"F64", 64, DType::f64},
    {"I64", 64, DType::i64},
    {"U64", 64, {}},
};

const DTypeRow* find_dtype(std::string_view word) {
  const auto* row = std::ranges::find(kDTypes, word, &DTypeRow::word);
  return row == std::end(kDTypes) ? nullptr : row;
}

// `where` starts every message: the name of the file, and of the tensor if it is about one.
std::string in_tensor(const std::string& where, std::string_view name) {
  return fmt::format("{}tensor \"{}\"", where.empty() ? "" : where + ": ", printable(name));
}

// Size of the data of a tensor from dtype and shape. The answer does not depend on the order of the
// extents: one 0 makes it 0 whatever the others are.
uint64_t data_bytes(const StoredTensor& tensor, const std::string& where) {
  const int bits = safetensors_dtype_bits(tensor.dtype);
  HALFBYTE_CHECK(bits > 0, bad_input, "{} has unknown dtype \"{}\"", in_tensor(where, tensor.name),
                 printable(tensor.dtype));
  if (std::ranges::find(tensor.shape, 0) != tensor.shape.end()) return 0;
  uint64_t num_bits = static_cast<uint64_t>(bits);
  for (const int64_t extent : tensor.shape) {
    HALFBYTE_CHECK(!__builtin_mul_overflow(num_bits, static_cast<uint64_t>(extent), &num_bits), bad_input,
                   "{} is too large: shape [{}] of {} exceeds 2^64 bits", in_tensor(where, tensor.name),
                   fmt::join(tensor.shape, ", "), tensor.dtype);
  }
  HALFBYTE_CHECK(num_bits % 8 == 0, bad_input, "{} does not fill whole bytes: shape [{}] of {} is {} bits",
                 in_tensor(where, tensor.name), fmt::join(tensor.shape, ", "), tensor.dtype, num_bits);
  return num_bits / 8;
}

// Builds a SafetensorsHeader from the events of the JSON parser. The accepted grammar is
// {"__metadata__": {key: string} or null, NAME: {"dtype": string, "shape": [u64], "data_offsets": [u64, u64],
// any other key: any value}}. Offsets stay relative to the data.
class HeaderHandler final : public JsonEvents {
 public:
  explicit HeaderHandler(const std::string& where) : where_(where) {}

  SafetensorsHeader header;

  // MLX writes this for a file without metadata, and the library of safetensors reads it.
  void null() override {
    if (place_ != Place::header || key_ != kMetadata) scalar("null");
  }
  void boolean(bool value) override { scalar(value ? "true" : "false"); }
  void negative(int64_t value) override { scalar(fmt::to_string(value)); }
  void real(double, const std::string& text) override { scalar(printable(text)); }

  void natural(uint64_t value) override {
    if (place_ == Place::shape) {
      HALFBYTE_CHECK(value <= INT64_MAX, bad_input, "{} has extent {}, more than 2^63 - 1", tensor(), value);
      HALFBYTE_CHECK(current_.shape.size() < kMaxRank, bad_input, "{} has more than {} dimensions", tensor(),
                     kMaxRank);
      current_.shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::data_offsets) {
      HALFBYTE_CHECK(num_offsets_ < 2, bad_input, "{} has more than 2 data_offsets", tensor());
      offsets_[num_offsets_++] = value;
    } else {
      scalar(fmt::to_string(value));
    }
  }

  void string(std::string& value) override {
    if (place_ == Place::metadata) {
      header.metadata.emplace_back(std::move(key_), std::move(value));
    } else if (place_ == Place::entry && key_ == "dtype") {
      current_.dtype = value;
    } else if (place_ != Place::ignored) {
      scalar(fmt::format("\"{}\"", printable(value)));
    }
  }

  void key(std::string& key) override {
    if (place_ == Place::header && key == kMetadata) {
      HALFBYTE_CHECK(!has_metadata_, bad_input, "{}: duplicate key \"{}\"", where_, kMetadata);
      has_metadata_ = true;
    }
    if (place_ == Place::entry) {
      HALFBYTE_CHECK(!has_key(key), bad_input, "{} has the key \"{}\" twice", tensor(), printable(key));
      HALFBYTE_CHECK(entry_keys_.size() < kMaxEntryKeys, bad_input, "{} has more than {} keys", tensor(),
                     kMaxEntryKeys);
      entry_keys_.push_back(key);
    }
    if (place_ == Place::metadata) {
      HALFBYTE_CHECK(header.metadata.size() < kMaxMetadataEntries, bad_input, "{}: {} has more than {} keys",
                     where_, kMetadata, kMaxMetadataEntries);
    }
    if (place_ != Place::ignored) key_ = std::move(key);
  }

  void begin_object() override {
    if (place_ == Place::document) {
      place_ = Place::header;
    } else if (place_ == Place::header && key_ == kMetadata) {
      place_ = Place::metadata;
    } else if (place_ == Place::header) {
      HALFBYTE_CHECK(header.tensors.size() < kMaxFileTensors, bad_input, "{}: has more than {} tensors",
                     where_, kMaxFileTensors);
      place_ = Place::entry;
      current_ = {};
      current_.name = key_;
      entry_keys_.clear();
    } else {
      ignore("an object");
    }
  }

  void begin_array() override {
    if (place_ == Place::entry && key_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::entry && key_ == "data_offsets") {
      place_ = Place::data_offsets;
      num_offsets_ = 0;
    } else {
      ignore("an array");
    }
  }

  void end_object() override {
    if (place_ == Place::entry) end_entry();
    if (place_ == Place::ignored) {
      end_ignored();
    } else {
      place_ = place_ == Place::header ? Place::document : Place::header;
    }
  }

  void end_array() override {
    if (place_ == Place::data_offsets) {
      HALFBYTE_CHECK(num_offsets_ == 2, bad_input, "{} has {} data_offsets instead of 2", tensor(),
                     num_offsets_);
    }
    if (place_ == Place::ignored) {
      end_ignored();
    } else {
      place_ = Place::entry;
    }
  }

 private:
  enum class Place { document, header, metadata, entry, shape, data_offsets, ignored };

  std::string tensor() const { return in_tensor(where_, current_.name); }

  bool has_key(std::string_view key) const {
    return std::ranges::find(entry_keys_, key) != entry_keys_.end();
  }

  // A value that only an unknown key of an entry may have.
  void scalar(std::string_view value) {
    if (place_ == Place::ignored) return;
    if (place_ == Place::document)
      HALFBYTE_FAIL(bad_input, "{}: the header is {}, not an object", where_, value);
    if (place_ == Place::header)
      HALFBYTE_FAIL(bad_input, "{}: the value of \"{}\" is {}, not an object", where_, printable(key_),
                    value);
    if (place_ == Place::metadata)
      HALFBYTE_FAIL(bad_input, "{}: the value of \"{}\" in {} is {}, not a string", where_, printable(key_),
                    kMetadata, value);
    if (place_ == Place::shape || place_ == Place::data_offsets)
      HALFBYTE_FAIL(bad_input, "{} has {} in {}, not an unsigned 64-bit integer", tensor(), value, key_);
    if (key_ == "dtype") HALFBYTE_FAIL(bad_input, "{}: dtype is {}, not a string", tensor(), value);
    if (key_ == "shape" || key_ == "data_offsets")
      HALFBYTE_FAIL(bad_input, "{}: {} is {}, not an array", tensor(), key_, value);
  }

  void ignore(std::string_view value) {
    scalar(value);
    place_ = Place::ignored;
    ++ignored_depth_;
  }
  void end_ignored() {
    if (--ignored_depth_ == 0) place_ = Place::entry;
  }

  void end_entry() {
    for (const char* required : {"dtype", "shape", "data_offsets"})
      HALFBYTE_CHECK(has_key(required), bad_input, "{} has no {}", tensor(), required);
    const auto [begin, end] = offsets_;
    HALFBYTE_CHECK(begin <= end, bad_input, "{} has reversed data_offsets [{}, {}]", tensor(), begin, end);
    current_.offset = begin;
    current_.num_bytes = data_bytes(current_, where_);
    HALFBYTE_CHECK(end - begin == current_.num_bytes, bad_input,
                   "{} has data_offsets [{}, {}], {} bytes, but shape [{}] of {} needs {}", tensor(), begin,
                   end, end - begin, fmt::join(current_.shape, ", "), current_.dtype, current_.num_bytes);
    current_.shape.shrink_to_fit();
    header.tensors.push_back(std::move(current_));
  }

  std::string where_;
  Place place_ = Place::document;
  int ignored_depth_ = 0;
  bool has_metadata_ = false;
  std::string key_;
  StoredTensor current_;
  std::vector<std::string> entry_keys_;
  std::array<uint64_t, 2> offsets_ = {};
  size_t num_offsets_ = 0;
};

void check_length(uint64_t length, uint64_t file_bytes, const std::string& where) {
  HALFBYTE_CHECK(length >= 2, bad_input, "{}: header length {} is below 2", where, length);
  HALFBYTE_CHECK(length <= kMaxHeaderBytes, bad_input, "{}: header length {} exceeds the limit of {} bytes",
                 where, length, kMaxHeaderBytes);
  HALFBYTE_CHECK(kLengthBytes + length <= file_bytes, bad_input,
                 "{}: header length {} does not fit into the {} bytes of the file", where, length,
                 file_bytes);
}

// Not a byte order mark, which the JSON library takes.
void check_first(std::string_view json, const std::string& where) {
  HALFBYTE_CHECK(json[0] == '{' || json[0] == ' ' || json[0] == '\t' || json[0] == '\n' || json[0] == '\r',
                 bad_input, "{}: the header does not start with {{ but with byte 0x{:02x}", where,
                 static_cast<uint8_t>(json[0]));
}

// By offset; empty tensors come before the one that begins where they do.
void sort_by_offset(std::vector<StoredTensor>& tensors) {
  struct Key {
    uint64_t offset, num_bytes;
    size_t index;
    auto operator<=>(const Key&) const = default;
  };
  std::vector<Key> keys(tensors.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = {tensors[i].offset, tensors[i].num_bytes, i};
  if (std::ranges::is_sorted(keys)) return;
  std::ranges::sort(keys);
  std::vector<StoredTensor> sorted;
  sorted.reserve(tensors.size());
  for (const Key& key : keys) sorted.push_back(std::move(tensors[key.index]));
  tensors = std::move(sorted);
}

// The data of the tensors, in order, must cover [0, num_bytes) exactly.
void check_tiling(const std::vector<StoredTensor>& tensors, uint64_t num_bytes, const std::string& where) {
  uint64_t position = 0;
  const StoredTensor* previous = nullptr;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.offset > position && previous == nullptr)
      HALFBYTE_FAIL(bad_input, "{} is the first of the data but begins at {}, not at 0",
                    in_tensor(where, tensor.name), tensor.offset);
    HALFBYTE_CHECK(tensor.offset <= position, bad_input,
                   "{} begins at {}: gap of {} bytes after \"{}\", which ends at {}",
                   in_tensor(where, tensor.name), tensor.offset, tensor.offset - position,
                   printable(previous->name), position);
    HALFBYTE_CHECK(tensor.offset == position, bad_input,
                   "{} begins at {}: it overlaps \"{}\", which ends at {}", in_tensor(where, tensor.name),
                   tensor.offset, printable(previous->name), position);
    position += tensor.num_bytes;
    HALFBYTE_CHECK(position <= num_bytes, bad_input,
                   "{} ends at byte {} of the data, which has only {} bytes", in_tensor(where, tensor.name),
                   position, num_bytes);
    previous = &tensor;
  }
  HALFBYTE_CHECK(position == num_bytes, bad_input, "{}: {} bytes after the last tensor, which ends at {}",
                 where, num_bytes - position, position);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           const std::string& file, const Stop& stop) {
  const std::string where = printable(file);
  check_length(json.size(), file_bytes, where);
  check_first(json, where);
  HeaderHandler handler(where);
  parse_json_events({json, where + ": the header", kLengthBytes, kMaxHeaderDepth, SIZE_MAX}, handler, stop);
  SafetensorsHeader header = std::move(handler.header);

  const auto tensor_name = [&](size_t i) -> const std::string& { return header.tensors[i].name; };
  if (const auto twice = find_duplicate(header.tensors.size(), tensor_name))
    HALFBYTE_FAIL(bad_input, "{} occurs twice", in_tensor(where, tensor_name(*twice)));
  const auto metadata_key = [&](size_t i) -> const std::string& { return header.metadata[i].first; };
  if (const auto twice = find_duplicate(header.metadata.size(), metadata_key))
    HALFBYTE_FAIL(bad_input, "{}: duplicate key \"{}\" in {}", where, printable(metadata_key(*twice)),
                  kMetadata);

  sort_by_offset(header.tensors);
  const uint64_t data_begin = kLengthBytes + json.size();
  check_tiling(header.tensors, file_bytes - data_begin, where);
  for (StoredTensor& tensor : header.tensors) {
    tensor.file = file;
    tensor.offset += data_begin;
  }
  return header;
}

SafetensorsHeader read_safetensors_header(const InputFile& input, const std::string& file, const Stop& stop) {
  const std::string where = printable(file);
  HALFBYTE_CHECK(input.size() >= kLengthBytes, bad_input,
                 "{}: {} bytes are too short for a safetensors file, which starts with a header length of {}",
                 where, input.size(), kLengthBytes);
  std::array<std::byte, kLengthBytes> raw;
  input.read(0, raw);
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= static_cast<uint64_t>(raw[i]) << (8 * i);
  if (length > kMaxHeaderBytes)
    if (const Container* other = container_of_bytes({reinterpret_cast<const char*>(raw.data()), raw.size()}))
      HALFBYTE_FAIL(bad_input, "{} is {}, not a safetensors file: {}", where, other->what, other->advice);
  check_length(length, input.size(), where);  // before memory for it is allocated
  std::string json(length, '\0');
  input.read(kLengthBytes, std::as_writable_bytes(std::span(json)));
  return parse_safetensors_header(json, input.size(), file, stop);
}

int safetensors_dtype_bits(std::string_view dtype) {
  const DTypeRow* row = find_dtype(dtype);
  return row ? row->bits : 0;
}

std::optional<DType> dtype_from_safetensors(std::string_view word) {
  const DTypeRow* row = find_dtype(word);
  const bool is_scale = row && (row->dtype == DType::f8_e4m3 || row->dtype == DType::f8_e8m0);
  return row && !is_scale ? row->dtype : std::nullopt;
}

const char* dtype_to_safetensors(DType dtype) {
  const auto* row = std::ranges::find(kDTypes, std::optional(dtype), &DTypeRow::dtype);
  HALFBYTE_CHECK(row != std::end(kDTypes), bug, "dtype {} has no safetensors word", to_string(dtype));
  return row->word.data();
}

SafetensorsLayout lay_out_safetensors(std::vector<StoredTensor>& tensors,
                                      const std::vector<std::pair<std::string, std::string>>& metadata) {
  HALFBYTE_CHECK(tensors.size() <= kMaxFileTensors, bad_input,
                 "a file would have {} tensors, more than the limit of {}", tensors.size(), kMaxFileTensors);
  HALFBYTE_CHECK(metadata.size() <= kMaxMetadataEntries, bad_input,
                 "{} would have {} keys, more than the limit of {}", kMetadata, metadata.size(),
                 kMaxMetadataEntries);
  std::ranges::sort(tensors, [](const StoredTensor& a, const StoredTensor& b) {
    const int bits_a = safetensors_dtype_bits(a.dtype), bits_b = safetensors_dtype_bits(b.dtype);
    return bits_a != bits_b ? bits_a > bits_b : a.name < b.name;
  });
  const auto tensor_name = [&](size_t i) -> const std::string& { return tensors[i].name; };
  if (const auto twice = find_duplicate(tensors.size(), tensor_name))
    HALFBYTE_FAIL(bad_input, "{} would be written twice", in_tensor("", tensor_name(*twice)));

  std::vector<std::string> entries;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) pairs.push_back(json_quoted(key) + ":" + json_quoted(value));
    entries.push_back(fmt::format("{}:{{{}}}", json_quoted(kMetadata), fmt::join(pairs, ",")));
  }
  uint64_t num_bytes = 0;
  for (StoredTensor& tensor : tensors) {
    HALFBYTE_CHECK(tensor.shape.size() <= kMaxRank, bad_input,
                   "{} has {} dimensions, more than the limit of {}", in_tensor("", tensor.name),
                   tensor.shape.size(), kMaxRank);
    tensor.offset = num_bytes;
    tensor.num_bytes = data_bytes(tensor, "");
    num_bytes += tensor.num_bytes;
    HALFBYTE_CHECK(num_bytes <= INT64_MAX, bad_input, "{} makes the file larger than 2^63 - 1 bytes",
                   in_tensor("", tensor.name));
    entries.push_back(fmt::format(R"({}:{{"dtype":{},"shape":[{}],"data_offsets":[{},{}]}})",
                                  json_quoted(tensor.name), json_quoted(tensor.dtype),
                                  fmt::join(tensor.shape, ","), tensor.offset, num_bytes));
  }
  std::string json = fmt::format("{{{}}}", fmt::join(entries, ","));
  json.resize((json.size() + 7) / 8 * 8, ' ');
  HALFBYTE_CHECK(json.size() <= kMaxHeaderBytes, bad_input,
                 "the safetensors header would have {} bytes, more than the limit of {}", json.size(),
                 kMaxHeaderBytes);

  SafetensorsLayout layout;
  for (size_t i = 0; i < kLengthBytes; ++i) layout.prefix += static_cast<char>(json.size() >> (8 * i) & 0xff);
  layout.prefix += json;
  for (StoredTensor& tensor : tensors) tensor.offset += layout.prefix.size();
  layout.file_bytes = layout.prefix.size() + num_bytes;
  return layout;
}

}  // namespace halfbyte::io
