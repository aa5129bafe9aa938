#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/sm90_f32_transposed/sm90_f32_transposed_args.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/f32_rows_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

constexpr int64_t kMostRows = 4;
constexpr int kSharedBytes = 227 * 1024;  // of a block, on sm_90

std::string refuse(const QgemmProblem& p) { return refuse_for_f32_rows(p, true, kMostRows); }

cuda::KernelSpec kernel_of(const QgemmProblem& problem) {
  return {
      "ops/qgemm/sm90_f32_transposed/sm90_f32_transposed.cu", "qgemm_sm90_f32_transposed",
      cuda::config_text(cuda::element_config(DType::f32) + packed_config(problem) +
                        bf16_scales_config(problem) + fmt::format("constexpr int kM = {};\n", problem.m))};
}

class QgemmSm90F32Transposed : public QgemmOneKernel<QgemmSm90F32TransposedArgs> {
 public:
  explicit QgemmSm90F32Transposed(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    const formats::PackedLayout& weight = problem.weight;
    const int64_t units_per_block = weight.block_cols / formats::kUnitCols;
    args_.n = problem.n;
    args_.k = problem.k;
    args_.strip_bytes = weight.strip_bytes;
    args_.strips = static_cast<int>(weight.strips);
    args_.units = static_cast<int>(ceil_div(problem.k, formats::kUnitCols));
    args_.block_bytes = weight.block_bytes;
    args_.block_code_bytes = weight.block_code_bytes;
    args_.block_units_shift = std::countr_zero(static_cast<uint64_t>(units_per_block));
    args_.unit_groups = problem.group < formats::kUnitCols ? 2 : 1;
    args_.slot_bytes = static_cast<int>(weight.block_code_bytes / units_per_block) + weight.block_bytes -
                       weight.block_code_bytes;
    args_.slots = kF32TransposedMaxSlots;
    const auto shared = [&] {
      return f32_transposed_shared(static_cast<int>(problem.m), args_.slots, args_.slot_bytes);
    };
    while (shared().num_bytes > kSharedBytes) --args_.slots;
    args_.shared = shared();
    const int64_t parts = parts_of(args_.units);
    args_.part_strips = static_cast<int>(ceil_div(args_.strips, parts));
    const int64_t items = args_.units * ceil_div(args_.strips, args_.part_strips);
    args_.items = static_cast<int>(items);
    std::ranges::copy(code_values(problem.codec, DType::f32), args_.values);
    args_.accumulate = problem.accumulate;
    // The same number of items a block, as nearly as can be.
    const int64_t rounds = ceil_div(items, context_.num_multiprocessors);
    load(kernel_of(problem),
         {ceil_div(items, rounds), 32 * f32_transposed_warps(static_cast<int>(problem.m)),
          args_.shared.num_bytes},
         items / args_.units, {DType::f32, DType::f64});
  }

  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::none};
  }

 private:
  void place(QgemmSm90F32TransposedArgs& args, const QgemmTensors& tensors, void* parts) const override {
    args.weight = static_cast<const formats::u8*>(tensors.weight);
    args.x = static_cast<const float*>(tensors.x);
    args.bias = problem_.bias ? static_cast<const float*>(tensors.bias) : nullptr;
    args.y = static_cast<float*>(tensors.y);
    args.partials = static_cast<float*>(parts);
  }

  // In how many parts strips are summed: what takes the least time by this model, of rounds of items, in
  // rounds of strips of a block, and of the kernel that adds up the parts. Microseconds of an H200: `halfbyte
  // bench qgemm --dtype f32 --direction transposed --m 1` times what they choose.
  int64_t parts_of(int64_t units) const {
    constexpr double kStrips = 0.8, kItem = 1, kSum = 2.5;
    const int64_t rounds_of_strips =
        ceil_div(args_.strips, f32_transposed_warps(static_cast<int>(problem_.m)));
    int64_t best = 1;
    double least = 0;
    for (int64_t parts = 1; parts <= std::clamp<int64_t>(rounds_of_strips / 2, 1, 32); ++parts) {
      const auto rounds = static_cast<double>(ceil_div(units * parts, context_.num_multiprocessors));
      const double time =
          rounds * (static_cast<double>(ceil_div(rounds_of_strips, parts)) * kStrips + kItem) +
          (parts > 1 ? kSum : 0);
      if (parts > 1 && time >= least) continue;
      best = parts;
      least = time;
    }
    return best;
  }
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSm90F32Transposed>(problem);
}

// ---- The rows of the table of kernels

cuda::KernelSpec specialise(const cuda::KernelValues& values) { return kernel_of(f32_rows_problem(values)); }

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = f32_rows_keys();
  keys.push_back(number_key("rows", {1, 2, 3, 4}, "Of x."));
  return {{{"qgemm", "qgemm_sm90_f32_transposed", "Transposed, f32, at most 4 rows of x.", std::move(keys),
            kSm90Target},
           specialise}};
}

}  // namespace

const QgemmVariant kQgemmSm90F32Transposed = {{"qgemm_sm90_f32_transposed", DeviceKind::cuda, &refuse, &make},
                                              &kernels};

}  // namespace halfbyte
