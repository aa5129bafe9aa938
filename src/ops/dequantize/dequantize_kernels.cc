// The kernels of `dequantize`, listed.
#include "ops/dequantize/dequantize_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

// Only addresses and extents count: nothing is at them. How scales are stored is an argument.
cuda::KernelSpec specialise(const KernelValues& given) {
  alignas(64) static uint8_t memory[64];
  KernelValues values = given;
  values["scale-dtype"] = "f32";
  QuantSpec spec = cuda::spec_of(values);
  cuda::set_group_size(spec, values.at("group-size"));
  // Whole groups of all listed sizes; a row is no power of two of chunks.
  const int64_t cols = cuda::is_set(values, "unaligned") ? 4095 : 12288;
  const QuantizedView in{spec, 16, cols, memory, memory, nullptr, nullptr};
  return dequantize_kernel(make_dequantize_problem(in, memory, cuda::dtype_of(values)));
}

}  // namespace

std::vector<cuda::Kernel> dequantize_kernels() {
  std::vector<KernelKey> keys = cuda::codec_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "scale-dtype"; });
  keys.push_back(cuda::dtype_key("The dtype of y."));
  keys.push_back({"group-size",
                  {"64", "channel"},
                  true,
                  "Any number, channel or tensor: powers of two from 32 on, of which rows are whole groups, "
                  "have the kernel of 64, all others that of channel."});
  keys.push_back(
      cuda::flag_key("unaligned", "Rows are no multiple of 8, or memory is not aligned to 16 bytes."));
  return {{{"dequantize", "dequantize", "Decodes every format.", std::move(keys)}, specialise}};
}

}  // namespace halfbyte
