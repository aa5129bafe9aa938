#include "ops/observe/observe_cuda.h"

#include <algorithm>
#include <bit>
#include <variant>

#include <fmt/format.h>

#include "core/arithmetic.h"
#include "cuda/clear.h"
#include "cuda/config.h"
#include "formats/counts.h"
#include "grouped/ranges_cuda.h"
#include "ops/observe/range_search_cuda.h"

namespace halfbyte {

// What a problem is done with: a kernel that reads x and hands what it found to the state; or that leaves
// ranges, which `update` hands to it.
struct ObserveCuda {
  ObserveProblem problem;
  const cuda::Context* context = nullptr;
  cuda::Clear clear;
  std::string name;
  cuda::CUfunction function = nullptr, update = nullptr;
  cuda::Grid grid, update_grid;
  // The workspace: counts, ranges, counters.
  int64_t num_ranges = 0, num_counters = 0;
  // percentile and mse: of the ranges, before `update`; its scratch ends the workspace.
  RangeSearchCuda search;
  // The arguments, but for addresses.
  std::variant<ObserveGroupsArgs, ObservePartsArgs, ObserveColumnsArgs, RangesArgs> args;

  int64_t ranges_at() const { return sizeof(QuantizeCounts); }
  int64_t counters_at() const { return ranges_at() + num_ranges * static_cast<int64_t>(sizeof(RangeKeys)); }
  int64_t scratch_at() const {
    return (counters_at() + num_counters * static_cast<int64_t>(sizeof(formats::u32)) + 15) / 16 * 16;
  }
  int64_t workspace_bytes() const { return scratch_at() + search.scratch_bytes; }
};

namespace {

constexpr int kThreads = kObserveThreads;
constexpr int kBatch = 8;  // loads of a thread that are in flight
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMost = 1 << 30;  // of what kernels number by 32 bits

class Selection {
 public:
  Selection(const ObserveProblem& problem, int64_t alignment)
      : problem_(problem), chunk_(16 / size_of(problem.dtype)), whole_(alignment >= 16) {
    made_.problem = problem;
    made_.context = &cuda::context(problem.device.index);
    wave_ = int64_t{4} * made_.context->num_multiprocessors;
    const cuda::Scope scope(*made_.context);
    made_.clear = cuda::Clear(*made_.context);
    if (problem.num_elements() == 0) {
      made_.name = "none";
      return;
    }
    if (!select_runs() && !select_columns()) select_elements();
    if (needs_search(problem)) made_.search = select_range_search(*made_.context, problem);
    if (problem.is_mean() || std::holds_alternative<RangesArgs>(made_.args)) select_update();
  }
  ObserveCuda take() { return std::move(made_); }

 private:
  template <class Args>
  void choose(const cuda::KernelSpec& spec, cuda::Grid grid, const Args& args) {
    made_.name = spec.function;
    made_.function = cuda::get_kernel(*made_.context, spec);
    made_.grid = grid;
    made_.args = args;
  }

  // Groups that are runs of whole chunks.
  bool select_runs() {
    const ObserveProblem& p = problem_;
    if (!whole_) return false;
    // Rows of `axis` elements, with groups along them; or as many elements in each of `runs` places.
    int64_t axis = p.axis, group = p.group_size, rows = p.outer, runs = 1, tail = 0;
    if (p.num_scales == 1) {
      axis = group = p.num_elements();
      rows = 1;
      tail = axis % chunk_;
      axis = group = axis - tail;
    } else if (p.scale_strides.outer == 0) {  // channels
      axis = group = p.inner;
      rows = p.axis;
      runs = p.outer;
    } else if (p.inner != 1) {
      return false;
    }
    if (axis == 0 || axis % chunk_ != 0 || (group % chunk_ != 0 && group < axis)) return false;
    axis /= chunk_;
    group = ceil_div(group, chunk_);
    const int64_t in_all = group * runs, per_row = ceil_div(axis, group);
    // A block has a group, unless there are few of them and they are large.
    constexpr int64_t kLarge = 512;
    const bool many = rows * per_row >= kLarge || in_all <= kThreads * kBatch;
    if (runs == 1 && tail == 0 && many && rows * per_row < kMost)
      select_groups(axis, group, static_cast<int>(rows * per_row));
    else
      return select_parts(axis, group, rows, runs, static_cast<int>(tail));
    return true;
  }
  void select_groups(int64_t axis, int64_t group, int num_groups) {
    ObserveGroupsArgs args{};
    args.axis = axis;
    args.group = group;
    args.num_groups = num_groups;
    args.row_divider = formats::Divider::of(ceil_div(axis, group));
    if (group <= 32) {
      args.team = static_cast<int>(std::bit_width(static_cast<unsigned>(group - 1)));
      const int64_t per_block =
          (kThreads >> args.team) * observe_batch(static_cast<int>(size_of(problem_.dtype)));
      choose(observe_groups_kernel(problem_.dtype, false), {ceil_div(num_groups, per_block), kThreads}, args);
    } else {
      // Warps need not wait for each other, where there are enough groups to fill the device with them.
      const auto threads =
          std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(ceil_div(group, kBatch), kThreads)));
      const bool warps = threads <= 32 || num_groups >= wave_ * kWarps;
      args.team = warps ? 32 : static_cast<int>(threads);
      choose(observe_groups_kernel(problem_.dtype, true),
             warps ? cuda::Grid{ceil_div(num_groups, kWarps), kThreads} : cuda::Grid{num_groups, args.team},
             args);
    }
  }
  bool select_parts(int64_t axis, int64_t group, int64_t rows, int64_t runs, int tail) {
    const int64_t in_all = group * runs, per_row = ceil_div(axis, group), num_groups = rows * per_row;
    ObservePartsArgs args{};
    args.row = axis;
    args.group = args.run = group;
    args.per_row = static_cast<formats::u32>(std::min(per_row, kMost));
    args.runs = runs;
    args.run_stride = axis * rows;
    args.run_divider = formats::Divider::of(group);
    args.tail = tail;
    const int64_t unit = kThreads * kBatch;
    args.per_part = ceil_div(std::max(unit, in_all / ceil_div(wave_, num_groups)), unit) * unit;
    const int64_t parts = ceil_div(in_all, args.per_part);
    if (num_groups > kMost / parts || (runs > 1 && is_wide(in_all))) return false;
    args.parts = static_cast<formats::u32>(parts);
    if (parts > 1) made_.num_ranges = made_.num_counters = num_groups;
    choose(observe_parts_kernel(problem_.dtype, runs > 1), {num_groups * parts, kThreads}, args);
    return true;
  }

  // Groups side by side, in whole chunks.
  bool select_columns() {
    const ObserveProblem& p = problem_;
    ObserveColumnsArgs args{};
    const auto side_by_side = p.as_columns();
    if (!side_by_side) return false;
    args.columns = side_by_side->columns;
    args.axis = side_by_side->axis;
    args.group = side_by_side->group;
    if (!whole_ || args.columns % chunk_ != 0) return false;
    const int64_t bands_per_axis = ceil_div(args.axis, args.group);
    const int64_t num_bands = p.num_elements() / (args.columns * args.axis) * bands_per_axis;
    args.columns /= chunk_;
    args.width =
        static_cast<int>(std::bit_width(static_cast<uint64_t>(std::min<int64_t>(args.columns, 32) - 1)));
    const int64_t tiles = ceil_div(args.columns, int64_t{1} << args.width);
    const int64_t unit = int64_t{kBatch * kThreads} >> args.width;  // rows of a block
    args.rows =
        ceil_div(std::max<int64_t>(unit, args.group / ceil_div(wave_, num_bands * tiles)), unit) * unit;
    const int64_t pieces = ceil_div(args.group, args.rows);
    if (tiles > kMost / pieces || num_bands > kMost / (pieces * tiles)) return false;
    args.bands_per_axis = static_cast<formats::u32>(bands_per_axis);
    args.pieces = static_cast<formats::u32>(pieces);
    args.tiles = static_cast<formats::u32>(tiles);
    if (pieces > 1) {
      made_.num_ranges = p.num_scales;
      made_.num_counters = num_bands * tiles;
    }
    choose(observe_columns_kernel(p.dtype), {num_bands * pieces * tiles, kThreads}, args);
    return true;
  }

  void select_elements() {
    const RangesCuda ranges =
        select_ranges("observe_elements", problem_, problem_.dtype, /*counts=*/true, /*whole=*/false);
    choose(ranges.spec, ranges.grid, ranges.args);
  }
  // The ranges of all groups are left in the workspace.
  void select_update() {
    made_.num_ranges = problem_.num_scales;
    made_.update = cuda::get_kernel(*made_.context, observe_update_kernel(problem_.dtype));
    made_.update_grid = {ceil_div(problem_.num_scales, kThreads), kThreads};
  }

  const ObserveProblem& problem_;
  ObserveCuda made_;
  int64_t chunk_;
  bool whole_;
  int64_t wave_ = 0;  // blocks that run at a time: large problems have as many, since each waits at its end
};

}  // namespace

cuda::KernelSpec observe_kernel(const char* source, const char* name, DType dtype, const std::string& lines) {
  return {source, name, cuda::config_text(cuda::element_config(dtype) + lines)};
}
cuda::KernelSpec observe_groups_kernel(DType dtype, bool is_long) {
  return observe_kernel("ops/observe/observe_groups.cu", "observe_groups", dtype,
                        fmt::format("constexpr bool kLong = {};\n", is_long));
}
cuda::KernelSpec observe_parts_kernel(DType dtype, bool runs) {
  return observe_kernel("ops/observe/observe_parts.cu", "observe_parts", dtype,
                        fmt::format("constexpr bool kRuns = {};\n", runs));
}
cuda::KernelSpec observe_columns_kernel(DType dtype) {
  return observe_kernel("ops/observe/observe_columns.cu", "observe_columns", dtype, "");
}
cuda::KernelSpec observe_update_kernel(DType dtype) {
  // The state depends on f64 or not.
  return observe_kernel("ops/observe/observe_update.cu", "observe_update",
                        dtype == DType::f64 ? DType::f64 : DType::f32, "");
}

std::shared_ptr<const ObserveCuda> select_observe_cuda(const ObserveProblem& problem, int64_t alignment) {
  return std::make_shared<const ObserveCuda>(Selection(problem, alignment).take());
}
const std::string& kernel_name(const ObserveCuda& cuda) { return cuda.name; }
int64_t workspace_bytes(const ObserveCuda& cuda) { return cuda.workspace_bytes(); }

void run_observe_cuda(const ObserveCuda& selected, const ObserveTensors& tensors, void* stream,
                      void* workspace) {
  const cuda::Scope scope(*selected.context);
  selected.clear(workspace, selected.workspace_bytes(), stream);
  auto* const bytes = static_cast<std::byte*>(workspace);
  const ObserveState state{tensors.min, tensors.max, reinterpret_cast<formats::i64*>(tensors.num_batches),
                           selected.problem.history};
  const ObserveJoin join{reinterpret_cast<RangeKeys*>(bytes + selected.ranges_at()),
                         reinterpret_cast<formats::u32*>(bytes + selected.counters_at())};
  const ObserveCommon common{tensors.x, static_cast<QuantizeCounts*>(workspace), state, join,
                             selected.update != nullptr};
  if (selected.function)
    std::visit(
        [&](auto args) {
          if constexpr (std::is_same_v<decltype(args), RangesArgs>) {
            args.x = common.x;
            args.ranges = common.join.ranges;
            args.counts = common.counts;
          } else {
            args.common = common;
          }
          selected.clear.launch(selected.function, selected.grid, stream, args);
        },
        selected.args);
  run_range_search(selected.search, tensors.x, join.ranges, bytes + selected.scratch_at(), stream);
  if (selected.update)
    cuda::launch(selected.update, selected.update_grid, stream,
                 ObserveUpdateArgs{state, join.ranges, selected.problem.num_scales});
}

}  // namespace halfbyte
