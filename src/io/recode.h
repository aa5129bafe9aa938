// The same weight for another layout: codes as they are, with the scales, zero points and biases that make
// them decode to the same values. Or why there are none.
#pragma once

#include <optional>
#include <string>

#include "halfbyte/ops.hpp"
#include "io/layout.h"

namespace halfbyte::io {

struct Recoded {
  std::optional<QuantizedTensor> weight;  // shares the memory of what is the same
  std::string lost;                       // why there is none: what the layout would lose
};
// `model_dtype`: that of the dense weights of the model. Layouts whose scales have the dtype of the weight
// get it where it holds them. Every code of every group decodes to the same f32, by the formulas of
// dequantize.
Recoded recode(const QuantizedTensor& from, const LayoutInfo& to, DType model_dtype);

}  // namespace halfbyte::io
