// The kernels of `affine_qdq`, listed.
#include "ops/affine_qdq/affine_qdq_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

KernelKey dtype_key(const char* description) {
  KernelKey key = cuda::dtype_key(description);
  std::erase(key.values, "f64");
  return key;
}
KernelKey code_bits_key() {
  return {"code-bits",
          {"4", "2", "3", "5", "6", "8"},
          false,
          "Of a code in memory: 8 where they are not packed."};
}
AffineProblem problem_of(const KernelValues& values) {
  AffineProblem problem;
  problem.dtype = cuda::dtype_of(values);
  if (values.contains("code-bits")) problem.code_bits = values.at("code-bits")[0] - '0';
  if (values.contains("half-away")) problem.half_away = cuda::is_set(values, "half-away");
  return problem;
}

}  // namespace

std::vector<cuda::Kernel> affine_qdq_kernels() {
  return {
      {{"affine_qdq",
        "affine_init",
        "Codes, scales and biases.",
        {dtype_key("The dtype of w."),
         cuda::flag_key("half-away", "Codes are rounded half away from zero.")}},
       [](const KernelValues& values) { return affine_init_kernel(problem_of(values)); }},
      {{"affine_qdq",
        "affine_chunks",
        "Gradients of rows of whole groups of 16, 32, ... 1024 elements.",
        {dtype_key("The dtype of dy."), code_bits_key()}},
       [](const KernelValues& values) { return affine_chunks_kernel(problem_of(values)); }},
      {{"affine_qdq",
        "affine_groups",
        "Gradients of any groups.",
        {dtype_key("The dtype of dy."), code_bits_key()}},
       [](const KernelValues& values) { return affine_groups_kernel(problem_of(values)); }},
  };
}

}  // namespace halfbyte
