// The plan of `qgemm`.
#include <array>

#include "core/format.h"
#include "core/plan.h"
#include "core/weight_view.h"
#include "halfbyte/device.hpp"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {
namespace {

constexpr const char* kOp = "qgemm";
constexpr WeightViewNames kViewNames{"view",        "view.codes",  "view.scales", "view.zeros",
                                     "view.biases", "view.absmax", "view.map",    "view.offset"};

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
  std::array<int64_t, 2> x_shape, y_shape;
  std::array<int64_t, 1> bias_shape;

  QgemmImpl(Device on, const QgemmDescriptor& of, const PlanPreference& preference) {
    check_descriptor(of);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}", kOp,
                   preference.num_threads);
    check_device(on);
    const QgemmProblem problem = make_qgemm_problem(on, of, preference.num_threads);
    device = on;
    descriptor = of;
    sku = {kOp, "none", to_string(on), text_of_dtypes(of)};
    workspace_size = 16;  // at least
    if (!problem.is_empty()) {
      kernel = choose_qgemm(problem, of.variant).run(problem);
      sku.kernel = kernel->name();
      sku.backend = kernel->backend();
      guarantee = kernel->guarantee();
      workspace_size = std::max(workspace_size, kernel->workspace_bytes());
    }
    x_shape = {of.m, problem.in_cols()};
    y_shape = {of.m, problem.out_cols()};
    bias_shape = {of.n};
  }

  std::vector<ArgumentMemory> memory_of(const Qgemm::Args& args) const {
    const QgemmDescriptor& d = descriptor;
    const auto dense = [&](const char* name, const TensorView& view, std::span<const int64_t> shape,
                           bool written) {
      return check_tensor(kOp, {name, &view, d.dtype, shape, written, d.alignment, true}, device);
    };
    const auto absent = [&](const char* name, const void* data, const char* field) {
      HALFBYTE_CHECK(data == nullptr, usage, "{}: {} must have no data, as descriptor.{}", kOp, name, field);
    };
    const auto same = [&](const char* field, int64_t actual, int64_t expected) {
      HALFBYTE_CHECK(actual == expected, usage, "{}: {}.{} must be {} as in the descriptor, got {}", kOp,
                     d.packed ? "weight" : "view", field, expected, actual);
    };
    std::vector<ArgumentMemory> memory;
    if (d.packed) {
      absent("view", args.view.codes, "packed is true");
      check_same_spec(kOp, "weight", args.weight.spec, d.spec);
      same("rows", args.weight.rows, d.n);
      same("cols", args.weight.cols, d.k);
      memory = {check_packed(kOp, "weight", args.weight, device, false)};
    } else {
      absent("weight", args.weight.data, "packed is false");
      check_same_spec(kOp, "view", args.view.spec, d.spec);
      same("rows", args.view.rows, d.n);
      same("cols", args.view.cols, d.k);
      HALFBYTE_CHECK(args.view.layout == d.layout, usage,
                     "{}: view.layout must be {} as in the descriptor, got {}", kOp, to_string(d.layout),
                     to_string(args.view.layout));
      memory = check_view(kOp, kViewNames, args.view, device, d.alignment, false);
    }
    memory.push_back(dense("x", args.x, x_shape, false));
    if (d.bias)
      memory.push_back(dense("bias", args.bias, bias_shape, false));
    else
      absent("bias", args.bias.data, "bias is false");
    memory.push_back(dense("y", args.y, y_shape, true));
    for (const ArgumentMemory& read : memory)
      if (!read.written) check_apart(kOp, memory.back(), read);
    return memory;
  }
  void check(const Qgemm::Args& args) const override { memory_of(args); }

  void run(void* stream, void* workspace, const Qgemm::Args& args) const override {
    check_workspace(kOp, workspace, workspace_size, device, memory_of(args));
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
    tensors.bias = args.bias.data;
    tensors.y = args.y.data;
    kernel->run(tensors, stream, workspace);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(kOp, workspace, workspace_size, device);
    if (device.kind == DeviceKind::cuda) wait_qgemm_cuda(device, stream);
    return {};
  }
};

}  // namespace

template <>
std::shared_ptr<const QgemmPlan::Impl> make_plan<Qgemm>(Device device, const QgemmDescriptor& descriptor,
                                                        const PlanPreference& preference) {
  return std::make_shared<QgemmImpl>(device, descriptor, preference);
}

template class Plan<Qgemm>;

}  // namespace halfbyte
