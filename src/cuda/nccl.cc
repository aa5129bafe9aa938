#include "cuda/nccl.h"

#include <cstdlib>

#include "core/checks.h"
#include "cuda/library.h"

namespace halfbyte::cuda {
namespace {

// Why `name` is no usable library; empty if it is one.
std::string load_nccl(const std::string& name, Nccl& found) {
  const Library library(name);
  if (!library.problem().empty()) return library.problem();
#define HALFBYTE_FIND(function, result, parameters) \
  if (!library.find(#function, found.function)) return fmt::format("{}: lacks {}", name, #function);
  HALFBYTE_NCCL_FUNCTIONS(HALFBYTE_FIND)
#undef HALFBYTE_FIND
  found.path = library.path_of(found.ncclGetVersion);
  found.ncclGetVersion(&found.version);
  return "";
}

Nccl search_nccl() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // NOLINT(concurrency-mt-unsafe): NCCL reads it so, once
  constexpr const char* kNames[] = {"libnccl.so.2", "libnccl.so"};
  return search_libraries<Nccl>("NCCL", "HALFBYTE_NCCL", kNames, load_nccl);
}

}  // namespace

// Never destroyed: see find_driver.
const Nccl& find_nccl() {
  static const Nccl& found = *new Nccl(search_nccl());
  return found;
}

void check_nccl(int result, const char* what, ncclComm comm) {
  if (result == 0) return;
  const Nccl& nccl = find_nccl();
  HALFBYTE_FAIL(device, "{}: {} ({}): {}", what, nccl.ncclGetErrorString(result), result,
                nccl.ncclGetLastError(comm));
}

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 6;  // ncclFloat16
    case DType::f32:
      return 7;  // ncclFloat32
    case DType::bf16:
      return 9;  // ncclBfloat16
    default:
      HALFBYTE_FAIL(bug, "nccl: no sum of {}", to_string(dtype));
  }
}

}  // namespace halfbyte::cuda
