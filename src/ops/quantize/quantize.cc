#include "ops/quantize/quantize.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/arithmetic.h"
#include "core/packed_plan.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

// Elements a span: large against the cost of beginning one.
constexpr int64_t kSpanElements = 16384;
// Elements a task: large against the cost of scheduling (a microsecond), small enough to share out.
constexpr int64_t kTaskElements = 131072;
// A larger group is split between threads: its range first, then its codes.
constexpr int64_t kSplitGroup = int64_t{1} << 20;

// What each worker of parallel_for found. One worker needs no memory.
template <class Found>
class PerWorker {
 public:
  explicit PerWorker(int num_threads) {
    if (num_threads != 1) more_.resize(static_cast<size_t>(effective_threads(num_threads)));
  }
  Found& operator[](int worker) { return all()[static_cast<size_t>(worker)]; }
  std::span<Found> all() { return more_.empty() ? std::span(&one_, 1) : std::span(more_); }

 private:
  Found one_;
  std::vector<Found> more_;
};

// Least multiple of 8 columns and whole groups that is at least kSpanElements.
int64_t span_columns(const QuantShape& shape, bool whole_groups) {
  // A group longer than the row is the row.
  const int64_t group = std::max<int64_t>(1, std::min(shape.group_size, shape.cols + 8));
  const int64_t step = whole_groups ? std::lcm<int64_t>(group, 8) : 8;
  return (kSpanElements + step - 1) / step * step;
}

// Calls run(span) for the columns [begin, end) of `rows` rows from `row`, in parallel.
template <class Run>
QuantizeStatus for_each_span(int64_t row, int64_t rows, int64_t begin, int64_t end, int64_t columns,
                             const formats::GroupParams<double>* params, int num_threads, const Run& run) {
  const int64_t spans_per_row = (end - begin + columns - 1) / columns;
  const int64_t grain =
      std::max<int64_t>(1, kTaskElements * spans_per_row / std::max<int64_t>(1, end - begin));
  PerWorker<QuantizeStatus> status(num_threads);
  parallel_for(rows * spans_per_row, grain, num_threads, [&](int64_t first, int64_t last, int worker) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t start = begin + i % spans_per_row * columns;
      const QuantizeSpan span{row + i / spans_per_row, start, std::min(end, start + columns), params};
      merge(status[worker], run(span));
    }
  });
  QuantizeStatus total;
  for (const QuantizeStatus& part : status.all()) merge(total, part);
  return total;
}

ValueRange range_of_all(const QuantizeProblem& problem) {
  const int64_t n = problem.shape.rows * problem.shape.cols;
  return value_range({problem.x, problem.dtype, {n}, {}, {}}, {problem.num_threads});
}

}  // namespace

QuantizeStatus quantize_cpu(const QuantizeProblem& checked) {
  QuantizeProblem problem = checked;
  if (problem.global_scale != nullptr)
    *problem.global_scale = problem.codec.global_scale =
        global_scale_of_range(problem.dtype, problem.range ? *problem.range : range_of_all(problem));
  std::shared_ptr<const void> prepared;
  if (!problem.is_prepared) {
    prepared = prepare_quantize_cpu(problem);
    problem.prepared = prepared.get();
  }
  const QuantShape& shape = problem.shape;
  const auto run = [&](const QuantizeSpan& span) { return quantize_span_cpu(problem, span); };
  QuantizeStatus status;
  if (problem.one_group) {
    const auto params = params_of_range(problem, problem.range ? *problem.range : range_of_all(problem));
    store_params(problem, 0, params);
    count(status, params);
    merge(status, for_each_span(0, shape.rows, 0, shape.cols, span_columns(shape, false), &params,
                                problem.num_threads, run));
    return status;
  }
  if (problem.search || shape.group_size <= kSplitGroup || shape.group_size % 8 != 0)
    return for_each_span(0, shape.rows, 0, shape.cols, span_columns(shape, true), nullptr,
                         problem.num_threads, run);
  for (int64_t index = 0; index < shape.num_groups; ++index) {
    const int64_t row = index / shape.groups_per_row;
    const int64_t begin = index % shape.groups_per_row * shape.group_size;
    const int64_t end = std::min(shape.cols, begin + shape.group_size);
    const int64_t first = row * shape.cols + begin;
    const std::byte* data = static_cast<const std::byte*>(problem.x) + first * size_of(problem.dtype);
    const ConstTensorView group{data, problem.dtype, {end - begin}, {}, {}};
    const auto params = params_of_range(problem, value_range(group, {problem.num_threads}));
    store_params(problem, index, params);
    count(status, params);
    merge(status,
          for_each_span(row, 1, begin, end, span_columns(shape, false), &params, problem.num_threads, run));
  }
  return status;
}

namespace {

constexpr Variant<QuantizeProblem, QuantizeStatus> kVariants[] = {
    {"quantize_cpu", DeviceKind::cpu, [](const QuantizeProblem&) { return std::string(); }, quantize_cpu},
    {"quantize_cuda", DeviceKind::cuda, refuse_quantize_cuda, quantize_cuda},
};

int64_t leading_rows(const ConstTensorView& x) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < x.shape.size(); ++i) rows *= x.shape[i];
  return rows;
}

// The checks that a value and a quantized tensor share: `op` and `name` for the message.
void check_values(const char* op, const char* name, const ConstTensorView& x) {
  const int64_t n = num_elements(x);
  HALFBYTE_CHECK(is_floating(x.dtype), usage, "{}: {} must be f32, f16, bf16 or f64, got {}", op, name,
                 to_string(x.dtype));
  HALFBYTE_CHECK(is_contiguous(x), usage, "{}: {} must be contiguous", op, name);
  HALFBYTE_CHECK(x.data != nullptr || n == 0, usage, "{}: {} has {} elements but no data", op, name, n);
  HALFBYTE_CHECK(x.num_bytes < 0 || x.num_bytes >= n * size_of(x.dtype), usage,
                 "{}: {} needs {} bytes, its memory has {}", op, name, n * size_of(x.dtype), x.num_bytes);
}

// On a CUDA device the values are not looked at.
void check_importance(const Importance& importance, const Encoding& encoding, Device device) {
  if (importance.weights == nullptr) return;
  HALFBYTE_CHECK(encoding.search, usage,
                 "quantize: importance is for searched scales: encoding.search is false");
  HALFBYTE_CHECK(importance.count > 0 && importance.first >= 0 && importance.first < importance.count, usage,
                 "quantize: importance.first must be in [0, count), got {} of {}", importance.first,
                 importance.count);
  if (device.kind == DeviceKind::cuda) return;
  for (int64_t i = 0; i < importance.count; ++i)
    HALFBYTE_CHECK(importance.weights[i] >= 0 && formats::is_finite(importance.weights[i]), bad_input,
                   "quantize: importance must be finite and not negative, got {} at index {}",
                   importance.weights[i], i);
}

}  // namespace

void merge(ValueRange& into, const ValueRange& from) {
  into.min = std::min(into.min, from.min);
  into.max = std::max(into.max, from.max);
  if (from.num_nonfinite != 0 && (into.num_nonfinite == 0 || from.first_nonfinite < into.first_nonfinite))
    into.first_nonfinite = from.first_nonfinite;
  into.num_nonfinite += from.num_nonfinite;
}

QuantizeProblem make_quantize_problem(const QuantSpec& spec, const Encoding& encoding, int64_t rows,
                                      int64_t cols, DType dtype) {
  check_encoding(spec, encoding);
  QuantizeProblem problem;
  problem.dtype = dtype;
  problem.shape = quant_shape(spec, rows, cols);
  problem.codec = make_codec(spec, encoding);
  problem.one_group = spec.granularity == Granularity::tensor;
  problem.search = encoding.search;
  return problem;
}

QuantizeProblem make_quantize_problem(const ConstTensorView& x, const QuantizedView& out,
                                      const Encoding& encoding, Execution execution, const ValueRange* range,
                                      const Importance& importance) {
  check_values("quantize", "x", x);
  const QuantShape shape = quant_shape(out.spec, out.rows, out.cols);
  const int64_t cols = x.shape.empty() ? 1 : x.shape.back();
  HALFBYTE_CHECK(out.rows == leading_rows(x) && out.cols == cols, usage,
                 "quantize: out must have the rows and columns of x, [{}, {}], got [{}, {}]", leading_rows(x),
                 cols, out.rows, out.cols);
  HALFBYTE_CHECK(
      !out.spec.double_quant, usage,
      "quantize: out.spec.double_quant must be false here: quantize the scales with double_quantize");
  HALFBYTE_CHECK(out.spec.scale_dtype != DType::f64 || x.dtype == DType::f64, usage,
                 "quantize: f64 scales need f64 data, got {}", to_string(x.dtype));
  HALFBYTE_CHECK(out.codes != nullptr || shape.code_bytes() == 0, usage, "quantize: out.codes is null");
  HALFBYTE_CHECK(out.scales != nullptr || shape.num_groups == 0, usage, "quantize: out.scales is null");
  HALFBYTE_CHECK((out.zeros != nullptr) == has_zeros(out.spec) || shape.num_groups == 0, usage,
                 "quantize: out.zeros must be given exactly for asymmetric integer formats");
  HALFBYTE_CHECK((out.biases != nullptr) == has_biases(out.spec) || shape.num_groups == 0, usage,
                 "quantize: out.biases must be given exactly for affine formats");
  HALFBYTE_CHECK((out.global_scale != nullptr) == has_global_scale(out.spec), usage,
                 "quantize: out.global_scale must be given exactly for nvfp4");

  QuantizeProblem problem = make_quantize_problem(out.spec, encoding, out.rows, out.cols, x.dtype);
  problem.x = x.data;
  problem.codes = out.codes;
  problem.scales = out.scales;
  problem.zeros = out.zeros;
  problem.biases = out.biases;
  problem.global_scale = out.global_scale;
  problem.num_threads = threads_for(execution.num_threads, quantize_work(problem));
  problem.device = x.device;
  problem.x_alignment = alignment_of(x.data);
  problem.code_alignment = alignment_of(out.codes);
  problem.stream = execution.stream;
  problem.range = range;
  check_importance(importance, encoding, x.device);
  problem.importance = importance;
  return problem;
}

QuantizeStatus quantize(const ConstTensorView& x, const QuantizedView& out, const Encoding& encoding,
                        Execution execution, const ValueRange* range, const Importance& importance) {
  const QuantizeProblem problem = make_quantize_problem(x, out, encoding, execution, range, importance);
  check_parts_apart("quantize", {"x", x.data, num_elements(x) * size_of(x.dtype), -1, 1, false, false}, out);
  if (problem.shape.num_groups == 0 && problem.global_scale == nullptr) return {};
  const auto& variant =
      choose<QuantizeProblem, QuantizeStatus>("quantize", kVariants, problem, x.device.kind);
  return variant.run(problem);
}

ValueRange value_range(const ConstTensorView& x, Execution execution) {
  check_values("value_range", "x", x);
  if (x.device.kind == DeviceKind::cuda) return value_range_cuda(x, execution.stream);
  const int64_t n = num_elements(x);
  const int64_t chunks = (n + kSpanElements - 1) / kSpanElements;
  const int num_threads = threads_for(execution.num_threads, static_cast<double>(n));
  PerWorker<ValueRange> parts(num_threads);
  parallel_for(chunks, 4, num_threads, [&](int64_t first, int64_t last, int worker) {
    const int64_t begin = first * kSpanElements, end = std::min(n, last * kSpanElements);
    const std::byte* data = static_cast<const std::byte*>(x.data) + begin * size_of(x.dtype);
    ValueRange range = value_range_cpu(data, x.dtype, end - begin);
    if (range.num_nonfinite != 0) range.first_nonfinite += begin;
    merge(parts[worker], range);
  });
  ValueRange total;
  for (const ValueRange& part : parts.all()) merge(total, part);
  return total;
}

QuantizedTensor quantize(const ConstTensorView& x, const QuantSpec& spec, const Encoding& encoding,
                         Execution execution, const Importance& importance) {
  check_values("quantize", "x", x);
  check_spec(spec);
  QuantSpec stored = spec;
  stored.double_quant = false;
  QuantizedTensor q(stored, x.shape, x.dtype, x.device);
  q.encoding = encoding;
  if (!q.encoding->scale_rule) q.encoding->scale_rule = default_scale_rule(spec);
  const QuantizeStatus status = quantize(x, q.view(), encoding, execution, nullptr, importance);
  HALFBYTE_CHECK(status.num_nonfinite == 0, bad_input,
                 "quantize: x has {} non-finite elements, the first at index {}", status.num_nonfinite,
                 status.first_nonfinite);
  HALFBYTE_CHECK(status.num_unheld_scales == 0, bad_input, "quantize: {} cannot hold {} of {} scales",
                 to_string(spec.scale_dtype), status.num_unheld_scales, q.scales.num_elements());
  if (!spec.double_quant) return q;
  const Tensor scales = q.scales.to(Device{}, execution.stream);
  const int64_t n = scales.num_elements();
  const Tensor codes({}, DType::u8, scales.shape()), offset({}, DType::f32, {1}), map({}, DType::f32, {256});
  const Tensor absmax({}, DType::f32, {ceil_div(n, kDoubleQuantBlock)});
  DoubleQuantizedView nested{reinterpret_cast<uint8_t*>(codes.data()),
                             reinterpret_cast<float*>(absmax.data()), 0};
  double_quantize(reinterpret_cast<const float*>(scales.data()), n, nested);
  std::memcpy(offset.data(), &nested.offset, sizeof nested.offset);
  std::memcpy(map.data(), double_quant_map(), 256 * sizeof(float));
  q.spec = spec;
  q.scales = codes.to(x.device, execution.stream);
  q.scales_absmax = absmax.to(x.device, execution.stream);
  q.scales_map = map.to(x.device, execution.stream);
  q.scales_offset = offset.to(x.device, execution.stream);
  return q;
}

}  // namespace halfbyte
