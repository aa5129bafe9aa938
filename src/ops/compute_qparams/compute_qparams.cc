// Scales and zero points from ranges. Few against the values they belong to, so that on the CPU plain loops
// do.
#include "ops/compute_qparams/compute_qparams.h"

#include <mutex>

#include "core/counts.h"
#include "core/expect.h"
#include "core/plan.h"
#include "core/qparams.h"
#include "cpu/parallel.h"

namespace halfbyte {
namespace {

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

  QParamsImpl(Device on, const QParamsDescriptor& d, const PlanPreference& preference)
      : Impl("compute_qparams", on, d, preference) {
    const std::optional<DType> zero = d.zero_point_dtype;
    tensor("min", &Args::min, d.dtype, d.shape);
    tensor("max", &Args::max, d.dtype, d.shape);
    tensor("scale", &Args::scale, d.scale_dtype, d.shape).written();
    tensor("zero_point", &Args::zero_point, zero.value_or(DType::i32), d.shape)
        .written()
        .absent_unless(zero.has_value(), "descriptor.zero_point_dtype is not set");
    sku.aux_element = d.scale_dtype;
    sku.dtypes = fmt::format("{} -> scale {}", to_string(d.dtype), to_string(d.scale_dtype));
    if (zero) sku.dtypes += fmt::format(", zero point {}", to_string(*zero));
    problem.num_groups = contiguous_bytes(DType::u8, d.shape);
    problem.dtype = d.dtype;
    problem.rule = qparams_rule(d.config, d.scale_dtype);
    problem.zero_type = zero_type_of(zero);
    constexpr double kGroup = 16;  // as long as so many elements takes a group
    problem.num_threads = threads_for(num_threads, kGroup * static_cast<double>(problem.num_groups));
    problem.device = on;
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_qparams_cuda(problem);
    sku.kernel = kernel_name(*cuda);
    workspace_size = workspace_bytes(*cuda);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    const QParamsTensors tensors{args.min.data, args.max.data, args.scale.data, args.zero_point.data};
    if (cuda)
      run_qparams_cuda(*cuda, tensors, stream, workspace);
    else
      status_in(workspace) = problem.dtype == DType::f64 ? run_on_cpu<double>(problem, tensors)
                                                         : run_on_cpu<float>(problem, tensors);
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
  HALFBYTE_MUST(dtype == DType::i32 || dtype == DType::i8 || dtype == DType::u8, unsupported, kDescriptor,
                "zero_point_dtype", "be", "i32, i8 or u8", to_string(dtype));
  const int least = dtype == DType::u8 ? 0 : -128, most = dtype == DType::i8 ? 127 : 255;
  HALFBYTE_CHECK(least <= config.q_min && config.q_max <= most, usage,
                 "{}: zero_point_dtype {} must hold all of [{}, {}]", kDescriptor, to_string(dtype),
                 config.q_min, config.q_max);
}

HALFBYTE_DEFINE_PLAN(ComputeQParams, QParamsImpl);

}  // namespace halfbyte
