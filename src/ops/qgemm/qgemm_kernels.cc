// The kernels of `qgemm`, listed.
#include <algorithm>

#include "core/format.h"
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
  check_spec(spec);
  QgemmProblem problem;
  problem.device = {DeviceKind::cuda, 0};
  problem.m = 1;
  problem.n = problem.k = 4096;
  problem.dtype = cuda::dtype_of(values);
  problem.codec = make_codec(spec);
  problem.codec.rule = {};
  problem.codec.unrounded_code_scale = false;
  problem.double_quant = spec.double_quant;
  problem.group = spec.granularity == Granularity::group ? spec.group_size : problem.k;
  problem.one_group = spec.granularity == Granularity::tensor;
  problem.weight = formats::packed_layout(problem.n, problem.k, problem.codec.bits, problem.group,
                                          formats::scale_bytes(problem.codec.scale_type), has_zeros(spec),
                                          has_biases(spec), spec.double_quant);
  return problem;
}

std::vector<cuda::Kernel> qgemm_kernels() {
  std::vector<cuda::Kernel> table;
  for (const auto& rows : {qgemm_simt_kernels(), qgemm_sm90_mma_kernels()})
    table.insert(table.end(), rows.begin(), rows.end());
  return table;
}

}  // namespace halfbyte
