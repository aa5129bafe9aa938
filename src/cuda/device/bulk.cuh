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
// The same when all that this thread copied so far by copy_async() has come: it does not wait for that.
// Before what was copied is read by wgmma, those who waited for the phase execute fence_proxy_async().
__device__ __forceinline__ void arrive_when_copied(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
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

// True in one lane of a warp, by all lanes. The compiler knows that it is one: what takes uniform registers,
// as copies do, needs no loop over the lanes.
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected;
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

// `map`: in a __grid_constant__ parameter of the kernel, from matrix_map() (src/cuda/tensor_map.h).
// Starts a copy of the box that begins at (row, col) of the matrix: `to` a multiple of 1024 bytes, rows of
// 128 bytes, swizzled; the box counts whole on `barrier`, zeros beyond the matrix too. By one thread.
__device__ __forceinline__ void load_tile(void* to, const TensorMap* map, int row, int col,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// The same for each block of the cluster whose bit `blocks` has: to where `to` is in its shared memory, and
// counting on what is there at the place of `barrier`.
__device__ __forceinline__ void load_tile_multicast(void* to, const TensorMap* map, int row, int col,
                                                    Barrier* barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}
// Early, by one thread: the map is in the cache of descriptors when it is used.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Of a kernel that was started by launch_early (src/cuda/launch.h), with wait_for_earlier(): the kernel after
// it may start as soon as all blocks have said so or ended.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Clusters. All threads of all its blocks: what they wrote to shared memory, each other's too, is seen
// after the wait.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same, but only of the barriers that one thread initialised, fence_barrier_init() and a barrier of the
// block before: it does not wait for other accesses.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The shared memory of another block of the cluster: the address there of what is at `local` here.
__device__ __forceinline__ u32 shared_address_of(const void* local, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
}
// Arrives at a barrier there, which says that memory may be overwritten. Ordered as arrive() is, within a
// block: a release to the cluster would take much longer.
__device__ __forceinline__ void arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float load_cluster(u32 address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
// Two values, to an address that is a multiple of 8.
__device__ __forceinline__ void store_cluster(u32 address, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_cluster(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
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
