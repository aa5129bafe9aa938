#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm80/sm80_args.h"

namespace halfbyte {
namespace {

// Groups that the 64 columns of a unit can have parameters of.
int unit_groups(const QgemmProblem& problem) {
  const formats::PackedLayout& weight = problem.weight;
  if (weight.groups == 1) return 1;
  return weight.group % 64 == 0 ? 1 : weight.group % 32 == 0 ? 2 : 4;
}
QgemmSm80Stage stage_of(const QgemmProblem& problem, int capability) {
  const formats::PackedLayout& weight = problem.weight;
  return qgemm_sm80_stage(weight.bits, weight.scale_bytes, weight.has_zeros, weight.bias_bytes,
                          weight.double_quant, unit_groups(problem), qgemm_sm80_tokens(problem),
                          static_cast<int>(size_of(problem.dtype)), capability);
}
// Rows of x are whole chunks of 16 bytes.
bool is_aligned(const QgemmProblem& problem) {
  return problem.alignment >= 16 && problem.in_cols() * size_of(problem.dtype) % 16 == 0;
}

std::string refuse_problem(const QgemmProblem& problem) {
  if (!problem.packed) return "the weight must be packed";
  if (problem.tile != QgemmTile()) return "tile is for qgemm_simt";
  if (problem.dtype == DType::f32 && problem.math != QgemmMath::tf32)
    return fmt::format("math must be tf32 where dtype is f32, got {}", to_string(problem.math));
  if (problem.weight.groups > 1 && problem.weight.group % 16 != 0)
    return fmt::format("the group size must be a multiple of 16, got {}", problem.weight.group);
  return "";
}
std::string refuse(const QgemmProblem& problem) {
  const int capability = cuda::context(problem.device.index).capability;
  if (capability < 80)
    return fmt::format("the device must have compute capability 8.0, got {}.{}", capability / 10,
                       capability % 10);
  return refuse_problem(problem);
}

class QgemmSm80 : public QgemmKernel {
 public:
  explicit QgemmSm80(const QgemmProblem& problem)
      : problem_(problem), context_(cuda::context(problem.device.index)) {
    const cuda::Scope scope(context_);
    place_tiles();
    describe_weight();
    args_.pairs = problem.out_cols() % 2 == 0 && problem.alignment >= 2 * size_of(problem.dtype);
    args_.accumulate = problem.accumulate;
    function_ = cuda::get_kernel(context_, qgemm_sm80_kernel(problem));
    cuda::allow_shared_bytes(function_, grid_.shared_bytes);
    if (args_.splits > 1) sum_ = cuda::get_kernel(context_, qgemm_sm80_sum_kernel(problem));
  }

  std::string name() const override { return "qgemm_sm80"; }
  std::string backend() const override { return "cuda " + context_.target; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false,
            problem_.dtype == DType::f32 ? WeightRounding::none
            : problem_.transposed || qgemm_sm80_tokens(problem_) == kQgemmSm80WideTokens
                ? WeightRounding::weight_rounded
                : WeightRounding::code_rounded};
  }
  int64_t workspace_bytes() const override {
    return args_.splits == 1 ? 0 : args_.splits * args_.m * args_.out_stride * int64_t{sizeof(float)};
  }

  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    QgemmSm80Args args = args_;
    args.x = tensors.x;
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.bias = problem_.bias ? tensors.bias : nullptr;
    args.y = tensors.y;
    if (args.splits > 1) args.partials = static_cast<float*>(workspace);
    const bool can_start_early = context_.capability >= 90;
    launch(can_start_early && problem_.early_start, function_, grid_, stream, args);
    if (sum_ != nullptr)
      launch(can_start_early, sum_,
             {ceil_div(args.m * args.out_stride / 2, kQgemmSm80SumThreads), kQgemmSm80SumThreads}, stream,
             args);
  }

 private:
  static void launch(bool early, cuda::CUfunction function, cuda::Grid grid, void* stream,
                     const QgemmSm80Args& args) {
    if (early)
      cuda::launch_early(function, grid, stream, args);
    else
      cuda::launch(function, grid, stream, args);
  }

  // A block a tile; where these are too few for the device, several share the sums of a tile.
  void place_tiles() {
    constexpr int64_t kFewestSteps = 4;  // of a block, which has some to begin with
    const int tokens = qgemm_sm80_tokens(problem_);
    args_.m = problem_.m;
    args_.in_cols = problem_.in_cols();
    args_.out_cols = problem_.out_cols();
    args_.out_stride = formats::round_up(args_.out_cols, 2);
    args_.feature_tiles = ceil_div(args_.out_cols, kQgemmSm80Features);
    args_.token_tiles = ceil_div(args_.m, tokens);
    args_.steps = ceil_div(args_.in_cols, kQgemmSm80Step);
    const int64_t tiles = args_.feature_tiles * args_.token_tiles;
    const int64_t resident = int64_t{qgemm_sm80_blocks(tokens, static_cast<int>(size_of(problem_.dtype)))} *
                             context_.num_multiprocessors;
    args_.splits = std::clamp<int64_t>(resident / tiles, 1, std::max<int64_t>(1, args_.steps / kFewestSteps));
    grid_ = {tiles * args_.splits, kQgemmSm80Threads, stage_of(problem_, context_.capability).shared_bytes()};
  }

  void describe_weight() {
    const formats::PackedLayout& weight = problem_.weight;
    args_.strips = weight.strips;
    args_.units_per_strip = weight.blocks_per_strip * (weight.block_cols / formats::kUnitCols);
    args_.strip_bytes = weight.strip_bytes;
    args_.scales = weight.scales;
    args_.zeros = weight.zeros;
    args_.biases = weight.biases;
    args_.absmax = weight.absmax;
    args_.map = weight.map;
    args_.offset = weight.offset;
    args_.groups = weight.groups;
    args_.group = weight.group;
    args_.last_absmax = (weight.n * weight.groups - 1) / 256;
  }

  QgemmProblem problem_;
  const cuda::Context& context_;
  cuda::CUfunction function_ = nullptr, sum_ = nullptr;
  cuda::Grid grid_;
  QgemmSm80Args args_{};  // but for addresses
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm80>(problem);
}

}  // namespace

int qgemm_sm80_tokens(const QgemmProblem& problem) {
  // Of f32 more would not fit into registers.
  const int64_t tokens =
      std::clamp<int64_t>(problem.m, 8, problem.dtype == DType::f32 ? 64 : kQgemmSm80WideTokens);
  return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(tokens)));
}

cuda::KernelSpec qgemm_sm80_kernel(const QgemmProblem& problem) {
  const std::string reason = refuse_problem(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm80: {}", reason);
  return {"ops/qgemm/sm80/sm80.cu", "qgemm_sm80",
          cuda::config_text(cuda::element_config(problem.dtype) + cuda::codec_config(problem.codec) +
                            fmt::format("constexpr bool kTransposed = {}, kDoubleQuant = {}, kAligned = {};\n"
                                        "constexpr int kGroup = {}, kUnitGroups = {}, kTokens = {};\n",
                                        problem.transposed, problem.double_quant, is_aligned(problem),
                                        problem.weight.inlined ? problem.weight.group : 0,
                                        unit_groups(problem), qgemm_sm80_tokens(problem)))};
}

cuda::KernelSpec qgemm_sm80_sum_kernel(const QgemmProblem& problem) {
  return {"ops/qgemm/sm80/sm80_sum.cu", "qgemm_sm80_sum",
          cuda::config_text(cuda::element_config(problem.dtype))};
}

const QgemmVariant kQgemmSm80 = {"qgemm_sm80", DeviceKind::cuda, &refuse, &make};

}  // namespace halfbyte
