#include "ops/qgemm/weight/stage_x_cuda.h"

#include "core/arithmetic.h"
#include "cuda/config.h"

namespace halfbyte {
namespace {

cuda::KernelSpec kernel_of(DType dtype, int parts) {
  return {
      "ops/qgemm/weight/stage_x.cu", "qgemm_stage_x",
      cuda::config_text(cuda::element_config(dtype) + fmt::format("constexpr int kParts = {};\n", parts))};
}

}  // namespace

bool has_aligned_x(const QgemmProblem& problem) {
  return problem.alignment >= 16 && problem.in_cols() * size_of(problem.dtype) % 16 == 0;
}

QgemmStageX::QgemmStageX(const cuda::Context& context, const QgemmProblem& problem, int parts) {
  args_.m = problem.rows_of_x();
  args_.cols = problem.in_cols();
  args_.stride = formats::round_up(args_.cols, kStageXLine);
  args_.aligned = has_aligned_x(problem);
  function_ = cuda::get_kernel(context, kernel_of(problem.dtype, parts));
  grid_ = {ceil_div(args_.m * (args_.stride / kStageXCols), kStageXThreads), kStageXThreads};
  num_bytes_ = formats::round_up(
      args_.m * args_.stride * (parts == 3 ? 3 * size_of(DType::bf16) : size_of(problem.dtype)), 256);
}

void QgemmStageX::run(const void* x, void* to, bool early, void* stream) const {
  QgemmStageXArgs args = args_;
  args.x = x;
  args.to = to;
  if (early)
    cuda::launch_early(function_, grid_, stream, args);
  else
    cuda::launch(function_, grid_, stream, args);
}

std::vector<cuda::Kernel> qgemm_stage_x_kernels() {
  return {{{"qgemm",
            "qgemm_stage_x",
            "Copies x to rows that are whole lines of 128 bytes.",
            {{"dtype", {"bf16", "f16", "f32"}, false, "The dtype of x."},
             cuda::flag_key("parts", "f32 as three matrices of bf16.")}},
           [](const cuda::KernelValues& values) {
             const DType dtype = cuda::dtype_of(values);
             const bool parts = cuda::is_set(values, "parts");
             HALFBYTE_CHECK(!parts || dtype == DType::f32, usage,
                            "qgemm_stage_x: parts need dtype f32, got {}", to_string(dtype));
             return kernel_of(dtype, parts ? 3 : 1);
           }}};
}

}  // namespace halfbyte
