// The kernels of `qgemm`, listed.
#include <algorithm>

#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {

std::vector<KernelKey> qgemm_keys() {
  std::vector<KernelKey> keys = cuda::codec_keys(false);
  for (KernelKey& key : keys) {
    if (key.name == "scale-dtype") std::erase(key.values, "f64");
    if (key.name != "format") continue;
    std::erase_if(key.values, [](const std::string& word) {
      const int bits = find_format(word).bits;
      return bits != 4 && bits != 8;
    });
  }
  keys.push_back(
      {"group-size", {"64", "32", "128", "256", "channel"}, true, "Any number, channel or tensor."});
  keys.push_back(cuda::flag_key("double-quant", "The scales are 8-bit codes."));
  keys.push_back({"dtype", {"bf16", "f16", "f32"}, false, "The dtype of x and y."});
  return keys;
}

QgemmProblem qgemm_problem(const cuda::KernelValues& values) {
  QuantSpec spec = cuda::spec_of(values);
  cuda::set_group_size(spec, values.at("group-size"));
  spec.double_quant = cuda::is_set(values, "double-quant");
  QgemmDescriptor descriptor;
  descriptor.spec = spec;
  descriptor.m = 1;
  descriptor.n = descriptor.k = 4096;
  descriptor.dtype = cuda::dtype_of(values);
  check_descriptor(descriptor);
  return make_qgemm_problem({DeviceKind::cuda, 0}, descriptor, 0);
}

std::vector<cuda::Kernel> qgemm_kernels() {
  std::vector<cuda::Kernel> table;
  for (const auto& rows : {
           qgemm_sm90_mma_kernels(),
           qgemm_sm90_wgmma_kernels(),
           qgemm_sm90_transposed_kernels(),
           qgemm_sm90_large_kernels(),
           qgemm_sm90_f32_kernels(),
           qgemm_cublas_kernels(),
           qgemm_sm80_kernels(),
           qgemm_simt_kernels(),
       })
    table.insert(table.end(), rows.begin(), rows.end());
  return table;
}

}  // namespace halfbyte
