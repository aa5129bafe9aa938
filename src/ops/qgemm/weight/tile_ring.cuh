// Tiles of a block of experts: what they are is known on the device only, and takes a while to find out. So a
// warp of its own finds them ahead of the others, which take them from a ring in shared memory. sm_90a.
#pragma once

#include "ops/qgemm/weight/ring.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// `Slot`: what a tile is.
template <class Slot, int kSlots>
struct TileRing {
  using Place = RingPlace<kSlots>;
  Slot* slots;
  Barrier* full;  // kSlots, then as many `empty`

  __device__ __forceinline__ TileRing(u8* memory, u8* barriers)
      : slots(reinterpret_cast<Slot*>(memory)), full(reinterpret_cast<Barrier*>(barriers)) {}
  __device__ __forceinline__ void init_barriers(u32 num_takers) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(full + i, 1);
      init_barrier(full + kSlots + i, num_takers);
    }
  }

  // Who finds tiles waits until all takers have released the slot, fills it, and says so.
  __device__ __forceinline__ Slot& wait_empty(const Place& place) const {
    wait(full + kSlots + place.stage, place.parity ^ 1);
    return slots[place.stage];
  }
  __device__ __forceinline__ void say_full(const Place& place) const { arrive(full + place.stage); }
  // Who takes them waits for it, and releases it.
  __device__ __forceinline__ const Slot& wait_full(const Place& place) const {
    wait(full + place.stage, place.parity);
    return slots[place.stage];
  }
  __device__ __forceinline__ void release(const Place& place) const { arrive(full + kSlots + place.stage); }
};

#endif

}  // namespace halfbyte::device
