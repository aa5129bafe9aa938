// The kernels of gradients of learned scales, listed with those of fake quantization.
#include "grouped/linear_kernels.h"
#include "ops/learned_scale/learned_scale_cuda.h"

namespace halfbyte {

using cuda::KernelValues;

std::vector<cuda::Kernel> learned_scale_kernels() {
  return {
      {{"fake_quantize", "lsq_rows", "Gradients of learned scales of groups one behind the other.",
        fake_keys({"none", "i32", "f32", "f64"},
                  {{"levels",
                    {"3", "0", "1", "2", "4", "5", "6", "7", "8"},
                    false,
                    "A group fills up 2^levels chunks of 16 bytes; 8: blocks share a group."},
                   wide_key()})},
       [](const KernelValues& values) {
         return lsq_rows_kernel(fake_types_of(values), values.at("levels")[0] - '0',
                                cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_columns", "Gradients of learned scales of groups side by side.",
        fake_keys({"none", "i32", "f32", "f64"}, {wide_key()})},
       [](const KernelValues& values) {
         return lsq_columns_kernel(fake_types_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_elements", "Gradients of learned scales of any groups.",
        fake_keys({"none", "i32", "f32", "f64"}, {wide_key()})},
       [](const KernelValues& values) {
         return lsq_elements_kernel(fake_types_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_totals", "Sums of the pieces of groups, for gradients of learned scales.",
        fake_keys({"none", "i32", "f32", "f64"}, {})},
       [](const KernelValues& values) { return lsq_totals_kernel(fake_types_of(values)); }},
  };
}

}  // namespace halfbyte
