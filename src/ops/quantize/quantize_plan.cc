// The plan of `quantize`.
#include "core/packed_plan.h"
#include "core/plan.h"
#include "core/tensor_check.h"
#include "ops/quantize/quantize.h"

namespace halfbyte {
namespace {

constexpr PackedOp kOp{"quantize", "x", "out", true};

struct QuantizeImpl : QuantizePlan::Impl {
  PackedPlan plan;
  QuantizeProblem problem;                   // without addresses
  std::shared_ptr<const QuantizeCuda> cuda;  // null: the CPU

  QuantizeImpl(Device on, const QuantizeDescriptor& of, const PlanPreference& preference)
      : plan(kOp, on, of, preference), problem(make_quantize_problem(of.spec, of.rows, of.cols, of.dtype)) {
    problem.num_threads = preference.num_threads;
    problem.device = on;
    problem.x_alignment = problem.code_alignment = of.alignment;
    if (on.kind == DeviceKind::cuda) cuda = select_quantize_cuda(problem);
    device = on;
    descriptor = of;
    sku = cuda ? plan.sku(kernel_name(*cuda), target(*cuda)) : plan.sku("quantize_cpu", "");
    guarantee = plan.guarantee();
    workspace_size = cuda ? workspace_bytes(*cuda) : static_cast<int64_t>(sizeof(QuantizeStatus));
  }

  void check(const Quantize::Args& args) const override { plan.check(args.x, args.out); }

  void run(void* stream, void* workspace, const Quantize::Args& args) const override {
    check_workspace(kOp.name, workspace, workspace_size, device, plan.check(args.x, args.out));
    QuantizeProblem run = problem;
    run.x = args.x.data;
    run.codes = args.out.codes;
    run.scales = args.out.scales;
    run.zeros = args.out.zeros;
    run.biases = args.out.biases;
    run.stream = stream;
    if (cuda)
      run_quantize_cuda(*cuda, run, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) =
          run.shape.num_groups == 0 ? QuantizeStatus() : quantize_cpu(run);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(kOp.name, workspace, workspace_size, device);
    return cuda ? status_quantize_cuda(*cuda, workspace, stream)
                : *static_cast<const QuantizeStatus*>(workspace);
  }
};

}  // namespace

template <>
std::shared_ptr<const QuantizePlan::Impl> make_plan<Quantize>(Device device,
                                                              const QuantizeDescriptor& descriptor,
                                                              const PlanPreference& preference) {
  return std::make_shared<QuantizeImpl>(device, descriptor, preference);
}

template class Plan<Quantize>;

}  // namespace halfbyte
