// The kernels of linear quantization, listed.
#include "ops/quantize_linear/quantize_linear_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

KernelKey bits_key() { return {"bits", {"8", "4"}, false, "Of a code."}; }
KernelKey operation_key() {
  return {"operation", {"quantize", "dequantize", "backward"}, false, "What is done."};
}
KernelKey wide_key() { return cuda::flag_key("wide", "2^31 pieces of work and more."); }

int bits_of(const KernelValues& values) { return values.at("bits") == "4" ? 4 : 8; }
LinearOp operation_of(const KernelValues& values) {
  const std::string& word = values.at("operation");
  return word == "quantize"     ? LinearOp::quantize
         : word == "dequantize" ? LinearOp::dequantize
                                : LinearOp::backward;
}

}  // namespace

std::vector<cuda::Kernel> quantize_linear_kernels() {
  const KernelKey dtype = cuda::dtype_key("The dtype of x, y and gradients.");
  return {
      {{"quantize_linear",
        "linear_chunks",
        "Contiguous tensors whose scales belong to whole chunks of 32 bytes.",
        {dtype, bits_key(), operation_key(), wide_key()}},
       [](const KernelValues& values) {
         return linear_chunks_kernel(cuda::dtype_of(values), bits_of(values), operation_of(values),
                                     cuda::is_set(values, "wide"));
       }},
      {{"quantize_linear",
        "linear_columns",
        "Contiguous tensors whose scales differ from column to column.",
        {dtype, bits_key(), operation_key(), wide_key()}},
       [](const KernelValues& values) {
         return linear_columns_kernel(cuda::dtype_of(values), bits_of(values), operation_of(values),
                                      cuda::is_set(values, "wide"));
       }},
      {{"quantize_linear", "linear_elements", "Any tensors.", {dtype, bits_key(), operation_key()}},
       [](const KernelValues& values) {
         return linear_elements_kernel(cuda::dtype_of(values), bits_of(values), operation_of(values));
       }},
      {{"quantize_linear",
        "linear_fused",
        "Scales, zero points and codes in one pass.",
        {dtype,
         bits_key(),
         {"group",
          {"lanes", "block-4", "block-8"},
          false,
          "What shares a group: lanes of a warp, or a block with so many chunks a thread."}}},
       [](const KernelValues& values) {
         const std::string& group = values.at("group");
         return linear_fused_kernel(cuda::dtype_of(values), bits_of(values),
                                    group == "lanes"     ? 0
                                    : group == "block-4" ? 4
                                                         : 8);
       }},
      {{"quantize_linear",
        "linear_ranges",
        "The ranges of groups of any shape.",
        {dtype, cuda::flag_key("elements", "Elements do not lie together in chunks of 16 bytes."),
         wide_key()}},
       [](const KernelValues& values) {
         return linear_ranges_kernel(cuda::dtype_of(values), !cuda::is_set(values, "elements"),
                                     cuda::is_set(values, "wide"));
       }},
      {{"quantize_linear", "linear_params", "Scales and zero points from ranges.", {dtype}},
       [](const KernelValues& values) { return linear_params_kernel(cuda::dtype_of(values)); }},
  };
}

}  // namespace halfbyte
