// The kernels of measurements.
#pragma once

#include <vector>

#include "cuda/kernel.h"

namespace halfbyte {

std::vector<cuda::Kernel> benchmark_kernels();

cuda::KernelSpec read_blocks_kernel(int threads, int loads);
cuda::KernelSpec read_bulk_kernel(int stages, int stage_bytes);
cuda::KernelSpec move_blocks_kernel(int64_t reads, int64_t writes, bool stream);
cuda::KernelSpec delay_kernel();

}  // namespace halfbyte
