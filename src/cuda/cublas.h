// cuBLAS and cuBLASLt: products of dense matrices, optional libraries that are found at run time. The types
// are those of cublas_v2.h and cublasLt.h, as far as they are used here; their enumerators are named where
// they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/driver.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte::cuda {

struct Cublas {
  std::string path;     // empty if there is none
  int version = 0;      // major
  std::string problem;  // why there is none; empty if there is

#define HALFBYTE_CUBLAS_FUNCTIONS(X)                                                                         \
  X(cublasGetProperty, (int property, int* value))                                                           \
  X(cublasCreate_v2, (void** handle))                                                                        \
  X(cublasDestroy_v2, (void* handle))                                                                        \
  X(cublasSetStream_v2, (void* handle, void* stream))                                                        \
  X(cublasSetWorkspace_v2, (void* handle, void* workspace, size_t num_bytes))                                \
  X(cublasGemmEx, (void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,   \
                   const void* a, int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, \
                   void* c, int type_c, int ldc, int compute_type, int algorithm))
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HALFBYTE_DECLARE(name, parameters) int(*name) parameters = nullptr;
  HALFBYTE_CUBLAS_FUNCTIONS(HALFBYTE_DECLARE)
#undef HALFBYTE_DECLARE
};

using cublasLtHandle = struct cublasLtContext*;
using cublasLtMatmulDesc = struct cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout = struct cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference = struct cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulAlgo {
  uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult {
  cublasLtMatmulAlgo algo;
  size_t workspaceSize;
  int state;
  float wavesCount;
  int reserved[4];
};

struct CublasLt {
  std::string path;     // empty if there is none
  int version = 0;      // major
  std::string problem;  // why there is none; empty if there is

#define HALFBYTE_CUBLASLT_FUNCTIONS(X)                                                                      \
  X(cublasLtGetProperty, (int property, int* value))                                                        \
  X(cublasLtCreate, (cublasLtHandle * handle))                                                              \
  X(cublasLtMatmulDescCreate, (cublasLtMatmulDesc * desc, int compute_type, int scale_type))                \
  X(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc desc))                                                   \
  X(cublasLtMatmulDescSetAttribute,                                                                         \
    (cublasLtMatmulDesc desc, int attribute, const void* value, size_t num_bytes))                          \
  X(cublasLtMatrixLayoutCreate,                                                                             \
    (cublasLtMatrixLayout * layout, int type, uint64_t rows, uint64_t cols, int64_t ld))                    \
  X(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout layout))                                             \
  X(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference * preference))                                \
  X(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference preference))                                 \
  X(cublasLtMatmulPreferenceSetAttribute,                                                                   \
    (cublasLtMatmulPreference preference, int attribute, const void* value, size_t num_bytes))              \
  X(cublasLtMatmulAlgoGetHeuristic,                                                                         \
    (cublasLtHandle handle, cublasLtMatmulDesc desc, cublasLtMatrixLayout a, cublasLtMatrixLayout b,        \
     cublasLtMatrixLayout c, cublasLtMatrixLayout d, cublasLtMatmulPreference preference, int most_results, \
     cublasLtMatmulHeuristicResult* results, int* num_results))                                             \
  X(cublasLtMatmul,                                                                                         \
    (cublasLtHandle handle, cublasLtMatmulDesc desc, const void* alpha, const void* a,                      \
     cublasLtMatrixLayout a_layout, const void* b, cublasLtMatrixLayout b_layout, const void* beta,         \
     const void* c, cublasLtMatrixLayout c_layout, void* d, cublasLtMatrixLayout d_layout,                  \
     const cublasLtMatmulAlgo* algo, void* workspace, size_t workspace_bytes, CUstream stream))
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HALFBYTE_DECLARE(name, parameters) int(*name) parameters = nullptr;
  HALFBYTE_CUBLASLT_FUNCTIONS(HALFBYTE_DECLARE)
#undef HALFBYTE_DECLARE
};

// The first of library_candidates, HALFBYTE_CUBLAS or HALFBYTE_CUBLASLT first, that opens, has all functions
// and is of no later major version of CUDA than the driver. Once per process.
const Cublas& find_cublas();
const CublasLt& find_cublas_lt();

// f32, f16 or bf16 as cudaDataType.
int cublas_type(DType dtype);
// Throws Error(device), "what: status 13", unless `status` is 0.
void check_cublas(int status, const char* what);

}  // namespace halfbyte::cuda
