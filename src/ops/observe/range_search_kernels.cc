// The kernels of percentile and mse ranges, listed.
#include "ops/observe/range_search_cuda.h"

namespace halfbyte {

using cuda::dtype_of;
using cuda::is_set;
using cuda::KernelValues;

namespace {

int team_warps(const KernelValues& values) { return values.at("group") == "warp" ? 1 : kMseWarps; }

}  // namespace

std::vector<cuda::Kernel> range_search_kernels() {
  const KernelKey dtype = cuda::dtype_key("The dtype of x.");
  const KernelKey team = {"group", {"warp", "block"}, false, "What shares a group."};
  return {
      {{"observe", "observe_percentile_groups", "Percentiles of short groups, in one pass.", {dtype, team}},
       [](const KernelValues& values) {
         return percentile_groups_kernel(dtype_of(values), team_warps(values));
       }},
      {{"observe", "observe_percentile_blocks", "Percentiles of many long groups.", {dtype}},
       [](const KernelValues& values) { return percentile_blocks_kernel(dtype_of(values)); }},
      {{"observe",
        "observe_percentile_counts",
        "Percentiles of few long groups: a byte of their keys.",
        {dtype, cuda::flag_key("wide", "A group has 2^31 elements and more.")}},
       [](const KernelValues& values) {
         return percentile_counts_kernel(dtype_of(values), is_set(values, "wide"));
       }},
      {{"observe",
        "observe_percentile_pick",
        "Percentiles of few long groups: what the counts of a byte say.",
        {dtype}},
       [](const KernelValues& values) { return percentile_pick_kernel(dtype_of(values)); }},
      {{"observe", "observe_mse_groups", "Ranges of least error.", {dtype, team}},
       [](const KernelValues& values) { return mse_groups_kernel(dtype_of(values), team_warps(values)); }},
      {{"observe", "observe_mse_errors", "Errors of candidates, of few long groups.", {dtype}},
       [](const KernelValues& values) { return mse_errors_kernel(dtype_of(values)); }},
      {{"observe", "observe_mse_pick", "The next candidates, of few long groups.", {dtype}},
       [](const KernelValues& values) { return mse_pick_kernel(dtype_of(values)); }},
  };
}

}  // namespace halfbyte
