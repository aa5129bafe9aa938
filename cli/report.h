// How specifications and checkpoint reports are shown, as text and as JSON.
#pragma once

#include <string>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"

namespace halfbyte::cli {

std::string format_name(const QuantSpec& spec);  // "nf4", "int4 asymmetric", "nf4 double-quant"
// "64", "64 flat", "channel", "tensor"; where so many rows share the scale of a group, "128x128"
std::string group_name(const QuantSpec& spec, int64_t scale_rows = 1);
Json spec_json(const QuantSpec& spec, int64_t scale_rows = 1);

// Bits per element over all weights added; each adds its bytes and the product of its shape.
struct BitsPerWeight {
  double num_bytes = 0, num_elements = 0;
  void add(uint64_t weight_bytes, std::span<const int64_t> shape);
  double value() const { return num_elements > 0 ? 8 * num_bytes / num_elements : 0; }
};

struct RunInfo {
  const char* verb;  // what happened to the weights: "quantized" or "dequantized"
  DeviceChoice device;
  bool dry_run, verified;
  std::string importance = {};  // the file that scales were searched by
};
// The result of quantize and dequantize: appends to the text, adds the fields of the report to the
// document.
void describe(const CheckpointReport& report, const RunInfo& run, std::string& text, Json& document);

}  // namespace halfbyte::cli
