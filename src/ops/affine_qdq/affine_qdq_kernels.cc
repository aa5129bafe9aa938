// The kernels of `affine_qdq`, listed.
#include <fmt/format.h>

#include "core/format.h"
#include "cuda/config.h"
#include "cuda/plain.h"
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

KernelParameter codes_parameter(const KernelValues& values) {
  return cuda::read_parameter("codes", "u8", cuda::matrix_code_bytes(problem_of(values).code_bits),
                              "Rows of codes, each a little-endian bit stream.");
}

// ---- halfbyte_affine_qdq, halfbyte_affine_qdq_backward

std::vector<KernelKey> plain_keys() {
  KernelKey scale_dtype = cuda::scale_dtype_key("The dtype of scales and biases.");
  std::erase(scale_dtype.values, "f64");
  return {code_bits_key(), scale_dtype, dtype_key("The dtype of y.")};
}
// The kernel of `dequantize`: codes of 8 bits may also be such of fewer, one a byte.
cuda::KernelSpec specialise_plain(const KernelValues& values) {
  const int bits = problem_of(values).code_bits;
  formats::Codec codec;
  codec.kind = formats::Kind::affine;
  codec.bits = static_cast<uint8_t>(bits);
  codec.scale_type = scale_type(parse_dtype(values.at("scale-dtype")));
  codec.q_min = 0;
  codec.q_max = (1 << bits) - 1;
  return {"ops/dequantize/dequantize_plain.cu", "halfbyte_affine_qdq",
          "#define HALFBYTE_KERNEL halfbyte_affine_qdq\n" +
              cuda::config_text(cuda::element_config(cuda::dtype_of(values)) + cuda::codec_config(codec) +
                                fmt::format("constexpr int kCodeBits = {};\n", bits) + cuda::plain_lines())};
}
KernelDescription describe_plain(const KernelValues& values) {
  const char* const scale = values.at("scale-dtype").c_str();
  return cuda::plain_description(
      cuda::matrix_parameters(
          {codes_parameter(values),
           cuda::read_parameter("scales", scale, cuda::kMatrixGroups, "Of each group of a row."),
           cuda::optional_parameter(cuda::read_parameter("zeros", "u8", "0", "Not read: null."), false),
           cuda::read_parameter("biases", scale, cuda::kMatrixGroups, "Of each group of a row."),
           cuda::written_parameter("y", values.at("dtype").c_str(), cuda::kMatrixElements,
                                   "code * scale + bias.")}),
      "rows * ((cols + 7) / 8)", 256);
}
cuda::KernelSpec specialise_backward(const KernelValues& values) {
  return affine_backward_plain_kernel(problem_of(values));
}
KernelDescription describe_backward(const KernelValues& values) {
  return cuda::plain_description(
      cuda::matrix_parameters(
          {codes_parameter(values),
           cuda::read_parameter("dy", values.at("dtype").c_str(), cuda::kMatrixElements,
                                "The gradient of y."),
           cuda::written_parameter("dscales", "f32", cuda::kMatrixGroups,
                                   "The sum of code * dy of each group."),
           cuda::written_parameter("dbiases", "f32", cuda::kMatrixGroups, "The sum of dy of each group.")}),
      cuda::kMatrixGroups, 8);
}

}  // namespace

std::vector<cuda::Kernel> affine_qdq_kernels() {
  return {
      {{"affine_qdq", "halfbyte_affine_qdq", "Decodes any matrix, with plain parameters.", plain_keys(), "",
        true},
       specialise_plain,
       true,
       describe_plain},
      {{"affine_qdq",
        "halfbyte_affine_qdq_backward",
        "Gradients of any groups, with plain parameters.",
        {dtype_key("The dtype of dy."), code_bits_key()},
        "",
        true},
       specialise_backward,
       false,
       describe_backward},
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
