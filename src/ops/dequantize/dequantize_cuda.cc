#include "ops/dequantize/dequantize_cuda.h"

#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "ops/dequantize/dequantize_args.h"

namespace halfbyte {

// The arguments are complete but for addresses.
struct DequantizeCuda {
  const cuda::Context* context = nullptr;
  const char* name = "none";
  cuda::CUfunction function = nullptr;  // null: there are no elements
  cuda::Grid grid;
  DequantizeArgs args{};
};

namespace {

// Rows are whole chunks of 8 elements, y and the codes can be accessed by chunks.
bool is_aligned(const DequantizeProblem& problem) {
  return problem.shape.cols % 8 == 0 && problem.y_alignment >= 16 && problem.code_alignment >= 8;
}

// Rows are whole groups of a power of two of elements, at least a chunk.
bool has_whole_groups(const DequantizeProblem& problem) {
  const int64_t size = problem.shape.group_size;
  const bool fits = size >= 32 && std::has_single_bit(static_cast<uint64_t>(size));
  return fits && !problem.one_group && problem.shape.cols % size == 0 && is_aligned(problem);
}

DequantizeCuda select(const DequantizeProblem& problem) {
  DequantizeCuda selected;
  selected.context = &cuda::context(problem.device.index);
  const QuantShape& shape = problem.shape;
  if (shape.rows * shape.cols == 0) return selected;
  const cuda::Scope scope(*selected.context);
  DequantizeArgs& args = selected.args;
  args.rows = shape.rows;
  args.cols = shape.cols;
  args.row_bytes = shape.row_bytes;
  args.group_size = problem.one_group ? shape.cols : std::min(shape.group_size, shape.cols);
  args.groups_per_row = problem.one_group ? 0 : shape.groups_per_row;  // 0: all rows have the first group
  const bool aligned = is_aligned(problem);
  const int size = static_cast<int>(size_of(problem.dtype)), chunk = dequantize_chunk(aligned, size);
  const int64_t num_chunks = shape.rows * ceil_div(shape.cols, chunk);
  if (aligned && !is_wide(num_chunks)) {
    if (problem.one_group)
      args.chunks_per_group = num_chunks;
    else if (args.group_size % chunk == 0 && shape.cols % args.group_size == 0)
      args.chunks_per_group = args.group_size / chunk;
  }
  const bool whole_groups = has_whole_groups(problem);
  if (whole_groups) args.group_shift = std::countr_zero(static_cast<uint64_t>(args.group_size / chunk));
  args.scale_type = problem.codec.scale_type;
  std::ranges::copy(problem.codec.book.values, args.values);
  const int64_t per_block = kDequantizeThreads * dequantize_batch(aligned, whole_groups, size);
  selected.grid = {ceil_div(num_chunks, per_block), kDequantizeThreads};
  selected.name = "dequantize";
  selected.function = cuda::get_kernel(*selected.context, dequantize_kernel(problem));
  return selected;
}

}  // namespace

cuda::KernelSpec dequantize_kernel(const DequantizeProblem& problem) {
  const formats::Codec& codec = problem.codec;
  return {
      "ops/dequantize/dequantize.cu", "dequantize",
      cuda::config_text(cuda::element_config(problem.dtype) +
                        fmt::format("constexpr Kind kKind = Kind({});\nconstexpr int kBits = {};\n"
                                    "constexpr bool kAsymmetric = {}, kAligned = {}, kWholeGroups = {};\n",
                                    static_cast<int>(codec.kind), static_cast<int>(codec.bits),
                                    codec.asymmetric, is_aligned(problem), has_whole_groups(problem)))};
}

std::shared_ptr<const DequantizeCuda> select_dequantize_cuda(const DequantizeProblem& problem) {
  return std::make_shared<const DequantizeCuda>(select(problem));
}
const char* kernel_name(const DequantizeCuda& cuda) { return cuda.name; }

void run_dequantize_cuda(const DequantizeCuda& selected, const DequantizeProblem& problem) {
  if (selected.function == nullptr) return;
  const cuda::Scope scope(*selected.context);
  DequantizeArgs args = selected.args;
  args.codes = problem.codes;
  args.scales = problem.scales;
  args.zeros = problem.zeros;
  args.biases = problem.biases;
  args.global_scale = problem.global_scale;
  args.y = problem.y;
  cuda::launch(selected.function, selected.grid, problem.stream, args);
}

void dequantize_cuda(const DequantizeProblem& problem) { run_dequantize_cuda(select(problem), problem); }

std::string refuse_dequantize_cuda(const DequantizeProblem& problem) {
  const auto size = size_of(problem.dtype),
             scale_size = int64_t{formats::scale_bytes(problem.codec.scale_type)};
  if (!cuda::is_aligned(problem.y, size))
    return fmt::format("y is not aligned to its elements of {} bytes", size);
  if (!cuda::is_aligned(problem.scales, scale_size) || !cuda::is_aligned(problem.biases, scale_size))
    return fmt::format("scales or biases are not aligned to their elements of {} bytes", scale_size);
  return "";
}

}  // namespace halfbyte
