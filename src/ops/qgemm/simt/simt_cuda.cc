#include "ops/qgemm/simt/simt_cuda.h"

#include <algorithm>
#include <bit>
#include <span>

#include "core/arithmetic.h"
#include "core/format.h"
#include "cuda/config.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/simt/simt_args.h"
#include "ops/qgemm/weight/experts_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

// Of y, made by a block of qgemm_simt_tiles.
std::span<const QgemmTile> tiles_of(QgemmMath math) {
  static constexpr QgemmTile kTiles[] = {{16, 64}, {64, 64}, {128, 128}};
  return std::span(kTiles).first(math == QgemmMath::f64 ? 2 : 3);
}

// The first tile that has the extents asked for; null: there is none.
const QgemmTile* find_tile(const QgemmProblem& problem) {
  const auto tiles = tiles_of(problem.math);
  const auto found = std::ranges::find_if(tiles, [&](const QgemmTile& tile) {
    return (problem.tile.m == 0 || problem.tile.m == tile.m) &&
           (problem.tile.n == 0 || problem.tile.n == tile.n);
  });
  return found == tiles.end() ? nullptr : &*found;
}

std::string refuse(const QgemmProblem& problem) {
  if (find_tile(problem) == nullptr) {
    std::string known;
    for (const auto& [m, n] : tiles_of(problem.math))
      known += fmt::format("{}{} x {}", known.empty() ? "" : ", ", m, n);
    return fmt::format("tile must be one of {}, got {} x {}", known, problem.tile.m, problem.tile.n);
  }
  return "";
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
std::string scales_config(const QgemmProblem& problem, bool known) {
  const formats::ScaleType type = known ? problem.codec.scale_type : formats::ScaleType{};
  return fmt::format(
      "constexpr bool kScales = {}, kDoubleQuant = {};\nconstexpr ScaleType kScaleType = ScaleType({});\n",
      known, known && problem.double_quant, static_cast<int>(type));
}

cuda::KernelSpec rows_kernel(const QgemmProblem& problem) {
  const auto rows = std::bit_ceil(static_cast<uint64_t>(problem.m));
  // Asking costs 6 instructions for 8 columns of 4 rows of the weight, which take 190 with one row of x; of a
  // packed weight 390, and more of bit streams.
  const bool known = !problem.packed && formats::in_fragments(problem.codec.bits) && rows <= 2 &&
                     problem.math != QgemmMath::f64;
  return simt_kernel(
      "ops/qgemm/simt/simt_rows.cu", "qgemm_simt_rows", problem,
      weight_config(problem) + scales_config(problem, known) + fmt::format("constexpr int kM = {};\n", rows));
}
cuda::KernelSpec tiles_kernel(const QgemmProblem& problem, QgemmTile tile) {
  return simt_kernel(
      "ops/qgemm/simt/simt_tiles.cu", "qgemm_simt_tiles", problem,
      weight_config(problem) + scales_config(problem, false) +
          fmt::format("constexpr int kTileM = {}, kTileN = {};\nconstexpr bool kExperts = {};\n", tile.m,
                      tile.n, problem.experts.num > 0));
}
class QgemmSimt : public QgemmOneKernel<SimtArgs> {
 public:
  explicit QgemmSimt(const QgemmProblem& problem) : QgemmOneKernel(problem) {
    args_.weight = weight_args(problem);
    args_.m = problem.m;
    args_.in_cols = problem.in_cols();
    args_.out_cols = problem.out_cols();
    args_.splits = 1;
    args_.transposed = problem.transposed;
    args_.accumulate = problem.accumulate;
    if (problem.experts.num > 0) args_.experts = experts_args(problem);
    if (has_simt_rows(problem)) {
      load(rows_kernel(problem), {ceil_div(args_.out_cols, kSimtRows), kSimtThreads});
    } else {
      const QgemmTile tile = choose_tile();
      const cuda::Grid grid = place_tiles(tile);
      load(tiles_kernel(problem, tile), grid, args_.splits, {sum_type(), DType::f64});
    }
  }

  PrecisionGuarantee guarantee() const override {
    return {sum_type(), sum_type(), true, false, WeightRounding::none};
  }

 private:
  void place(SimtArgs& args, const QgemmTensors& tensors, void* workspace) const override {
    place_weight(args.weight, problem_, tensors);
    args.x = tensors.x;
    args.bias = problem_.bias ? tensors.bias : nullptr;
    args.y = tensors.y;
    args.partials = workspace;
    place_experts(args.experts, tensors);
  }

  DType sum_type() const { return problem_.math == QgemmMath::f64 ? DType::f64 : DType::f32; }

  int64_t num_tiles(QgemmTile tile) const {
    return tiles_of_rows(problem_, tile.m) * ceil_div(args_.out_cols, tile.n);
  }

  QgemmTile choose_tile() const {
    if (problem_.tile != QgemmTile{}) return *find_tile(problem_);
    const auto tiles = tiles_of(problem_.math);
    if (rows_of_weight(problem_) <= tiles[0].m) return tiles[0];
    return num_tiles(tiles.back()) >= context_.num_multiprocessors ? tiles.back() : tiles[1];
  }

  // A block a tile; where these are too few for the device, the summed axis is split.
  // `halfbyte bench qgemm --variant qgemm_simt --m 16,64,128` times what the constants choose.
  cuda::Grid place_tiles(QgemmTile tile) {
    constexpr int64_t kBlocksPerMultiprocessor = 2, kFewestSteps = 8;
    args_.tiles_m = tiles_of_rows(problem_, tile.m);
    args_.tiles_n = ceil_div(args_.out_cols, tile.n);
    const int64_t tiles = args_.tiles_m * args_.tiles_n;
    const int64_t steps = ceil_div(args_.in_cols, simt_step(tile.n));
    const int64_t wanted =
        kBlocksPerMultiprocessor * context_.num_multiprocessors / std::max<int64_t>(tiles, 1);
    const int64_t splits = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(steps / kFewestSteps, 1));
    args_.split_steps = ceil_div(steps, splits);
    args_.splits =
        static_cast<int>(std::max<int64_t>(ceil_div(steps, std::max<int64_t>(args_.split_steps, 1)), 1));
    return {tiles * args_.splits, kSimtThreads};
  }
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmSimt>(problem);
}

// ---- The rows of the table of kernels

using cuda::KernelValues;

std::string word_of(QgemmTile tile) { return fmt::format("{}x{}", tile.m, tile.n); }

// Tables, groups and zero points are arguments of these kernels.
std::vector<KernelKey> simt_keys() {
  std::vector<KernelKey> keys;
  for (const KernelKey& key : qgemm_keys())
    if (key.name == "format") keys.push_back(key);
  keys.push_back({"layout",
                  {"packed", "halfbyte", "bitsandbytes"},
                  false,
                  "Of the codes; halfbyte: compressed-tensors and mlx too."});
  keys.push_back({"dtype", {"bf16", "f16", "f32"}, false, "The dtype of x and y."});
  keys.push_back({"math", {"auto", "f64"}, false, "Products and sums are f32, or f64: of dtype f32."});
  return keys;
}

QgemmProblem simt_problem(const KernelValues& values) {
  QgemmProblem problem;
  problem.m = problem.n = problem.k = problem.group = kSimtChunk;
  problem.dtype = cuda::dtype_of(values);
  problem.math = parse_qgemm_math(values.at("math"));
  HALFBYTE_CHECK(problem.math == QgemmMath::automatic || problem.dtype == DType::f32, usage,
                 "math f64 goes with dtype f32, got {}", to_string(problem.dtype));
  const FormatInfo& info = find_format(values.at("format"));
  HALFBYTE_CHECK(info.kind == FormatKind::table || values.at("layout") != "bitsandbytes", usage,
                 "layout bitsandbytes holds table formats, got {}", info.name);
  problem.codec.kind = static_cast<formats::Kind>(info.kind);
  problem.codec.bits = static_cast<formats::u8>(info.bits);
  problem.packed = values.at("layout") == "packed";
  problem.view.high_first = values.at("layout") == "bitsandbytes";
  return problem;
}

cuda::KernelSpec specialise_rows(const KernelValues& values) {
  QgemmProblem problem = simt_problem(values);
  problem.m = number_of(values, "rows");
  problem.double_quant = cuda::is_set(values, "double-quant");
  problem.codec.scale_type = scale_type(parse_dtype(values.at("scale-dtype")));
  HALFBYTE_CHECK(!problem.double_quant || (problem.codec.scale_type == formats::ScaleType::f32 &&
                                           problem.codec.kind != formats::Kind::affine),
                 usage, "double-quant goes with f32 scales and without biases");
  HALFBYTE_CHECK(has_simt_rows(problem), usage, "rows {} do not go with math f64", problem.m);
  return rows_kernel(problem);
}

cuda::KernelSpec specialise_tiles(const KernelValues& values) {
  QgemmProblem problem = simt_problem(values);
  problem.experts.num = cuda::is_set(values, "experts") ? 1 : 0;
  HALFBYTE_CHECK(problem.experts.num == 0 || problem.packed, usage, "experts go with layout packed, got {}",
                 values.at("layout"));
  for (const QgemmTile& tile : tiles_of(problem.math))
    if (word_of(tile) == values.at("tile")) return tiles_kernel(problem, tile);
  HALFBYTE_FAIL(usage, "tile {} does not go with math f64", values.at("tile"));
}

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> rows = simt_keys(), tiles = rows;
  for (const KernelKey& key : qgemm_keys())
    if (key.name == "scale-dtype" || key.name == "double-quant") rows.push_back(key);
  rows.push_back(number_key("rows", {1, 2, 4, 8}, "Of x, rounded up."));
  tiles.push_back(
      {"tile", {"16x64", "64x64", "128x128"}, false, "Rows and columns of y that a block makes."});
  tiles.push_back(experts_key());
  return {{{"qgemm", "qgemm_simt_rows", "Forward, at most 8 rows of x, by CUDA cores.", std::move(rows)},
           specialise_rows},
          {{"qgemm", "qgemm_simt_tiles", "Both directions, any shape, by CUDA cores.", std::move(tiles)},
           specialise_tiles}};
}

}  // namespace

bool has_simt_rows(const QgemmProblem& problem) {
  const WeightArgs weight = weight_args(problem);
  constexpr int64_t kLongest = int64_t{1} << 29;  // of a row: offsets have 32 bits
  return problem.k % kSimtChunk == 0 && problem.k <= kLongest && problem.alignment >= 16 &&
         weight.whole_chunks && (problem.packed || weight.wide) && !problem.transposed &&
         problem.tile == QgemmTile{} && problem.experts.num == 0 &&
         problem.m <= (problem.math == QgemmMath::f64 ? 4 : 8);
}

const QgemmVariant kQgemmSimt = {{"qgemm_simt", DeviceKind::cuda, &refuse, &make}, &kernels, true, true};

}  // namespace halfbyte
