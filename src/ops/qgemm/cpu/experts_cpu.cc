// Products with the weights of experts on the CPU: the rows of one expert after those of the other, gathered,
// multiplied by the variants for one weight, which leave f32 sums, and finished where they belong.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu/parallel.h"
#include "ops/qgemm/qgemm.h"

namespace halfbyte {
namespace {

constexpr int64_t kMostRows = 512;  // of a product: its x and sums stay in the cache
constexpr int64_t kAlignment = 64;  // of the parts of the workspace

// Rows of a product that is made for at least `rows`: kernels for every number of rows would be many. Rows
// too many are zeros.
int64_t planned_rows(int64_t rows) {
  const int64_t step = rows <= 32 ? 1 : rows <= 64 ? 4 : rows <= 256 ? 16 : 64;
  return formats::round_up(rows, step);
}

struct F32Elements {
  using Memory = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
struct F16Elements {
  using Memory = uint16_t;
  static float load(uint16_t x) { return formats::f16_to_f32(x); }
  static uint16_t store(float x) { return formats::f32_to_f16(x); }
};
struct BF16Elements {
  using Memory = uint16_t;
  static float load(uint16_t x) { return formats::bf16_to_f32(x); }
  static uint16_t store(float x) { return formats::f32_to_bf16(x); }
};

// Sums to a row of y.
template <class E>
void store_row(float* sums, int64_t cols, bool accumulate, void* y, int64_t row) {
  auto* const to = static_cast<typename E::Memory*>(y) + row * cols;
  if (accumulate)
    for (int64_t col = 0; col < cols; ++col) sums[col] += E::load(to[col]);
  for (int64_t col = 0; col < cols; ++col) to[col] = E::store(sums[col]);
}
template <class E>
void add_row(float* sums, int64_t cols, const void* x, int64_t row) {
  const auto* const from = static_cast<const typename E::Memory*>(x) + row * cols;
  for (int64_t col = 0; col < cols; ++col) sums[col] += E::load(from[col]);
}
template <class E>
float dot_row(const float* sums, int64_t cols, const void* x, int64_t row) {
  constexpr size_t kLanes = 16;
  const auto* const from = static_cast<const typename E::Memory*>(x) + row * cols;
  std::array<double, kLanes> parts{};
  for (int64_t col = 0; col < cols; ++col)
    parts[static_cast<size_t>(col) % kLanes] += static_cast<double>(sums[col] * E::load(from[col]));
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
  return static_cast<float>(parts[0]);
}
struct RowFunctions {
  void (*store)(float* sums, int64_t cols, bool accumulate, void* y, int64_t row);
  void (*add)(float* sums, int64_t cols, const void* x, int64_t row);
  float (*dot)(const float* sums, int64_t cols, const void* x, int64_t row);
};
template <class E>
constexpr RowFunctions kFunctions{store_row<E>, add_row<E>, dot_row<E>};

class ExpertsCpu : public QgemmKernel {
 public:
  ExpertsCpu(const QgemmProblem& problem, const std::string& variant, int num_threads)
      : problem_(problem),
        functions_(problem.dtype == DType::f32   ? kFunctions<F32Elements>
                   : problem.dtype == DType::f16 ? kFunctions<F16Elements>
                                                 : kFunctions<BF16Elements>) {
    const QgemmExperts& experts = problem.experts;
    const int64_t most =
        std::min(kMostRows, experts.rows == ExpertRows::masked ? experts.rows_per_expert : problem.m);
    guarantee_ = {DType::f32, DType::f32, true, false, WeightRounding::none};
    int64_t kernel_bytes = 0;
    for (int64_t rows = 1; rows <= planned_rows(most); rows = planned_rows(rows + 1)) {
      const QgemmProblem product = product_of_expert(problem, rows, num_threads);
      kernels_.push_back({rows, choose_qgemm(product, variant).variant.run(product)});
      kernel_bytes = std::max(kernel_bytes, kernels_.back().kernel->workspace_bytes());
      guarantee_.weight_rounding =
          std::max(guarantee_.weight_rounding, kernels_.back().kernel->guarantee().weight_rounding);
    }
    const auto take = [&](int64_t num_bytes) {
      const int64_t begin = bytes_;
      bytes_ += formats::round_up(num_bytes, kAlignment);
      return begin;
    };
    const int64_t rows = planned_rows(most);
    constexpr auto kSumBytes = static_cast<int64_t>(sizeof(float));
    x_ = take(rows * problem.in_cols() * size_of(problem.dtype));
    sums_ = take(rows * problem.out_cols() * kSumBytes);
    if (experts.slots_per_y > 1) slot_sums_ = take(problem.m * problem.y_cols() * kSumBytes);
    kernel_ = take(kernel_bytes);
  }

  std::string name() const override { return kernels_.back().kernel->name(); }
  std::string backend() const override { return kernels_.back().kernel->backend(); }
  PrecisionGuarantee guarantee() const override { return guarantee_; }
  int64_t workspace_bytes() const override { return bytes_ + kAlignment; }

  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    const Run run{tensors,
                  static_cast<std::byte*>(workspace) + (kAlignment - address % kAlignment) % kAlignment};
    const QgemmExperts& experts = problem_.experts;
    if (experts.rows == ExpertRows::masked) {
      for (int64_t e = 0; e < experts.num; ++e) {
        const int64_t begin = e * experts.rows_per_expert;
        multiply(run, e, begin, begin + std::clamp<int64_t>(tensors.offsets[e], 0, experts.rows_per_expert));
      }
      return;
    }
    int64_t begin = 0;
    for (int64_t e = 0; e < experts.num; ++e) {
      const int64_t end = std::clamp<int64_t>(tensors.offsets[e], begin, problem_.m);
      multiply(run, e, begin, end);
      begin = end;
    }
    for (; begin < problem_.m; begin += kMostRows) {  // those that no expert has
      const int64_t end = std::min(problem_.m, begin + kMostRows);
      std::fill_n(floats(run, sums_), (end - begin) * problem_.out_cols(), 0.0f);
      finish(run, -1, begin, end);
    }
    if (experts.slots_per_y > 1) sum_slots(run);
  }

 private:
  struct PlannedKernel {
    int64_t rows;
    std::shared_ptr<const QgemmKernel> kernel;
  };
  struct Run {
    const QgemmTensors& tensors;
    std::byte* workspace;
  };
  float* floats(const Run& run, int64_t place) const {
    return reinterpret_cast<float*>(run.workspace + place);
  }

  // Where row number i of the order of experts lies; -1: nowhere.
  int64_t slot_of(const Run& run, int64_t i) const {
    if (run.tensors.slots == nullptr) return i;
    const int64_t slot = run.tensors.slots[i];
    return slot >= 0 && slot < problem_.m ? slot : -1;
  }

  // Rows [begin, end) of the order, which are those of an expert.
  void multiply(const Run& run, int64_t expert, int64_t begin, int64_t end) const {
    const int64_t num_bytes = problem_.in_cols() * size_of(problem_.dtype);
    std::byte* const x = run.workspace + x_;
    for (int64_t first = begin; first < end; first += kMostRows) {
      const int64_t rows = std::min(kMostRows, end - first);
      const auto of_rows =
          std::ranges::lower_bound(kernels_, rows, std::ranges::less{}, &PlannedKernel::rows);
      if (num_bytes > 0) {
        parallel_for(rows, 16, problem_.num_threads, [&](int64_t from, int64_t to, int) {
          for (int64_t i = from; i < to; ++i) {
            const int64_t row = std::max<int64_t>(slot_of(run, first + i), 0) / problem_.experts.slots_per_x;
            std::memcpy(x + i * num_bytes, static_cast<const std::byte*>(run.tensors.x) + row * num_bytes,
                        static_cast<size_t>(num_bytes));
          }
        });
        std::memset(x + rows * num_bytes, 0, static_cast<size_t>((of_rows->rows - rows) * num_bytes));
      }
      QgemmTensors tensors;
      tensors.x = x;
      tensors.weight = static_cast<const std::byte*>(run.tensors.weight) + expert * problem_.weight.num_bytes;
      tensors.y = floats(run, sums_);
      of_rows->kernel->run(tensors, nullptr, run.workspace + kernel_);
      finish(run, expert, first, first + rows);
    }
  }

  // Rows of y, or sums of slots, from the sums of rows [begin, end) of the order. No expert: -1.
  void finish(const Run& run, int64_t expert, int64_t begin, int64_t end) const {
    const QgemmTensors& t = run.tensors;
    const int64_t cols = problem_.out_cols(), y_cols = problem_.y_cols();
    parallel_for(end - begin, 4, problem_.num_threads, [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t slot = slot_of(run, begin + i);
        if (slot < 0) continue;
        float* const row = floats(run, sums_) + i * cols;
        if (problem_.experts.routing_gradient)
          t.routing_grad[slot] = functions_.dot(row, cols, t.forward_x, slot);
        if (problem_.bias && expert >= 0) functions_.add(row, cols, t.bias, expert);
        if (problem_.experts.swiglu)
          for (int64_t col = 0; col < y_cols; ++col)
            row[col] = row[col] / (1 + std::exp(-row[col])) * row[y_cols + col];
        if (problem_.experts.routing_weights)
          for (int64_t col = 0; col < y_cols; ++col) row[col] *= t.routing_weights[slot];
        if (problem_.experts.slots_per_y > 1)
          std::copy(row, row + y_cols, floats(run, slot_sums_) + slot * y_cols);
        else
          functions_.store(row, y_cols, problem_.accumulate, t.y, slot);
      }
    });
  }

  // y from the sums of slots, in their order.
  void sum_slots(const Run& run) const {
    const int64_t cols = problem_.y_cols(), top_k = problem_.experts.slots_per_y;
    parallel_for(problem_.m / top_k, 4, problem_.num_threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t token = begin; token < end; ++token) {
        float* const total = floats(run, slot_sums_) + token * top_k * cols;
        for (int64_t j = 1; j < top_k; ++j)
          for (int64_t col = 0; col < cols; ++col) total[col] += total[j * cols + col];
        functions_.store(total, cols, problem_.accumulate, run.tensors.y, token);
      }
    });
  }

  QgemmProblem problem_;
  RowFunctions functions_;
  PrecisionGuarantee guarantee_;
  std::vector<PlannedKernel> kernels_;                                 // in ascending order of rows
  int64_t x_ = 0, sums_ = 0, slot_sums_ = 0, kernel_ = 0, bytes_ = 0;  // of the workspace, in bytes
};

}  // namespace

std::shared_ptr<const QgemmKernel> make_experts_cpu(const QgemmProblem& problem, const std::string& variant,
                                                    int num_threads) {
  return std::make_shared<ExpertsCpu>(problem, variant, num_threads);
}

}  // namespace halfbyte
