#include "halfbyte/device.hpp"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/checks.h"
#include "cuda/cubin_cache.h"
#include "cuda/driver.h"
#include "cuda/kernel_pack.h"
#include "cuda/launch.h"
#include "cuda/nvrtc.h"

namespace halfbyte {
namespace {

using cuda::Context;
using cuda::Driver;

constexpr size_t kAlignment = 256;
constexpr cuda::CUresult kOutOfMemory = 2;
constexpr unsigned kPortable = 1;  // page-locked for all contexts

std::atomic<uint64_t> num_frees = 0;  // of memory of devices, by us

bool is_cuda(Device device) { return device.kind == DeviceKind::cuda; }

// The device, its target chosen but no context made. Throws Error(device) with the reason where it cannot be
// used.
Context usable_device(int index) {
  Context device = cuda::describe(index);
  try {
    device.target = cuda::target_of(device.capability);
    if (!cuda::packs_have(device.target)) {
      const std::string problem = cuda::problem_with(cuda::find_nvrtc(), device.target);
      HALFBYTE_CHECK(problem.empty(), device,
                     "{}; and no loaded kernel pack has kernels of this library for {}", problem,
                     device.target);
    }
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("cuda:{}: {}", index, error.what()));
  }
  return device;
}

CudaDevice device_info(int index) {
  CudaDevice info;
  info.index = index;
  const Driver& driver = cuda::driver();
  const Context device = cuda::describe(index);
  info.capability = device.capability;
  info.num_multiprocessors = device.num_multiprocessors;
  char name[256] = "";
  cuda::check(driver.cuDeviceGetName(name, sizeof name, device.device), "cuDeviceGetName");
  info.name = name;
  size_t memory_bytes = 0;
  cuda::check(driver.cuDeviceTotalMem_v2(&memory_bytes, device.device), "cuDeviceTotalMem");
  info.memory_bytes = memory_bytes;
  try {
    info.target = usable_device(index).target;
  } catch (const Error& error) {
    info.problem = error.what();
  }
  return info;
}

// For destructors: the device may have failed, or the driver have ended before.
template <class Function>
void without_errors(const Context& context, const Function& function) {
  const Driver& driver = cuda::find_driver();
  cuda::CUcontext ignored;
  if (driver.cuCtxPushCurrent_v2(context.context) != 0) return;
  function(driver);
  driver.cuCtxPopCurrent_v2(&ignored);
}

std::shared_ptr<std::byte> allocate_on_host(int64_t num_bytes) {
  // Pages of 2 MB, where they are given to those who ask: the first touch of a large tensor costs more than a
  // read of it from the page cache otherwise, and a product of 128 rows, whose workspace is 2 MB, takes a
  // tenth longer. A last page is one only if four fifths of it are used.
  constexpr size_t kLargePage = size_t{2} << 20;
  const auto size = static_cast<size_t>(num_bytes);
  const auto round_up = [&](size_t to) { return (size + to - 1) / to * to; };
  const bool fills = round_up(kLargePage) / 5 * 4 < size, large = fills || size >= kLargePage;
  const size_t rounded = round_up(fills ? kLargePage : kAlignment);
  void* data = nullptr;
  HALFBYTE_CHECK(::posix_memalign(&data, large ? kLargePage : kAlignment, rounded) == 0, no_memory,
                 "no host memory for {} bytes", num_bytes);
  if (large) (void)madvise(data, rounded, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(data), [](std::byte* p) { std::free(p); }};
}

}  // namespace

CudaInfo cuda_info() {
  CudaInfo info;
  const Driver& driver = cuda::find_driver();
  info.driver_path = driver.path;
  info.driver_version = driver.version;
  const cuda::Nvrtc& nvrtc = cuda::find_nvrtc();
  info.nvrtc_path = nvrtc.path;
  info.nvrtc_version = nvrtc.version;
  info.problem = driver.problem;
  if (!driver.problem.empty()) return info;
  try {
    const int count = cuda::num_devices();
    for (int index = 0; index < count; ++index) info.devices.push_back(device_info(index));
  } catch (const Error& error) {
    info.problem = error.what();
  }
  if (!info.problem.empty()) return info;
  info.problem = info.devices.empty() ? "the driver has no device" : info.devices[0].problem;
  for (const CudaDevice& device : info.devices)
    if (device.problem.empty()) info.problem.clear();
  if (info.usable()) {  // not before: it makes the directory
    info.cache_directory = cuda::CubinCache::instance().directory();
    info.cache_problem = cuda::CubinCache::instance().problem();
  }
  return info;
}

std::string to_string(Device device) {
  return is_cuda(device) ? fmt::format("cuda:{}", device.index) : "cpu";
}

Device parse_device(std::string_view word) {
  if (word == "cpu") return {};
  if (word == "cuda") return {DeviceKind::cuda, 0};
  Device device{DeviceKind::cuda, -1};
  constexpr std::string_view kPrefix = "cuda:";
  if (word.starts_with(kPrefix)) {
    const std::string_view digits = word.substr(kPrefix.size());
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), device.index);
    if (error != std::errc() || end != digits.data() + digits.size()) device.index = -1;
  }
  HALFBYTE_CHECK(device.index >= 0, usage, "device must be cpu, cuda or cuda:N, got \"{}\"", word);
  return device;
}

std::vector<Device> parse_devices(std::string_view words) {
  std::vector<Device> devices;
  const auto add = [&](Device device) {
    HALFBYTE_CHECK(std::ranges::find(devices, device) == devices.end(), usage,
                   "devices must differ, got {} twice in \"{}\"", to_string(device), words);
    devices.push_back(device);
  };
  for (size_t begin = 0; begin <= words.size();) {
    const size_t end = std::min(words.find(',', begin), words.size());
    const std::string_view word = words.substr(begin, end - begin);
    begin = end + 1;
    if (word != "cuda:all") {
      add(parse_device(word));
      continue;
    }
    const CudaInfo info = cuda_info();
    HALFBYTE_CHECK(info.usable(), device, "no CUDA device can be used: {}", info.problem);
    for (const CudaDevice& device : info.devices)
      if (device.problem.empty()) add({DeviceKind::cuda, device.index});
  }
  return devices;
}

std::string to_string(std::span<const Device> devices) {
  std::string words;
  for (const Device& device : devices) words += (words.empty() ? "" : ",") + to_string(device);
  return words;
}

void check_device(Device device) {
  if (is_cuda(device)) usable_device(device.index);
}

void check_memory(const char* what, const void* data, int64_t num_bytes, Device device) {
  // Nobody can have memory of a device before the driver is in the process; work on the CPU does not load it.
  const auto get_attributes =
      is_cuda(device) ? cuda::find_driver().cuPointerGetAttributes : cuda::find_pointer_attributes();
  if (!get_attributes) return;
  // CU_POINTER_ATTRIBUTE_: MEMORY_TYPE, DEVICE_ORDINAL, IS_MANAGED, RANGE_START_ADDR, RANGE_SIZE,
  // IS_LEGACY_CUDA_IPC_CAPABLE, which only a whole allocation of cuMemAlloc is: others may consist of many
  // ranges.
  int attributes[] = {2, 9, 8, 11, 12, 13};
  unsigned type = 0;
  int index = 0;
  uint32_t is_managed = 0, is_whole = 0;  // the driver writes one byte or four
  cuda::CUdeviceptr begin = 0;
  size_t size = 0;
  void* values[] = {&type, &index, &is_managed, &begin, &size, &is_whole};
  const auto address = reinterpret_cast<cuda::CUdeviceptr>(data),
             last = address + static_cast<cuda::CUdeviceptr>(num_bytes);
  // What this thread found before: asking the driver takes a good part of the time of a run. Memory that we
  // free is forgotten; what others freed since may pass.
  struct Allocation {
    cuda::CUdeviceptr begin = 0, end = 0;
    int index = 0;
  };
  thread_local std::array<Allocation, 8> found;
  thread_local size_t next = 0;
  thread_local uint64_t of_frees = 0;
  if (const uint64_t frees = num_frees.load(std::memory_order_acquire); frees != of_frees) {
    found = {};
    of_frees = frees;
  }
  if (is_cuda(device))
    for (const Allocation& one : found)
      if (one.index == device.index && one.begin <= address && last <= one.end) return;
  constexpr unsigned kHost = 1, kDevice = 2;  // CU_MEMORYTYPE_; 0: not known to the driver
  if (get_attributes(6, attributes, values, address) != 0) type = 0;
  if (!is_cuda(device)) {
    HALFBYTE_CHECK(type != kDevice || is_managed != 0, usage,
                   "{} must be in host memory, {:#x} is memory of cuda:{}", what, address, index);
    return;
  }
  HALFBYTE_CHECK(type == kHost || type == kDevice, usage,
                 "{} must be in memory of {}, {:#x} is host memory that it cannot use", what,
                 to_string(device), address);
  HALFBYTE_CHECK(type == kHost || is_managed != 0 || index == device.index, usage,
                 "{} must be in memory of {}, {:#x} is memory of cuda:{}", what, to_string(device), address,
                 index);
  HALFBYTE_CHECK(is_whole == 0 || last <= begin + size, usage,
                 "{} needs {} bytes, its allocation has {} from {:#x} on", what, num_bytes,
                 begin + size - address, address);
  if (is_whole != 0 && type == kDevice) found[next++ % found.size()] = {begin, begin + size, device.index};
}

Stream::Stream(Device device) : device_(device) {
  if (!is_cuda(device)) return;
  const Context& context = cuda::context(device.index);
  const cuda::Scope scope(context);
  cuda::CUstream stream = nullptr;
  // In order with the default stream (flag 0): work there is seen without another wait.
  cuda::check(cuda::driver().cuStreamCreate(&stream, 0), "cuStreamCreate");
  handle_ = std::shared_ptr<void>(stream, [&context](void* p) {
    without_errors(context,
                   [p](const Driver& driver) { driver.cuStreamDestroy_v2(static_cast<cuda::CUstream>(p)); });
  });
}

void Stream::synchronize() const {
  if (!is_cuda(device_)) return;
  const cuda::Scope scope(cuda::context(device_.index));
  cuda::synchronize(handle());
}

Memory::Memory(Device device, int64_t num_bytes) : num_bytes_(num_bytes) {
  HALFBYTE_CHECK(num_bytes >= 0, usage, "memory: num_bytes must not be negative, got {}", num_bytes);
  if (num_bytes == 0) return;
  if (!is_cuda(device)) {
    data_ = allocate_on_host(num_bytes);
    return;
  }
  const Context& context = cuda::context(device.index);
  const cuda::Scope scope(context);
  const Driver& driver = cuda::driver();
  cuda::CUdeviceptr pointer = 0;
  const cuda::CUresult result = driver.cuMemAlloc_v2(&pointer, static_cast<size_t>(num_bytes));
  if (result == kOutOfMemory) {
    size_t free_bytes = 0, total_bytes = 0;
    driver.cuMemGetInfo_v2(&free_bytes, &total_bytes);
    HALFBYTE_FAIL(device, "{}: no memory for {} bytes, {} of {} are free", to_string(device), num_bytes,
                  free_bytes, total_bytes);
  }
  cuda::check(result, "cuMemAlloc");
  data_ = std::shared_ptr<std::byte>(std::bit_cast<std::byte*>(pointer), [&context](std::byte* p) {
    num_frees.fetch_add(1, std::memory_order_release);
    without_errors(context, [p](const Driver& d) { d.cuMemFree_v2(reinterpret_cast<cuda::CUdeviceptr>(p)); });
  });
}

Memory Memory::host(Device device, int64_t num_bytes) {
  if (!is_cuda(device) || num_bytes <= 0) return Memory(Device{}, num_bytes);
  const Context& context = cuda::context(device.index);
  const cuda::Scope scope(context);
  void* data = nullptr;
  const cuda::CUresult result =
      cuda::driver().cuMemHostAlloc(&data, static_cast<size_t>(num_bytes), kPortable);
  HALFBYTE_CHECK(result != kOutOfMemory, no_memory, "no page-locked host memory for {} bytes", num_bytes);
  cuda::check(result, "cuMemHostAlloc");
  Memory memory;
  memory.num_bytes_ = num_bytes;
  memory.data_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(data), [&context](std::byte* p) {
    without_errors(context, [p](const Driver& driver) { driver.cuMemFreeHost(p); });
  });
  return memory;
}

void copy(Device device, void* to, const void* from, int64_t num_bytes, void* stream) {
  HALFBYTE_CHECK(num_bytes >= 0, usage, "copy: num_bytes must not be negative, got {}", num_bytes);
  if (num_bytes == 0) return;
  if (!is_cuda(device)) {
    std::memmove(to, from, static_cast<size_t>(num_bytes));
    return;
  }
  const cuda::Scope scope(cuda::context(device.index));
  cuda::copy(to, from, num_bytes, stream);
}

}  // namespace halfbyte
