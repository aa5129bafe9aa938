// The plan of `dequantize`.
#include "core/packed_plan.h"
#include "core/plan.h"
#include "core/tensor_check.h"
#include "ops/dequantize/dequantize.h"

namespace halfbyte {
namespace {

constexpr PackedOp kOp{"dequantize", "y", "in", false};

struct DequantizeImpl : DequantizePlan::Impl {
  PackedPlan plan;
  DequantizeProblem problem;                   // without addresses
  std::shared_ptr<const DequantizeCuda> cuda;  // null: the CPU

  DequantizeImpl(Device on, const QuantizeDescriptor& of, const PlanPreference& preference)
      : plan(kOp, on, of, preference),
        problem(make_dequantize_problem({of.spec, of.rows, of.cols}, nullptr, of.dtype)) {
    problem.num_threads = preference.num_threads;
    problem.device = on;
    problem.code_alignment = problem.y_alignment = of.alignment;
    if (on.kind == DeviceKind::cuda) cuda = select_dequantize_cuda(problem);
    device = on;
    descriptor = of;
    sku = cuda ? plan.sku(kernel_name(*cuda), target(*cuda)) : plan.sku("dequantize_cpu", "");
    guarantee = plan.guarantee();
    workspace_size = 16;  // nothing is kept there
  }

  void check(const Dequantize::Args& args) const override { plan.check(args.y, args.in); }

  void run(void* stream, void* workspace, const Dequantize::Args& args) const override {
    check_workspace(kOp.name, workspace, workspace_size, device, plan.check(args.y, args.in));
    DequantizeProblem run = problem;
    run.codes = args.in.codes;
    run.scales = args.in.scales;
    run.zeros = args.in.zeros;
    run.biases = args.in.biases;
    run.y = args.y.data;
    run.stream = stream;
    if (cuda)
      run_dequantize_cuda(*cuda, run);
    else if (run.shape.rows * run.shape.cols > 0)
      dequantize_cpu(run);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(kOp.name, workspace, workspace_size, device);
    if (cuda) wait_dequantize_cuda(*cuda, stream);
    return {};
  }
};

}  // namespace

template <>
std::shared_ptr<const DequantizePlan::Impl> make_plan<Dequantize>(Device device,
                                                                  const QuantizeDescriptor& descriptor,
                                                                  const PlanPreference& preference) {
  return std::make_shared<DequantizeImpl>(device, descriptor, preference);
}

template class Plan<Dequantize>;

}  // namespace halfbyte
