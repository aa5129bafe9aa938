// What the plans of `quantize` and `dequantize` share.
#pragma once

#include <array>
#include <string>

#include "core/tensor_check.h"
#include "halfbyte/quantize_plan.hpp"

namespace halfbyte {

// The names of an operation and of its arguments.
struct PackedOp {
  const char* name;
  const char* dense;
  const char* parts;
  bool quantizes;  // dense -> parts; else parts -> dense
};

class PackedPlan {
 public:
  // Throws Error(usage) or Error(device) for what `select` refuses.
  PackedPlan(const PackedOp& op, Device device, const QuantizeDescriptor& descriptor,
             const PlanPreference& preference);

  // `target`: of the device; empty: the CPU.
  Sku sku(const std::string& kernel, const std::string& target) const;
  PrecisionGuarantee guarantee() const;
  // Throws Error(usage) where `run` would refuse the tensors. Returns their memory.
  std::array<ArgumentMemory, 5> check(const TensorView& dense, const QuantizedView& parts) const;

 private:
  void check_dense(const TensorView& dense) const;
  void check_parts(const QuantizedView& parts) const;

  PackedOp op_;
  Device device_;
  QuantizeDescriptor descriptor_;
  QuantShape shape_;
};

}  // namespace halfbyte
