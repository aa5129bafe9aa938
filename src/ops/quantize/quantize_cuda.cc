#include "ops/quantize/quantize_cuda.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/arithmetic.h"
#include "core/counts.h"
#include "core/plan_device.h"
#include "cuda/config.h"
#include "cuda/scratch.h"
#include "ops/quantize/scale_search_args.h"

namespace halfbyte {

// Finds ranges.
struct RangesCuda {
  cuda::CUfunction function = nullptr;
  cuda::Grid grid;
  ValueRangeArgs args{};
};

// The arguments are complete but for addresses.
struct QuantizeCuda {
  const cuda::Context* context = nullptr;
  const char* name = "none";         // of `codes`
  cuda::CUfunction codes = nullptr;  // null: there are no elements
  cuda::Grid codes_grid;
  QuantizeArgs args{};
  int64_t units_per_row = 0;  // of quantize_search; 0: it is another kernel
  // Before it: those of groups, and that of all elements. No function: not needed, or given.
  RangesCuda ranges, tensor_range;
  bool needs_ranges = false, needs_tensor_range = false;
  // Without elements there may be one group all the same (Granularity::tensor).
  bool stores_params = false;
  formats::GroupParams<double> params{};
  int64_t workspace_bytes = 0;
};

namespace {

constexpr int64_t kChunk = kQuantizeChunk;
// A larger group is shared by blocks: its range first, then its codes.
constexpr int64_t kMaxGroup = 65536;
constexpr int64_t kSpan = 8192;         // elements of a span: what a block holds in registers
constexpr int64_t kRangedSpan = 16384;  // where only codes are left to do; no more than kMaxGroup

// Chunks of x and of codes can be accessed as a whole.
bool is_aligned(const QuantizeProblem& problem) {
  const int bits = problem.codec.bits;
  return problem.shape.cols % kChunk == 0 && problem.x_alignment >= 16 &&
         problem.code_alignment >= (bits == 8   ? 8
                                    : bits == 2 ? 2
                                                : 4);
}

// Chunks a thread of quantize_groups; 0: quantize_spans takes the problem.
int batch_of_groups(const QuantizeProblem& problem) {
  const int64_t size = problem.shape.group_size;
  const bool fits = size == 32 || size == 64 || size == 128 || size == 256;
  return fits && !problem.one_group && problem.shape.cols % size == 0 && is_aligned(problem) &&
                 problem.code_alignment >= 16
             ? groups_batch(static_cast<int>(size), static_cast<int>(size_of(problem.dtype)))
             : 0;
}

bool needs_ranges(const QuantizeProblem& problem) {
  return problem.one_group || std::min(problem.shape.group_size, problem.shape.cols) > kMaxGroup;
}

const cuda::Context& context_of(const QuantizeProblem& problem) {
  return cuda::context(problem.device.index);
}

// Kernel and grid for arguments but the addresses.
RangesCuda select_ranges(const cuda::Context& context, DType dtype, int64_t num_groups, int64_t cols,
                         int64_t group_size, int64_t groups_per_row) {
  RangesCuda selected;
  ValueRangeArgs& args = selected.args;
  args.num_groups = num_groups;
  args.cols = cols;
  args.group_size = group_size;
  args.groups_per_row = groups_per_row;
  args.spans_per_group = ceil_div(group_size, kRangeSpan);
  selected.function = cuda::get_kernel(context, value_range_kernel(dtype));
  selected.grid = {num_groups * args.spans_per_group, kRangeThreads};
  return selected;
}
RangesCuda select_tensor_range(const cuda::Context& context, DType dtype, int64_t n) {
  return select_ranges(context, dtype, 1, n, n, 1);
}
void launch_ranges(const RangesCuda& selected, const void* x, RangeKeys* ranges, QuantizeCounts* counts,
                   void* stream) {
  ValueRangeArgs args = selected.args;
  args.x = x;
  args.ranges = ranges;
  args.counts = counts;
  cuda::launch(selected.function, selected.grid, stream, args);
}

RangeKeys keys_of(const ValueRange& range) {
  if (range.min > range.max) return {};
  return {order_key(-range.min), order_key(range.max)};
}

QuantizeCuda select(const QuantizeProblem& problem) {
  QuantizeCuda selected;
  selected.context = &context_of(problem);
  selected.workspace_bytes = sizeof(QuantizeCounts);
  const cuda::Scope scope(*selected.context);
  const QuantShape& shape = problem.shape;
  if (shape.rows * shape.cols == 0) {
    selected.stores_params = problem.one_group;
    selected.params = params_of_range(problem, problem.range ? *problem.range : ValueRange{});
    return selected;
  }
  QuantizeArgs& args = selected.args;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.row_bytes = shape.row_bytes;
  args.group_size = std::min(shape.group_size, shape.cols);  // a group longer than the row is the row
  args.groups_per_row = problem.one_group ? 0 : shape.groups_per_row;
  args.scale_type = problem.codec.scale_type;
  args.unrounded_code_scale = problem.codec.unrounded_code_scale;
  args.rule = problem.codec.rule;
  if (problem.search) {
    selected.units_per_row = ceil_div(shape.groups_per_row, int64_t{kSearchUnit});
    selected.name = "quantize_search";
    selected.codes_grid = {
        ceil_div(shape.rows * selected.units_per_row, int64_t{search_units(args.group_size)}),
        kSearchThreads};
  } else if (const int batch = batch_of_groups(problem); batch > 0) {
    args.group_shift = std::countr_zero(static_cast<uint64_t>(shape.group_size / kChunk));
    args.num_chunks = shape.rows * shape.cols / kChunk;
    selected.name = "quantize_groups";
    selected.codes_grid = {ceil_div(args.num_chunks, kGroupsThreads * batch), kGroupsThreads};
  } else {
    selected.needs_ranges = needs_ranges(problem);
    if (selected.needs_ranges) {
      args.span_cols = kRangedSpan;
      selected.workspace_bytes += shape.num_groups * static_cast<int64_t>(sizeof(RangeKeys));
      if (problem.one_group && problem.range == nullptr)
        selected.ranges = select_tensor_range(*selected.context, problem.dtype, shape.rows * shape.cols);
      else if (!problem.one_group)
        selected.ranges = select_ranges(*selected.context, problem.dtype, shape.num_groups, shape.cols,
                                        args.group_size, shape.groups_per_row);
    } else {
      // The fewest groups that fill whole chunks, and as many of those as make a span.
      const int64_t groups = kChunk / std::gcd(args.group_size, kChunk);
      const int64_t most = std::min<int64_t>(kSpan / (groups * args.group_size), kMaxSpanGroups / groups);
      args.span_cols = std::max<int64_t>(1, most) * groups * args.group_size;
    }
    args.spans_per_row = ceil_div(shape.cols, args.span_cols);
    selected.name = "quantize_spans";
    selected.codes_grid = {shape.rows * args.spans_per_row, kSpansThreads};
  }
  if (problem.codec.scale_type == formats::ScaleType::e4m3) {
    selected.needs_tensor_range = true;
    selected.workspace_bytes += static_cast<int64_t>(sizeof(RangeKeys));
    if (problem.range == nullptr)
      selected.tensor_range = select_tensor_range(*selected.context, problem.dtype, shape.rows * shape.cols);
  }
  selected.codes = cuda::get_kernel(*selected.context, quantize_kernel(problem));
  return selected;
}

// By value, so that nothing waits.
void enqueue_params(const QuantizeCuda& selected, const QuantizeProblem& problem, QuantizeCounts* counts) {
  double scale = 0, bias = 0;
  uint8_t zero = 0;
  QuantizeProblem host = problem;
  host.scales = &scale;
  if (host.biases) host.biases = &bias;
  if (host.zeros) host.zeros = &zero;
  store_params(host, 0, selected.params);
  const int64_t scale_bytes = formats::scale_bytes(problem.codec.scale_type);
  cuda::set(problem.scales, &scale, scale_bytes, problem.stream);
  if (problem.biases) cuda::set(problem.biases, &bias, scale_bytes, problem.stream);
  if (problem.zeros) cuda::set(problem.zeros, &zero, 1, problem.stream);
  QuantizeStatus status;
  count(status, selected.params);
  for (const auto& [number, to] : {std::pair(status.num_unheld_scales, &counts->num_unheld_scales),
                                   std::pair(status.num_coarse_scales, &counts->num_coarse_scales)})
    if (number != 0) cuda::set(to, &number, sizeof number, problem.stream);
}

}  // namespace

cuda::KernelSpec quantize_kernel(const QuantizeProblem& problem) {
  formats::Codec codec = problem.codec;  // the rule and how parameters are stored are arguments
  codec.rule = {};
  if (formats::scale_bytes(codec.scale_type) > 1) codec.scale_type = {};
  codec.unrounded_code_scale = false;
  const std::string lines = cuda::element_config(problem.dtype) + cuda::codec_config(codec);
  if (problem.search) return {"ops/quantize/quantize_search.cu", "quantize_search", cuda::config_text(lines)};
  if (const int batch = batch_of_groups(problem); batch > 0)
    return {"ops/quantize/quantize_groups.cu", "quantize_groups",
            cuda::config_text(lines + fmt::format("constexpr int kBatch = {};\n", batch))};
  return {"ops/quantize/quantize_spans.cu", "quantize_spans",
          cuda::config_text(lines + fmt::format("constexpr bool kAligned = {};\n", is_aligned(problem)))};
}

cuda::KernelSpec value_range_kernel(DType dtype) {
  return {"ops/quantize/value_range.cu", "value_range", cuda::config_text(cuda::element_config(dtype))};
}

std::shared_ptr<const QuantizeCuda> select_quantize_cuda(const QuantizeProblem& problem) {
  return std::make_shared<const QuantizeCuda>(select(problem));
}
const char* kernel_name(const QuantizeCuda& cuda) { return cuda.name; }
int64_t workspace_bytes(const QuantizeCuda& cuda) { return cuda.workspace_bytes; }

void run_quantize_cuda(const QuantizeCuda& selected, const QuantizeProblem& problem, void* workspace) {
  const cuda::Scope scope(*selected.context);
  auto* const counts = static_cast<QuantizeCounts*>(workspace);
  cuda::fill(workspace, 0, selected.workspace_bytes, problem.stream);
  if (selected.stores_params) enqueue_params(selected, problem, counts);
  if (selected.codes == nullptr) {
    const float global = global_scale_of_range(problem.dtype, problem.range ? *problem.range : ValueRange{});
    if (problem.global_scale) cuda::set(problem.global_scale, &global, sizeof global, problem.stream);
    return;
  }
  QuantizeArgs args = selected.args;
  args.x = problem.x;
  args.codes = problem.codes;
  args.scales = problem.scales;
  args.zeros = problem.zeros;
  args.biases = problem.biases;
  args.counts = counts;
  auto* ranges = reinterpret_cast<RangeKeys*>(counts + 1);
  const auto find_ranges = [&](const RangesCuda& finder) {
    if (finder.function != nullptr) return launch_ranges(finder, problem.x, ranges, nullptr, problem.stream);
    const RangeKeys keys = keys_of(*problem.range);
    cuda::set(ranges, &keys, sizeof keys, problem.stream);
  };
  if (selected.needs_tensor_range) {
    args.global_scale = problem.global_scale;
    args.tensor_range = ranges;
    find_ranges(selected.tensor_range);
    ++ranges;
  }
  if (selected.needs_ranges) {
    args.ranges = ranges;
    find_ranges(selected.ranges);
  }
  if (selected.units_per_row == 0)
    return cuda::launch(selected.codes, selected.codes_grid, problem.stream, args);
  const Importance& importance = problem.importance;
  cuda::launch(selected.codes, selected.codes_grid, problem.stream,
               ScaleSearchArgs{args, selected.units_per_row, search_units(args.group_size),
                               importance.weights, importance.count, importance.first});
}

ValueRange value_range_cuda(const ConstTensorView& x, void* stream) {
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
  launch_ranges(select_tensor_range(context, x.dtype, n), x.data, &device->keys, &device->counts, stream);
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
  if (!cuda::is_aligned(problem.importance.weights, sizeof(float)))
    return "importance is not aligned to its elements of 4 bytes";
  return "";
}

QuantizeStatus quantize_cuda(const QuantizeProblem& problem) {
  const QuantizeCuda selected = select(problem);
  const cuda::Scope scope(*selected.context);
  const cuda::Scratch workspace(*selected.context, selected.workspace_bytes);
  run_quantize_cuda(selected, problem, workspace.data());
  return read_counts(problem.device, workspace.data(), problem.stream);
}

}  // namespace halfbyte
