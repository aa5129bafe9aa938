// The header of a safetensors file. What is read is written again, and must be the same.
#include <algorithm>

#include "fuzz.h"
#include "io/safetensors.h"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json = fuzz::text_of(data, size);
  fuzz::attempt([&] {
    io::SafetensorsHeader header =
        io::parse_safetensors_header(json, 8 + json.size() + fuzz::end_of_data(json), "f.safetensors");
    std::vector<StoredTensor> tensors = header.tensors;
    const io::SafetensorsLayout layout = io::lay_out_safetensors(tensors, header.metadata);
    const io::SafetensorsHeader again = io::parse_safetensors_header(
        std::string_view(layout.prefix).substr(8), layout.file_bytes, "f.safetensors");
    const auto is_same = [](const StoredTensor& a, const StoredTensor& b) {
      return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.num_bytes == b.num_bytes;
    };
    if (again.metadata != header.metadata ||
        !std::ranges::is_permutation(again.tensors, header.tensors, is_same))
      fuzz::fail("a header is not what was written");
  });
  return 0;
}
