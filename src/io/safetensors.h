// The safetensors container (https://github.com/huggingface/safetensors): u64 header length, JSON
// header, data. Strict on reading: what the reference rejects is rejected, and duplicate keys too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "io/file.h"
#include "io/json.h"

namespace halfbyte::io {

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of their data; offsets from the file's start
  std::vector<std::pair<std::string, std::string>> metadata;  // "__metadata__", in file order
};

// Parses the JSON text of a header of a file of `file_bytes` bytes. `file` is for StoredTensor::file
// and messages. Error(bad_input) naming the tensor or the byte.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes,
                                           const std::string& file, const Stop& stop = {});
// Reads and parses the header of an open file.
SafetensorsHeader read_safetensors_header(const InputFile& input, const std::string& file,
                                          const Stop& stop = {});

// Bits of one element of a safetensors dtype word; 0 if unknown.
int safetensors_dtype_bits(std::string_view dtype);
// Our dtype for a word ("BF16" -> bf16), empty if there is none that elements of weights have, and the
// reverse.
std::optional<DType> dtype_from_safetensors(std::string_view word);
const char* dtype_to_safetensors(DType dtype);

// Lays out `tensors` (name, dtype, shape set) as writers do: by descending dtype size, then name;
// fills offset and num_bytes, reorders the vector; returns the first bytes of the file (length and
// header, padded with spaces to 8) and the total size of the file. Error(bad_input) naming what is beyond the
// limits of reading (io/limits.h).
struct SafetensorsLayout {
  std::string prefix;
  uint64_t file_bytes = 0;
};
SafetensorsLayout lay_out_safetensors(std::vector<StoredTensor>& tensors,
                                      const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace halfbyte::io
