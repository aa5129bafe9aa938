// The configuration of scales and zero points as kernels use it.
#pragma once

#include "formats/qparams.h"
#include "halfbyte/qparams.hpp"

namespace halfbyte {

// `config` must have passed check_config.
formats::QParamsRule qparams_rule(const QParamsConfig& config, DType scale_dtype);

// Throws Error(usage) naming the fields: dtype f32 or f64; scale_dtype f32, f16, bf16, or f64 for f64.
void check_scale_dtype(const char* what, DType dtype, DType scale_dtype);

}  // namespace halfbyte
