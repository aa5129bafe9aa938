// The plan of `quantize`.
#include "core/checks.h"
#include "core/packed_plan.h"
#include "cpu/parallel.h"
#include "ops/quantize/quantize.h"

namespace halfbyte {
namespace {

void check_scale_dtype(const char* op, const QuantizeDescriptor& d) {
  HALFBYTE_CHECK(d.spec.scale_dtype != DType::f64 || d.dtype == DType::f64, usage,
                 "{}: descriptor.spec.scale_dtype f64 needs dtype f64, got {}", op, to_string(d.dtype));
}

struct QuantizeImpl : PackedImpl<Quantize, &Quantize::Args::x, &Quantize::Args::out> {
  QuantizeProblem problem;                   // without addresses
  std::shared_ptr<const void> prepared;      // problem.prepared
  std::shared_ptr<const QuantizeCuda> cuda;  // null: the CPU

  QuantizeImpl(Device on, const QuantizeDescriptor& d, const PlanPreference& preference)
      : PackedImpl("quantize", on, d, preference, "x", "out", true, check_scale_dtype),
        problem(make_quantize_problem(d.spec, d.encoding, d.rows, d.cols, d.dtype)) {
    problem.num_threads = threads_for(num_threads, quantize_work(problem));
    problem.device = on;
    problem.x_alignment = problem.code_alignment = d.alignment;
    if (on.kind != DeviceKind::cuda) {
      prepared = prepare_quantize_cpu(problem);
      problem.prepared = prepared.get();
      problem.is_prepared = true;
      return;
    }
    cuda = select_quantize_cuda(problem);
    sku.kernel = kernel_name(*cuda);
    workspace_size = workspace_bytes(*cuda);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    QuantizeProblem run = problem;
    run.x = args.x.data;
    run.codes = args.out.codes;
    run.scales = args.out.scales;
    run.zeros = args.out.zeros;
    run.biases = args.out.biases;
    run.global_scale = args.out.global_scale;
    run.stream = stream;
    if (cuda)
      run_quantize_cuda(*cuda, run, workspace);
    else
      status_in(workspace) =
          run.shape.num_groups == 0 && run.global_scale == nullptr ? QuantizeStatus() : quantize_cpu(run);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(Quantize, QuantizeImpl);

}  // namespace halfbyte
