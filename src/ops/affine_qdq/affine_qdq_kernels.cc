// The kernels of `affine_qdq`, listed.
#include "ops/affine_qdq/affine_qdq_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

const std::vector<std::string> kBitsValues = {"4", "2", "3", "5", "6", "8"};

KernelKey dtype_key(const char* description) {
  KernelKey key = cuda::dtype_key(description);
  std::erase(key.values, "f64");
  return key;
}
KernelKey code_bits_key() {
  return {"code-bits", kBitsValues, false, "Of a code in memory: 8 where they are not packed."};
}
KernelKey adam_key() { return cuda::flag_key("adam", "With a step of Adam."); }

AffineProblem problem_of(const KernelValues& values) {
  AffineProblem problem;
  problem.dtype = cuda::dtype_of(values);
  problem.code_bits = values.at("code-bits")[0] - '0';
  if (values.contains("adam")) problem.adam = cuda::is_set(values, "adam");
  return problem;
}

AffineProblem init_problem_of(const KernelValues& values) {
  AffineQdqDescriptor descriptor;
  descriptor.bits = values.at("bits")[0] - '0';
  descriptor.packed = !cuda::is_set(values, "bytes");
  descriptor.dtype = cuda::dtype_of(values);
  descriptor.scale_dtype = parse_dtype(values.at("scale-dtype"));
  descriptor.scale_rule = parse_scale_rule(values.at("scale-rule"));
  descriptor.rounding =
      cuda::is_set(values, "half-away") ? AffineRounding::half_away : AffineRounding::half_even;
  descriptor.refit = cuda::is_set(values, "refit");
  return make_affine_problem(descriptor);
}

}  // namespace

std::vector<cuda::Kernel> affine_qdq_kernels() {
  return {
      {{"affine_qdq",
        "affine_init",
        "Codes, scales and biases.",
        {dtype_key("The dtype of w."),
         {"bits", kBitsValues, false, "Of a code."},
         cuda::flag_key("bytes", "A byte a code: not packed."),
         {"scale-dtype", {"f32", "f16", "bf16"}, false, "The dtype of scales and biases."},
         {"scale-rule", {"minmax", "mlx-edge"}, false, "How ranges become scales and biases."},
         cuda::flag_key("half-away", "Codes are rounded half away from zero."),
         cuda::flag_key("refit", "Then the least squares over the codes.")}},
       [](const KernelValues& values) { return affine_init_kernel(init_problem_of(values)); }},
      {{"affine_qdq",
        "affine_chunks",
        "Gradients of rows of whole groups of 16, 32, ... 1024 elements.",
        {dtype_key("The dtype of dy."), code_bits_key(), adam_key(),
         cuda::flag_key("wide", "2^31 chunks and more.")}},
       [](const KernelValues& values) {
         return affine_chunks_kernel(problem_of(values), cuda::is_set(values, "wide"));
       }},
      {{"affine_qdq",
        "affine_groups",
        "Gradients of any groups.",
        {dtype_key("The dtype of dy."), code_bits_key(), adam_key()}},
       [](const KernelValues& values) { return affine_groups_kernel(problem_of(values)); }},
  };
}

}  // namespace halfbyte
