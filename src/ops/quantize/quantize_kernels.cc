// The kernels of `quantize`, listed.
#include "core/checks.h"
#include "core/format.h"
#include "cuda/config.h"
#include "cuda/plain.h"
#include "ops/quantize/quantize_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

// Columns of the rows that kernels are chosen for.
constexpr int64_t kWholeGroups = 4096, kCutGroups = 4072, kUnaligned = 4095;

// Only addresses and extents count: nothing is at them. The scale rule and how parameters are stored
// are arguments.
cuda::KernelSpec specialise(KernelValues values, int64_t cols, const Encoding& encoding = {}) {
  alignas(64) static uint8_t memory[64];
  values["scale-dtype"] = cuda::any_scale_dtype(values);
  QuantSpec spec = cuda::spec_of(values);
  cuda::set_group_size(spec, values.at("group-size"));
  check_encoding(spec, encoding);
  const TensorView x = {memory, cuda::dtype_of(values), {16, cols}, {}, {DeviceKind::cuda, 0}};
  const QuantizedView out = {spec,
                             16,
                             cols,
                             memory,
                             memory,
                             has_zeros(spec) ? memory : nullptr,
                             has_biases(spec) ? memory : nullptr,
                             has_global_scale(spec) ? reinterpret_cast<float*>(memory) : nullptr};
  return quantize_kernel(make_quantize_problem(x, out, encoding, {}, nullptr));
}

std::vector<KernelKey> keys(std::initializer_list<KernelKey> more) {
  std::vector<KernelKey> keys = cuda::codec_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "scale-dtype"; });
  keys.push_back(cuda::dtype_key("The dtype of x."));
  keys.insert(keys.end(), more);
  return keys;
}

// ---- halfbyte_quantize

constexpr const char* kDefaultRule = "default";

std::vector<KernelKey> plain_keys() {
  std::vector<KernelKey> keys = cuda::codec_keys();
  keys.push_back({"scale-rule",
                  {kDefaultRule, "absmax", "half-range", "signed-max", "minmax", "mlx-edge"},
                  false,
                  "How a group gets its scale (default: the rule of the format)."});
  keys.push_back(cuda::flag_key("unrounded", "Codes are of the scale before it is rounded to scale-dtype."));
  keys.push_back(cuda::dtype_key("The dtype of x."));
  return keys;
}
formats::Codec plain_codec(const KernelValues& values) {
  const QuantSpec spec = cuda::spec_of(values);
  HALFBYTE_CHECK(spec.scale_dtype != DType::f64 || cuda::dtype_of(values) == DType::f64, usage,
                 "scale-dtype f64 is for f64 data only, got {}", values.at("dtype"));
  Encoding encoding;
  if (const std::string& rule = values.at("scale-rule"); rule != kDefaultRule)
    encoding.scale_rule = parse_scale_rule(rule);
  if (cuda::is_set(values, "unrounded")) encoding.code_scale = CodeScale::unrounded;
  check_encoding(spec, encoding);
  return make_codec(spec, encoding);
}
cuda::KernelSpec specialise_plain(const KernelValues& values) {
  return {"ops/quantize/quantize_plain.cu", "halfbyte_quantize",
          cuda::config_text(cuda::element_config(cuda::dtype_of(values)) +
                            cuda::codec_config(plain_codec(values)) + cuda::plain_lines())};
}
KernelDescription describe_plain(const KernelValues& values) {
  const QuantSpec spec = cuda::spec_of(values);
  const char* const scale = values.at("scale-dtype").c_str();
  return cuda::plain_description(
      cuda::matrix_parameters(
          {cuda::read_parameter("x", values.at("dtype").c_str(), cuda::kMatrixElements, "The matrix."),
           cuda::written_parameter("codes", "u8", cuda::matrix_code_bytes(info(spec.format).bits),
                                   "Rows of codes, each a little-endian bit stream."),
           cuda::written_parameter("scales", scale, cuda::kMatrixGroups, "Of each group of a row."),
           cuda::optional_parameter(
               cuda::written_parameter("zeros", "u8", cuda::kMatrixGroups,
                                       "Zero points less the least code, of asymmetric integer formats."),
               has_zeros(spec)),
           cuda::optional_parameter(
               cuda::written_parameter("biases", scale, cuda::kMatrixGroups, "Of affine formats."),
               has_biases(spec)),
           cuda::counts_parameter()}),
      "rows * (((cols + group_size - 1) / group_size + 7) / 8)", 1);
}

}  // namespace

std::vector<cuda::Kernel> quantize_kernels() {
  return {
      {{"quantize", "halfbyte_quantize", "Any matrix, with plain parameters.", plain_keys(), "", true},
       specialise_plain,
       true,
       describe_plain},
      {{"quantize", "quantize_groups", "Rows of whole groups of a common size, in aligned memory.",
        keys({{"group-size",
               {"64", "32", "128", "256"},
               false,
               "Elements of a group, of which some have the same kernel."}})},
       [](const KernelValues& values) {
         cuda::KernelSpec spec = specialise(values, kWholeGroups);
         HALFBYTE_CHECK(spec.function == "quantize_groups", usage, "groups of format {} are too small",
                        values.at("format"));
         return spec;
       },
       true},
      {{"quantize", "quantize_spans", "Everything else: other groups, groups that a row cuts, whole tensors.",
        keys({{"group-size", {"channel"}, true, "Any number, channel or tensor: the kernel is the same."},
              cuda::flag_key("unaligned",
                             "Rows are no multiple of 8, or memory is not aligned to 16 bytes.")})},
       [](const KernelValues& values) {
         return specialise(values, cuda::is_set(values, "unaligned") ? kUnaligned : kCutGroups);
       },
       true},
      {{"quantize", "quantize_search", "Searched scales, of any groups.",
        keys({{"group-size", {"channel"}, true, "Any number or channel: the kernel is the same."},
              {"search",
               {"yes", "no"},
               false,
               "Of sixteen scales of a group, the one of least squared error."}})},
       [](const KernelValues& values) {
         HALFBYTE_CHECK(cuda::is_set(values, "search"), usage, "quantize_search is for searched scales only");
         Encoding encoding;
         encoding.search = true;
         return specialise(values, kWholeGroups, encoding);
       },
       true},
      {{"quantize",
        "value_range",
        "The range of a tensor, or of groups that blocks share.",
        {cuda::dtype_key("The dtype of x.")}},
       [](const KernelValues& values) { return value_range_kernel(cuda::dtype_of(values)); }},
  };
}

}  // namespace halfbyte
