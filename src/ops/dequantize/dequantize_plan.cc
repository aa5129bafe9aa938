// The plan of `dequantize`.
#include "core/packed_plan.h"
#include "cpu/parallel.h"
#include "ops/dequantize/dequantize.h"

namespace halfbyte {
namespace {

struct DequantizeImpl : PackedImpl<Dequantize, &Dequantize::Args::y, &Dequantize::Args::in> {
  DequantizeProblem problem;                   // without addresses
  std::shared_ptr<const DequantizeCuda> cuda;  // null: the CPU

  DequantizeImpl(Device on, const QuantizeDescriptor& d, const PlanPreference& preference)
      : PackedImpl("dequantize", on, d, preference, "y", "in", false),
        problem(make_dequantize_problem({d.spec, d.rows, d.cols}, nullptr, d.dtype)) {
    finds_nothing();
    problem.num_threads = threads_for(num_threads, dequantize_work(problem));
    problem.device = on;
    problem.code_alignment = problem.y_alignment = d.alignment;
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_dequantize_cuda(problem);
    sku.kernel = kernel_name(*cuda);
  }

  void execute(const Args& args, void* stream, void*) const override {
    DequantizeProblem run = problem;
    run.codes = args.in.codes;
    run.scales = args.in.scales;
    run.zeros = args.in.zeros;
    run.biases = args.in.biases;
    run.global_scale = args.in.global_scale;
    run.y = args.y.data;
    run.stream = stream;
    if (cuda)
      run_dequantize_cuda(*cuda, run);
    else if (run.shape.rows * run.shape.cols > 0)
      dequantize_cpu(run);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(Dequantize, DequantizeImpl);

}  // namespace halfbyte
