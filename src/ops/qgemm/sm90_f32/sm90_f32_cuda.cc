#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_f32/sm90_f32_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/f32_rows_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int64_t kMostRows = 4;
constexpr int64_t kSharedBytes = 227 * 1024;  // of a block, on sm_90
constexpr int kFewestStages = 3;

int rows_of(const QgemmProblem& problem) { return static_cast<int>(problem.m); }
int64_t units_per_block(const QgemmProblem& problem) {
  return problem.weight.block_cols / formats::kUnitCols;
}
int stage_bytes(const QgemmProblem& problem) {
  return static_cast<int>(kF32StageUnits / units_per_block(problem)) * problem.weight.block_bytes;
}
int64_t units_of(const QgemmProblem& problem) {
  return problem.weight.blocks_per_strip * units_per_block(problem);
}
bool has_x_in_registers(const QgemmProblem& problem) {
  return units_of(problem) <= int64_t{kF32StageUnits} * f32_register_units(rows_of(problem));
}

// As much of the ring as fits, at most kF32MaxStages stages.
int stages_of(const QgemmProblem& problem) {
  const int64_t x_cols = has_x_in_registers(problem) ? 0 : units_of(problem) * formats::kUnitCols;
  if (x_cols > kSharedBytes) return 0;
  const int rest = f32_shared(rows_of(problem), 0, 0, static_cast<int>(x_cols)).num_bytes;
  return static_cast<int>(
      std::clamp<int64_t>((kSharedBytes - rest) / stage_bytes(problem), 0, kF32MaxStages));
}

std::string refuse(const QgemmProblem& p) {
  if (std::string reason = refuse_for_f32_rows(p, false, kMostRows); !reason.empty()) return reason;
  if (stages_of(p) < kFewestStages)
    return fmt::format("{} rows of x of {} columns are too many for shared memory", p.m, p.k);
  return "";
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem) {
  return {"ops/qgemm/sm90_f32/sm90_f32.cu", "qgemm_sm90_f32",
          cuda::config_text(packed_config(problem) + bf16_scales_config(problem) +
                            fmt::format("constexpr bool kXInRegisters = {};\nconstexpr int kM = {};\n",
                                        has_x_in_registers(problem), rows_of(problem)))};
}

class QgemmSm90F32 : public QgemmOneKernel<QgemmSm90F32Args> {
 public:
  explicit QgemmSm90F32(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const formats::PackedLayout& weight = problem.weight;
    args_.n = problem.n;
    args_.k = problem.k;
    args_.m = static_cast<int>(problem.m);
    args_.strips = static_cast<int>(weight.strips);
    args_.strip_bytes = weight.strip_bytes;
    args_.units = static_cast<int>(units_of(problem));
    args_.stages = stages_of(problem);
    args_.stage_bytes = stage_bytes(problem);
    args_.block_bytes = weight.block_bytes;
    args_.block_code_bytes = weight.block_code_bytes;
    args_.block_units_shift = std::countr_zero(static_cast<uint64_t>(units_per_block(problem)));
    args_.unit_groups = problem.group < formats::kUnitCols ? 2 : 1;
    args_.shared = f32_shared(rows_of(problem), args_.stages, args_.stage_bytes,
                              has_x_in_registers(problem) ? 0 : args_.units * formats::kUnitCols);
    std::ranges::copy(code_values(problem.codec, DType::f32), args_.values);
    args_.accumulate = problem.accumulate;
    // The same number of strips a block, as nearly as can be.
    const int64_t rounds = ceil_div(weight.strips, context_.num_multiprocessors);
    load(kernel_of(problem), {ceil_div(weight.strips, rounds), kF32Threads, args_.shared.num_bytes});
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::none};
  }

 private:
  void place(QgemmSm90F32Args& args, const QgemmTensors& tensors, void*) const override {
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.x = static_cast<const float*>(tensors.x);
    args.bias = problem_.bias ? static_cast<const float*>(tensors.bias) : nullptr;
    args.y = static_cast<float*>(tensors.y);
  }
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90F32>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) {
  QgemmProblem problem = f32_rows_problem(values);
  // As many units as are still in registers, or more.
  problem.weight.blocks_per_strip = cuda::is_set(values, "long") ? 1 << 20 : 1;
  return kernel_of(problem);
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = f32_rows_keys();
  keys.push_back(number_key("rows", {1, 2, 3, 4}, "Of x."));
  keys.push_back(cuda::flag_key("long", "Of x: more than registers hold."));
  return {{{"qgemm", "qgemm_sm90_f32", "Forward, f32, at most 4 rows of x.", std::move(keys), kSm90Target},
           specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90F32 = {{"qgemm_sm90_f32", DeviceKind::cuda, &refuse, &make}, &kernels};

}  // namespace halfbyte
