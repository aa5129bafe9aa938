// Sums of parts: what warps and the blocks of a cluster give each other, to be added in a fixed order. sm_90.
#pragma once

#include "cuda/device/bulk.cuh"
#include "ops/qgemm/weight/table.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

// Shared memory begins with the table of pairs, which uses half of each of its rows of 256 bytes. Lines of
// 128 bytes of sums lie in the other halves; without a table (codes of 8 bits) they lie one behind the other.
constexpr int kScratchStride = kBits == 4 ? 256 : 128;
constexpr u32 kScratchAddress = kBits == 4 ? kPairTableAddress + 128 : kPairTableAddress;

// Word `lane` of a line; `rank`: of the block in its cluster, as for build_pair_table().
__device__ __forceinline__ u32 scratch_address(int line, int lane, u32 rank) {
  return (rank << 24) + kScratchAddress + static_cast<u32>(line * kScratchStride + lane * 4);
}
__device__ __forceinline__ void store_shared(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

// ---- The other blocks of a cluster.
// The address in the block `rank` of the cluster of what is at `address` here.
__device__ __forceinline__ u32 address_in(u32 rank, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Starts a store to a block of the cluster, whose 4 bytes count on `barrier` of that block: addresses by
// address_in().
__device__ __forceinline__ void store_async(u32 address, float v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(bit_cast<u32>(v)), "r"(barrier)
      : "memory");
}
// As arrive() and wait(), of what is done for or by another block of the cluster.
__device__ __forceinline__ void arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_cluster(Barrier* barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!ended);
}

#endif

}  // namespace halfbyte::device
