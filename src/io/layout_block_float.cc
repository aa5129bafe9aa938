// What the layouts of block floats, nvfp4 and mxfp4, share when they read.
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/config.h"

namespace halfbyte::io {
namespace {

// Of config.json, or of the metadata of a file that stands alone.
std::optional<DType> model_dtype(const Checkpoint::Impl& checkpoint) {
  if (!checkpoint.config.empty()) return dtype_of_config(checkpoint.config);
  for (const auto& [key, value] : checkpoint.files.front().metadata) try {
      if (key == kWordMetadata)
        if (const auto config = word_config(value, "__metadata__: " + key)) return config->dtype;
    } catch (const Error&) {
      // The tensors tell the rest.
    }
  return std::nullopt;
}

}  // namespace

QuantizedWeight block_float_weight(const Checkpoint::Impl& checkpoint, Format format, Layout layout,
                                   const std::string& name, const StoredTensor& codes) {
  const FormatInfo& of = info(format);
  const int64_t bytes = codes.shape.empty() ? 0 : codes.shape.back();
  HALFBYTE_CHECK(codes.shape.size() >= 2 && bytes < INT64_MAX / 2 && 2 * bytes % of.group_size == 0,
                 bad_input, "tensor \"{}\" [{}]: rows of {} are whole groups of {} codes, two in a byte",
                 printable(codes.name), fmt::join(codes.shape, ", "), of.name, of.group_size);
  QuantizedWeight weight;
  weight.name = name;
  weight.shape = with_last(codes.shape, 2 * bytes);
  weight.layout = layout;
  weight.spec.format = format;
  weight.spec.group_size = of.group_size;
  weight.spec.scale_dtype = *of.scale_dtype;
  weight.dtype = model_dtype(checkpoint).value_or(DType::bf16);
  return weight;
}

void add_activation_scale(const Checkpoint::Impl& checkpoint, const std::string& name,
                          QuantizedWeight& weight) {
  if (checkpoint.find(name) != nullptr) weight.others.push_back(name);
}

}  // namespace halfbyte::io
