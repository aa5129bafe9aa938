// The JSON text that describes a quantized weight, within an otherwise good file: layouts bitsandbytes (the
// first byte is even) and halfbyte.
#include "core/format.h"
#include "fuzz.h"
#include "halfbyte/checkpoint.hpp"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile file;
  if (size == 0) return 0;
  const bool of_bitsandbytes = data[0] % 2 == 0;
  const std::string_view state = fuzz::text_of(data, size).substr(1);
  // Of a weight [2, 64] in groups of 64; the map of NF4 is that of the data below.
  const std::span<const float, 16> map = table_values(Format::nf4);
  const std::string tensors =
      of_bitsandbytes
          ? R"("w.quant_map":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},)"
            R"("w.absmax":{"dtype":"F32","shape":[2],"data_offsets":[64,72]},)"
            R"("w":{"dtype":"U8","shape":[64,1],"data_offsets":[72,136]},"w.quant_state.bitsandbytes__nf4")"
          : R"("w.table":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},)"
            R"("w.scales":{"dtype":"F32","shape":[2,1],"data_offsets":[64,72]},)"
            R"("w":{"dtype":"U8","shape":[2,32],"data_offsets":[72,136]},"w.quant_spec")";
  const std::string end = std::to_string(136 + state.size());
  const std::string header = "{" + tensors + R"(:{"dtype":"U8","shape":[)" + std::to_string(state.size()) +
                             R"(],"data_offsets":[136,)" + end + "]}}";
  std::string bytes = fuzz::length_prefix(header.size()) + header;
  bytes.append(reinterpret_cast<const char*>(map.data()), map.size_bytes());
  bytes.append(72, '\x3f');
  bytes += state;
  file.set(bytes);
  fuzz::attempt([&] {
    const Checkpoint checkpoint = Checkpoint::open(file.path());
    for (const Weight& weight : checkpoint.weights()) {
      float values[128];
      int64_t n = 1;
      for (const int64_t extent : weight.shape) n = extent == 0 || n == 0 ? 0 : n > 1000 ? n : n * extent;
      if (weight.layout && n <= 128) checkpoint.decode(weight, 0, n, DType::f32, values);
    }
  });
  return 0;
}
