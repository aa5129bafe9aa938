// The kernels of variant qgemm_sm90_transposed, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  const auto number = [&](const char* key) { return std::stoi(values.find(key)->second); };
  const QgemmProblem problem = qgemm_problem(values);
  const std::string reason = sm90_transposed_refuses(problem.weight);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_transposed: {}", reason);
  const QgemmSm90TransposedTiling tiling =
      sm90_transposed_tiling(problem, number("tokens"), number("columns") / formats::kUnitCols);
  HALFBYTE_CHECK(tiling.fits(), usage,
                 "qgemm_sm90_transposed: columns must be 64 for these parameters, got {}",
                 values.at("columns"));
  return sm90_transposed_kernel(problem, tiling);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm90_transposed_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys) {
    if (key.name == "dtype") std::erase(key.values, "f32");
    if (key.name == "format") std::erase(key.values, "affine8");
  }
  keys.push_back({"tokens", {"16", "8", "32", "64"}, false, "Rows of x, rounded up."});
  keys.push_back({"columns", {"128", "64"}, false, "Of the weight, in a tile."});
  return {{{"qgemm", "qgemm_sm90_transposed", "Transposed, at most 64 rows of x: sm_90a.", std::move(keys)},
           specialise}};
}

}  // namespace halfbyte
