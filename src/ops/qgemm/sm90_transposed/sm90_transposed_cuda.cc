#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/tensor_map.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_transposed/sm90_transposed_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int kMaxTokens = 64;
// Of an expert, on average: with more, qgemm_sm90_large is ahead
// (`halfbyte bench qgemm --experts 128 --top-k 8 --direction transposed --m 64,256,512` with --variant of one
// and the other).
constexpr int64_t kMostExpertRows = 20;
constexpr int kMaxStages = 8;
constexpr int kSharedBytes = 227 * 1024;  // of a block of sm_90

// Why there are no kernels for the weight; empty if there are.
std::string refuse_weight(const QgemmProblem& p) {
  if (std::string reason = refuse_rare_weight(p); !reason.empty()) return reason;
  if (std::string reason = refuse_range(p); !reason.empty()) return reason;
  return refuse_spilling(p, {"qgemm_sm90_transposed"});
}

std::string refuse_experts(const QgemmProblem& p) {
  if (std::string reason = refuse_sm90_experts(p); !reason.empty()) return reason;
  if (const int64_t rows = ceil_div(p.m, p.experts.num); rows > kMostExpertRows)
    return fmt::format("experts must have at most {} rows on average, got {}", kMostExpertRows, rows);
  // 32 bits hold the number of a tile.
  if (const int64_t tiles = ceil_div(p.k, formats::kUnitCols), rows = tiles_of_rows(p, 1);
      rows > std::numeric_limits<int32_t>::max() / tiles)
    return fmt::format("of experts, rows of x times k / 64 must be at most 2^31 - 1, got {} times {}", rows,
                       tiles);
  return "";
}

std::string refuse(const QgemmProblem& p) {
  if (std::string reason = refuse_other_than_sm90(p); !reason.empty()) return reason;
  if (!p.transposed) return "it is for transposed products";
  if (!p.packed) return "the weight is not packed";
  if (p.dtype == DType::f32) return "it is for bf16 and f16, got f32";
  if (p.experts.num == 0 && p.m > kMaxTokens)
    return fmt::format("m must be at most {}, got {}", kMaxTokens, p.m);
  if (p.experts.num > 0)
    if (std::string reason = refuse_experts(p); !reason.empty()) return reason;
  if (p.tile != QgemmTile{}) return "tile is for qgemm_simt";
  if (std::string reason = refuse_weight(p); !reason.empty()) return reason;
  constexpr int64_t kLongest = int64_t{1} << 24;  // a strip of 8-bit codes then has less than 2^32 bytes
  if (p.n > kLongest || p.k > kLongest)
    return fmt::format("n and k must be at most {}, got {} and {}", kLongest, p.n, p.k);
  return "";
}

// Of experts, rows of x of a tile. With codes of 4 bits, of up to 20 rows an expert, two tiles of 16 are
// faster than one of 32, which takes 2.1 times as long; with more than 32 ptxas spills registers.
int most_expert_tokens(const QgemmProblem& p) { return p.codec.bits == 4 ? 16 : 32; }
// Rows of x of a tile: m rounded up. Of experts with codes of 4 bits 8, unless many have more: a tile of 16
// takes 1.18 times as long (512x7168, 256 experts, 128 and 192 tokens).
int tokens_of(const QgemmProblem& p) {
  if (p.experts.num > 0 && p.codec.bits == 4)
    return likely_expert_tiles(p, 8) <= 1.18 * likely_expert_tiles(p, 16) ? 8 : 16;
  const auto rows = static_cast<uint64_t>(std::max<int64_t>(rows_of_weight(p), 8));
  return std::min(static_cast<int>(std::bit_ceil(rows)),
                  p.experts.num > 0 ? most_expert_tokens(p) : kMaxTokens);
}

// All that a tile needs, with as many stages as fit.
QgemmSm90TransposedTiling tiling_of(const QgemmProblem& problem, int tokens, int units, bool finds_rows) {
  QgemmSm90TransposedTiling tiling{};
  tiling.tokens = tokens;
  tiling.units = units;
  tiling.bits = problem.codec.bits;
  tiling.group = inlined_group(problem);
  tiling.parameter_bytes =
      problem.weight.scale_bytes + problem.weight.bias_bytes + (problem.weight.has_zeros ? 1 : 0);
  tiling.double_quant = problem.double_quant;
  tiling.experts = problem.experts.num > 0;
  tiling.finds_rows = finds_rows && tiling.can_find_rows();
  tiling.stages = kMaxStages;
  while (tiling.shared_bytes() > kSharedBytes) --tiling.stages;
  return tiling;
}

// Whether there is such a kernel. Of some for experts, ptxas spills registers.
bool can_be(const QgemmSm90TransposedTiling& t) {
  const bool has_many_parameters = t.bits == 8 || (t.group == 16 && t.parameter_bytes > 4);
  return t.fits() && !(t.experts && t.tokens == 16 && t.units == 2 && has_many_parameters);
}

// By kernels of their own: those that may do either take about 5 % longer. Where each warp gathers rows of x
// for much that is summed, that takes longer than to copy them before: 28672x4096, 8 experts, 4 tokens 113 us
// for 106.
bool finds_rows(const QgemmProblem& p) {
  constexpr int64_t kLongest = 8192;
  return p.in_cols() <= kLongest && finds_expert_rows(p, kTransposedFoundRows);
}

struct Division {
  int units = 1;          // of 64 columns, that a tile has
  int cluster = 1;        // blocks that share the rows of a tile
  int tiles_at_once = 1;  // of a block, whose warps are divided among them
};

// Where stages flow, of so many tiles a multiprocessor, in us of an H200: the share of a warp's step in what
// all of them read and decode; the steps of one, which follow each other; the ends of tiles. It costs a
// little more that more tiles are under way, or have one unit. Of tiles of one and two units, 1 to 16 at
// once, these constants choose the fastest for 512x7168 (256 experts, 8 of them for each of 1, 4, 16 and 64
// tokens), 1536x2048 and 2048x768 (128, 8; 4 and 16), 28672x4096 and 4096x14336 (8, 2; 4 and 16):
// `halfbyte bench qgemm --direction transposed --experts 256 --top-k 8 --shape 512x7168 --m 1,4,16,64`.
double flowing_time(const QgemmProblem& p, const QgemmSm90TransposedTiling& tiling, double tiles,
                    int at_once) {
  constexpr double kShare = 0.066, kStep = 0.2, kRound = 1.8, kMoreAtOnce = 1.03, kSingle = 1.12;
  const auto steps = static_cast<double>(ceil_div(p.weight.strips, tiling.strips()));
  const double of_warp = std::ceil(steps * at_once / tiling.teams());
  const double time =
      std::ceil(tiles) * steps * kShare + std::ceil(tiles / at_once) * (of_warp * kStep + kRound);
  return time * std::pow(kMoreAtOnce, std::log2(at_once)) * (tiling.units == 1 ? kSingle : 1);
}

// What takes the least time by this model, in units of the packed layout: those of a tile of one unit come in
// smaller copies; a round, and more so one of clusters, has a begin and an end. The constants are of an H200;
// what is chosen by them is timed by
// `halfbyte bench qgemm --direction transposed --m 8,16,32,64 --model llama-8b,llama-70b`.
Division choose_division(const QgemmProblem& p, int num_multiprocessors) {
  constexpr double kRound = 70, kClusterRound = 30;
  const int tokens = tokens_of(p);
  const double single = tokens <= 8 ? 1.2 : tokens <= 16 ? 1.05 : 1.4;
  Division best;
  double least = std::numeric_limits<double>::max();
  for (const int units : {2, 1}) {
    const QgemmSm90TransposedTiling tiling = tiling_of(p, tokens, units, finds_rows(p));
    if (!can_be(tiling)) continue;
    const double tiles =
        static_cast<double>(ceil_div(p.k, units * formats::kUnitCols)) * likely_expert_tiles(p, tokens);
    const double unit = units * (units == 1 ? single : 1);
    const auto consider = [&](const Division& division, double time) {
      if (time >= least) return;
      best = division;
      least = time;
    };
    if (tiling.flows()) {
      for (const int at_once : {1, 2, 4, 8, 16})
        consider({units, 1, at_once}, flowing_time(p, tiling, tiles / num_multiprocessors, at_once));
      continue;
    }
    for (const int cluster : {1, 2}) {
      const int clusters = num_multiprocessors / cluster;
      const double rounds = std::ceil(tiles / clusters);
      const double tile = static_cast<double>(p.weight.strips) * unit / cluster;
      consider({units, cluster, 1}, rounds * (tile + kRound + (cluster - 1) * kClusterRound));
    }
  }
  return best;
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem, const QgemmSm90TransposedTiling& t) {
  return {"ops/qgemm/sm90_transposed/sm90_transposed.cu", "qgemm_sm90_transposed",
          cuda::config_text(cuda::element_config(problem.dtype) + packed_config(problem) +
                            fmt::format("constexpr int kGroup = {};\n", t.group) +
                            cuda::struct_config("QgemmSm90TransposedTiling", "kTiling",
                                                {{"tokens", t.tokens},
                                                 {"units", t.units},
                                                 {"bits", t.bits},
                                                 {"group", t.group},
                                                 {"parameter_bytes", t.parameter_bytes},
                                                 {"double_quant", t.double_quant},
                                                 {"experts", t.experts},
                                                 {"finds_rows", t.finds_rows},
                                                 {"stages", t.stages}}))};
}

class QgemmSm90Transposed : public QgemmOneKernel<QgemmSm90TransposedArgs> {
 public:
  explicit QgemmSm90Transposed(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const Division division = choose_division(problem, context_.num_multiprocessors);
    tiling_ = tiling_of(problem, tokens_of(problem), division.units, finds_rows(problem));
    const bool has_experts = problem.experts.num > 0;
    if (has_experts) {
      args_.experts = experts_args(problem);
      if (!tiling_.finds_rows) list_expert_rows(tiling_.tokens, 1);
    } else if (!has_aligned_x(problem)) {
      stage_x(1);
    }
    const formats::PackedLayout& layout = problem.weight;
    describe_sections(args_, layout);
    args_.absmax_count = static_cast<formats::u32>(ceil_div(layout.n * layout.groups, 256));
    args_.groups = layout.groups;
    args_.k = problem.k;
    args_.strip_bytes = static_cast<formats::u32>(layout.strip_bytes);
    args_.block_bytes = layout.block_bytes;
    args_.strips = static_cast<int>(layout.strips);
    args_.m = static_cast<int>(problem.m);
    args_.n = static_cast<int>(problem.n);
    args_.units = static_cast<int>(layout.blocks_per_strip * (layout.block_cols / formats::kUnitCols));
    args_.tiles = static_cast<int>(ceil_div(problem.k, division.units * formats::kUnitCols));
    args_.cluster = division.cluster;
    args_.tiles_at_once = division.tiles_at_once;
    args_.values = code_values_args(problem.codec, problem.dtype);
    args_.bf16_scales = problem.codec.scale_type == formats::ScaleType::bf16;
    args_.accumulate = problem.accumulate;
    args_.pairs = has_pairs_of_y(problem);
    args_.partial_stride = static_cast<int>(formats::round_up(problem.k, 2));
    const int most = context_.num_multiprocessors / division.cluster;
    const int clusters = has_experts ? most : std::min(args_.tiles, most);
    load(kernel_of(problem, tiling_), {int64_t{clusters} * division.cluster, kTransposedThreads,
                                       tiling_.shared_bytes(), division.cluster});
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::weight_rounded};
  }

 private:
  void place(QgemmSm90TransposedArgs& args, const QgemmTensors& tensors, void* sums) const override {
    args.x = cuda::matrix_map(tensors.x, problem_.m, problem_.n, x_stride(),
                              problem_.experts.num > 0 ? tiling_.tokens : static_cast<int>(problem_.m),
                              tiling_.strips() * formats::kUnitRows);
    args.x_as_it_lies = tensors.x;
    place_experts(args.experts, tensors);
    args.expert_tiles = static_cast<const ExpertTileEntry*>(tensors.expert_tiles);
    args.partials = static_cast<float*>(sums);
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.y = tensors.y;
  }

  QgemmSm90TransposedTiling tiling_{};
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90Transposed>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  problem.experts.num = cuda::is_set(values, "experts") ? 1 : 0;
  const std::string reason = refuse_weight(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_transposed: {}", reason);
  const QgemmSm90TransposedTiling tiling =
      tiling_of(problem, number_of(values, "tokens"), number_of(values, "columns") / formats::kUnitCols,
                cuda::is_set(values, "finds-rows"));
  HALFBYTE_CHECK(!tiling.experts || (!problem.double_quant && tiling.tokens <= most_expert_tokens(problem)),
                 usage, "qgemm_sm90_transposed: experts go with at most {} tokens and without double-quant",
                 most_expert_tokens(problem));
  HALFBYTE_CHECK(tiling.finds_rows == cuda::is_set(values, "finds-rows"), usage,
                 "qgemm_sm90_transposed: finds-rows goes with experts, 8 tokens and codes of 4 bits");
  HALFBYTE_CHECK(can_be(tiling), usage,
                 "qgemm_sm90_transposed: columns must be 64 for these parameters, got {}",
                 values.at("columns"));
  return kernel_of(problem, tiling);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  for (KernelKey& key : keys) {
    if (key.name == "dtype") std::erase(key.values, "f32");
    if (key.name == "format") std::erase(key.values, "affine8");
  }
  keys.push_back(number_key("tokens", {16, 8, 32, 64}, "Rows of x, rounded up."));
  keys.push_back(number_key("columns", {128, 64}, "Of the weight, in a tile."));
  keys.push_back(experts_key());
  keys.push_back(
      cuda::flag_key("finds-rows", "Of experts, without a kernel before that lists tiles and copies x."));
  return {
      {{"qgemm", "qgemm_sm90_transposed", "Transposed, at most 64 rows of x.", std::move(keys), kSm90Target},
       specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Transposed = {
    {"qgemm_sm90_transposed", DeviceKind::cuda, &refuse, &make}, &kernels, false, true};

}  // namespace halfbyte
