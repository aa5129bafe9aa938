// `qgemm` of bf16 activations by AVX-512: vdpbf16ps, which adds the products of pairs of bf16 to f32 sums.
//
//   forward, few rows     Codes are looked up in registers and multiplied with x along k: 16 partial sums for
//                         each output. x is small and lies in the order of the codes. Three and more rows
//                         with codes of 4 bits: 16 rows of the weight lie across the lanes, and pairs of x
//                         are broadcast.
//   forward, more rows    Units are decoded to the cache; 16 rows of x lie across the lanes, and pairs of
//                         weights are broadcast.
//   transposed            Units are decoded to pairs of rows of the weight, for few rows of x in registers,
//                         else to the cache; 16 columns lie across the lanes, and pairs of x are broadcast.
//                         Few rows and groups of 16 columns: in f32, x times the scales; of nvfp4, weights
//                         are looked up in a table of all scales and codes.
//
// Forward, sums of a group are of codes and multiplied with its scale in f32 (code_rounded); transposed, what
// is summed has many scales, so they are in the weights (weight_rounded). Groups of 16 columns have it the
// other way round, but for few rows. The order of a sum depends on neither threads nor what else is computed.
// vdpbf16ps takes denormal inputs as zeros and makes zeros of denormal sums.
#include <algorithm>
#include <memory>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "ops/qgemm/qgemm.h"

#ifdef __x86_64__
#include "ops/qgemm/cpu/avx512/columns-inl.h"
#include "ops/qgemm/cpu/avx512/panels-inl.h"
#include "ops/qgemm/cpu/avx512/rows-inl.h"
#include "ops/qgemm/cpu/avx512/strips-inl.h"
#endif

namespace halfbyte {
namespace {

#ifdef __x86_64__

using namespace avx512;

// Forward, codes are multiplied as they are looked up: weights are not decoded to the cache first.
bool multiplies_codes(const QgemmProblem& problem) { return problem.m <= kFewRows || has_lane_rows(problem); }

WeightRounding rounding_of(const QgemmProblem& problem) {
  if (problem.transposed)
    return has_short_groups(problem) ? WeightRounding::code_rounded : WeightRounding::weight_rounded;
  return multiplies_codes(problem) ? WeightRounding::code_rounded : panel_rounding(problem);
}

class QgemmAvx512 : public QgemmKernel {
 public:
  explicit QgemmAvx512(const QgemmProblem& problem) : problem_(problem) {
    const formats::PackedLayout& p = problem.weight;
    const int64_t m = problem.m;
    if (problem.transposed) {
      rows_ = transposed_rows(problem).all;
      row_stride_ = p.strips * kUnitRows + kRowStridePad;
      x_bytes_ = rows_ * row_stride_ * 2;
      return;
    }
    rows_ = has_lane_rows(problem) ? m : m <= kFewRows ? strip_rows(m) : (m + kLanes - 1) / kLanes * kLanes;
    x_bytes_ = rows_ * units_of(p) * kUnitCols * 2;
    if (rounding_of(problem) == WeightRounding::code_rounded &&
        (p.has_biases || (problem.codec.asymmetric && multiplies_codes(problem))))
      sums_ = p.groups;
  }

  std::string name() const override { return "qgemm_avx512"; }
  std::string backend() const override { return "cpu AVX512_BF16"; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, rounding_of(problem_)};
  }
  int64_t workspace_bytes() const override {
    return x_bytes_ + sums_ * rows_ * static_cast<int64_t>(sizeof(float)) + kAlignment;
  }

  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    auto* const memory = static_cast<uint8_t*>(workspace) + (kAlignment - address % kAlignment) % kAlignment;
    const Run run{problem_,
                  tensors,
                  reinterpret_cast<uint16_t*>(memory),
                  reinterpret_cast<float*>(memory + x_bytes_),
                  rows_,
                  row_stride_,
                  global_factor(problem_, tensors)};
    if (problem_.transposed)
      run_transposed(run);
    else
      run_forward(run);
  }

 private:
  static constexpr int kAlignment = 64;

  void run_forward(const Run& run) const {
    const int threads = problem_.num_threads;
    const formats::PackedLayout& p = problem_.weight;
    const int64_t units = units_of(p), panels = (rows_ + kPanelRows - 1) / kPanelRows;
    if (sums_ > 0)
      parallel_for(sums_, 64, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t group = begin; group < end; ++group) sum_group(run, group);
      });
    if (multiplies_codes(problem_)) {
      const bool in_lanes = has_lane_rows(problem_);
      parallel_for(units, 64, threads, [&](int64_t begin, int64_t end, int) {
        (in_lanes ? copy_units : arrange_rows)(run, begin, end);
      });
      const StripsFunction multiply = in_lanes ? multiply_lane_rows : strips_function(problem_, rows_);
      // Strips behind each other: what a thread fetches ahead is its own.
      const int64_t grain = std::clamp<int64_t>(p.strips / (16 * effective_threads(threads)), 1, 8);
      parallel_for(p.strips, grain, threads,
                   [&](int64_t begin, int64_t end, int) { multiply(run, begin, end); });
      return;
    }
    parallel_for(units * panels, 16, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) arrange_panel(run, i / units, i % units);
    });
    const int64_t batches = (panels + kTaskPanels - 1) / kTaskPanels;
    const int64_t step =
        std::clamp<int64_t>(p.strips * batches / (8 * effective_threads(threads)), 1, kTaskStrips);
    const int64_t tasks = (p.strips + step - 1) / step;
    parallel_for(batches * tasks, 1, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t strip = i % tasks * step, panel = i / tasks * kTaskPanels;
        PanelTask(run, strip, static_cast<int>(std::min<int64_t>(step, p.strips - strip)), panel,
                  static_cast<int>(std::min<int64_t>(kTaskPanels, panels - panel)))
            .multiply();
      }
    });
  }

  void run_transposed(const Run& run) const {
    const int threads = problem_.num_threads;
    parallel_for(rows_, 4, threads, [&](int64_t begin, int64_t end, int) { copy_rows(run, begin, end); });
    const int64_t units = (problem_.k + kUnitCols - 1) / kUnitCols;
    const int64_t tasks = (units + kTaskUnits - 1) / kTaskUnits;
    const int64_t task_rows = transposed_rows(problem_).of_task;
    const int64_t batches = (rows_ + task_rows - 1) / task_rows;
    // The rows of some columns behind each other: these of the weight are in the cache. A thread has all of
    // few.
    const int64_t grain = task_rows < kTaskRows ? batches : 1;
    parallel_for(tasks * batches, grain, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t unit = i / batches * kTaskUnits, row = i % batches * task_rows;
        multiply_columns(run, unit, std::min(units, unit + kTaskUnits), row,
                         static_cast<int>(std::min(task_rows, rows_ - row)));
      }
    });
  }

  QgemmProblem problem_;
  int64_t rows_ = 0, row_stride_ = 0, x_bytes_ = 0;
  int64_t sums_ = 0;  // groups whose sums of x are needed
};

std::string refuse(const QgemmProblem& problem) {
  if (!cpu_features().avx512_bf16) return "the CPU does not have AVX-512 with products of bf16";
  if (problem.in_cols() == 0) return "there is nothing to sum";
  return refuse_bf16_decode(problem);
}
std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmAvx512>(problem);
}

#else

std::string refuse(const QgemmProblem&) { return "the CPU does not have AVX-512 with products of bf16"; }
std::shared_ptr<const QgemmKernel> make(const QgemmProblem&) { return nullptr; }

#endif

}  // namespace

const QgemmVariant kQgemmAvx512 = {{"qgemm_avx512", DeviceKind::cpu, &refuse, &make}};

}  // namespace halfbyte
