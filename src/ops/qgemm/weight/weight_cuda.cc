#include "ops/qgemm/weight/weight_cuda.h"

#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "core/format.h"

namespace halfbyte {

using formats::Codec;
using formats::Divider;
using formats::Kind;
using formats::ScaleType;

std::string byte_scales_config(const QgemmProblem& problem) {
  const ScaleType type = problem.codec.scale_type;
  return fmt::format("constexpr ScaleType kByteScales = ScaleType({});\n",
                     static_cast<int>(formats::scale_bytes(type) == 1 ? type : ScaleType::f32));
}

std::string packed_config(const QgemmProblem& problem) {
  const Codec& codec = problem.codec;
  return byte_scales_config(problem) +
         fmt::format(
             "constexpr int kBits = {};\n"
             "constexpr bool kAsymmetric = {}, kAffine = {}, kFloating = {}, kDoubleQuant = {};\n"
             "constexpr int kParameterBytes = {};\n",
             static_cast<int>(codec.bits), codec.asymmetric, codec.kind == Kind::affine,
             codec.kind == Kind::floating, problem.double_quant, formats::scale_bytes(codec.scale_type));
}

std::string bf16_scales_config(const QgemmProblem& problem) {
  return fmt::format("constexpr bool kBf16Scales = {};\n",
                     problem.codec.scale_type == formats::ScaleType::bf16);
}

std::array<float, 16> code_values(const Codec& codec, DType dtype) {
  const bool is_signed = codec.kind == Kind::integer && !codec.asymmetric;
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) {
    const float value = codec.kind == Kind::table ? codec.book.values[code]
                                                  : static_cast<float>(is_signed ? code + codec.q_min : code);
    values[static_cast<size_t>(code)] = formats::stored(value, scale_type(dtype));
  }
  return values;
}

CodeValuesArgs code_values_args(const Codec& codec, DType dtype) {
  const std::array<float, 16> values = code_values(codec, dtype);
  CodeValuesArgs args{};
  for (size_t code = 0; code < values.size(); ++code) {
    const unsigned bits =
        dtype == DType::f16 ? formats::to_f16(values[code]) : formats::to_bf16(values[code]);
    args.low[code / 4] |= (bits & 0xFF) << code % 4 * 8;
    args.high[code / 4] |= bits >> 8 << code % 4 * 8;
  }
  return args;
}

WeightArgs weight_args(const QgemmProblem& p) {
  WeightArgs w{};
  const formats::PackedLayout& layout = p.weight;
  const formats::WeightViewLayout& view = p.view;
  const bool one_group = !p.packed && view.one_group;
  w.n = p.n;
  w.k = p.k;
  // Rows of whole groups have groups of their own.
  w.flat = !p.packed && view.flat && p.k % p.group != 0;
  w.group = one_group ? std::max<int64_t>(p.k, 1) : p.group;
  w.groups = one_group ? 0 : ceil_div(p.k, w.group);
  w.whole_chunks = !w.flat && (w.group >= p.k || w.group % kWeightChunk == 0);
  w.group_chunks = Divider::of(ceil_div(w.group, kWeightChunk));
  w.scale_type = static_cast<formats::u8>(p.codec.scale_type);
  w.zero = -p.codec.q_min;
  std::ranges::copy(p.codec.book.values, w.values);
  if (p.packed) {
    w.strip_bytes = layout.strip_bytes;
    w.block_bytes = layout.block_bytes;
    w.block_shift = std::countr_zero(static_cast<unsigned>(layout.block_cols));
    const int64_t groups_per_block = layout.inlined ? layout.block_cols / layout.group : 1;
    w.group_shift = std::countr_zero(static_cast<uint64_t>(groups_per_block));
    const auto place = [&](int64_t section, int bytes_before, int size) -> PackedParameterArgs {
      if (layout.inlined)
        return {layout.block_code_bytes + groups_per_block * bytes_before * formats::kUnitRows,
                layout.strip_bytes, layout.block_bytes};
      const int64_t group_bytes = int64_t{formats::kUnitRows} * size;
      return {section, layout.groups * group_bytes, group_bytes};
    };
    w.scale = place(layout.scales, 0, layout.scale_bytes);
    if (layout.has_zeros) w.other = place(layout.zeros, layout.scale_bytes, 1);
    if (layout.has_biases) w.other = place(layout.biases, layout.scale_bytes, layout.bias_bytes);
    return w;
  }
  w.row_bits = view.flat_codes ? p.k * view.bits : view.row_bytes * 8;
  w.num_bytes = view.code_bytes();
  w.wide = p.alignment >= 4 && w.row_bits % 32 == 0;
  w.zero_words = view.zero_words;
  return w;
}

void place_weight(WeightArgs& w, const QgemmProblem& problem, const QgemmTensors& tensors) {
  const bool packed = problem.packed;
  w.codes = static_cast<const formats::u8*>(packed ? tensors.weight : tensors.codes);
  w.scales = packed ? tensors.weight : tensors.scales;
  if (problem.codec.asymmetric) w.zeros = packed ? tensors.weight : tensors.zeros;
  w.biases = packed ? tensors.weight : tensors.biases;
  const auto section = [&](int64_t offset) {
    return reinterpret_cast<const float*>(static_cast<const char*>(tensors.weight) + offset);
  };
  if (problem.codec.scale_type == ScaleType::e4m3)
    w.global_scale = packed ? section(problem.weight.global_scale) : tensors.global_scale;
  if (!problem.double_quant) return;
  w.absmax = packed ? section(problem.weight.absmax) : tensors.absmax;
  w.map = packed ? section(problem.weight.map) : tensors.map;
  w.offset = packed ? section(problem.weight.offset) : tensors.offset;
}

}  // namespace halfbyte
