// The kernels of `dequantize`, listed.
#include "core/checks.h"
#include "core/format.h"
#include "cuda/config.h"
#include "cuda/plain.h"
#include "ops/dequantize/dequantize_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

// Only addresses and extents count: nothing is at them. How scales are stored is an argument.
cuda::KernelSpec specialise(const KernelValues& given) {
  alignas(64) static uint8_t memory[64];
  KernelValues values = given;
  values["scale-dtype"] = cuda::any_scale_dtype(values);
  QuantSpec spec = cuda::spec_of(values);
  cuda::set_group_size(spec, values.at("group-size"));
  // Whole groups of all listed sizes; a row is no power of two of chunks.
  const int64_t cols = cuda::is_set(values, "unaligned") ? 4095 : 12288;
  const QuantizedView in{spec, 16, cols, memory, memory, nullptr, nullptr};
  return dequantize_kernel(make_dequantize_problem(in, memory, cuda::dtype_of(values)));
}

// ---- halfbyte_dequantize

std::vector<KernelKey> plain_keys() {
  std::vector<KernelKey> keys = cuda::codec_keys();
  keys.push_back(cuda::dtype_key("The dtype of y."));
  return keys;
}
QuantSpec plain_spec(const KernelValues& values) {
  QuantSpec spec = cuda::spec_of(values);
  HALFBYTE_CHECK(spec.scale_dtype != DType::f64 || cuda::dtype_of(values) == DType::f64, usage,
                 "scale-dtype f64 is for f64 data only, got {}", values.at("dtype"));
  return spec;
}
cuda::KernelSpec specialise_plain(const KernelValues& values) {
  formats::Codec codec = make_codec(plain_spec(values));
  codec.rule = {};
  return {"ops/dequantize/dequantize_plain.cu", "halfbyte_dequantize",
          "#define HALFBYTE_KERNEL halfbyte_dequantize\n" +
              cuda::config_text(cuda::element_config(cuda::dtype_of(values)) + cuda::codec_config(codec) +
                                fmt::format("constexpr int kCodeBits = {};\n", codec.bits) +
                                cuda::plain_lines())};
}
KernelDescription describe_plain(const KernelValues& values) {
  const QuantSpec spec = plain_spec(values);
  const char* const scale = values.at("scale-dtype").c_str();
  return cuda::plain_description(
      cuda::matrix_parameters(
          {cuda::read_parameter("codes", "u8", cuda::matrix_code_bytes(info(spec.format).bits),
                                "Rows of codes, each a little-endian bit stream."),
           cuda::read_parameter("scales", scale, cuda::kMatrixGroups, "Of each group of a row."),
           cuda::optional_parameter(
               cuda::read_parameter("zeros", "u8", cuda::kMatrixGroups,
                                    "Zero points less the least code, of asymmetric integer formats."),
               has_zeros(spec)),
           cuda::optional_parameter(
               cuda::read_parameter("biases", scale, cuda::kMatrixGroups, "Of affine formats."),
               has_biases(spec)),
           cuda::written_parameter("y", values.at("dtype").c_str(), cuda::kMatrixElements,
                                   "The decoded matrix.")}),
      "rows * ((cols + 7) / 8)", 256);
}

}  // namespace

std::vector<cuda::Kernel> dequantize_kernels() {
  std::vector<KernelKey> keys = cuda::codec_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "scale-dtype"; });
  keys.push_back(cuda::dtype_key("The dtype of y."));
  keys.push_back({"group-size",
                  {"64", "channel"},
                  true,
                  "Any number, channel or tensor: powers of two from 32 on, of which rows are whole groups, "
                  "have the kernel of 64, all others that of channel."});
  keys.push_back(
      cuda::flag_key("unaligned", "Rows are no multiple of 8, or memory is not aligned to 16 bytes."));
  return {
      {{"dequantize", "halfbyte_dequantize", "Any matrix, with plain parameters.", plain_keys(), "", true},
       specialise_plain,
       true,
       describe_plain},
      {{"dequantize", "dequantize", "Decodes every format.", std::move(keys)}, specialise, true}};
}

}  // namespace halfbyte
