// The kernels of linear quantization, listed.
#include "core/words.h"
#include "grouped/linear_kernels.h"
#include "grouped/ranges_cuda.h"
#include "ops/quantize_linear/quantize_linear_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

constexpr std::array<Word<ZeroType>, 4> kZeroTypes{{{ZeroType::none, "none"},
                                                    {ZeroType::i32, "i32"},
                                                    {ZeroType::byte, "byte"},
                                                    {ZeroType::nibble, "nibble"}}};
constexpr std::array<Word<LinearOp>, 3> kOperations{{{LinearOp::quantize, "quantize"},
                                                     {LinearOp::dequantize, "dequantize"},
                                                     {LinearOp::backward, "backward"}}};

std::vector<KernelKey> keys(std::initializer_list<KernelKey> more,
                            const std::vector<std::string>& zero_points = {"none", "i32", "byte", "nibble"}) {
  std::vector<KernelKey> keys = {cuda::dtype_key("The dtype of x, y and gradients."),
                                 {"zero-point", zero_points, false,
                                  "The dtype of zero points: i32, or that of the codes, of 8 or 4 bits."}};
  keys.insert(keys.end(), more);
  return keys;
}
KernelKey bits_key() { return {"bits", {"8", "4"}, false, "Of a code; gradients have the kernel of 8."}; }
KernelKey operation_key() {
  return {"operation", {"quantize", "dequantize", "backward"}, false, "What is done."};
}
LinearOp operation_of(const KernelValues& values) {
  return value_of(kOperations, values.at("operation"), "operation");
}
LinearTypes types_of(const KernelValues& values) {
  LinearTypes types;
  types.dtype = cuda::dtype_of(values);
  types.zero_type = value_of(kZeroTypes, values.at("zero-point"), "zero point");
  if (values.contains("bits")) types.bits = values.at("bits") == "4" ? 4 : 8;
  const bool packed = types.zero_type == ZeroType::nibble, whole = types.zero_type == ZeroType::byte;
  const bool gradients = values.contains("operation") && operation_of(values) == LinearOp::backward;
  if (gradients)
    types.bits = 8;
  else if (values.contains("bits"))
    HALFBYTE_CHECK(!(packed && types.bits == 8) && !(whole && types.bits == 4), usage,
                   "zero-point must be i32 or have the {} bits of a code, got {}", types.bits,
                   values.at("zero-point"));
  return types;
}

}  // namespace

std::vector<cuda::Kernel> quantize_linear_kernels() {
  return {
      {{"quantize_linear", "linear_chunks", "Contiguous tensors whose scales belong to whole chunks.",
        keys({bits_key(), operation_key()})},
       [](const KernelValues& values) {
         return linear_chunks_kernel(types_of(values), operation_of(values));
       }},
      {{"quantize_linear", "linear_columns", "Contiguous tensors whose scales differ from column to column.",
        keys({bits_key(), operation_key()})},
       [](const KernelValues& values) {
         return linear_columns_kernel(types_of(values), operation_of(values));
       }},
      {{"quantize_linear", "linear_elements", "Any tensors.", keys({bits_key(), operation_key()})},
       [](const KernelValues& values) {
         return linear_elements_kernel(types_of(values), operation_of(values));
       },
       true},
      {{"quantize_linear", "linear_fused", "Scales, zero points and codes in one pass.",
        keys({bits_key(), fused_group_key()}, {"none", "i32", "byte"})},
       [](const KernelValues& values) {
         return linear_fused_kernel(types_of(values), LinearOp::quantize, fused_block_batch(values));
       }},
      {{"quantize_linear",
        "linear_ranges",
        "The ranges of groups of any shape.",
        {cuda::dtype_key("The dtype of x."),
         cuda::flag_key("elements", "Elements do not lie together in chunks of 16 bytes."), wide_key()}},
       [](const KernelValues& values) {
         return ranges_kernel("linear_ranges", cuda::dtype_of(values), false,
                              !cuda::is_set(values, "elements"), cuda::is_set(values, "wide"));
       }},
      {{"quantize_linear", "linear_params", "Scales and zero points from ranges.", keys({})},
       [](const KernelValues& values) { return linear_params_kernel(types_of(values), LinearOp::quantize); }},
  };
}

}  // namespace halfbyte
