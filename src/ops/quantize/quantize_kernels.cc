// The kernels of `quantize`, listed.
#include "ops/quantize/quantize_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

// Columns of the rows that kernels are chosen for.
constexpr int64_t kWholeGroups = 4096, kCutGroups = 4072, kUnaligned = 4095;

// Only addresses and extents count: nothing is at them. The scale rule and how parameters are stored
// are arguments.
cuda::KernelSpec specialise(KernelValues values, int64_t cols) {
  alignas(64) static uint8_t memory[64];
  values["scale-dtype"] = "f32";
  QuantSpec spec = cuda::spec_of(values);
  cuda::set_group_size(spec, values.at("group-size"));
  const TensorView x = {memory, cuda::dtype_of(values), {16, cols}, {}, {DeviceKind::cuda, 0}};
  const QuantizedView out = {spec,
                             16,
                             cols,
                             memory,
                             memory,
                             has_zeros(spec) ? memory : nullptr,
                             has_biases(spec) ? memory : nullptr};
  return quantize_kernel(make_quantize_problem(x, out, {}, {}, nullptr));
}

std::vector<KernelKey> keys(std::initializer_list<KernelKey> more) {
  std::vector<KernelKey> keys = cuda::codec_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "scale-dtype"; });
  keys.push_back(cuda::dtype_key("The dtype of x."));
  keys.insert(keys.end(), more);
  return keys;
}

}  // namespace

std::vector<cuda::Kernel> quantize_kernels() {
  return {
      {{"quantize", "quantize_groups", "Rows of whole groups of a common size, in aligned memory.",
        keys({{"group-size",
               {"64", "32", "128", "256"},
               false,
               "Elements of a group, of which some have the same kernel."}})},
       [](const KernelValues& values) { return specialise(values, kWholeGroups); },
       true},
      {{"quantize", "quantize_spans", "Everything else: other groups, groups that a row cuts, whole tensors.",
        keys({{"group-size", {"channel"}, true, "Any number, channel or tensor: the kernel is the same."},
              cuda::flag_key("unaligned",
                             "Rows are no multiple of 8, or memory is not aligned to 16 bytes.")})},
       [](const KernelValues& values) {
         return specialise(values, cuda::is_set(values, "unaligned") ? kUnaligned : kCutGroups);
       },
       true},
      {{"quantize",
        "value_range",
        "The range of a tensor, or of groups that blocks share.",
        {cuda::dtype_key("The dtype of x.")}},
       [](const KernelValues& values) { return value_range_kernel(cuda::dtype_of(values)); }},
  };
}

}  // namespace halfbyte
