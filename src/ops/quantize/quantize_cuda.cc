#include "ops/quantize/quantize_cuda.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/counts.h"
#include "cuda/config.h"
#include "cuda/scratch.h"

namespace halfbyte {
namespace {

constexpr int64_t kChunk = kQuantizeChunk;
// A larger group is shared by blocks: its range first, then its codes.
constexpr int64_t kMaxGroup = 65536;
constexpr int64_t kSpan = 8192;         // elements of a span: what a block holds in registers
constexpr int64_t kRangedSpan = 16384;  // where only codes are left to do; no more than kMaxGroup

// Chunks of x and of codes can be accessed as a whole.
bool is_aligned(const QuantizeProblem& problem) {
  const int bits = problem.codec.bits;
  return problem.shape.cols % kChunk == 0 && cuda::is_aligned(problem.x, 16) &&
         cuda::is_aligned(problem.codes, bits == 8   ? 8
                                         : bits == 2 ? 2
                                                     : 4);
}

// The group size that quantize_groups is compiled for; 0: quantize_spans takes the problem.
int64_t fixed_group_size(const QuantizeProblem& problem) {
  const int64_t size = problem.shape.group_size;
  const bool fits = size == 32 || size == 64 || size == 128 || size == 256;
  return fits && !problem.one_group && problem.shape.cols % size == 0 && is_aligned(problem) &&
                 cuda::is_aligned(problem.codes, 16)
             ? size
             : 0;
}

bool needs_ranges(const QuantizeProblem& problem) {
  return problem.one_group || std::min(problem.shape.group_size, problem.shape.cols) > kMaxGroup;
}

int64_t blocks_for(int64_t work, int64_t work_per_block) {
  return (work + work_per_block - 1) / work_per_block;
}

const cuda::Context& context_of(const QuantizeProblem& problem) {
  return cuda::context(problem.device.index);
}

void enqueue_ranges(const ValueRangeArgs& args, DType dtype, const cuda::Context& context, void* stream) {
  cuda::launch(cuda::get_kernel(context, value_range_kernel(dtype)),
               {args.num_groups * args.spans_per_group, kRangeThreads}, stream, args);
}

// The parameters of a tensor without elements, which has one group all the same (Granularity::tensor).
QuantizeStatus store_empty(const QuantizeProblem& problem) {
  const auto params = params_of_range(problem, problem.range ? *problem.range : ValueRange{});
  double scale = 0, bias = 0;
  uint8_t zero = 0;
  QuantizeProblem host = problem;
  host.scales = &scale;
  if (host.biases) host.biases = &bias;
  if (host.zeros) host.zeros = &zero;
  store_params(host, 0, params);
  const int64_t scale_bytes = formats::scale_bytes(problem.codec.scale_type);
  cuda::copy(problem.scales, &scale, scale_bytes, problem.stream);
  if (problem.biases) cuda::copy(problem.biases, &bias, scale_bytes, problem.stream);
  if (problem.zeros) cuda::copy(problem.zeros, &zero, 1, problem.stream);
  cuda::synchronize(problem.stream);
  QuantizeStatus status;
  count(status, params);
  return status;
}

RangeKeys keys_of(const ValueRange& range) {
  if (range.min > range.max) return {};
  return {order_key(-range.min), order_key(range.max)};
}

}  // namespace

cuda::KernelSpec quantize_kernel(const QuantizeProblem& problem) {
  const int64_t group_size = fixed_group_size(problem);
  const std::string lines = cuda::element_config(problem.dtype) + cuda::codec_config(problem.codec);
  if (group_size > 0)
    return {"ops/quantize/quantize_groups.cu", "quantize_groups",
            cuda::config_text(lines + fmt::format("constexpr int kGroupSize = {};\n", group_size))};
  return {"ops/quantize/quantize_spans.cu", "quantize_spans",
          cuda::config_text(lines + fmt::format("constexpr bool kAligned = {};\n", is_aligned(problem)))};
}

cuda::KernelSpec value_range_kernel(DType dtype) {
  return {"ops/quantize/value_range.cu", "value_range", cuda::config_text(cuda::element_config(dtype))};
}

int64_t quantize_workspace_bytes(const QuantizeProblem& problem) {
  const int64_t num_ranges = needs_ranges(problem) ? problem.shape.num_groups : 0;
  return static_cast<int64_t>(sizeof(QuantizeCounts)) + num_ranges * static_cast<int64_t>(sizeof(RangeKeys));
}

void enqueue_quantize(const QuantizeProblem& problem, void* workspace) {
  const cuda::Context& context = context_of(problem);
  const cuda::Scope scope(context);
  const QuantShape& shape = problem.shape;
  auto* const counts = static_cast<QuantizeCounts*>(workspace);
  cuda::fill(workspace, 0, quantize_workspace_bytes(problem), problem.stream);

  QuantizeArgs args{};
  args.x = problem.x;
  args.codes = problem.codes;
  args.scales = problem.scales;
  args.zeros = problem.zeros;
  args.biases = problem.biases;
  args.counts = counts;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.row_bytes = shape.row_bytes;
  args.group_size = std::min(shape.group_size, shape.cols);  // a group longer than the row is the row
  args.groups_per_row = problem.one_group ? 0 : shape.groups_per_row;

  cuda::Grid grid;
  if (const int64_t group_size = fixed_group_size(problem); group_size > 0) {
    const int batch = groups_batch(static_cast<int>(group_size), static_cast<int>(size_of(problem.dtype)));
    args.num_chunks = shape.rows * shape.cols / kChunk;
    grid = {blocks_for(args.num_chunks, kGroupsThreads * batch), kGroupsThreads};
  } else {
    if (needs_ranges(problem)) {
      auto* const ranges = reinterpret_cast<RangeKeys*>(counts + 1);
      args.ranges = ranges;
      args.span_cols = kRangedSpan;
      if (problem.one_group && problem.range != nullptr) {
        const RangeKeys keys = keys_of(*problem.range);
        cuda::set(&ranges->low, keys.low, problem.stream);
        cuda::set(&ranges->high, keys.high, problem.stream);
      } else {
        const int64_t rows = problem.one_group ? 1 : shape.rows, cols = shape.rows * shape.cols / rows;
        const int64_t size = problem.one_group ? cols : args.group_size;
        enqueue_ranges({problem.x, ranges, nullptr, shape.num_groups, cols, size,
                        problem.one_group ? 1 : shape.groups_per_row, blocks_for(size, kRangeSpan)},
                       problem.dtype, context, problem.stream);
      }
    } else {
      // The fewest groups that fill whole chunks, and as many of those as make a span.
      const int64_t groups = kChunk / std::gcd(args.group_size, kChunk);
      const int64_t most = std::min<int64_t>(kSpan / (groups * args.group_size), kMaxSpanGroups / groups);
      args.span_cols = std::max<int64_t>(1, most) * groups * args.group_size;
    }
    args.spans_per_row = blocks_for(shape.cols, args.span_cols);
    grid = {shape.rows * args.spans_per_row, kSpansThreads};
  }
  cuda::launch(cuda::get_kernel(context, quantize_kernel(problem)), grid, problem.stream, args);
}

ValueRange value_range_cuda(const TensorView& x, void* stream) {
  ValueRange range;
  const int64_t n = num_elements(x);
  if (n == 0) return range;
  HALFBYTE_CHECK(cuda::is_aligned(x.data, size_of(x.dtype)), device,
                 "value_range: x is not aligned to its elements of {} bytes", size_of(x.dtype));
  const cuda::Context& context = cuda::context(x.device.index);
  const cuda::Scope scope(context);
  struct Found {
    QuantizeCounts counts;
    RangeKeys keys;
  } found{};
  const cuda::Scratch scratch(context, sizeof(Found));
  auto* const device = static_cast<Found*>(scratch.data());
  cuda::fill(device, 0, sizeof(Found), stream);
  enqueue_ranges({x.data, &device->keys, &device->counts, 1, n, n, 1, blocks_for(n, kRangeSpan)}, x.dtype,
                 context, stream);
  cuda::copy(&found, device, sizeof(found), stream);
  cuda::synchronize(stream);
  if (found.keys.high != 0) {
    range.min = -from_order_key(found.keys.low);
    range.max = from_order_key(found.keys.high);
  }
  const QuantizeStatus status = status_of(found.counts);
  range.num_nonfinite = status.num_nonfinite;
  range.first_nonfinite = status.first_nonfinite;
  return range;
}

std::string refuse_quantize_cuda(const QuantizeProblem& problem) {
  const auto size = size_of(problem.dtype),
             scale_size = int64_t{formats::scale_bytes(problem.codec.scale_type)};
  if (!cuda::is_aligned(problem.x, size))
    return fmt::format("x is not aligned to its elements of {} bytes", size);
  if (!cuda::is_aligned(problem.scales, scale_size) || !cuda::is_aligned(problem.biases, scale_size))
    return fmt::format("scales or biases are not aligned to their elements of {} bytes", scale_size);
  return "";
}

QuantizeStatus quantize_cuda(const QuantizeProblem& problem) {
  const cuda::Context& context = context_of(problem);
  const cuda::Scope scope(context);
  if (problem.shape.rows * problem.shape.cols == 0) return store_empty(problem);
  const cuda::Scratch workspace(context, quantize_workspace_bytes(problem));
  enqueue_quantize(problem, workspace.data());
  QuantizeCounts counts;
  cuda::copy(&counts, workspace.data(), sizeof(counts), problem.stream);
  cuda::synchronize(problem.stream);
  return status_of(counts);
}

}  // namespace halfbyte
