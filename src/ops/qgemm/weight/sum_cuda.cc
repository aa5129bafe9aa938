#include "ops/qgemm/weight/sum_cuda.h"

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec sum_kernel(DType dtype, QgemmSumTypes types) {
  return {"ops/qgemm/weight/sum.cu", "qgemm_sum",
          cuda::config_text(cuda::element_config(dtype) + cuda::type_config("Sum", types.sum) +
                            cuda::type_config("Total", types.total))};
}

}  // namespace

QgemmSum::QgemmSum(const cuda::Context& context, const QgemmProblem& problem, int64_t parts,
                   QgemmSumTypes types) {
  const int64_t outputs = types.total == DType::f32 ? 2 : 1;  // of a thread
  args_.m = problem.m;
  args_.out_cols = problem.out_cols();
  args_.stride = formats::round_up(args_.out_cols, outputs);
  args_.parts = parts;
  args_.pairs = has_pairs_of_y(problem);
  args_.accumulate = problem.accumulate;
  function_ = cuda::get_kernel(context, sum_kernel(problem.dtype, types));
  grid_ = {ceil_div(args_.m * args_.stride / outputs, kQgemmSumThreads), kQgemmSumThreads};
  early_ = context.capability >= 90;
  num_bytes_ = parts * args_.m * args_.stride * size_of(types.sum);
}

int64_t QgemmSum::workspace_bytes() const { return num_bytes_; }

void QgemmSum::run(const QgemmTensors& tensors, void* stream, void* workspace) const {
  if (function_ == nullptr) return;
  QgemmSumArgs args = args_;
  args.partials = workspace;
  args.bias = tensors.bias;
  args.y = tensors.y;
  if (early_)
    cuda::launch_early(function_, grid_, stream, args);
  else
    cuda::launch(function_, grid_, stream, args);
}

std::vector<cuda::Kernel> qgemm_sum_kernels() {
  return {{{"qgemm",
            "qgemm_sum",
            "Adds up the parts of sums that blocks of other kernels left.",
            {{"dtype", {"bf16", "f16", "f32"}, false, "The dtype of y."},
             {"sum", {"f32", "f64"}, false, "The dtype of sums."},
             {"total", {"f32", "f64"}, false, "What bias and y are added in: of qgemm_simt f64."}}},
           [](const cuda::KernelValues& values) {
             const DType dtype = cuda::dtype_of(values);
             const QgemmSumTypes types = {parse_dtype(values.at("sum")), parse_dtype(values.at("total"))};
             HALFBYTE_CHECK(types.sum == DType::f32 || (types.total == DType::f64 && dtype == DType::f32),
                            usage, "sum f64 goes with total f64 and dtype f32, got {} and {}",
                            to_string(types.total), to_string(dtype));
             return sum_kernel(dtype, types);
           }}};
}

}  // namespace halfbyte
