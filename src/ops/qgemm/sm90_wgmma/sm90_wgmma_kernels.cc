// The kernels of variant qgemm_sm90_wgmma, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  const auto number = [&](const char* key) { return std::stoi(values.find(key)->second); };
  const QgemmProblem problem = qgemm_problem(values);
  HALFBYTE_CHECK(problem.dtype != DType::f32, usage, "qgemm_sm90_wgmma: dtype must be bf16 or f16, got f32");
  HALFBYTE_CHECK(problem.weight.inlined || problem.weight.groups == 1, usage,
                 "qgemm_sm90_wgmma: group-size must be 32, 64, 128, 256 or channel, got {}",
                 values.at("group-size"));
  const QgemmSm90WgmmaTiling tiling =
      sm90_wgmma_tiling(problem, number("tokens"), number("rows") / 32, number("cluster"));
  HALFBYTE_CHECK(sm90_wgmma_takes(problem, tiling), usage,
                 "qgemm_sm90_wgmma: the weight, tokens {}, rows {} and cluster {} do not go together",
                 tiling.tokens, tiling.strips * 32, tiling.cluster);
  return sm90_wgmma_kernel(problem, tiling);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm90_wgmma_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") std::erase(key.values, "f32");
  keys.push_back({"tokens", {"16", "8", "32", "64"}, false, "Rows of x, rounded up."});
  keys.push_back({"rows", {"128", "256", "64"}, false, "Of the weight, in a tile."});
  keys.push_back({"cluster", {"2", "1"}, false, "Blocks that share the columns of a tile."});
  return {
      {{"qgemm", "qgemm_sm90_wgmma", "Forward, at most 64 rows of x: sm_90a.", std::move(keys)}, specialise}};
}

}  // namespace halfbyte
