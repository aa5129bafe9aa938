// A ring of stages in shared memory, which the last warpgroup of a block keeps full while the others multiply
// what it holds: sm_90a.
//
// Barrier `full` of a stage ends a phase when what is copied to it has come, barrier `empty` when all warps
// that multiply are done with it. One lane of the first warp that copies brings codes, one of the second x:
// codes do not depend on the kernels before, x may.
#pragma once

#include "cuda/device/wgmma.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A stage of the ring, and the parity of the phase of its barriers. Who fills the ring waits for phases of
// `empty` that came before: of the other parity.
template <int kStages>
struct RingPlace {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance(int by = 1) {  // at most kStages
    stage += by;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
};

// Operand B in the stages of a ring: k-major tiles (wgmma.cuh), of which the address alone differs, which
// does not carry into the upper half of a descriptor.
struct RingTile {
  u64 first;
  // So many times 16 bytes behind the first one.
  __device__ __forceinline__ u64 at(int chunks) const {
    return (first >> 32) << 32 | (static_cast<u32>(first) + static_cast<u32>(chunks));
  }
};

// Registers of a thread of a block with kWarpgroups that multiply and one that copies. All begin with as many
// as the multiprocessor has for so many threads, in steps of 8; those that copy keep what their loops take,
// and the others get the rest.
template <int kWarpgroups, int kCopyRegisters = kWarpgroups == 2 ? 40 : 32>
struct DealtRegisters {
  static constexpr int kAtFirst = 65536 / ((kWarpgroups + 1) * 128) / 8 * 8;
  static constexpr int kCopy = kCopyRegisters;
  static constexpr int kMultiply = ((kWarpgroups + 1) * kAtFirst - kCopy) / kWarpgroups / 8 * 8;
};

// Barriers of some warps of the block, by number (1 to 15; 0 is that of __syncthreads()).
__device__ __forceinline__ void sync_some(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void arrive_some(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Not 0, which is that of a cluster, too, where the block is the only one.
constexpr int kRingBarrier = 14;

// How a block with such a ring starts, by all threads. `copier`: the warp's number among those that do not
// multiply. The kCopiers that use barriers make them, one lane of each its share, by init_barriers(). The
// second copies x. Those that multiply, of a number below 0, have much to do before they wait for it, by
// wait_for_ring().
template <int kMultipliers, int kCopiers, class F>
__device__ __forceinline__ void start_ring(int copier, const TensorMap* x, const F& init_barriers) {
  constexpr int kMadeForCopiers = 15;
  if (copier < 0 || copier >= kCopiers) return;
  if (elect_lane()) {
    init_barriers();
    fence_barrier_init();
    if (copier == 1) prefetch_map(x);
  }
  __syncwarp();
  arrive_some(kRingBarrier, kMultipliers + kCopiers * 32);
  sync_some(kMadeForCopiers, kCopiers * 32);
}
template <int kMultipliers, int kCopiers>
__device__ __forceinline__ void wait_for_ring() {
  sync_some(kRingBarrier, kMultipliers + kCopiers * 32);
}

#endif

}  // namespace halfbyte::device
