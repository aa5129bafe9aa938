// Inputs up to megabytes: the first byte chooses what reads the rest, and how often it is said. At most 2 s
// and 64 MiB + 8 times the text (fuzz.py sets these limits).
#include "fuzz.h"
#include "halfbyte/checkpoint.hpp"
#include "io/config.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const std::string_view rest = fuzz::text_of(data, size).substr(4);
  // A part of the text, over and over, up to 1 MiB.
  const size_t first = rest.size() * data[1] / 256, length = (rest.size() - first) * data[2] / 256;
  const size_t most = (size_t{1} << 20) >> (data[3] % 12);
  std::string text(rest.substr(0, first));
  for (size_t i = 0; length > 0 && text.size() + length < most; ++i) {
    text += rest.substr(first, length);
    if (length < 8) continue;
    // Keys that differ.
    for (size_t at = text.size() - length, n = i; n > 0 && at < text.size(); ++at)
      if (text[at] >= '0' && text[at] <= '9') text[at] = static_cast<char>('0' + n % 10), n /= 10;
  }
  text += rest.substr(first + length);
  switch (data[0] % 4) {
    case 0:
      fuzz::attempt([&] { io::parse_safetensors_header(text, text.size() + 8, "f"); });
      break;
    case 1:
      fuzz::attempt([&] { io::parse_shard_index(text); });
      break;
    case 2:
      fuzz::attempt([&] { io::without_quantization(text, {}); });
      break;
    default:
      static fuzz::MemoryFile file;
      file.set(fuzz::length_prefix(text.size()) + text);
      fuzz::attempt([&] { Checkpoint::open(file.path()); });
  }
  return 0;
}
