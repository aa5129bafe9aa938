// What the layouts of block floats, nvfp4 and mxfp4, share when they read.
#include "core/checks.h"
#include "io/checkpoint.h"

namespace halfbyte::io {

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
  weight.dtype = checkpoint.model_dtype;
  return weight;
}

void add_activation_scale(const Checkpoint::Impl& checkpoint, const std::string& name,
                          QuantizedWeight& weight) {
  if (checkpoint.find(name) != nullptr) weight.others.push_back(name);
}

}  // namespace halfbyte::io
