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

constexpr int kMaxTokens = 64, kMaxExpertTokens = 32;  // with more of experts, ptxas spills registers
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

// m rounded up.
int tokens_of(const QgemmProblem& p) {
  const auto rows = static_cast<uint64_t>(std::max<int64_t>(rows_of_weight(p), 8));
  return std::min(static_cast<int>(std::bit_ceil(rows)), p.experts.num > 0 ? kMaxExpertTokens : kMaxTokens);
}

// All that a tile needs, with as many stages as fit.
QgemmSm90TransposedTiling tiling_of(const QgemmProblem& problem, int tokens, int units) {
  QgemmSm90TransposedTiling tiling{};
  tiling.tokens = tokens;
  tiling.units = units;
  tiling.bits = problem.codec.bits;
  tiling.group = inlined_group(problem);
  tiling.parameter_bytes =
      problem.weight.scale_bytes + problem.weight.bias_bytes + (problem.weight.has_zeros ? 1 : 0);
  tiling.double_quant = problem.double_quant;
  tiling.experts = problem.experts.num > 0;
  tiling.stages = kMaxStages;
  while (tiling.shared_bytes() > kSharedBytes) --tiling.stages;
  return tiling;
}

// Whether there is such a kernel. Of some for experts, ptxas spills registers.
bool can_be(const QgemmSm90TransposedTiling& t) {
  const bool has_many_parameters = t.bits == 8 || (t.group == 16 && t.parameter_bytes > 4);
  return t.fits() && !(t.experts && t.tokens == 16 && t.units == 2 && has_many_parameters);
}

struct Division {
  int units = 1;          // of 64 columns, that a tile has
  int cluster = 1;        // blocks that share the rows of a tile
  int tiles_at_once = 1;  // of a block, whose warps are divided among them
};

// What takes the least time by this model, in units of the packed layout: those of a tile of one unit come in
// smaller copies; a round, and more so one of clusters, has a begin and an end. The constants are of an H200;
// what is chosen by them is timed by
// `halfbyte bench qgemm --direction transposed --m 8,16,32,64 --model llama-8b,llama-70b`.
Division choose_division(const QgemmProblem& p, int num_multiprocessors) {
  constexpr double kRound = 70, kClusterRound = 30;
  // Where stages flow, of each warp; what it costs that twice as many tiles are under way (28672x4096: 126 us
  // with one at a time, 133 with two, which the model otherwise calls 3 % faster).
  constexpr double kFlowingRound = 3, kMoreAtOnce = 1.05;
  const int tokens = tokens_of(p);
  const double single = tokens <= 8 ? 1.2 : tokens <= 16 ? 1.05 : 1.4;
  Division best;
  double least = std::numeric_limits<double>::max();
  for (const int units : {2, 1}) {
    const QgemmSm90TransposedTiling tiling = tiling_of(p, tokens, units);
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
      // A round lasts as long as the steps of one of the warps.
      for (const int at_once : {1, 2, 4}) {
        const double rounds = std::ceil(tiles / (num_multiprocessors * at_once));
        const auto steps = static_cast<double>(
            ceil_div(p.weight.strips, tiling.strips() * (tiling.teams() / at_once)) * tiling.strips());
        const double slower = at_once == 1 ? 1 : at_once == 2 ? kMoreAtOnce : kMoreAtOnce * kMoreAtOnce;
        consider({units, 1, at_once}, rounds * (steps + kFlowingRound) * unit * tiling.teams() * slower);
      }
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
                                                 {"stages", t.stages}}))};
}

class QgemmSm90Transposed : public QgemmOneKernel<QgemmSm90TransposedArgs> {
 public:
  explicit QgemmSm90Transposed(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const Division division = choose_division(problem, context_.num_multiprocessors);
    tiling_ = tiling_of(problem, tokens_of(problem), division.units);
    const bool has_experts = problem.experts.num > 0;
    if (has_experts) {
      args_.experts = experts_args(problem);
      list_expert_rows(tiling_.tokens, 1);
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
      tiling_of(problem, number_of(values, "tokens"), number_of(values, "columns") / formats::kUnitCols);
  HALFBYTE_CHECK(!tiling.experts || (!problem.double_quant && tiling.tokens <= kMaxExpertTokens), usage,
                 "qgemm_sm90_transposed: experts go with at most {} tokens and without double-quant",
                 kMaxExpertTokens);
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
  return {
      {{"qgemm", "qgemm_sm90_transposed", "Transposed, at most 64 rows of x.", std::move(keys), kSm90Target},
       specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Transposed = {
    {"qgemm_sm90_transposed", DeviceKind::cuda, &refuse, &make}, &kernels, false, true};

}  // namespace halfbyte
