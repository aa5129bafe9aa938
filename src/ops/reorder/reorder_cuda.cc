#include "ops/reorder/reorder_cuda.h"

#include <algorithm>

#include "core/arithmetic.h"
#include "cuda/config.h"

namespace halfbyte {
namespace {

bool is_aligned(const ReorderArgs& args) {
  const int64_t bits = args.layout.bits, vector_bits = 8 * kVectorBytes;
  return formats::in_fragments(args.layout.bits) && args.layout.k * bits % vector_bits == 0 &&
         args.row_bits % vector_bits == 0 && cuda::is_aligned(args.codes, kVectorBytes);
}

int64_t code_threads(const ReorderProblem& problem) {
  const ReorderArgs& args = problem.args;
  const formats::PackedLayout& p = args.layout;
  if (is_aligned(args)) return p.strips * ceil_div(p.tiles_per_strip(), kTilesPerWarp) * 32;
  return problem.to_packed
             ? p.strips * p.blocks_per_strip * (p.block_cols / reorder_columns(p.bits)) * formats::kUnitRows
             : args.num_code_bytes;
}

}  // namespace

ReorderKernels reorder_kernels_of(const ReorderProblem& problem) {
  const std::string direction = fmt::format("constexpr bool kToPacked = {};\n", problem.to_packed);
  return {
      {"ops/reorder/reorder_codes.cu", "reorder_codes",
       cuda::config_text(direction + fmt::format("constexpr int kBits = {};\nconstexpr bool kAligned = {};\n",
                                                 problem.args.layout.bits, is_aligned(problem.args)))},
      {"ops/reorder/reorder_parameters.cu", "reorder_parameters", cuda::config_text(direction)}};
}

std::string refuse_reorder_cuda(const ReorderProblem&) { return ""; }

ReorderRun reorder_cuda(const ReorderProblem& problem) {
  const cuda::Context& context = cuda::context(problem.device.index);
  const cuda::Scope scope(context);
  const formats::PackedLayout& p = problem.args.layout;
  const ReorderKernels kernels = reorder_kernels_of(problem);
  struct Launch {
    cuda::CUfunction function = nullptr;
    cuda::Grid grid;
  };
  const auto launch_of = [&](const cuda::KernelSpec& spec, int64_t num_threads) {
    if (num_threads == 0) return Launch();
    return Launch{cuda::get_kernel(context, spec), {ceil_div(num_threads, kReorderThreads), kReorderThreads}};
  };
  const Launch codes = launch_of(kernels.codes, code_threads(problem));
  // Sections and gaps are there without groups too.
  const Launch parameters = launch_of(
      kernels.parameters, std::max<int64_t>(1, p.strips * ceil_div(p.padded_groups(), kGroupsPerWarp)) * 32);
  return [&context, codes, parameters](const ReorderArgs& args, void* stream) {
    const cuda::Scope current(context);
    for (const Launch& launch : {codes, parameters}) cuda::launch(launch.function, launch.grid, stream, args);
  };
}

}  // namespace halfbyte
