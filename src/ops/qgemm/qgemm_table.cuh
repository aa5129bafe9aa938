// 4-bit codes as 16-bit values, two at a time, by lookup in shared memory: sm_90.
//
// The table has a row of 256 bytes for each byte of codes: 32 copies of the pair of values, a word a lane, so
// that no two lanes meet in a bank; the other half of a row is not used. The address of a pair is then made
// by one byte permute: the byte of codes becomes bits 8-15, the lane's word bits 0-7.
#pragma once

#include "cuda/device/bulk.cuh"
#include "ops/qgemm/qgemm_values.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

inline constexpr int kPairTableBytes = 65536;
// Where dynamic shared memory begins in a kernel that has no other: its first 1024 bytes are the system's. A
// constant makes the address free: it goes into the load.
inline constexpr u32 kPairTableAddress = 1024;

// Fills the table, which is at kPairTableAddress: kNumThreads threads, then a barrier of the block. `rank`: of
// the block in its cluster, which the top byte of its addresses has.
template <int kNumThreads>
__device__ __forceinline__ void build_pair_table(int thread, u32 rank = 0) {
#pragma unroll
  for (int i = 0; i < 2048 / kNumThreads; ++i) {  // 16 bytes each
    const int at = i * kNumThreads + thread, entry = at / 8;
    const u32 pair = kCodeValues.values[entry & 15] | static_cast<u32>(kCodeValues.values[entry >> 4]) << 16;
    asm volatile("st.shared.v4.u32 [%0+1024], {%1, %1, %1, %1};" ::"r"(
                     rank << 24 | static_cast<u32>(entry * 256 + at % 8 * 16)),
                 "r"(pair)
                 : "memory");
  }
}

// What makes the addresses of a lane.
__device__ __forceinline__ u32 pair_table_lane(int lane, u32 rank = 0) {
  return rank << 24 | static_cast<u32>(lane * 4);
}

// The pair of values of byte kByte of a word of codes, the low code in the low half.
template <int kByte>
__device__ __forceinline__ u32 look_up_pair(u32 word, u32 table_lane) {
  u32 address, pair;
  asm volatile("prmt.b32 %0, %1, %2, %3;"
               : "=r"(address)
               : "r"(word), "r"(table_lane), "n"(0x7604 | kByte << 4));
  asm volatile("ld.shared.u32 %0, [%1+1024];" : "=r"(pair) : "r"(address));
  return pair;
}

#endif

}  // namespace halfbyte::device
