#include <algorithm>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm80/sm80_args.h"
#include "ops/qgemm/sm90_large/sm90_large_args.h"

namespace halfbyte {
namespace {

constexpr int kFewestTokens = 65;  // the other variants of sm_90 take fewer
constexpr int kMaxStages = 8;
constexpr int kSharedBytes = 227 * 1024;     // of a block of sm_90
constexpr int64_t kPanelBytes = 32ll << 20;  // of x, that the second-level cache keeps

std::string refuse(const QgemmProblem& p) {
  const cuda::Context& context = cuda::context(p.device.index);
  if (context.target != "sm_90a") return fmt::format("it is for sm_90a, the device is {}", context.target);
  if (!p.packed) return "the weight is not packed";
  if (p.dtype == DType::f32) return "it is for bf16 and f16, got f32";
  if (p.m < kFewestTokens) return fmt::format("m must be at least {}, got {}", kFewestTokens, p.m);
  if (p.tile != QgemmTile{}) return "tile is for qgemm_simt";
  if (!p.weight.inlined && p.weight.groups != 1)
    return fmt::format("groups must be 32, 64, 128 or 256 columns, or a row, got {}", p.group);
  if (p.in_cols() % 8 != 0 || p.out_cols() % 2 != 0 || p.alignment < 16)
    return fmt::format(
        "the columns of x must be a multiple of 8, those of y of 2, both aligned to 16 bytes, got {}, {} and "
        "{}",
        p.in_cols(), p.out_cols(), p.alignment);
  // 32 bits hold extents, numbers of scales and of tiles.
  constexpr int64_t kMostScales = int64_t{1} << 30, kLongest = int64_t{1} << 24;
  if (std::max({p.m, p.n, p.k}) > kLongest || p.n * p.weight.groups > kMostScales)
    return fmt::format("m, n and k must be at most {}, the number of scales {}, got {}, {}, {} and {}",
                       kLongest, kMostScales, p.m, p.n, p.k, p.n * p.weight.groups);
  return "";
}

// How tiles are dealt out.
struct Division {
  QgemmSm90LargeTiling tiling{};
  int64_t feature_tiles = 0, token_tiles = 0, stages = 0;
  int64_t parts = 1, part_stages = 0;  // of what is summed; stages of a part but the last
  int64_t whole = 0;                   // tiles of one block each; two blocks share one of the others
  int64_t blocks = 0;                  // of the grid
  int cluster = 1;
  int64_t tiles() const { return feature_tiles * token_tiles * parts; }
};

// A kind of tile; clocks that a stage of it takes, forward and transposed. All clocks are those of blocks on
// an H200, with nf4 in groups of 64.
struct Candidate {
  int tokens, blocks;
  bool multicast;  // where it can be
  double forward, transposed;
};
constexpr Candidate kCandidates[] = {{256, 1, true, 1090, 1090},
                                     {128, 2, false, 1260, 1490},
                                     {128, 1, false, 685, 775},
                                     {64, 1, false, 490, 585}};
// That the end of a tile takes, for each token and block; where it is shared.
constexpr double kEndClocks = 9, kSharedEndClocks = 28;

// That adding up parts takes; bytes of them a clock.
constexpr double kSumClocks = 4400, kSumBytes = 1700;

// Multicast where the tiling asks for it and tiles have a neighbour.
Division divide(const QgemmProblem& p, const QgemmSm90LargeTiling& tiling, int64_t parts,
                int num_multiprocessors) {
  Division d;
  d.tiling = tiling;
  d.feature_tiles = ceil_div(p.out_cols(), tiling.features());
  d.token_tiles = ceil_div(p.m, tiling.tokens);
  d.stages = formats::round_up(ceil_div(p.in_cols(), kLargeStage), 2);
  d.part_stages = formats::round_up(ceil_div(d.stages, parts), 2);
  d.parts = ceil_div(d.stages, d.part_stages);
  const int64_t last_stages = d.stages - (d.parts - 1) * d.part_stages;
  const int64_t at_once = num_multiprocessors / 2 * 2, rest = d.tiles() % at_once;
  const bool shares = rest > 0 && rest <= at_once / 2 && last_stages >= 4;
  d.whole = d.tiles() - (shares ? rest : 0);
  d.tiling.multicast = tiling.multicast && d.feature_tiles % 2 == 0 && d.whole > 0;
  d.cluster = shares || d.tiling.multicast ? 2 : 1;
  const int64_t most = num_multiprocessors / d.cluster * d.cluster;
  if (shares)
    d.blocks = d.whole > 0 ? most : 2 * rest;
  else
    d.blocks = formats::round_up(ceil_div(d.tiles(), ceil_div(d.tiles(), most)), d.cluster);
  return d;
}

// What takes the least time by this model.
Division choose_division(const QgemmProblem& p, int num_multiprocessors) {
  Division best;
  double least = std::numeric_limits<double>::max();
  for (const auto& [tokens, blocks, multicast, forward, transposed] : kCandidates) {
    const double clocks = p.transposed ? transposed : forward;
    const QgemmSm90LargeTiling tiling = sm90_large_tiling(p, tokens, blocks, multicast);
    if (!sm90_large_takes(p, tiling)) continue;
    for (const int64_t parts : {1, 2, 4, 8}) {
      const Division d = divide(p, tiling, parts, num_multiprocessors);
      // Workspace and the sum of parts are for one round.
      if (d.parts != parts || (parts > 1 && d.tiles() > num_multiprocessors)) continue;
      const auto stages = static_cast<double>(d.part_stages), sums = static_cast<double>(tokens * blocks);
      const auto rounds = static_cast<double>(ceil_div(d.whole, d.blocks));
      double time = rounds * (stages * clocks + kEndClocks * sums);
      if (d.whole < d.tiles()) time += stages / 2 * clocks + kSharedEndClocks * sums;
      if (parts > 1) time += kSumClocks + static_cast<double>(parts * p.m * p.out_cols() * 8) / kSumBytes;
      if (time >= least) continue;
      best = d;
      least = time;
    }
  }
  return best;
}

class QgemmSm90Large : public QgemmKernel {
 public:
  explicit QgemmSm90Large(const QgemmProblem& problem)
      : problem_(problem), context_(cuda::context(problem.device.index)) {
    const Division division = choose_division(problem, context_.num_multiprocessors);
    tiling_ = division.tiling;
    const cuda::Scope scope(context_);
    const cuda::KernelSpec spec = sm90_large_kernel(problem, tiling_);
    name_ = spec.function;
    function_ = cuda::get_kernel(context_, spec);
    cuda::allow_shared_bytes(function_, tiling_.shared_bytes());
    const formats::PackedLayout& layout = problem.weight;
    args_.strip_bytes = layout.strip_bytes;
    args_.scales = layout.scales;
    args_.seconds = layout.has_zeros ? layout.zeros : layout.biases;
    args_.absmax = layout.absmax;
    args_.map = layout.map;
    args_.offset = layout.offset;
    args_.block_bytes = layout.block_bytes;
    args_.strips = static_cast<int>(layout.strips);
    args_.units = static_cast<int>(layout.blocks_per_strip * (layout.block_cols / formats::kUnitCols));
    args_.n = static_cast<int>(layout.n);
    args_.groups = static_cast<int>(layout.groups);
    args_.m = static_cast<int>(problem.m);
    args_.features = static_cast<int>(problem.out_cols());
    args_.stages = static_cast<int>(division.stages);
    args_.part_stages = static_cast<int>(division.part_stages);
    args_.feature_tiles = static_cast<int>(division.feature_tiles);
    args_.token_tiles = static_cast<int>(division.token_tiles);
    args_.panel = static_cast<int>(
        std::clamp<int64_t>(kPanelBytes / (tiling_.tokens * problem.in_cols() * 2), 1, division.token_tiles));
    args_.tiles = static_cast<int>(division.tiles());
    args_.whole = static_cast<int>(division.whole);
    args_.accumulate = problem.accumulate;
    if (division.parts > 1) {
      sum_ = cuda::get_kernel(context_, qgemm_sm80_sum_kernel(problem));
      sum_args_.m = problem.m;
      sum_args_.out_cols = sum_args_.out_stride = problem.out_cols();
      sum_args_.splits = division.parts;
      sum_args_.pairs = true;
      sum_args_.accumulate = problem.accumulate;
    }
    grid_ = {division.blocks, kLargeThreads, tiling_.shared_bytes(), division.cluster};
  }

  std::string name() const override { return name_; }
  std::string backend() const override { return "cuda " + context_.target; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::weight_rounded};
  }

  int64_t workspace_bytes() const override {
    return sum_ == nullptr ? 0 : sum_args_.splits * sum_args_.m * sum_args_.out_cols * int64_t{sizeof(float)};
  }

  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    QgemmSm90LargeArgs args = args_;
    args.x =
        cuda::matrix_map(tensors.x, problem_.m, problem_.in_cols(), problem_.in_cols(), tiling_.box_tokens());
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = tensors.bias;
    args.y = tensors.y;
    args.partials = sum_ == nullptr ? nullptr : static_cast<float*>(workspace);
    if (problem_.early_start)
      cuda::launch_early(function_, grid_, stream, args);
    else
      cuda::launch(function_, grid_, stream, args);
    if (sum_ == nullptr) return;
    QgemmSm80Args sum_args = sum_args_;
    sum_args.partials = args.partials;
    sum_args.bias = args.bias;
    sum_args.y = args.y;
    cuda::launch_early(
        sum_, {ceil_div(sum_args.m * sum_args.out_stride / 2, kQgemmSm80SumThreads), kQgemmSm80SumThreads},
        stream, sum_args);
  }

 private:
  QgemmProblem problem_;
  const cuda::Context& context_;
  QgemmSm90LargeTiling tiling_{};
  std::string name_;
  cuda::CUfunction function_ = nullptr, sum_ = nullptr;  // sum_: null where there is one part
  cuda::Grid grid_;
  QgemmSm90LargeArgs args_{};  // but for addresses
  QgemmSm80Args sum_args_{};
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90Large>(problem);
}

}  // namespace

QgemmSm90LargeTiling sm90_large_tiling(const QgemmProblem& problem, int tokens, int blocks, bool multicast) {
  const formats::PackedLayout& weight = problem.weight;
  QgemmSm90LargeTiling tiling{};
  tiling.tokens = tokens;
  tiling.blocks = blocks;
  tiling.bits = problem.codec.bits;
  tiling.group = weight.inlined ? static_cast<int>(weight.group) : 0;
  tiling.parameter_bytes = weight.scale_bytes + weight.bias_bytes + (weight.has_zeros ? 1 : 0);
  tiling.multicast = multicast;
  tiling.stages = kMaxStages;
  while (tiling.shared_bytes() > kSharedBytes) --tiling.stages;
  return tiling;
}

bool sm90_large_takes(const QgemmProblem&, const QgemmSm90LargeTiling& t) {
  // The sums of more would not fit into registers.
  return t.tokens * t.blocks <= 256 && (t.blocks == 1 || t.tokens == 128) && t.stages >= 3;
}

cuda::KernelSpec sm90_large_kernel(const QgemmProblem& problem, const QgemmSm90LargeTiling& t) {
  return {"ops/qgemm/sm90_large/sm90_large.cu", "qgemm_sm90_large",
          cuda::config_text(
              cuda::element_config(problem.dtype) + cuda::codec_config(problem.codec) +
              fmt::format("constexpr bool kTransposed = {}, kDoubleQuant = {};\nconstexpr int kGroup = {};\n",
                          problem.transposed, problem.double_quant, t.group) +
              fmt::format("constexpr QgemmSm90LargeTiling kTiling = {{{}, {}, {}, {}, {}, {}, {}}};\n",
                          t.tokens, t.blocks, t.bits, t.group, t.parameter_bytes, t.stages, t.multicast))};
}

const QgemmVariant kQgemmSm90Large = {"qgemm_sm90_large", DeviceKind::cuda, &refuse, &make};

}  // namespace halfbyte
