// What the CUDA variants of `qgemm` share on the host.
#include "ops/qgemm/qgemm_cuda.h"

#include <algorithm>

#include "ops/qgemm/weight/stage_x_cuda.h"
#include "ops/qgemm/weight/sum_cuda.h"

namespace halfbyte {

std::vector<cuda::Kernel> qgemm_kernels() {
  std::vector<cuda::Kernel> table = {qgemm_plain_kernel()};
  const auto add = [&](std::vector<cuda::Kernel> rows) {
    std::ranges::move(rows, std::back_inserter(table));
  };
  for (const QgemmVariant* variant : qgemm_variants({}))
    if (variant->kernels) add(variant->kernels());
  add(qgemm_stage_x_kernels());
  add(qgemm_sum_kernels());
  add(qgemm_expert_rows_kernels());
  return table;
}

std::vector<KernelKey> qgemm_keys() {
  std::vector<KernelKey> keys = cuda::codec_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "table"; });
  for (KernelKey& key : keys) {
    if (key.name == "scale-dtype") std::erase(key.values, "f64");
  }
  keys.push_back(
      {"group-size", {"64", "32", "128", "256", "channel"}, true, "Any number, channel or tensor."});
  keys.push_back(cuda::flag_key("double-quant", "The scales are 8-bit codes."));
  keys.push_back({"dtype", {"bf16", "f16", "f32"}, false, "The dtype of x and y."});
  return keys;
}

std::vector<KernelKey> qgemm_fragment_keys() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys) {
    if (key.name == "group-size") key.values.insert(key.values.end() - 1, "16");
    if (key.name == "format")
      std::erase_if(key.values,
                    [](const std::string& word) { return !formats::in_fragments(find_format(word).bits); });
  }
  return keys;
}

QgemmProblem qgemm_problem(const cuda::KernelValues& given) {
  cuda::KernelValues values = given;
  if (values["format"] == "lut4") values["format"] = "nf4";  // any table: it is an argument
  values["table"] = "";
  if (const auto scale_dtype = find_format(values["format"]).scale_dtype)
    values["scale-dtype"] = to_string(*scale_dtype);
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

KernelKey number_key(const char* name, const std::vector<int>& values, const char* description) {
  KernelKey key = {name, {}, false, description};
  for (const int value : values) key.values.push_back(std::to_string(value));
  return key;
}
int number_of(const cuda::KernelValues& values, std::string_view key) {
  return std::stoi(values.find(key)->second);
}

bool has_pairs_of_y(const QgemmProblem& problem) {
  return problem.y_cols() % 2 == 0 && problem.alignment >= 2 * size_of(problem.dtype);
}

std::string refuse_other_than_sm90(const QgemmProblem& problem) {
  const std::string& target = cuda::context(problem.device.index).target;
  return target == kSm90Target ? "" : fmt::format("it is for {}, the device is {}", kSm90Target, target);
}

}  // namespace halfbyte
