// halfbyte_qgemm, the product with plain parameters, listed.
#include <fmt/format.h>

#include "core/format.h"
#include "cuda/config.h"
#include "cuda/plain.h"
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

constexpr const char* kGroups = "n * ((k + group_size - 1) / group_size)";

std::vector<KernelKey> keys() {
  std::vector<KernelKey> keys = qgemm_keys();
  std::erase_if(keys,
                [](const KernelKey& key) { return key.name == "group-size" || key.name == "double-quant"; });
  keys.push_back({"table", {}, true, "The 16 ascending values of lut4, separated by commas."});
  return keys;
}
cuda::KernelSpec specialise(const KernelValues& values) {
  formats::Codec codec = make_codec(cuda::spec_of(values));
  codec.rule = {};
  return {"ops/qgemm/qgemm_plain.cu", "halfbyte_qgemm",
          cuda::config_text(cuda::element_config(cuda::dtype_of(values)) + cuda::codec_config(codec) +
                            cuda::plain_lines())};
}
KernelDescription describe(const KernelValues& values) {
  const QuantSpec spec = cuda::spec_of(values);
  const char *const dtype = values.at("dtype").c_str(), *const scale = values.at("scale-dtype").c_str();
  return cuda::plain_description(
      {cuda::read_parameter("x", dtype, "m * k", "[m, k]."),
       cuda::read_parameter("codes", "u8", fmt::format("n * ((k * {} + 7) / 8)", info(spec.format).bits),
                            "The weight [n, k]: rows of codes, each a little-endian bit stream."),
       cuda::read_parameter("scales", scale, kGroups, "Of each group of a row of the weight."),
       cuda::optional_parameter(
           cuda::read_parameter("zeros", "u8", kGroups,
                                "Zero points less the least code, of asymmetric integer formats."),
           has_zeros(spec)),
       cuda::optional_parameter(cuda::read_parameter("biases", scale, kGroups, "Of affine formats."),
                                has_biases(spec)),
       cuda::optional_parameter(cuda::read_parameter("bias", dtype, "n", "Is added to each row of y."),
                                false),
       cuda::written_parameter("y", dtype, "m * n", "[m, n]: x times the transpose of the weight."),
       cuda::number_parameter("m", "i64", "Rows of x and y, from 0."),
       cuda::number_parameter("n", "i64", "Columns of y, from 0."),
       cuda::number_parameter("k", "i64", "Columns of x, from 0."),
       cuda::number_parameter(
           "group_size", "i64",
           "Neighbours in a row of the weight that share a scale, from 1; the last group of "
           "a row may be short. k: a row is a group.")},
      "m * n", 16);
}

}  // namespace

cuda::Kernel qgemm_plain_kernel() {
  return {{"qgemm", "halfbyte_qgemm", "Any forward product, with plain parameters.", keys(), "", true},
          specialise,
          true,
          describe};
}

}  // namespace halfbyte
