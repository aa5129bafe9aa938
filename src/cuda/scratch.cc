#include "cuda/scratch.h"

#include <exception>
#include <map>
#include <mutex>
#include <vector>

namespace halfbyte::cuda {
namespace {

// One size is kept: what a call needs that is not unusual. Never destroyed: the driver may be gone by then.
constexpr int64_t kKeptBytes = 4096;
struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<CUdeviceptr>> free;  // by device
};
Pool& pool() {
  static auto& pool = *new Pool;
  return pool;
}

}  // namespace

Scratch::Scratch(const Context& context, int64_t num_bytes)
    : device_(context.index), num_bytes_(num_bytes), exceptions_(std::uncaught_exceptions()) {
  if (num_bytes <= kKeptBytes) {
    num_bytes_ = kKeptBytes;
    const std::scoped_lock lock(pool().mutex);
    auto& free = pool().free[device_];
    if (!free.empty()) {
      pointer_ = free.back();
      free.pop_back();
      return;
    }
  }
  check(driver().cuMemAlloc_v2(&pointer_, static_cast<size_t>(num_bytes_)), "cuMemAlloc");
}

Scratch::~Scratch() {
  // Freeing waits for the device; memory that work may still use is not kept for others.
  if (num_bytes_ != kKeptBytes || std::uncaught_exceptions() > exceptions_) {
    driver().cuMemFree_v2(pointer_);
    return;
  }
  const std::scoped_lock lock(pool().mutex);
  pool().free[device_].push_back(pointer_);
}

}  // namespace halfbyte::cuda
