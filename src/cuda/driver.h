// The CUDA driver (libcuda), found at run time. The types are those of cuda.h, as far as they are used here:
// no header of the toolkit is included anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace halfbyte::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

// As CUDA 11.8 and later have them.
struct CUlaunchAttribute {
  int id = 0;
  char pad[4] = {};
  union {
    int value;
    unsigned extent[3];
    char bytes[64] = {};
  };
};
struct CUlaunchConfig {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1, block_x = 1, block_y = 1, block_z = 1, shared_bytes = 0;
  CUstream stream = nullptr;
  CUlaunchAttribute* attributes = nullptr;
  unsigned num_attributes = 0;
};

struct Driver {
  std::string path;     // empty if there is none
  int version = 0;      // of CUDA that it supports: 1000 * major + 10 * minor
  std::string problem;  // why it cannot be used; empty if it can

#define HALFBYTE_DRIVER_FUNCTIONS(X)                                                               \
  X(cuInit, (unsigned flags))                                                                      \
  X(cuDriverGetVersion, (int* version))                                                            \
  X(cuGetErrorName, (CUresult error, const char** name))                                           \
  X(cuGetErrorString, (CUresult error, const char** text))                                         \
  X(cuDeviceGetCount, (int* count))                                                                \
  X(cuDeviceGet, (CUdevice * device, int ordinal))                                                 \
  X(cuDeviceGetName, (char* name, int num_bytes, CUdevice device))                                 \
  X(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                            \
  X(cuDeviceTotalMem_v2, (size_t * num_bytes, CUdevice device))                                    \
  X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                              \
  X(cuCtxPushCurrent_v2, (CUcontext context))                                                      \
  X(cuCtxPopCurrent_v2, (CUcontext * context))                                                     \
  X(cuCtxGetCurrent, (CUcontext * context))                                                        \
  X(cuCtxGetDevice, (CUdevice * device))                                                           \
  X(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer))                             \
  X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags))                                       \
  X(cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                                  \
  X(cuPointerGetAttributes, (unsigned count, int* attributes, void** values, CUdeviceptr pointer)) \
  X(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t num_bytes))                                      \
  X(cuMemFree_v2, (CUdeviceptr pointer))                                                           \
  X(cuMemHostAlloc, (void** pointer, size_t num_bytes, unsigned flags))                            \
  X(cuMemFreeHost, (void* pointer))                                                                \
  X(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream))          \
  X(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t num_bytes, CUstream stream))     \
  X(cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t num_words, CUstream stream))         \
  X(cuStreamCreate, (CUstream * stream, unsigned flags))                                           \
  X(cuStreamDestroy_v2, (CUstream stream))                                                         \
  X(cuStreamSynchronize, (CUstream stream))                                                        \
  X(cuStreamGetCtx, (CUstream stream, CUcontext * context))                                        \
  X(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                          \
  X(cuStreamEndCapture, (CUstream stream, CUgraph * graph))                                        \
  X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))    \
  X(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                            \
  X(cuGraphExecDestroy, (CUgraphExec exec))                                                        \
  X(cuGraphDestroy, (CUgraph graph))                                                               \
  X(cuEventCreate, (CUevent * event, unsigned flags))                                              \
  X(cuEventDestroy_v2, (CUevent event))                                                            \
  X(cuEventRecord, (CUevent event, CUstream stream))                                               \
  X(cuEventSynchronize, (CUevent event))                                                           \
  X(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end))                         \
  X(cuModuleLoadData, (CUmodule * module, const void* image))                                      \
  X(cuModuleUnload, (CUmodule module))                                                             \
  X(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                           \
  X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))               \
  X(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,       \
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,  \
                     CUstream stream, void** params, void** extra))                                \
  X(cuLaunchKernelEx, (const CUlaunchConfig* config, CUfunction function, void** params, void** extra))
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define HALFBYTE_DECLARE(name, parameters) CUresult(*name) parameters = nullptr;
  HALFBYTE_DRIVER_FUNCTIONS(HALFBYTE_DECLARE)
#undef HALFBYTE_DECLARE
  // CUDA 12.0 and later; else null.
  CUresult (*cuTensorMapEncodeTiled)(void* map, int type, unsigned rank, void* address,
                                     const unsigned long long* extents, const unsigned long long* strides,
                                     const unsigned* box, const unsigned* element_strides, int interleave,
                                     int swizzle, int promotion, int fill) = nullptr;
};

// Loaded and initialized once per process. Search order: HALFBYTE_CUDA_DRIVER (nothing else is then tried),
// libcuda.so.1 on the loader's path and in the usual directories. A failure is remembered in `problem`.
const Driver& find_driver();
// The same; throws Error(device) with the problem where it cannot be used.
const Driver& driver();
// The function of this name if the process has a driver: since find_driver, or from others before the first
// call of this. Loads and initializes nothing: what is not initialized answers with an error.
decltype(Driver::cuPointerGetAttributes) find_pointer_attributes();

// Throws Error(device), "what: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory", unless `result` is 0. Says so
// where nothing works after the error in this process.
void check(CUresult result, const char* what);
// Error(usage) where a stream of the caller is one of another device than the current context. Before work is
// enqueued: the driver runs copies on streams of every device, and says of a launch no more than that a
// handle is invalid. Error(device) where the driver does not tell whose it is: it may be one of these.
void check_stream(void* stream);
// Of a call that was given such a stream. Where it failed, the stream must be one of the current context:
// green contexts are others on the same device, and what they can take the driver knows.
void check_on(void* stream, CUresult result, const char* what);

// One device and its primary context (the one that the runtime API, and so PyTorch, uses). Made on first
// use and kept: the process ends with it.
struct Context {
  int index = 0;
  CUdevice device = 0;
  CUcontext context = nullptr;
  int capability = 0;  // 10 * major + minor
  int num_multiprocessors = 0;
  std::string target;  // "sm_90a": what kernels are compiled for
};
int num_devices();
// What the driver says of a device; makes no context and chooses no target.
Context describe(int index);
// Throws Error(device) where there is no such device, or it is older than sm_75.
const Context& context(int index);

constexpr int kMinCapability = 75;  // 10 * major + minor

// "sm_90a", "sm_89": the target for devices of this capability, with what only they have where NVRTC knows
// such a one. Throws Error(device) below 7.5.
std::string target_of(int capability);

// Makes the context current on this thread until the end of the scope.
class Scope {
 public:
  explicit Scope(const Context& context);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

}  // namespace halfbyte::cuda
