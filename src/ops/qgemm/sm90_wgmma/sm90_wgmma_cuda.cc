#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/tensor_map.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_wgmma/sm90_wgmma_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int kMaxTokens = 64;
// Of an expert, on average: with more, qgemm_sm90_large is ahead
// (`halfbyte bench qgemm --experts 128 --top-k 8 --direction forward --m 256,512,1024` with --variant of one
// and the other).
constexpr int64_t kMostExpertRows = 21;
constexpr int kMaxExpertTokens = 32;
constexpr int kMaxStages = 8;
constexpr int kSharedBytes = 227 * 1024;  // of a block of sm_90

std::string refuse_experts(const QgemmProblem& p) {
  if (std::string reason = refuse_sm90_experts(p); !reason.empty()) return reason;
  if (const int64_t rows = ceil_div(p.m, p.experts.num); rows > kMostExpertRows)
    return fmt::format("experts must have at most {} rows on average, got {}", kMostExpertRows, rows);
  // 32 bits hold the numbers of pairs of strips of all tiles.
  if (const int64_t pairs = ceil_div(p.weight.strips, 2);
      tiles_of_rows(p, 1) > std::numeric_limits<int32_t>::max() / std::max<int64_t>(pairs, 1))
    return fmt::format(
        "of experts, rows of x times pairs of strips must be at most 2^31 - 1, got {} times {}",
        tiles_of_rows(p, 1), pairs);
  return "";
}

std::string refuse(const QgemmProblem& p) {
  if (std::string reason = refuse_other_than_sm90(p); !reason.empty()) return reason;
  if (p.transposed) return "it is for forward products";
  if (!p.packed) return "the weight is not packed";
  if (p.dtype == DType::f32) return "it is for bf16 and f16, got f32";
  if (p.experts.num == 0 && p.m > kMaxTokens)
    return fmt::format("m must be at most {}, got {}", kMaxTokens, p.m);
  if (p.experts.num > 0)
    if (std::string reason = refuse_experts(p); !reason.empty()) return reason;
  if (p.tile != QgemmTile{}) return "tile is for qgemm_simt";
  if (std::string reason = refuse_rare_weight(p); !reason.empty()) return reason;
  // 32 bits hold the bytes of a strip, and indexes.
  constexpr int64_t kMost = int64_t{1} << 30, kMostCols = int64_t{1} << 24;
  if (p.n > kMost || p.k > kMostCols || p.n * p.weight.groups > kMost)
    return fmt::format("n and the number of scales must be at most {}, k {}, got {}, {} and {}", kMost,
                       kMostCols, p.n, p.n * p.weight.groups, p.k);
  return "";
}

// m rounded up.
int tokens_of(const QgemmProblem& p) {
  return std::clamp(static_cast<int>(std::bit_ceil(static_cast<uint64_t>(p.m))), 8, kMaxTokens);
}

// Whether there is code for clusters of two blocks.
bool can_share(const QgemmProblem& problem, const QgemmSm90WgmmaTiling& t) {
  return t.can_share() && refuse_spilling(problem, {"qgemm_sm90_wgmma", t.tokens, t.strips, true}).empty();
}

// All that a tile needs, with as many stages as fit.
QgemmSm90WgmmaTiling tiling_of(const QgemmProblem& problem, int tokens, int strips, int cluster) {
  QgemmSm90WgmmaTiling tiling;
  tiling.tokens = tokens;
  tiling.strips = strips;
  tiling.block_cols = problem.weight.block_cols;
  tiling.block_bytes = problem.weight.block_bytes;
  tiling.bits = problem.codec.bits;
  tiling.experts = problem.experts.num > 0;
  // Code that does both costs the loop nothing but with 64 rows of x, where it has 5 to 8 % more
  // instructions.
  tiling.shared = (cluster > 1 || tokens < 64) && can_share(problem, tiling);
  tiling.stages = kMaxStages;
  while (tiling.shared_bytes() > kSharedBytes) --tiling.stages;
  return tiling;
}

struct Division {
  QgemmSm90WgmmaTiling tiling;
  int cluster = 1;  // blocks that share the columns of a tile
};

// f(tiling, cluster) of all ways to divide tiles of so many tokens.
template <class F>
void each_division(const QgemmProblem& p, int tokens, const F& f) {
  for (const int cluster : {1, 2})
    for (const int strips : {2, 4, 8}) {
      if (!refuse_spilling(p, {"qgemm_sm90_wgmma", tokens, strips, false}).empty()) continue;
      const QgemmSm90WgmmaTiling tiling = tiling_of(p, tokens, strips, cluster);
      if (cluster == 1 || (tiling.shared && ceil_div(p.k, tiling.stage_cols()) >= cluster))
        f(tiling, cluster);
    }
}

// x of so many tokens takes as long as a pair of strips: every tile reads all of it.
constexpr double kTokensOfPair = 80;
// Blocks of a cluster wait for each other at the end.
constexpr double kClusterUnits = 50;

// What takes the least time by this model, in units of the packed layout, of which a block reads one in the
// time that its share of the memory's bandwidth gives it. The constants are of an H200; what is chosen by
// them is timed by `halfbyte bench qgemm --variant qgemm_sm90_wgmma --direction forward --m 8,16,32,64
// --model llama-8b,llama-70b`.
Division choose_division(const QgemmProblem& p, int num_multiprocessors) {
  const int tokens = tokens_of(p);
  const int64_t all_pairs = ceil_div(p.weight.strips, 2);
  Division best;
  double least = std::numeric_limits<double>::max();
  each_division(p, tokens, [&](const QgemmSm90WgmmaTiling& tiling, int cluster) {
    const int64_t pairs_of_tile = tiling.strips / 2, at_once = pairs_of_tile / tiling.row_groups();
    const int64_t pairs = formats::round_up(ceil_div(all_pairs, num_multiprocessors / cluster), at_once);
    const auto tiles = static_cast<double>(ceil_div(pairs, pairs_of_tile));
    const double units = static_cast<double>(ceil_div(p.k, formats::kUnitCols)) * 2;
    const double time = (static_cast<double>(pairs) + tiles * tokens / kTokensOfPair) * units / cluster +
                        kClusterUnits * (cluster - 1);
    if (time >= least) return;
    best = {tiling, cluster};
    least = time;
  });
  return best;
}

// The same of experts, whose tiles are whole. A stage and a tile take longer than their units; tiles of
// clusters exchange sums. The constants are of an H200, `halfbyte bench qgemm --direction forward --experts
// 128
// --top-k 8 --shape 1536x2048 --m 16,64` and `--experts 256 --top-k 8 --shape 7168x256,512x7168 --m
// 16,64,256`.
Division choose_for_experts(const QgemmProblem& p, int num_multiprocessors) {
  constexpr double kStageUnits = 3, kTileUnits = 10, kExchangeUnits = 13;
  Division best;
  double least = std::numeric_limits<double>::max();
  for (int tokens = 8; tokens <= kMaxExpertTokens; tokens *= 2)
    each_division(p, tokens, [&](const QgemmSm90WgmmaTiling& tiling, int cluster) {
      const double units = (tiling.strips / 2.0 + tokens / kTokensOfPair) *
                           (tiling.stage_cols() / static_cast<double>(formats::kUnitCols)) * 2;
      const auto stages = static_cast<double>(ceil_div(ceil_div(p.k, tiling.stage_cols()), cluster));
      const int workers = num_multiprocessors / cluster;
      const double tiles = std::ceil(likely_expert_tiles(p, tokens) *
                                     static_cast<double>(ceil_div(p.weight.strips, tiling.strips)) / workers);
      const double time =
          tiles * (stages * (units + kStageUnits) + kTileUnits + kExchangeUnits * (cluster - 1)) +
          kClusterUnits * (cluster - 1);
      if (time >= least) return;
      best = {tiling, cluster};
      least = time;
    });
  return best;
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem, const QgemmSm90WgmmaTiling& t) {
  return {"ops/qgemm/sm90_wgmma/sm90_wgmma.cu", "qgemm_sm90_wgmma",
          cuda::config_text(cuda::element_config(problem.dtype) + packed_config(problem) +
                            fmt::format("constexpr int kGroup = {};\n", inlined_group(problem)) +
                            cuda::struct_config("QgemmSm90WgmmaTiling", "kTiling",
                                                {{"tokens", t.tokens},
                                                 {"strips", t.strips},
                                                 {"shared", t.shared},
                                                 {"experts", t.experts},
                                                 {"block_cols", t.block_cols},
                                                 {"block_bytes", t.block_bytes},
                                                 {"bits", t.bits},
                                                 {"stages", t.stages}}))};
}

class QgemmSm90Wgmma : public QgemmOneKernel<QgemmSm90WgmmaArgs> {
 public:
  explicit QgemmSm90Wgmma(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const bool has_experts = problem.experts.num > 0;
    const int most = context_.num_multiprocessors;
    const auto [tiling, cluster] =
        has_experts ? choose_for_experts(problem, most) : choose_division(problem, most);
    tiling_ = tiling;
    if (has_experts) {
      args_.experts = experts_args(problem);
      if (!finds_rows()) list_expert_rows(tiling.tokens, 1);
    } else if (!has_aligned_x(problem)) {
      stage_x(1);
    }
    const formats::PackedLayout& layout = problem.weight;
    args_.strip_bytes = layout.strip_bytes;
    describe_sections(args_, layout);
    args_.groups = static_cast<int>(layout.groups);
    args_.last_scale = static_cast<int>(layout.n * layout.groups - 1);
    args_.m = static_cast<int>(problem.m);
    args_.n = static_cast<int>(problem.n);
    args_.num_strips = static_cast<int>(layout.strips);
    args_.num_blocks = static_cast<int>(layout.blocks_per_strip);
    args_.num_stages = static_cast<int>(ceil_div(problem.k, tiling_.stage_cols()));
    const int64_t pairs = ceil_div(layout.strips, 2);
    const int64_t workers = has_experts ? most / cluster : ceil_div(pairs, ceil_div(pairs, most / cluster));
    args_.log2_cluster = cluster - 1;
    args_.num_pairs = static_cast<int>(has_experts ? ceil_div(pairs, tiling.strips / 2) : pairs / workers);
    args_.num_longer = static_cast<int>(has_experts ? 0 : pairs % workers);
    args_.k = problem.k;
    args_.partial_stride = static_cast<int>(formats::round_up(problem.n, 2));
    args_.values = code_values_args(problem.codec, problem.dtype);
    args_.bf16_scales = problem.codec.scale_type == formats::ScaleType::bf16;
    args_.accumulate = problem.accumulate;
    args_.pairs = has_pairs_of_y(problem);
    load(kernel_of(problem, tiling), {workers * cluster, tiling.threads(), tiling.shared_bytes(), cluster});
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false,
            problem_.codec.kind == formats::Kind::affine || inlined_group(problem_) == 16
                ? WeightRounding::weight_rounded
                : WeightRounding::code_rounded};
  }

 private:
  bool finds_rows() const { return tiling_.finds_rows() && finds_expert_rows(problem_, kWgmmaFoundRows); }
  void place(QgemmSm90WgmmaArgs& args, const QgemmTensors& tensors, void* sums) const override {
    args.x = cuda::matrix_map(tensors.x, problem_.m, problem_.k, x_stride(),
                              problem_.experts.num > 0 ? tiling_.tokens : static_cast<int>(problem_.m));
    args.x_as_it_lies = tensors.x;
    place_experts(args.experts, tensors);
    args.expert_tiles = static_cast<const ExpertTileEntry*>(tensors.expert_tiles);
    args.partials = static_cast<float*>(sums);
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = tensors.bias;
    args.y = tensors.y;
  }

  QgemmSm90WgmmaTiling tiling_;
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90Wgmma>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  problem.experts.num = cuda::is_set(values, "experts") ? 1 : 0;
  const std::string reason = refuse_rare_weight(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_wgmma: {}", reason);
  HALFBYTE_CHECK(
      problem.experts.num == 0 || (!problem.double_quant && number_of(values, "tokens") <= kMaxExpertTokens),
      usage, "qgemm_sm90_wgmma: experts go with at most {} tokens and without double-quant",
      kMaxExpertTokens);
  const std::string spilling =
      refuse_spilling(problem, {"qgemm_sm90_wgmma", number_of(values, "tokens"),
                                number_of(values, "rows") / formats::kUnitRows, false});
  HALFBYTE_CHECK(spilling.empty(), usage, "qgemm_sm90_wgmma: {}", spilling);
  const int cluster = number_of(values, "cluster");
  const QgemmSm90WgmmaTiling tiling = tiling_of(problem, number_of(values, "tokens"),
                                                number_of(values, "rows") / formats::kUnitRows, cluster);
  HALFBYTE_CHECK(cluster == 1 || tiling.shared, usage,
                 "qgemm_sm90_wgmma: cluster must be 1 with tokens {} and rows {}, got {}", tiling.tokens,
                 values.at("rows"), cluster);
  return kernel_of(problem, tiling);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") std::erase(key.values, "f32");
  keys.push_back(number_key("tokens", {16, 8, 32, 64}, "Rows of x, rounded up."));
  keys.push_back(number_key("rows", {128, 256, 64}, "Of the weight, in a tile."));
  keys.push_back(number_key("cluster", {2, 1}, "Blocks that share the columns of a tile."));
  keys.push_back(experts_key());
  return {{{"qgemm", "qgemm_sm90_wgmma", "Forward, at most 64 rows of x.", std::move(keys), kSm90Target},
           specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Wgmma = {
    {"qgemm_sm90_wgmma", DeviceKind::cuda, &refuse, &make}, &kernels, false, true};

}  // namespace halfbyte
