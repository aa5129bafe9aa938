#include "ops/compute_qparams/compute_qparams_cuda.h"

#include <fmt/format.h>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "formats/counts.h"

namespace halfbyte {
namespace {
constexpr int kThreads = 256;
}

struct QParamsCuda {
  QParamsProblem problem;
  const cuda::Context* context = nullptr;
  std::string name;
  cuda::CUfunction function = nullptr;
};

cuda::KernelSpec compute_qparams_kernel(DType dtype) {
  return {"ops/compute_qparams/compute_qparams.cu", "compute_qparams",
          cuda::config_text(cuda::element_config(dtype) +
                            fmt::format("constexpr int kThreads = {};\n", kThreads))};
}

std::shared_ptr<const QParamsCuda> select_qparams_cuda(const QParamsProblem& problem) {
  QParamsCuda made;
  made.problem = problem;
  made.context = &cuda::context(problem.device.index);
  const cuda::Scope scope(*made.context);
  const cuda::KernelSpec spec = compute_qparams_kernel(problem.dtype);
  made.name = spec.function;
  made.function = cuda::get_kernel(*made.context, spec);
  return std::make_shared<const QParamsCuda>(std::move(made));
}
const std::string& kernel_name(const QParamsCuda& cuda) { return cuda.name; }
int64_t workspace_bytes(const QParamsCuda&) { return sizeof(QuantizeCounts); }

void run_qparams_cuda(const QParamsCuda& selected, const QParamsTensors& tensors, void* stream,
                      void* workspace) {
  const cuda::Scope scope(*selected.context);
  const QParamsProblem& p = selected.problem;
  cuda::fill(workspace, 0, sizeof(QuantizeCounts), stream);
  const ComputeQParamsArgs args{.min = tensors.min,
                                .max = tensors.max,
                                .scale = tensors.scale,
                                .zero_point = tensors.zero_point,
                                .counts = static_cast<QuantizeCounts*>(workspace),
                                .n = p.num_groups,
                                .q_min = p.rule.q_min,
                                .q_max = p.rule.q_max,
                                .eps = p.rule.eps,
                                .rule = p.rule.rule,
                                .scale_type = p.rule.scale_type,
                                .zero_type = p.zero_type};
  cuda::launch(selected.function, {ceil_div(p.num_groups, kThreads), kThreads}, stream, args);
}

}  // namespace halfbyte
