#include <algorithm>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_mma/sm90_mma_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int kMaxStages = 9;
constexpr int64_t kMaxUnits = 8;  // of a warp, whose x is in registers
constexpr int64_t kMaxCols = kMaxUnits * kSm90MmaWarps * formats::kUnitCols;

int64_t units_of(const QgemmProblem& problem) { return ceil_div(problem.k, formats::kUnitCols); }

// What the kernel is specialised on, but for types: units of a warp, and as many stages as fit.
struct Tuning {
  int units = 0, stages = 0, shared_bytes = 0;
};
Tuning tuning_of(const QgemmProblem& problem) {
  const formats::Codec& codec = problem.codec;
  const auto stage_bytes = static_cast<int>(
      sm90_mma_stage(codec.bits, formats::scale_bytes(codec.scale_type), codec.asymmetric,
                     codec.kind == formats::Kind::affine, inlined_group(problem), problem.double_quant)
          .strip_bytes);
  Tuning tuning{.units = static_cast<int>(ceil_div(units_of(problem), kSm90MmaWarps))};
  for (int stages = 2; stages <= kMaxStages; ++stages) {
    const int shared_bytes = sm90_mma_shared(codec.bits, stage_bytes, stages, problem.double_quant).num_bytes;
    if (shared_bytes > kSm90MmaSharedBytes) break;
    tuning.stages = stages;
    tuning.shared_bytes = shared_bytes;
  }
  return tuning;
}

// As few blocks as do not have more to do, in tiles of 16 rows, than with all multiprocessors.
int64_t num_blocks(const QgemmProblem& problem, int64_t num_multiprocessors) {
  const int64_t tiles = 2 * problem.weight.strips;
  return ceil_div(tiles, ceil_div(tiles, num_multiprocessors));
}

// Why the kernel, wherever it runs, does not take the problem.
std::string refuse_problem(const QgemmProblem& problem) {
  if (problem.transposed) return "it is for the forward product";
  if (!problem.packed) return "the weight must be packed";
  if (problem.m > kSm90MmaTokens)
    return fmt::format("m must be at most {}, got {}", kSm90MmaTokens, problem.m);
  if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
    return fmt::format("dtype must be bf16 or f16, got {}", to_string(problem.dtype));
  if (std::string reason = refuse_rare_weight(problem); !reason.empty()) return reason;
  if (inlined_group(problem) == 16) return "groups must be rows or multiples of 32 columns, got those of 16";
  if (problem.k > kMaxCols) return fmt::format("k must be at most {}, got {}", kMaxCols, problem.k);
  if (problem.k % 2 != 0) return fmt::format("k must be even, got {}", problem.k);
  if (problem.alignment < 4) return fmt::format("alignment must be at least 4, got {}", problem.alignment);
  if (problem.tile != QgemmTile()) return "tile is for qgemm_simt";
  return "";
}

std::string refuse(const QgemmProblem& problem) {
  if (std::string reason = refuse_other_than_sm90(problem); !reason.empty()) return reason;
  return refuse_problem(problem);
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem) {
  const Tuning tuning = tuning_of(problem);
  return {"ops/qgemm/sm90_mma/sm90_mma.cu", "qgemm_sm90_mma",
          cuda::config_text(cuda::element_config(problem.dtype) + packed_config(problem) +
                            bf16_scales_config(problem) +
                            fmt::format("constexpr int kGroup = {}, kUnits = {}, kStages = {};\n",
                                        inlined_group(problem), tuning.units, tuning.stages))};
}

class QgemmSm90Mma : public QgemmOneKernel<QgemmSm90MmaArgs> {
 public:
  explicit QgemmSm90Mma(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const int64_t blocks = num_blocks(problem, context_.num_multiprocessors);
    args_.layout = problem.weight;
    args_.m = static_cast<int>(problem.m);
    args_.units = static_cast<int>(units_of(problem));
    args_.rounds = static_cast<int>(problem.weight.strips / blocks);
    args_.rest = static_cast<int>(problem.weight.strips % blocks);
    args_.whole_chunks = problem.k % 8 == 0 && problem.alignment >= 16;
    args_.values = code_values_args(problem.codec, problem.dtype);
    args_.accumulate = problem.accumulate;
    args_.early_start = problem.early_start;
    load(kernel_of(problem), {blocks, kSm90MmaThreads, tuning_of(problem).shared_bytes});
  }

  PrecisionGuarantee guarantee() const override {
    return {.same_on_all_devices = false, .weight_rounding = WeightRounding::code_rounded};
  }

 private:
  void place(QgemmSm90MmaArgs& args, const QgemmTensors& tensors, void*) const override {
    args.x = tensors.x;
    args.weight = static_cast<const uint8_t*>(tensors.weight);
    args.bias = tensors.bias;
    args.y = tensors.y;
  }
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<const QgemmSm90Mma>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = qgemm_problem(values);
  const formats::PackedLayout& weight = problem.weight;
  problem.k = number_of(values, "units") * kSm90MmaWarps * formats::kUnitCols;
  problem.weight = formats::packed_layout(problem.n, problem.k, weight.bits,
                                          problem.group == weight.k ? problem.k : problem.group,
                                          formats::scale_bytes(problem.codec.scale_type), weight.has_zeros,
                                          weight.has_biases, weight.double_quant, false);
  const std::string reason = refuse_problem(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_sm90_mma: {}", reason);
  return kernel_of(problem);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_fragment_keys();
  for (KernelKey& key : keys)
    if (key.name == "dtype") key.values = {"bf16", "f16"};
  keys.push_back(number_key("units", {4, 8, 1, 2, 3, 5, 6, 7}, "Columns / 1024, rounded up."));
  return {
      {{"qgemm", "qgemm_sm90_mma", "Forward, up to 8 rows: x in registers.", std::move(keys), kSm90Target},
       specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90Mma = {{"qgemm_sm90_mma", DeviceKind::cuda, &refuse, &make}, &kernels};

}  // namespace halfbyte
