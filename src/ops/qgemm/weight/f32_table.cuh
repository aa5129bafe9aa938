// 4-bit codes as f32 values, two at a time, by lookup in shared memory: sm_90. As in weight/table.cuh a row
// of 256 bytes for each byte of codes, here of 32 copies of the 8 bytes of a pair, one a lane.
#pragma once

#include "cuda/device/memory.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

// Where dynamic shared memory begins, in which the table comes first: a constant, so that it goes into the
// load.
inline constexpr u32 kFloatTableAddress = 1024;

// values: of the codes. By kNumThreads threads, then a barrier of the block.
template <int kNumThreads>
__device__ __forceinline__ void build_float_table(const float (&values)[16], int thread) {
#pragma unroll
  for (int i = 0; i < (4096 + kNumThreads - 1) / kNumThreads; ++i) {  // 16 bytes each: two copies
    const int at = i * kNumThreads + thread, entry = at / 16;
    if (4096 % kNumThreads != 0 && at >= 4096) break;
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %1, %2};" ::"r"(kFloatTableAddress + at * 16),
                 "f"(values[entry & 15]), "f"(values[entry >> 4])
                 : "memory");
  }
}

// The pair of byte kByte of a word of codes, the low code first. lane_bytes: the lane * 8.
template <int kByte>
__device__ __forceinline__ FloatPair look_up_floats(u32 word, u32 lane_bytes) {
  u32 address;
  FloatPair pair;
  asm volatile("prmt.b32 %0, %1, %2, %3;"
               : "=r"(address)
               : "r"(word), "r"(lane_bytes), "n"(0x7604 | kByte << 4));
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2+1024];" : "=f"(pair.first), "=f"(pair.second) : "r"(address));
  return pair;
}
// The same of a byte that the lane chooses: pair_selector(byte) of weight/table.cuh.
__device__ __forceinline__ FloatPair look_up_floats(u32 word, u32 lane_bytes, u32 selector) {
  u32 address;
  FloatPair pair;
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(address) : "r"(word), "r"(lane_bytes), "r"(selector));
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2+1024];" : "=f"(pair.first), "=f"(pair.second) : "r"(address));
  return pair;
}

#endif

}  // namespace halfbyte::device
