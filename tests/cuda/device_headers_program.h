// Kernels that use every function of src/cuda/device/mma.cuh, bulk.cuh and wgmma.cuh, and their compilation.
#pragma once

#include <string>
#include <vector>

#include "cuda/embedded.h"
#include "cuda/jit.h"
#include "cuda/nvrtc.h"

namespace halfbyte::testing {

// What every kernel takes: pointers of the device.
struct DeviceHeadersArgs {
  const void *a, *b;
  void* d;
};

// Which kernels a target has: mma_* and load_matrices from sm_80 on, copy from sm_90 on, wgmma_* on sm_90a
// alone.
inline constexpr const char* kDeviceHeadersProgram = R"(
#include "cuda/device/bulk.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/wgmma.cuh"

using namespace halfbyte::device;

struct Args {
  const void *a, *b;
  void* d;
};

__device__ u32 pair_at(const void* x, int index) { return *reinterpret_cast<const u32*>(static_cast<const u16*>(x) + index); }

#if HALFBYTE_DEVICE_ARCH >= 800
// d [16][8] += a [16][16] * (b [8][16])^T.
template <class Type>
__device__ void multiply_by_warp(const Args& args) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float* d = static_cast<float*>(args.d);
  u32 a[4], b[2];
  float c[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = pair_at(args.a, (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8);
    c[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  }
  for (int i = 0; i < 2; ++i) b[i] = pair_at(args.b, g * 16 + 2 * t + i * 8);
  mma(Type(), c, a, b);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}
extern "C" __global__ void mma_f16(const Args args) { multiply_by_warp<F16>(args); }
extern "C" __global__ void mma_bf16(const Args args) { multiply_by_warp<BF16>(args); }

// d [2][32 lanes][4]: four matrices [8][8] of a, as they are and transposed.
extern "C" __global__ void load_matrices(const Args args) {
  __shared__ Words4 rows[32];
  const int lane = threadIdx.x;
  rows[lane] = static_cast<const Words4*>(args.a)[lane];
  __syncthreads();
  u32* d = static_cast<u32*>(args.d);
  u32 m[4];
  load_matrices(m, &rows[lane]);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = m[i];
  load_matrices_transposed(m, &rows[lane]);
  for (int i = 0; i < 4; ++i) d[(32 + lane) * 4 + i] = m[i];
}
#endif

#if HALFBYTE_DEVICE_ARCH >= 900
// d [3][1024] = the words of a [3][1024] plus 1, by 128 threads through one buffer; even and odd halves of each
// 4 KiB come by different copies.
extern "C" __global__ void copy(const Args args) {
  constexpr int kThreads = 128, kWords = 1024;
  __shared__ alignas(16) u32 buffer[kWords];
  __shared__ Barrier full, empty;
  if (threadIdx.x == 0) {
    init_barrier(&full, 1);
    init_barrier(&empty, kThreads);
    fence_barrier_init();
  }
  __syncthreads();
  for (u32 round = 0; round < 3; ++round) {
    if (threadIdx.x == 0) {
      if (round > 0) wait(&empty, (round - 1) & 1);
      const u32* from = static_cast<const u32*>(args.a) + round * kWords;
      arrive_expecting(&full, sizeof(buffer));
      copy_bulk(buffer, from, sizeof(buffer) / 2, &full);
      copy_bulk_once(buffer + kWords / 2, from + kWords / 2, sizeof(buffer) / 2, &full);
    }
    wait(&full, round & 1);
    for (int i = threadIdx.x; i < kWords; i += kThreads) ++buffer[i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      store_bulk(static_cast<u32*>(args.d) + round * kWords, buffer, sizeof(buffer));
      commit_bulk_stores();
      wait_bulk_stores<0>();
    }
    arrive(&empty);
  }
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kK = 64;

// Where element (mn, k) of a tile of kK k lies, in bytes, and the descriptor of its k16 step.
template <Major major>
__device__ u32 place(u32 mn, u32 k) {
  return swizzle_128(major == Major::k ? mn * 128 + k * 2 : mn / 64 * 8192 + k * 128 + mn % 64 * 2);
}
template <Major major>
__device__ u64 tile_at(const u8* tile, int step) {
  return major == Major::k ? k_major_tile(tile + step * 32, 1024) : mn_major_tile(tile + step * 2048, 8192, 1024);
}

// x [mn][kK] in global memory to a tile.
template <Major major>
__device__ void load_tile(u8* tile, const void* x, int num_mn) {
  for (int i = threadIdx.x; i < num_mn * kK; i += 128)
    *reinterpret_cast<u16*>(tile + place<major>(i / kK, i % kK)) = static_cast<const u16*>(x)[i];
}

// d [64][n] = a [64][kK] * (b [n][kK])^T with a in registers; d += ... with a in shared memory.
template <class Type, int n, bool kARegisters, Major kMajorA, Major kMajorB>
__device__ void multiply_by_warpgroup(const Args& args) {
  __shared__ alignas(1024) u8 a_tile[64 * kK * 2], b_tile[n * kK * 2];
  const int row = threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16, t = threadIdx.x % 4;
  float* to = static_cast<float*>(args.d);
  load_tile<kMajorB>(b_tile, args.b, n);
  if (!kARegisters) load_tile<kMajorA>(a_tile, args.a, 64);
  fence_proxy_async();
  __syncthreads();
  float d[n / 2];
  u32 a[kK / 16][4];
#pragma unroll
  for (int i = 0; i < n / 2; ++i) d[i] = to[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + 2 * t + i % 2];
  pin(d);
  if constexpr (kARegisters) {
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = pair_at(args.a, (row + i % 2 * 8) * kK + step * 16 + 2 * t + i / 2 * 8);
      pin(a[step]);
    }
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    if constexpr (kARegisters)
      wgmma<kMajorB>(Type(), d, a[step], tile_at<kMajorB>(b_tile, step), step > 0);
    else
      wgmma<kMajorA, kMajorB>(Type(), d, tile_at<kMajorA>(a_tile, step), tile_at<kMajorB>(b_tile, step));
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
#pragma unroll
  for (int i = 0; i < n / 2; ++i) to[(row + i / 2 % 2 * 8) * n + i / 4 * 8 + 2 * t + i % 2] = d[i];
}

#define KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(128) name(const Args args) { multiply_by_warpgroup<__VA_ARGS__>(args); }
#define KERNELS(n, type, Type)                                                      \
  KERNEL(wgmma_rs_##type##_##n##_k, Type, n, true, Major::k, Major::k)              \
  KERNEL(wgmma_ss_##type##_##n##_k_k, Type, n, false, Major::k, Major::k)           \
  KERNEL(wgmma_ss_##type##_##n##_mn_k, Type, n, false, Major::mn, Major::k)
#define KERNELS_MN(n, type, Type)                                                   \
  KERNELS(n, type, Type)                                                            \
  KERNEL(wgmma_rs_##type##_##n##_mn, Type, n, true, Major::k, Major::mn)            \
  KERNEL(wgmma_ss_##type##_##n##_k_mn, Type, n, false, Major::k, Major::mn)         \
  KERNEL(wgmma_ss_##type##_##n##_mn_mn, Type, n, false, Major::mn, Major::mn)
#define KERNELS_OF(type, Type)                                                      \
  KERNELS(8, type, Type)                                                            \
  KERNELS(16, type, Type)                                                           \
  KERNELS(32, type, Type)                                                           \
  KERNELS_MN(64, type, Type)                                                        \
  KERNELS_MN(128, type, Type)                                                       \
  KERNELS_MN(256, type, Type)
KERNELS_OF(f16, F16)
KERNELS_OF(bf16, BF16)
#endif
)";

// For "sm_90a", with the log of ptxas. The cubin is empty where it does not compile.
inline cuda::Compilation compile_device_headers(const std::string& target) {
  const cuda::Nvrtc& nvrtc = cuda::nvrtc();
  std::vector<const char*> names, texts;
  for (const cuda::EmbeddedFile& file : cuda::embedded_files()) {
    names.push_back(file.name);
    texts.push_back(file.text.data());
  }
  cuda::Compilation compilation;
  cuda::nvrtcProgram program = nullptr;
  if (nvrtc.nvrtcCreateProgram(&program, kDeviceHeadersProgram, "device_headers.cu",
                               static_cast<int>(names.size()), texts.data(), names.data()) != 0)
    return compilation;
  const std::string architecture = "--gpu-architecture=" + target;
  const std::vector<const char*> options = {architecture.c_str(), "--std=c++20", "--fmad=false",
                                            "-default-device", "--ptxas-options=-v"};
  const bool ok = nvrtc.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data()) == 0;
  size_t num_bytes = 0;
  if (nvrtc.nvrtcGetProgramLogSize(program, &num_bytes) == 0 && num_bytes > 1) {
    compilation.log.resize(num_bytes);  // with a 0 byte at its end
    nvrtc.nvrtcGetProgramLog(program, compilation.log.data());
    compilation.log.pop_back();
  }
  if (ok && nvrtc.nvrtcGetCUBINSize(program, &num_bytes) == 0) {
    compilation.code.resize(num_bytes);
    nvrtc.nvrtcGetCUBIN(program, compilation.code.data());
  }
  nvrtc.nvrtcDestroyProgram(&program);
  return compilation;
}

}  // namespace halfbyte::testing
