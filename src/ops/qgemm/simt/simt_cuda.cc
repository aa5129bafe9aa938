#include <algorithm>
#include <bit>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/launch.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/simt/simt_args.h"

namespace halfbyte {
namespace {

using formats::Divider;

// The first tile that has the extents asked for; null: there is none.
const QgemmTile* find_tile(const QgemmProblem& problem) {
  const auto tiles = simt_tiles(problem.math);
  const auto found = std::ranges::find_if(tiles, [&](const QgemmTile& tile) {
    return (problem.tile.m == 0 || problem.tile.m == tile.m) &&
           (problem.tile.n == 0 || problem.tile.n == tile.n);
  });
  return found == tiles.end() ? nullptr : &*found;
}

std::string refuse(const QgemmProblem& problem) {
  if (find_tile(problem) == nullptr) {
    std::string known;
    for (const auto& [m, n] : simt_tiles(problem.math))
      known += fmt::format("{}{} x {}", known.empty() ? "" : ", ", m, n);
    return fmt::format("tile must be one of {}, got {} x {}", known, problem.tile.m, problem.tile.n);
  }
  return "";
}

class QgemmSimt : public QgemmKernel {
 public:
  explicit QgemmSimt(const QgemmProblem& problem)
      : problem_(problem), context_(cuda::context(problem.device.index)) {
    const cuda::Scope scope(context_);
    args_.weight = simt_weight(problem);
    args_.m = problem.m;
    args_.in_cols = problem.in_cols();
    args_.out_cols = problem.out_cols();
    args_.splits = 1;
    args_.transposed = problem.transposed;
    args_.accumulate = problem.accumulate;
    cuda::KernelSpec spec;
    if (has_simt_rows(problem)) {
      spec = simt_rows_kernel(problem);
      grid_ = {ceil_div(args_.out_cols, kSimtRows), kSimtThreads};
    } else {
      const QgemmTile tile = choose_tile();
      spec = simt_tiles_kernel(problem, tile);
      place_tiles(tile);
    }
    name_ = spec.function;
    function_ = cuda::get_kernel(context_, spec);
    if (args_.splits > 1) sum_ = cuda::get_kernel(context_, simt_sum_kernel(problem));
  }

  std::string name() const override { return name_; }
  std::string backend() const override { return "cuda " + context_.target; }
  PrecisionGuarantee guarantee() const override {
    const DType type = problem_.math == QgemmMath::f64 ? DType::f64 : DType::f32;
    return {type, type, true, false, WeightRounding::none};
  }
  int64_t workspace_bytes() const override {
    const int64_t size = problem_.math == QgemmMath::f64 ? 8 : 4;
    return args_.splits == 1 ? 0 : args_.splits * args_.m * args_.out_cols * size;
  }

  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    SimtArgs args = args_;
    place_simt_weight(args.weight, problem_, tensors);
    args.x = tensors.x;
    args.bias = problem_.bias ? tensors.bias : nullptr;
    args.y = tensors.y;
    args.partials = workspace;
    launch(function_, grid_, stream, args);
    if (sum_ != nullptr)
      launch(sum_, {ceil_div(args.m * args.out_cols, kSimtThreads), kSimtThreads}, stream, args);
  }

 private:
  void launch(cuda::CUfunction function, cuda::Grid grid, void* stream, const SimtArgs& args) const {
    if (problem_.early_start && context_.capability >= 90)
      cuda::launch_early(function, grid, stream, args);
    else
      cuda::launch(function, grid, stream, args);
  }

  int64_t num_tiles(QgemmTile tile) const {
    return ceil_div(args_.m, tile.m) * ceil_div(args_.out_cols, tile.n);
  }

  QgemmTile choose_tile() const {
    if (problem_.tile != QgemmTile{}) return *find_tile(problem_);
    const auto tiles = simt_tiles(problem_.math);
    if (args_.m <= tiles[0].m) return tiles[0];
    return num_tiles(tiles.back()) >= context_.num_multiprocessors ? tiles.back() : tiles[1];
  }

  // A block a tile; where these are too few for the device, the summed axis is split.
  void place_tiles(QgemmTile tile) {
    constexpr int64_t kBlocksPerMultiprocessor = 2, kFewestSteps = 8;
    args_.tiles_m = ceil_div(args_.m, tile.m);
    args_.tiles_n = ceil_div(args_.out_cols, tile.n);
    const int64_t tiles = args_.tiles_m * args_.tiles_n;
    const int64_t steps = ceil_div(args_.in_cols, simt_step(tile.n));
    const int64_t wanted =
        kBlocksPerMultiprocessor * context_.num_multiprocessors / std::max<int64_t>(tiles, 1);
    const int64_t splits = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(steps / kFewestSteps, 1));
    args_.split_steps = ceil_div(steps, splits);
    args_.splits =
        static_cast<int>(std::max<int64_t>(ceil_div(steps, std::max<int64_t>(args_.split_steps, 1)), 1));
    grid_ = {tiles * args_.splits, kSimtThreads};
  }

  QgemmProblem problem_;
  const cuda::Context& context_;
  std::string name_;
  cuda::CUfunction function_ = nullptr, sum_ = nullptr;
  cuda::Grid grid_;
  SimtArgs args_{};  // but for addresses
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSimt>(problem);
}

// Tables, zero points and the types of scales are arguments: few kernels serve all formats.
cuda::KernelSpec simt_kernel(const char* source, const char* function, const QgemmProblem& problem,
                             const std::string& lines) {
  return {
      source, function,
      cuda::config_text(cuda::element_config(problem.dtype) +
                        fmt::format("constexpr bool kF64 = {};\n", problem.math == QgemmMath::f64) + lines)};
}
std::string weight_config(const QgemmProblem& problem) {
  return fmt::format(
      "constexpr Kind kKind = Kind({});\nconstexpr int kBits = {};\nconstexpr bool kPacked = {}, kHighFirst "
      "= {};\n",
      static_cast<int>(problem.codec.kind), problem.codec.bits, problem.packed,
      !problem.packed && problem.view.high_first);
}

// Whether the kernel knows how scales are stored.
std::string scales_config(bool known, formats::ScaleType type, bool double_quant) {
  return fmt::format(
      "constexpr bool kScales = {}, kDoubleQuant = {};\nconstexpr ScaleType kScaleType = ScaleType({});\n",
      known, double_quant, static_cast<int>(type));
}

}  // namespace

SimtWeight simt_weight(const QgemmProblem& p) {
  SimtWeight w{};
  const formats::PackedLayout& layout = p.weight;
  const formats::WeightViewLayout& view = p.view;
  const bool one_group = !p.packed && view.one_group;
  w.n = p.n;
  w.k = p.k;
  // Rows of whole groups have groups of their own.
  w.flat = !p.packed && view.flat && p.k % p.group != 0;
  w.group = one_group ? std::max<int64_t>(p.k, 1) : p.group;
  w.groups = one_group ? 0 : ceil_div(p.k, w.group);
  w.whole_chunks = !w.flat && (w.group >= p.k || w.group % kSimtChunk == 0);
  w.group_chunks = Divider::of(ceil_div(w.group, kSimtChunk));
  w.scale_type = static_cast<formats::u8>(p.codec.scale_type);
  w.zero = -p.codec.q_min;
  std::ranges::copy(p.codec.book.values, w.values);
  if (p.packed) {
    w.strip_bytes = layout.strip_bytes;
    w.block_bytes = layout.block_bytes;
    w.block_shift = std::countr_zero(static_cast<unsigned>(layout.block_cols));
    const int64_t groups_per_block = layout.inlined ? layout.block_cols / layout.group : 1;
    w.group_shift = std::countr_zero(static_cast<uint64_t>(groups_per_block));
    const auto place = [&](int64_t section, int bytes_before, int size) -> SimtPackedParameter {
      if (layout.inlined)
        return {layout.block_code_bytes + groups_per_block * bytes_before * formats::kUnitRows,
                layout.strip_bytes, layout.block_bytes};
      const int64_t group_bytes = int64_t{formats::kUnitRows} * size;
      return {section, layout.groups * group_bytes, group_bytes};
    };
    w.scale = place(layout.scales, 0, layout.scale_bytes);
    if (layout.has_zeros) w.other = place(layout.zeros, layout.scale_bytes, 1);
    if (layout.has_biases) w.other = place(layout.biases, layout.scale_bytes, layout.bias_bytes);
    return w;
  }
  w.row_codes = view.flat_codes ? p.k : view.row_bytes * 8 / view.bits;
  w.num_bytes = view.code_bytes();
  w.wide = p.alignment >= 4 && w.row_codes * view.bits % 32 == 0;
  w.zero_words = view.zero_words;
  return w;
}

void place_simt_weight(SimtWeight& w, const QgemmProblem& problem, const QgemmTensors& tensors) {
  const bool packed = problem.packed;
  w.codes = static_cast<const formats::u8*>(packed ? tensors.weight : tensors.codes);
  w.scales = packed ? tensors.weight : tensors.scales;
  if (problem.codec.asymmetric) w.zeros = packed ? tensors.weight : tensors.zeros;
  w.biases = packed ? tensors.weight : tensors.biases;
  if (!problem.double_quant) return;
  const auto section = [&](int64_t offset) {
    return reinterpret_cast<const float*>(static_cast<const char*>(tensors.weight) + offset);
  };
  w.absmax = packed ? section(problem.weight.absmax) : tensors.absmax;
  w.map = packed ? section(problem.weight.map) : tensors.map;
  w.offset = packed ? section(problem.weight.offset) : tensors.offset;
}

std::span<const QgemmTile> simt_tiles(QgemmMath math) {
  static constexpr QgemmTile kTiles[] = {{16, 64}, {64, 64}, {128, 128}};
  return std::span(kTiles).first(math == QgemmMath::f64 ? 2 : 3);
}

bool has_simt_rows(const QgemmProblem& problem) {
  const SimtWeight weight = simt_weight(problem);
  constexpr int64_t kLongest = int64_t{1} << 29;  // of a row: offsets have 32 bits
  return problem.k % kSimtChunk == 0 && problem.k <= kLongest && problem.alignment >= 16 &&
         weight.whole_chunks && !problem.transposed && problem.tile == QgemmTile{} &&
         problem.m <= (problem.math == QgemmMath::f64 ? 4 : 8);
}

cuda::KernelSpec simt_rows_kernel(const QgemmProblem& problem) {
  const auto rows = std::bit_ceil(static_cast<uint64_t>(problem.m));
  const std::string scales = scales_config(true, problem.codec.scale_type, problem.double_quant);
  return simt_kernel("ops/qgemm/simt/simt_rows.cu", "qgemm_simt_rows", problem,
                     weight_config(problem) + scales + fmt::format("constexpr int kM = {};\n", rows));
}
cuda::KernelSpec simt_tiles_kernel(const QgemmProblem& problem, QgemmTile tile) {
  return simt_kernel("ops/qgemm/simt/simt_tiles.cu", "qgemm_simt_tiles", problem,
                     weight_config(problem) + scales_config(false, {}, false) +
                         fmt::format("constexpr int kTileM = {}, kTileN = {};\n", tile.m, tile.n));
}
cuda::KernelSpec simt_sum_kernel(const QgemmProblem& problem) {
  return simt_kernel("ops/qgemm/simt/simt_sum.cu", "qgemm_simt_sum", problem, "");
}

const QgemmVariant kQgemmSimt = {"qgemm_simt", DeviceKind::cuda, &refuse, &make};

}  // namespace halfbyte
