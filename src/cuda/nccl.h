// NCCL: sums over several devices and processes, an optional library that is found at run time. The types are
// those of nccl.h, as far as they are used here; its enumerators are named where they are.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/driver.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte::cuda {

using ncclComm = struct ncclCommOpaque*;
struct ncclUniqueId {
  char internal[128] = {};
};

struct Nccl {
  std::string path;     // empty if there is none
  int version = 0;      // 10000 * major + 100 * minor + patch
  std::string problem;  // why there is none; empty if there is

#define HALFBYTE_NCCL_FUNCTIONS(X)                                                                       \
  X(ncclGetVersion, int, (int* version))                                                                 \
  X(ncclGetUniqueId, int, (ncclUniqueId * id))                                                           \
  X(ncclCommInitAll, int, (ncclComm * comms, int num_devices, const int* devices))                       \
  X(ncclCommInitRank, int, (ncclComm * comm, int size, ncclUniqueId id, int rank))                       \
  X(ncclCommAbort, int, (ncclComm comm))                                                                 \
  X(ncclCommDestroy, int, (ncclComm comm))                                                               \
  X(ncclCommGetAsyncError, int, (ncclComm comm, int* error))                                             \
  X(ncclAllReduce, int,                                                                                  \
    (const void* from, void* to, size_t count, int type, int operation, ncclComm comm, CUstream stream)) \
  X(ncclGetErrorString, const char*, (int error))                                                        \
  X(ncclGetLastError, const char*, (ncclComm comm))
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HALFBYTE_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  HALFBYTE_NCCL_FUNCTIONS(HALFBYTE_DECLARE)
#undef HALFBYTE_DECLARE
};

// The first of library_candidates, HALFBYTE_NCCL first, that opens and has all functions. Once per process.
// Sets NCCL_NVLS_ENABLE to 0 in the environment, where it is not set: NVLink multicast, with which one
// process can put the devices of a host out of service for all of its users, is for those who ask for it.
const Nccl& find_nccl();
// Throws Error(device), with what NCCL says of it, unless `result` is 0. comm: null where there is none.
void check_nccl(int result, const char* what, ncclComm comm);
int nccl_type(DType dtype);  // of f32, f16, bf16

}  // namespace halfbyte::cuda
