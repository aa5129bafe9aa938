#include "cuda/cublas.h"

#include "core/checks.h"
#include "cuda/library.h"

namespace halfbyte::cuda {
namespace {

// The version of a library; empty if the driver runs it.
std::string problem_of_version(const std::string& name, int (*get_property)(int, int*), int& version) {
  constexpr int kMajorVersion = 0;
  get_property(kMajorVersion, &version);
  const int driver = find_driver().version / 1000;
  return version <= driver ? "" : fmt::format("{}: is of CUDA {}, the driver of {}", name, version, driver);
}

// Return why `name` is no usable library; empty if it is one.
#define HALFBYTE_FIND(function, parameters) \
  if (!library.find(#function, found.function)) return fmt::format("{}: lacks {}", name, #function);
std::string load(const std::string& name, Cublas& found) {
  const Library library(name);
  if (!library.problem().empty()) return library.problem();
  HALFBYTE_CUBLAS_FUNCTIONS(HALFBYTE_FIND)
  found.path = library.path_of(found.cublasGetProperty);
  return problem_of_version(name, found.cublasGetProperty, found.version);
}
std::string load(const std::string& name, CublasLt& found) {
  const Library library(name);
  if (!library.problem().empty()) return library.problem();
  HALFBYTE_CUBLASLT_FUNCTIONS(HALFBYTE_FIND)
  found.path = library.path_of(found.cublasLtGetProperty);
  return problem_of_version(name, found.cublasLtGetProperty, found.version);
}
#undef HALFBYTE_FIND

template <class Found>
Found search(const char* what, const char* variable, std::span<const char* const> names) {
  return search_libraries<Found>(what, variable, names,
                                 [](const std::string& name, Found& found) { return load(name, found); });
}

}  // namespace

// Never destroyed: see find_driver.
const Cublas& find_cublas() {
  constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
  static const Cublas& found = *new Cublas(search<Cublas>("cuBLAS", "HALFBYTE_CUBLAS", kNames));
  return found;
}
const CublasLt& find_cublas_lt() {
  constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
  static const CublasLt& found = *new CublasLt(search<CublasLt>("cuBLASLt", "HALFBYTE_CUBLASLT", kNames));
  return found;
}

int cublas_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0;  // CUDA_R_32F
    case DType::f16:
      return 2;  // CUDA_R_16F
    case DType::bf16:
      return 14;  // CUDA_R_16BF
    default:
      HALFBYTE_FAIL(bug, "cublas: no product of {}", to_string(dtype));
  }
}

void check_cublas(int status, const char* what) {
  HALFBYTE_CHECK(status == 0, device, "{}: status {}", what, status);
}

}  // namespace halfbyte::cuda
