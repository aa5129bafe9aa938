#include "ops/qgemm/qgemm.h"

#include <algorithm>
#include <array>

#include "core/arithmetic.h"
#include "core/expect.h"
#include "core/format.h"
#include "core/packed_weight.h"
#include "core/tensor_check.h"
#include "core/weight_view.h"
#include "core/words.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

constexpr std::array<Word<QgemmMath>, 4> kMaths{{{QgemmMath::automatic, "auto"},
                                                 {QgemmMath::tf32, "tf32"},
                                                 {QgemmMath::f64, "f64"},
                                                 {QgemmMath::int8, "int8"}}};

}  // namespace

const char* to_string(QgemmMath math) { return word_of(kMaths, math); }
QgemmMath parse_qgemm_math(std::string_view word) { return value_of(kMaths, word, "math of qgemm"); }

// ---- Descriptors

void check_descriptor(const QgemmDescriptor& d) {
  constexpr const char* kWhat = "qgemm descriptor";
  const auto check_extent = [&](const char* name, int64_t extent) {
    HALFBYTE_CHECK(extent >= 0 && extent <= kMaxWeightExtent, usage, "{}: {} must be 0 to 2^40, got {}",
                   kWhat, name, extent);
  };
  check_extent("m", d.m);
  check_extent("n", d.n);
  check_extent("k", d.k);
  HALFBYTE_MUST(d.dtype == DType::bf16 || d.dtype == DType::f16 || d.dtype == DType::f32, unsupported, kWhat,
                "dtype", "be", "bf16, f16 or f32", to_string(d.dtype));
  if (d.packed)
    packed_layout_of(d.spec, d.n, d.k);
  else
    view_layout_of(d.spec, d.n, d.k, d.layout);
  contiguous_bytes(DType::f64, std::array{d.m, d.n});
  contiguous_bytes(DType::f64, std::array{d.m, d.k});
  HALFBYTE_CHECK(!d.bias || !d.transposed, usage, "{}: bias must be false where transposed is true", kWhat);
  const bool int8 = d.math == QgemmMath::int8;
  HALFBYTE_CHECK(d.math == QgemmMath::automatic || int8 || d.dtype == DType::f32, usage,
                 "{}: math {} needs dtype f32, got {}", kWhat, to_string(d.math), to_string(d.dtype));
  HALFBYTE_CHECK(!int8 || !d.transposed, usage,
                 "{}: math int8 needs transposed false: rows of the weight have scales of their own", kWhat);
  HALFBYTE_CHECK(!int8 || info(d.spec.format).kind != FormatKind::floating, usage,
                 "{}: math int8 needs codes that are integers or of a table, got format {}", kWhat,
                 info(d.spec.format).name);
  check_alignment(kWhat, d.alignment, d.dtype);
  HALFBYTE_MUST(d.tile.m >= 0 && d.tile.n >= 0, invalid_problem, kWhat, "tile", "not be", "negative",
                fmt::format("{} x {}", d.tile.m, d.tile.n));
  std::string known;
  for (const QgemmVariant* variant : qgemm_variants({})) {
    if (d.variant == variant->name) return;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", variant->name);
  }
  HALFBYTE_CHECK(d.variant.empty(), usage, "{}: variant must be empty or one of {}, got '{}'", kWhat, known,
                 d.variant);
}

// ---- Variants

namespace {

// What these conditions know is measured by `halfbyte bench qgemm --variant NAME --m M,... --shape NxK,...`,
// of one variant and the other; bench/RESULTS.md has the tables.

// What qgemm_sm90_mma takes to load x pays for one row of x, or where a block multiplies it with many rows of
// the weight. On an H200, with 8 rows of x it is ahead of qgemm_sm90_wgmma at n = 28672 and behind at 14336;
// beyond 8192 columns, where it loads x anew for each slice, it is behind with one row, too.
bool loading_x_pays(const QgemmProblem& p) { return p.k <= 8192 && (p.m == 1 || p.n > 16384); }

// Of experts, qgemm_sm90_large has tiles of 256 columns of y and few rows of x, but where a row of the weight
// has one scale. From the rows on that it asks for, they take 0.58 to 1 times as long as the variants below,
// up to 21 rows an expert, on an H100 (16 rows, 128 experts of 2048x768 53 us for 58, 256 of 7168x256 140 for
// 213).
bool wide_tiles_pay(const QgemmProblem& p) { return p.experts.num > 0 && p.weight.groups > 1; }

// Of experts, with one or two rows of x for each of a few, qgemm_sm90_transposed and qgemm_sm90_wgmma need
// long tiles, or many. 8 of 256 experts, one row each, us, before those of qgemm_sm80: transposed 64x7168 7.2
// and 6.7, 128x7168 7.7 and 7.4, 256x7168 9.0 and 10.9, 7168x256 14.1 and 13.3; forward 7168x64 7.9 and 6.8,
// 7168x128 7.1 (of qgemm_sm80 not recorded), 7168x256 8.7 and 9.3. With 16 rows they are ahead in all of
// these (H200). Of 8 bits qgemm_sm90_transposed takes 1.16 to 1.19 times as long as qgemm_sm80 with 256 rows
// of the weight; with more than 20 rows of x an expert qgemm_sm90_large is faster than either.
bool tiles_are_short_or_few(const QgemmProblem& p) {
  constexpr int64_t kFewRows = 12;
  const int64_t experts = p.experts.num;
  if (experts == 0) return false;
  if (!p.transposed) return p.m <= kFewRows && p.k <= 128;
  const bool are_few = std::min(p.m, experts) * ceil_div(p.k, formats::kUnitCols) < 64;
  if (p.codec.bits == 4) return p.m <= kFewRows && (p.n < 256 || are_few);
  return p.m <= 20 * experts && (p.n < 512 || are_few);
}

// Transposed, qgemm_sm90_large takes 0.54 to 0.96 times as long as qgemm_sm90_transposed with 33 to 64 rows
// of x, and with 17 to 32 rows 0.64 to 0.9 times if it sums much or has few tiles, else up to 1.17 times:
// where it has tiles of 64 columns of y for all multiprocessors of an H200 at once, and four warpgroups for
// each. Likewise where tiles of 256 columns leave few multiprocessors without: 0.75 to 0.94 times; where they
// leave more, up to 1.06 times.
// Forward, qgemm_sm90_wgmma takes 1.32 to 1.6 times as long with 33 rows as with 32 where multiprocessors in
// pairs have more than one tile each. There qgemm_sm90_large takes 0.76 to 1.02 times as long, where it has
// tiles of 64 columns for all at once, or takes tiles of 48 rows; else 0.82 to 1.08 times. Of up to 1024 rows
// of the weight it takes 0.69 to 0.84 times as long, of sums of eight times as many columns 0.73 to 0.95 with
// 17 to 32 rows, too. Of others it takes 0.9 to 1.24 times as long, as it does of codes of 8 bits or with one
// scale a row; it has to gain, since qgemm_sm90_wgmma rounds no scaled weights.
bool many_rows_pay(const QgemmProblem& p) {
  constexpr int64_t kMultiprocessors = 132, kColumns = 64, kWideColumns = 256, kWideRows = 48;
  if (p.experts.num > 0 || p.m <= 16 || p.m > 64) return false;
  const bool at_once = p.out_cols() <= kMultiprocessors * kColumns;
  if (!p.transposed) {
    if (p.codec.bits != 4 || p.weight.groups == 1) return false;
    if (p.m <= 32) return p.k >= 8 * p.n;
    return p.n <= 1024 || (p.n > kMultiprocessors / 2 * kColumns && (at_once || p.m <= kWideRows));
  }
  if (at_once) return p.m > 32 || p.n >= 6144 || p.k <= 512;
  const int64_t tiles = ceil_div(p.k, kWideColumns), places = formats::round_up(tiles, kMultiprocessors);
  return p.m > 32 && tiles * 5 >= places * 4;
}

// Of f32, with 3 and 4 rows of x, qgemm_sm90_split takes 0.86 to 0.98 of the time of qgemm_sm90_f32 where
// codes are exact as bf16, and 1.2 to 1.43 times where they are looked up (4096x4096, 8192x8192, H200).
// Transposed it takes 1.03 and 0.79 of the time of qgemm_sm90_f32_transposed, with 3 and 4 rows, where it
// applies the scale to x, which depends on groups, else 2 and 1.6 times (8192x8192).
bool short_codes_pay(const QgemmProblem& p) {
  const formats::Kind kind = p.codec.kind;
  if (p.dtype != DType::f32 || (kind != formats::Kind::integer && kind != formats::Kind::floating))
    return false;
  return p.transposed ? p.m > 3 && (p.group % 64 == 0 || p.group >= p.k) : p.m > 2;
}

// Decoding the weight once costs 0 to 6 % of a product with 8192 rows, and twice that with 4096.
// qgemm_sm90_large is 4 to 8 % behind cuBLAS on an H200, but for forward products of groups of 128 columns
// and more, where it is as fast. Transposed it is 10 to 50 % behind where the weight is small, or has more
// parameters than scales, but for those of 4 bits that it computes: with more than 1024 rows, decoding takes
// 0.77 to 1.05 times as long there, up to 2048 x 2048 with 640 rows 0.87 to 1.03 times.
bool decoding_pays(const QgemmProblem& p) {
  if (p.m >= 6144) return p.transposed || p.group < 128;
  if (!p.transposed) return false;
  if (p.m <= 1024) return p.m >= 640 && p.n <= 2048 && p.k <= 2048;
  const bool small = static_cast<double>(p.n) * static_cast<double>(p.k) <= 3072.0 * 3072;
  return small || p.double_quant || (p.codec.bits != 4 && (p.weight.has_biases || p.codec.asymmetric));
}

// A view is read by qgemm_simt and qgemm_ref only. To pack it first takes as long as to read and write the
// weight. On an H200, qgemm_simt streams a view past at most 8 rows of x; with more it takes 68 us for 16
// rows and 821 for 512 where a packed weight of 4096 x 4096 takes 7 and 28. On the CPU qgemm_ref takes 12 to
// 20 times as long as packing and the product with one row of x, 5 to 8 times with 64.
constexpr int64_t kStreamedRows = 8;
bool packing_pays(const QgemmProblem& p) {
  return !p.packed && p.weight.num_bytes > 0 && (p.device.kind == DeviceKind::cpu || p.m > kStreamedRows);
}

// Forward, with one and two rows of x, tiles of AMX take 0.75 to 0.85 of the time of qgemm_avx512 where codes
// of 4 bits stand for the same in every row: decoding takes little then, and several groups fill the tiles.
// Other codes take 1.2 to 1.8 times as long, and no less for two rows; of four 0.7 to 1.1.
bool tiles_are_empty(const QgemmProblem& p) {
  return !p.transposed && p.m <= 2 && (p.codec.bits != 4 || p.codec.asymmetric);
}

// Transposed, with a few rows of x, products of bf16 take longer to prepare than to compute on a Xeon with
// AMX: those of f32 take 0.55 to 0.98 of the time of either other variant up to two rows, and 0.54 to 0.9 of
// four, but where x is scaled for tiles in place of the weight: there three and four take 1.02 to 1.2.
bool f32_products_pay(const QgemmProblem& p) {
  if (p.device.kind != DeviceKind::cpu || !p.transposed || p.m > 4 || !kQgemmAmx.refuse(p).empty())
    return false;
  const bool x_is_scaled =
      p.codec.bits == 4 && !p.codec.asymmetric && !p.weight.has_biases && p.group >= formats::kUnitCols;
  return p.m <= 2 || !x_is_scaled;
}

// The order in which variants are tried, from the top. A row with a condition is for problems that meet it; a
// variant is tried where it comes first.
struct Row {
  const QgemmVariant* variant;
  bool (*when)(const QgemmProblem& problem) = nullptr;
};
constexpr Row kOrder[] = {
    // CUDA: few rows of x
    {&kQgemmSm90Large, &wide_tiles_pay},
    {&kQgemmSm80, &tiles_are_short_or_few},
    {&kQgemmSm90Large, &many_rows_pay},
    {&kQgemmSm90Mma, &loading_x_pays},
    {&kQgemmSm90Wgmma},
    {&kQgemmSm90Mma},
    {&kQgemmSm90Transposed},
    {&kQgemmSm90Split, &short_codes_pay},
    {&kQgemmSm90F32},
    {&kQgemmSm90F32Transposed},
    {&kQgemmSm90Split},
    // many
    {&kQgemmCublas, &decoding_pays},
    {&kQgemmSm90Large},
    {&kQgemmCublas},
    // any
    {&kQgemmSm80},
    {&kQgemmSimt},
    // The CPU
    {&kQgemmInt8},
    {&kQgemmSimd, &f32_products_pay},
    {&kQgemmAvx512, &tiles_are_empty},
    {&kQgemmAmx},
    {&kQgemmAvx512},
    {&kQgemmSimd},
    {&kQgemmRef},
};

}  // namespace

std::vector<const QgemmVariant*> qgemm_variants(const QgemmProblem& problem) {
  std::vector<const QgemmVariant*> variants;
  for (const auto& [variant, when] : kOrder)
    if ((!when || when(problem)) && std::ranges::find(variants, variant) == variants.end())
      variants.push_back(variant);
  return variants;
}

namespace {

// For threads_for. Vectors decode four weights in the time of an element, and then add 16 products; qgemm_ref
// takes about 16 times as long, and has the views that cannot be packed and the sums in f64.
double work_of(const QgemmProblem& p) {
  const bool by_vectors = p.weight.num_bytes > 0 && p.math != QgemmMath::f64;
  return static_cast<double>(p.n) * static_cast<double>(p.k) * static_cast<double>(p.m + 3) /
         (by_vectors ? 16 : 1);
}

}  // namespace

QgemmProblem product_of_expert(const QgemmProblem& problem, int64_t m, int num_threads) {
  QgemmProblem one = problem;
  one.m = m;
  one.experts = {};
  one.bias = one.accumulate = false;
  one.f32_sums = true;
  one.num_threads = threads_for(num_threads, work_of(one));
  return one;
}

QgemmProblem make_qgemm_problem(Device device, const QgemmDescriptor& d, int num_threads) {
  QgemmProblem problem;
  problem.device = device;
  problem.transposed = d.transposed;
  problem.m = d.m;
  problem.n = d.n;
  problem.k = d.k;
  problem.dtype = d.dtype;
  problem.codec = make_codec(d.spec);
  problem.codec.rule = {};
  problem.double_quant = d.spec.double_quant;
  problem.packed = d.packed;
  if (d.packed)
    problem.weight = packed_layout_of(d.spec, d.n, d.k);
  else
    problem.view = view_layout_of(d.spec, d.n, d.k, d.layout);
  if (!d.packed && !problem.view.flat) problem.weight = packed_layout_of(d.spec, d.n, d.k);
  problem.group = d.packed ? problem.weight.group : problem.view.group;
  problem.bias = d.bias;
  problem.accumulate = d.accumulate;
  problem.math = d.math;
  problem.early_start = d.early_start;
  problem.alignment = d.alignment;
  problem.tile = d.tile;
  problem.num_threads = threads_for(num_threads, work_of(problem));
  return problem;
}

namespace {

// Why a variant does not take a problem; empty if it does.
std::string reason_of(const QgemmVariant& variant, const QgemmProblem& problem) {
  if (variant.device != problem.device.kind)
    return variant.device == DeviceKind::cpu ? "it is for the CPU" : "it is for CUDA devices";
  if (problem.in_cols() == 0 && !variant.takes_empty_sums) return "there is nothing to sum";
  if (problem.math == QgemmMath::int8 && !variant.takes_int8) return "math must not be int8";
  if (problem.experts.num > 0 && variant.device == DeviceKind::cuda && !variant.takes_experts)
    return "it takes one weight, not those of experts";
  return variant.refuse(problem);
}

// With the weight packed by the kernels before this one, which may therefore not start early.
QgemmProblem packed_first(QgemmProblem problem) {
  problem.packed = true;
  problem.group = problem.weight.group;
  problem.early_start = false;
  return problem;
}

// What a variant takes: the problem as it is, else with the view packed first; else the reason why not.
QgemmChoice choice_of(const QgemmVariant& variant, const QgemmProblem& problem) {
  QgemmChoice choice{variant.name, reason_of(variant, problem)};
  if (choice.reason.empty() || !packing_pays(problem)) return choice;
  choice.reason = reason_of(variant, packed_first(problem));
  choice.packs = choice.reason.empty();
  return choice;
}

}  // namespace

QgemmChosen choose_qgemm(const QgemmProblem& problem, const std::string& name) {
  std::string reasons;
  for (const QgemmVariant* variant : qgemm_variants(problem)) {
    if (name.empty() ? variant->device != problem.device.kind : name != variant->name) continue;
    const QgemmChoice choice = choice_of(*variant, problem);
    if (choice.reason.empty()) return {*variant, choice.packs ? packed_first(problem) : problem};
    reasons += fmt::format("; {}: {}", variant->name, choice.reason);
  }
  throw Error(
      ErrorCode::device,
      fmt::format("qgemm: {}{}",
                  name.empty() ? "no variant takes this" : "descriptor.variant does not take this", reasons),
      ErrorDetails{ErrorKind::unsupported});
}

std::vector<QgemmChoice> explain_problem(const QgemmProblem& problem) {
  std::vector<const QgemmVariant*> variants = qgemm_variants(problem);
  // clang 14 cannot read what the form of std::ranges returns.
  std::stable_partition(variants.begin(), variants.end(),
                        [&](const QgemmVariant* variant) { return variant->device == problem.device.kind; });
  std::vector<QgemmChoice> choices;
  for (const QgemmVariant* variant : variants)
    choices.push_back(problem.is_empty() ? QgemmChoice{variant->name, "y has no elements"}
                                         : choice_of(*variant, problem));
  return choices;
}

std::vector<QgemmChoice> explain_qgemm(Device device, const QgemmDescriptor& descriptor) {
  check_descriptor(descriptor);
  check_device(device);
  return explain_problem(make_qgemm_problem(device, descriptor, 0));
}

}  // namespace halfbyte
