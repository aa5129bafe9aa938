// The plan of `qgemm`.
#include <algorithm>

#include "core/expect.h"
#include "core/format.h"
#include "core/pack_step.h"
#include "core/packed_weight.h"
#include "core/plan.h"
#include "core/weight_view.h"
#include "halfbyte/device.hpp"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {
namespace {

constexpr WeightViewNames kViewNames{"view",       "view.codes",  "view.scales",
                                     "view.zeros", "view.biases", "view.absmax",
                                     "view.map",   "view.offset", "view.global_scale"};

// "bf16 x nf4 (g64, scale f16) -> bf16"
std::string text_of_dtypes(const QgemmDescriptor& d) {
  const QuantSpec& spec = d.spec;
  std::string group = to_string(spec.granularity);
  if (spec.granularity == Granularity::group) group = fmt::format("g{}", spec.group_size);
  if (spec.granularity == Granularity::flat) group += fmt::format(" {}", spec.group_size);
  return fmt::format("{0} x {1}{2} ({3}, scale {4}{5}{6}) -> {0}", to_string(d.dtype), info(spec.format).name,
                     d.transposed ? " transposed" : "", group, to_string(spec.scale_dtype),
                     spec.double_quant ? " double quantized" : "",
                     has_zeros(spec)    ? ", zero point u8"
                     : has_biases(spec) ? fmt::format(", bias {}", to_string(spec.scale_dtype))
                                        : "");
}

struct QgemmImpl : QgemmPlan::Impl {
  std::shared_ptr<const QgemmKernel> kernel;  // null: there is nothing to write
  // Packs a view into the workspace, for the kernel; null: it reads the weight as it is given.
  std::shared_ptr<const PackStep> pack;
  int64_t packed_bytes = 0;

  QgemmImpl(Device on, const QgemmDescriptor& d, const PlanPreference& preference)
      : Impl("qgemm", on, d, preference) {
    HALFBYTE_CHECK(on.kind == DeviceKind::cuda || d.tile == QgemmTile{}, usage,
                   "qgemm: tile is for qgemm_simt on CUDA devices, got {} x {} on the CPU", d.tile.m,
                   d.tile.n);
    const QgemmProblem problem = make_qgemm_problem(on, d, num_threads);
    if (d.packed)
      memory(
          "weight",
          [](const Args& args) -> ArgumentData { return untyped(args.weight.data, args.weight.num_bytes); },
          problem.weight.num_bytes)
          .aligned(packed_alignment(on));
    else
      for (const WeightViewPart& part : weight_view_parts(kViewNames, d.spec, d.n, d.k, d.layout,
                                                          on.kind == DeviceKind::cuda ? d.alignment : 1))
        memory(
            part.name,
            [data = part.data](const Args& args) -> ArgumentData { return untyped(data(args.view)); },
            part.num_bytes)
            .aligned(part.alignment)
            .null_unless(part.present, kNoWeightPart);
    tensor("x", &Args::x, d.dtype, {d.m, problem.in_cols()}).promised(d.alignment);
    tensor("bias", &Args::bias, d.dtype, {d.n})
        .promised(d.alignment)
        .absent_unless(d.bias, "descriptor.bias is false");
    tensor("y", &Args::y, d.dtype, {d.m, problem.out_cols()}).promised(d.alignment).written();
    finds_nothing();
    sku = {op, "none", to_string(on), text_of_dtypes(d)};
    sku.element = d.dtype;
    sku.aux_element = DType::u8;
    if (!d.packed) sku.layout = d.layout;
    if (problem.is_empty()) return;
    const QgemmChosen chosen = choose_qgemm(problem, d.variant);
    kernel = chosen.variant.run(chosen.problem);
    int64_t bytes = kernel->workspace_bytes();
    if (chosen.problem.packed && !d.packed) {
      const ConstWeightView view{.spec = d.spec, .rows = d.n, .cols = d.k, .layout = d.layout, .device = on};
      pack = PackStep::make(view, d.alignment, num_threads);
      packed_bytes = chosen.problem.weight.num_bytes;
      bytes += packed_bytes + packed_alignment(on);  // wherever the workspace lies
    }
    sku.kernel = kernel->name();
    sku.backend = kernel->backend();
    guarantee = kernel->guarantee();
    workspace_size = std::max(workspace_size, bytes);
  }

  // That the weight is the one of the descriptor.
  void check_values(const Args& args) const override {
    const QgemmDescriptor& d = descriptor;
    HALFBYTE_CHECK(!d.packed || args.view.codes == nullptr, usage,
                   "{}: view must have no data, as descriptor.packed is true", op);
    HALFBYTE_CHECK(d.packed || args.weight.data == nullptr, usage,
                   "{}: weight must have no data, as descriptor.packed is false", op);
    const auto same = [&](const char* name, const auto& weight) {
      check_same_spec(op, name, weight.spec, d.spec);
      HALFBYTE_CHECK(weight.rows == d.n, usage, "{}: {}.rows must be {} as in the descriptor, got {}", op,
                     name, d.n, weight.rows);
      HALFBYTE_CHECK(weight.cols == d.k, usage, "{}: {}.cols must be {} as in the descriptor, got {}", op,
                     name, d.k, weight.cols);
    };
    if (d.packed) {
      same("weight", args.weight);
      check_packed_form(op, "weight", args.weight, device);
    } else {
      same("view", args.view);
      HALFBYTE_MUST(args.view.layout == d.layout, invalid_argument, op, "view.layout", "be",
                    fmt::format("{} as in the descriptor", to_string(d.layout)), to_string(args.view.layout));
      check_view_device(op, "view", args.view, device);
    }
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    if (!kernel) return;
    QgemmTensors tensors;
    tensors.x = args.x.data;
    tensors.weight = args.weight.data;
    tensors.codes = args.view.codes;
    tensors.scales = args.view.scales;
    tensors.zeros = args.view.zeros;
    tensors.biases = args.view.biases;
    tensors.absmax = args.view.absmax;
    tensors.map = args.view.map;
    tensors.offset = args.view.offset;
    tensors.global_scale = args.view.global_scale;
    tensors.bias = args.bias.data;
    tensors.y = args.y.data;
    if (pack) {
      const auto alignment = static_cast<uintptr_t>(packed_alignment(device));
      auto* const packed = static_cast<std::byte*>(workspace) +
                           (alignment - reinterpret_cast<uintptr_t>(workspace) % alignment) % alignment;
      pack->run(args.view, packed, stream);
      tensors.weight = packed;
      workspace = packed + packed_bytes;
    }
    kernel->run(tensors, stream, workspace);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(Qgemm, QgemmImpl);

}  // namespace halfbyte
