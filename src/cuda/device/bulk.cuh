// Barriers in shared memory and the copies that complete on them: sm_90 and later. Before, this header
// declares nothing.
#pragma once

#include "cuda/device/memory.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

// An mbarrier, in shared memory. A phase ends when all expected arrivals came and all announced bytes were
// copied; then the next begins. The first phase has parity 0, the second 1, the third 0.
struct Barrier {
  u64 state;
};

// By one thread; then fence_barrier_init() by it, and a barrier of the block (of the cluster) before others
// use it.
__device__ __forceinline__ void init_barrier(Barrier* barrier, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals)
               : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; what this thread did before is seen by who waits for the phase.
__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// The same, and the phase waits for so many bytes more. Before the copies start.
__device__ __forceinline__ void arrive_expecting(Barrier* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_bytes)
               : "memory");
}
// Returns when the phase of this parity, the current or the one before, has ended.
__device__ __forceinline__ void wait(Barrier* barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!ended);
}

// Between this thread's own accesses of shared memory and those that follow by bulk copies or wgmma: what
// writes shared memory executes it, then a barrier, then one thread starts the copy or the warps multiply.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy from global to this block's shared memory, by one thread; its end counts on `barrier`.
// Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 num_bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
}
// The same of memory that is used once: its lines are the first to leave the second-level cache.
__device__ __forceinline__ void copy_bulk_once(void* to, const void* from, u32 num_bytes, Barrier* barrier) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Starts a copy from shared to global memory, by one thread, after fence_proxy_async() of those who wrote.
__device__ __forceinline__ void store_bulk(void* to, const void* from, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(num_bytes)
               : "memory");
}
// The stores that this thread started since the last commit are one group.
__device__ __forceinline__ void commit_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Returns when no more than the last `kPending` groups of this thread are under way. A block must not end
// before.
template <int kPending>
__device__ __forceinline__ void wait_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

}  // namespace halfbyte::device
