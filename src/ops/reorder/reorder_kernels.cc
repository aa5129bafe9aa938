// The kernels of `reorder`, listed.
#include "ops/reorder/reorder_cuda.h"

namespace halfbyte {
namespace {

using cuda::KernelValues;

// Only addresses and extents count: nothing is at them.
ReorderProblem problem_of(const KernelValues& values) {
  alignas(16) static uint8_t memory[16];
  WeightView view;
  view.spec.format = Format::int4;
  view.rows = 32;
  view.cols = 64;
  view.codes = memory;
  if (const auto bits = values.find("bits"); bits != values.end()) {
    view.spec.format = find_format("int" + bits->second).format;
    if (cuda::is_set(values, "unaligned")) view.cols = 63;
  }
  ReorderProblem problem;
  problem.args = make_reorder_args(view, memory);
  problem.to_packed = values.at("direction") == "pack";
  return problem;
}

}  // namespace

std::vector<cuda::Kernel> reorder_kernels() {
  const KernelKey direction = {
      "direction", {"pack", "unpack"}, false, "From a view to the packed form, or back."};
  const KernelKey bits = {"bits", {"4", "8", "2", "3", "5", "6"}, false, "Of a code."};
  return {{{"reorder",
            "reorder_codes",
            "Moves the codes of a weight.",
            {direction, bits,
             cuda::flag_key("unaligned",
                            "Rows of the view are no multiple of 16 bytes, or not aligned to them.")}},
           [](const KernelValues& values) { return reorder_kernels_of(problem_of(values)).codes; },
           true},
          {{"reorder", "reorder_parameters", "Moves scales, zero points and biases.", {direction}},
           [](const KernelValues& values) { return reorder_kernels_of(problem_of(values)).parameters; }}};
}

}  // namespace halfbyte
