#include "ops/qgemm/weight/experts_cuda.h"

#include <algorithm>
#include <cmath>

#include "core/arithmetic.h"
#include "ops/qgemm/weight/stage_x_cuda.h"

namespace halfbyte {

ExpertsArgs experts_args(const QgemmProblem& problem) {
  const QgemmExperts& experts = problem.experts;
  ExpertsArgs args{};
  args.weight_bytes = problem.weight.num_bytes;
  args.rows = static_cast<int32_t>(problem.m);
  args.num = static_cast<int32_t>(experts.num);
  args.rows_per_expert = static_cast<int32_t>(experts.rows_per_expert);
  args.slots_per_x = static_cast<int32_t>(experts.slots_per_x);
  return args;
}

void place_experts(ExpertsArgs& args, const QgemmTensors& tensors) {
  args.offsets = tensors.offsets;
  args.slots = tensors.slots;
  args.routing_weights = tensors.routing_weights;
}

int64_t rows_of_weight(const QgemmProblem& problem) {
  const QgemmExperts& experts = problem.experts;
  if (experts.num == 0) return problem.m;
  if (experts.rows == ExpertRows::masked) return experts.rows_per_expert;
  const int64_t rows = ceil_div(problem.m, experts.num);
  return std::min(problem.m, rows + rows / 2);
}

double likely_expert_tiles(const QgemmProblem& problem, int64_t tile) {
  const QgemmExperts& experts = problem.experts;
  if (experts.num == 0) return 1;
  const auto num = static_cast<double>(experts.num);
  if (experts.rows == ExpertRows::masked)
    return num * static_cast<double>(ceil_div(experts.rows_per_expert, tile));
  // Rows of an expert are nearly Poisson distributed, and it has a tile more for each multiple of `tile` that
  // they exceed. Of many rows the last tile is half full.
  constexpr double kManyRows = 700;
  const double rows = static_cast<double>(problem.m) / num, size = static_cast<double>(tile);
  if (rows > kManyRows) return num * (rows / size + 0.5);
  double tiles = 0, at_most = 0, exactly = std::exp(-rows);
  for (int64_t i = 0; i < tile || at_most < 1 - 1e-9; ++i) {
    at_most += exactly;
    if (i % tile == 0) tiles += std::max(1 - at_most, 0.0);
    exactly *= rows / static_cast<double>(i + 1);
  }
  return num * tiles;
}

int64_t tiles_of_rows(const QgemmProblem& problem, int64_t tile) {
  const QgemmExperts& experts = problem.experts;
  return experts.num == 0 ? ceil_div(problem.m, tile)
                          : most_expert_tiles(problem.m, experts.num, experts.rows_per_expert, tile);
}

std::string refuse_sm90_experts(const QgemmProblem& p) {
  if (p.double_quant) return "of experts, scales must not be double quantized";
  if (!has_aligned_x(p)) return "of experts, rows of x must be whole chunks of 16 bytes, aligned to them";
  return "";
}

bool finds_expert_rows(const QgemmProblem& p, int64_t most_rows) {
  return p.experts.rows != ExpertRows::masked && p.m <= std::min(most_rows, 2 * p.experts.num);
}

KernelKey experts_key() {
  return cuda::flag_key("experts", "Rows of x meet the weights of experts, as the device says.");
}

namespace {

cuda::KernelSpec rows_kernel() { return {"ops/qgemm/weight/expert_rows.cu", "qgemm_expert_rows", ""}; }

// Of a copy of x that the second-level cache keeps, 50 MB of an H100, beside x and weights.
constexpr int64_t kKeptBytes = 32 << 20;

}  // namespace

QgemmExpertRows::QgemmExpertRows(const cuda::Context& context, const QgemmProblem& problem, int64_t tile,
                                 int64_t most_width, bool copies_x, QgemmGivenSums given) {
  const QgemmExperts& experts = problem.experts;
  const int64_t row_bytes = problem.in_cols() * size_of(problem.dtype);
  args_.experts = experts_args(problem);
  args_.tile = static_cast<int32_t>(tile);
  args_.most_width = static_cast<int32_t>(most_width);
  args_.most_tiles = static_cast<int32_t>(tiles_of_rows(problem, tile));
  args_.chunks = row_bytes / 16;
  args_.once = problem.m * row_bytes > kKeptBytes;
  // Rows that no expert has are zeros; masked, they are not written.
  if (experts.rows != ExpertRows::masked) {
    args_.zero_bytes = problem.y_cols() * size_of(problem.dtype);
    args_.zero_parts = problem.accumulate ? 0 : 1;
  }
  const bool is_indexed = experts.rows == ExpertRows::indices, copies = is_indexed && copies_x;
  function_ = cuda::get_kernel(context, rows_kernel());
  const bool has_rows = is_indexed || experts.rows == ExpertRows::offsets;
  args_.pieces = copies ? static_cast<int32_t>(ceil_div(args_.chunks, int64_t{kExpertRowsPiece})) : 1;
  grid_ = {1 + (has_rows ? ceil_div(problem.m * args_.pieces, kExpertRowsThreads / 32) : 0),
           kExpertRowsThreads};
  list_bytes_ =
      formats::round_up((1 + args_.most_tiles) * static_cast<int64_t>(sizeof(ExpertTileEntry)), 256);
  const int64_t rows_bytes = formats::round_up(problem.m * int64_t{sizeof(int32_t)}, 256);
  finds_rows_ = is_indexed && !copies_x;
  rows_bytes_ = finds_rows_ ? rows_bytes : copies ? formats::round_up(problem.m * row_bytes, 256) : 0;
  flag_bytes_ = formats::round_up(given.num_flags * int64_t{sizeof(uint32_t)}, 256);
  num_bytes_ = list_bytes_ + rows_bytes_ + flag_bytes_ + formats::round_up(given.num_bytes, 256);
  args_.num_flags = static_cast<int32_t>(given.num_flags);
}

void QgemmExpertRows::place(QgemmTensors& tensors, void* workspace) const {
  tensors.expert_tiles = workspace;
  std::byte* const rows = static_cast<std::byte*>(workspace) + list_bytes_;
  if (finds_rows_)
    tensors.rows_of_x = reinterpret_cast<const int32_t*>(rows);
  else if (rows_bytes_ > 0)
    tensors.x = rows;
  tensors.given_flags = reinterpret_cast<uint32_t*>(rows + rows_bytes_);
  tensors.given_sums = reinterpret_cast<float*>(rows + rows_bytes_ + flag_bytes_);
}

void QgemmExpertRows::run(const QgemmTensors& tensors, void* workspace, void* sums, int64_t parts,
                          int64_t stride, void* stream) const {
  QgemmExpertRowsArgs args = args_;
  place_experts(args.experts, tensors);
  args.list = static_cast<ExpertTileEntry*>(workspace);
  args.x = tensors.x;
  std::byte* const rows = static_cast<std::byte*>(workspace) + list_bytes_;
  if (finds_rows_)
    args.rows_of_x = reinterpret_cast<int32_t*>(rows);
  else if (rows_bytes_ > 0)
    args.to = rows;
  args.flags = reinterpret_cast<uint32_t*>(rows + rows_bytes_);
  if (args.zero_bytes > 0) {
    args.zeros = tensors.y;
    if (sums != nullptr) {
      args.zeros = sums;
      args.zero_bytes = stride * static_cast<int64_t>(sizeof(float));
      args.zero_parts = static_cast<int32_t>(parts);
    }
  }
  cuda::launch(function_, grid_, stream, args);
}

std::vector<cuda::Kernel> qgemm_expert_rows_kernels() {
  return {{{"qgemm", "qgemm_expert_rows", "Tiles of the rows of experts, and x in their order.", {}},
           [](const cuda::KernelValues&) { return rows_kernel(); }}};
}

}  // namespace halfbyte
