// Variant qgemm_cublas: slices of the weight are decoded into the workspace, and cuBLASLt multiplies them.
#include "ops/qgemm/cublas/cublas_cuda.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/config.h"
#include "cuda/matmul.h"
#include "ops/qgemm/cublas/cublas_args.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/weight_cuda.h"

namespace halfbyte {
namespace {

// `halfbyte bench qgemm --variant qgemm_cublas` times what these choose.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
constexpr int64_t kMatmulBytes = int64_t{4} << 20;  // of it, at most, for cuBLASLt
constexpr int64_t kFewestRows = 65;                 // of x: fewer do not pay for decoding
constexpr int64_t kSliceFeatures = 64;              // slices are multiples of it

// Of what a feature takes in a slice.
int64_t sum_bytes(const QgemmProblem& problem) { return problem.in_cols() * size_of(problem.dtype); }

std::string refuse(const QgemmProblem& problem) {
  const cuda::Context& context = cuda::context(problem.device.index);
  if (context.capability < 80)
    return fmt::format("the device must have compute capability 8.0, got {}.{}", context.capability / 10,
                       context.capability % 10);
  const std::string reason = refuse_qgemm_cublas(problem);
  return reason.empty() ? cuda::refuse_matmul(context) : reason;
}

cuda::KernelSpec kernel_of(const QgemmProblem& problem) {
  const std::string reason = refuse_qgemm_cublas(problem);
  HALFBYTE_CHECK(reason.empty(), usage, "qgemm_cublas: {}", reason);
  const formats::PackedLayout& weight = problem.weight;
  return {"ops/qgemm/cublas/cublas_decode.cu", "qgemm_cublas_decode",
          cuda::config_text(cuda::element_config(problem.dtype) + packed_config(problem) +
                            fmt::format("constexpr bool kWideGroups = {};\n",
                                        weight.groups == 1 || weight.group % formats::kUnitCols == 0 ||
                                            (weight.bits != 8 && weight.group % 32 == 0)))};
}

class QgemmCublas : public QgemmKernel {
 public:
  explicit QgemmCublas(const QgemmProblem& problem)
      : problem_(problem),
        context_(cuda::context(problem.device.index)),
        slices_(qgemm_cublas_slices(problem)) {
    const cuda::Scope scope(context_);
    slice_bytes_ = slices_.features * sum_bytes(problem);
    matmul_bytes_ = std::min(kMatmulBytes, kWorkspaceBytes - slice_bytes_);
    decode_ = cuda::get_kernel(context_, kernel_of(problem));
    args_.weight = weight_args(problem);
    args_.values = code_values_args(problem.codec, problem.dtype);
    products_.push_back(product_of(slice_features(0)));
    if (slice_features(slices_.count - 1) != slice_features(0))
      products_.push_back(product_of(slice_features(slices_.count - 1)));
  }

  std::string name() const override { return "qgemm_cublas_decode"; }
  std::string backend() const override { return "cuda " + context_.target; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false, WeightRounding::weight_rounded};
  }
  int64_t workspace_bytes() const override { return slice_bytes_ + matmul_bytes_; }

  void run(const QgemmTensors& tensors, void* stream, void* workspace) const override {
    const cuda::Scope scope(context_);
    QgemmCublasArgs args = args_;
    place_weight(args.weight, problem_, tensors);
    auto* const memory = static_cast<std::byte*>(workspace);
    const int64_t size = size_of(problem_.dtype);
    for (int64_t slice = 0; slice < slices_.count; ++slice) {
      const int64_t first = slice * slices_.features;
      args.to = memory;
      decode(args, slice, stream);
      const auto at = [&](const void* y) { return static_cast<const std::byte*>(y) + first * size; };
      const cuda::Matmul& product = slice == slices_.count - 1 ? products_.back() : products_.front();
      product.run(tensors.x, args.to, problem_.bias ? at(tensors.bias) : nullptr,
                  const_cast<std::byte*>(at(tensors.y)), memory + slice_bytes_, stream);
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
    launch_qgemm(context_.capability >= 90 && problem_.early_start, decode_, grid, stream, args);
  }

  QgemmProblem problem_;
  const cuda::Context& context_;
  QgemmSlices slices_;
  int64_t slice_bytes_ = 0, matmul_bytes_ = 0;
  cuda::CUfunction decode_ = nullptr;
  QgemmCublasArgs args_{};              // the weight, but for addresses
  std::vector<cuda::Matmul> products_;  // of a slice, and of the last where it is shorter
};

std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmCublas>(problem);
}

// ---- The rows of the table of kernels

std::vector<cuda::Kernel> kernels() {
  std::vector<KernelKey> keys = qgemm_keys();
  for (KernelKey& key : keys) {
    if (key.name == "dtype") key.values = {"bf16", "f16"};
    if (key.name == "group-size") key.values = {"64", "32", "48"};
  }
  return {{{"qgemm", "qgemm_cublas_decode", "A slice of a packed weight as a dense matrix.", std::move(keys)},
           [](const cuda::KernelValues& values) {
             QgemmProblem problem = qgemm_problem(values);
             problem.m = 128;
             return kernel_of(problem);
           }}};
}

}  // namespace

std::string refuse_qgemm_cublas(const QgemmProblem& problem) {
  if (!problem.packed) return "the weight must be packed";
  if (problem.tile != QgemmTile()) return "tile is for qgemm_simt";
  if (problem.dtype == DType::f32) return "dtype must be bf16 or f16, got f32";
  if (problem.codec.scale_type == formats::ScaleType::e4m3)
    return "there must be no global scale: weights would be rounded with it";
  if (std::string reason = refuse_range(problem); !reason.empty()) return reason;
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
  if (sum_bytes(problem) * kSliceFeatures > kWorkspaceBytes)
    return fmt::format("{} must be at most {}, got {}", problem.transposed ? "n" : "k",
                       kWorkspaceBytes / kSliceFeatures / size_of(problem.dtype), problem.in_cols());
  if (problem.accumulate) return "y must not be added to: cuBLASLt rounds the product before it adds";
  return "";
}

// As few as fit, of nearly the same size. Two buffers, one of which is decoded to while the other is
// multiplied, were slower on an H200: kernels fill the device, so that the slices, half as large, only cost
// more.
QgemmSlices qgemm_cublas_slices(const QgemmProblem& problem) {
  const int64_t features = problem.out_cols(),
                most = kWorkspaceBytes / sum_bytes(problem) / kSliceFeatures * kSliceFeatures;
  const int64_t slice = formats::round_up(ceil_div(features, ceil_div(features, most)), kSliceFeatures);
  return {slice, ceil_div(features, slice)};
}

const QgemmVariant kQgemmCublas = {{"qgemm_cublas", DeviceKind::cuda, &refuse, &make}, &kernels};

}  // namespace halfbyte
