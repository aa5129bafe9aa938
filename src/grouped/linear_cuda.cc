#include "grouped/linear_cuda.h"

#include <algorithm>
#include <bit>
#include <variant>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "formats/counts.h"
#include "grouped/ranges_cuda.h"

namespace halfbyte {

// What a problem is done with, in order: all in one pass; or ranges and parameters, where they are computed,
// then codes.
struct LinearCuda {
  LinearProblem problem;
  const cuda::Context* context = nullptr;
  std::string name;  // of the last kernel
  cuda::CUfunction function = nullptr;
  cuda::Grid grid;
  cuda::CUfunction tensor_range = nullptr, ranges = nullptr, params = nullptr;
  cuda::Grid tensor_range_grid, ranges_grid, params_grid;
  int64_t workspace_bytes = 0;
  // The arguments, but for addresses and strides.
  LinearCommon common{};
  std::variant<LinearElementsArgs, LinearChunksArgs, LinearColumnsArgs, LinearFusedArgs, MaskGradientsArgs>
      args;
  RangesArgs tensor_range_args{}, ranges_args{};
  LinearParamsArgs params_args{};
};

namespace {

constexpr int kThreads = kLinearThreads;

// The kernel of a source linear_<name>.cu; fake quantization has it under a name of its own.
cuda::KernelSpec kernel_spec(const char* source, const char* name, const LinearTypes& types,
                             const std::string& lines) {
  return linear_kernel(source, fmt::format("{}_{}", types.fake ? "fake" : "linear", name), types, lines);
}
std::string op_config(LinearOp op) {
  return fmt::format("constexpr LinearOp kOp = LinearOp({});\n", static_cast<int>(op));
}
LinearStrides64 device_strides(const LinearStrides& strides) {
  return {strides.outer, strides.axis, strides.inner};
}

class Selection {
 public:
  Selection(const LinearProblem& problem, int64_t alignment) : problem_(problem) {
    made_.problem = problem;
    made_.context = &cuda::context(problem.device.index);
    types_ = types_of(problem);
    // Chunks lie together, at multiples of 16 bytes.
    whole_ = problem.contiguous && alignment >= 16 && problem.num_elements() > 0;
    set_common();
    made_.workspace_bytes = sizeof(QuantizeCounts);
    const cuda::Scope scope(*made_.context);
    if (problem.op == LinearOp::mask_gradients) {
      select_mask_gradients();
      return;
    }
    if (problem.computed_global_scale) select_tensor_range();
    if (problem.computed && select_fused()) return;
    if (problem.computed) select_ranges();
    if (!select_chunks() && !select_columns()) select_elements();
  }
  LinearCuda take() { return std::move(made_); }

 private:
  void set_common() {
    LinearCommon& common = made_.common;
    common.given = !problem_.computed;
    common.q_min = problem_.codec.q_min;
    common.q_max = problem_.codec.q_max;
    common.zero_cols = problem_.zeros.cols;
    common.zero_row_bytes = problem_.zeros.row_bytes;
    common.eps = problem_.codec.eps;
    common.history = problem_.history;
    common.scale_type = problem_.codec.scale_type;
    common.zero_type = types_.zero_type;
    common.rule = problem_.codec.rule;
    common.table = linear_table(problem_.codec.book);
    common.zero_sign = problem_.zeros.dtype == DType::i8 ? 128 : problem_.zeros.dtype == DType::i4 ? 8 : 0;
    switch (problem_.codes.dtype) {
      case DType::i8:
        common.code_min = -128;
        common.sign_bits = 0x80808080u;
        break;
      case DType::i4:
        common.code_min = -8;
        common.sign_bits = 0x88888888u;
        break;
      default:
        break;
    }
  }
  cuda::CUfunction load(const cuda::KernelSpec& spec) const { return cuda::get_kernel(*made_.context, spec); }
  template <class Args>
  void choose(const cuda::KernelSpec& spec, cuda::Grid grid, const Args& args) {
    made_.name = spec.function;
    made_.function = load(spec);
    made_.grid = grid;
    made_.args = args;
  }
  // Rows of packed codes, or of a mask, are whole bytes, so that they are one sequence.
  bool rows_are_whole() const {
    if (types_.mask) return problem_.mask.cols % 8 == 0;
    return !is_packed(problem_.codes.dtype) || problem_.codes.cols % 2 == 0;
  }
  int element_bytes() const { return static_cast<int>(size_of(problem_.dtype)); }
  bool packed_zeros() const { return problem_.has_zeros && is_packed(problem_.zeros.dtype); }

  // Groups of whole chunks along the last axis, not too long for a block.
  bool select_fused() {
    const LinearProblem& p = problem_;
    const auto along = p.as_rows();
    if (!along) return false;
    const auto [rows, axis, group] = *along;
    const int64_t chunk = linear_chunk(element_bytes(), LinearOp::quantize, types_.mask);
    if (!whole_ || !rows_are_whole() || packed_zeros() || axis % chunk != 0) return false;
    if (group % chunk != 0 && group < axis) return false;
    const int64_t group_chunks = ceil_div(group, chunk);
    constexpr int kSmall = 4, kLarge = 8;  // chunks a thread
    if (group_chunks > int64_t{kThreads} * kLarge) return false;
    const int64_t axis_chunks = axis / chunk, groups_per_row = ceil_div(axis_chunks, group_chunks);
    if (is_wide(rows * axis_chunks)) return false;
    LinearFusedArgs args{};
    args.axis = static_cast<int>(axis_chunks);
    args.group = static_cast<int>(group_chunks);
    args.num_groups = static_cast<int>(rows * groups_per_row);
    args.group_divides_axis = axis_chunks % group_chunks == 0;
    args.row_divider = formats::Divider::of(groups_per_row);
    if (group_chunks <= 32) {
      const int lanes = std::max(types_.byte_scales ? 1 : kLinearWarpBatch, args.group);
      args.team = static_cast<int>(std::bit_width(static_cast<unsigned>(lanes - 1)));
      const int64_t per_block = (kThreads >> args.team) * kLinearWarpBatch;
      choose(linear_fused_kernel(types_, p.op, 0), {ceil_div(args.num_groups, per_block), kThreads}, args);
    } else {
      const int batch = group_chunks <= kThreads * kSmall ? kSmall : kLarge;
      const auto threads = std::bit_ceil(static_cast<unsigned>(ceil_div(group_chunks, batch)));
      choose(linear_fused_kernel(types_, p.op, batch),
             {args.num_groups, std::max(32, static_cast<int>(threads))}, args);
    }
    return true;
  }

  void select_tensor_range() {
    const int64_t n = problem_.num_elements();
    const Grouping tensor =
        make_grouping("fake_quantize", {{&n, 1}, Granularity::tensor, -1, 0}, problem_.dtype);
    const RangesCuda range = halfbyte::select_ranges("linear_ranges", tensor, problem_.dtype, false, whole_);
    made_.tensor_range = load(range.spec);
    made_.tensor_range_grid = range.grid;
    made_.tensor_range_args = range.args;
    made_.workspace_bytes += static_cast<int64_t>(sizeof(RangeKeys));
  }

  void select_ranges() {
    const LinearProblem& p = problem_;
    const RangesCuda ranges = halfbyte::select_ranges("linear_ranges", p, p.dtype, false, whole_);
    made_.ranges = load(ranges.spec);
    made_.ranges_grid = ranges.grid;
    made_.ranges_args = ranges.args;
    made_.params = load(linear_params_kernel(types_, p.op));
    made_.params_args.num_scales = p.num_scales;
    const int64_t params =
        packed_zeros() && p.zeros.cols > 0 ? p.num_scales / p.zeros.cols * p.zeros.row_bytes : p.num_scales;
    // The first thread writes the global scale, that of an empty tensor too.
    made_.params_grid = {ceil_div(std::max<int64_t>(params, p.computed_global_scale ? 1 : 0), kThreads),
                         kThreads};
    made_.workspace_bytes += p.num_scales * static_cast<int64_t>(sizeof(RangeKeys));
  }

  bool select_chunks() {
    const LinearProblem& p = problem_;
    if (!whole_ || !rows_are_whole()) return false;
    LinearChunksArgs args{};
    const int64_t chunk = linear_chunk(element_bytes(), p.op, types_.mask);
    args.num_chunks = p.num_elements() / chunk;
    if (p.num_elements() % chunk != 0 || is_wide(args.num_chunks)) return false;
    const LinearStrides& scales = p.scale_strides;
    if (p.num_scales == 1) {
      args.per_outer = args.per_scale = args.num_chunks;
    } else if (scales.outer == 0) {  // channels
      if (p.inner % chunk != 0) return false;
      args.per_outer = p.axis * p.inner / chunk;
      args.per_scale = p.inner / chunk;
    } else {  // groups along the last axis
      if (p.inner != 1 || p.axis % chunk != 0 || (p.group_size % chunk != 0 && p.group_size < p.axis))
        return false;
      args.per_outer = p.axis / chunk;
      args.per_scale = ceil_div(p.group_size, chunk);
      args.scale_outer = scales.outer;
    }
    args.zero_outer = ceil_div(args.scale_outer, 2) * 2;  // packed codes: the last axis is the one of groups
    args.outer_divider = formats::Divider::of(args.per_outer);
    args.scale_divider = formats::Divider::of(args.per_scale);
    choose(linear_chunks_kernel(types_, p.op),
           {ceil_div(args.num_chunks, int64_t{kThreads} * linear_batch(p.op)), kThreads}, args);
    return true;
  }

  bool select_columns() {
    const LinearProblem& p = problem_;
    if (!whole_ || !rows_are_whole()) return false;
    LinearColumnsArgs args{};
    const auto side_by_side = p.as_columns();
    if (!side_by_side) return false;
    args.columns = side_by_side->columns;
    args.axis = side_by_side->axis;
    args.group = side_by_side->group;
    const int64_t chunk = linear_columns_chunk(element_bytes(), types_.mask);
    if (args.columns % chunk != 0) return false;
    args.bands_per_axis = ceil_div(args.axis, args.group);
    args.num_bands = p.num_elements() / (args.columns * args.axis) * args.bands_per_axis;
    args.pieces = ceil_div(args.group, kLinearRows);
    const int64_t items = args.num_bands * args.pieces * (args.columns / chunk);
    if (is_wide(items)) return false;
    choose(linear_columns_kernel(types_, p.op), {ceil_div(items, kThreads), kThreads}, args);
    return true;
  }

  void select_elements() {
    const LinearProblem& p = problem_;
    LinearElementsArgs args{};
    const bool packed = types_.mask || (is_packed(p.codes.dtype) && p.op != LinearOp::backward);
    const CodeStorage& codes = types_.mask ? p.mask : p.codes;
    args.code_cols = codes.cols;
    args.code_row_bytes = codes.row_bytes;
    const int64_t n = p.num_elements();
    args.num_items = packed && n > 0 ? n / codes.cols * codes.row_bytes : n;
    args.axis = p.axis;
    args.inner = p.inner;
    args.group = p.group_size;
    args.scale_strides = device_strides(p.scale_strides);
    choose(linear_elements_kernel(types_, p.op), {ceil_div(args.num_items, kThreads), kThreads}, args);
  }

  void select_mask_gradients() {
    const LinearProblem& p = problem_;
    MaskGradientsArgs args{};
    args.cols = p.mask.cols;
    args.row_bytes = p.mask.row_bytes;
    const int64_t n = p.num_elements(), chunk = 16 / element_bytes();
    const bool chunks = whole_ && p.mask.cols % 8 == 0;
    args.num_items = chunks ? n / chunk : n;
    const int64_t per_block = int64_t{kThreads} * (chunks ? kMaskBatch : 1);
    choose(mask_gradients_kernel(p.dtype, chunks, is_wide(args.num_items)),
           {ceil_div(args.num_items, per_block), kThreads}, args);
  }

  const LinearProblem& problem_;
  LinearCuda made_;
  LinearTypes types_;
  bool whole_;
};

}  // namespace

cuda::KernelSpec linear_kernel(const char* source, const std::string& name, const LinearTypes& types,
                               const std::string& lines) {
  const std::string config = fmt::format(
      "constexpr int kBits = {};\nconstexpr ZeroType kZeroType = ZeroType({});\nconstexpr bool kFake = {}, "
      "kMask = {}, kTable = {}, kByteScales = {};\nconstexpr ScaleType kByteScale = ScaleType({});\n",
      types.bits, static_cast<int>(types.zero_type), types.fake, types.mask, types.book.has_value(),
      types.byte_scales.has_value(), static_cast<int>(types.byte_scales.value_or(formats::ScaleType::e8m0)));
  const bool has_bins = types.book && types.bins && types.dtype != DType::f64;
  return {source, name,
          "#include \"grouped/linear_args.h\"\n" + fmt::format("#define HALFBYTE_KERNEL {}\n", name) +
              cuda::config_text(cuda::element_config(types.dtype) + config +
                                cuda::book_config(has_bins ? &*types.book : nullptr) + lines)};
}
LinearTypes types_of(const LinearProblem& problem) {
  LinearTypes types;
  types.dtype = problem.dtype;
  types.bits = problem.codec.bits;
  if (problem.has_zeros) {
    switch (problem.zeros.dtype) {
      case DType::i32:
        types.zero_type = ZeroType::i32;
        break;
      case DType::i8:
      case DType::u8:
        types.zero_type = ZeroType::byte;
        break;
      case DType::f32:
        types.zero_type = ZeroType::f32;
        break;
      case DType::f64:
        types.zero_type = ZeroType::f64;
        break;
      default:
        types.zero_type = ZeroType::nibble;
        break;
    }
  }
  // Codes play no part in gradients.
  if (problem.op == LinearOp::backward) types.bits = 8;
  types.mask = problem.has_mask && problem.op == LinearOp::fake_quantize;
  types.fake = problem.fake;
  if (problem.codec.kind == formats::Kind::table) types.book = problem.codec.book;
  if (formats::scale_bytes(problem.codec.scale_type) == 1) types.byte_scales = problem.codec.scale_type;
  return types;
}
LinearTable linear_table(const formats::CodeBook& book) {
  LinearTable table{};
  for (int rank = 0; rank < 16; ++rank) table.values[rank] = book.values[book.code_of_rank[rank]];
  for (int i = 0; i < 15; ++i) {
    table.edges_f32[i] = book.edges_f32[i];
    table.edges_f64[i] = book.edges_f64[i];
  }
  table.max_magnitude = book.max_magnitude;
  table.of_code_0 = book.values[0];
  return table;
}
cuda::KernelSpec linear_chunks_kernel(const LinearTypes& types, LinearOp op) {
  return kernel_spec("grouped/linear_chunks.cu", "chunks", types, op_config(op));
}
cuda::KernelSpec linear_columns_kernel(const LinearTypes& types, LinearOp op) {
  const bool any = types.fake && types.zero_type != ZeroType::none;
  return kernel_spec("grouped/linear_columns.cu", "columns", any ? types.any_zeros() : types, op_config(op));
}
cuda::KernelSpec linear_elements_kernel(const LinearTypes& types, LinearOp op) {
  const LinearTypes used = types.without_bins();
  return kernel_spec("grouped/linear_elements.cu", "elements", types.bits == 8 ? used.any_zeros() : used,
                     op_config(op));
}
cuda::KernelSpec linear_fused_kernel(const LinearTypes& types, LinearOp op, int block_batch) {
  return kernel_spec("grouped/linear_fused.cu", "fused", types,
                     op_config(op) + fmt::format("constexpr int kBlockBatch = {};\n", block_batch));
}
cuda::KernelSpec linear_params_kernel(const LinearTypes& types, LinearOp op) {
  LinearTypes used = types.without_bins();
  used.bits = 8;
  used.mask = false;
  return kernel_spec("grouped/linear_params.cu", "params", used, op_config(op));
}
cuda::KernelSpec mask_gradients_kernel(DType dtype, bool chunks, bool wide) {
  return {"grouped/mask_gradients.cu", "mask_gradients",
          cuda::config_text(cuda::element_config(dtype) +
                            fmt::format("constexpr bool kChunks = {}, kWide = {};\n", chunks, wide))};
}

std::shared_ptr<const LinearCuda> select_linear_cuda(const LinearProblem& problem, int64_t alignment) {
  return std::make_shared<const LinearCuda>(Selection(problem, alignment).take());
}
const std::string& kernel_name(const LinearCuda& cuda) { return cuda.name; }
int64_t workspace_bytes(const LinearCuda& cuda) { return cuda.workspace_bytes; }

void run_linear_cuda(const LinearCuda& selected, const LinearTensors& tensors, void* stream,
                     void* workspace) {
  const cuda::Scope scope(*selected.context);
  const LinearProblem& problem = selected.problem;
  auto* const counts = static_cast<QuantizeCounts*>(workspace);
  cuda::fill(workspace, 0, selected.workspace_bytes, stream);
  LinearCommon common = selected.common;
  common.data = {tensors.x, tensors.dy, tensors.codes, tensors.scale, tensors.zero, tensors.y, tensors.mask};
  common.observer = tensors.observer;
  if (problem.num_elements() == 0) common.observer.num_batches = nullptr;
  common.counts = counts;
  common.global_scale = tensors.global_scale;
  auto* ranges = reinterpret_cast<RangeKeys*>(counts + 1);
  if (selected.tensor_range) {
    RangesArgs range = selected.tensor_range_args;
    range.x = tensors.x;
    range.ranges = ranges;
    cuda::launch(selected.tensor_range, selected.tensor_range_grid, stream, range);
    common.tensor_range = ranges++;
  }
  if (selected.params) {
    RangesArgs range = selected.ranges_args;
    range.x = tensors.x;
    range.ranges = ranges;
    if (!problem.contiguous) range.groups.strides = device_strides(tensors.x_strides);
    cuda::launch(selected.ranges, selected.ranges_grid, stream, range);
    LinearParamsArgs params = selected.params_args;
    params.common = common;
    params.ranges = ranges;
    cuda::launch(selected.params, selected.params_grid, stream, params);
  }
  std::visit(
      [&](auto args) {
        if constexpr (std::is_same_v<decltype(args), MaskGradientsArgs>) {
          args.mask = static_cast<const uint8_t*>(tensors.mask);
          args.dy = tensors.dy;
          args.dx = tensors.y;
        } else {
          args.common = common;
        }
        if constexpr (std::is_same_v<decltype(args), LinearElementsArgs>) {
          args.x = device_strides(tensors.x_strides);
          args.dy = device_strides(tensors.dy_strides);
          args.codes = device_strides(tensors.code_strides);
          args.y = device_strides(tensors.y_strides);
        }
        cuda::launch(selected.function, selected.grid, stream, args);
      },
      selected.args);
}

}  // namespace halfbyte
