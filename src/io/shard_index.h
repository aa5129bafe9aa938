// model.safetensors.index.json: which file has each tensor of a model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"

namespace halfbyte::io {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";

// Compact, because there are documents of a hundred megabytes.
struct ShardIndex {
  struct Entry {
    uint32_t begin, size;  // of the tensor's name in `names`
    uint32_t file;         // of `files`
  };
  std::vector<std::string> files;  // each once
  std::vector<Entry> entries;      // in the order of the document
  std::string names;               // one behind the other
  std::string rest;                // the document without its "weight_map", in JSON

  std::string_view name(const Entry& entry) const {
    return std::string_view(names).substr(entry.begin, entry.size);
  }
};

// Error(bad_input) naming the index and the byte or the tensor.
ShardIndex parse_shard_index(std::string_view text, const Stop& stop = {});

// The text of an index. `rest`: as above, of another; empty: there is none. `files`: pairs of a tensor's name
// and that of its file, sorted. Error(bad_input) where it is larger than what is read.
std::string shard_index_text(std::string_view rest, uint64_t total_bytes,
                             std::span<const std::pair<std::string_view, std::string_view>> files);

}  // namespace halfbyte::io
