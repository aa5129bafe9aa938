#include <algorithm>
#include <bit>
#include <limits>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm80/sm80_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/experts_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

// Groups that the 64 columns of a unit can have parameters of.
int unit_groups(const QgemmProblem& problem) { return formats::unit_groups(inlined_group(problem)); }

// f32 is multiplied in parts of bf16; so many has a value that a code stands for, before it is scaled.
bool is_split(const QgemmProblem& problem) {
  return problem.dtype == DType::f32 && problem.math == QgemmMath::automatic;
}
int code_parts(const QgemmProblem& problem) { return problem.codec.kind == formats::Kind::table ? 3 : 1; }
int x_bytes(const QgemmProblem& problem) {
  return is_split(problem) ? static_cast<int>(3 * size_of(DType::bf16))
                           : static_cast<int>(size_of(problem.dtype));
}

// Weights that no layout stores, f32. How scales are stored is an argument of their kernels, which are few;
// scales of one byte are of few formats.
bool is_rare(const QgemmProblem& problem) {
  if (!is_common_weight(problem)) return true;
  return problem.dtype == DType::f32 && formats::scale_bytes(problem.codec.scale_type) > 1;
}
QgemmSm80Stored stored_of(const QgemmProblem& problem) {
  return {.parameter_bytes = formats::scale_bytes(problem.codec.scale_type),
          .double_quant = problem.double_quant};
}

// Rows of x in the tile of a block. f32 and what is rare have two kinds of tile. The widest scales weights.
int tokens_of(const QgemmProblem& problem) {
  const int64_t rows = rows_of_weight(problem);
  if (is_rare(problem) || problem.dtype == DType::f32) return rows <= 16 ? 16 : is_split(problem) ? 32 : 64;
  const int64_t most = refuse_range(problem).empty() ? kQgemmSm80WideTokens : kQgemmSm80WideTokens / 2;
  const int64_t tokens = std::clamp<int64_t>(rows, 8, most);
  return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(tokens)));
}
QgemmSm80Stage stage_of(const QgemmProblem& problem, int capability) {
  const formats::PackedLayout& weight = problem.weight;
  return qgemm_sm80_stage(weight.bits, weight.scale_bytes, weight.has_zeros, weight.bias_bytes,
                          weight.double_quant, unit_groups(problem), tokens_of(problem), x_bytes(problem),
                          problem.experts.num > 0, capability);
}
std::string refuse_problem(const QgemmProblem& problem) {
  if (!problem.packed) return "the weight must be packed";
  if (std::string reason = refuse_streams(problem); !reason.empty()) return reason;
  if (problem.tile != QgemmTile()) return "tile is for qgemm_simt";
  if (problem.math == QgemmMath::f64) return "math must not be f64";
  if (!problem.weight.inlined && problem.weight.groups != 1)
    return fmt::format("groups must be multiples of 16 columns, or rows, got {}", problem.group);
  if (problem.dtype == DType::f32 || formats::scale_bytes(problem.codec.scale_type) == 1)
    if (std::string reason = refuse_rare_weight(problem); !reason.empty()) return reason;
  return problem.transposed ? refuse_range(problem) : "";
}
std::string refuse(const QgemmProblem& problem) {
  const int capability = cuda::context(problem.device.index).capability;
  if (capability < 80)
    return fmt::format("the device must have compute capability 8.0, got {}.{}", capability / 10,
                       capability % 10);
  return refuse_problem(problem);
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem) {
  const formats::Codec& codec = problem.codec;
  const bool rare = is_rare(problem);
  const QgemmSm80Stored stored = rare ? QgemmSm80Stored{} : stored_of(problem);
  return {
      "ops/qgemm/sm80/sm80.cu", "qgemm_sm80",
      cuda::config_text(
          cuda::element_config(problem.dtype) + byte_scales_config(problem) +
          fmt::format(
              "constexpr int kBits = {}, kUnitGroups = {}, kTokens = {};\n"
              "constexpr bool kAsymmetric = {}, kAffine = {}, kFloating = {}, kTransposed = {}, kRare = {};\n"
              "constexpr bool kSplit = {}, kExperts = {};\nconstexpr int kCodeParts = {};\n",
              static_cast<int>(codec.bits), unit_groups(problem), tokens_of(problem), codec.asymmetric,
              codec.kind == formats::Kind::affine, codec.kind == formats::Kind::floating, problem.transposed,
              rare, is_split(problem), problem.experts.num > 0, is_split(problem) ? code_parts(problem) : 1) +
          cuda::struct_config(
              "QgemmSm80Stored", "kStored",
              {{"parameter_bytes", stored.parameter_bytes}, {"double_quant", stored.double_quant}}))};
}

class QgemmSm80 : public QgemmOneKernel<QgemmSm80Args> {
 public:
  explicit QgemmSm80(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    args_.stored = stored_of(problem);
    if (is_split(problem) || !has_aligned_x(problem)) stage_x(is_split(problem) ? 3 : 1);
    const cuda::Grid grid = place_tiles();
    describe_weight();
    args_.pairs = has_pairs_of_y(problem);
    std::ranges::copy(code_values(problem.codec, problem.dtype), args_.values);
    args_.bf16_scales = problem.codec.scale_type == formats::ScaleType::bf16;
    args_.accumulate = problem.accumulate;
    if (problem.experts.num > 0) args_.experts = experts_args(problem);
    load(kernel_of(problem), grid, args_.splits);
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false,
            problem_.dtype == DType::f32 ? WeightRounding::none
            : problem_.transposed || tokens_of(problem_) == kQgemmSm80WideTokens
                ? WeightRounding::weight_rounded
                : WeightRounding::code_rounded};
  }

 private:
  void place(QgemmSm80Args& args, const QgemmTensors& tensors, void* parts) const override {
    args.x = tensors.x;
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = problem_.bias ? tensors.bias : nullptr;
    args.y = tensors.y;
    args.partials = static_cast<float*>(parts);
    place_experts(args.experts, tensors);
  }

  // A block a tile; where these are too few for the device, several share the sums of a tile.
  // `halfbyte bench qgemm --variant qgemm_sm80` times what the constant chooses.
  cuda::Grid place_tiles() {
    constexpr int64_t kFewestSteps = 4;  // of a block, which has some to begin with
    const int tokens = tokens_of(problem_);
    args_.m = problem_.m;
    args_.x_stride = x_stride();
    args_.x_part = problem_.rows_of_x() * args_.x_stride;
    args_.out_cols = problem_.out_cols();
    args_.out_stride = formats::round_up(args_.out_cols, 2);
    args_.feature_tiles = ceil_div(args_.out_cols, kQgemmSm80Features);
    args_.token_tiles = tiles_of_rows(problem_, tokens);
    args_.steps = ceil_div(problem_.in_cols(), kQgemmSm80Step);
    const int64_t tiles = args_.feature_tiles * args_.token_tiles;
    const int blocks = qgemm_sm80_blocks(tokens, problem_.dtype == DType::f32, problem_.transposed,
                                         problem_.codec.kind == formats::Kind::affine, unit_groups(problem_),
                                         context_.capability);
    const int64_t resident = int64_t{blocks} * context_.num_multiprocessors;
    const int64_t most = std::max<int64_t>(1, args_.steps / kFewestSteps);
    args_.splits = is_split(problem_) ? splits_of_f32(tiles, resident, most)
                                      : std::clamp<int64_t>(resident / tiles, 1, most);
    const QgemmSm80Stage stage = stage_of(problem_, context_.capability);
    args_.map_bytes = stage.map_bytes;
    args_.stage_bytes = stage.bytes();
    args_.stages = stage.stages;
    return {tiles * args_.splits, kQgemmSm80Threads, stage.shared_bytes()};
  }

  // What takes the least time by this model: rounds of blocks, and what it takes to write and add up the
  // parts. Microseconds and bytes a microsecond of an H100: `halfbyte bench qgemm --dtype f32 --m
  // 64,65,128,129` times what they choose.
  int64_t splits_of_f32(int64_t tiles, int64_t resident, int64_t most) const {
    constexpr double kStep = 3, kSum = 3, kBytes = 2.5e6;
    int64_t best = 1;
    double least = std::numeric_limits<double>::max();
    for (int64_t splits = 1; splits <= std::min<int64_t>(most, 16); ++splits) {
      const auto rounds = static_cast<double>(ceil_div(tiles * splits, resident));
      double time = rounds * static_cast<double>(ceil_div(args_.steps, splits)) * kStep;
      if (splits > 1) time += kSum + static_cast<double>(8 * splits * args_.m * args_.out_stride) / kBytes;
      if (time >= least) continue;
      best = splits;
      least = time;
    }
    return best;
  }

  void describe_weight() {
    const formats::PackedLayout& weight = problem_.weight;
    args_.strips = weight.strips;
    args_.units_per_strip = weight.blocks_per_strip * (weight.block_cols / formats::kUnitCols);
    args_.strip_bytes = weight.strip_bytes;
    args_.block_bytes = static_cast<formats::u32>(weight.block_bytes);
    args_.block_shift = std::countr_zero(static_cast<uint64_t>(weight.block_cols / formats::kUnitCols));
    args_.inlined = weight.inlined;
    args_.scales = weight.scales;
    args_.zeros = weight.zeros;
    args_.biases = weight.biases;
    args_.absmax = weight.absmax;
    args_.map = weight.map;
    args_.offset = weight.offset;
    args_.global_scale = weight.global_scale;
    args_.groups = weight.groups;
    args_.last_absmax = (weight.n * weight.groups - 1) / 256;
  }
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm80>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  problem.m = number_of(values, "tokens");
  problem.math = parse_qgemm_math(values.at("math"));
  HALFBYTE_CHECK(problem.math == QgemmMath::automatic || problem.dtype == DType::f32, usage,
                 "qgemm_sm80: math tf32 needs dtype f32, got {}", to_string(problem.dtype));
  problem.transposed = cuda::is_set(values, "transposed");
  problem.experts.num = cuda::is_set(values, "experts") ? 1 : 0;
  const std::string reason = refuse_problem(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm80: {}", reason);
  HALFBYTE_CHECK(tokens_of(problem) == problem.m, usage,
                 "tokens must be 16 or 64 with math tf32 or a weight that no layout stores, 16 or 32 with "
                 "dtype f32 and math auto, got {}",
                 problem.m);
  return kernel_of(problem);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  keys.push_back(cuda::flag_key("transposed", "The product along the rows of the weight."));
  keys.push_back(number_key("tokens", {16, 8, 32, 64, 128}, "Rows of x in the tile of a block."));
  keys.push_back({"math", {"auto", "tf32"}, false, "Of f32: in parts of bf16, or as tf32."});
  keys.push_back(experts_key());
  return {{{"qgemm", "qgemm_sm80", "Both directions, any shape, by mma.sync.", std::move(keys)}, specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm80 = {{"qgemm_sm80", DeviceKind::cuda, &refuse, &make}, &kernels, false, true};

}  // namespace halfbyte
