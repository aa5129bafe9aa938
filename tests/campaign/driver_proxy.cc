// A CUDA driver that passes every call on to another one, and fails those that it is told to.
//   HALFBYTE_PROXY_DRIVER   the other; libcuda.so.1
//   HALFBYTE_PROXY_FAIL     FUNCTION:INDEX:RESULT[:ever]: call INDEX (0: the first) of the function gives
//   that result and
//                           does nothing; with ":ever" the later ones too
//   HALFBYTE_PROXY_COUNTS   a file that gets a line for each function that was called: its name and how often
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/driver.h"

namespace {

using namespace halfbyte::cuda;

std::string text(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

void* find(const char* function) {
  static void* const driver = [] {
    const std::string path = text("HALFBYTE_PROXY_DRIVER");
    return dlopen(path.empty() ? "libcuda.so.1" : path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }();
  return driver ? dlsym(driver, function) : nullptr;
}

// One function of the driver.
struct Proxy {
  explicit Proxy(const char* its_name) : name(its_name), function(find(its_name)) {
    const std::string fail = text("HALFBYTE_PROXY_FAIL"), own = std::string(name) + ":";
    if (fail.starts_with(own))
      std::sscanf(fail.c_str() + own.size(), "%d:%d", &first, &result);  // NOLINT: our own tests give it
    last = fail.ends_with(":ever") ? 1 << 30 : first;
  }
  ~Proxy() {
    const std::string path = text("HALFBYTE_PROXY_COUNTS");
    if (path.empty() || count == 0) return;
    if (std::FILE* const file = std::fopen(path.c_str(), "a")) {
      std::fprintf(file, "%s %d\n", name, count.load());
      std::fclose(file);
    }
  }
  // Whether this call is to fail.
  bool fails() {
    const int index = count++;
    return index >= first && index <= last;
  }

  const char* name;
  void* function;
  int first = 1 << 30, last = 0, result = 0;
  std::atomic<int> count = 0;
};

}  // namespace

#define PROXY(name, parameters, arguments)                                     \
  extern "C" CUresult name parameters {                                        \
    static Proxy proxy(#name);                                                 \
    if (proxy.fails()) return proxy.result;                                    \
    if (proxy.function == nullptr) return 500; /* CUDA_ERROR_NOT_FOUND */      \
    return reinterpret_cast<CUresult(*) parameters>(proxy.function) arguments; \
  }
PROXY(cuInit, (unsigned flags), (flags))
PROXY(cuDriverGetVersion, (int* version), (version))
PROXY(cuGetErrorName, (CUresult error, const char** name), (error, name))
PROXY(cuGetErrorString, (CUresult error, const char** text), (error, text))
PROXY(cuDeviceGetCount, (int* count), (count))
PROXY(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal))
PROXY(cuDeviceGetName, (char* name, int num_bytes, CUdevice device), (name, num_bytes, device))
PROXY(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device), (value, attribute, device))
PROXY(cuDeviceTotalMem_v2, (size_t * num_bytes, CUdevice device), (num_bytes, device))
PROXY(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), (context, device))
PROXY(cuCtxPushCurrent_v2, (CUcontext context), (context))
PROXY(cuCtxPopCurrent_v2, (CUcontext * context), (context))
PROXY(cuCtxGetCurrent, (CUcontext * context), (context))
PROXY(cuCtxGetDevice, (CUdevice * device), (device))
PROXY(cuDeviceCanAccessPeer, (int* can, CUdevice device, CUdevice peer), (can, device, peer))
PROXY(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))
PROXY(cuMemGetInfo_v2, (size_t * free_bytes, size_t* total_bytes), (free_bytes, total_bytes))
PROXY(cuPointerGetAttributes, (unsigned count, int* attributes, void** values, CUdeviceptr pointer),
      (count, attributes, values, pointer))
PROXY(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t num_bytes), (pointer, num_bytes))
PROXY(cuMemFree_v2, (CUdeviceptr pointer), (pointer))
PROXY(cuMemHostAlloc, (void** pointer, size_t num_bytes, unsigned flags), (pointer, num_bytes, flags))
PROXY(cuMemFreeHost, (void* pointer), (pointer))
PROXY(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream),
      (to, from, num_bytes, stream))
PROXY(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t num_bytes, CUstream stream),
      (to, value, num_bytes, stream))
PROXY(cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t num_words, CUstream stream),
      (to, value, num_words, stream))
PROXY(cuStreamCreate, (CUstream * stream, unsigned flags), (stream, flags))
PROXY(cuStreamDestroy_v2, (CUstream stream), (stream))
PROXY(cuStreamSynchronize, (CUstream stream), (stream))
PROXY(cuStreamGetCtx, (CUstream stream, CUcontext* context), (stream, context))
PROXY(cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode))
PROXY(cuStreamEndCapture, (CUstream stream, CUgraph* graph), (stream, graph))
PROXY(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),
      (exec, graph, flags))
PROXY(cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, stream))
PROXY(cuGraphExecDestroy, (CUgraphExec exec), (exec))
PROXY(cuGraphDestroy, (CUgraph graph), (graph))
PROXY(cuEventCreate, (CUevent * event, unsigned flags), (event, flags))
PROXY(cuEventDestroy_v2, (CUevent event), (event))
PROXY(cuEventRecord, (CUevent event, CUstream stream), (event, stream))
PROXY(cuEventSynchronize, (CUevent event), (event))
PROXY(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end), (milliseconds, start, end))
PROXY(cuModuleLoadData, (CUmodule * module, const void* image), (module, image))
PROXY(cuModuleUnload, (CUmodule module), (module))
PROXY(cuFuncSetAttribute, (CUfunction function, int attribute, int value), (function, attribute, value))
PROXY(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name),
      (function, module, name))
PROXY(cuLaunchKernel,
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** params,
       void** extra),
      (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params, extra))
PROXY(cuLaunchKernelEx, (const CUlaunchConfig* config, CUfunction function, void** params, void** extra),
      (config, function, params, extra))
PROXY(cuTensorMapEncodeTiled,
      (void* map, int type, unsigned rank, void* address, const unsigned long long* extents,
       const unsigned long long* strides, const unsigned* box, const unsigned* element_strides,
       int interleave, int swizzle, int promotion, int fill),
      (map, type, rank, address, extents, strides, box, element_strides, interleave, swizzle, promotion,
       fill))
