#include "ops/observe/range_search_cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "ops/observe/observe_cuda.h"

namespace halfbyte {
namespace {

constexpr int kThreads = kSearchThreads;
constexpr int64_t kMany = 512;  // groups that fill a device with a block each

std::string team_config(int team_warps) {
  return fmt::format("constexpr int kTeamWarps = {};\n", team_warps);
}
// Where only the type of values matters.
DType value_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

class Selection {
 public:
  Selection(const cuda::Context& context, const ObserveProblem& problem)
      : context_(context),
        problem_(problem),
        common_{nullptr, nullptr, problem.groups()},
        longest_(common_.groups.longest()) {
    if (problem.observer.kind == ObserverKind::percentile)
      select_percentile();
    else
      select_mse();
  }
  RangeSearchCuda take() { return std::move(made_); }

 private:
  template <class Args>
  void add(const cuda::KernelSpec& spec, int64_t num_blocks, int threads, const Args& args) {
    made_.launches.push_back({cuda::get_kernel(context_, spec), {num_blocks, threads}, args});
  }
  void set_scratch(int64_t first_bytes, int64_t second_bytes) {
    made_.second_at = ceil_div(first_bytes, 16) * 16;
    made_.scratch_bytes = made_.second_at + second_bytes;
  }

  void select_percentile() {
    const DType dtype = problem_.dtype;
    const int64_t groups = problem_.num_scales;
    const PercentileGroupsArgs args{common_, problem_.observer.percentile};
    if (longest_ <= 32 * kPercentileLanes)
      return add(percentile_groups_kernel(dtype, 1), ceil_div(groups, kThreads / 32), kThreads, args);
    if (longest_ <= kThreads * kPercentileBlock)
      return add(percentile_groups_kernel(dtype, kThreads / 32), groups, kThreads, args);
    if (groups >= kMany && !is_wide(longest_))
      return add(percentile_blocks_kernel(dtype), groups, kThreads, args);
    PercentileCountsArgs counts{};
    counts.common = common_;
    counts.percentile = problem_.observer.percentile;
    constexpr int64_t kUnit = kThreads * 16;
    const int64_t per_block = std::max(longest_ / ceil_div(4 * kMany, groups), int64_t{4} * kUnit);
    counts.per_block = ceil_div(std::min(per_block, int64_t{1} << 30), kUnit) * kUnit;
    counts.splits = ceil_div(longest_, counts.per_block);
    const int passes = static_cast<int>(size_of(dtype));  // a byte each
    for (int pass = 0; pass < passes; ++pass) {
      counts.pass = pass;
      add(percentile_counts_kernel(dtype, is_wide(longest_)), groups * counts.splits, kThreads, counts);
      add(percentile_pick_kernel(dtype), groups, kThreads, counts);
    }
    set_scratch(groups * static_cast<int64_t>(sizeof(PercentileState)),
                groups * static_cast<int64_t>(sizeof(PercentileCounts)));
  }

  void select_mse() {
    const DType dtype = problem_.dtype;
    const int64_t groups = problem_.num_scales;
    const int value_bytes = dtype == DType::f64 ? 8 : 4;
    const int64_t piece = mse_piece(kMseWarps, value_bytes), pieces = ceil_div(longest_, piece);
    const MseGroupsArgs args{common_, mse_codes(problem_.observer.qparams)};
    if (longest_ <= mse_piece(1, value_bytes))
      return add(mse_groups_kernel(dtype, 1), ceil_div(groups, 4), 128, args);
    if (pieces == 1 || (groups >= kMany && pieces <= kMseMostPieces))
      return add(mse_groups_kernel(dtype, kMseWarps), groups, kThreads, args);
    MseErrorsArgs errors{};
    errors.common = common_;
    errors.codes = args.codes;
    const auto per_block = static_cast<uint64_t>(ceil_div(pieces, ceil_div(4 * kMany, groups)));
    errors.pieces = static_cast<int>(std::min<uint64_t>(kMseMostPieces, std::bit_ceil(per_block)));
    errors.splits = ceil_div(pieces, errors.pieces);
    for (int stage = 0; stage <= formats::kMseStages; ++stage) {
      errors.stage = stage;
      add(mse_errors_kernel(dtype), groups * errors.splits, kThreads, errors);
      add(mse_pick_kernel(dtype), groups, kThreads, errors);
    }
    const auto state_bytes = static_cast<int64_t>(value_bytes == 8 ? sizeof(MseState<double>)  //
                                                                   : sizeof(MseState<float>));
    set_scratch(groups * state_bytes, groups * errors.splits * formats::kMseMostCandidates * value_bytes);
  }

  const cuda::Context& context_;
  const ObserveProblem& problem_;
  SearchCommon common_;
  int64_t longest_;
  RangeSearchCuda made_;
};

}  // namespace

cuda::KernelSpec percentile_groups_kernel(DType dtype, int team_warps) {
  return observe_kernel("ops/observe/observe_percentile_groups.cu", "observe_percentile_groups", dtype,
                        team_config(team_warps));
}
cuda::KernelSpec percentile_blocks_kernel(DType dtype) {
  return observe_kernel("ops/observe/observe_percentile_blocks.cu", "observe_percentile_blocks", dtype, "");
}
cuda::KernelSpec percentile_counts_kernel(DType dtype, bool wide) {
  return observe_kernel("ops/observe/observe_percentile_counts.cu", "observe_percentile_counts", dtype,
                        fmt::format("constexpr bool kWide = {};\n", wide));
}
cuda::KernelSpec percentile_pick_kernel(DType dtype) {
  return observe_kernel("ops/observe/observe_percentile_pick.cu", "observe_percentile_pick", dtype, "");
}
cuda::KernelSpec mse_groups_kernel(DType dtype, int team_warps) {
  return observe_kernel("ops/observe/observe_mse_groups.cu", "observe_mse_groups", dtype,
                        team_config(team_warps));
}
cuda::KernelSpec mse_errors_kernel(DType dtype) {
  return observe_kernel("ops/observe/observe_mse_errors.cu", "observe_mse_errors", dtype, "");
}
cuda::KernelSpec mse_pick_kernel(DType dtype) {
  return observe_kernel("ops/observe/observe_mse_pick.cu", "observe_mse_pick", value_dtype(dtype), "");
}

RangeSearchCuda select_range_search(const cuda::Context& context, const ObserveProblem& problem) {
  return Selection(context, problem).take();
}

void run_range_search(const RangeSearchCuda& search, const void* x, RangeKeys* ranges, void* scratch,
                      void* stream) {
  void* const second = static_cast<std::byte*>(scratch) + search.second_at;
  for (const RangeSearchCuda::Launch& launch : search.launches)
    std::visit(
        [&](auto args) {
          args.common.x = x;
          args.common.ranges = ranges;
          if constexpr (std::is_same_v<decltype(args), PercentileCountsArgs>) {
            args.states = static_cast<PercentileState*>(scratch);
            args.counts = static_cast<PercentileCounts*>(second);
          }
          if constexpr (std::is_same_v<decltype(args), MseErrorsArgs>) {
            args.states = scratch;
            args.errors = second;
          }
          cuda::launch(launch.function, launch.grid, stream, args);
        },
        launch.args);
}

}  // namespace halfbyte
