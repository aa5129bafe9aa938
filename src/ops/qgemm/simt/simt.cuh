// What the kernels of variant qgemm_simt share.
#pragma once

#include "ops/qgemm/simt/simt_args.h"
#include "ops/qgemm/weight/finish.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

using F = Select<kF64, double, float>;  // of products and sums

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

__device__ __forceinline__ void let_next_kernel_start() {
#if HALFBYTE_DEVICE_ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace halfbyte::device
