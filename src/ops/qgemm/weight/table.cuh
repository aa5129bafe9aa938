// 4-bit codes as 16-bit values, two at a time, by lookup in shared memory: sm_90.
//
// The table has a row of 256 bytes for each byte of codes: 32 copies of the pair of values, a word a lane, so
// that no two lanes meet in a bank; the other half of a row is not used. The address of a pair is then made
// by one byte permute: the byte of codes becomes bits 8-15, the lane's word bits 0-7.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/types.cuh"
#include "ops/qgemm/weight/weight_args.h"

namespace halfbyte::device {

__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// The pairs of values of a word of codes without the table, which takes longer. Four codes at a time choose
// bytes from the first and the last eight values, and their upper bits between these.
__device__ __forceinline__ void compute_pairs(u32 (&pairs)[4], u32 word, const CodeValuesArgs& values) {
  const u32 choices = word & 0x77777777u, moved = word << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 choice = i == 0 ? choices : choices >> 16;
    // 255 where a code is 8 and more: the sign of each byte of `moved` and `word`.
    const u32 last = permute_bytes(moved, word, i == 0 ? 0xD9C8 : 0xFBEA);
    const u32 low_first = permute_bytes(values.low[0], values.low[1], choice),
              low_last = permute_bytes(values.low[2], values.low[3], choice),
              high_first = permute_bytes(values.high[0], values.high[1], choice),
              high_last = permute_bytes(values.high[2], values.high[3], choice);
    const u32 low = (last & low_last) | (~last & low_first), high = (last & high_last) | (~last & high_first);
    pairs[2 * i] = permute_bytes(low, high, 0x5140);
    pairs[2 * i + 1] = permute_bytes(low, high, 0x7362);
  }
}

#if HALFBYTE_DEVICE_ARCH >= 900

inline constexpr int kPairTableBytes = 65536;
// Where dynamic shared memory begins in a kernel that has no other: its first 1024 bytes are the system's. A
// constant makes the address free: it goes into the load.
inline constexpr u32 kPairTableAddress = 1024;

// Fills the table, which is at kPairTableAddress: kNumThreads threads, then a barrier of the block. `rank`:
// of the block in its cluster, which the top byte of its addresses has. The values are arguments of the
// kernel, operands of instructions as these are: memory that nobody has read yet would take longer.
template <int kNumThreads>
__device__ __forceinline__ void build_pair_table(const CodeValuesArgs& values, int thread, u32 rank = 0) {
  static_assert(512 % kNumThreads == 0);
#pragma unroll
  for (int i = 0; i < 512 / kNumThreads; ++i) {  // 16 bytes of 4 entries each
    const int at = i * kNumThreads + thread, entry = at / 8 * 4;
    u32 pairs[4];
    compute_pairs(pairs, 0x03020100u + static_cast<u32>(entry) * 0x01010101u, values);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      asm volatile("st.shared.v4.u32 [%0+1024], {%1, %1, %1, %1};" ::"r"(
                       rank << 24 | static_cast<u32>((entry + j) * 256 + at % 8 * 16)),
                   "r"(pairs[j])
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

// The same of a byte that the lane chooses: pair_selector(byte).
__device__ __forceinline__ u32 pair_selector(int byte) { return 0x7604u | static_cast<u32>(byte) << 4; }
__device__ __forceinline__ u32 look_up_pair(u32 word, u32 table_lane, u32 selector) {
  u32 address, pair;
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(address) : "r"(word), "r"(table_lane), "r"(selector));
  asm volatile("ld.shared.u32 %0, [%1+1024];" : "=r"(pair) : "r"(address));
  return pair;
}

#endif

}  // namespace halfbyte::device
