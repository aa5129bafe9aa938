// Plans of `affine_init`, `affine_qdq` and `affine_qdq_backward`.
#include "halfbyte/affine_qdq.hpp"

#include "capi/plan.h"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

halfbyte_affine_qdq_descriptor default_descriptor() {
  const AffineQdqDescriptor defaults;
  halfbyte_affine_qdq_descriptor descriptor{};
  descriptor.group_size = defaults.group_size;
  descriptor.alignment = defaults.alignment;
  descriptor.bits = defaults.bits;
  descriptor.packed = defaults.packed;
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.scale_dtype = static_cast<int32_t>(defaults.scale_dtype);
  descriptor.scale_rule = static_cast<int32_t>(defaults.scale_rule);
  descriptor.n_bins = defaults.n_bins;
  return descriptor;
}

AffineQdqDescriptor descriptor_of(const halfbyte_affine_qdq_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_affine_qdq_descriptor c = read_struct(given, default_descriptor(), "descriptor");
  AffineQdqDescriptor descriptor;
  descriptor.rows = c.rows;
  descriptor.cols = c.cols;
  descriptor.bits = c.bits;
  descriptor.group_size = c.group_size;
  descriptor.packed = flag_of(c.packed, "descriptor.packed");
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.scale_dtype = dtype_of(c.scale_dtype, "descriptor.scale_dtype");
  descriptor.scale_rule = enum_of(c.scale_rule, ScaleRule::mlx_edge, "descriptor.scale_rule");
  descriptor.rounding =
      flag_of(c.half_away, "descriptor.half_away") ? AffineRounding::half_away : AffineRounding::half_even;
  descriptor.refit = flag_of(c.refit, "descriptor.refit");
  descriptor.adam = flag_of(c.adam, "descriptor.adam");
  descriptor.alignment = c.alignment;
  if (c.n_bins < 0 || c.n_bins > 256) refuse("descriptor.n_bins must be in [0, 256], got {}", c.n_bins);
  descriptor.n_bins = static_cast<int>(c.n_bins);
  return descriptor;
}

halfbyte_adam_step default_step() {
  const AdamStep defaults;
  halfbyte_adam_step step{};
  step.learning_rate = defaults.learning_rate;
  step.beta1 = defaults.beta1;
  step.beta2 = defaults.beta2;
  step.epsilon = defaults.epsilon;
  step.step = defaults.step;
  return step;
}
AdamStep step_of(const halfbyte_adam_step* given) {
  required(given, "adam");
  const halfbyte_adam_step c = read_struct(given, default_step(), "adam");
  return {c.learning_rate, c.beta1, c.beta2, c.epsilon, c.step};
}

AffineInit::Args args_of(const AffineQdqDescriptor&, const halfbyte_affine_init_args* given) {
  required(given, "args");
  const halfbyte_affine_init_args args = read_struct(given, {}, "args");
  return {view_of(args.w, "w"), view_of(args.codes, "codes"), view_of(args.scales, "scales"),
          view_of(args.biases, "biases")};
}
AffineQdq::Args args_of(const AffineQdqDescriptor&, const halfbyte_affine_qdq_args* given) {
  required(given, "args");
  const halfbyte_affine_qdq_args args = read_struct(given, {}, "args");
  return {view_of(args.codes, "codes"), view_of(args.scales, "scales"), view_of(args.biases, "biases"),
          view_of(args.y, "y")};
}
AffineQdqBackward::Args args_of(const AffineQdqDescriptor& descriptor,
                                const halfbyte_affine_qdq_backward_args* given) {
  required(given, "args");
  const halfbyte_affine_qdq_backward_args args = read_struct(given, {}, "args");
  const auto masters = descriptor.adam ? view_of : optional_view_of;
  return {view_of(args.codes, "codes"),
          view_of(args.dy, "dy"),
          optional_view_of(args.dscales, "dscales"),
          optional_view_of(args.dbiases, "dbiases"),
          masters(args.scales, "scales"),
          masters(args.biases, "biases"),
          masters(args.scale_m, "scale_m"),
          masters(args.scale_v, "scale_v"),
          masters(args.bias_m, "bias_m"),
          masters(args.bias_v, "bias_v"),
          descriptor.adam ? step_of(args.adam) : AdamStep()};
}

}  // namespace

HALFBYTE_PLAN(affine_init, AffineInit, halfbyte_affine_qdq_descriptor)
HALFBYTE_PLAN(affine_qdq, AffineQdq, halfbyte_affine_qdq_descriptor)
HALFBYTE_PLAN(affine_qdq_backward, AffineQdqBackward, halfbyte_affine_qdq_descriptor)

halfbyte_status halfbyte_affine_qdq_descriptor_init(halfbyte_affine_qdq_descriptor* descriptor,
                                                    size_t struct_size) {
  return init_struct(descriptor, default_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_affine_qdq_descriptor_shapes(const halfbyte_affine_qdq_descriptor* descriptor,
                                                      int64_t code_shape[2], int64_t scale_shape[2]) {
  return guard([&] {
    required(code_shape, "code_shape");
    required(scale_shape, "scale_shape");
    const AffineQdqDescriptor checked = descriptor_of(descriptor);
    std::ranges::copy(checked.code_shape(), code_shape);
    std::ranges::copy(checked.scale_shape(), scale_shape);
  });
}
halfbyte_status halfbyte_adam_step_init(halfbyte_adam_step* step, size_t struct_size) {
  return init_struct(step, default_step(), struct_size, "step");
}
