#include "core/packed_plan.h"

#include <array>

#include "core/expect.h"

namespace halfbyte {

void check_descriptor(const QuantizeDescriptor& d) {
  constexpr const char* kOp = "quantize descriptor";
  check_spec(d.spec);
  check_encoding(d.spec, d.encoding);
  HALFBYTE_CHECK_AS(!d.spec.double_quant, usage,
                    (ErrorDetails{ErrorKind::unsupported, "spec.double_quant", "false", "true"}),
                    "{}: spec.double_quant must be false: double_quantize and double_dequantize encode and "
                    "decode the scales of a plan",
                    kOp);
  HALFBYTE_MUST(is_floating(d.dtype), unsupported, kOp, "dtype", "be", "f32, f64, f16 or bf16",
                to_string(d.dtype));
  quant_shape(d.spec, d.rows, d.cols);  // throws for negative extents and what is too large
  contiguous_bytes(d.dtype, std::array{d.rows, d.cols});
  check_alignment(kOp, d.alignment, d.dtype);
}

std::string text_of_dtypes(const QuantizeDescriptor& descriptor, bool quantizes) {
  const QuantSpec& spec = descriptor.spec;
  const std::string dense = to_string(descriptor.dtype), scale = to_string(spec.scale_dtype);
  const std::string packed = info(spec.format).name;
  std::string dtypes = quantizes ? dense + " -> " + packed : packed + " -> " + dense;
  dtypes += ", scale " + scale;
  if (has_zeros(spec)) dtypes += ", zero point u8";
  if (has_biases(spec)) dtypes += ", bias " + scale;
  return dtypes;
}

void check_parts(const char* op, const std::string& name, const ConstQuantizedView& parts,
                 const QuantizeDescriptor& descriptor) {
  check_same_spec(op, name.c_str(), parts.spec, descriptor.spec);
  const auto same = [&](const char* field, int64_t actual, int64_t expected) {
    HALFBYTE_CHECK_AS(actual == expected, usage,
                      (ErrorDetails{ErrorKind::invalid_argument, fmt::format("{}.{}", name, field),
                                    fmt::format("{}", expected), fmt::format("{}", actual)}),
                      "{}: {}.{} must be {} as in the descriptor, got {}", op, name, field, expected, actual);
  };
  same("rows", parts.rows, descriptor.rows);
  same("cols", parts.cols, descriptor.cols);
}

void check_parts_apart(const char* op, const ArgumentMemory& dense, const ConstQuantizedView& parts) {
  const QuantShape shape = quant_shape(parts.spec, parts.rows, parts.cols);
  const int64_t scale_bytes = shape.num_groups * size_of(parts.spec.scale_dtype);
  const bool written = !dense.written;
  const auto part = [&](const char* in, const char* out, const void* data, int64_t num_bytes) {
    return ArgumentMemory{written ? out : in, data, data == nullptr ? 0 : num_bytes, -1, 1, false, written};
  };
  check_all_apart(op,
                  std::array{dense, part("in.codes", "out.codes", parts.codes, shape.code_bytes()),
                             part("in.scales", "out.scales", parts.scales, scale_bytes),
                             part("in.zeros", "out.zeros", parts.zeros, shape.num_groups),
                             part("in.biases", "out.biases", parts.biases, scale_bytes),
                             part("in.global_scale", "out.global_scale", parts.global_scale, sizeof(float))});
}

}  // namespace halfbyte
