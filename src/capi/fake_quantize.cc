// Plans of fake quantization.
#include "halfbyte/fake_quantize.hpp"

#include "capi/observe.h"
#include "capi/plan.h"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

halfbyte_fake_quantize_descriptor default_descriptor() {
  const FakeQuantizeDescriptor defaults;
  halfbyte_fake_quantize_descriptor descriptor{};
  descriptor.granularity = static_cast<int32_t>(defaults.granularity);
  descriptor.axis = defaults.axis;
  descriptor.group_size = defaults.group_size;
  descriptor.format = HALFBYTE_UNSET;
  descriptor.q_min = defaults.q_min;
  descriptor.q_max = defaults.q_max;
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.scale_dtype = static_cast<int32_t>(defaults.scale_dtype);
  descriptor.zero_point_dtype = HALFBYTE_UNSET;
  descriptor.scale_rule = static_cast<int32_t>(defaults.scale_rule);
  descriptor.gradient_scale = defaults.gradient_scale;
  descriptor.alignment = defaults.alignment;
  return descriptor;
}

FakeQuantizeDescriptor descriptor_of(const halfbyte_fake_quantize_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_fake_quantize_descriptor c = read_struct(given, default_descriptor(), "descriptor");
  FakeQuantizeDescriptor descriptor;
  descriptor.shape = shape_of(c.shape, c.ndim);
  descriptor.granularity = enum_of(c.granularity, Granularity::flat, "descriptor.granularity");
  descriptor.axis = c.axis;
  descriptor.group_size = c.group_size;
  if (c.format != HALFBYTE_UNSET)
    descriptor.format = enum_of(c.format, all_formats().back().format, "descriptor.format");
  if (c.table != nullptr) std::copy_n(c.table, descriptor.table.size(), descriptor.table.begin());
  descriptor.q_min = c.q_min;
  descriptor.q_max = c.q_max;
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.scale_dtype = dtype_of(c.scale_dtype, "descriptor.scale_dtype");
  if (c.zero_point_dtype != HALFBYTE_UNSET)
    descriptor.zero_point_dtype = dtype_of(c.zero_point_dtype, "descriptor.zero_point_dtype");
  descriptor.computed = flag_of(c.computed, "descriptor.computed");
  descriptor.scale_rule = enum_of(c.scale_rule, ScaleRule::mlx_edge, "descriptor.scale_rule");
  descriptor.eps = c.eps;
  if (c.observer != nullptr) descriptor.observer = observer_config_of(c.observer, "descriptor.observer");
  descriptor.mask = flag_of(c.mask, "descriptor.mask");
  descriptor.gradient_scale = c.gradient_scale;
  descriptor.alignment = c.alignment;
  descriptor.computed_global_scale = flag_of(c.computed_global_scale, "descriptor.computed_global_scale");
  return descriptor;
}

FakeQuantize::Args args_of(const FakeQuantizeDescriptor&, const halfbyte_fake_quantize_args* given) {
  required(given, "args");
  const halfbyte_fake_quantize_args args = read_struct(given, {}, "args");
  return {view_of(args.x, "x"),
          view_of(args.y, "y"),
          view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point"),
          optional_view_of(args.mask, "mask"),
          optional_view_of(args.min, "min"),
          optional_view_of(args.max, "max"),
          optional_view_of(args.num_batches, "num_batches"),
          optional_view_of(args.global_scale, "global_scale")};
}
FakeQuantizeBackward::Args args_of(const FakeQuantizeDescriptor&,
                                   const halfbyte_fake_quantize_backward_args* given) {
  required(given, "args");
  const halfbyte_fake_quantize_backward_args args = read_struct(given, {}, "args");
  return {optional_view_of(args.x, "x"),
          optional_view_of(args.mask, "mask"),
          view_of(args.dy, "dy"),
          optional_view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point"),
          view_of(args.dx, "dx")};
}
FakeQuantizeLearnedBackward::Args args_of(const FakeQuantizeDescriptor&,
                                          const halfbyte_fake_quantize_learned_backward_args* given) {
  required(given, "args");
  const halfbyte_fake_quantize_learned_backward_args args = read_struct(given, {}, "args");
  return {view_of(args.x, "x"),
          view_of(args.dy, "dy"),
          view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point"),
          view_of(args.dx, "dx"),
          view_of(args.dscale, "dscale"),
          optional_view_of(args.dzero_point, "dzero_point")};
}

}  // namespace

HALFBYTE_PLAN(fake_quantize, FakeQuantize, halfbyte_fake_quantize_descriptor)
HALFBYTE_PLAN(fake_quantize_backward, FakeQuantizeBackward, halfbyte_fake_quantize_descriptor)
HALFBYTE_PLAN(fake_quantize_learned_backward, FakeQuantizeLearnedBackward, halfbyte_fake_quantize_descriptor)

halfbyte_status halfbyte_fake_quantize_descriptor_init(halfbyte_fake_quantize_descriptor* descriptor,
                                                       size_t struct_size) {
  return init_struct(descriptor, default_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_fake_quantize_descriptor_scale_shape(
    const halfbyte_fake_quantize_descriptor* descriptor, int32_t* ndim, int64_t* scale_shape) {
  return guard([&] {
    required(ndim, "ndim");
    required(scale_shape, "scale_shape");
    const FakeQuantizeDescriptor checked = descriptor_of(descriptor);
    check_descriptor(checked);
    write_shape(checked.scale_shape(), ndim, scale_shape);
  });
}
halfbyte_status halfbyte_fake_quantize_descriptor_mask_shape(
    const halfbyte_fake_quantize_descriptor* descriptor, int32_t* ndim, int64_t* mask_shape) {
  return guard([&] {
    required(ndim, "ndim");
    required(mask_shape, "mask_shape");
    const FakeQuantizeDescriptor checked = descriptor_of(descriptor);
    check_descriptor(checked);
    write_shape(checked.mask_shape(), ndim, mask_shape);
  });
}
halfbyte_status halfbyte_fake_quantize_descriptor_num_levels(
    const halfbyte_fake_quantize_descriptor* descriptor, int64_t* num_levels) {
  return guard([&] {
    required(num_levels, "num_levels");
    const FakeQuantizeDescriptor checked = descriptor_of(descriptor);
    check_descriptor(checked);
    *num_levels = checked.num_levels();
  });
}
