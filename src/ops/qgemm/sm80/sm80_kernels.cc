// The kernels of variant qgemm_sm80, listed.
#include <charconv>

#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

const KernelKey kDType = {
    "dtype", {"bf16", "f16", "f32"}, false, "The dtype of x and y; f32 with math tf32."};

cuda::KernelSpec specialise(const KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  const std::string& tokens = values.at("tokens");
  std::from_chars(tokens.data(), tokens.data() + tokens.size(), problem.m);
  if (problem.dtype == DType::f32) problem.math = QgemmMath::tf32;
  problem.transposed = cuda::is_set(values, "transposed");
  if (cuda::is_set(values, "unaligned")) problem.alignment = size_of(problem.dtype);
  HALFBYTE_CHECK(qgemm_sm80_tokens(problem) == problem.m, usage, "tokens {} do not go with dtype f32",
                 tokens);
  return qgemm_sm80_kernel(problem);
}

cuda::KernelSpec specialise_sum(const KernelValues& values) {
  QgemmProblem problem;
  problem.dtype = cuda::dtype_of(values);
  return qgemm_sm80_sum_kernel(problem);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm80_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys) {
    if (key.name == kDType.name) key = kDType;
    if (key.name == "group-size") key.values.insert(key.values.end(), {"96", "16"});
  }
  keys.push_back(cuda::flag_key("transposed", "The product along the rows of the weight."));
  keys.push_back({"tokens", {"8", "16", "32", "64", "128"}, false, "Rows of x in the tile of a block."});
  keys.push_back(
      cuda::flag_key("unaligned", "Rows of x are no multiple of 8, or memory is not aligned to 16 bytes."));
  return {{{"qgemm", "qgemm_sm80", "Both directions, any shape, by mma.sync.", std::move(keys)}, specialise},
          {{"qgemm", "qgemm_sm80_sum", "Adds up what blocks of qgemm_sm80 left.", {kDType}}, specialise_sum}};
}

}  // namespace halfbyte
