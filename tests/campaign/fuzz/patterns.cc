// Regular expressions of --include and --exclude: a line each, and then names.
#include "fuzz.h"
#include "halfbyte/checkpoint.hpp"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view text = fuzz::text_of(data, size);
  const auto line = [&] {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view result = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return std::string(result);
  };
  QuantizeOptions options;
  if (std::string include = line(); !include.empty()) options.include = {std::move(include)};
  if (std::string exclude = line(); !exclude.empty()) options.exclude = {std::move(exclude)};
  std::vector<Weight> weights;
  while (!text.empty() && weights.size() < 8) {
    Weight& weight = weights.emplace_back();
    weight.name = line();
    weight.shape = {2, 64};
    weight.dtype = DType::bf16;
  }
  fuzz::attempt([&] { dense_reasons("", weights, options); });
  return 0;
}
