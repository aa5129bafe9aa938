#include "ops/learned_scale/learned_scale.h"

#include "core/checks.h"
#include "core/plan.h"
#include "grouped/fake_problem.h"

namespace halfbyte {
namespace {

struct LsqImpl : FakeQuantizeLearnedBackwardPlan::Impl {
  LsqProblem problem;
  std::shared_ptr<const LsqCuda> cuda;  // null: the CPU

  LsqImpl(Device on, const FakeQuantizeDescriptor& d, const PlanPreference& preference)
      : Impl("fake_quantize_learned_backward", on, d, preference),
        problem{fake_quantize_problem(LinearOp::backward, on, d, preference), d.gradient_scale} {
    const DType state = d.state_dtype();
    const std::vector<int64_t>& groups = problem.scale_shape;
    tensor("x", &Args::x, d.dtype, d.shape).promised(d.alignment);
    tensor("dy", &Args::dy, d.dtype, d.shape).promised(d.alignment);
    tensor("dx", &Args::dx, d.dtype, d.shape).promised(d.alignment).written();
    tensor("scale", &Args::scale, d.scale_dtype, groups);
    tensor("zero_point", &Args::zero_point, problem.zeros.dtype, groups)
        .absent_unless(problem.has_zeros, "descriptor.zero_point_dtype is not set");
    tensor("dscale", &Args::dscale, state, groups).written();
    tensor("dzero_point", &Args::dzero_point, state, groups)
        .written()
        .absent_unless(problem.learns_zeros(),
                       fmt::format("descriptor.zero_point_dtype is not {}", to_string(state)));
    in_place("dx", "dy");
    sku.kernel = "lsq_cpu";
    sku.dtypes = dtypes_of(d);
    needs_scratch(lsq_scratch_bytes(problem));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_lsq_cuda(problem, d.alignment);
    sku.kernel = kernel_name(*cuda);
    workspace_size = workspace_bytes(*cuda);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    Scratch memory = scratch(workspace);
    LsqTensors tensors;
    tensors.scratch = &memory;
    tensors.x = args.x.data;
    tensors.dy = args.dy.data;
    tensors.scale = address_of(args.scale);
    tensors.zero = address_of(args.zero_point);
    tensors.y = args.dx.data;
    tensors.dscale = args.dscale.data;
    tensors.dzero = args.dzero_point.data;
    if (cuda)
      run_lsq_cuda(*cuda, tensors, stream, workspace);
    else
      status_in(workspace) = lsq_cpu(problem, tensors);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(FakeQuantizeLearnedBackward, LsqImpl);

}  // namespace halfbyte
