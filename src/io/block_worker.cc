#include "io/block_worker.h"

#include "cpu/parallel.h"

namespace halfbyte::io {
namespace {

constexpr int64_t kCudaBlockElements = 8 << 20;
constexpr int kMaxCudaWorkers = 8;

}  // namespace

int64_t block_elements(Device device) {
  return device.kind == DeviceKind::cpu ? kBlockElements : kCudaBlockElements;
}

int num_workers(Device device, int num_threads) {
  const int threads = effective_threads(num_threads);
  return device.kind == DeviceKind::cpu ? threads : std::min(threads, kMaxCudaWorkers);
}

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
