// The CPU side of `quantize_linear` and `dequantize_linear`.
#pragma once

#include "grouped/linear.h"

namespace halfbyte {

// Returns when all is done.
QuantizeStatus quantize_linear_cpu(const LinearProblem& problem, const LinearTensors& tensors);

}  // namespace halfbyte
