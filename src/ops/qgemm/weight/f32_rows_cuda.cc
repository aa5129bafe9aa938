#include "ops/qgemm/weight/f32_rows_cuda.h"

#include <algorithm>

#include "ops/qgemm/weight/common_cuda.h"

namespace halfbyte {

std::string refuse_for_f32_rows(const QgemmProblem& p, bool transposed, int64_t most_rows) {
  if (std::string reason = refuse_other_than_sm90(p); !reason.empty()) return reason;
  if (p.dtype != DType::f32) return fmt::format("dtype must be f32, got {}", to_string(p.dtype));
  if (p.math == QgemmMath::f64) return "math must not be f64";
  if (p.transposed != transposed) return transposed ? "it is for transposed products" : "it is forward only";
  if (p.m > most_rows) return fmt::format("m must be at most {}, got {}", most_rows, p.m);
  if (!p.packed) return "the weight must be packed";
  if (p.codec.bits != 4) return fmt::format("codes must have 4 bits, got {}", p.codec.bits);
  if (p.double_quant) return "scales must not be quantized";
  if (inlined_group(p) < 32)
    return fmt::format("groups must be multiples of 32 columns, got those of {}", p.group);
  if (p.tile != QgemmTile{}) return "tile is for qgemm_simt";
  return "";
}

std::vector<KernelKey> f32_rows_keys() {
  std::vector<KernelKey> keys;
  for (const KernelKey& key : qgemm_fragment_keys())
    if (key.name == "format" || key.name == "asymmetric" || key.name == "scale-dtype") keys.push_back(key);
  for (KernelKey& key : keys)
    if (key.name == "format")
      std::erase_if(key.values, [](const std::string& word) { return find_format(word).bits != 4; });
  return keys;
}

QgemmProblem f32_rows_problem(const cuda::KernelValues& given) {
  cuda::KernelValues values = given;
  values["group-size"] = "64";
  values["double-quant"] = "no";
  values["dtype"] = "f32";
  QgemmProblem problem = qgemm_problem(values);
  HALFBYTE_CHECK(problem.codec.bits == 4, usage, "format must have 4 bits, got {}", values.at("format"));
  problem.m = number_of(values, "rows");
  return problem;
}

}  // namespace halfbyte
