// Variant qgemm_cublas: slices of the weight are decoded into the workspace, and cuBLASLt multiplies them.
#include <algorithm>

#include "cuda/config.h"
#include "cuda/launch.h"
#include "cuda/matmul.h"
#include "ops/qgemm/qgemm_cublas_args.h"
#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
constexpr int64_t kMatmulBytes = int64_t{4} << 20;  // of it, at most, for cuBLASLt
constexpr int64_t kFewestRows = 65;                 // of x: fewer do not pay for decoding
// What cuBLASLt makes at a time, as far as it matters to the choice of slices, which are multiples of it.
constexpr int64_t kTileFeatures = 128, kTileTokens = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of what a feature takes in a slice.
int64_t sum_bytes(const QgemmProblem& problem) { return problem.in_cols() * size_of(problem.dtype); }

std::string refuse_problem(const QgemmProblem& problem) {
  if (!problem.packed) return "the weight must be packed";
  if (problem.tile != QgemmTile()) return "tile is for qgemm_simt";
  if (problem.dtype == DType::f32) return "dtype must be bf16 or f16, got f32";
  if (problem.m < kFewestRows) return fmt::format("m must be at least {}, got {}", kFewestRows, problem.m);
  if (problem.weight.groups > 1 && problem.weight.group % 8 != 0)
    return fmt::format("the group size must be a multiple of 8, got {}", problem.weight.group);
  if (problem.n % 8 != 0 || problem.k % 8 != 0 || problem.alignment < 16)
    return fmt::format("n and k must be multiples of 8 and the alignment at least 16, got {}, {} and {}",
                       problem.n, problem.k, problem.alignment);
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (problem.m > kMost || problem.n > kMost || problem.k > kMost)
    return fmt::format("m, n and k must be at most {}, got {}, {} and {}", kMost, problem.m, problem.n,
                       problem.k);
  if (sum_bytes(problem) * kTileFeatures > kWorkspaceBytes)
    return fmt::format("{} must be at most {}, got {}", problem.transposed ? "n" : "k",
                       kWorkspaceBytes / kTileFeatures / size_of(problem.dtype), problem.in_cols());
  return "";
}
std::string refuse(const QgemmProblem& problem) {
  const cuda::Context& context = cuda::context(problem.device.index);
  if (context.capability < 80)
    return fmt::format("the device must have compute capability 8.0, got {}.{}", context.capability / 10,
                       context.capability % 10);
  const std::string reason = refuse_problem(problem);
  return reason.empty() ? cuda::refuse_matmul(context) : reason;
}

class QgemmCublas : public QgemmKernel {
 public:
  explicit QgemmCublas(const QgemmProblem& problem)
      : problem_(problem),
        context_(cuda::context(problem.device.index)),
        slices_(qgemm_cublas_slices(problem, context_.num_multiprocessors)) {
    const cuda::Scope scope(context_);
    matmul_bytes_ = std::min(kMatmulBytes, kWorkspaceBytes - slices_.buffers * slices_.buffer_bytes);
    decode_ = cuda::get_kernel(context_, qgemm_cublas_decode_kernel(problem));
    args_.weight = simt_weight(problem);
    products_.push_back(product_of(slice_features(0)));
    if (slice_features(slices_.count - 1) != slice_features(0))
      products_.push_back(product_of(slice_features(slices_.count - 1)));
  }

  std::string name() const override { return "qgemm_cublas_decode"; }
  std::string backend() const override { return "cuda " + context_.target; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::weight_rounded};
  }
  int64_t workspace_bytes() const override { return slices_.buffers * slices_.buffer_bytes + matmul_bytes_; }

  // A slice may be decoded while the product of the one before it ends: they have other buffers. The product
  // before that, which read the same buffer, has ended: see the end of the kernel.
  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    QgemmCublasArgs args = args_;
    place_simt_weight(args.weight, problem_, tensors);
    auto* const memory = static_cast<std::byte*>(workspace);
    const int64_t size = size_of(problem_.dtype);
    for (int64_t slice = 0; slice < slices_.count; ++slice) {
      const int64_t first = slice * slices_.features;
      args.to = memory + slice % slices_.buffers * slices_.buffer_bytes;
      args.waits = slice == 0 || slices_.buffers == 1;
      decode(args, slice, stream);
      const auto at = [&](const void* y) { return static_cast<const std::byte*>(y) + first * size; };
      const cuda::Matmul& product = slice == slices_.count - 1 ? products_.back() : products_.front();
      product.run(tensors.x, args.to, problem_.bias ? at(tensors.bias) : nullptr,
                  const_cast<std::byte*>(at(tensors.y)), memory + slices_.buffers * slices_.buffer_bytes,
                  stream);
    }
  }

 private:
  int64_t slice_features(int64_t slice) const {
    return std::min(slices_.features, problem_.out_cols() - slice * slices_.features);
  }

  int64_t weight_stride() const { return problem_.transposed ? slices_.features : problem_.k; }

  cuda::Matmul product_of(int64_t features) const {
    const QgemmProblem& p = problem_;
    return {context_,
            {.dtype = p.dtype,
             .m = p.m,
             .n = features,
             .k = p.in_cols(),
             .by_rows = p.transposed,
             .x_stride = p.in_cols(),
             .w_stride = weight_stride(),
             .y_stride = p.out_cols(),
             .bias = p.bias,
             .accumulate = p.accumulate,
             .alignment = p.alignment},
            matmul_bytes_};
  }

  void decode(QgemmCublasArgs& args, int64_t slice, void* stream) const {
    const int64_t first = slice * slices_.features, end = first + slice_features(slice);
    const bool by_rows = problem_.transposed;
    const auto narrow = [](int64_t x) { return static_cast<formats::u32>(x); };
    args.row = narrow(by_rows ? 0 : first);
    args.end_row = narrow(by_rows ? problem_.n : end);
    args.col = narrow(by_rows ? first : 0);
    args.end_col = narrow(by_rows ? end : problem_.k);
    args.stride = narrow(weight_stride());
    const int64_t blocks = ceil_div(args.end_col - args.col, kQgemmCublasUnits * formats::kUnitCols);
    args.blocks_per_strip = formats::Divider::of(blocks);
    const cuda::Grid grid = {ceil_div(args.end_row - args.row, formats::kUnitRows) * blocks,
                             kQgemmCublasThreads};
    if (context_.capability >= 90 && (slice > 0 || problem_.early_start))
      cuda::launch_early(decode_, grid, stream, args);
    else
      cuda::launch(decode_, grid, stream, args);
  }

  QgemmProblem problem_;
  const cuda::Context& context_;
  QgemmSlices slices_;
  int64_t matmul_bytes_ = 0;
  cuda::CUfunction decode_ = nullptr;
  QgemmCublasArgs args_{};              // the weight, but for addresses
  std::vector<cuda::Matmul> products_;  // of a slice, and of the last where it is shorter
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmCublas>(problem);
}

}  // namespace

// The products run in waves of a tile a multiprocessor, and each slice takes a while beside, less where it
// can be decoded while the product before it ends: so many columns of the sum, that all multiprocessors have
// time for meanwhile.
QgemmSlices qgemm_cublas_slices(const QgemmProblem& problem, int num_multiprocessors) {
  constexpr int64_t kAlone = 800, kOverlapped = 400;
  const int64_t features = problem.out_cols(), tokens = ceil_div(problem.m, kTileTokens);
  const auto waves = [&](int64_t slice) {
    return ceil_div(ceil_div(slice, kTileFeatures) * tokens, num_multiprocessors);
  };
  QgemmSlices best;
  int64_t best_cost = 0;
  for (const int buffers : {2, 1}) {
    const int64_t most = kWorkspaceBytes / buffers / sum_bytes(problem) / kTileFeatures * kTileFeatures;
    for (int64_t slice = std::min<int64_t>(most, formats::round_up(features, kTileFeatures)); slice > 0;
         slice -= kTileFeatures) {
      const int64_t count = ceil_div(features, slice), last = features - (count - 1) * slice;
      const int64_t cost = ((count - 1) * waves(slice) + waves(last)) * problem.in_cols() +
                           count * (buffers == 1 ? kAlone : kOverlapped);
      if (best.count > 0 && cost >= best_cost) continue;
      best = {slice, count, buffers, slice * sum_bytes(problem)};
      best_cost = cost;
    }
  }
  if (best.count == 1) best.buffers = 1;
  return best;
}

cuda::KernelSpec qgemm_cublas_decode_kernel(const QgemmProblem& problem) {
  const std::string reason = refuse_problem(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_cublas: {}", reason);
  const formats::PackedLayout& weight = problem.weight;
  return {"ops/qgemm/qgemm_cublas_decode.cu", "qgemm_cublas_decode",
          cuda::config_text(cuda::element_config(problem.dtype) + cuda::codec_config(problem.codec) +
                            fmt::format("constexpr bool kDoubleQuant = {}, kWideGroups = {};\n",
                                        problem.double_quant,
                                        weight.groups == 1 || weight.group % formats::kUnitCols == 0 ||
                                            (weight.bits == 4 && weight.group % 32 == 0)))};
}

const QgemmVariant kQgemmCublas = {"qgemm_cublas", DeviceKind::cuda, &refuse, &make};

}  // namespace halfbyte
