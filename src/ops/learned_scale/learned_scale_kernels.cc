// The kernels of gradients of learned scales, listed with those of fake quantization.
#include "core/words.h"
#include "grouped/linear_kernels.h"
#include "ops/learned_scale/learned_scale_cuda.h"

namespace halfbyte {

using cuda::KernelValues;

namespace {

constexpr std::array<Word<LsqTeam>, 4> kTeams{
    {{LsqTeam::few, "few"}, {LsqTeam::lanes, "lanes"}, {LsqTeam::warp, "warp"}, {LsqTeam::block, "block"}}};

}  // namespace

std::vector<cuda::Kernel> learned_scale_kernels() {
  return {
      {{"fake_quantize", "lsq_rows", "Gradients of learned scales of groups one behind the other.",
        fake_keys({"none", "i32", "f32", "f64"},
                  {{"group",
                    {"lanes", "few", "warp", "block"},
                    false,
                    "What shares a group: lanes of a warp, few of them (up to 4), all, or blocks."}})},
       [](const KernelValues& values) {
         return lsq_rows_kernel(fake_types_of(values), value_of(kTeams, values.at("group"), "group"));
       }},
      {{"fake_quantize", "lsq_columns", "Gradients of learned scales of groups side by side.",
        fake_keys({"none", "i32", "f32", "f64"}, {})},
       [](const KernelValues& values) { return lsq_columns_kernel(fake_types_of(values)); }},
      {{"fake_quantize", "lsq_elements", "Gradients of learned scales of any groups.",
        fake_keys({"none", "i32", "f32", "f64"}, {wide_key()})},
       [](const KernelValues& values) {
         return lsq_elements_kernel(fake_types_of(values), cuda::is_set(values, "wide"));
       }},
      {{"fake_quantize", "lsq_totals", "Sums of the pieces of groups, for gradients of learned scales.",
        fake_keys({"none", "i32", "f32", "f64"}, {})},
       [](const KernelValues& values) { return lsq_totals_kernel(fake_types_of(values)); }},
  };
}

}  // namespace halfbyte
