#include <algorithm>
#include <cmath>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/tensor_map.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_large/sm90_large_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/stage_x_args.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int kFewestTokens = 17;  // with fewer, the other variants of sm_90 were not timed beside it
// Of an expert, on average: with fewer, other variants are ahead. Transposed that depends on how much is
// summed. With 128 and 256 rows of the weight, codes of 4 bits, qgemm_sm90_transposed takes 0.97 and 0.87
// times as long with 6 rows of x and 1.25 and 1.03 times with 8; with 512 rows 0.99 times with 12 and 1.11
// times with 14; with 1536 and 2048 0.94 times with 14; with 4096 0.91 and with 28672 1.03 times with 14
// (H200, `halfbyte bench qgemm --direction transposed --experts 256 --top-k 8 --shape
// 128x7168,256x7168,512x7168 --m 192,256,384,448`, `--experts 128 --shape 1536x2048,2048x768 --m 224` and
// `--experts 8 --top-k 2 --shape 4096x14336,28672x4096 --m 56`, with --variant). Of 8 bits it is slower.
constexpr int64_t kFewestExpertRows = 16;
int64_t fewest_expert_rows(const QgemmProblem& p) {
  const int64_t summed = p.in_cols();
  if (!p.transposed) return kFewestExpertRows;
  if (p.codec.bits == 4) return summed < 512 ? 8 : summed < 1024 ? 13 : 15;
  if (summed < 512) return 2;  // qgemm_sm80 has fewer
  return summed < 1024 ? 8 : summed <= 2048 ? 9 : 12;
}
constexpr int kMaxStages = 8, kMaxSplitStages = 16;
constexpr int kSharedBytes = 227 * 1024;  // of a block of sm_90
// Of experts, columns of y: each tile of them gathers rows of x anew, which takes longer than to load boxes
// of a copy in their order. With 1024 and 4096 tokens, 8 of 256 experts each, 512x7168 takes 217 and 512 us,
// and with a copy 233 and 608; 7168x256 transposed 135 and 282, and 160 and 455; 128 experts of 2048x768,
// transposed, with 4096 tokens 285, and 261 (H200).
constexpr int64_t kMostGatheredFeatures = 512;
constexpr int64_t kPanelBytes = 32ll << 20;  // of x, that the second-level cache keeps

// Why there are no kernels for the weight; empty if there are.
std::string refuse_weight(const QgemmProblem& p) {
  if (std::string reason = refuse_rare_weight(p); !reason.empty()) return reason;
  return refuse_range(p);
}

// Of experts.
std::string refuse_experts(const QgemmProblem& p) {
  if (std::string reason = refuse_sm90_experts(p); !reason.empty()) return reason;
  const int64_t rows = ceil_div(p.m, p.experts.num);
  const int64_t fewest = fewest_expert_rows(p);
  if (rows < fewest) return fmt::format("experts must have {} rows on average, got {}", fewest, rows);
  return "";
}

std::string refuse(const QgemmProblem& p) {
  if (std::string reason = refuse_other_than_sm90(p); !reason.empty()) return reason;
  if (!p.packed) return "the weight is not packed";
  if (p.dtype == DType::f32) return "it is for bf16 and f16, got f32";
  if (p.experts.num == 0 && p.m < kFewestTokens)
    return fmt::format("m must be at least {}, got {}", kFewestTokens, p.m);
  if (p.tile != QgemmTile{}) return "tile is for qgemm_simt";
  if (std::string reason = refuse_weight(p); !reason.empty()) return reason;
  if (p.experts.num > 0)
    if (std::string reason = refuse_experts(p); !reason.empty()) return reason;
  // 32 bits hold extents, numbers of scales and of tiles, and places in the weight in steps of 16 bytes.
  constexpr int64_t kMostScales = int64_t{1} << 30, kLongest = int64_t{1} << 24;
  if (std::max({p.m, p.n, p.k}) > kLongest || p.n * p.weight.groups > kMostScales)
    return fmt::format("m, n and k must be at most {}, the number of scales {}, got {}, {}, {} and {}",
                       kLongest, kMostScales, p.m, p.n, p.k, p.n * p.weight.groups);
  constexpr int64_t kMostBytes = int64_t{16} << 32;
  if (p.weight.num_bytes > kMostBytes)
    return fmt::format("a weight must have at most {} bytes, got {}", kMostBytes, p.weight.num_bytes);
  return "";
}

// A kind of tile, of up to so many tokens: as large as registers hold its sums. Clocks that a stage of it
// takes, forward and transposed; 0: there is no such kernel, since it would gain 1 %. All clocks are those of
// blocks on an H200, with nf4 in groups of 64, fitted to 1,096 times of 54 products, each with every kind
// (within 5 %): `halfbyte bench qgemm --cliffs --variant qgemm_sm90_large --format nf4 --dtype bf16 --shape
// 1024x1024,1536x2048,2048x2048,4096x4096,256x4096,4096x256 --m 128,192,256,384,512,513,768,1024,2048`. Those
// of the last four are to tiles of 64 and 128 tokens what `--experts 128 --top-k 8 --shape 1536x2048 --m
// 512,1024` and `--experts 8 --top-k 2 --shape 4096x14336 --m 64,128,256` took with each.
struct Candidate {
  int tokens, blocks, warpgroups, splits;
  double forward, transposed;
  bool is_wide() const { return warpgroups == 4 && splits == 1; }
};
constexpr Candidate kCandidates[] = {
    {256, 1, 2, 1, 1030, 1250}, {288, 1, 2, 1, 1175, 1410}, {224, 1, 2, 1, 930, 1130},
    {192, 1, 2, 1, 775, 1025},  {160, 1, 2, 1, 690, 945},   {128, 2, 2, 1, 1240, 0},
    {128, 1, 2, 1, 655, 840},   {96, 1, 2, 1, 570, 710},    {64, 1, 2, 1, 475, 605},
    {128, 1, 4, 2, 575, 790},   {128, 1, 4, 4, 300, 400},   {96, 1, 4, 4, 245, 305},
    {64, 1, 4, 4, 200, 255},    {32, 1, 4, 4, 160, 200},    {112, 1, 4, 1, 1020, 1335},
    {80, 1, 4, 1, 845, 1100},   {48, 1, 4, 1, 690, 885},    {32, 1, 4, 1, 605, 795}};
double clocks_of(const Candidate& candidate, bool transposed) {
  return transposed ? candidate.transposed : candidate.forward;
}
// A candidate, and how many blocks share such tiles: 1 where four warpgroups multiply, else 2, or more of
// small ones, since of others they gain nothing by it.
struct Tile {
  const Candidate* candidate;
  int sharers;
};
std::vector<Tile> all_tiles() {
  constexpr int kMostTokens = 96;
  std::vector<Tile> tiles;
  for (const Candidate& candidate : kCandidates)
    for (const int sharers : {1, 2, 4, 8})
      if ((sharers == 1) == (candidate.warpgroups == 4) && (sharers <= 2 || candidate.tokens <= kMostTokens))
        tiles.push_back({&candidate, sharers});
  return tiles;
}

// All that a tile needs, with as many stages as fit.
QgemmSm90LargeTiling tiling_of(const QgemmProblem& problem, const Tile& tile, bool swiglu = false) {
  const formats::PackedLayout& weight = problem.weight;
  QgemmSm90LargeTiling tiling{};
  const auto [tokens, blocks, warpgroups, splits, forward, transposed] = *tile.candidate;
  tiling.tokens = tokens;
  tiling.blocks = blocks;
  tiling.warpgroups = warpgroups;
  tiling.splits = splits;
  tiling.bits = problem.codec.bits;
  // Of formats that share no kernels with tables.
  tiling.computed =
      problem.transposed && warpgroups == 2 && tiling.bits == 4 && (weight.has_zeros || weight.has_biases);
  tiling.group = inlined_group(problem);
  tiling.parameter_bytes = weight.scale_bytes + weight.bias_bytes + (weight.has_zeros ? 1 : 0);
  tiling.double_quant = problem.double_quant;
  tiling.multicast = tokens > 128 || splits == 2;  // x of so many takes longer to load than the weight
  tiling.sharers = tile.sharers;
  tiling.experts = problem.experts.num > 0;
  tiling.swiglu = swiglu;
  tiling.stages = warpgroups == 2 ? kMaxStages : kMaxSplitStages;
  while (tiling.shared_bytes() > kSharedBytes) tiling.stages -= splits;
  return tiling;
}

// As the key of the kernel has it.
std::string word_of(const Tile& tile) {
  const Candidate& candidate = *tile.candidate;
  const int features = 64 * candidate.blocks * candidate.warpgroups / candidate.splits;
  return fmt::format("{}x{}{}", candidate.tokens, features,
                     candidate.splits > 1  ? "-split"
                     : candidate.is_wide() ? "-wide"
                     : tile.sharers == 2   ? ""
                                           : fmt::format("-by-{}", tile.sharers));
}

// How tiles are dealt out.
struct Division {
  QgemmSm90LargeTiling tiling{};
  int64_t feature_tiles = 0, token_tiles = 0, stages = 0;
  int64_t tokens = 0;                  // of a tile: all have as many, but the last one
  int64_t parts = 1, part_stages = 0;  // of what is summed; stages of a part but the last
  int64_t whole = 0;                   // tiles of one block each; a cluster shares each of the others
  int64_t blocks = 0;                  // of the grid
  int cluster = 1;
  bool multicast = false;
  int64_t dividing_stages = 0;  // of experts: so many take as long as to divide tiles
  int64_t tiles() const { return feature_tiles * token_tiles * parts; }
  int64_t last_stages() const { return stages - (parts - 1) * part_stages; }
};

// That the end of a tile takes, for each token and block of features of a warpgroup: of the last of a block,
// and of others, which the next one hides in part. Where tiles are split, what its warpgroups take to meet,
// and for each token and 64 features that they give each other; where they are shared, the same of a cluster.
constexpr double kEndClocks = 20, kInnerEndClocks = 12;
constexpr double kSplitClocks = 400, kSplitExchangeClocks = 5;
constexpr double kShareClocks = 1900, kExchangeClocks = 33;

// That adding up parts takes, for each part, and bytes of them a clock; and what it takes longer where all
// multiprocessors are full of the blocks before, so that its own cannot be there ahead of time.
constexpr double kSumClocks = 1900, kPartClocks = 270, kSumBytes = 2750, kLateSumClocks = 1600;

// Whether there is such a kernel. With three stages that of 288 tokens takes twice as long. Sums are
// exchanged by rows of four, where x was.
bool can_be(const QgemmSm90LargeTiling& t) {
  constexpr int kFewestStages = 4;
  return t.stages >= std::max(kFewestStages, 2 * t.splits) && t.tokens % (8 * t.shares()) == 0 &&
         t.exchange_bytes() <= t.stages * t.x_bytes();
}

// How many clusters of so many blocks there is room for at once. A block has a multiprocessor, a cluster
// those of one GPC, whose number is not always a multiple: an H100 had no room for 32 clusters of 4 or 16
// of 8.
int64_t clusters_at_once(int num_multiprocessors, int blocks) {
  const int64_t clusters = num_multiprocessors / blocks;
  return blocks <= 2 ? clusters : clusters * 3 / 4;
}

// Multicast where the tiling allows it and tiles have a neighbour. `sharers`: blocks that share what tiles
// are left, all tiles where more than 2; 1: none are shared.
Division divide(const QgemmProblem& p, const QgemmSm90LargeTiling& tiling, int64_t parts, int sharers,
                int num_multiprocessors) {
  Division d;
  d.tiling = tiling;
  d.feature_tiles = ceil_div(p.out_cols(), tiling.features());
  d.token_tiles = ceil_div(p.m, tiling.tokens);
  d.tokens = formats::round_up(ceil_div(p.m, d.token_tiles), 16);
  d.stages = formats::round_up(ceil_div(p.in_cols(), kLargeStage), 2);
  d.part_stages = formats::round_up(ceil_div(d.stages, parts), 2);
  d.parts = ceil_div(d.stages, d.part_stages);
  const int64_t clusters = clusters_at_once(num_multiprocessors, sharers), at_once = clusters * sharers;
  const int64_t rest = sharers > 2 ? d.tiles() : d.tiles() % at_once;
  const bool shares = sharers > 1 && rest > 0 && rest <= clusters && d.last_stages() >= 2 * sharers;
  d.whole = d.tiles() - (shares ? rest : 0);
  d.multicast = tiling.multicast && d.feature_tiles % 2 == 0 && d.whole > 0;
  d.cluster = shares ? sharers : d.multicast ? 2 : 1;
  const int64_t most = num_multiprocessors / d.cluster * d.cluster;
  if (shares)
    d.blocks = d.whole > 0 ? most : sharers * rest;
  else
    d.blocks = formats::round_up(ceil_div(d.tiles(), ceil_div(d.tiles(), most)), d.cluster);
  return d;
}

// By this model, but for what is the same of all.
double clocks_of(const Division& d, const QgemmProblem& p, double stage_clocks, int num_multiprocessors) {
  const bool shares = d.whole < d.tiles();
  const auto stages = static_cast<double>(d.part_stages);
  const auto sums = static_cast<double>(d.tokens * d.tiling.blocks) / d.tiling.splits;
  const auto rounds = static_cast<double>(ceil_div(d.whole, d.blocks));
  double time = rounds * (stages * stage_clocks + kInnerEndClocks * sums);
  if (!shares) time += (kEndClocks - kInnerEndClocks) * sums;
  if (d.tiling.splits > 1) {
    const auto given = static_cast<double>(d.tokens * (d.tiling.splits - 1) * d.tiling.features()) / 64;
    time += kSplitClocks + kSplitExchangeClocks * given;
  }
  if (shares) {
    const double given = sums * (d.cluster - 1) / d.cluster;
    time += stages / d.cluster * stage_clocks + kShareClocks + kExchangeClocks * given +
            kEndClocks * sums / d.cluster;
  }
  if (d.parts > 1) {
    const auto bytes = static_cast<double>(d.parts * p.m * p.out_cols() * 8);
    time += kSumClocks + kPartClocks * static_cast<double>(d.parts) + bytes / kSumBytes;
    if (d.blocks > num_multiprocessors / 2) time += kLateSumClocks;
  }
  return time;
}

// Rows of a tile of experts' rows, at most: with more, ptxas spills registers.
int most_expert_tokens(const QgemmProblem& p, bool swiglu) {
  const int64_t group = inlined_group(p);
  return swiglu && (group == 16 || group == 32) ? 256 : 288;
}
// Whether experts have a kernel with such tiles. Of others with a scale a row ptxas spills registers, too.
bool has_experts_kernel(const QgemmProblem& p, const QgemmSm90LargeTiling& t) {
  if (t.splits > 1 || t.sharers > 2 || t.tokens > most_expert_tokens(p, t.swiglu) || !can_be(t)) return false;
  return t.group != 0 || (t.warpgroups == 2 && !(t.blocks == 2 && p.weight.has_zeros));
}

// Of experts: clocks that it takes to give sums of a tile to another block and to add them there, and bytes
// of them a clock: estimated, not fitted to times. Tiles are divided if they have more stages than that
// takes.
constexpr double kGiveClocks = 2000, kGiveBytes = 16;
int64_t given_bytes(const QgemmSm90LargeTiling& t) { return int64_t{4} * t.tokens * t.features(); }
double dividing_clocks(const QgemmSm90LargeTiling& t) {
  return kGiveClocks + static_cast<double>(given_bytes(t)) / kGiveBytes;
}

// Of experts: tiles of the kind that takes the least time, where rows are those of experts with as many each,
// give or take what chance does. What tiles are left when all blocks had as many are divided, as the kernel
// has it.
Division choose_for_experts(const QgemmProblem& p, int num_multiprocessors) {
  const QgemmExperts& experts = p.experts;
  const bool is_masked = experts.rows == ExpertRows::masked;
  // The kernel does it with whole strips of both halves.
  const bool swiglu =
      experts.swiglu && experts.slots_per_y == 1 && has_pairs_of_y(p) && p.y_cols() % formats::kUnitRows == 0;
  const double rows = is_masked ? static_cast<double>(experts.rows_per_expert)
                                : static_cast<double>(p.m) / static_cast<double>(experts.num);
  const auto tiles_of_expert = [&](int tokens) {
    double tiles = 0;
    for (const double deviation : {-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0})
      tiles += std::ceil((rows + (is_masked ? 0 : deviation * std::sqrt(rows))) / tokens);
    return tiles / 8;
  };
  Division best;
  double least = std::numeric_limits<double>::max();
  const int64_t features = swiglu ? p.y_cols() : p.out_cols();
  best.stages = formats::round_up(ceil_div(p.in_cols(), kLargeStage), 2);
  for (const Candidate& candidate : kCandidates) {
    const QgemmSm90LargeTiling tiling = tiling_of(p, {&candidate, candidate.is_wide() ? 1 : 2}, swiglu);
    const double clocks = clocks_of(candidate, p.transposed);
    if (clocks == 0 || !has_experts_kernel(p, tiling)) continue;
    const double tiles = tiles_of_expert(candidate.tokens) *
                         static_cast<double>(experts.num * ceil_div(features, tiling.y_features()));
    const double rounds = tiles / num_multiprocessors, of_round = static_cast<double>(best.stages) * clocks;
    const double time = std::min(std::ceil(rounds) * of_round, rounds * of_round + dividing_clocks(tiling));
    if (time >= least) continue;
    least = time;
    best.tiling = tiling;
    best.dividing_stages = static_cast<int64_t>(std::ceil(dividing_clocks(tiling) / clocks));
  }
  best.feature_tiles = ceil_div(features, best.tiling.y_features());
  best.token_tiles = tiles_of_rows(p, best.tiling.tokens);  // at most
  best.tokens = best.tiling.tokens;
  best.multicast = best.tiling.multicast && best.feature_tiles % 2 == 0;
  best.cluster = best.multicast ? 2 : 1;
  best.blocks = num_multiprocessors / best.cluster * best.cluster;
  return best;
}

// Whether rows of x, or their copies, begin lines of 128 bytes. If not, each stage of a row takes two: the
// second-level cache then holds back tiles of 64 columns, which read x most often (34 us for 24, of 4098x4098
// with 256 rows).
bool has_lines_of_x(const QgemmProblem& p) { return !has_aligned_x(p) || p.in_cols() % kStageXLine == 0; }

// What takes the least time.
Division choose_division(const QgemmProblem& p, int num_multiprocessors) {
  Division best;
  double least = std::numeric_limits<double>::max();
  const auto consider = [&](const Tile& tile, int sharers) {
    const QgemmSm90LargeTiling tiling = tiling_of(p, tile);
    const double stage_clocks = clocks_of(*tile.candidate, p.transposed);
    if (stage_clocks == 0 || !can_be(tiling) || (tiling.splits == 4 && !has_lines_of_x(p))) return;
    for (const int64_t parts : {1, 2, 4, 8}) {
      const Division d = divide(p, tiling, parts, sharers, num_multiprocessors);
      // Workspace and the sum of parts are for one round, as are split tiles.
      const bool one_round = parts > 1 || tiling.splits > 1;
      if (d.parts != parts || (one_round && d.tiles() > num_multiprocessors)) continue;
      if ((d.whole < d.tiles()) != (sharers > 1) || d.last_stages() < tiling.splits) continue;
      // Of several tiles of tokens, wide ones take up to 1.2 times as long as other tiles.
      if (tile.candidate->is_wide() && d.token_tiles > 1) continue;
      const double time = clocks_of(d, p, stage_clocks, num_multiprocessors);
      if (time >= least) continue;
      best = d;
      least = time;
    }
  };
  for (const Tile& tile : all_tiles()) {
    consider(tile, tile.sharers);
    if (tile.sharers == 2) consider(tile, 1);  // none are shared
  }
  return best;
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem, const QgemmSm90LargeTiling& t) {
  return {"ops/qgemm/sm90_large/sm90_large.cu", "qgemm_sm90_large",
          cuda::config_text(cuda::element_config(problem.dtype) + packed_config(problem) +
                            fmt::format("constexpr bool kTransposed = {};\nconstexpr int kGroup = {};\n",
                                        problem.transposed, t.group) +
                            cuda::struct_config("QgemmSm90LargeTiling", "kTiling",
                                                {{"tokens", t.tokens},
                                                 {"blocks", t.blocks},
                                                 {"warpgroups", t.warpgroups},
                                                 {"splits", t.splits},
                                                 {"bits", t.bits},
                                                 {"computed", t.computed},
                                                 {"group", t.group},
                                                 {"parameter_bytes", t.parameter_bytes},
                                                 {"double_quant", t.double_quant},
                                                 {"stages", t.stages},
                                                 {"multicast", t.multicast},
                                                 {"sharers", t.sharers},
                                                 {"experts", t.experts},
                                                 {"swiglu", t.swiglu}}))};
}

class QgemmSm90Large : public QgemmOneKernel<QgemmSm90LargeArgs> {
 public:
  explicit QgemmSm90Large(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const bool has_experts = problem.experts.num > 0;
    const Division division = has_experts ? choose_for_experts(problem, context_.num_multiprocessors)
                                          : choose_division(problem, context_.num_multiprocessors);
    tiling_ = division.tiling;
    const int64_t features = tiling_.swiglu ? problem.y_cols() : problem.out_cols();
    const int64_t tile_bytes = std::max<int64_t>(division.tokens * problem.in_cols() * 2, 1);
    const int64_t panel =
        std::clamp<int64_t>(kPanelBytes / tile_bytes, 1, std::max<int64_t>(division.token_tiles, 1));
    if (has_experts) {
      args_.experts = experts_args(problem);
      gathers_ = problem.experts.rows == ExpertRows::indices && features <= kMostGatheredFeatures;
      QgemmGivenSums given;
      if (division.stages > division.dividing_stages)
        given = {division.blocks * given_bytes(tiling_), division.blocks * tiling_.multipliers() / 32};
      list_expert_rows(division.tokens, panel, !gathers_, given);
    } else if (!has_aligned_x(problem)) {
      stage_x(1);
    }
    const formats::PackedLayout& layout = problem.weight;
    args_.strip_bytes = layout.strip_bytes;
    describe_sections(args_, layout);
    args_.block_bytes = layout.block_bytes;
    args_.strips = static_cast<int>(layout.strips);
    args_.units = static_cast<int>(layout.blocks_per_strip * (layout.block_cols / formats::kUnitCols));
    args_.n = static_cast<int>(layout.n);
    args_.groups = static_cast<int>(layout.groups);
    args_.m = static_cast<int>(problem.m);
    args_.features = static_cast<int>(features);
    args_.gate_strips = static_cast<int>(features / formats::kUnitRows);
    args_.partial_stride = static_cast<int>(formats::round_up(features, 2));
    args_.stages = static_cast<int>(division.stages);
    args_.part_stages = static_cast<int>(division.part_stages);
    args_.feature_tiles = static_cast<int>(division.feature_tiles);
    args_.token_tiles = static_cast<int>(division.token_tiles);
    args_.tokens = static_cast<int>(division.tokens);
    args_.panel = static_cast<int>(panel);
    args_.tiles = static_cast<int>(division.tiles());
    args_.multicast = division.multicast && !gathers_;
    args_.row_bytes = static_cast<int>(problem.in_cols() * size_of(problem.dtype));
    args_.row_chunks = args_.row_bytes / 16;
    args_.whole = static_cast<int>(division.whole);
    args_.dividing_stages = static_cast<int>(division.dividing_stages);
    args_.values = code_values_args(problem.codec, problem.dtype);
    args_.bf16_scales = problem.codec.scale_type == formats::ScaleType::bf16;
    args_.accumulate = problem.accumulate;
    load(kernel_of(problem, tiling_),
         {division.blocks, tiling_.threads(), tiling_.shared_bytes(), gathers_ ? 1 : division.cluster},
         division.parts, {}, has_pairs_of_y(problem), tiling_.swiglu);
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::weight_rounded};
  }

 private:
  void place(QgemmSm90LargeArgs& args, const QgemmTensors& tensors, void* parts) const override {
    const auto map = [&](int64_t rows) {
      return cuda::matrix_map(tensors.x, problem_.m, problem_.in_cols(), x_stride(), static_cast<int>(rows));
    };
    const int64_t box_tokens = args.tokens / (tiling_.multicast ? 2 : 1);
    const int64_t last_tokens = problem_.m % box_tokens;
    args.x = map(box_tokens);
    if (problem_.experts.num == 0) args.last_x = last_tokens == 0 ? args.x : map(last_tokens);
    place_experts(args.experts, tensors);
    args.expert_tiles = static_cast<const ExpertTileEntry*>(tensors.expert_tiles);
    args.rows_of_x = tensors.rows_of_x;
    args.given_flags = tensors.given_flags;
    args.given_sums = tensors.given_sums;
    args.x_as_it_lies = tensors.x;
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = tensors.bias;
    args.y = tensors.y;
    args.partials = static_cast<float*>(parts);
  }

  QgemmSm90LargeTiling tiling_{};
  bool gathers_ = false;
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90Large>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  problem.transposed = cuda::is_set(values, "transposed");
  problem.experts.num = cuda::is_set(values, "experts") ? 1 : 0;
  const bool swiglu = cuda::is_set(values, "swiglu");
  HALFBYTE_CHECK(!swiglu || (problem.experts.num > 0 && !problem.transposed), usage,
                 "qgemm_sm90_large: swiglu goes with experts, and not with transposed");
  const std::string reason = refuse_weight(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_large: {}", reason);
  const std::string& word = values.at("tile");
  const std::vector<Tile> tiles = all_tiles();
  const auto tile = std::ranges::find(tiles, word, word_of);
  HALFBYTE_CHECK(tile != tiles.end(), usage, "qgemm_sm90_large: there is no tile {}", word);
  const QgemmSm90LargeTiling tiling = tiling_of(problem, *tile, swiglu);
  HALFBYTE_CHECK(
      problem.experts.num == 0 || (!problem.double_quant && has_experts_kernel(problem, tiling)), usage,
      "qgemm_sm90_large: experts go with tiles of at most {} rows that are neither split nor shared by "
      "more than two blocks, with wide ones, and 128x256 if there are zero points, where groups are smaller "
      "than a row, and without double-quant",
      most_expert_tokens(problem, swiglu));
  HALFBYTE_CHECK(can_be(tiling) && clocks_of(*tile->candidate, problem.transposed) > 0, usage,
                 "qgemm_sm90_large: tile {} does not go with the weight{}", word,
                 problem.transposed ? " where transposed" : "");
  return kernel_of(problem, tiling);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") std::erase(key.values, "f32");
  keys.push_back(cuda::flag_key("transposed", "The product along the rows of the weight."));
  KernelKey tile = {
      "tile", {}, false, "Rows and columns of y, and how many blocks, or if warpgroups, share one."};
  for (const Tile& one : all_tiles()) tile.values.push_back(word_of(one));
  keys.push_back(std::move(tile));
  keys.push_back(experts_key());
  keys.push_back(cuda::flag_key("swiglu", "Of experts: half of the rows of the weight are a gate."));
  return {{{"qgemm", "qgemm_sm90_large", "Both directions, many rows of x.", std::move(keys), kSm90Target},
           specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Large = {
    {"qgemm_sm90_large", DeviceKind::cuda, &refuse, &make}, &kernels, false, true};

}  // namespace halfbyte
