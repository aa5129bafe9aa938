// The kernels of fake quantization, listed: those of linear quantization, otherwise specialised.
#include "ops/fake_quantize/fake_quantize_cuda.h"

#include "core/checks.h"
#include "cuda/config.h"
#include "cuda/plain.h"
#include "grouped/linear_kernels.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

std::vector<KernelKey> given_keys() {
  return fake_keys({"none", "i32", "f32", "f64"},
                   {{"operation", {"forward", "backward"}, false, "What is done."},
                    cuda::flag_key("mask", "Forward writes the mask of the gradient.")},
                   true);
}
LinearOp operation_of(const KernelValues& values) {
  return values.at("operation") == "backward" ? LinearOp::backward : LinearOp::fake_quantize;
}

// ---- halfbyte_fake_quantize, halfbyte_fake_quantize_backward

std::vector<KernelKey> plain_keys() {
  return fake_keys({"none", "i32", "f32", "f64"}, {cuda::scale_dtype_key("f32, or that of x.")});
}
// A table as kernels without bins are given it.
std::string table_config(const formats::CodeBook& book) {
  const LinearTable table = linear_table(book);
  std::string values, edges_f32, edges_f64;
  for (const float value : table.values) values += fmt::format("{:a}f, ", value);
  for (const float edge : table.edges_f32) edges_f32 += fmt::format("{:a}f, ", edge);
  for (const double edge : table.edges_f64) edges_f64 += fmt::format("{:a}, ", edge);
  return fmt::format("constexpr LinearTable kPlainTable = {{{{{}}}, {{{}}}, {{{}}}, {:a}f, {:a}f}};\n",
                     values, edges_f32, edges_f64, table.max_magnitude, table.of_code_0);
}
cuda::KernelSpec specialise_plain(const KernelValues& values, LinearOp op) {
  const LinearTypes types = fake_types_of(values);
  const DType scale_dtype = parse_dtype(values.at("scale-dtype"));
  HALFBYTE_CHECK(scale_dtype == DType::f32 || scale_dtype == types.dtype, usage,
                 "scale-dtype must be f32 or that of x, {}, got {}", to_string(types.dtype),
                 to_string(scale_dtype));
  const bool backward = op == LinearOp::backward;
  return linear_kernel(backward ? "ops/fake_quantize/fake_quantize_backward_plain.cu"
                                : "ops/fake_quantize/fake_quantize_plain.cu",
                       backward ? "halfbyte_fake_quantize_backward" : "halfbyte_fake_quantize",
                       types.without_bins(),
                       fmt::format("constexpr LinearOp kOp = LinearOp({});\n", static_cast<int>(op)) +
                           cuda::type_config("Scale", scale_dtype) +
                           table_config(types.book.value_or(formats::CodeBook{})) + cuda::plain_lines());
}
KernelDescription describe_plain(const KernelValues& values, LinearOp op) {
  const char* const dtype = values.at("dtype").c_str();
  const std::string& zero = values.at("zero-point");
  std::vector<KernelParameter> tensors = {
      cuda::read_parameter("x", dtype, cuda::kTensorElements, "The tensor.")};
  if (op == LinearOp::backward) {
    tensors.push_back(cuda::read_parameter("dy", dtype, cuda::kTensorElements, "The gradient of y."));
    tensors.push_back(cuda::written_parameter("dx", dtype, cuda::kTensorElements,
                                              "The gradient of x; it may be the memory of dy."));
  } else {
    tensors.push_back(cuda::written_parameter("y", dtype, cuda::kTensorElements,
                                              "What x becomes; it may be the memory of x."));
  }
  tensors.push_back(cuda::read_parameter("scales", values.at("scale-dtype").c_str(), cuda::kTensorGroups,
                                         "Of each group."));
  tensors.push_back(cuda::optional_parameter(
      cuda::read_parameter("zeros", zero == "none" ? "i32" : zero.c_str(), cuda::kTensorGroups,
                           "Zero points of each group, where key zero-point is not none."),
      zero != "none"));
  tensors.push_back(cuda::counts_parameter());
  tensors.push_back(cuda::number_parameter("q_min", "i32", "The least code; of tables it plays no part."));
  tensors.push_back(cuda::number_parameter("q_max", "i32", "The largest code; likewise."));
  return cuda::plain_description(cuda::tensor_parameters(std::move(tensors)), cuda::kTensorElements, 256);
}

}  // namespace

std::vector<cuda::Kernel> fake_quantize_kernels() {
  return {
      {{"fake_quantize", "halfbyte_fake_quantize", "Any tensor with given scales, with plain parameters.",
        plain_keys(), "", true},
       [](const KernelValues& values) { return specialise_plain(values, LinearOp::fake_quantize); },
       true,
       [](const KernelValues& values) { return describe_plain(values, LinearOp::fake_quantize); }},
      {{"fake_quantize", "halfbyte_fake_quantize_backward",
        "The straight-through estimator of any tensor, with plain parameters.", plain_keys(), "", true},
       [](const KernelValues& values) { return specialise_plain(values, LinearOp::backward); },
       false,
       [](const KernelValues& values) { return describe_plain(values, LinearOp::backward); }},
      {{"fake_quantize", "fake_chunks", "Tensors whose scales belong to whole chunks.", given_keys()},
       [](const KernelValues& values) {
         return linear_chunks_kernel(fake_types_of(values), operation_of(values));
       }},
      {{"fake_quantize", "fake_columns", "Tensors whose scales differ from column to column.", given_keys()},
       [](const KernelValues& values) {
         return linear_columns_kernel(fake_types_of(values), operation_of(values));
       }},
      {{"fake_quantize", "fake_elements", "Any tensors.", given_keys()},
       [](const KernelValues& values) {
         return linear_elements_kernel(fake_types_of(values), operation_of(values));
       }},
      {{"fake_quantize", "fake_fused", "Observer, scales, zero points and values in one pass.",
        fake_keys({"none", "i32"},
                  {cuda::flag_key("mask", "The mask of the gradient is written."), fused_group_key()}, true)},
       [](const KernelValues& values) {
         const LinearTypes types = fake_types_of(values);
         const int block_batch = fused_block_batch(values);
         HALFBYTE_CHECK(!types.byte_scales || block_batch == 0, usage,
                        "groups of format {} are those of lanes", values.at("format"));
         return linear_fused_kernel(types, LinearOp::fake_quantize, block_batch);
       }},
      {{"fake_quantize", "fake_params", "Observer, scales and zero points from ranges.",
        fake_keys({"none", "i32"}, {}, true)},
       [](const KernelValues& values) {
         return linear_params_kernel(fake_types_of(values), LinearOp::fake_quantize);
       }},
      {{"fake_quantize",
        "mask_gradients",
        "Gradients by the mask.",
        {cuda::dtype_key("The dtype of gradients."),
         cuda::flag_key("elements", "Chunks of 16 bytes do not have whole bytes of the mask."), wide_key()}},
       [](const KernelValues& values) {
         return mask_gradients_kernel(cuda::dtype_of(values), !cuda::is_set(values, "elements"),
                                      cuda::is_set(values, "wide"));
       }},
  };
}

}  // namespace halfbyte
