#include "core/plan.h"

#include "core/words.h"

namespace halfbyte {

namespace {

constexpr std::array<Word<OpKind>, 17> kOps{
    {{OpKind::other, "other"},
     {OpKind::quantize, "quantize"},
     {OpKind::dequantize, "dequantize"},
     {OpKind::quantize_linear, "quantize_linear"},
     {OpKind::dequantize_linear, "dequantize_linear"},
     {OpKind::quantize_linear_backward, "quantize_linear_backward"},
     {OpKind::fake_quantize, "fake_quantize"},
     {OpKind::fake_quantize_backward, "fake_quantize_backward"},
     {OpKind::fake_quantize_learned_backward, "fake_quantize_learned_backward"},
     {OpKind::observe, "observe"},
     {OpKind::compute_qparams, "compute_qparams"},
     {OpKind::affine_init, "affine_init"},
     {OpKind::affine_qdq, "affine_qdq"},
     {OpKind::affine_qdq_backward, "affine_qdq_backward"},
     {OpKind::qgemm, "qgemm"},
     {OpKind::route, "route"},
     {OpKind::qgemm_grouped, "qgemm_grouped"}}};
constexpr std::array<Word<Arch>, 19> kArchs{{{Arch::none, "none"},
                                             {Arch::other, "other"},
                                             {Arch::scalar, "SCALAR"},
                                             {Arch::avx2, "AVX2"},
                                             {Arch::avx3, "AVX3"},
                                             {Arch::avx3_dl, "AVX3_DL"},
                                             {Arch::avx3_zen4, "AVX3_ZEN4"},
                                             {Arch::avx512_bf16, "AVX512_BF16"},
                                             {Arch::amx_bf16, "AMX_BF16"},
                                             {Arch::sm_75, "sm_75"},
                                             {Arch::sm_80, "sm_80"},
                                             {Arch::sm_86, "sm_86"},
                                             {Arch::sm_87, "sm_87"},
                                             {Arch::sm_89, "sm_89"},
                                             {Arch::sm_90a, "sm_90a"},
                                             {Arch::sm_100a, "sm_100a"},
                                             {Arch::sm_103a, "sm_103a"},
                                             {Arch::sm_120a, "sm_120a"},
                                             {Arch::sm_121a, "sm_121a"}}};

// The enumerator of a word; `other` where it has none.
template <class Enum, size_t N>
Enum known(const std::array<Word<Enum>, N>& words, std::string_view text) {
  for (const auto& word : words)
    if (text == word.text) return word.value;
  return Enum::other;
}

}  // namespace

const char* to_string(OpKind kind) { return word_of(kOps, kind); }
const char* to_string(Arch arch) { return word_of(kArchs, arch); }

void set_enumerators(Sku& sku) {
  sku.op_kind = known(kOps, sku.op);
  const size_t space = sku.backend.find(' ');  // "cuda sm_90a"; "cpu": nothing runs
  sku.device_kind = sku.backend.starts_with("cuda") ? DeviceKind::cuda : DeviceKind::cpu;
  sku.arch = space == std::string::npos ? Arch::none
                                        : known(kArchs, std::string_view(sku.backend).substr(space + 1));
}

std::string to_string(const Sku& sku) {
  return sku.op + ", " + sku.kernel + ", " + sku.backend + ", " + sku.dtypes;
}

const char* to_string(WeightRounding rounding) {
  constexpr std::array<Word<WeightRounding>, 3> kWords{{{WeightRounding::none, "none"},
                                                        {WeightRounding::code_rounded, "code-rounded"},
                                                        {WeightRounding::weight_rounded, "weight-rounded"}}};
  return word_of(kWords, rounding);
}

}  // namespace halfbyte
