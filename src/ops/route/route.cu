// Slots in the order of their experts. A block reads the experts of all slots, which the L2 holds, counts
// those before its own, and lists its own in the order of their numbers: no atomics, and no other block.
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/route/route_args.h"

namespace halfbyte::device {

constexpr int kWarps = kRouteThreads / 32;

// The expert of a slot; num_experts where it has none.
__device__ __forceinline__ i32 expert_of(const RouteArgs& args, i32 slot) {
  const Expert expert = static_cast<const Expert*>(args.experts)[slot];
  return expert >= 0 && expert < args.num_experts ? static_cast<i32>(expert) : args.num_experts;
}

extern "C" __global__ void __launch_bounds__(kRouteThreads) route(const __grid_constant__ RouteArgs args) {
  __shared__ i32 before[kWarps], own[kWarps];
  const i32 mine = static_cast<i32>(block_index());
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  i32 num_before = 0, num_own = 0;
  for (i32 slot = thread; slot < args.num_slots; slot += kRouteThreads) {
    const i32 expert = expert_of(args, slot);
    num_before += expert < mine ? 1 : 0;
    num_own += expert == mine ? 1 : 0;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    num_before += shuffle_xor(num_before, mask);
    num_own += shuffle_xor(num_own, mask);
  }
  if (lane == 0) {
    before[warp] = num_before;
    own[warp] = num_own;
  }
  __syncthreads();
  i32 next = 0, left = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    next += before[w];
    left += own[w];
  }
  if (thread == 0 && mine < args.num_experts) args.offsets[mine] = next + left;
  if (left == 0) return;

  for (i32 first = 0; first < args.num_slots; first += kRouteThreads) {
    const i32 slot = first + thread;
    const bool is_own = slot < args.num_slots && expert_of(args, slot) == mine;
    const u32 lanes = __ballot_sync(kAllLanes, is_own);
    __syncthreads();  // all have read the counts of the round before
    if (lane == 0) own[warp] = __popc(lanes);
    __syncthreads();
    i32 at = next;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += own[w];
      next += own[w];
    }
    if (is_own) args.slots[at + __popc(lanes & ((1u << lane) - 1))] = slot;
  }
}

}  // namespace halfbyte::device
