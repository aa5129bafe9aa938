// Loads and stores of global memory that is used once, and atomics.
#pragma once

#include "formats/common.h"

namespace halfbyte::device {

using namespace formats;

// The number of this block: launch() folds grids of 2^31 blocks and more, and then some blocks have no work.
__device__ __forceinline__ i64 block_index() { return blockIdx.x + static_cast<i64>(blockIdx.y) * gridDim.x; }

struct alignas(16) Words4 {
  u32 word[4];
};
// Two neighbours.
struct alignas(8) FloatPair {
  float first, second;
};

// 16 bytes, aligned, past the first-level cache.
__device__ __forceinline__ Words4 load_once(const Words4* from) {
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from));
  return v;
}
// The same of memory that this thread will write.
__device__ __forceinline__ Words4 load_to_write(const Words4* from) {
  Words4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ u32 load_once(const u32* from) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ u64 load_once(const u64* from) {
  u64 v;
  asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(from));
  return v;
}
// Keeps its place before the loads that follow, so that it is there when they are done.
__device__ __forceinline__ float load_early(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ double load_early(const double* from) {
  double v;
  asm volatile("ld.global.f64 %0, [%1];" : "=d"(v) : "l"(from));
  return v;
}
// Of a table that all threads read: it stays in the caches. Keeps its place before the loads that follow.
__device__ __forceinline__ u32 load_table(const u32* from) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
// 4 bytes, or 2 in the low half, without a branch.
__device__ __forceinline__ u32 load_half_or_word(const void* from, bool word) {
  u32 v;
  asm volatile(
      "{ .reg .pred word;\n"
      "  setp.ne.u32 word, %2, 0;\n"
      "  @word ld.global.u32 %0, [%1];\n"
      "  @!word ld.global.u16 %0, [%1]; }"
      : "=r"(v)
      : "l"(from), "r"(word ? 1u : 0u));
  return v;
}
// Written lines are the first to leave the second-level cache.
__device__ __forceinline__ void store_once(Words4* to, const Words4& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// A flag of the device. Who loads what was stored sees what the thread that stored it wrote before, and what
// that one had seen.
__device__ __forceinline__ void store_release(u32* to, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ u32 load_acquire(const u32* from) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
#if __CUDA_ARCH__ == 900
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#else  // where the other takes registers that quantize_groups does not have
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return static_cast<u32>(address);
#endif
}

// Copies 16 bytes from global to shared memory, past the registers and the first-level cache; they are there
// for this thread after wait_copies().
__device__ __forceinline__ void copy_async(Words4* to, const Words4* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  *to = load_once(from);
#endif
}
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#if HALFBYTE_DEVICE_ARCH >= 800
// As copy_async; zeros where not `valid`, and `from` is not read. `to`: an address of shared memory.
__device__ __forceinline__ void copy_async_or_zero(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool valid) {
  copy_async_or_zero(shared_address(to), from, valid);
}
// 4 bytes.
__device__ __forceinline__ void copy_async(u32* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// The copies that this thread started since the last commit are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when no more than the last `kPending` groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

// Of a kernel that may have started early (src/cuda/clear.h): until the kernels before it have ended.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of a workspace, once it is zero.
__device__ __forceinline__ void atomic_add(u64* to, u64 value) {
  wait_for_earlier();
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void atomic_max(u64* to, u64 value) {
  wait_for_earlier();
  asm volatile("red.global.max.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void shared_atomic_max(u32* to, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
}
__device__ __forceinline__ void shared_atomic_max(u64* to, u64 value) {
  asm volatile("red.shared.max.u64 [%0], %1;" ::"r"(shared_address(to)), "l"(value) : "memory");
}

}  // namespace halfbyte::device
