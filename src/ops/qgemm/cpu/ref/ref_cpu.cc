// `qgemm_ref`, the variant of the CPU that takes everything: blocks of the weight are decoded to a buffer in
// the cache and multiplied with all rows of x there. Every sum has one order, whichever thread makes it: of
// products that are rounded to f32 (f64 for QgemmMath::f64), 16 partial sums over each block of columns, or
// one row after the other where transposed. Sums of QgemmMath::int8 are those of weight/int8.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/arithmetic.h"
#include "core/plan_device.h"
#include "cpu/parallel.h"
#include "ops/qgemm/weight/int8.h"
#include "ops/qgemm/weight/weight.h"

namespace halfbyte {
namespace {

constexpr int64_t kCols = 256;  // of a block; a multiple of kUnitCols
constexpr int64_t kRows = 16;   // of the weight in a block of the forward product
constexpr int64_t kBatch = 64;  // rows of x that a decoded block is used for
constexpr int kLanes = 16;

// Decodes columns [begin, begin + n) of a row; begin is a multiple of kUnitCols.
template <class F>
void decode_row(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t begin,
                int64_t n, F* values) {
  const formats::Codec& codec = problem.codec;
  std::array<uint8_t, kCols> codes;
  if (problem.packed) {
    const auto* bytes = static_cast<const uint8_t*>(tensors.weight);
    std::array<formats::CodePlace, formats::kUnitCols> places;
    for (int i = 0; i < formats::kUnitCols; ++i)
      places[static_cast<size_t>(i)] =
          formats::code_place(static_cast<int>(row % formats::kUnitRows), i, codec.bits);
    const uint8_t* unit = nullptr;
    for (int64_t i = 0; i < n; ++i) {
      const auto col = static_cast<size_t>(i % formats::kUnitCols);
      if (col == 0)
        unit = bytes + problem.weight.unit(row / formats::kUnitRows, (begin + i) / formats::kUnitCols);
      codes[static_cast<size_t>(i)] =
          static_cast<uint8_t>(formats::code_at(unit + places[col].byte, places[col].shift, codec.bits));
    }
  } else {
    for (int64_t i = 0; i < n; ++i)
      codes[static_cast<size_t>(i)] = static_cast<uint8_t>(load_code(problem, tensors, row, begin + i));
  }
  const bool flat = !problem.packed && problem.view.flat;
  for (int64_t i = 0; i < n;) {
    const int64_t col = begin + i, in_group = (flat ? row * problem.k + col : col) % problem.group;
    const int64_t end = std::min(n, i + problem.group - in_group);
    const WeightGroup<F> group = load_group<F>(problem, tensors, row, col);
    if (codec.bits == 4) {
      std::array<F, 16> table;
      for (int code = 0; code < 16; ++code)
        table[static_cast<size_t>(code)] =
            formats::decode(code, group.scale, group.bias, group.zero_point, codec);
      for (; i < end; ++i) values[i] = table[codes[static_cast<size_t>(i)]];
    } else {
      for (; i < end; ++i)
        values[i] = formats::decode(int{codes[static_cast<size_t>(i)]}, group.scale, group.bias,
                                    group.zero_point, codec);
    }
  }
}

template <class F>
F dot(const F* a, const F* b, int64_t n) {
  std::array<F, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[static_cast<size_t>(lane)] += a[i + lane] * b[i + lane];
  for (int lane = 0; i + lane < n; ++lane) sums[static_cast<size_t>(lane)] += a[i + lane] * b[i + lane];
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

// x in the type of the arithmetic: as it is, or converted in the workspace.
template <class F>
const F* rows_of_x(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace) {
  if (sizeof(F) == 4 && problem.dtype == DType::f32) return static_cast<const F*>(tensors.x);
  auto* const x = static_cast<F*>(workspace);
  parallel_for(problem.m * problem.in_cols(), 65536, problem.num_threads,
               [&](int64_t begin, int64_t end, int) {
                 for (int64_t i = begin; i < end; ++i) x[i] = load_element<F>(tensors.x, i, problem.dtype);
               });
  return x;
}

template <class F>
void store(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t col, F sum) {
  const int64_t index = row * problem.out_cols() + col;
  if (problem.f32_sums) return store_element(tensors.y, index, sum, DType::f32);
  if (problem.bias) sum += load_element<F>(tensors.bias, col, problem.dtype);
  if (problem.accumulate) sum += load_element<F>(tensors.y, index, problem.dtype);
  store_element(tensors.y, index, sum, problem.dtype);
}

template <class F>
void forward_block(const QgemmProblem& problem, const QgemmTensors& tensors, const F* x, int64_t row,
                   int64_t batch) {
  const int64_t num_rows = std::min(kRows, problem.n - row), num_x = std::min(kBatch, problem.m - batch);
  alignas(64) F weights[kRows][kCols];
  F sums[kBatch][kRows] = {};
  for (int64_t begin = 0; begin < problem.k; begin += kCols) {
    const int64_t n = std::min(kCols, problem.k - begin);
    for (int64_t r = 0; r < num_rows; ++r) decode_row(problem, tensors, row + r, begin, n, weights[r]);
    for (int64_t i = 0; i < num_x; ++i)
      for (int64_t r = 0; r < num_rows; ++r)
        sums[i][r] += dot(x + (batch + i) * problem.k + begin, weights[r], n);
  }
  for (int64_t i = 0; i < num_x; ++i)
    for (int64_t r = 0; r < num_rows; ++r) store(problem, tensors, batch + i, row + r, sums[i][r]);
}

template <class F>
void transposed_block(const QgemmProblem& problem, const QgemmTensors& tensors, const F* x, int64_t begin,
                      int64_t batch) {
  const int64_t n = std::min(kCols, problem.k - begin), num_x = std::min(kBatch, problem.m - batch);
  alignas(64) F weights[kCols];
  alignas(64) F sums[kBatch][kCols] = {};
  for (int64_t row = 0; row < problem.n; ++row) {
    decode_row(problem, tensors, row, begin, n, weights);
    for (int64_t i = 0; i < num_x; ++i) {
      const F factor = x[(batch + i) * problem.n + row];
      for (int64_t col = 0; col < n; ++col) sums[i][col] += factor * weights[col];
    }
  }
  for (int64_t i = 0; i < num_x; ++i)
    for (int64_t col = 0; col < n; ++col) store(problem, tensors, batch + i, begin + col, sums[i][col]);
}

template <class F>
void multiply(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace) {
  const F* const x = rows_of_x<F>(problem, tensors, workspace);
  const int64_t step = problem.transposed ? kCols : kRows;
  const int64_t blocks = (problem.out_cols() + step - 1) / step, batches = (problem.m + kBatch - 1) / kBatch;
  parallel_for(blocks * batches, 1, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      (problem.transposed ? transposed_block<F> : forward_block<F>)(problem, tensors, x, i / batches * step,
                                                                    i % batches * kBatch);
  });
}

// ---- QgemmMath::int8

// x as 8 bits, [m, k], and the scales of its units, [m, units].
struct RoundedX {
  float* scales;
  int8_t* values;

  static int64_t units(const QgemmProblem& problem) { return ceil_div(problem.k, formats::kUnitCols); }
  RoundedX(const QgemmProblem& problem, void* workspace)
      : scales(static_cast<float*>(workspace)),
        values(reinterpret_cast<int8_t*>(scales + problem.m * units(problem))) {}
  static int64_t num_bytes(const QgemmProblem& problem) {
    return problem.m * (units(problem) * static_cast<int64_t>(sizeof(float)) + problem.k);
  }
};

void round_rows(const QgemmProblem& problem, const QgemmTensors& tensors, const RoundedX& to) {
  const int64_t k = problem.k, units = RoundedX::units(problem);
  const float unit = problem.codec.kind == formats::Kind::table ? int8_table(problem.codec).unit : 1;
  parallel_for(problem.m * units, 256, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / units, col = i % units * formats::kUnitCols;
      const int64_t n = std::min<int64_t>(formats::kUnitCols, k - col);
      std::array<float, formats::kUnitCols> x{};
      float most = 0;
      for (int64_t j = 0; j < n; ++j) {
        float& value = x[static_cast<size_t>(j)];
        value = load_element<float>(tensors.x, row * k + col + j, problem.dtype);
        if (!(std::fabs(value) <= most)) most = std::fabs(value);
        if (std::isnan(most)) break;
      }
      const Int8Scale scale = int8_scale(most);
      to.scales[i] = scale.scale * unit;
      for (int64_t j = 0; j < n; ++j)
        to.values[row * k + col + j] =
            scale.reciprocal == 0
                ? int8_t{0}
                : static_cast<int8_t>(std::nearbyint(x[static_cast<size_t>(j)] * scale.reciprocal));
    }
  });
}

// The scale of a group; a stored number of E4M3 times the reciprocal of the global scale, as vectors have it.
float int8_group_scale(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row, int64_t col,
                       float scale) {
  if (problem.codec.scale_type != formats::ScaleType::e4m3) return scale;
  const formats::PackedLayout& packed = problem.weight;
  const uint8_t stored =
      problem.packed ? static_cast<const uint8_t*>(tensors.weight)[packed.scale(row, col / packed.group)]
                     : static_cast<const uint8_t*>(tensors.scales)[problem.view.scale(row, col)];
  return formats::e4m3_to_f32(stored) * (1 / load_global_scale(problem, tensors));
}

// Outputs of one row of the weight.
void int8_row(const QgemmProblem& problem, const QgemmTensors& tensors, const RoundedX& x, int64_t row,
              std::vector<float>& sums) {
  const formats::Codec& codec = problem.codec;
  const Int8Table table = codec.kind == formats::Kind::table ? int8_table(codec) : Int8Table();
  const bool flat = !problem.packed && problem.view.flat;
  const int64_t k = problem.k, units = RoundedX::units(problem), first = flat ? row * k : 0;
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (int64_t begin = 0; begin < k;) {
    const int64_t unit = begin / formats::kUnitCols * formats::kUnitCols,
                  unit_end = std::min<int64_t>(k, unit + formats::kUnitCols);
    const int64_t end = int8_part_end(problem.group, first + unit, first + unit_end, first + begin) - first;
    const WeightGroup<float> group = load_group<float>(problem, tensors, row, begin);
    const float group_scale = int8_group_scale(problem, tensors, row, begin, group.scale);
    const int zero = codec.kind == formats::Kind::integer ? group.zero_point - codec.q_min : 0;
    std::array<int, formats::kUnitCols> values{};
    for (int64_t col = begin; col < end; ++col) {
      const int code = load_code(problem, tensors, row, col);
      values[static_cast<size_t>(col - begin)] =
          codec.kind == formats::Kind::table ? table.values[static_cast<size_t>(code)] : code - zero;
    }
    for (int64_t m = 0; m < problem.m; ++m) {
      int product = 0, sum_of_x = 0;
      for (int64_t col = begin; col < end; ++col) {
        const auto value = x.values[m * k + col];
        product += values[static_cast<size_t>(col - begin)] * value;
        sum_of_x += value;
      }
      const float scale = x.scales[m * units + unit / formats::kUnitCols];
      float& sum = sums[static_cast<size_t>(m)];
      sum += scale * group_scale * static_cast<float>(product);
      if (codec.kind == formats::Kind::affine) sum += scale * group.bias * static_cast<float>(sum_of_x);
    }
    begin = end;
  }
}

void multiply_int8(const QgemmProblem& problem, const QgemmTensors& tensors, void* workspace) {
  const RoundedX x(problem, workspace);
  round_rows(problem, tensors, x);
  parallel_for(problem.n, 1, problem.num_threads, [&](int64_t begin, int64_t end, int) {
    std::vector<float> sums(static_cast<size_t>(problem.m));
    for (int64_t row = begin; row < end; ++row) {
      int8_row(problem, tensors, x, row, sums);
      for (int64_t m = 0; m < problem.m; ++m) store(problem, tensors, m, row, sums[static_cast<size_t>(m)]);
    }
  });
}

class RefKernel : public QgemmKernel {
 public:
  explicit RefKernel(const QgemmProblem& problem) : problem_(problem) {}
  std::string name() const override { return "qgemm_ref"; }
  std::string backend() const override { return fmt::format("cpu {}", simd_target()); }
  PrecisionGuarantee guarantee() const override {
    if (is_int8()) return kInt8Guarantee;
    const DType math = is_f64() ? DType::f64 : DType::f32;
    return {math, math, true, false, WeightRounding::none};
  }
  int64_t workspace_bytes() const override {  // x
    if (is_int8()) return RoundedX::num_bytes(problem_);
    if (!is_f64() && problem_.dtype == DType::f32) return 0;
    return problem_.m * problem_.in_cols() * (is_f64() ? 8 : 4);
  }
  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    (is_int8() ? multiply_int8 : is_f64() ? multiply<double> : multiply<float>)(problem_, tensors, workspace);
  }

 private:
  bool is_f64() const { return problem_.math == QgemmMath::f64; }
  bool is_int8() const { return problem_.math == QgemmMath::int8; }
  QgemmProblem problem_;
};

std::string refuse(const QgemmProblem&) { return ""; }
std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<RefKernel>(problem);
}

}  // namespace

const QgemmVariant kQgemmRef = {{"qgemm_ref", DeviceKind::cpu, &refuse, &make}, nullptr, true, false, true};

}  // namespace halfbyte
