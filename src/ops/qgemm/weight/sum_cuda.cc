#include "ops/qgemm/weight/sum_cuda.h"

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/weight/experts_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec sum_kernel(DType dtype, QgemmSumTypes types, bool experts) {
  return {"ops/qgemm/weight/sum.cu", "qgemm_sum",
          cuda::config_text(cuda::element_config(dtype) + cuda::type_config("Sum", types.sum) +
                            cuda::type_config("Total", types.total) +
                            fmt::format("constexpr bool kExperts = {};\n", experts))};
}
cuda::KernelSpec routing_grad_kernel(DType dtype, DType sum) {
  return {"ops/qgemm/weight/routing_grad.cu", "qgemm_routing_grad",
          cuda::config_text(cuda::element_config(dtype) + cuda::type_config("Sum", sum))};
}

}  // namespace

QgemmSum::QgemmSum(const cuda::Context& context, const QgemmProblem& problem, int64_t parts,
                   QgemmSumTypes types) {
  const int64_t outputs = types.total == DType::f32 ? 2 : 1;  // of a thread
  args_.m = problem.m;
  args_.out_cols = problem.y_cols();
  args_.stride = formats::round_up(problem.out_cols(), outputs);
  args_.swiglu = problem.experts.swiglu;
  args_.parts = parts;
  args_.pairs = has_pairs_of_y(problem);
  args_.accumulate = problem.accumulate;
  const QgemmExperts& experts = problem.experts;
  args_.slots = static_cast<int32_t>(experts.slots_per_y);
  if (experts.num > 0) args_.experts = experts_args(problem);
  function_ = cuda::get_kernel(context, sum_kernel(problem.dtype, types, experts.num > 0));
  if (experts.routing_gradient)
    routing_grad_ = cuda::get_kernel(context, routing_grad_kernel(problem.dtype, types.sum));
  grid_ = {ceil_div(args_.m / args_.slots * ceil_div(args_.out_cols, outputs), kQgemmSumThreads),
           kQgemmSumThreads};
  early_ = context.capability >= 90;
  num_bytes_ = parts * args_.m * args_.stride * size_of(types.sum);
}

int64_t QgemmSum::workspace_bytes() const { return num_bytes_; }

void QgemmSum::run(const QgemmTensors& tensors, void* stream, void* workspace) const {
  if (function_ == nullptr) return;
  QgemmSumArgs args = args_;
  args.partials = workspace;
  args.bias = args.experts.num > 0 ? nullptr : tensors.bias;  // of experts: it is in the sums
  args.y = tensors.y;
  args.forward_x = tensors.forward_x;
  args.routing_grad = tensors.routing_grad;
  place_experts(args.experts, tensors);
  const auto launch = [&](cuda::CUfunction function, const cuda::Grid& grid) {
    if (early_)
      cuda::launch_early(function, grid, stream, args);
    else
      cuda::launch(function, grid, stream, args);
  };
  if (routing_grad_ != nullptr) launch(routing_grad_, {args.m, kQgemmSumThreads});
  launch(function_, grid_);
}

std::vector<cuda::Kernel> qgemm_sum_kernels() {
  return {{{"qgemm",
            "qgemm_sum",
            "Adds up the parts of sums that blocks of other kernels left.",
            {{"dtype", {"bf16", "f16", "f32"}, false, "The dtype of y."},
             {"sum", {"f32", "f64"}, false, "The dtype of sums."},
             {"total", {"f32", "f64"}, false, "What bias and y are added in: of qgemm_simt f64."},
             experts_key()}},
           [](const cuda::KernelValues& values) {
             const DType dtype = cuda::dtype_of(values);
             const QgemmSumTypes types = {parse_dtype(values.at("sum")), parse_dtype(values.at("total"))};
             HALFBYTE_CHECK(types.sum == DType::f32 || (types.total == DType::f64 && dtype == DType::f32),
                            usage, "sum f64 goes with total f64 and dtype f32, got {} and {}",
                            to_string(types.total), to_string(dtype));
             return sum_kernel(dtype, types, cuda::is_set(values, "experts"));
           }},
          {{"qgemm",
            "qgemm_routing_grad",
            "The gradient of the routing weights of experts, from sums of rows.",
            {{"dtype", {"bf16", "f16", "f32"}, false, "The dtype of forward_x."},
             {"sum", {"f32", "f64"}, false, "The dtype of sums."}}},
           [](const cuda::KernelValues& values) {
             return routing_grad_kernel(cuda::dtype_of(values), parse_dtype(values.at("sum")));
           }}};
}

}  // namespace halfbyte
