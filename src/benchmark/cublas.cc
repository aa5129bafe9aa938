#include "benchmark/cublas.h"

#include "core/checks.h"
#include "cuda/driver.h"
#include "cuda/library.h"

namespace halfbyte {
namespace {

constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

// Returns why `name` is no usable cuBLAS; empty if it is one.
std::string load(const std::string& name, CublasLibrary& cublas) {
  const cuda::Library library(name);
  if (!library.problem().empty()) return library.problem();
#define HALFBYTE_FIND(function) \
  if (!library.find(#function, cublas.function)) return fmt::format("{}: lacks {}", name, #function);
  HALFBYTE_FIND(cublasGetProperty)
  HALFBYTE_FIND(cublasCreate_v2)
  HALFBYTE_FIND(cublasDestroy_v2)
  HALFBYTE_FIND(cublasSetStream_v2)
  HALFBYTE_FIND(cublasSetWorkspace_v2)
  HALFBYTE_FIND(cublasGemmEx)
#undef HALFBYTE_FIND
  constexpr int kMajorVersion = 0;
  cublas.cublasGetProperty(kMajorVersion, &cublas.version);
  if (const int major = cuda::find_driver().version / 1000; cublas.version > major)
    return fmt::format("{}: is of CUDA {}, the driver of {}", name, cublas.version, major);
  cublas.path = library.path_of(cublas.cublasGetProperty);
  return "";
}

CublasLibrary search() {
  std::string tried;
  for (const std::string& name : cuda::library_candidates("HALFBYTE_CUBLAS", kNames)) {
    CublasLibrary cublas;
    const std::string problem = load(name, cublas);
    if (problem.empty()) return cublas;
    tried += (tried.empty() ? "" : "; ") + problem;
  }
  CublasLibrary none;
  none.problem = fmt::format("no cuBLAS (HALFBYTE_CUBLAS may give its path). Tried: {}", tried);
  return none;
}

void check(int status, const char* what) {
  HALFBYTE_CHECK(status == 0, device, "{}: status {}", what, status);
}

int type_of(DType dtype) {  // cudaDataType
  switch (dtype) {
    case DType::f32:
      return 0;
    case DType::f16:
      return 2;
    case DType::bf16:
      return 14;
    default:
      HALFBYTE_FAIL(bug, "cublas: no product of {}", to_string(dtype));
  }
}

}  // namespace

const CublasLibrary& find_cublas() {
  static const CublasLibrary& found = *new CublasLibrary(search());  // never destroyed: see cuda::find_driver
  return found;
}

Cublas::Cublas(Device device, void* stream) : workspace_(device, kWorkspaceBytes) {
  const CublasLibrary& cublas = find_cublas();
  HALFBYTE_CHECK(cublas.problem.empty(), device, "{}", cublas.problem);
  check(cublas.cublasCreate_v2(&handle_), "cublasCreate");
  check(cublas.cublasSetStream_v2(handle_, stream), "cublasSetStream");
  check(cublas.cublasSetWorkspace_v2(handle_, workspace_.data(), static_cast<size_t>(kWorkspaceBytes)),
        "cublasSetWorkspace");
}

Cublas::~Cublas() { find_cublas().cublasDestroy_v2(handle_); }

void Cublas::product(DType dtype, bool transposed, int64_t m, int64_t n, int64_t k, const void* x,
                     const void* w, void* y) const {
  constexpr int kNo = 0, kYes = 1, kComputeF32 = 68, kDefaultAlgorithm = -1;
  const float one = 1, zero = 0;
  const int type = type_of(dtype);
  const int columns = static_cast<int>(transposed ? k : n), sums = static_cast<int>(transposed ? n : k);
  // By columns, as cuBLAS sees matrices, all are their transposes: y^T = w x^T or w^T x^T.
  check(find_cublas().cublasGemmEx(handle_, transposed ? kNo : kYes, kNo, columns, static_cast<int>(m), sums,
                                   &one, w, type, static_cast<int>(k), x, type, sums, &zero, y, type, columns,
                                   kComputeF32, kDefaultAlgorithm),
        "cublasGemmEx");
}

}  // namespace halfbyte
