#include "ops/fake_quantize/fake_quantize.h"

#include "core/checks.h"
#include "core/plan.h"
#include "grouped/fake_problem.h"

namespace halfbyte {
namespace {

// Forward and backward.
template <class Op>
struct FakeImpl : Plan<Op>::Impl {
  using Args = typename Op::Args;
  static constexpr bool kForward = std::is_same_v<Op, FakeQuantize>;

  LinearProblem problem;
  std::shared_ptr<const LinearCuda> cuda;  // null: the CPU

  FakeImpl(Device on, const FakeQuantizeDescriptor& d, const PlanPreference& preference)
      : Plan<Op>::Impl(kForward ? "fake_quantize" : "fake_quantize_backward", on, d, preference),
        problem(fake_quantize_problem(kForward ? LinearOp::fake_quantize
                                      : d.mask ? LinearOp::mask_gradients
                                               : LinearOp::backward,
                                      on, d, preference)) {
    declare(d);
    this->sku.dtypes = dtypes_of(d);
    this->needs_scratch(linear_scratch_bytes(problem));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_linear_cuda(problem, d.alignment);
    this->sku.kernel = kernel_name(*cuda);
    this->workspace_size = workspace_bytes(*cuda);
  }

  void declare(const FakeQuantizeDescriptor& d) {
    const bool by_mask = problem.op == LinearOp::mask_gradients;
    constexpr const char* kByMask = "the mask is read in its place";
    const std::vector<int64_t>& groups = problem.scale_shape;
    this->tensor("x", &Args::x, d.dtype, d.shape).promised(d.alignment).absent_unless(!by_mask, kByMask);
    this->tensor("mask", &Args::mask, DType::u8, d.mask_shape())
        .written(kForward)
        .absent_unless(d.mask, "descriptor.mask is false");
    if constexpr (!kForward) this->tensor("dy", &Args::dy, d.dtype, d.shape).promised(d.alignment);
    this->tensor("scale", &Args::scale, d.scale_dtype, groups)
        .written(problem.computed)
        .absent_unless(!by_mask, kByMask);
    this->tensor("zero_point", &Args::zero_point, problem.zeros.dtype, groups)
        .written(problem.computed)
        .absent_unless(!by_mask, kByMask)
        .absent_unless(problem.has_zeros, "descriptor.zero_point_dtype is not set");
    if constexpr (kForward) {
      const auto state = [&](const char* name, TensorView Args::*view, DType dtype,
                             const std::vector<int64_t>& shape) {
        this->tensor(name, view, dtype, shape)
            .written()
            .absent_unless(problem.observed, "descriptor.observer is not set");
      };
      state("min", &Args::min, d.state_dtype(), groups);
      state("max", &Args::max, d.state_dtype(), groups);
      state("num_batches", &Args::num_batches, DType::i64, {});
      this->tensor("global_scale", &Args::global_scale, DType::f32, {1})
          .written(problem.computed_global_scale)
          .absent_unless(problem.codec.scale_type == formats::ScaleType::e4m3,
                         "descriptor.format is not nvfp4");
      this->tensor("y", &Args::y, d.dtype, d.shape).promised(d.alignment).written();
      this->in_place("y", "x");
    } else {
      this->tensor("dx", &Args::dx, d.dtype, d.shape).promised(d.alignment).written();
      this->in_place("dx", "dy");
    }
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    Scratch scratch = this->scratch(workspace);
    LinearTensors tensors;
    tensors.scratch = &scratch;
    tensors.x = args.x.data;
    tensors.mask = address_of(args.mask);
    tensors.scale = address_of(args.scale);
    tensors.zero = address_of(args.zero_point);
    if constexpr (kForward) {
      tensors.observer = {args.min.data, args.max.data, static_cast<formats::i64*>(args.num_batches.data)};
      tensors.global_scale = static_cast<float*>(args.global_scale.data);
      tensors.y = args.y.data;
    } else {
      tensors.dy = args.dy.data;
      tensors.y = args.dx.data;
    }
    tensors.x_strides = tensors.dy_strides =
        tensors.y_strides = {problem.axis * problem.inner, problem.inner, 1};
    if (cuda)
      run_linear_cuda(*cuda, tensors, stream, workspace);
    else
      this->status_in(workspace) = run_on_cpu(tensors);
  }

  QuantizeStatus run_on_cpu(const LinearTensors& tensors) const {
    if (problem.op == LinearOp::mask_gradients) {
      mask_gradients_cpu(problem, tensors);
      return {};
    }
    return kForward ? fake_quantize_cpu(problem, tensors) : linear_backward_cpu(problem, tensors);
  }
};

}  // namespace

HALFBYTE_DEFINE_PLAN(FakeQuantize, FakeImpl<FakeQuantize>);
HALFBYTE_DEFINE_PLAN(FakeQuantizeBackward, FakeImpl<FakeQuantizeBackward>);

}  // namespace halfbyte
