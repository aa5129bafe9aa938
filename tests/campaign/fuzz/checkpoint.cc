// A whole file: how every layout finds its weights, and what they decode to. The input is the header up to
// the first 0 byte, and the data; the length of the header is put before it, and zeros behind the data as far
// as the header goes, so that a changed header is still one of a file.
#include <algorithm>

#include "fuzz.h"
#include "halfbyte/checkpoint.hpp"

namespace {

using namespace halfbyte;

constexpr int64_t kMostElements = 4096;

void read_weight(const Checkpoint& checkpoint, const Weight& weight) {
  int64_t n = 1;
  for (const int64_t extent : weight.shape)
    if (__builtin_mul_overflow(n, extent, &n)) return;
  bits_per_weight(weight);
  float values[256];
  for (const int64_t begin : {int64_t{0}, n / 2, n - 256}) {
    const int64_t first = std::max<int64_t>(begin, 0);
    if (weight.dtype) checkpoint.decode(weight, first, std::min<int64_t>(n - first, 256), DType::f32, values);
  }
  if (weight.layout && n <= kMostElements) {
    Execution execution;
    execution.num_threads = 1;
    load_weight(checkpoint, weight.name, {}, execution);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile file;
  const std::string_view text = fuzz::text_of(data, size);
  const std::string_view header = text.substr(0, text.find('\0'));
  const std::string_view values = text.substr(std::min(text.size(), header.size() + 1));
  const uint64_t end = fuzz::end_of_data(header);
  std::string bytes = fuzz::length_prefix(header.size());
  bytes += header;
  const size_t begin = bytes.size();
  bytes += values.substr(0, end);
  file.set(bytes, begin + end);
  fuzz::attempt([&] {
    const Checkpoint checkpoint = Checkpoint::open(file.path());
    for (const Weight& weight : checkpoint.weights()) fuzz::attempt([&] { read_weight(checkpoint, weight); });
  });
  return 0;
}
