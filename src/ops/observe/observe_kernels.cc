// The kernels of `observe`, listed.
#include "cuda/plain.h"
#include "grouped/ranges_cuda.h"
#include "ops/observe/observe_cuda.h"
#include "ops/observe/range_search_cuda.h"

namespace halfbyte {

using cuda::dtype_of;
using cuda::is_set;
using cuda::KernelValues;

namespace {

cuda::KernelSpec specialise_plain(const KernelValues& values) {
  return observe_kernel("ops/observe/observe_plain.cu", "halfbyte_observe", dtype_of(values),
                        cuda::plain_lines());
}
KernelDescription describe_plain(const KernelValues& values) {
  const std::string& dtype = values.at("dtype");
  const char* const state = dtype == "f64" ? "f64" : "f32";
  return cuda::plain_description(
      cuda::tensor_parameters(
          {cuda::read_parameter("x", dtype.c_str(), cuda::kTensorElements, "The batch."),
           cuda::updated_parameter("min", state, cuda::kTensorGroups,
                                   "What was seen of each group; before the first batch +infinity."),
           cuda::updated_parameter("max", state, cuda::kTensorGroups, "Likewise; -infinity."),
           cuda::updated_parameter("num_batches", "i64", "1", "Before the first batch 0."),
           cuda::counts_parameter(),
           cuda::number_parameter("history", "f64",
                                  "-1: the range of all batches (min-max). In (0, 1): the weight of what was "
                                  "seen before (the momentum of moving-average).")}),
      cuda::kTensorGroups, 1);
}

}  // namespace

std::vector<cuda::Kernel> observe_kernels() {
  const KernelKey dtype = cuda::dtype_key("The dtype of x.");
  std::vector<cuda::Kernel> kernels = {
      {{"observe",
        "halfbyte_observe",
        "Any groups, by min-max and moving-average, with plain parameters.",
        {dtype},
        "",
        true},
       specialise_plain,
       true,
       describe_plain},
      {{"observe",
        "observe_groups",
        "Groups that are runs of whole chunks, in one pass.",
        {dtype,
         {"group", {"short", "long"}, false, "Lanes of a warp share a group, or a warp or block has one."}}},
       [](const KernelValues& values) {
         return observe_groups_kernel(dtype_of(values), values.at("group") == "long");
       }},
      {{"observe",
        "observe_parts",
        "Few large groups of whole chunks, and channels that are not in one piece.",
        {dtype, cuda::flag_key("runs", "A group is not in one piece.")}},
       [](const KernelValues& values) {
         return observe_parts_kernel(dtype_of(values), is_set(values, "runs"));
       }},
      {{"observe", "observe_columns", "Groups side by side: each column of a band of rows is one.", {dtype}},
       [](const KernelValues& values) { return observe_columns_kernel(dtype_of(values)); }},
      {{"observe",
        "observe_elements",
        "Groups of any shape.",
        {dtype, cuda::flag_key("wide", "2^31 pieces of work and more.")}},
       [](const KernelValues& values) {
         return ranges_kernel("observe_elements", dtype_of(values), true, false, is_set(values, "wide"));
       }},
      {{"observe", "observe_update", "The state takes up ranges.", {dtype}},
       [](const KernelValues& values) { return observe_update_kernel(dtype_of(values)); }},
  };
  for (cuda::Kernel& kernel : range_search_kernels()) kernels.push_back(std::move(kernel));
  return kernels;
}

}  // namespace halfbyte
