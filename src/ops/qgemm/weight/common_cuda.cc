#include "ops/qgemm/weight/common_cuda.h"

#include <algorithm>
#include <array>

#include "core/format.h"

namespace halfbyte {
namespace {

using formats::Codec;
using formats::Kind;
using formats::ScaleType;

// ---- Weights

constexpr unsigned bit(ScaleType type) { return 1u << static_cast<int>(type); }
constexpr unsigned kF32 = bit(ScaleType::f32), kF16 = bit(ScaleType::f16), kBf16 = bit(ScaleType::bf16);
constexpr unsigned kE4m3 = bit(ScaleType::e4m3), kE8m0 = bit(ScaleType::e8m0);
// Sets of groups; kRow: a row has one scale.
constexpr unsigned k16 = 1, k32 = 2, k64 = 4, k128 = 8, kRow = 16;

struct CommonWeight {
  int bits;
  Kind kind;  // integers, and tables alike: they have the same kernels
  bool asymmetric, double_quant;
  unsigned scales, groups;
};
// What layouts store.
constexpr CommonWeight kCommonWeights[] = {
    {4, Kind::integer, false, true, kF32, k64},
    {4, Kind::integer, false, false, kF32 | kF16 | kBf16, k16 | k32 | k64 | k128 | kRow},
    {4, Kind::integer, false, false, kE4m3, k16},
    {4, Kind::integer, false, false, kE8m0, k32},
    {4, Kind::integer, true, false, kF32 | kF16 | kBf16, k16 | k32 | k64 | k128 | kRow},
    {8, Kind::integer, false, false, kF32 | kF16 | kBf16, k32 | k64 | k128 | kRow},
    {8, Kind::integer, true, false, kF16 | kBf16, k128 | kRow},
    {4, Kind::affine, false, false, kF16 | kBf16, k32 | k64 | k128},
    {8, Kind::affine, false, false, kF16 | kBf16, k32 | k64 | k128},
    {8, Kind::floating, false, false, kF32 | kF16 | kBf16, k128 | kRow},
};

unsigned group_bit(const QgemmProblem& problem) {
  switch (inlined_group(problem)) {
    case 16:
      return k16;
    case 32:
      return k32;
    case 64:
      return k64;
    case 128:
      return k128;
    default:
      return problem.weight.groups == 1 ? kRow : 0;
  }
}

// ---- Tiles

struct SpillingTile {
  std::string_view kernel;
  bool (*is)(const QgemmProblem& problem, const QgemmTileOf& tile);
  const char* reason;
};
// What ptxas spills registers of, as `halfbyte_kernel_tests --gtest_filter='JitCompile*'` finds.
constexpr SpillingTile kSpillingTiles[] = {
    {"qgemm_sm90_wgmma",
     [](const QgemmProblem&, const QgemmTileOf& t) { return t.tokens == 32 && t.strips == 2 && t.shared; },
     "blocks must not share a tile of 32 rows of x and 64 of the weight"},
    {"qgemm_sm90_wgmma",
     [](const QgemmProblem& p, const QgemmTileOf& t) {
       return p.experts.num > 0 && t.tokens == 32 && t.strips > 4;
     },
     "of experts, a tile of 32 rows of x must have at most 128 rows of the weight"},
    {"qgemm_sm90_transposed",
     [](const QgemmProblem& p, const QgemmTileOf&) {
       return p.codec.bits == 8 && (p.weight.has_zeros || p.weight.has_biases || p.double_quant);
     },
     "codes of 8 bits must have no zero points, biases or double quantization"},
};

}  // namespace

int inlined_group(const QgemmProblem& problem) {
  return problem.weight.inlined ? static_cast<int>(problem.weight.group) : 0;
}

bool is_common_weight(const QgemmProblem& problem) {
  const Codec& codec = problem.codec;
  // Scales have the dtype of x, are f16 as in layout halfbyte, or f32.
  if (codec.scale_type == ScaleType::bf16 && problem.dtype != DType::bf16) return false;
  const Kind kind = codec.kind == Kind::table ? Kind::integer : codec.kind;
  return std::ranges::any_of(kCommonWeights, [&](const CommonWeight& common) {
    return common.bits == codec.bits && common.kind == kind && common.asymmetric == codec.asymmetric &&
           common.double_quant == problem.double_quant && (common.scales & bit(codec.scale_type)) != 0 &&
           (common.groups & group_bit(problem)) != 0;
  });
}

std::string refuse_streams(const QgemmProblem& problem) {
  const int bits = problem.codec.bits;
  return formats::in_fragments(bits) ? "" : fmt::format("codes must have 4 or 8 bits, got {}", bits);
}

std::string refuse_rare_weight(const QgemmProblem& problem) {
  if (std::string reason = refuse_streams(problem); !reason.empty()) return reason;
  if (is_common_weight(problem)) return "";
  constexpr std::array kKinds = {"a table", "integers", "affine integers", "floating codes"};
  constexpr std::array kScales = {"f32", "f16", "bf16", "f64", "f8_e4m3", "f8_e8m0"};
  const Codec& codec = problem.codec;
  return fmt::format(
      "x and the weight must go together as in a layout (docs/kernels.md), got {} x, {}{} of {} bits, {} "
      "scales{} "
      "for {} columns",
      to_string(problem.dtype), kKinds[static_cast<size_t>(codec.kind)],
      codec.asymmetric ? " with zero points" : "", codec.bits, kScales[static_cast<size_t>(codec.scale_type)],
      problem.double_quant ? ", double quantized," : "", problem.group);
}

std::string refuse_range(const QgemmProblem& problem) {
  if (problem.codec.scale_type != ScaleType::e8m0 || problem.dtype != DType::f16) return "";
  return "weights are rounded to the dtype of x: with scales f8_e8m0, which f16 does not hold, it must be "
         "bf16";
}

std::string refuse_spilling(const QgemmProblem& problem, const QgemmTileOf& tile) {
  for (const auto& [kernel, is, reason] : kSpillingTiles)
    if (kernel == tile.kernel && is(problem, tile)) return reason;
  return "";
}

}  // namespace halfbyte
