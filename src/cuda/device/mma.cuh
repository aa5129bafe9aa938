// The matrix instructions of a warp: sm_80 and later. On sm_75 this header declares nothing.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// d += a * b: a [16 rows][16 k], b [16 k][8 columns], d [16 rows][8 columns]. Products are exact; they are
// summed with at least the precision of f32, in an order and with a rounding that PTX leaves open. Who holds
// what, by PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", the figures of the .f16 /
// .bf16 fragments of A and B and of the fragment of C and D. With g = lane / 4 and t = lane % 4, and two
// elements in a word, the first in its low half:
//   a[0] (row g, k 2t, 2t+1)     a[1] (row g+8, k 2t, 2t+1)
//   a[2] (row g, k 2t+8, 2t+9)   a[3] (row g+8, k 2t+8, 2t+9)
//   b[0] (k 2t, 2t+1, column g)   b[1] (k 2t+8, 2t+9, column g)
//   d[0], d[1] (row g, columns 2t, 2t+1)   d[2], d[3] (row g+8, columns 2t, 2t+1)
__device__ __forceinline__ void mma(F16, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(BF16, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x rounded to the nearest tf32, ties away from zero.
__device__ __forceinline__ float to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return bit_cast<float>(y);
}
// The same with 8 k of tf32 values, by the figures of mma.m16n8k8 with .tf32:
//   a[0] (row g, k t)   a[1] (row g+8, k t)   a[2] (row g, k t+4)   a[3] (row g+8, k t+4)
//   b[0] (k t, column g)   b[1] (k t+4, column g)   d as above
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(bit_cast<u32>(a[0])), "r"(bit_cast<u32>(a[1])), "r"(bit_cast<u32>(a[2])),
        "r"(bit_cast<u32>(a[3])), "r"(bit_cast<u32>(b[0])), "r"(bit_cast<u32>(b[1])));
}

// Four matrices [8][8] of 16 bits from shared memory: lane l names row l % 8 of matrix l / 8, 16 bytes,
// aligned. By PTX ISA, "ldmatrix", the figure of the fragment for one 8x8 matrix, m[i] of a lane then holds
// row g, columns 2t and 2t+1 of matrix i; transposed, rows 2t and 2t+1 of column g. So, a row-major, its
// quarters in the order (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15) are
// the a of mma(); two matrices (columns 0-7, k 0-7), (columns 0-7, k 8-15) of a b stored [column][k] are its
// b, and so are, transposed, (k 0-7, columns 0-7), (k 8-15, columns 0-7) of a b stored [k][column].
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 row) {  // an address of shared memory
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const void* row) {
  load_matrices(m, shared_address(row));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

#endif

}  // namespace halfbyte::device
