// The kernels of fake quantization, listed: those of linear quantization, otherwise specialised.
#include "ops/fake_quantize/fake_quantize_cuda.h"

#include "grouped/linear_kernels.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

std::vector<KernelKey> given_keys() {
  return fake_keys({"none", "i32", "f32", "f64"},
                   {{"operation", {"forward", "backward"}, false, "What is done."},
                    cuda::flag_key("mask", "Forward writes the mask of the gradient.")});
}
LinearOp operation_of(const KernelValues& values) {
  return values.at("operation") == "backward" ? LinearOp::backward : LinearOp::fake_quantize;
}

}  // namespace

std::vector<cuda::Kernel> fake_quantize_kernels() {
  return {
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
                  {cuda::flag_key("mask", "The mask of the gradient is written."), fused_group_key()})},
       [](const KernelValues& values) {
         return linear_fused_kernel(fake_types_of(values), LinearOp::fake_quantize,
                                    fused_block_batch(values));
       }},
      {{"fake_quantize", "fake_params", "Observer, scales and zero points from ranges.",
        fake_keys({"none", "i32"}, {})},
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
