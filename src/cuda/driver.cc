#include "cuda/driver.h"

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "core/expect.h"
#include "cuda/library.h"

namespace halfbyte::cuda {
namespace {

// Attributes of a device.
constexpr int kMultiprocessorCount = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

std::atomic<bool> is_loaded = false;

std::string text_of(const Driver& driver, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  return fmt::format("{} ({}): {}", name ? name : "unknown error", result, text ? text : "");
}

// Returns why `name` is no usable driver library; empty if it is one.
std::string load(const std::string& name, Driver& driver) {
  const Library library(name);
  if (!library.problem().empty()) return library.problem();
#define HALFBYTE_FIND(function, parameters) \
  if (!library.find(#function, driver.function)) return fmt::format("{}: lacks {}: too old", name, #function);
  HALFBYTE_DRIVER_FUNCTIONS(HALFBYTE_FIND)
#undef HALFBYTE_FIND
  library.find("cuTensorMapEncodeTiled", driver.cuTensorMapEncodeTiled);
  driver.path = library.path_of(driver.cuInit);
  return "";
}

Driver search_driver() {
  std::vector<std::string> names = {"libcuda.so.1"};
  for (const char* directory : {"/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib",
                                "/usr/local/nvidia/lib64", "/run/opengl-driver/lib"})
    names.push_back(fmt::format("{}/libcuda.so.1", directory));
  if (const std::string own = environment("HALFBYTE_CUDA_DRIVER"); !own.empty()) names = {own};

  Driver driver;
  for (const std::string& name : names) {
    const std::string problem = load(name, driver);
    if (driver.problem.empty()) driver.problem = "no CUDA driver: " + problem;  // the first tells most
    if (!problem.empty()) continue;
    driver.problem.clear();
    driver.cuDriverGetVersion(&driver.version);
    if (const CUresult result = driver.cuInit(0); result != 0)
      driver.problem = fmt::format("cuInit: {} (driver {}, for CUDA {})", text_of(driver, result),
                                   driver.path, version_text(driver.version));
    break;
  }
  return driver;
}

}  // namespace

const Driver& find_driver() {
  // Never destroyed, like all that lives as long as the process here: the driver ends before static
  // destructors do, and must not be called from them.
  static const Driver& found = *new Driver(search_driver());
  if (found.problem.empty()) is_loaded = true;
  return found;
}

decltype(Driver::cuPointerGetAttributes) find_pointer_attributes() {
  if (is_loaded) return find_driver().cuPointerGetAttributes;
  static const auto of_others = [] {
    void* const handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);  // never closed, like all of ours
    return reinterpret_cast<decltype(Driver::cuPointerGetAttributes)>(
        handle ? dlsym(handle, "cuPointerGetAttributes") : nullptr);
  }();
  return of_others;
}

const Driver& driver() {
  const Driver& found = find_driver();
  HALFBYTE_CHECK(found.problem.empty(), device, "{}", found.problem);
  return found;
}

namespace {
// Of a function of the driver that failed.
ErrorKind kind_of(std::string_view what) {
  if (what.starts_with("cuModule")) return ErrorKind::compilation_failed;
  const bool runs = what.starts_with("cuLaunch") || what == "cuGraphLaunch" ||
                    what == "cuStreamSynchronize" || what == "cuStreamGetCtx";
  return runs ? ErrorKind::launch_failed : ErrorKind::general;
}

// CUDA_ERROR_ECC_UNCORRECTABLE, CONTEXT_IS_DESTROYED, those of kernels that were stopped.
bool ends_context(CUresult result) {
  return result == 214 || result == 700 || result == 702 || result == 709 || (result >= 714 && result <= 719);
}

// The device of a context that is not current.
CUresult find_device(CUcontext context, CUdevice& device) {
  CUcontext ignored;
  if (const CUresult result = driver().cuCtxPushCurrent_v2(context); result != 0) return result;
  const CUresult result = driver().cuCtxGetDevice(&device);
  driver().cuCtxPopCurrent_v2(&ignored);
  return result;
}

// Error(usage) where `stream` is of another device than the current context, and where `any_other` is true
// also where it is of another context of the same device. Otherwise 0, or what the driver says where it does
// not tell whose the stream is.
CUresult refuse_foreign(CUstream stream, bool any_other) {
  constexpr uintptr_t kPerThread = 2;  // up to here handles that stand for streams of every context
  CUcontext own = nullptr, current = nullptr;
  CUdevice expected = -1, actual = -1;
  if (reinterpret_cast<uintptr_t>(stream) <= kPerThread) return 0;
  CUresult result = driver().cuStreamGetCtx(stream, &own);
  if (result == 0) result = driver().cuCtxGetCurrent(&current);
  if (result != 0 || own == current) return result;
  result = find_device(current, expected);
  if (result == 0) result = find_device(own, actual);
  if (result != 0) return result;
  HALFBYTE_MUST(expected == actual && !any_other, invalid_argument, "execution", "stream", "be",
                fmt::format("of the primary context of cuda:{}", expected),
                expected == actual ? fmt::format("one of another context of cuda:{}", actual)
                                   : fmt::format("one of cuda:{}", actual));
  return 0;
}
}  // namespace

void check(CUresult result, const char* what) {
  HALFBYTE_CHECK_AS(result == 0, device, ErrorDetails{kind_of(what)}, "{}: {}{}", what,
                    text_of(driver(), result),
                    ends_context(result) ? "; nothing more can run on this device in this process" : "");
}

void check_stream(void* stream) {
  check(refuse_foreign(static_cast<CUstream>(stream), false), "cuStreamGetCtx");
}

void check_on(void* stream, CUresult result, const char* what) {
  if (result == 0) return;
  static_cast<void>(refuse_foreign(static_cast<CUstream>(stream), true));
  check(result, what);
}

std::string target_of(int capability) {
  HALFBYTE_CHECK(capability >= kMinCapability, device,
                 "compute capability {}.{} is less than 7.5, the least supported", capability / 10,
                 capability % 10);
  switch (capability) {
    case 90:
    case 100:
    case 103:
    case 120:
    case 121:
      return fmt::format("sm_{}a", capability);
    default:
      return fmt::format("sm_{}", capability);
  }
}

int num_devices() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

Context describe(int index) {
  const int count = num_devices();
  HALFBYTE_CHECK(index >= 0 && index < count, device, "cuda:{}: no such device, the driver has {}", index,
                 count);
  const Driver& cuda = driver();
  Context result;
  result.index = index;
  check(cuda.cuDeviceGet(&result.device, index), "cuDeviceGet");
  const auto attribute = [&](int which) {
    int value = 0;
    check(cuda.cuDeviceGetAttribute(&value, which, result.device), "cuDeviceGetAttribute");
    return value;
  };
  result.capability = 10 * attribute(kCapabilityMajor) + attribute(kCapabilityMinor);
  result.num_multiprocessors = attribute(kMultiprocessorCount);
  return result;
}

const Context& context(int index) {
  static auto& mutex = *new std::mutex;
  static auto& contexts = *new std::map<int, Context>;
  const std::scoped_lock lock(mutex);
  if (const auto found = contexts.find(index); found != contexts.end()) return found->second;
  Context made = describe(index);
  made.target = target_of(made.capability);
  check(driver().cuDevicePrimaryCtxRetain(&made.context, made.device), "cuDevicePrimaryCtxRetain");
  return contexts.emplace(index, made).first->second;
}

Scope::Scope(const Context& context) {
  check(driver().cuCtxPushCurrent_v2(context.context), "cuCtxPushCurrent");
}

Scope::~Scope() {
  CUcontext ignored;
  find_driver().cuCtxPopCurrent_v2(&ignored);
}

}  // namespace halfbyte::cuda
