#include "ops/learned_scale/learned_scale_cuda.h"

#include <algorithm>
#include <bit>
#include <variant>

#include "core/arithmetic.h"
#include "cuda/clear.h"
#include "formats/counts.h"

namespace halfbyte {

// Adds up pieces, after the kernel that makes them; what it reads and writes in the workspace.
struct LsqStage {
  cuda::Grid grid;
  LsqTotalsArgs args{};
  int64_t partials = 0, out = 0;  // bytes from the begin of the workspace
};

// What a problem is done with, in order.
struct LsqCuda {
  const cuda::Context* context = nullptr;
  cuda::Clear clear;
  std::string name;  // of the first kernel
  cuda::CUfunction function = nullptr, totals = nullptr;
  cuda::Grid grid;
  int64_t workspace_bytes = 0;
  // The arguments, but for addresses.
  LsqCommon common{};
  std::variant<LsqElementsArgs, LsqRowsArgs, LsqColumnsArgs> args;
  std::vector<LsqStage> stages;
};

namespace {

constexpr int kFew = 2;  // levels of lanes that share a group, the most of LsqTeam::few
constexpr int kThreads = kLinearThreads, kWarps = kThreads / 32;
constexpr int64_t kCountsBytes = sizeof(QuantizeCounts);
static_assert(kCountsBytes % 16 == 0);

// A kernel of gradients.
cuda::KernelSpec kernel_spec(const char* source, const char* name, const LinearTypes& types,
                             const std::string& lines) {
  return linear_kernel(source, name, types, "constexpr LinearOp kOp = LinearOp::backward;\n" + lines);
}

class Selection {
 public:
  Selection(const LsqProblem& problem, int64_t alignment) : problem_(problem), types_(types_of(problem)) {
    made_.context = &cuda::context(problem.device.index);
    chunk_ = 16 / size_of(problem.dtype);
    // Chunks lie together, at multiples of 16 bytes.
    whole_ = alignment >= 16 && problem.num_elements() > 0;
    LinearCommon& linear = made_.common.linear;
    linear.given = true;
    linear.q_min = problem.codec.q_min;
    linear.q_max = problem.codec.q_max;
    linear.scale_type = problem.codec.scale_type;
    linear.zero_type = types_.zero_type;
    linear.table = linear_table(problem.codec.book);
    made_.common.factor = problem.gradient_scale;
    made_.common.num_groups = problem.num_scales;
    made_.common.pieces = made_.common.band_groups = 1;
    const cuda::Scope scope(*made_.context);
    if (!select_rows() && !select_columns()) select_elements();
    select_totals();
  }
  LsqCuda take() { return std::move(made_); }

 private:
  template <class Args>
  void choose(const char* name, const cuda::KernelSpec& spec, cuda::Grid grid, const Args& args) {
    made_.name = name;
    made_.function = cuda::get_kernel(*made_.context, spec);
    made_.grid = grid;
    made_.args = args;
  }

  // Groups one behind the other.
  bool select_rows() {
    const LsqProblem& p = problem_;
    const auto along = p.as_rows();
    if (!along) return false;
    const auto [rows, row, group] = *along;
    if (!whole_ || row % chunk_ != 0 || (group % chunk_ != 0 && group < row)) return false;
    LsqRowsArgs args{};
    args.row = row / chunk_;
    args.group = ceil_div(group, chunk_);
    args.groups_per_row = ceil_div(args.row, args.group);
    args.row_divider = formats::Divider::of(args.groups_per_row);
    const int64_t num_groups = rows * args.groups_per_row;
    args.levels = static_cast<int>(std::bit_width(static_cast<uint64_t>(args.group - 1)));
    auto team = args.levels <= kFew            ? LsqTeam::few
                : args.levels < kLsqWarpLevels ? LsqTeam::lanes
                                               : LsqTeam::warp;
    cuda::Grid grid;
    int64_t padded = num_groups << args.levels, pieces = 1;  // chunks
    if (args.levels <= kLsqWarpLevels) {
      grid = {ceil_div(padded, kThreads * kLsqBatch), kThreads};
    } else {
      team = LsqTeam::block;
      const auto warps = std::min<int64_t>(kWarps, int64_t{1} << (args.levels - kLsqWarpLevels));
      grid.threads_per_block = static_cast<int>(32 * warps);
      const int64_t per_block = grid.threads_per_block * int64_t{kLsqBatch};
      pieces = ceil_div(args.group, per_block);
      args.piece_divider = formats::Divider::of(pieces);
      grid.num_blocks = num_groups * pieces;
      padded = grid.num_blocks * per_block;
    }
    if (is_wide(padded)) return false;
    made_.common.pieces = pieces;
    choose("lsq_rows", lsq_rows_kernel(types_, team), grid, args);
    return true;
  }

  // Groups side by side.
  bool select_columns() {
    const LsqProblem& p = problem_;
    if (!whole_) return false;
    LsqColumnsArgs args{};
    const auto side_by_side = p.as_columns();
    if (!side_by_side) return false;
    const int64_t columns = side_by_side->columns;
    args.axis = side_by_side->axis;
    args.group = side_by_side->group;
    if (columns % chunk_ != 0) return false;
    args.bands_per_axis = ceil_div(args.axis, args.group);
    args.row = columns / chunk_;
    const int64_t pieces = ceil_div(args.group, kLsqPieceRows);
    const int64_t blocks = p.num_scales / columns * pieces * ceil_div(args.row, 32);
    if (is_wide(blocks)) return false;
    made_.common.band_groups = columns;
    made_.common.pieces = pieces;
    choose("lsq_columns", lsq_columns_kernel(types_), {blocks, kThreads}, args);
    return true;
  }

  void select_elements() {
    const LsqProblem& p = problem_;
    LsqElementsArgs args{};
    args.groups = p.groups();
    const int64_t pieces = std::max<int64_t>(1, ceil_div(args.groups.longest(), kLsqPieceElements));
    made_.common.pieces = pieces;
    const int64_t warps = p.num_scales * pieces;
    const bool wide = is_wide(std::max({warps, pieces * kLsqPieceElements, p.num_elements()}));
    choose("lsq_elements", lsq_elements_kernel(types_, wide), {ceil_div(warps, kWarps), kThreads}, args);
  }

  // As many stages as leave one piece of each group.
  void select_totals() {
    const int64_t size = problem_.dtype == DType::f64 ? 8 : 4, num_sums = problem_.learns_zeros() ? 2 : 1;
    const int64_t groups = made_.common.num_groups;
    const auto bytes_of = [&](int64_t pieces) {
      return ceil_div(num_sums * groups * pieces * size, 16) * 16;
    };
    int64_t pieces = made_.common.pieces, at = kCountsBytes;
    while (pieces > 1) {
      LsqStage stage;
      stage.args.common = made_.common;
      stage.args.common.pieces = pieces;
      stage.args.side = groups >= 32 ? 32 : 1;
      const auto most = static_cast<uint64_t>(kLsqTotalsThreads / stage.args.side);
      const auto runs = static_cast<uint64_t>(ceil_div(pieces, kLsqRun));
      stage.args.runs = static_cast<int>(std::min(most, std::bit_ceil(runs)));
      stage.args.out_pieces = ceil_div(pieces, int64_t{stage.args.runs} * kLsqRun);
      stage.grid = {num_sums * ceil_div(groups, stage.args.side) * stage.args.out_pieces,
                    stage.args.side * stage.args.runs};
      stage.partials = at;
      at += bytes_of(pieces);
      stage.out = at;
      pieces = stage.args.out_pieces;
      made_.stages.push_back(stage);
    }
    made_.workspace_bytes = at;
    if (made_.stages.empty()) return;  // short groups: to begin early was measured to be no gain
    made_.totals = cuda::get_kernel(*made_.context, lsq_totals_kernel(types_));
    made_.clear = cuda::Clear(*made_.context);
  }

  const LsqProblem& problem_;
  LsqCuda made_;
  LinearTypes types_;
  int64_t chunk_;
  bool whole_;
};

}  // namespace

cuda::KernelSpec lsq_rows_kernel(const LinearTypes& types, LsqTeam team) {
  return kernel_spec(
      "ops/learned_scale/lsq_rows.cu", "lsq_rows", types,
      fmt::format("constexpr int kMinLevels = {}, kMaxLevels = {};\nconstexpr bool kBlock = {};\n",
                  team == LsqTeam::few     ? 0
                  : team == LsqTeam::lanes ? kFew + 1
                                           : kLsqWarpLevels,
                  team == LsqTeam::few     ? kFew
                  : team == LsqTeam::lanes ? kLsqWarpLevels - 1
                                           : kLsqWarpLevels,
                  team == LsqTeam::block));
}
cuda::KernelSpec lsq_columns_kernel(const LinearTypes& types) {
  return kernel_spec("ops/learned_scale/lsq_columns.cu", "lsq_columns", types, "");
}
cuda::KernelSpec lsq_elements_kernel(const LinearTypes& types, bool wide) {
  const bool learned = types.zero_type == ZeroType::f32 || types.zero_type == ZeroType::f64;  // a sum more
  const LinearTypes used = types.without_bins();
  return kernel_spec("ops/learned_scale/lsq_elements.cu", "lsq_elements", learned ? used : used.any_zeros(),
                     fmt::format("constexpr bool kWide = {};\n", wide));
}
cuda::KernelSpec lsq_totals_kernel(const LinearTypes& types) {
  LinearTypes used = types;
  used.book.reset();
  if (used.zero_type == ZeroType::i32) used.zero_type = ZeroType::none;  // has no sum either
  return kernel_spec("ops/learned_scale/lsq_totals.cu", "lsq_totals", used, "");
}

std::shared_ptr<const LsqCuda> select_lsq_cuda(const LsqProblem& problem, int64_t alignment) {
  return std::make_shared<const LsqCuda>(Selection(problem, alignment).take());
}
const std::string& kernel_name(const LsqCuda& cuda) { return cuda.name; }
int64_t workspace_bytes(const LsqCuda& cuda) { return cuda.workspace_bytes; }

void run_lsq_cuda(const LsqCuda& selected, const LsqTensors& tensors, void* stream, void* workspace) {
  const cuda::Scope scope(*selected.context);
  selected.clear(workspace, kCountsBytes, stream);
  auto* const bytes = static_cast<std::byte*>(workspace);
  const auto with_addresses = [&](LsqCommon common, int64_t partials) {
    LinearPointers& data = common.linear.data;
    data.x = tensors.x;
    data.dy = tensors.dy;
    data.scales = tensors.scale;
    data.zeros = tensors.zero;
    data.y = tensors.y;
    common.linear.counts = static_cast<QuantizeCounts*>(workspace);
    common.dscale = tensors.dscale;
    common.dzero = tensors.dzero;
    common.partials = bytes + partials;
    return common;
  };
  std::visit(
      [&](auto args) {
        args.common = with_addresses(selected.common, kCountsBytes);
        selected.clear.launch(selected.function, selected.grid, stream, args);
      },
      selected.args);
  for (const LsqStage& stage : selected.stages) {
    LsqTotalsArgs args = stage.args;
    args.common = with_addresses(stage.args.common, stage.partials);
    args.out = bytes + stage.out;
    selected.clear.launch(selected.totals, stage.grid, stream, args);
  }
}

}  // namespace halfbyte
