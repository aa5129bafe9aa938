// What NVRTC declares by itself, for clang, which reads kernels to find defects: scripts/check.sh lint. As
// far as src/ uses it; nothing here is ever compiled to code.
#pragma once

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
extern const __device__ uint3 threadIdx, blockIdx, blockDim, gridDim;

using size_t = decltype(sizeof(0));

__device__ void __syncthreads();
__device__ int __syncthreads_or(int predicate);
__device__ void __syncwarp(unsigned mask = 0xffffffffu);
__device__ void __threadfence();
template <class T>
__device__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T>
__device__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32);
template <class T>
__device__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32);
template <class T>
__device__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32);
__device__ int __any_sync(unsigned mask, int predicate);
__device__ int __all_sync(unsigned mask, int predicate);
__device__ unsigned __ballot_sync(unsigned mask, int predicate);
__device__ unsigned __reduce_add_sync(unsigned mask, unsigned value);
__device__ unsigned __byte_perm(unsigned x, unsigned y, unsigned selector);
__device__ int __clz(int x);
__device__ int __ffs(int x);
__device__ int __popc(unsigned x);
__device__ float __uint_as_float(unsigned x);
__device__ float __fadd_rn(float x, float y);
__device__ float __fsub_rn(float x, float y);
__device__ float __fmul_rn(float x, float y);
__device__ float __fmaf_rn(float x, float y, float z);
__device__ float __fsqrt_rn(float x);
__device__ float __frcp_rn(float x);
__device__ double __fma_rn(double x, double y, double z);
__device__ size_t __cvta_generic_to_shared(const void* pointer);
__device__ float fabsf(float x);
__device__ double fabs(double x);
__device__ float fminf(float x, float y);
__device__ double fmin(double x, double y);
__device__ float fmaxf(float x, float y);
__device__ double fmax(double x, double y);
__device__ float sqrtf(float x);
__device__ double sqrt(double x);
__device__ float exp(float x);
__device__ double exp(double x);
template <class T>
__device__ T atomicAdd(T* to, T value);
__device__ unsigned atomicInc(unsigned* to, unsigned last);
__device__ long long clock64();
