#include "cuda/matmul.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/checks.h"

namespace halfbyte::cuda {
namespace {

struct Handle {
  cublasLtHandle handle = nullptr;
  std::string problem;  // why there is none
};

// One per device, never destroyed: see find_driver. Threads share it.
const Handle& handle_of(const Context& context) {
  static auto& mutex = *new std::mutex;
  static auto& handles = *new std::map<int, Handle>;
  const std::scoped_lock lock(mutex);
  const auto [place, is_new] = handles.try_emplace(context.index);
  Handle& made = place->second;
  if (!is_new) return made;
  const CublasLt& lt = find_cublas_lt();
  made.problem = lt.problem;
  if (!made.problem.empty()) return made;
  const Scope scope(context);
  if (const int status = lt.cublasLtCreate(&made.handle); status != 0)
    made.problem = fmt::format("cublasLtCreate of {}: status {}", lt.path, status);
  return made;
}

std::shared_ptr<cublasLtMatrixLayoutOpaque_t> make_layout(DType dtype, int64_t rows, int64_t cols,
                                                          int64_t stride) {
  const CublasLt& lt = find_cublas_lt();
  cublasLtMatrixLayout layout = nullptr;
  check_cublas(lt.cublasLtMatrixLayoutCreate(&layout, cublas_type(dtype), static_cast<uint64_t>(rows),
                                             static_cast<uint64_t>(cols), stride),
               "cublasLtMatrixLayoutCreate");
  return {layout, lt.cublasLtMatrixLayoutDestroy};
}

}  // namespace

std::string refuse_matmul(const Context& context) { return handle_of(context).problem; }

// By columns, as cuBLASLt sees matrices, all are their transposes: y^T = w x^T or w^T x^T, w the first
// operand.
Matmul::Matmul(const Context& context, const MatmulShape& shape, int64_t workspace_bytes)
    : shape_(shape),
      handle_(handle_of(context).handle),
      w_(shape.by_rows ? make_layout(shape.dtype, shape.n, shape.k, shape.w_stride)
                       : make_layout(shape.dtype, shape.k, shape.n, shape.w_stride)),
      x_(make_layout(shape.dtype, shape.k, shape.m, shape.x_stride)),
      y_(make_layout(shape.dtype, shape.n, shape.m, shape.y_stride)) {
  const CublasLt& lt = find_cublas_lt();
  cublasLtMatmulPreference made = nullptr;
  check_cublas(lt.cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, int (*)(cublasLtMatmulPreference)> preference(
      made, lt.cublasLtMatmulPreferenceDestroy);
  const auto prefer = [&](int attribute, auto value) {
    check_cublas(lt.cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  // CUBLASLT_MATMUL_PREF_. Where sums are split, their parts are f32 and added in order, not as they come
  // (INPLACE), nor rounded before (OUTPUT_TYPE).
  constexpr int kMaxWorkspaceBytes = 1, kReductionSchemeMask = 3, kMinAlignmentBytes[] = {5, 6, 7, 8};
  constexpr uint32_t kComputeType = 2, kWeightAlignment = 256;
  const auto alignment = static_cast<uint32_t>(std::min<int64_t>(shape.alignment, 256));
  prefer(kMaxWorkspaceBytes, static_cast<uint64_t>(workspace_bytes));
  prefer(kReductionSchemeMask, kComputeType);
  for (const int attribute : kMinAlignmentBytes)
    prefer(attribute, attribute == kMinAlignmentBytes[0] ? kWeightAlignment : alignment);

  // The address of the bias says how it is aligned.
  const Description description =
      describe(reinterpret_cast<const void*>(uintptr_t{alignment}));  // NOLINT(performance-no-int-to-ptr)
  cublasLtMatmulHeuristicResult result{};
  int num_results = 0;
  const int status =
      lt.cublasLtMatmulAlgoGetHeuristic(handle_, description.get(), w_.get(), x_.get(), y_.get(), y_.get(),
                                        preference.get(), 1, &result, &num_results);
  HALFBYTE_CHECK(status == 0 && num_results > 0 && result.state == 0, device,
                 "cublasLtMatmulAlgoGetHeuristic: no algorithm for {} x {} x {}{} in {} bytes: status {}",
                 shape.m, shape.n, shape.k, shape.by_rows ? " by rows" : "", workspace_bytes, status);
  algorithm_ = result.algo;
  workspace_bytes_ = result.workspaceSize;
}

Matmul::Description Matmul::describe(const void* bias) const {
  constexpr int kComputeF32 = 68;                                  // CUBLAS_COMPUTE_32F
  constexpr int kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8;  // CUBLASLT_MATMUL_DESC_
  constexpr int32_t kTranspose = 1;                                // CUBLAS_OP_T
  constexpr uint32_t kAddBias = 4;                                 // CUBLASLT_EPILOGUE_BIAS
  const CublasLt& lt = find_cublas_lt();
  cublasLtMatmulDesc made = nullptr;
  check_cublas(lt.cublasLtMatmulDescCreate(&made, kComputeF32, cublas_type(DType::f32)),
               "cublasLtMatmulDescCreate");
  Description description(made, lt.cublasLtMatmulDescDestroy);
  const auto set = [&](int attribute, auto value) {
    check_cublas(lt.cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  };
  if (!shape_.by_rows) set(kTransposeA, kTranspose);
  if (!shape_.bias) return description;
  set(kEpilogue, kAddBias);
  set(kBiasPointer, bias);
  return description;
}

void Matmul::run(const void* x, const void* w, const void* bias, void* y, void* workspace,
                 void* stream) const {
  check_stream(stream);
  const float alpha = 1, beta = 0;
  const Description description = describe(bias);
  check_cublas(find_cublas_lt().cublasLtMatmul(handle_, description.get(), &alpha, w, w_.get(), x, x_.get(),
                                               &beta, y, y_.get(), y, y_.get(), &algorithm_, workspace,
                                               workspace_bytes_, static_cast<CUstream>(stream)),
               "cublasLtMatmul");
}

}  // namespace halfbyte::cuda
