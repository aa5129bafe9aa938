#include "ops/affine_qdq/affine_qdq_cuda.h"

#include <bit>
#include <variant>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "cuda/config.h"
#include "cuda/plain.h"
#include "formats/counts.h"

namespace halfbyte {

// The arguments are complete but for addresses.
struct AffineCuda {
  const cuda::Context* context = nullptr;
  std::string name = "none";
  cuda::CUfunction function = nullptr;  // null: there are no elements
  cuda::Grid grid;
  std::variant<AffineInitArgs, AffineChunksArgs, AffineGroupsArgs> args;
};

namespace {

constexpr int kThreads = kAffineThreads, kWarps = kThreads / 32;

cuda::KernelSpec kernel_spec(const char* source, const char* function, const AffineProblem& problem,
                             const std::string& lines) {
  return {source, function, cuda::config_text(cuda::element_config(problem.dtype) + lines)};
}

std::string bits_config(const AffineProblem& problem) {
  return fmt::format("constexpr int kBits = {};\n", problem.code_bits);
}

class Selection {
 public:
  explicit Selection(const AffineProblem& problem) : problem_(problem) {
    made_.context = &cuda::context(problem.device.index);
  }
  std::shared_ptr<const AffineCuda> take() { return std::make_shared<const AffineCuda>(std::move(made_)); }

  void select_init() {
    const AffineShape& shape = problem_.shape;
    AffineInitArgs args{};
    args.shape = shape;
    args.unit = affine_unit(shape.group_size, problem_.code_bits);
    args.units_per_row = ceil_div(shape.groups_per_row, args.unit);
    args.levels = problem_.codec.levels();
    args.code_bits = problem_.code_bits;
    args.rule = problem_.codec.rule;
    args.scale_type = problem_.codec.scale_type;
    args.refit = problem_.refit;
    choose("affine_init", affine_init_kernel(problem_), ceil_div(shape.rows * args.units_per_row, kWarps),
           args);
  }

  void select_backward() {
    if (problem_.num_groups() == 0 || select_chunks()) return;
    AffineGroupsArgs args{};
    args.shape = problem_.shape;
    choose("affine_groups", affine_groups_kernel(problem_), ceil_div(problem_.num_groups(), kWarps), args);
  }

 private:
  template <class Args>
  void choose(const char* name, const cuda::KernelSpec& spec, int64_t num_blocks, const Args& args) {
    const cuda::Scope scope(*made_.context);
    made_.name = name;
    made_.function = cuda::get_kernel(*made_.context, spec);
    made_.grid = {num_blocks, kThreads};
    made_.args = args;
  }

  // Whole groups of a power of two of chunks, in memory that is aligned: one sequence.
  bool select_chunks() {
    constexpr int64_t kChunk = 8, kLanes = 32;
    const AffineShape& shape = problem_.shape;
    const int64_t size = shape.group_size;
    if (problem_.alignment < 16 || size < 2 * kChunk || size > kLanes * kChunk * kAffineBatch ||
        !std::has_single_bit(static_cast<uint64_t>(size)) || shape.cols % size != 0 ||
        is_wide(shape.rows * shape.cols / kChunk))
      return false;
    AffineChunksArgs args{};
    args.num_groups = problem_.num_groups();
    args.num_chunks = shape.rows * shape.cols / kChunk;
    args.code_bytes = shape.rows * shape.row_bytes;
    const int chunks =
        std::countr_zero(static_cast<uint64_t>(size / kChunk));  // of a group, as a power of two
    args.team = std::min(chunks, 5);
    args.merge = chunks - args.team;
    choose("affine_chunks", affine_chunks_kernel(problem_),
           ceil_div(args.num_chunks, int64_t{kThreads} * kAffineBatch), args);
    return true;
  }

  const AffineProblem& problem_;
  AffineCuda made_;
};

}  // namespace

cuda::KernelSpec affine_init_kernel(const AffineProblem& problem) {
  return kernel_spec("ops/affine_qdq/affine_init.cu", "affine_init", problem,
                     fmt::format("constexpr bool kHalfAway = {};\n", problem.half_away));
}
cuda::KernelSpec affine_chunks_kernel(const AffineProblem& problem) {
  return kernel_spec("ops/affine_qdq/affine_chunks.cu", "affine_chunks", problem, bits_config(problem));
}
cuda::KernelSpec affine_groups_kernel(const AffineProblem& problem) {
  return kernel_spec("ops/affine_qdq/affine_groups.cu", "affine_groups", problem, bits_config(problem));
}
cuda::KernelSpec affine_backward_plain_kernel(const AffineProblem& problem) {
  return kernel_spec("ops/affine_qdq/affine_qdq_backward_plain.cu", "halfbyte_affine_qdq_backward", problem,
                     bits_config(problem) + cuda::plain_lines());
}

std::shared_ptr<const AffineCuda> select_affine_init_cuda(const AffineProblem& problem) {
  Selection selection(problem);
  if (problem.num_groups() > 0) selection.select_init();
  return selection.take();
}
std::shared_ptr<const AffineCuda> select_affine_backward_cuda(const AffineProblem& problem) {
  Selection selection(problem);
  selection.select_backward();
  return selection.take();
}
const std::string& kernel_name(const AffineCuda& cuda) { return cuda.name; }

void run_affine_init_cuda(const AffineCuda& selected, const AffineInitTensors& tensors, void* stream,
                          void* workspace) {
  const cuda::Scope scope(*selected.context);
  cuda::fill(workspace, 0, sizeof(QuantizeCounts), stream);
  if (selected.function == nullptr) return;
  AffineInitArgs args = std::get<AffineInitArgs>(selected.args);
  args.w = tensors.w;
  args.codes = tensors.codes;
  args.scales = tensors.scales;
  args.biases = tensors.biases;
  args.counts = static_cast<QuantizeCounts*>(workspace);
  cuda::launch(selected.function, selected.grid, stream, args);
}

void run_affine_backward_cuda(const AffineCuda& selected, const AffineBackwardArgs& common, void* stream) {
  if (selected.function == nullptr) return;
  const cuda::Scope scope(*selected.context);
  std::visit(
      [&](auto args) {
        if constexpr (!std::is_same_v<decltype(args), AffineInitArgs>) {
          args.common = common;
          cuda::launch(selected.function, selected.grid, stream, args);
        }
      },
      selected.args);
}

}  // namespace halfbyte
