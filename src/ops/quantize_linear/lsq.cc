#include "ops/quantize_linear/lsq.h"

#include <array>

#include "core/plan.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"
#include "halfbyte/system.hpp"
#include "ops/quantize_linear/fake_quantize.h"

namespace halfbyte {
namespace {

constexpr const char* kOp = "fake_quantize_learned_backward";

class LsqImpl : public FakeQuantizeLearnedBackwardPlan::Impl {
 public:
  using Args = FakeQuantizeLearnedBackward::Args;

  LsqImpl(Device on, const FakeQuantizeDescriptor& d, const PlanPreference& preference) {
    check_descriptor(d);
    HALFBYTE_CHECK(!d.computed, usage,
                   "{}: descriptor.computed must be false: scale and zero point are given", kOp);
    HALFBYTE_CHECK(!d.mask, usage, "{}: descriptor.mask must be false: x is read", kOp);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}", kOp,
                   preference.num_threads);
    check_device(on);
    static_cast<LinearProblem&>(problem_) = fake_quantize_problem(LinearOp::backward, on, d, preference);
    problem_.gradient_scale = d.gradient_scale;
    if (on.kind == DeviceKind::cuda) cuda_ = select_lsq_cuda(problem_, d.alignment);
    device = on;
    descriptor = d;
    sku = {kOp, cuda_ ? kernel_name(*cuda_) : "lsq_cpu",
           cuda_ ? "cuda " + target(*cuda_) : "cpu " + system_info().simd_target, dtypes_of(d)};
    guarantee = {d.state_dtype(), d.state_dtype(), true, true};
    workspace_size = cuda_ ? workspace_bytes(*cuda_) : static_cast<int64_t>(sizeof(QuantizeStatus));
  }

  void check(const Args& args) const override { memory_of(args); }

  void run(void* stream, void* workspace, const Args& args) const override {
    check_workspace(kOp, workspace, workspace_size, device, memory_of(args));
    LsqTensors tensors;
    tensors.x = args.x.data;
    tensors.dy = args.dy.data;
    tensors.scale = args.scale.data;
    tensors.zero = problem_.has_zeros ? args.zero_point.data : nullptr;
    tensors.y = args.dx.data;
    tensors.dscale = args.dscale.data;
    tensors.dzero = args.dzero_point.data;
    if (cuda_)
      run_lsq_cuda(*cuda_, tensors, stream, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) = lsq_cpu(problem_, tensors);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(kOp, workspace, workspace_size, device);
    return cuda_ ? status_lsq_cuda(*cuda_, workspace, stream)
                 : *static_cast<const QuantizeStatus*>(workspace);
  }

 private:
  // What the arguments touch: x, dy, dx, scale, zero_point, dscale, dzero_point. Throws where something is
  // wrong.
  std::array<ArgumentMemory, 7> memory_of(const Args& args) const {
    const FakeQuantizeDescriptor& d = descriptor;
    const std::span<const int64_t> shape = d.shape, groups = problem_.scale_shape;
    const DType zero = problem_.zeros.dtype, state = d.state_dtype();
    const bool has_zeros = problem_.has_zeros, learns = problem_.learns_zeros();
    if (!has_zeros)
      HALFBYTE_CHECK(args.zero_point.data == nullptr, usage,
                     "{}: zero_point must have no data, as descriptor.zero_point_dtype is not set", kOp);
    if (!learns)
      HALFBYTE_CHECK(args.dzero_point.data == nullptr, usage,
                     "{}: dzero_point must have no data, as descriptor.zero_point_dtype is not {}", kOp,
                     to_string(state));
    const std::array<TensorArgument, 7> arguments{
        {{"x", &args.x, d.dtype, shape, false, d.alignment, true},
         {"dy", &args.dy, d.dtype, shape, false, d.alignment, true},
         {"dx", &args.dx, d.dtype, shape, true, d.alignment, true},
         {"scale", &args.scale, d.scale_dtype, groups, false, size_of(d.scale_dtype)},
         {"zero_point", has_zeros ? &args.zero_point : nullptr, zero, groups, false, size_of(zero)},
         {"dscale", &args.dscale, state, groups, true, size_of(state)},
         {"dzero_point", learns ? &args.dzero_point : nullptr, state, groups, true, size_of(state)}}};
    std::array<ArgumentMemory, 7> memory;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].view != nullptr) memory[i] = check_tensor(kOp, arguments[i], device);
    // In place: each gradient is read before it is written, by the same thread.
    std::array<ArgumentMemory, 7> apart = memory;
    if (args.dx.data == args.dy.data) apart[1] = {};
    check_all_apart(kOp, apart);
    return memory;
  }

  LsqProblem problem_;
  std::shared_ptr<const LsqCuda> cuda_;  // null: the CPU
};

}  // namespace

template <>
std::shared_ptr<const FakeQuantizeLearnedBackwardPlan::Impl> make_plan<FakeQuantizeLearnedBackward>(
    Device device, const FakeQuantizeDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<LsqImpl>(device, descriptor, preference);
}

template class Plan<FakeQuantizeLearnedBackward>;

}  // namespace halfbyte
