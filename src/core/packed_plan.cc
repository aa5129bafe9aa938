#include "core/packed_plan.h"

#include <array>

#include "core/checks.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"
#include "halfbyte/system.hpp"

namespace halfbyte {

void check_descriptor(const QuantizeDescriptor& d) {
  constexpr const char* kOp = "quantize descriptor";
  check_spec(d.spec);
  HALFBYTE_CHECK(!d.spec.double_quant, usage,
                 "{}: spec.double_quant must be false: double_quantize and double_dequantize encode and "
                 "decode the scales of a plan",
                 kOp);
  HALFBYTE_CHECK(is_floating(d.dtype), usage, "{}: dtype must be f32, f64, f16 or bf16, got {}", kOp,
                 to_string(d.dtype));
  quant_shape(d.spec, d.rows, d.cols);  // throws for negative extents and what is too large
  contiguous_bytes(d.dtype, std::array{d.rows, d.cols});
  HALFBYTE_CHECK(d.alignment > 0 && (d.alignment & (d.alignment - 1)) == 0 && d.alignment >= size_of(d.dtype),
                 usage, "{}: alignment must be a power of two and at least the {} bytes of {}, got {}", kOp,
                 size_of(d.dtype), to_string(d.dtype), d.alignment);
}

PackedPlan::PackedPlan(const PackedOp& op, Device device, const QuantizeDescriptor& descriptor,
                       const PlanPreference& preference)
    : op_(op), device_(device), descriptor_(descriptor) {
  check_descriptor(descriptor);
  HALFBYTE_CHECK(!op.quantizes || descriptor.spec.scale_dtype != DType::f64 || descriptor.dtype == DType::f64,
                 usage, "{}: descriptor.spec.scale_dtype f64 needs dtype f64, got {}", op.name,
                 to_string(descriptor.dtype));
  HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}",
                 op.name, preference.num_threads);
  check_device(device);
  shape_ = quant_shape(descriptor.spec, descriptor.rows, descriptor.cols);
}

Sku PackedPlan::sku(const std::string& kernel, const std::string& target) const {
  const QuantSpec& spec = descriptor_.spec;
  const std::string dense = to_string(descriptor_.dtype), scale = to_string(spec.scale_dtype);
  const std::string packed = info(spec.format).name;
  std::string dtypes = op_.quantizes ? dense + " -> " + packed : packed + " -> " + dense;
  dtypes += ", scale " + scale;
  if (has_zeros(spec)) dtypes += ", zero point u8";
  if (has_biases(spec)) dtypes += ", bias " + scale;
  return {op_.name, kernel, target.empty() ? "cpu " + system_info().simd_target : "cuda " + target,
          std::move(dtypes)};
}

PrecisionGuarantee PackedPlan::guarantee() const {
  const DType math = descriptor_.dtype == DType::f64 ? DType::f64 : DType::f32;
  return {math, math, true, true};
}

void PackedPlan::check_dense(const TensorView& dense) const {
  const auto& [spec, rows, cols, dtype, alignment] = descriptor_;
  HALFBYTE_CHECK(dense.dtype == dtype, usage, "{}: {} must be {}, got {}", op_.name, op_.dense,
                 to_string(dtype), to_string(dense.dtype));
  int64_t leading = 1;
  bool fits = (dense.shape.empty() ? 1 : dense.shape.back()) == cols;
  for (size_t i = 0; i + 1 < dense.shape.size() && fits; ++i)
    fits = dense.shape[i] >= 0 && !__builtin_mul_overflow(leading, dense.shape[i], &leading);
  HALFBYTE_CHECK(fits && leading == rows, usage,
                 "{}: {} must have the rows and columns of the descriptor, [{}, {}], got the shape {}",
                 op_.name, op_.dense, rows, cols, text_of(dense.shape));
  HALFBYTE_CHECK(dense.strides.empty() || dense.strides.size() == dense.shape.size(), usage,
                 "{}: {} must have a stride for each of its {} axes, got {}", op_.name, op_.dense,
                 dense.shape.size(), dense.strides.size());
  HALFBYTE_CHECK(is_contiguous(dense), usage, "{}: {} must be contiguous, got strides {} of shape {}",
                 op_.name, op_.dense, text_of(dense.strides), text_of(dense.shape));
  HALFBYTE_CHECK(dense.device == device_, usage, "{}: {} must be on {}, got {}", op_.name, op_.dense,
                 to_string(device_), to_string(dense.device));
}

void PackedPlan::check_parts(const QuantizedView& parts) const {
  const QuantSpec& spec = descriptor_.spec;
  check_same_spec(op_.name, op_.parts, parts.spec, spec);
  const auto same = [&](const char* field, int64_t actual, int64_t expected) {
    HALFBYTE_CHECK(actual == expected, usage, "{}: {}.{} must be {} as in the descriptor, got {}", op_.name,
                   op_.parts, field, expected, actual);
  };
  same("rows", parts.rows, descriptor_.rows);
  same("cols", parts.cols, descriptor_.cols);
  HALFBYTE_CHECK(has_zeros(spec) || parts.zeros == nullptr, usage,
                 "{}: {}.zeros must be null: only asymmetric integer formats have zero points", op_.name,
                 op_.parts);
  HALFBYTE_CHECK(has_biases(spec) || parts.biases == nullptr, usage,
                 "{}: {}.biases must be null: only affine formats have biases", op_.name, op_.parts);
}

std::array<ArgumentMemory, 5> PackedPlan::check(const TensorView& dense, const QuantizedView& parts) const {
  check_dense(dense);
  check_parts(parts);
  const QuantSpec& spec = descriptor_.spec;
  const int64_t scale_size = size_of(spec.scale_dtype), alignment = descriptor_.alignment;
  const int64_t scale_bytes = shape_.num_groups * scale_size;
  const bool out = op_.quantizes;
  const auto name = [&](const char* x, const char* y) { return out ? x : y; };
  const std::array<ArgumentMemory, 5> arguments{
      {{op_.dense, dense.data, descriptor_.rows * descriptor_.cols * size_of(descriptor_.dtype),
        dense.num_bytes, alignment, true, !out},
       {name("out.codes", "in.codes"), parts.codes, shape_.code_bytes(), -1, alignment, true, out},
       {name("out.scales", "in.scales"), parts.scales, scale_bytes, -1, scale_size, false, out},
       {name("out.zeros", "in.zeros"), parts.zeros, has_zeros(spec) ? shape_.num_groups : 0, -1, 1, false,
        out},
       {name("out.biases", "in.biases"), parts.biases, has_biases(spec) ? scale_bytes : 0, -1, scale_size,
        false, out}}};
  for (size_t i = 0; i < arguments.size(); ++i) {
    check_argument(op_.name, arguments[i], device_);
    for (size_t j = 0; j < i; ++j) check_apart(op_.name, arguments[i], arguments[j]);
  }
  return arguments;
}

}  // namespace halfbyte
