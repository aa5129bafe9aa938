// The matrix instructions of a warpgroup, which is four consecutive warps, the first a multiple of 4: sm_90a
// alone. Elsewhere this header declares nothing.
//
//   fence_proxy_async() by who wrote the tiles with plain stores, and a barrier
//   wgmma_fence(); wgmma(...) ...; wgmma_commit();
//   wgmma_wait<0>(); pin(d);
//
// Between wgmma() and the wait that covers it, neither d nor the registers of a are touched.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/types.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Before the first wgmma(), and after other instructions changed registers that the next ones take: d, or a.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The wgmma() since the last commit are one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Returns when no more than the last `kPending` groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// By all warps of a warpgroup: registers of a thread from here on, a multiple of 8, fewer than before or
// more. take_registers() waits until others have left so many of those that the block started with.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What is computed from the registers afterwards stays after this line, what makes them stays before: the
// compiler does not know that wgmma() goes on behind its back.
template <int n>
__device__ __forceinline__ void pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
__device__ __forceinline__ void pin(u32 (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Tiles of 16-bit elements in shared memory, by PTX ISA, "Shared Memory Matrix Layout", 128-byte swizzle.
// "mn" is the row of A or the column of B. An atom is 8 lines of 128 bytes, at a multiple of 1024 bytes:
//   k-major: a line has 64 k of one mn;  the next 8 mn are stride_bytes on.
//            The next 16 k are 32 bytes on, within the line: the same descriptor of an address 32 bytes on.
//   mn-major: a line has 64 mn of one k; the next 8 k are stride_bytes on, the next 64 mn leading_bytes.
//            N is a multiple of 64. The next 16 k are 2 * stride_bytes on.
enum class Major { k, mn };

// Where the byte that would lie at `offset` lies: the 16-byte chunks of line i of an atom change places by
// xor with i.
HALFBYTE_FN u32 swizzle_128(u32 offset) { return offset ^ (offset >> 7 & 7) << 4; }
// Of lines of 64 bytes: chunks by xor with half the number of the line.
HALFBYTE_FN u32 swizzle_64(u32 offset) { return offset ^ (offset >> 7 & 3) << 4; }

// "Matrix Descriptor Format": bits 0-13 the address, 16-29 the leading, 32-45 the stride dimension byte
// offset, all in 16 bytes; 49-51 base offset 0, as atoms are aligned; 62-63 = 1, the 128-byte swizzle.
__device__ __forceinline__ u64 mn_major_tile(const void* tile, u32 leading_bytes, u32 stride_bytes) {
  return (shared_address(tile) & 0x3FFFF) >> 4 | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | 1ull << 62;
}
// K-major, the leading dimension byte offset is not used: 1, by convention.
__device__ __forceinline__ u64 k_major_tile(const void* tile, u32 stride_bytes) {
  return mn_major_tile(tile, 16, stride_bytes);
}

// d += a * b, or d = a * b where not `accumulate`: a [64 rows][16 k], b [16 k][N columns], N / 2 = the size
// of d: N = 8, 16, 32, 64, 96, 128, 144, 160, 192, 224, 256. Summed as in mma().
//   wgmma<major of b>(type, d, a in registers, tile of b)
//   wgmma<major of a, major of b>(type, d, tile of a, tile of b)
// Who holds what, by PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk16", the figures of the register
// fragment of A and of accumulator D. With w = warp % 4, g = lane / 4, t = lane % 4 and r = 16w + g:
//   a[0] (row r, k 2t, 2t+1)     a[1] (row r+8, k 2t, 2t+1)
//   a[2] (row r, k 2t+8, 2t+9)   a[3] (row r+8, k 2t+8, 2t+9)
//   d[4j] (row r, column 8j+2t)   d[4j+1] (row r, column 8j+2t+1)   d[4j+2], d[4j+3] the same of row r+8
#define HALFBYTE_WGMMA(Type, type, n, registers, operands, i0, i1, i2, i3, i4, i5, i6)                     \
  template <Major kMajorB>                                                                                 \
  __device__ __forceinline__ void wgmma(Type, float(&d)[n / 2], const u32(&a)[4], u64 b,                   \
                                        bool accumulate = true) {                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n     \
                 "k16.f32." type "." type " {" registers "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3         \
                 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}\n"                                                    \
                 : operands(0)                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),  \
                   "n"(static_cast<int>(kMajorB)));                                                        \
  }                                                                                                        \
  template <Major kMajorA, Major kMajorB>                                                                  \
  __device__ __forceinline__ void wgmma(Type, float(&d)[n / 2], u64 a, u64 b, bool accumulate = true) {    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n     \
                 "k16.f32." type "." type " {" registers "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 \
                 ";\n}\n"                                                                                  \
                 : operands(0)                                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)),      \
                   "n"(static_cast<int>(kMajorB)));                                                        \
  }
// The registers of d are operands 0 and up, the rest follows them.
#define HALFBYTE_TEN(i) \
  "%" i "0, %" i "1, %" i "2, %" i "3, %" i "4, %" i "5, %" i "6, %" i "7, %" i "8, %" i "9, "
#define HALFBYTE_TENS_TO_60 \
  HALFBYTE_TEN("") HALFBYTE_TEN("1") HALFBYTE_TEN("2") HALFBYTE_TEN("3") HALFBYTE_TEN("4") HALFBYTE_TEN("5")
#define HALFBYTE_TENS_TO_90 HALFBYTE_TENS_TO_60 HALFBYTE_TEN("6") HALFBYTE_TEN("7") HALFBYTE_TEN("8")
#define HALFBYTE_TENS_TO_120 HALFBYTE_TENS_TO_90 HALFBYTE_TEN("9") HALFBYTE_TEN("10") HALFBYTE_TEN("11")
#define HALFBYTE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HALFBYTE_D8(i) HALFBYTE_D4(i), HALFBYTE_D4(i + 4)
#define HALFBYTE_D16(i) HALFBYTE_D8(i), HALFBYTE_D8(i + 8)
#define HALFBYTE_D24(i) HALFBYTE_D16(i), HALFBYTE_D8(i + 16)
#define HALFBYTE_D32(i) HALFBYTE_D16(i), HALFBYTE_D16(i + 16)
#define HALFBYTE_D40(i) HALFBYTE_D32(i), HALFBYTE_D8(i + 32)
#define HALFBYTE_D48(i) HALFBYTE_D32(i), HALFBYTE_D16(i + 32)
#define HALFBYTE_D56(i) HALFBYTE_D48(i), HALFBYTE_D8(i + 48)
#define HALFBYTE_D64(i) HALFBYTE_D32(i), HALFBYTE_D32(i + 32)
#define HALFBYTE_D72(i) HALFBYTE_D64(i), HALFBYTE_D8(i + 64)
#define HALFBYTE_D80(i) HALFBYTE_D64(i), HALFBYTE_D16(i + 64)
#define HALFBYTE_D96(i) HALFBYTE_D64(i), HALFBYTE_D32(i + 64)
#define HALFBYTE_D112(i) HALFBYTE_D96(i), HALFBYTE_D16(i + 96)
#define HALFBYTE_D128(i) HALFBYTE_D64(i), HALFBYTE_D64(i + 64)
#define HALFBYTE_WGMMA_OF(Type, type)                                                                       \
  HALFBYTE_WGMMA(Type, type, 8, "%0, %1, %2, %3", HALFBYTE_D4, 4, 5, 6, 7, 8, 9, 10)                        \
  HALFBYTE_WGMMA(Type, type, 16, "%0, %1, %2, %3, %4, %5, %6, %7", HALFBYTE_D8, 8, 9, 10, 11, 12, 13, 14)   \
  HALFBYTE_WGMMA(Type, type, 32, HALFBYTE_TEN("") "%10, %11, %12, %13, %14, %15", HALFBYTE_D16, 16, 17, 18, \
                 19, 20, 21, 22)                                                                            \
  HALFBYTE_WGMMA(Type, type, 48, HALFBYTE_TEN("") HALFBYTE_TEN("1") "%20, %21, %22, %23", HALFBYTE_D24, 24, \
                 25, 26, 27, 28, 29, 30)                                                                    \
  HALFBYTE_WGMMA(Type, type, 64, HALFBYTE_TEN("") HALFBYTE_TEN("1") HALFBYTE_TEN("2") "%30, %31",           \
                 HALFBYTE_D32, 32, 33, 34, 35, 36, 37, 38)                                                  \
  HALFBYTE_WGMMA(Type, type, 80,                                                                            \
                 HALFBYTE_TEN("") HALFBYTE_TEN("1")                                                         \
                     HALFBYTE_TEN("2") "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39",                  \
                 HALFBYTE_D40, 40, 41, 42, 43, 44, 45, 46)                                                  \
  HALFBYTE_WGMMA(Type, type, 96,                                                                            \
                 HALFBYTE_TEN("") HALFBYTE_TEN("1") HALFBYTE_TEN("2")                                       \
                     HALFBYTE_TEN("3") "%40, %41, %42, %43, %44, %45, %46, %47",                            \
                 HALFBYTE_D48, 48, 49, 50, 51, 52, 53, 54)                                                  \
  HALFBYTE_WGMMA(Type, type, 112,                                                                           \
                 HALFBYTE_TEN("") HALFBYTE_TEN("1") HALFBYTE_TEN("2") HALFBYTE_TEN("3")                     \
                     HALFBYTE_TEN("4") "%50, %51, %52, %53, %54, %55",                                      \
                 HALFBYTE_D56, 56, 57, 58, 59, 60, 61, 62)                                                  \
  HALFBYTE_WGMMA(Type, type, 128, HALFBYTE_TENS_TO_60 "%60, %61, %62, %63", HALFBYTE_D64, 64, 65, 66, 67,   \
                 68, 69, 70)                                                                                \
  HALFBYTE_WGMMA(Type, type, 144, HALFBYTE_TENS_TO_60 HALFBYTE_TEN("6") "%70, %71", HALFBYTE_D72, 72, 73,   \
                 74, 75, 76, 77, 78)                                                                        \
  HALFBYTE_WGMMA(Type, type, 160,                                                                           \
                 HALFBYTE_TENS_TO_60 HALFBYTE_TEN("6") "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",  \
                 HALFBYTE_D80, 80, 81, 82, 83, 84, 85, 86)                                                  \
  HALFBYTE_WGMMA(Type, type, 192, HALFBYTE_TENS_TO_90 "%90, %91, %92, %93, %94, %95", HALFBYTE_D96, 96, 97, \
                 98, 99, 100, 101, 102)                                                                     \
  HALFBYTE_WGMMA(Type, type, 224, HALFBYTE_TENS_TO_90 HALFBYTE_TEN("9") HALFBYTE_TEN("10") "%110, %111",    \
                 HALFBYTE_D112, 112, 113, 114, 115, 116, 117, 118)                                          \
  HALFBYTE_WGMMA(Type, type, 256, HALFBYTE_TENS_TO_120 "%120, %121, %122, %123, %124, %125, %126, %127",    \
                 HALFBYTE_D128, 128, 129, 130, 131, 132, 133, 134)
HALFBYTE_WGMMA_OF(F16, "f16")
HALFBYTE_WGMMA_OF(BF16, "bf16")
#undef HALFBYTE_WGMMA
#undef HALFBYTE_TEN
#undef HALFBYTE_TENS_TO_60
#undef HALFBYTE_TENS_TO_90
#undef HALFBYTE_TENS_TO_120
#undef HALFBYTE_D4
#undef HALFBYTE_D8
#undef HALFBYTE_D16
#undef HALFBYTE_D24
#undef HALFBYTE_D32
#undef HALFBYTE_D40
#undef HALFBYTE_D48
#undef HALFBYTE_D56
#undef HALFBYTE_D64
#undef HALFBYTE_D72
#undef HALFBYTE_D80
#undef HALFBYTE_D96
#undef HALFBYTE_D112
#undef HALFBYTE_D128
#undef HALFBYTE_WGMMA_OF

#endif

}  // namespace halfbyte::device
