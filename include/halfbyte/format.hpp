// Formats of low-bit weights and the specification of a quantization.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "halfbyte/tensor.hpp"

namespace halfbyte {

enum class Format : uint8_t {
#define HALFBYTE_FORMAT(name, kind, bits, default_rule, scales, group) name,
#include "halfbyte/formats.def"
#undef HALFBYTE_FORMAT
};

enum class FormatKind : uint8_t { table, integer, affine, floating };

// How a group gets its scale (and zero point or bias) from its statistics. qmin and qmax are the bounds of
// the signed codes, and L = 2^bits - 1. src/formats/codec.h has the definition.
enum class ScaleRule : uint8_t {
  absmax,      // absmax / qmax; tables and floating codes: absmax / (the largest magnitude of a code). Scales
               // that are powers of two: absmax / 4, with a mantissa below 1.75 rounded down and others up
  half_range,  // absmax / ((qmax - qmin) / 2)
  signed_max,  // (the value of largest magnitude) / qmin: the scale may be negative
  minmax,      // integer: (max - min) / L over the range extended to contain 0, with a zero point;
               // affine: (max - min) / L, bias = min
  mlx_edge,    // affine: the rule of MLX, in which 0 and the larger edge are exact
};

// What shares one scale.
enum class Granularity : uint8_t {
  tensor,   // all elements
  channel,  // a row: everything along the last axis
  group,    // `group_size` consecutive elements along the last axis; the last group of a row may be short
  flat,     // `group_size` consecutive elements of the flattened tensor, across rows
};

// Which scale decides the codes.
enum class CodeScale : uint8_t {
  stored,     // the scale (zero point, bias) as rounded to `scale_dtype`: the contract of halfbyte
  unrounded,  // the scale before rounding: what MLX does
};

struct FormatInfo {
  Format format;
  const char* name;
  FormatKind kind;
  int bits;
  ScaleRule default_rule;
  // Of formats whose scales are of 8 bits the only ones that a spec has, with Granularity::group; of others
  // unset and 0.
  std::optional<DType> scale_dtype;
  int64_t group_size;
};

HALFBYTE_API std::span<const FormatInfo> all_formats();
HALFBYTE_API const FormatInfo& info(Format format);
// These throw Error(usage) naming the known words.
HALFBYTE_API const FormatInfo& find_format(std::string_view name);
// "absmax" "half-range" "signed-max" "minmax" "mlx-edge"
HALFBYTE_API ScaleRule parse_scale_rule(std::string_view word);
// "-1,-0.5,...": 16 numbers separated by commas, in any locale. check_spec checks that they ascend.
HALFBYTE_API std::array<float, 16> parse_table(std::string_view text);
HALFBYTE_API const char* to_string(ScaleRule rule);
HALFBYTE_API const char* to_string(Granularity granularity);

// How the codes of a quantized tensor are read. All that decoding and products need, except the layout.
struct QuantSpec {
  Format format = Format::nf4;
  bool asymmetric = false;  // integer formats: with an integer zero point
  Granularity granularity = Granularity::group;
  int64_t group_size = 64;  // elements; used by Granularity::group and flat; of nvfp4 16, of mxfp4 32
  // Of scales and biases: f32, f16, bf16; f64 only for f64 data; of nvfp4 f8_e4m3, of mxfp4 f8_e8m0.
  DType scale_dtype = DType::f32;
  bool double_quant = false;         // the scales are quantized too, to 8 bits (needs f32 scales)
  std::array<float, 16> table = {};  // lut4 only: the values, ascending

  bool operator==(const QuantSpec&) const = default;
};

// Throws Error(usage), naming the field, the rule and the value, if `spec` is inconsistent.
HALFBYTE_API void check_spec(const QuantSpec& spec);

// How codes are chosen: what encoding needs beside the spec, and decoding never asks for.
struct Encoding {
  std::optional<ScaleRule> scale_rule = {};  // unset: default_scale_rule of the spec
  CodeScale code_scale = CodeScale::stored;
  // Of each group, the rule gives the first of sixteen scales (with zero point or bias); the one with the
  // least squared error is taken (docs/numerics.md, "Searched scales"). Not with Granularity::tensor, nor
  // with CodeScale::unrounded.
  bool search = false;

  bool operator==(const Encoding&) const = default;
};
// minmax with zero points, else that of the format.
HALFBYTE_API ScaleRule default_scale_rule(const QuantSpec& spec);
// Throws Error(usage), as check_spec, if the rule does not fit the spec.
HALFBYTE_API void check_encoding(const QuantSpec& spec, const Encoding& encoding);

// How quantized weights are stored: where codes, scales, zero points and biases lie, in files and in memory
// (docs/formats.md).
enum class Layout : uint8_t {
  halfbyte,
  bitsandbytes,
  compressed_tensors,
  mlx,
  gptq,
  awq,
  modelopt,
  fp8,
  gpt_oss
};
HALFBYTE_API const char* to_string(Layout layout);  // "halfbyte", "compressed-tensors", ...
HALFBYTE_API Layout parse_layout(std::string_view word);

// The quantized form of a row-major matrix [rows, cols] (leading axes of a higher-rank tensor are
// folded into rows), in the native layout:
//   codes   [rows, row_bytes]: each row a little-endian bit stream, element i at bit i * bits,
//           padded to a whole byte with the code of zero; integer codes stored as q - qmin.
//           Granularity::flat: one such row holding all rows * cols elements.
//   scales  [rows, groups_per_row] of spec.scale_dtype (one value for Granularity::tensor)
//   zeros   like scales, u8: zero point - qmin (asymmetric integer formats)
//   biases  like scales (affine formats)
//   global_scale  f32, one (nvfp4): the scale of a group is what `scales` has, divided by it
struct QuantShape {
  int64_t rows = 0;            // rows of codes (1 for Granularity::flat)
  int64_t cols = 0;            // elements of such a row
  int64_t row_bytes = 0;       // bytes of codes of such a row
  int64_t group_size = 0;      // elements that share a scale within a row
  int64_t groups_per_row = 0;  // 0 for an empty row
  int64_t num_groups = 0;      // scales in all
  int64_t code_bytes() const { return rows * row_bytes; }
};

// Throws Error(usage) for negative extents or sizes beyond 2^63 - 1 bits.
HALFBYTE_API QuantShape quant_shape(const QuantSpec& spec, int64_t rows, int64_t cols);

HALFBYTE_API bool has_zeros(const QuantSpec& spec);   // asymmetric integer
HALFBYTE_API bool has_biases(const QuantSpec& spec);  // affine
// nvfp4: 448 * 6 / (largest magnitude of the tensor), so that the largest scale of a group is the largest
// f8_e4m3.
HALFBYTE_API bool has_global_scale(const QuantSpec& spec);

}  // namespace halfbyte
