// A stand-in for libcuda whose device memory is host memory and whose kernels do nothing.
//   STUB_CUDA_INIT         result of cuInit; 0
//   STUB_CUDA_DEVICES      their number; 1
//   STUB_CUDA_CAPABILITY   10 * major + minor; 90
//   STUB_CUDA_REFUSE       images that contain this word are refused
//   STUB_CUDA_REFUSAL      with this result; 209
//   STUB_CUDA_STREAM_OF    result of cuStreamGetCtx; 0
//   STUB_CUDA_STICKY       result of every call once a kernel was started; 0
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "cuda/driver.h"
#include "stub/stub.h"

namespace {

constexpr int kInvalidImage = 200;
constexpr int kInvalidDevice = 101;
constexpr int kOutOfMemory = 2;
constexpr size_t kMemoryBytes = size_t{1} << 30;

int sticky = 0;

constexpr int kInvalidHandle = 400;
struct Context {
  int device;
};
thread_local std::vector<Context*> contexts;  // the last is current

struct Stream {
  Context* context;
};
// Of a launch. What copies, fills and waits, the driver takes on streams of every context.
int result_on(const Stream* stream) {
  const bool is_foreign = stream != nullptr && !contexts.empty() && stream->context != contexts.back();
  return is_foreign ? kInvalidHandle : sticky;
}

// And its only function: cuda_child prints the hash of the image.
struct Module {
  uint64_t hash;
  unsigned most_shared_bytes = 48 << 10;  // dynamic, of a launch
};
int result_of_launch(const Module* function, unsigned shared_bytes) {
  constexpr int kInvalidValue = 1;
  return shared_bytes <= function->most_shared_bytes ? 0 : kInvalidValue;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return stub::number("STUB_CUDA_INIT", 0); }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_STUB";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "an error of the stub";
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = stub::number("STUB_CUDA_DEVICES", 1);
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  int count = 0;
  cuDeviceGetCount(&count);
  *device = ordinal;
  return ordinal < count ? 0 : kInvalidDevice;
}
int cuDeviceGetName(char* name, int num_bytes, int) {
  std::strncpy(name, "Stub", static_cast<size_t>(num_bytes));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = stub::number("STUB_CUDA_CAPABILITY", 90);
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 132;
  return 0;
}
int cuDeviceTotalMem_v2(size_t* num_bytes, int) {
  *num_bytes = kMemoryBytes;
  return 0;
}
int cuDevicePrimaryCtxRetain(Context** context, int device) {
  static std::map<int, Context> primary;
  *context = &primary.emplace(device, Context{device}).first->second;
  return 0;
}
int cuCtxPushCurrent_v2(Context* context) {
  contexts.push_back(context);
  return 0;
}
int cuCtxPopCurrent_v2(Context** context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}
int cuCtxGetCurrent(Context** context) {
  *context = contexts.empty() ? nullptr : contexts.back();
  return sticky;
}
int cuCtxGetDevice(int* device) {
  *device = contexts.back()->device;
  return sticky;
}
int cuDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return sticky;
}
int cuCtxEnablePeerAccess(Context*, unsigned) { return sticky; }
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = kMemoryBytes;
  return sticky;
}
int cuPointerGetAttributes(unsigned count, int* attributes, void** values, unsigned long long) {
  for (unsigned i = 0; i < count; ++i)
    if (attributes[i] == 2) *static_cast<unsigned*>(values[i]) = 2;  // memory of the device
  return 0;
}
int cuMemAlloc_v2(unsigned long long* pointer, size_t num_bytes) {
  if (sticky != 0) return sticky;
  if (num_bytes > kMemoryBytes) return kOutOfMemory;
  const size_t rounded = (num_bytes + 255) / 256 * 256;
  void* const memory = std::aligned_alloc(256, rounded);
  std::memset(memory, 0, rounded);  // what kernels leave there must not differ from run to run
  *pointer = reinterpret_cast<unsigned long long>(memory);
  return 0;
}
int cuMemFree_v2(unsigned long long pointer) {
  std::free(reinterpret_cast<void*>(pointer));
  return sticky;
}
int cuMemHostAlloc(void** pointer, size_t num_bytes, unsigned) {
  unsigned long long address = 0;
  const int result = cuMemAlloc_v2(&address, num_bytes);
  *pointer = reinterpret_cast<void*>(address);
  return result;
}
int cuMemFreeHost(void* pointer) { return cuMemFree_v2(reinterpret_cast<unsigned long long>(pointer)); }
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t num_bytes, Stream*) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), num_bytes);
  return sticky;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t num_bytes, Stream*) {
  std::memset(reinterpret_cast<void*>(to), value, num_bytes);
  return sticky;
}
int cuMemsetD32Async(unsigned long long to, unsigned value, size_t num_words, void*) {
  for (size_t i = 0; i < num_words; ++i) std::memcpy(reinterpret_cast<void*>(to + 4 * i), &value, 4);
  return sticky;
}
int cuStreamCreate(Stream** stream, unsigned) {
  *stream = new Stream{contexts.back()};
  return sticky;
}
int cuStreamDestroy_v2(Stream* stream) {
  delete stream;
  return sticky;
}
int cuStreamGetCtx(Stream* stream, Context** context) {
  *context = stream->context;
  return stub::number("STUB_CUDA_STREAM_OF", sticky);
}
int cuStreamSynchronize(Stream*) { return sticky; }
int cuStreamBeginCapture_v2(void*, int) { return sticky; }
int cuStreamEndCapture(void*, void**) { return sticky; }
int cuGraphInstantiateWithFlags(void**, void*, unsigned long long) { return sticky; }
int cuGraphLaunch(void*, void*) { return sticky; }
int cuGraphExecDestroy(void*) { return sticky; }
int cuGraphDestroy(void*) { return sticky; }
int cuEventCreate(void**, unsigned) { return sticky; }
int cuEventDestroy_v2(void*) { return sticky; }
int cuEventRecord(void*, void*) { return sticky; }
int cuEventSynchronize(void*) { return sticky; }
int cuEventElapsedTime(float*, void*, void*) { return sticky; }
int cuModuleLoadData(Module** module, const void* image) {
  if (sticky != 0) return sticky;
  const char* bytes = static_cast<const char*>(image);
  if (std::strncmp(bytes, stub::kMagic.data(), stub::kMagic.size()) != 0) return kInvalidImage;
  const std::string rest(bytes + stub::kMagic.size() + 9,
                         std::strtoul(bytes + stub::kMagic.size(), nullptr, 10));
  const std::string refused = stub::text("STUB_CUDA_REFUSE");
  if (!refused.empty() && rest.find(refused) != std::string::npos)
    return stub::number("STUB_CUDA_REFUSAL", 209);
  stub::log("load");
  *module = new Module{stub::fnv1a(rest)};
  return 0;
}
int cuModuleUnload(Module* module) {
  delete module;
  return sticky;
}
int cuModuleGetFunction(const Module** function, Module* module, const char*) {
  *function = module;
  return sticky;
}
int cuFuncSetAttribute(Module* function, int attribute, int value) {
  if (attribute == 8) function->most_shared_bytes = static_cast<unsigned>(value);
  return sticky;
}
int cuLaunchKernel(Module* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned shared_bytes, Stream* stream, void**, void**) {
  if (const int result = result_on(stream); result != 0) return result;
  if (const int result = result_of_launch(function, shared_bytes); result != 0) return result;
  return sticky = stub::number("STUB_CUDA_STICKY", 0);
}
int cuLaunchKernelEx(const halfbyte::cuda::CUlaunchConfig* config, Module* function, void**, void**) {
  if (const int result = result_on(reinterpret_cast<const Stream*>(config->stream)); result != 0)
    return result;
  if (const int result = result_of_launch(function, config->shared_bytes); result != 0) return result;
  return sticky = stub::number("STUB_CUDA_STICKY", 0);
}

}  // extern "C"
