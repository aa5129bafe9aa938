// The problem of a FakeQuantizeDescriptor, whose members and check are defined here.
#pragma once

#include "grouped/linear.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte {

// The problem of a checked descriptor.
LinearProblem fake_quantize_problem(LinearOp op, Device device, const FakeQuantizeDescriptor& descriptor,
                                    const PlanPreference& preference);
// "bf16, scale f32, zero point i32"
std::string dtypes_of(const FakeQuantizeDescriptor& descriptor);

}  // namespace halfbyte
