// The kernels of variant qgemm_sm90_large, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  const auto number = [&](const char* key) { return std::stoi(values.find(key)->second); };
  QgemmProblem problem = qgemm_problem(values);
  problem.transposed = cuda::is_set(values, "transposed");
  HALFBYTE_CHECK(problem.dtype != DType::f32, usage, "qgemm_sm90_large: dtype must be bf16 or f16, got f32");
  HALFBYTE_CHECK(problem.weight.inlined || problem.weight.groups == 1, usage,
                 "qgemm_sm90_large: group-size must be 32, 64, 128, 256 or channel, got {}",
                 values.at("group-size"));
  const QgemmSm90LargeTiling tiling = sm90_large_tiling(problem, number("tokens"), number("features") / 128,
                                                        cuda::is_set(values, "multicast"));
  HALFBYTE_CHECK(sm90_large_takes(problem, tiling), usage,
                 "qgemm_sm90_large: the weight, tokens {} and features {} do not go together", tiling.tokens,
                 tiling.features());
  return sm90_large_kernel(problem, tiling);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm90_large_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") std::erase(key.values, "f32");
  keys.push_back(cuda::flag_key("transposed", "The product along the rows of the weight."));
  keys.push_back({"tokens", {"256", "128", "64"}, false, "Rows of x in a tile."});
  keys.push_back({"features", {"128", "256"}, false, "Columns of y in a tile."});
  keys.push_back(cuda::flag_key("multicast", "Blocks of a cluster load x for each other."));
  return {{{"qgemm", "qgemm_sm90_large", "Both directions, many rows of x: sm_90a.", std::move(keys)},
           specialise}};
}

}  // namespace halfbyte
