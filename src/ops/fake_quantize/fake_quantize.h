// The CPU side of `fake_quantize`.
#pragma once

#include "grouped/linear.h"

namespace halfbyte {

// Forward; returns when all is done.
QuantizeStatus fake_quantize_cpu(const LinearProblem& problem, const LinearTensors& tensors);
// Backward by the mask: y is dy where the bit is set, else 0.
void mask_gradients_cpu(const LinearProblem& problem, const LinearTensors& tensors);

}  // namespace halfbyte
