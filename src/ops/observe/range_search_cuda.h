// The CUDA side of percentile and mse ranges.
#pragma once

#include <variant>
#include <vector>

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "ops/observe/range_search.h"

namespace halfbyte {

// Kernels in order, each behind the one before: the ranges of the finite values become those of the observer.
struct RangeSearchCuda {
  struct Launch {
    cuda::CUfunction function = nullptr;
    cuda::Grid grid;
    // But for addresses.
    std::variant<PercentileGroupsArgs, PercentileCountsArgs, MseGroupsArgs, MseErrorsArgs> args;
  };
  std::vector<Launch> launches;
  // Memory of the device that a run needs, at a multiple of 16, all 0 before: states of groups, then counts
  // or errors.
  int64_t scratch_bytes = 0, second_at = 0;
};
// For a problem that needs_search(), in the scope of its device.
RangeSearchCuda select_range_search(const cuda::Context& context, const ObserveProblem& problem);
// Enqueues. `ranges`: of the finite values.
void run_range_search(const RangeSearchCuda& search, const void* x, RangeKeys* ranges, void* scratch,
                      void* stream);

// team_warps: 1 or 8, that share a group.
cuda::KernelSpec percentile_groups_kernel(DType dtype, int team_warps);
cuda::KernelSpec percentile_blocks_kernel(DType dtype);
// wide: a group has 2^31 elements and more.
cuda::KernelSpec percentile_counts_kernel(DType dtype, bool wide);
cuda::KernelSpec percentile_pick_kernel(DType dtype);
cuda::KernelSpec mse_groups_kernel(DType dtype, int team_warps);
cuda::KernelSpec mse_errors_kernel(DType dtype);
cuda::KernelSpec mse_pick_kernel(DType dtype);

// The kernels, listed.
std::vector<cuda::Kernel> range_search_kernels();

}  // namespace halfbyte
