// Plans: one handle for the plans of all operations.
#include "capi/plan.h"

#include <array>

#include "halfbyte/convert.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

// ---- Descriptors and arguments from C: one descriptor_of or args_of for each structure. args_of is given
// the descriptor of the plan, too.

halfbyte_linear_descriptor default_linear_descriptor() {
  const LinearDescriptor defaults;
  halfbyte_linear_descriptor descriptor{};
  descriptor.granularity = static_cast<int32_t>(defaults.granularity);
  descriptor.axis = defaults.axis;
  descriptor.q_min = defaults.q_min;
  descriptor.q_max = defaults.q_max;
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.code_dtype = static_cast<int32_t>(defaults.code_dtype);
  descriptor.scale_dtype = static_cast<int32_t>(defaults.scale_dtype);
  descriptor.zero_point_dtype = HALFBYTE_UNSET;
  descriptor.scale_rule = static_cast<int32_t>(defaults.scale_rule);
  descriptor.group_size = defaults.group_size;
  descriptor.alignment = defaults.alignment;
  return descriptor;
}

LinearDescriptor descriptor_of(const halfbyte_linear_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_linear_descriptor c = read_struct(given, default_linear_descriptor(), "descriptor");
  LinearDescriptor descriptor;
  descriptor.shape = shape_of(c.shape, c.ndim);
  descriptor.granularity = enum_of(c.granularity, Granularity::flat, "descriptor.granularity");
  descriptor.axis = c.axis;
  descriptor.group_size = c.group_size;
  descriptor.q_min = c.q_min;
  descriptor.q_max = c.q_max;
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.code_dtype = dtype_of(c.code_dtype, "descriptor.code_dtype");
  descriptor.scale_dtype = dtype_of(c.scale_dtype, "descriptor.scale_dtype");
  if (c.zero_point_dtype != HALFBYTE_UNSET)
    descriptor.zero_point_dtype = dtype_of(c.zero_point_dtype, "descriptor.zero_point_dtype");
  descriptor.computed = flag_of(c.computed, "descriptor.computed");
  descriptor.scale_rule = enum_of(c.scale_rule, ScaleRule::mlx_edge, "descriptor.scale_rule");
  descriptor.strided = flag_of(c.strided, "descriptor.strided");
  descriptor.alignment = c.alignment;
  return descriptor;
}

QuantizeLinear::Args args_of(const LinearDescriptor&, const halfbyte_quantize_linear_args* given) {
  required(given, "args");
  const halfbyte_quantize_linear_args args = read_struct(given, {}, "args");
  return {view_of(args.x, "x"), view_of(args.codes, "codes"), view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point")};
}
DequantizeLinear::Args args_of(const LinearDescriptor&, const halfbyte_dequantize_linear_args* given) {
  required(given, "args");
  const halfbyte_dequantize_linear_args args = read_struct(given, {}, "args");
  return {view_of(args.codes, "codes"), view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point"), view_of(args.y, "y")};
}
QuantizeLinearBackward::Args args_of(const LinearDescriptor&,
                                     const halfbyte_quantize_linear_backward_args* given) {
  required(given, "args");
  const halfbyte_quantize_linear_backward_args args = read_struct(given, {}, "args");
  return {view_of(args.x, "x"), view_of(args.dy, "dy"), view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point"), view_of(args.dx, "dx")};
}

halfbyte_quantize_descriptor default_quantize_descriptor() {
  const QuantizeDescriptor defaults;
  halfbyte_quantize_descriptor descriptor{};
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.alignment = defaults.alignment;
  return descriptor;
}

QuantizeDescriptor descriptor_of(const halfbyte_quantize_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_quantize_descriptor c = read_struct(given, default_quantize_descriptor(), "descriptor");
  QuantizeDescriptor descriptor;
  descriptor.spec = spec_of(c.spec, "descriptor.spec");
  descriptor.encoding = encoding_of(c.encoding, "descriptor.encoding");
  if (c.encoding != nullptr &&
      read_struct(c.encoding, to_c(Encoding{}), "descriptor.encoding").importance != nullptr)
    refuse("descriptor.encoding->importance must be NULL: plans search without it");
  descriptor.rows = c.rows;
  descriptor.cols = c.cols;
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.alignment = c.alignment;
  return descriptor;
}

Quantize::Args args_of(const QuantizeDescriptor& descriptor, const halfbyte_quantize_args* given) {
  required(given, "args");
  const halfbyte_quantize_args args = read_struct(given, {}, "args");
  const TensorView x = view_of(args.x, "x");
  return {x, parts_of(args.out, descriptor.spec, descriptor.rows, descriptor.cols, x.device, "out")};
}
Dequantize::Args args_of(const QuantizeDescriptor& descriptor, const halfbyte_dequantize_args* given) {
  required(given, "args");
  const halfbyte_dequantize_args args = read_struct(given, {}, "args");
  const TensorView y = view_of(args.y, "y");
  return {parts_of(args.in, descriptor.spec, descriptor.rows, descriptor.cols, y.device, "in"), y};
}

}  // namespace

HALFBYTE_PLAN(quantize, Quantize, halfbyte_quantize_descriptor)
HALFBYTE_PLAN(dequantize, Dequantize, halfbyte_quantize_descriptor)
HALFBYTE_PLAN(quantize_linear, QuantizeLinear, halfbyte_linear_descriptor)
HALFBYTE_PLAN(dequantize_linear, DequantizeLinear, halfbyte_linear_descriptor)
HALFBYTE_PLAN(quantize_linear_backward, QuantizeLinearBackward, halfbyte_linear_descriptor)

halfbyte_status halfbyte_quantize_descriptor_init(halfbyte_quantize_descriptor* descriptor,
                                                  size_t struct_size) {
  return init_struct(descriptor, default_quantize_descriptor(), struct_size, "descriptor");
}
struct halfbyte_linear_codes {
  explicit halfbyte_linear_codes(LinearCodes of) : codes(std::move(of)) {
    const LinearDescriptor& d = codes.descriptor;
    halfbyte_linear_descriptor c = default_linear_descriptor();
    c.struct_size = sizeof c;
    c.shape = d.shape.data();
    c.ndim = static_cast<int32_t>(d.shape.size());
    c.granularity = static_cast<int32_t>(d.granularity);
    c.axis = d.axis;
    c.q_min = d.q_min;
    c.q_max = d.q_max;
    c.dtype = static_cast<int32_t>(d.dtype);
    c.code_dtype = static_cast<int32_t>(d.code_dtype);
    c.scale_dtype = static_cast<int32_t>(d.scale_dtype);
    if (d.zero_point_dtype) c.zero_point_dtype = static_cast<int32_t>(*d.zero_point_dtype);
    c.group_size = d.group_size;
    tensors[0] = to_dlpack(codes.codes.view(), storage[0]);
    tensors[1] = to_dlpack(codes.scale.view(), storage[1]);
    if (d.zero_point_dtype) tensors[2] = to_dlpack(codes.zero_point.view(), storage[2]);
    parts = {0, &tensors[0], &tensors[1], d.zero_point_dtype ? &tensors[2] : nullptr, c};
  }
  halfbyte_linear_codes(const halfbyte_linear_codes&) = delete;

  const LinearCodes codes;
  std::array<DLTensor, 3> tensors = {};
  std::array<std::vector<int64_t>, 3> storage = {};
  halfbyte_linear_codes_parts parts = {};
};

halfbyte_status halfbyte_quantized_weight_from_linear(const halfbyte_linear_descriptor* descriptor,
                                                      const DLTensor* codes, const DLTensor* scale,
                                                      const DLTensor* zero_point,
                                                      const halfbyte_execution* execution,
                                                      halfbyte_quantized_weight** weight) {
  return guard([&] {
    required(weight, "weight");
    *weight =
        new_weight(from_linear(descriptor_of(descriptor), view_of(codes, "codes"), view_of(scale, "scale"),
                               optional_view_of(zero_point, "zero_point"), execution_of(execution)));
  });
}
halfbyte_status halfbyte_quantized_weight_to_linear(const halfbyte_quantized_weight* weight,
                                                    const halfbyte_execution* execution,
                                                    halfbyte_linear_codes** codes) {
  return guard([&] {
    const QuantizedTensor& of = tensor_of(weight, "weight");
    required(codes, "codes") = new halfbyte_linear_codes(to_linear(of, execution_of(execution)));
  });
}
halfbyte_status halfbyte_linear_codes_get(const halfbyte_linear_codes* codes,
                                          halfbyte_linear_codes_parts* parts) {
  return guard([&] { write_struct(parts, required(codes, "codes").parts, "parts"); });
}
void halfbyte_linear_codes_destroy(halfbyte_linear_codes* codes) { delete codes; }

halfbyte_status halfbyte_linear_descriptor_init(halfbyte_linear_descriptor* descriptor, size_t struct_size) {
  return init_struct(descriptor, default_linear_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_linear_descriptor_scale_shape(const halfbyte_linear_descriptor* descriptor,
                                                       int32_t* ndim, int64_t* scale_shape) {
  return guard([&] {
    required(ndim, "ndim");
    required(scale_shape, "scale_shape");
    const LinearDescriptor checked = descriptor_of(descriptor);
    check_descriptor(checked);
    write_shape(checked.scale_shape(), ndim, scale_shape);
  });
}
halfbyte_status halfbyte_linear_descriptor_num_levels(const halfbyte_linear_descriptor* descriptor,
                                                      int64_t* num_levels) {
  return guard([&] {
    required(num_levels, "num_levels");
    const LinearDescriptor checked = descriptor_of(descriptor);
    check_descriptor(checked);
    *num_levels = checked.num_levels();
  });
}

// ---- What all plans have

static_assert(HALFBYTE_OP_QGEMM_GROUPED == static_cast<int>(OpKind::qgemm_grouped));
static_assert(HALFBYTE_OP_OBSERVE == static_cast<int>(OpKind::observe));
static_assert(HALFBYTE_ARCH_AMX_BF16 == static_cast<int>(Arch::amx_bf16));
static_assert(HALFBYTE_ARCH_SM_121A == static_cast<int>(Arch::sm_121a));

const char* halfbyte_op_kind_name(halfbyte_op_kind kind) { return word_of(kind, OpKind::qgemm_grouped); }
const char* halfbyte_arch_name(halfbyte_arch arch) { return word_of(arch, Arch::sm_121a); }

halfbyte_status halfbyte_plan_preference_init(halfbyte_plan_preference* preference, size_t struct_size) {
  return init_struct(preference, {}, struct_size, "preference");
}

void halfbyte_plan_destroy(halfbyte_plan* plan) { delete plan; }

halfbyte_status halfbyte_plan_sku(const halfbyte_plan* plan, halfbyte_sku* sku) {
  return guard([&] {
    const Sku& of = required(plan, "plan").sku();
    write_struct(
        sku,
        {0, of.op.c_str(), of.kernel.c_str(), of.backend.c_str(), of.dtypes.c_str(),
         static_cast<int32_t>(of.op_kind), static_cast<int32_t>(of.arch), static_cast<int32_t>(of.element),
         of.aux_element ? static_cast<int32_t>(*of.aux_element) : HALFBYTE_UNSET,
         of.layout ? static_cast<int32_t>(*of.layout) : HALFBYTE_UNSET,
         static_cast<int32_t>(of.device_kind == DeviceKind::cuda ? kDLCUDA : kDLCPU)},
        "sku");
  });
}

halfbyte_status halfbyte_plan_precision_guarantee(const halfbyte_plan* plan,
                                                  halfbyte_precision_guarantee* guarantee) {
  return guard([&] {
    const PrecisionGuarantee& of = required(plan, "plan").guarantee();
    write_struct(guarantee,
                 {0, static_cast<int32_t>(of.math), static_cast<int32_t>(of.accumulator), of.deterministic,
                  of.same_on_all_devices, static_cast<int64_t>(of.weight_rounding)},
                 "guarantee");
  });
}

halfbyte_status halfbyte_plan_device(const halfbyte_plan* plan, DLDevice* device) {
  return guard([&] { required(device, "device") = to_dlpack(required(plan, "plan").device()); });
}

halfbyte_status halfbyte_plan_workspace_size(const halfbyte_plan* plan, int64_t* num_bytes) {
  return guard([&] { required(num_bytes, "num_bytes") = required(plan, "plan").workspace_size(); });
}

halfbyte_status halfbyte_plan_status(const halfbyte_plan* plan, void* stream, const void* workspace,
                                     int64_t workspace_bytes, halfbyte_quantize_status* status) {
  return guard([&] {
    required(status, "status");
    const Workspace memory(const_cast<void*>(workspace), workspace_bytes);  // which status reads
    write_struct(status, to_c(required(plan, "plan").status(stream, memory)), "status");
  });
}
