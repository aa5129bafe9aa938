// What the plans of fake quantization share.
#pragma once

#include "halfbyte/fake_quantize.hpp"
#include "ops/quantize_linear/quantize_linear.h"

namespace halfbyte {

// The problem of a checked descriptor.
LinearProblem fake_quantize_problem(LinearOp op, Device device, const FakeQuantizeDescriptor& descriptor,
                                    const PlanPreference& preference);
// "bf16, scale f32, zero point i32"
std::string dtypes_of(const FakeQuantizeDescriptor& descriptor);

}  // namespace halfbyte
