// Scales and zero points from ranges. Few against the values they belong to, so that on the CPU plain loops
// do.
#include "ops/compute_qparams/compute_qparams.h"

#include <array>
#include <mutex>

#include "core/checks.h"
#include "core/counts.h"
#include "core/plan.h"
#include "core/qparams.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"
#include "halfbyte/system.hpp"

namespace halfbyte {
namespace {

constexpr const char* kOp = "compute_qparams";
constexpr const char* kDescriptor = "qparams descriptor";

QParamsZero zero_type_of(const std::optional<DType>& dtype) {
  if (!dtype) return QParamsZero::none;
  return *dtype == DType::i32 ? QParamsZero::i32 : *dtype == DType::i8 ? QParamsZero::i8 : QParamsZero::u8;
}

template <class F>
QuantizeStatus run_on_cpu(const QParamsProblem& problem, const QParamsTensors& tensors) {
  const auto *const min = static_cast<const F*>(tensors.min), *const max = static_cast<const F*>(tensors.max);
  QuantizeStatus total;
  std::mutex mutex;                // of total: held for moments
  constexpr int64_t kTask = 4096;  // groups
  parallel_for(problem.num_groups, kTask, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    QuantizeStatus status;
    for (int64_t i = begin; i < end; ++i) {
      bool valid = true;
      const auto params = observed_qparams(min[i], max[i], problem.rule, valid);
      formats::store_scale(tensors.scale, i, params.scale, problem.rule.scale_type);
      store_zero_point(tensors.zero_point, problem.zero_type, i, params.zero_point);
      status.num_invalid_scales += valid ? 0 : 1;
      status.num_unheld_scales += params.held ? 0 : 1;
      status.num_coarse_scales += params.coarse ? 1 : 0;
    }
    const std::lock_guard lock(mutex);
    merge(total, status);
  });
  return total;
}

struct QParamsImpl : ComputeQParamsPlan::Impl {
  QParamsProblem problem;
  std::shared_ptr<const QParamsCuda> cuda;  // null: the CPU

  QParamsImpl(Device on, const QParamsDescriptor& given, const PlanPreference& preference) {
    check_descriptor(given);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}", kOp,
                   preference.num_threads);
    check_device(on);
    device = problem.device = on;
    descriptor = given;
    problem.num_groups = contiguous_bytes(DType::u8, given.shape);
    problem.dtype = given.dtype;
    problem.rule = qparams_rule(given.config, given.scale_dtype);
    problem.zero_type = zero_type_of(given.zero_point_dtype);
    problem.num_threads = preference.num_threads;
    if (on.kind == DeviceKind::cuda) cuda = select_qparams_cuda(problem);
    sku = {kOp, cuda ? kernel_name(*cuda) : "compute_qparams_cpu",
           cuda ? "cuda " + target(*cuda) : "cpu " + system_info().simd_target,
           fmt::format("{} -> scale {}", to_string(given.dtype), to_string(given.scale_dtype))};
    if (given.zero_point_dtype)
      sku.dtypes += fmt::format(", zero point {}", to_string(*given.zero_point_dtype));
    guarantee.math = guarantee.accumulator = given.dtype;
    workspace_size = cuda ? workspace_bytes(*cuda) : static_cast<int64_t>(sizeof(QuantizeStatus));
  }

  std::array<ArgumentMemory, 4> memory_of(const ComputeQParams::Args& args) const {
    const QParamsDescriptor& d = descriptor;
    const std::span<const int64_t> shape = d.shape;
    if (!d.zero_point_dtype)
      HALFBYTE_CHECK(args.zero_point.data == nullptr, usage,
                     "{}: zero_point must have no data, as descriptor.zero_point_dtype is not set", kOp);
    const DType zero_dtype = d.zero_point_dtype.value_or(DType::i32);
    const std::array<TensorArgument, 4> arguments{
        {{"min", &args.min, d.dtype, shape, false, size_of(d.dtype)},
         {"max", &args.max, d.dtype, shape, false, size_of(d.dtype)},
         {"scale", &args.scale, d.scale_dtype, shape, true, size_of(d.scale_dtype)},
         {"zero_point", d.zero_point_dtype ? &args.zero_point : nullptr, zero_dtype, shape, true,
          size_of(zero_dtype)}}};
    std::array<ArgumentMemory, 4> memory;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].view != nullptr) memory[i] = check_tensor(kOp, arguments[i], device);
    check_all_apart(kOp, memory);
    return memory;
  }
  void check(const ComputeQParams::Args& args) const override { memory_of(args); }
  void run(void* stream, void* workspace, const ComputeQParams::Args& args) const override {
    const std::array<ArgumentMemory, 4> memory = memory_of(args);
    check_workspace(kOp, workspace, workspace_size, device, memory);
    const QParamsTensors tensors{args.min.data, args.max.data, args.scale.data, args.zero_point.data};
    if (cuda)
      run_qparams_cuda(*cuda, tensors, stream, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) = problem.dtype == DType::f64
                                                     ? run_on_cpu<double>(problem, tensors)
                                                     : run_on_cpu<float>(problem, tensors);
  }
  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(kOp, workspace, workspace_size, device);
    return cuda ? status_qparams_cuda(*cuda, workspace, stream)
                : *static_cast<const QuantizeStatus*>(workspace);
  }
};

}  // namespace

void check_descriptor(const QParamsDescriptor& d) {
  check_config(d.config);
  check_scale_dtype(kDescriptor, d.dtype, d.scale_dtype);
  contiguous_bytes(d.dtype, d.shape);  // throws for negative extents and what is too large
  const QParamsConfig& config = d.config;
  if (!d.zero_point_dtype) {
    HALFBYTE_CHECK(!config.asymmetric && config.q_min < 0, usage,
                   "{}: zero_point_dtype must be set, as config is {}", kDescriptor,
                   config.asymmetric ? "asymmetric" : "that of unsigned codes");
    return;
  }
  const DType dtype = *d.zero_point_dtype;
  HALFBYTE_CHECK(dtype == DType::i32 || dtype == DType::i8 || dtype == DType::u8, usage,
                 "{}: zero_point_dtype must be i32, i8 or u8, got {}", kDescriptor, to_string(dtype));
  const int least = dtype == DType::u8 ? 0 : -128, most = dtype == DType::i8 ? 127 : 255;
  HALFBYTE_CHECK(least <= config.q_min && config.q_max <= most, usage,
                 "{}: zero_point_dtype {} must hold all of [{}, {}]", kDescriptor, to_string(dtype),
                 config.q_min, config.q_max);
}

template <>
std::shared_ptr<const ComputeQParamsPlan::Impl> make_plan<ComputeQParams>(Device device,
                                                                          const QParamsDescriptor& descriptor,
                                                                          const PlanPreference& preference) {
  return std::make_shared<QParamsImpl>(device, descriptor, preference);
}
template class Plan<ComputeQParams>;

}  // namespace halfbyte
