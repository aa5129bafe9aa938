// What the kernels of variant qgemm_simt share: the type of sums, and the last step of an output.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/qgemm/simt/simt_args.h"

namespace halfbyte::device {

using F = Select<kF64, double, float>;  // of products and sums
using Memory = Element::Memory;

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

__device__ __forceinline__ void let_next_kernel_start() {
#if HALFBYTE_DEVICE_ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float rounded(F32, double x) { return static_cast<float>(x); }
__device__ __forceinline__ u16 rounded(F16, double x) { return to_f16(x); }
__device__ __forceinline__ u16 rounded(BF16, double x) { return to_bf16(x); }

// An output, once its products are summed.
__device__ __forceinline__ void write_sum(const SimtArgs& args, i64 m, i64 col, F sum) {
  Memory& y = static_cast<Memory*>(args.y)[m * args.out_cols + col];
  double total = static_cast<double>(sum);
  if (args.bias != nullptr)
    total += static_cast<double>(load(Element(), static_cast<const Memory*>(args.bias)[col]));
  if (args.accumulate) total += static_cast<double>(load(Element(), y));
  y = rounded(Element(), total);
}

}  // namespace halfbyte::device
