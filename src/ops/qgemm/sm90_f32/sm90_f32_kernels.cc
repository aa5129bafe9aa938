// The kernel of variant qgemm_sm90_f32, listed.
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

cuda::KernelSpec specialise(const cuda::KernelValues& given) {
  cuda::KernelValues values = given;
  if (values["format"] == "lut4") values["format"] = "nf4";  // tables are arguments
  values["table"] = "";
  values["group-size"] = "64";
  values["double-quant"] = "no";
  values["dtype"] = "f32";
  QgemmProblem problem = qgemm_problem(values);
  HALFBYTE_CHECK(problem.codec.bits == 4, usage, "format must have 4 bits, got {}", values.at("format"));
  problem.m = values.at("rows")[0] - '0';
  // As many units as are still in registers, or more.
  problem.weight.blocks_per_strip = cuda::is_set(values, "long") ? 1 << 20 : 1;
  return sm90_f32_kernel(problem);
}

}  // namespace

std::vector<cuda::Kernel> qgemm_sm90_f32_kernels() {
  std::vector<KernelKey> keys;
  for (const KernelKey& key : qgemm_keys())
    if (key.name == "format" || key.name == "asymmetric" || key.name == "scale-dtype") keys.push_back(key);
  for (KernelKey& key : keys)
    if (key.name == "format")
      std::erase_if(key.values, [](const std::string& word) { return find_format(word).bits != 4; });
  keys.push_back({"rows", {"1", "2", "4"}, false, "Of x, rounded up."});
  keys.push_back(cuda::flag_key("long", "Of x: more than registers hold."));
  return {{{"qgemm", "qgemm_sm90_f32", "Forward, f32, at most 4 rows of x, on sm_90.", std::move(keys)},
           specialise}};
}

}  // namespace halfbyte
