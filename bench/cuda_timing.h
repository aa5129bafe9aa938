// How fast kernels are on a CUDA device, against what its memory gives in the same process: timing, kernels
// that only move bytes, data.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "cuda/launch.h"
#include "cuda/nvrtc.h"
#include "formats/convert.h"
#include "halfbyte/device.hpp"

namespace halfbyte::bench {

inline constexpr Device kCuda = {DeviceKind::cuda, 0};
inline constexpr int kSets = 3;  // of buffers that take turns: together several times the second-level cache
inline constexpr int kLaunches = 21;  // between two events
inline constexpr int kRounds = 9;     // of which the median counts
inline constexpr uint8_t kPoison = 0xA5;

// ---- Ceilings: kernels that only move bytes

// Each block reads kReads and writes kWrites words of 16 bytes; all its reads are in flight before the first
// write.
inline constexpr const char* kMoveText = R"(
struct alignas(16) Word { unsigned part[4]; };
struct Args { const Word* from; Word* to; long long num_reads, num_writes; };
inline constexpr int kThreads = 256, kReadsEach = (kReads + kThreads - 1) / kThreads,
              kWritesEach = (kWrites + kThreads - 1) / kThreads;

extern "C" __global__ void __launch_bounds__(kThreads) move(const __grid_constant__ Args args) {
  const int thread = threadIdx.x;
  const long long first_read = static_cast<long long>(blockIdx.x) * kReads,
                  first_write = static_cast<long long>(blockIdx.x) * kWrites;
  Word words[kReadsEach];
#pragma unroll
  for (int i = 0; i < kReadsEach; ++i) {
    const int at = i * kThreads + thread;
    words[i] = {};
    if (at < kReads && first_read + at < args.num_reads)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i].part[0]), "=r"(words[i].part[1]), "=r"(words[i].part[2]), "=r"(words[i].part[3])
                   : "l"(args.from + first_read + at));
  }
  // What is written depends on all that was read.
  if constexpr (kReadsEach > kWritesEach) {
#pragma unroll
    for (int i = kWritesEach; i < kReadsEach; ++i)
      for (int k = 0; k < 4; ++k) words[i % kWritesEach].part[k] ^= words[i].part[k];
  }
#pragma unroll
  for (int i = 0; i < kWritesEach; ++i) {
    const int at = i * kThreads + thread;
    const Word& w = words[i % kReadsEach];
    if (at >= kWrites || first_write + at >= args.num_writes) continue;
    if constexpr (kStream)
      asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(args.to + first_write + at), "r"(w.part[0]),
                   "r"(w.part[1]), "r"(w.part[2]), "r"(w.part[3]) : "memory");
    else
      args.to[first_write + at] = w;
  }
}
)";
// Keeps the device busy while the host enqueues what is timed.
inline constexpr const char* kDelayText = R"(
extern "C" __global__ void delay(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
)";

inline cuda::CUfunction compile(const std::string& text, const char* name) {
  const cuda::Nvrtc& nvrtc = cuda::nvrtc();
  const std::string architecture = "--gpu-architecture=" + cuda::context(kCuda.index).target;
  const char* const options[] = {architecture.c_str(), "--std=c++20", "-default-device"};
  cuda::nvrtcProgram program = nullptr;
  size_t num_bytes = 0;
  if (nvrtc.nvrtcCreateProgram(&program, text.c_str(), "bench.cu", 0, nullptr, nullptr) != 0)
    throw std::runtime_error("nvrtcCreateProgram failed");
  if (nvrtc.nvrtcCompileProgram(program, 3, options) != 0) {
    nvrtc.nvrtcGetProgramLogSize(program, &num_bytes);
    std::string log(num_bytes, '\0');
    nvrtc.nvrtcGetProgramLog(program, log.data());
    throw std::runtime_error(log);
  }
  nvrtc.nvrtcGetCUBINSize(program, &num_bytes);
  std::vector<char> cubin(num_bytes);
  nvrtc.nvrtcGetCUBIN(program, cubin.data());
  nvrtc.nvrtcDestroyProgram(&program);
  cuda::CUmodule module = nullptr;
  cuda::CUfunction function = nullptr;
  cuda::check(cuda::driver().cuModuleLoadData(&module, cubin.data()), "cuModuleLoadData");
  cuda::check(cuda::driver().cuModuleGetFunction(&function, module, name), "cuModuleGetFunction");
  return function;
}

// ---- Timing

class Timer {
 public:
  Timer() : delay_(compile(kDelayText, "delay")) {
    cuda::check(cuda::driver().cuEventCreate(&start_, 0), "cuEventCreate");
    cuda::check(cuda::driver().cuEventCreate(&end_, 0), "cuEventCreate");
  }
  // Microseconds of one launch(i), of many that follow each other; i counts buffer sets.
  double time(const std::function<void(int)>& launch) const {
    const cuda::Driver& cuda = cuda::driver();
    for (int i = 0; i < kSets; ++i) launch(i);
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      cuda::launch(delay_, {1, 1}, nullptr, int64_t{2000000});  // a millisecond
      cuda::check(cuda.cuEventRecord(start_, nullptr), "cuEventRecord");
      for (int i = 0; i < kLaunches; ++i) launch(i % kSets);
      cuda::check(cuda.cuEventRecord(end_, nullptr), "cuEventRecord");
      cuda::check(cuda.cuEventSynchronize(end_), "cuEventSynchronize");
      float milliseconds = 0;
      cuda::check(cuda.cuEventElapsedTime(&milliseconds, start_, end_), "cuEventElapsedTime");
      times.push_back(static_cast<double>(milliseconds) * 1000 / kLaunches);
    }
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    return times[kRounds / 2];
  }

 private:
  cuda::CUfunction delay_;
  cuda::CUevent start_ = nullptr, end_ = nullptr;
};

struct Move {
  const void* from;
  void* to;
};
// Microseconds of the fastest of several kernels that read and write so many bytes.
inline double time_move(const Timer& timer, const std::vector<Move>& sets, int64_t read_bytes,
                        int64_t write_bytes) {
  struct Args {
    const void* from;
    void* to;
    int64_t num_reads, num_writes;
  };
  static std::map<std::tuple<int64_t, int64_t, bool>, cuda::CUfunction> kernels;
  double best = INFINITY;
  for (const int64_t block_bytes : {16384, 32768})
    for (const bool stream : {false, true}) {
      const int64_t num_blocks = (std::max(read_bytes, write_bytes) + block_bytes - 1) / block_bytes;
      const auto words = [&](int64_t bytes) { return (bytes / 16 + num_blocks - 1) / num_blocks; };
      const int64_t reads = words(read_bytes), writes = words(write_bytes);
      cuda::CUfunction& kernel = kernels[{reads, writes, stream}];
      if (!kernel)
        kernel =
            compile(fmt::format("constexpr int kReads = {}, kWrites = {};\nconstexpr bool kStream = {};\n{}",
                                reads, writes, stream, kMoveText),
                    "move");
      best = std::min(best, timer.time([&](int i) {
        const Move& set = sets[static_cast<size_t>(i)];
        cuda::launch(kernel, {num_blocks, 256}, nullptr,
                     Args{set.from, set.to, read_bytes / 16, write_bytes / 16});
      }));
    }
  return best;
}

// ---- Data

// Normal values, 0.02 wide: the tensor repeats them.
inline constexpr int64_t kPool = (int64_t{1} << 22) - 37 * 64;
inline std::vector<uint8_t> make_pool(DType dtype) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  const int64_t size = size_of(dtype);
  std::vector<uint8_t> bytes(static_cast<size_t>(kPool * size));
  for (int64_t i = 0; i < kPool; ++i) {
    const float value = normal(random);
    const uint16_t half = dtype == DType::f16 ? formats::to_f16(value) : formats::to_bf16(value);
    if (dtype == DType::f32)
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}
// The pool, over and over.
inline void fill(const Memory& memory, const std::vector<uint8_t>& pool) {
  auto filled = std::min<int64_t>(static_cast<int64_t>(pool.size()), memory.num_bytes());
  copy(kCuda, memory.data(), pool.data(), filled);
  while (filled < memory.num_bytes()) {
    const int64_t n = std::min(filled, memory.num_bytes() - filled);
    copy(kCuda, memory.data() + filled, memory.data(), n);
    filled += n;
  }
  cuda::synchronize(nullptr);
}
inline void poison(void* memory, int64_t num_bytes) { cuda::fill(memory, kPoison, num_bytes, nullptr); }
inline std::vector<uint8_t> download(const void* memory, int64_t num_bytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  copy(kCuda, bytes.data(), memory, num_bytes);
  cuda::synchronize(nullptr);
  return bytes;
}

}  // namespace halfbyte::bench
