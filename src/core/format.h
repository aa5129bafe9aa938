// From the public description of a quantization to what the kernels use.
#pragma once

#include <span>

#include "formats/codec.h"
#include "halfbyte/format.hpp"

namespace halfbyte {

// The choices of `spec` and `encoding` resolved. They must have passed their checks.
formats::Codec make_codec(const QuantSpec& spec, const Encoding& encoding = {});

formats::ScaleType scale_type(DType dtype);  // f32, f16, bf16, f64, f8_e4m3, f8_e8m0 only

// The book of a table format, null for others. That of lut4 has a tie rule, but no values of its own.
const formats::CodeBook* code_book(Format format);

// The sixteen values of a table format, by code. lut4 has none of its own: see QuantSpec::table.
std::span<const float, 16> table_values(Format format);

}  // namespace halfbyte
