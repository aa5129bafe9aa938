#include "cuda/launch.h"

#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "core/checks.h"

namespace halfbyte::cuda {

namespace {

// A function of the driver that is given a stream of the caller.
template <class Call>
void call_on(void* stream, const char* what, const Call& call) {
  check_stream(stream);
  check_on(stream, call(), what);
}

struct Extent {
  unsigned x = 0, y = 0, threads = 0;
};
Extent extent_of(const Grid& grid) {
  constexpr int64_t kMaxX = std::numeric_limits<int32_t>::max(), kMaxY = 65535;
  const int64_t y = (grid.num_blocks - 1) / kMaxX + 1, x = (grid.num_blocks - 1) / y + 1;
  HALFBYTE_CHECK(
      grid.num_blocks > 0 && y <= kMaxY && grid.threads_per_block > 0 && grid.threads_per_block <= 1024, bug,
      "launch: {} blocks of {} threads", grid.num_blocks, grid.threads_per_block);
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(grid.threads_per_block)};
}

void launch(CUfunction function, const Grid& grid, void* stream, void* args, bool early) {
  if (grid.num_blocks == 0) return;
  const Extent extent = extent_of(grid);
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config;
  config.grid_x = extent.x;
  config.grid_y = extent.y;
  config.block_x = extent.threads;
  config.shared_bytes = static_cast<unsigned>(grid.shared_bytes);
  config.stream = static_cast<CUstream>(stream);
  config.attributes = attributes;
  if (early) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = 1;
  }
  if (grid.blocks_per_cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.extent[0] = static_cast<unsigned>(grid.blocks_per_cluster);
    attribute.extent[1] = attribute.extent[2] = 1;
  }
  void* params[] = {args};
  if (config.num_attributes == 0)
    call_on(stream, "cuLaunchKernel", [&] {
      return driver().cuLaunchKernel(function, extent.x, extent.y, 1, extent.threads, 1, 1,
                                     config.shared_bytes, config.stream, params, nullptr);
    });
  else
    call_on(stream, "cuLaunchKernelEx",
            [&] { return driver().cuLaunchKernelEx(&config, function, params, nullptr); });
}

}  // namespace

void allow_shared_bytes(CUfunction function, int shared_bytes) {
  constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  static std::mutex& mutex = *new std::mutex;
  static auto& allowed = *new std::map<CUfunction, int>;  // the most of each function: plans share them
  const std::scoped_lock lock(mutex);
  int& most = allowed[function];
  if (shared_bytes <= most) return;
  check(driver().cuFuncSetAttribute(function, kMaxDynamicSharedBytes, shared_bytes), "cuFuncSetAttribute");
  most = shared_bytes;
}

void launch(CUfunction function, Grid grid, void* stream, void* args) {
  launch(function, grid, stream, args, false);
}
void launch_early(CUfunction function, Grid grid, void* stream, void* args) {
  launch(function, grid, stream, args, true);
}

namespace {
CUdeviceptr pointer(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }
}  // namespace

void copy(void* to, const void* from, int64_t num_bytes, void* stream) {
  call_on(stream, "cuMemcpyAsync", [&] {
    return driver().cuMemcpyAsync(pointer(to), pointer(from), static_cast<size_t>(num_bytes),
                                  static_cast<CUstream>(stream));
  });
}

void fill(void* memory, uint8_t value, int64_t num_bytes, void* stream) {
  call_on(stream, "cuMemsetD8Async", [&] {
    return driver().cuMemsetD8Async(pointer(memory), value, static_cast<size_t>(num_bytes),
                                    static_cast<CUstream>(stream));
  });
}

void set(void* to, const void* value, int64_t num_bytes, void* stream) {
  const auto* const bytes = static_cast<const uint8_t*>(value);
  auto* const target = static_cast<uint8_t*>(to);
  int64_t i = 0;
  for (; i + 4 <= num_bytes; i += 4) {
    unsigned word = 0;
    std::memcpy(&word, bytes + i, sizeof word);
    call_on(stream, "cuMemsetD32Async", [&] {
      return driver().cuMemsetD32Async(pointer(target + i), word, 1, static_cast<CUstream>(stream));
    });
  }
  for (; i < num_bytes; ++i) fill(target + i, bytes[i], 1, stream);
}

void synchronize(void* stream) {
  call_on(stream, "cuStreamSynchronize",
          [&] { return driver().cuStreamSynchronize(static_cast<CUstream>(stream)); });
}

}  // namespace halfbyte::cuda
