// The kernels of variant qgemm_simt, listed.
#include "core/format.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/simt/simt_args.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

std::string word_of(QgemmTile tile) { return fmt::format("{}x{}", tile.m, tile.n); }

// Tables, groups and zero points are arguments of these kernels.
std::vector<KernelKey> simt_keys(bool weight) {
  std::vector<KernelKey> keys;
  if (weight) {
    for (const KernelKey& key : qgemm_keys())
      if (key.name == "format") keys.push_back(key);
    keys.push_back({"layout",
                    {"packed", "halfbyte", "bitsandbytes"},
                    false,
                    "Of the codes; halfbyte: compressed-tensors and mlx too."});
  }
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
  const auto format = values.find("format");
  if (format == values.end()) return problem;
  HALFBYTE_CHECK(
      find_format(format->second).kind == FormatKind::table || values.at("layout") != "bitsandbytes", usage,
      "layout bitsandbytes holds table formats, got {}", format->second);
  const FormatInfo& info = find_format(format->second);
  problem.codec.kind = static_cast<formats::Kind>(info.kind);
  problem.codec.bits = static_cast<formats::u8>(info.bits);
  problem.packed = values.at("layout") == "packed";
  problem.view.high_first = values.at("layout") == "bitsandbytes";
  return problem;
}

cuda::KernelSpec specialise_rows(const KernelValues& values) {
  QgemmProblem problem = simt_problem(values);
  problem.m = values.at("rows")[0] - '0';
  problem.double_quant = cuda::is_set(values, "double-quant");
  problem.codec.scale_type = scale_type(parse_dtype(values.at("scale-dtype")));
  HALFBYTE_CHECK(!problem.double_quant || (problem.codec.scale_type == formats::ScaleType::f32 &&
                                           problem.codec.kind != formats::Kind::affine),
                 usage, "double-quant goes with f32 scales and without biases");
  HALFBYTE_CHECK(has_simt_rows(problem), usage, "rows {} do not go with math f64", problem.m);
  return simt_rows_kernel(problem);
}

cuda::KernelSpec specialise_tiles(const KernelValues& values) {
  const QgemmProblem problem = simt_problem(values);
  for (const QgemmTile& tile : simt_tiles(problem.math))
    if (word_of(tile) == values.at("tile")) return simt_tiles_kernel(problem, tile);
  HALFBYTE_FAIL(usage, "tile {} does not go with math f64", values.at("tile"));
}

}  // namespace

std::vector<cuda::Kernel> qgemm_simt_kernels() {
  std::vector<KernelKey> rows = simt_keys(true), tiles = rows;
  for (const KernelKey& key : qgemm_keys())
    if (key.name == "scale-dtype" || key.name == "double-quant") rows.push_back(key);
  rows.push_back({"rows", {"1", "2", "4", "8"}, false, "Of x, rounded up."});
  tiles.push_back(
      {"tile", {"16x64", "64x64", "128x128"}, false, "Rows and columns of y that a block makes."});
  return {{{"qgemm", "qgemm_simt_rows", "Forward, at most 8 rows of x, by CUDA cores.", std::move(rows)},
           specialise_rows},
          {{"qgemm", "qgemm_simt_tiles", "Both directions, any shape, by CUDA cores.", std::move(tiles)},
           specialise_tiles},
          {{"qgemm", "qgemm_simt_sum", "Adds up what blocks of qgemm_simt_tiles left.", simt_keys(false)},
           [](const KernelValues& values) { return simt_sum_kernel(simt_problem(values)); }}};
}

}  // namespace halfbyte
