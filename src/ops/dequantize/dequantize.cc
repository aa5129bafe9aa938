#include "ops/dequantize/dequantize.h"

#include <algorithm>

#include "core/packed_plan.h"
#include "core/plan_device.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

constexpr int64_t kSpanElements = 16384;   // a span: large against the cost of beginning one
constexpr int64_t kTaskElements = 131072;  // a task: large against the cost of scheduling it (a microsecond)
// An output beyond this does not stay in the caches: write past them and save reading the lines first.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

}  // namespace

void dequantize_cpu(const DequantizeProblem& checked) {
  DequantizeProblem problem = checked;
  if (problem.global_scale != nullptr) problem.codec.global_scale = *problem.global_scale;
  const QuantShape& shape = problem.shape;
  const int64_t spans_per_row = (shape.cols + kSpanElements - 1) / kSpanElements;
  const int64_t grain = std::max<int64_t>(1, kTaskElements * spans_per_row / shape.cols);
  parallel_for(shape.rows * spans_per_row, grain, problem.num_threads, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % spans_per_row * kSpanElements;
      dequantize_span_cpu(problem, {i / spans_per_row, begin, std::min(shape.cols, begin + kSpanElements)});
    }
  });
}

namespace {

constexpr Variant<DequantizeProblem, void> kVariants[] = {
    {"dequantize_cpu", DeviceKind::cpu, [](const DequantizeProblem&) { return std::string(); },
     dequantize_cpu},
    {"dequantize_cuda", DeviceKind::cuda, refuse_dequantize_cuda, dequantize_cuda},
};

}  // namespace

DequantizeProblem make_dequantize_problem(const ConstQuantizedView& in, void* y, DType dtype) {
  DequantizeProblem problem;
  problem.shape = quant_shape(in.spec, in.rows, in.cols);
  problem.codec = make_codec(in.spec);
  problem.one_group = in.spec.granularity == Granularity::tensor;
  problem.codes = in.codes;
  problem.scales = in.scales;
  problem.zeros = in.zeros;
  problem.biases = in.biases;
  problem.global_scale = in.global_scale;
  problem.y = y;
  problem.dtype = dtype;
  problem.past_caches = in.rows * in.cols * size_of(dtype) >= kStreamBytes;
  problem.code_alignment = alignment_of(in.codes);
  problem.y_alignment = alignment_of(y);
  return problem;
}

void dequantize(const ConstQuantizedView& in, const TensorView& y, Execution execution) {
  const int64_t n = num_elements(y);
  HALFBYTE_CHECK(is_floating(y.dtype), usage, "dequantize: y must be f32, f16, bf16 or f64, got {}",
                 to_string(y.dtype));
  HALFBYTE_CHECK(is_contiguous(y), usage, "dequantize: y must be contiguous");
  HALFBYTE_CHECK(y.data != nullptr || n == 0, usage, "dequantize: y has {} elements but no data", n);
  HALFBYTE_CHECK(
      !in.spec.double_quant, usage,
      "dequantize: in.spec.double_quant must be false here: decode the scales with double_dequantize");
  HALFBYTE_CHECK(n == in.rows * in.cols && (n == 0 || (y.shape.empty() ? 1 : y.shape.back()) == in.cols),
                 usage, "dequantize: y must have the {} x {} elements of in, got {}", in.rows, in.cols, n);
  if (n == 0) return;
  HALFBYTE_CHECK(in.codes != nullptr && in.scales != nullptr, usage,
                 "dequantize: in.codes and in.scales must not be null");
  HALFBYTE_CHECK(
      (in.zeros != nullptr) == has_zeros(in.spec) && (in.biases != nullptr) == has_biases(in.spec), usage,
      "dequantize: in.zeros must be given exactly for asymmetric integer formats, in.biases for affine ones");
  HALFBYTE_CHECK((in.global_scale != nullptr) == has_global_scale(in.spec), usage,
                 "dequantize: in.global_scale must be given exactly for nvfp4");
  const int64_t y_bytes = n * size_of(y.dtype);
  HALFBYTE_CHECK(y.num_bytes < 0 || y.num_bytes >= y_bytes, usage,
                 "dequantize: y needs {} bytes, its memory has {}", y_bytes, y.num_bytes);
  check_parts_apart("dequantize", {"y", y.data, y_bytes, -1, 1, false, true}, in);
  DequantizeProblem problem = make_dequantize_problem(in, y.data, y.dtype);
  problem.num_threads = threads_for(execution.num_threads, dequantize_work(problem));
  problem.device = y.device;
  problem.stream = execution.stream;
  choose<DequantizeProblem, void>("dequantize", kVariants, problem, y.device.kind).run(problem);
}

void dequantize(const QuantizedTensor& q, const TensorView& y, Execution execution) {
  HALFBYTE_CHECK(y.shape == q.shape, usage, "dequantize: y must have the shape of q, {}, got {}",
                 text_of(q.shape), text_of(y.shape));
  HALFBYTE_CHECK(y.device == q.device(), usage, "dequantize: y must be on {}, where q is, got {}",
                 to_string(q.device()), to_string(y.device));
  const QuantizedTensor expanded = q.expanded(execution.stream);
  dequantize(expanded.view(), y, execution);
  // What was made for this call must live until the work is done.
  if (q.spec.double_quant) wait_for(y.device, execution.stream);
}

}  // namespace halfbyte
