// The kernel of `compute_qparams`, listed.
#include "core/format.h"
#include "core/words.h"
#include "ops/compute_qparams/compute_qparams_cuda.h"

namespace halfbyte {
namespace {

constexpr std::array<Word<QParamsZero>, 4> kZeroTypes{{{QParamsZero::none, "none"},
                                                       {QParamsZero::i32, "i32"},
                                                       {QParamsZero::i8, "i8"},
                                                       {QParamsZero::u8, "u8"}}};

cuda::KernelSpec specialise_qparams(const cuda::KernelValues& values) {
  const DType dtype = cuda::dtype_of(values), scale_dtype = parse_dtype(values.at("scale-dtype"));
  const QParamsZero zero_type = value_of(kZeroTypes, values.at("zero-point"), "zero point");
  const ScaleRule rule = parse_scale_rule(values.at("scale-rule"));
  HALFBYTE_CHECK(scale_dtype != DType::f64 || dtype == DType::f64, usage,
                 "scale-dtype f64 needs dtype f64, got {}", to_string(dtype));
  HALFBYTE_CHECK(rule != ScaleRule::minmax || zero_type != QParamsZero::none, usage,
                 "scale-rule minmax needs a zero-point, got none");
  return compute_qparams_kernel(dtype, scale_type(scale_dtype), zero_type, static_cast<formats::Rule>(rule));
}

}  // namespace

std::vector<cuda::Kernel> compute_qparams_kernels() {
  return {{{"compute_qparams",
            "compute_qparams",
            "Scales and zero points from ranges.",
            {{"dtype", {"f32", "f64"}, false, "The dtype of the ranges."},
             {"scale-dtype", {"f32", "f16", "bf16", "f64"}, false, "The dtype of scales; f64 of f64 only."},
             {"zero-point", {"none", "i32", "i8", "u8"}, false, "The dtype of zero points."},
             {"scale-rule",
              {"absmax", "half-range", "minmax"},
              false,
              "How ranges become scales: minmax needs a zero point."}}},
           specialise_qparams}};
}

}  // namespace halfbyte
