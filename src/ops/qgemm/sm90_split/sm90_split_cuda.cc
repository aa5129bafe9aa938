#include <algorithm>
#include <limits>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/tensor_map.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_split/sm90_split_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int kMaxStages = 6;
constexpr int kSharedBytes = 227 * 1024;  // of a block of sm_90

std::string refuse(const QgemmProblem& p) {
  if (std::string reason = refuse_other_than_sm90(p); !reason.empty()) return reason;
  if (p.dtype != DType::f32) return fmt::format("dtype must be f32, got {}", to_string(p.dtype));
  if (p.math != QgemmMath::automatic) return fmt::format("math must be auto, got {}", to_string(p.math));
  if (!p.packed) return "the weight must be packed";
  if (p.double_quant) return "scales must not be quantized";
  if (std::string reason = refuse_rare_weight(p); !reason.empty()) return reason;
  if (p.tile != QgemmTile()) return "tile is for qgemm_simt";
  // 32 bits hold the rows of the parts of x, features and the numbers of tiles.
  constexpr int64_t kMost = int64_t{1} << 29;
  if (p.m > kMost || p.n > kMost || p.k > kMost || ceil_div(p.m, 16) * ceil_div(p.out_cols(), 256) > kMost)
    return fmt::format("m, n, k and m / 16 * (columns of y) / 256 must be at most {}, got {}, {} and {}",
                       kMost, p.m, p.n, p.k);
  return "";
}

// Whether a scale goes into the sums of its group. Transposed, sums run across groups.
bool scales_sums(const QgemmProblem& p) { return !p.transposed && p.codec.kind != formats::Kind::affine; }
// Transposed, it can go into x, which is then split anew for each group of columns of the weight: of codes
// that are integers, or have 8 bits, whose products are then half as many. Fewer columns than the 64 of a
// warpgroup would need x more often.
int ways_to_scale_x(const QgemmProblem& p) {
  const bool is_exact = p.codec.kind == formats::Kind::integer || p.codec.kind == formats::Kind::floating;
  if (!p.transposed || !is_exact) return 0;
  switch (inlined_group(p)) {
    case 0:
      return 1;
    case 64:
      return 4;
    case 128:
      return 2;
    default:
      return 0;
  }
}
// Of what is multiplied with x: the value of a code, which may be exact as bf16, or the scaled weight.
int weight_parts(const QgemmProblem& p) {
  const bool is_exact = p.codec.kind != formats::Kind::table ||
                        code_values(p.codec, DType::bf16) == code_values(p.codec, DType::f32);
  return (scales_sums(p) && is_exact) || ways_to_scale_x(p) > 0 ? 1 : kSplitXParts;
}
// A pair of values in f32 or in one part takes 8 and 4 bytes, of which there are 32 copies, one a lane, in
// 256 bytes; three parts take 12. Where x is scaled, integers are computed.
int table_bytes(const QgemmProblem& p) {
  if (p.codec.bits != 4 || ways_to_scale_x(p) > 0) return 0;
  return scales_sums(p) && weight_parts(p) > 1 ? 98304 : 65536;
}

int tokens_of(const QgemmProblem& p) { return p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64; }

QgemmSm90SplitTiling tiling_of(const QgemmProblem& p, int tokens) {
  const formats::PackedLayout& weight = p.weight;
  QgemmSm90SplitTiling tiling{};
  tiling.tokens = tokens;
  tiling.scaled = ways_to_scale_x(p);
  tiling.table_bytes = table_bytes(p);
  tiling.bits = p.codec.bits;
  tiling.group = inlined_group(p);
  tiling.parameter_bytes = weight.scale_bytes + weight.bias_bytes + (weight.has_zeros ? 1 : 0);
  tiling.stages = kMaxStages;
  while (tiling.shared_bytes() > kSharedBytes) --tiling.stages;
  return tiling;
}

cuda::KernelSpec kernel_of(const QgemmProblem& p, const QgemmSm90SplitTiling& t) {
  return {"ops/qgemm/sm90_split/sm90_split.cu", "qgemm_sm90_split",
          cuda::config_text(cuda::element_config(DType::f32) + packed_config(p) + bf16_scales_config(p) +
                            fmt::format("constexpr int kGroup = {};\nconstexpr bool kTransposed = {}, "
                                        "kScalesSums = {};\nconstexpr int kParts = {};\n",
                                        inlined_group(p), p.transposed, scales_sums(p), weight_parts(p)) +
                            cuda::struct_config("QgemmSm90SplitTiling", "kTiling",
                                                {{"tokens", t.tokens},
                                                 {"scaled", t.scaled},
                                                 {"table_bytes", t.table_bytes},
                                                 {"bits", t.bits},
                                                 {"group", t.group},
                                                 {"parameter_bytes", t.parameter_bytes},
                                                 {"stages", t.stages}}))};
}

class QgemmSm90Split : public QgemmOneKernel<QgemmSm90SplitArgs> {
 public:
  explicit QgemmSm90Split(const QgemmProblem& problem)
      : QgemmOneKernel(problem), tiling_(tiling_of(problem, tokens_of(problem))) {
    const formats::PackedLayout& layout = problem.weight;
    if (tiling_.scaled == 0)
      stage_x(kSplitXParts);
    else if (!has_aligned_x(problem))
      stage_x(1);
    args_.strip_bytes = layout.strip_bytes;
    args_.block_bytes = layout.block_bytes;
    args_.scales = layout.scales;
    args_.seconds = layout.has_zeros ? layout.zeros : layout.biases;
    args_.global_scale = layout.global_scale;
    args_.strips = static_cast<int>(layout.strips);
    args_.units = static_cast<int>(layout.blocks_per_strip * tiling_.slot().units_per_block());
    args_.m = static_cast<int>(problem.m);
    args_.out_cols = problem.out_cols();
    args_.partial_stride = formats::round_up(problem.out_cols(), 2);
    args_.stages = static_cast<int>(ceil_div(problem.in_cols(), kSplitStage));
    args_.feature_tiles = static_cast<int>(ceil_div(problem.out_cols(), kSplitFeatures));
    args_.token_tiles = static_cast<int>(ceil_div(problem.m, tiling_.tokens));
    const int64_t tiles = int64_t{args_.feature_tiles} * args_.token_tiles;
    args_.part_stages = static_cast<int>(std::max<int64_t>(1, ceil_div(args_.stages, parts_of(tiles))));
    const int64_t parts = std::max<int64_t>(1, ceil_div(args_.stages, args_.part_stages));
    args_.pairs = has_pairs_of_y(problem);
    args_.accumulate = problem.accumulate;
    if (problem.codec.bits == 4) {
      std::ranges::copy(code_values(problem.codec, DType::f32), args_.values);
      args_.pairs_of = code_values_args(problem.codec, DType::bf16);
    }
    load(kernel_of(problem, tiling_), {tiles * parts, kSplitThreads, tiling_.shared_bytes()}, parts);
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::none};
  }

 private:
  void place(QgemmSm90SplitArgs& args, const QgemmTensors& tensors, void* parts) const override {
    const int last = args.m % tiling_.tokens;
    const auto map = [&](int tokens) {
      return tiling_.scaled > 0
                 ? cuda::matrix_map(tensors.x, problem_.m, 2 * x_stride(), 2 * x_stride(), tokens)
                 : cuda::matrix_map(tensors.x, kSplitXParts * problem_.m, x_stride(), x_stride(), tokens);
    };
    args.last_x = map(last == 0 ? tiling_.tokens : last);
    args.x = args.m < tiling_.tokens ? args.last_x : map(tiling_.tokens);
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = problem_.bias ? tensors.bias : nullptr;
    args.y = tensors.y;
    args.partials = static_cast<float*>(parts);
  }

  // In how many parts tiles are summed: what takes the least time by this model, of rounds of blocks, and
  // what it takes to write and add up the parts. Microseconds and bytes a microsecond of an H200: `halfbyte
  // bench qgemm --dtype f32 --m 16,32,64,128,256` times what they choose.
  int64_t parts_of(int64_t tiles) const {
    constexpr double kBlock = 5, kSum = 3, kBytes = 3e6;
    constexpr int64_t kMostBytes = int64_t{64} << 20;  // of the workspace, for parts
    const double stage = (weight_parts(problem_) == 1 ? 0.45 : 0.9) * std::max(tiling_.tokens, 32) / 32;
    int64_t best = 1;
    double least = std::numeric_limits<double>::max();
    for (int64_t parts = 1; parts <= std::clamp<int64_t>(args_.stages / 4, 1, 32); ++parts) {
      const auto rounds = static_cast<double>(ceil_div(tiles * parts, context_.num_multiprocessors));
      double time = rounds * (static_cast<double>(ceil_div(args_.stages, parts)) * stage + kBlock);
      const int64_t bytes = 4 * parts * problem_.m * args_.partial_stride;
      if (parts > 1 && bytes > kMostBytes) break;
      if (parts > 1) time += kSum + static_cast<double>(2 * bytes) / kBytes;
      if (time >= least) continue;
      best = parts;
      least = time;
    }
    return best;
  }

  QgemmSm90SplitTiling tiling_;
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90Split>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& given) {
  cuda::KernelValues values = given;
  values["double-quant"] = "no";
  values["dtype"] = "f32";
  QgemmProblem problem = qgemm_problem(values);
  problem.transposed = cuda::is_set(values, "transposed");
  const std::string reason = refuse_rare_weight(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_split: {}", reason);
  return kernel_of(problem, tiling_of(problem, number_of(values, "tokens")));
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  std::erase_if(keys, [](const KernelKey& key) { return key.name == "dtype" || key.name == "double-quant"; });
  keys.push_back(cuda::flag_key("transposed", "The product along the rows of the weight."));
  keys.push_back(number_key("tokens", {64, 16, 32}, "Rows of x in the tile of a block."));
  return {
      {{"qgemm", "qgemm_sm90_split", "Both directions, f32 in parts of bf16.", std::move(keys), kSm90Target},
       specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Split = {{"qgemm_sm90_split", DeviceKind::cuda, &refuse, &make}, &kernels};

}  // namespace halfbyte
