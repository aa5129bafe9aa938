// Products with the weights of experts, and who gets which row.
#include "halfbyte/qgemm_grouped.hpp"

#include "capi/qgemm.h"

using namespace halfbyte;
using namespace halfbyte::capi;

static_assert(HALFBYTE_EXPERT_ROWS_MASKED == static_cast<int>(ExpertRows::masked));

namespace {

halfbyte_route_descriptor default_route_descriptor() {
  const RouteDescriptor defaults;
  halfbyte_route_descriptor descriptor{};
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.top_k = defaults.top_k;
  return descriptor;
}

RouteDescriptor descriptor_of(const halfbyte_route_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_route_descriptor c = read_struct(given, default_route_descriptor(), "descriptor");
  return {c.tokens, c.top_k, c.num_experts, dtype_of(c.dtype, "descriptor.dtype")};
}

Route::Args args_of(const RouteDescriptor&, const halfbyte_route_args* given) {
  required(given, "args");
  const halfbyte_route_args c = read_struct(given, {}, "args");
  return {view_of(c.experts, "experts"), view_of(c.offsets, "offsets"), view_of(c.slots, "slots")};
}

halfbyte_qgemm_grouped_descriptor default_grouped_descriptor() {
  const QgemmGroupedDescriptor defaults;
  halfbyte_qgemm_grouped_descriptor descriptor{};
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.rows = static_cast<int32_t>(defaults.rows);
  descriptor.top_k = defaults.top_k;
  descriptor.alignment = defaults.alignment;
  return descriptor;
}

QgemmGroupedDescriptor descriptor_of(const halfbyte_qgemm_grouped_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_qgemm_grouped_descriptor c = read_struct(given, default_grouped_descriptor(), "descriptor");
  QgemmGroupedDescriptor descriptor;
  descriptor.spec = spec_of(c.spec, "descriptor.spec");
  descriptor.num_experts = c.num_experts;
  descriptor.m = c.m;
  descriptor.n = c.n;
  descriptor.k = c.k;
  descriptor.transposed = flag_of(c.transposed, "descriptor.transposed");
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.rows = enum_of(c.rows, ExpertRows::masked, "descriptor.rows");
  descriptor.top_k = c.top_k;
  descriptor.x_per_slot = flag_of(c.x_per_slot, "descriptor.x_per_slot");
  descriptor.sum_slots = flag_of(c.sum_slots, "descriptor.sum_slots");
  descriptor.routing_weights = flag_of(c.routing_weights, "descriptor.routing_weights");
  descriptor.routing_gradient = flag_of(c.routing_gradient, "descriptor.routing_gradient");
  descriptor.bias = flag_of(c.bias, "descriptor.bias");
  descriptor.swiglu = flag_of(c.swiglu, "descriptor.swiglu");
  descriptor.accumulate = flag_of(c.accumulate, "descriptor.accumulate");
  descriptor.alignment = c.alignment;
  if (c.variant != nullptr) descriptor.variant = c.variant;
  return descriptor;
}

QgemmGrouped::Args args_of(const QgemmGroupedDescriptor& descriptor,
                           const halfbyte_qgemm_grouped_args* given) {
  required(given, "args");
  const halfbyte_qgemm_grouped_args c = read_struct(given, {}, "args");
  const auto view_if = [](bool is_needed, const DLTensor* tensor, const char* name) {
    return is_needed ? view_of(tensor, name) : optional_view_of(tensor, name);
  };
  QgemmGrouped::Args args;
  args.x = view_of(c.x, "x");
  args.weight = packed_of(c.weight, "weight");
  args.offsets = view_of(c.offsets, "offsets");
  args.slots = view_if(descriptor.rows == ExpertRows::indices, c.slots, "slots");
  args.routing_weights = view_if(descriptor.routing_weights, c.routing_weights, "routing_weights");
  args.bias = view_if(descriptor.bias, c.bias, "bias");
  args.forward_x = view_if(descriptor.routing_gradient, c.forward_x, "forward_x");
  args.routing_grad = view_if(descriptor.routing_gradient, c.routing_grad, "routing_grad");
  args.y = view_of(c.y, "y");
  return args;
}

}  // namespace

HALFBYTE_PLAN(route, Route, halfbyte_route_descriptor)
HALFBYTE_PLAN(qgemm_grouped, QgemmGrouped, halfbyte_qgemm_grouped_descriptor)

halfbyte_status halfbyte_route_descriptor_init(halfbyte_route_descriptor* descriptor, size_t struct_size) {
  return init_struct(descriptor, default_route_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_qgemm_grouped_descriptor_init(halfbyte_qgemm_grouped_descriptor* descriptor,
                                                       size_t struct_size) {
  return init_struct(descriptor, default_grouped_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_qgemm_grouped_explain(DLDevice device,
                                               const halfbyte_qgemm_grouped_descriptor* descriptor,
                                               halfbyte_blob** text) {
  return guard([&] {
    required(text, "text");
    *text = new_explanation(explain_qgemm_grouped(from_dlpack(device), descriptor_of(descriptor)));
  });
}
halfbyte_status halfbyte_expert_rows_find(const char* word, halfbyte_expert_rows* rows) {
  return guard(
      [&] { required(rows, "rows") = static_cast<int32_t>(parse_expert_rows(&required(word, "word"))); });
}
const char* halfbyte_expert_rows_name(halfbyte_expert_rows rows) { return word_of(rows, ExpertRows::masked); }
