#include "io/block_worker.h"

#include "core/checks.h"
#include "cpu/parallel.h"

namespace halfbyte::io {
namespace {

constexpr int64_t kCudaBlockElements = 2 << 20;
constexpr int kMaxCudaWorkers = 16;

}  // namespace

int64_t block_elements(Device device) {
  return device.kind == DeviceKind::cpu ? kBlockElements : kCudaBlockElements;
}

int num_workers(Device device, int num_threads) {
  const int threads = effective_threads(num_threads);
  return device.kind == DeviceKind::cpu ? threads : std::min(threads, kMaxCudaWorkers);
}

void check_devices(std::span<const Device> devices) {
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto before = devices.first(i);
    HALFBYTE_CHECK(std::ranges::find(before, devices[i]) == before.end(), usage,
                   "devices must differ, got {} twice", to_string(devices[i]));
    check_device(devices[i]);
  }
}

std::vector<Device> worker_devices(std::span<const Device> devices, int num_threads) {
  std::vector<Device> of_each;
  bool on_cpu = devices.empty();
  for (const Device device : devices) {
    const bool is_cpu = device.kind == DeviceKind::cpu;
    on_cpu |= is_cpu;
    if (!is_cpu) of_each.insert(of_each.end(), static_cast<size_t>(num_workers(device, num_threads)), device);
  }
  if (!on_cpu) return of_each;
  const auto threads = static_cast<size_t>(effective_threads(num_threads));
  of_each.resize(std::max(threads, of_each.size() + 1));
  return of_each;
}

double device_rate(int num_threads) {
  return 20e9 * num_workers({DeviceKind::cuda, 0}, num_threads) / kMaxCudaWorkers;
}

int files_at_once(int num_workers) { return std::clamp(num_workers / 4, 1, 8); }

void BlockWorker::drain() const noexcept {
  try {
    stream.synchronize();
  } catch (const std::exception&) {
    // Of the failure that brought us here.
  }
}

bool BlockWorker::shrink() {
  if (max_elements <= kBlockElements) return false;
  max_elements /= 2;
  dense = Buffer(device);
  native = NativeBuffers(device);
  return true;
}

}  // namespace halfbyte::io
