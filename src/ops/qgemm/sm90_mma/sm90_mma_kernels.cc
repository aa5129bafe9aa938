// The kernel of products of up to 8 rows, listed.
#include "core/checks.h"
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  const formats::PackedLayout& weight = problem.weight;
  const bool sliced = cuda::is_set(values, "sliced");
  const int64_t units = std::stoll(values.at("units"));
  HALFBYTE_CHECK(!sliced || (units >= 5 && units <= 7), usage, "units of sliced must be 5 to 7, got {}",
                 units);
  problem.k = units * (sliced ? 2048 : 1024);
  problem.weight = formats::packed_layout(problem.n, problem.k, weight.bits,
                                          problem.group == weight.k ? problem.k : problem.group,
                                          formats::scale_bytes(problem.codec.scale_type), weight.has_zeros,
                                          weight.has_biases, weight.double_quant);
  return qgemm_sm90_mma_kernel(problem);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm90_mma_kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") key.values = {"bf16", "f16"};
  keys.push_back({"units",
                  {"4", "8", "1", "2", "3", "5", "6", "7"},
                  false,
                  "Columns / 1024, rounded up; where that is over 8, of a slice of the columns."});
  keys.push_back(cuda::flag_key("sliced", "Over 8192 columns: in slices."));
  return {{{"qgemm", "qgemm_sm90_mma", "Forward, up to 8 rows, sm_90: x in registers.", std::move(keys)},
           specialise}};
}

}  // namespace halfbyte
