// The plan of `qgemm_grouped`.
#include <algorithm>

#include "core/expect.h"
#include "core/format.h"
#include "core/packed_weight.h"
#include "core/plan.h"
#include "core/weight_view.h"
#include "halfbyte/device.hpp"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {
namespace {

// "bf16 x 8 x nf4 -> bf16"
std::string text_of_dtypes(const QgemmGroupedDescriptor& d) {
  return fmt::format("{0} x {1} x {2}{3} ({4}, scale {5}) -> {0}", to_string(d.dtype), d.num_experts,
                     info(d.spec.format).name, d.transposed ? " transposed" : "", to_string(d.rows),
                     to_string(d.spec.scale_dtype));
}

// Of x or y: a masked layout has rows for each expert.
std::vector<int64_t> shape_of(const QgemmGroupedDescriptor& d, int64_t rows, int64_t cols) {
  if (d.rows == ExpertRows::masked) return {d.num_experts, d.m, cols};
  return {rows, cols};
}

struct QgemmGroupedImpl : QgemmGroupedPlan::Impl {
  std::shared_ptr<const QgemmKernel> kernel;  // null: there is nothing to write

  QgemmGroupedImpl(Device on, const QgemmGroupedDescriptor& d, const PlanPreference& preference)
      : Impl("qgemm_grouped", on, d, preference) {
    const QgemmProblem problem = make_qgemm_problem(on, d, num_threads);
    const QgemmExperts& experts = problem.experts;
    const bool is_indices = d.rows == ExpertRows::indices;
    constexpr const char* kNoIndices = "descriptor.rows is not indices";
    memory(
        "weight",
        [](const Args& args) -> ArgumentData { return untyped(args.weight.data, args.weight.num_bytes); },
        problem.weight.num_bytes* d.num_experts)
        .aligned(packed_alignment(on));
    tensor("x", &Args::x, d.dtype, shape_of(d, experts.rows_of_x, problem.in_cols())).promised(d.alignment);
    tensor("offsets", &Args::offsets, DType::i32, {d.num_experts});
    tensor("slots", &Args::slots, DType::i32, {problem.m}).absent_unless(is_indices, kNoIndices);
    tensor("routing_weights", &Args::routing_weights, DType::f32, {d.m, d.top_k})
        .absent_unless(d.routing_weights, "descriptor.routing_weights is false");
    tensor("bias", &Args::bias, d.dtype, {d.num_experts, d.n})
        .promised(d.alignment)
        .absent_unless(d.bias, "descriptor.bias is false");
    constexpr const char* kNoGradient = "descriptor.routing_gradient is false";
    tensor("forward_x", &Args::forward_x, d.dtype, {problem.m, d.k})
        .promised(d.alignment)
        .absent_unless(d.routing_gradient, kNoGradient);
    tensor("routing_grad", &Args::routing_grad, DType::f32, {d.m, d.top_k})
        .written()
        .absent_unless(d.routing_gradient, kNoGradient);
    tensor("y", &Args::y, d.dtype, shape_of(d, problem.m / experts.slots_per_y, problem.y_cols()))
        .promised(d.alignment)
        .written();
    finds_nothing();
    sku = {op, "none", to_string(on), text_of_dtypes(d)};
    sku.element = d.dtype;
    sku.aux_element = DType::u8;
    if (problem.is_empty()) return;
    kernel = on.kind == DeviceKind::cuda ? choose_qgemm(problem, d.variant).variant.run(problem)
                                         : make_experts_cpu(problem, d.variant, num_threads);
    sku.kernel = kernel->name();
    sku.backend = kernel->backend();
    guarantee = kernel->guarantee();
    workspace_size = std::max(workspace_size, kernel->workspace_bytes());
  }

  // That the weights are those of the descriptor.
  void check_values(const Args& args) const override {
    const QgemmGroupedDescriptor& d = descriptor;
    check_same_spec(op, "weight", args.weight.spec, d.spec);
    HALFBYTE_CHECK(args.weight.rows == d.n, usage, "{}: weight.rows must be {} as in the descriptor, got {}",
                   op, d.n, args.weight.rows);
    HALFBYTE_CHECK(args.weight.cols == d.k, usage, "{}: weight.cols must be {} as in the descriptor, got {}",
                   op, d.k, args.weight.cols);
    check_packed_form(op, "weight", args.weight, device);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    if (!kernel) return;
    QgemmTensors tensors;
    tensors.x = args.x.data;
    tensors.weight = args.weight.data;
    tensors.bias = args.bias.data;
    tensors.y = args.y.data;
    tensors.offsets = static_cast<const int32_t*>(args.offsets.data);
    tensors.slots = static_cast<const int32_t*>(args.slots.data);
    tensors.routing_weights = static_cast<const float*>(args.routing_weights.data);
    tensors.forward_x = args.forward_x.data;
    tensors.routing_grad = static_cast<float*>(args.routing_grad.data);
    kernel->run(tensors, stream, workspace);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(QgemmGrouped, QgemmGroupedImpl);

}  // namespace halfbyte
