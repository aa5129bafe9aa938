#include "ops/affine_qdq/affine_qdq.h"

#include <array>
#include <cmath>

#include "core/expect.h"
#include "core/plan.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/quantize_plan.hpp"
#include "ops/affine_qdq/affine_qdq_ref.h"

namespace halfbyte {
namespace {

constexpr const char* kDescriptor = "affine descriptor";
constexpr int64_t kTaskElements = 131072;  // large against the cost of scheduling a task (a microsecond)

bool is_short_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

// The format whose bytes the codes are: of `bits`, or of 8 where each has a byte.
QuantSpec spec_of(const AffineQdqDescriptor& d, int bits) {
  QuantSpec spec;
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::affine && format.bits == bits) spec.format = format.format;
  spec.group_size = d.group_size;
  spec.scale_dtype = d.scale_dtype;
  return spec;
}
Encoding encoding_of(const AffineQdqDescriptor& d) {
  return {d.scale_rule, d.scale_rule == ScaleRule::mlx_edge ? CodeScale::unrounded : CodeScale::stored};
}
int code_bits(const AffineQdqDescriptor& d) { return d.packed ? d.bits : 8; }

std::string text_of_codes(const AffineQdqDescriptor& d) {
  return fmt::format("u{}{}", d.bits, d.packed ? " packed" : "");
}

// What the three plans have in common: the rows of their arguments.
template <class Op>
struct AffineImpl : Plan<Op>::Impl {
  using Args = typename Op::Args;
  using Plan<Op>::Impl::Impl;

  template <class Data>
  ArgumentRow& dense(const char* name, BasicTensorView<Data> Args::*view) {
    const AffineQdqDescriptor& d = this->descriptor;
    return this->tensor(name, view, d.dtype, {d.rows, d.cols}).any_leading_axes().promised(d.alignment);
  }
  ArgumentRow& codes() {
    this->sku.aux_element = DType::u8;
    if (this->descriptor.packed) this->sku.layout = Layout::halfbyte;
    return this->tensor("codes", &Args::codes, DType::u8, this->descriptor.code_shape()).any_leading_axes();
  }
  template <class Data>
  ArgumentRow& parameters(const char* name, BasicTensorView<Data> Args::*view, DType dtype) {
    return this->tensor(name, view, dtype, this->descriptor.scale_shape()).any_leading_axes();
  }
};

// `work`: of an element, see threads_for.
AffineProblem problem_of(const AffineQdqDescriptor& d, Device device, int num_threads, double work) {
  AffineProblem problem = make_affine_problem(d);
  problem.num_threads =
      threads_for(num_threads, work * static_cast<double>(d.rows) * static_cast<double>(d.cols));
  problem.device = device;
  problem.alignment = d.alignment;
  return problem;
}

// ---- Init

struct InitImpl : AffineImpl<AffineInit> {
  AffineProblem problem;
  std::shared_ptr<const AffineCuda> cuda;  // null: the CPU

  InitImpl(Device on, const AffineQdqDescriptor& d, const PlanPreference& preference)
      : AffineImpl("affine_init", on, d, preference), problem(problem_of(d, on, num_threads, 32)) {
    dense("w", &Args::w);
    codes().written();
    parameters("scales", &Args::scales, d.scale_dtype).written();
    parameters("biases", &Args::biases, d.scale_dtype).written();
    sku.dtypes =
        fmt::format("{} -> {}, scale {}", to_string(d.dtype), text_of_codes(d), to_string(d.scale_dtype));
    if (d.refit) guarantee.accumulator = DType::f64;
    needs_scratch(affine_init_scratch_bytes(problem));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_affine_init_cuda(problem);
    sku.kernel = kernel_name(*cuda);
    workspace_size = sizeof(QuantizeCounts);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    const AffineInitTensors tensors{args.w.data, static_cast<uint8_t*>(args.codes.data), args.scales.data,
                                    args.biases.data};
    if (cuda) return run_affine_init_cuda(*cuda, tensors, stream, workspace);
    Scratch memory = scratch(workspace);
    status_in(workspace) = affine_init_cpu(problem, tensors, memory);
  }
};

// ---- Forward: what `dequantize` does

struct QdqImpl : AffineImpl<AffineQdq> {
  QuantSpec spec;
  DequantizePlan dequantize;

  QdqImpl(Device on, const AffineQdqDescriptor& d, const PlanPreference& preference)
      : AffineImpl("affine_qdq", on, d, preference),
        spec(spec_of(d, code_bits(d))),
        dequantize(DequantizePlan::select(on, {spec, d.rows, d.cols, d.dtype, d.alignment}, preference)) {
    codes().promised(d.alignment);
    parameters("scales", &Args::scales, d.scale_dtype);
    parameters("biases", &Args::biases, d.scale_dtype);
    dense("y", &Args::y).written();
    finds_nothing();
    sku.kernel = dequantize.sku().kernel;
    sku.dtypes =
        fmt::format("{} -> {}, scale {}", text_of_codes(d), to_string(d.dtype), to_string(d.scale_dtype));
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    const ConstQuantizedView in{.spec = spec,
                                .rows = descriptor.rows,
                                .cols = descriptor.cols,
                                .codes = static_cast<const uint8_t*>(args.codes.data),
                                .scales = args.scales.data,
                                .biases = args.biases.data};
    dequantize.run(stream, {workspace, workspace_size}, {in, args.y});
  }
};

// ---- Backward

void check_step(const char* op, const AdamStep& step) {
  const auto check = [&](const char* field, double value, bool good, const char* rule) {
    HALFBYTE_CHECK(good, usage, "{}: adam.{} must be {}, got {}", op, field, rule, value);
  };
  check("learning_rate", step.learning_rate, std::isfinite(step.learning_rate), "finite");
  check("beta1", step.beta1, step.beta1 >= 0 && step.beta1 < 1, "in [0, 1)");
  check("beta2", step.beta2, step.beta2 >= 0 && step.beta2 < 1, "in [0, 1)");
  check("epsilon", step.epsilon, std::isfinite(step.epsilon) && step.epsilon >= 0, "finite and >= 0");
  HALFBYTE_MUST(step.step >= 1, invalid_problem, op, "adam.step", "be", "at least 1", step.step);
}

formats::AdamFactors factors_of(const AdamStep& step) {
  const auto count = static_cast<double>(step.step);
  formats::AdamFactors factors;
  factors.step_size = static_cast<float>(step.learning_rate / (1 - std::pow(step.beta1, count)));
  factors.beta1 = static_cast<float>(step.beta1);
  factors.rest1 = static_cast<float>(1 - step.beta1);
  factors.beta2 = static_cast<float>(step.beta2);
  factors.rest2 = static_cast<float>(1 - step.beta2);
  factors.root = static_cast<float>(std::sqrt(1 - std::pow(step.beta2, count)));
  factors.epsilon = static_cast<float>(step.epsilon);
  return factors;
}

struct BackwardImpl : AffineImpl<AffineQdqBackward> {
  AffineProblem problem;
  std::shared_ptr<const AffineCuda> cuda;  // null: the CPU

  BackwardImpl(Device on, const AffineQdqDescriptor& d, const PlanPreference& preference)
      : AffineImpl("affine_qdq_backward", on, d, preference), problem(problem_of(d, on, num_threads, 2)) {
    const auto f32 = [&](const char* name, TensorView Args::*view) -> ArgumentRow& {
      return parameters(name, view, DType::f32).written();
    };
    const auto trained = [&](const char* name, TensorView Args::*view) {
      f32(name, view).absent_unless(d.adam, "descriptor.adam is false");
    };
    codes();
    dense("dy", &Args::dy);
    f32("dscales", &Args::dscales).optional();
    f32("dbiases", &Args::dbiases).optional();
    trained("scales", &Args::scales);
    trained("biases", &Args::biases);
    trained("scale_m", &Args::scale_m);
    trained("scale_v", &Args::scale_v);
    trained("bias_m", &Args::bias_m);
    trained("bias_v", &Args::bias_v);
    finds_nothing();
    sku.dtypes = fmt::format("{}, {} -> f32{}", text_of_codes(d), to_string(d.dtype), d.adam ? ", adam" : "");
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_affine_backward_cuda(problem);
    sku.kernel = kernel_name(*cuda);
  }

  void check_values(const Args& args) const override {
    if (descriptor.adam)
      check_step(op, args.adam);
    else
      HALFBYTE_CHECK(
          problem.num_groups() == 0 || args.dscales.data != nullptr || args.dbiases.data != nullptr, usage,
          "{}: dscales or dbiases must have data", op);
  }

  void execute(const Args& args, void* stream, void*) const override {
    const auto at = [](const TensorView& view) { return static_cast<float*>(view.data); };
    AffineBackwardArgs run{};
    run.codes = static_cast<const uint8_t*>(args.codes.data);
    run.dy = args.dy.data;
    run.scales = {at(args.dscales), at(args.scales), at(args.scale_m), at(args.scale_v)};
    run.biases = {at(args.dbiases), at(args.biases), at(args.bias_m), at(args.bias_v)};
    run.has_adam = descriptor.adam;
    if (run.has_adam) run.adam = factors_of(args.adam);
    if (cuda)
      run_affine_backward_cuda(*cuda, run, stream);
    else
      affine_backward_cpu(problem, run);
  }
};

}  // namespace

// ---- The CPU

namespace {

// The elements of a task: whole groups, which begin at a byte of the codes.
int64_t init_unit(const AffineShape& shape, int code_bits) {
  return shape.group_size * affine_unit(shape.group_size, code_bits);
}

}  // namespace

int64_t affine_init_scratch_bytes(const AffineProblem& problem) {
  const int64_t size = std::min<int64_t>(init_unit(problem.shape, problem.code_bits), problem.shape.cols);
  return Scratch::bytes_of<float>(size) + Scratch::bytes_of<uint8_t>(size);
}

QuantizeStatus affine_init_cpu(const AffineProblem& problem, const AffineInitTensors& tensors,
                               Scratch& scratch) {
  const AffineShape& shape = problem.shape;
  if (problem.num_groups() == 0) return {};
  const int64_t unit = init_unit(shape, problem.code_bits);
  const int64_t units_per_row = (shape.cols - 1) / unit + 1, size = std::min<int64_t>(unit, shape.cols);
  struct Worker {
    float* w = nullptr;
    uint8_t* codes = nullptr;
    Scratch own;
    QuantizeStatus status;
  };
  const bool one = problem.num_threads == 1;
  Worker only;
  std::vector<Worker> workers(one ? 0 : static_cast<size_t>(effective_threads(problem.num_threads)));
  parallel_for(shape.rows * units_per_row, std::max<int64_t>(1, kTaskElements / size), problem.num_threads,
               [&](int64_t first, int64_t last, int number) {
                 Worker& worker = one ? only : workers[static_cast<size_t>(number)];
                 if (worker.w == nullptr) {
                   Scratch& memory = one ? scratch : worker.own;
                   worker.w = memory.take<float>(size);
                   worker.codes = memory.take<uint8_t>(size);
                 }
                 for (int64_t i = first; i < last; ++i) {
                   const int64_t begin = i % units_per_row * unit;
                   QuantizeStatus found;
                   affine_init_ref(problem, tensors, i / units_per_row, begin,
                                   std::min<int64_t>(shape.cols, begin + unit), worker.w, worker.codes,
                                   found);
                   merge(worker.status, found);
                 }
               });
  for (const Worker& worker : workers) merge(only.status, worker.status);
  return only.status;
}

void affine_backward_cpu(const AffineProblem& problem, const AffineBackwardArgs& args) {
  const AffineShape& shape = problem.shape;
  if (problem.num_groups() == 0) return;
  parallel_for(problem.num_groups(), std::max<int64_t>(1, kTaskElements / shape.group_size),
               problem.num_threads, [&](int64_t first, int64_t last, int) {
                 while (first < last) {
                   const int64_t row = first / shape.groups_per_row, begin = first % shape.groups_per_row;
                   const int64_t end = std::min<int64_t>(shape.groups_per_row, begin + (last - first));
                   affine_backward_span_cpu(problem, args, row, begin, end);
                   first += end - begin;
                 }
               });
}

// ---- Descriptors

AffineProblem make_affine_problem(const AffineQdqDescriptor& d) {
  AffineProblem problem;
  problem.code_bits = code_bits(d);
  const QuantShape shape = quant_shape(spec_of(d, problem.code_bits), d.rows, d.cols);
  problem.shape = {shape.rows, shape.cols, shape.row_bytes,
                   std::min(d.group_size, std::max<int64_t>(1, d.cols)), shape.groups_per_row};
  problem.dtype = d.dtype;
  problem.codec = make_codec(spec_of(d, d.bits), encoding_of(d));
  problem.codec.q_max = problem.codec.q_min + d.num_levels() - 1;
  problem.half_away = d.rounding == AffineRounding::half_away;
  problem.refit = d.refit;
  problem.adam = d.adam;
  return problem;
}

void check_descriptor(const AffineQdqDescriptor& d) {
  HALFBYTE_CHECK(d.rows >= 0 && d.cols >= 0, usage, "{}: rows and cols must not be negative, got {} and {}",
                 kDescriptor, d.rows, d.cols);
  HALFBYTE_MUST((d.bits >= 2 && d.bits <= 6) || d.bits == 8, invalid_problem, kDescriptor, "bits", "be",
                "2, 3, 4, 5, 6 or 8", d.bits);
  HALFBYTE_MUST(d.n_bins == 0 || (d.n_bins >= 2 && d.n_bins <= 1 << d.bits), invalid_problem, kDescriptor,
                "n_bins", "be",
                fmt::format("0 (all codes), or 2 to the {} codes of {} bits", 1 << d.bits, d.bits), d.n_bins);
  HALFBYTE_MUST(d.group_size > 0, invalid_problem, kDescriptor, "group_size", "be", "positive", d.group_size);
  HALFBYTE_MUST(is_short_float(d.dtype), unsupported, kDescriptor, "dtype", "be", "f32, f16 or bf16",
                to_string(d.dtype));
  HALFBYTE_MUST(is_short_float(d.scale_dtype), unsupported, kDescriptor, "scale_dtype", "be",
                "f32, f16 or bf16", to_string(d.scale_dtype));
  HALFBYTE_MUST(d.scale_rule == ScaleRule::minmax || d.scale_rule == ScaleRule::mlx_edge, invalid_problem,
                kDescriptor, "scale_rule", "be", "minmax or mlx-edge", to_string(d.scale_rule));
  contiguous_bytes(d.dtype, std::array{d.rows, d.cols});  // throws for what is beyond 2^63 - 1 bytes
  quant_shape(spec_of(d, code_bits(d)), d.rows, d.cols);
  check_alignment(kDescriptor, d.alignment, d.dtype);
}

std::vector<int64_t> AffineQdqDescriptor::code_shape() const {
  check_descriptor(*this);
  return {rows, quant_shape(spec_of(*this, code_bits(*this)), rows, cols).row_bytes};
}
std::vector<int64_t> AffineQdqDescriptor::scale_shape() const {
  check_descriptor(*this);
  return {rows, quant_shape(spec_of(*this, code_bits(*this)), rows, cols).groups_per_row};
}

HALFBYTE_DEFINE_PLAN(AffineInit, InitImpl);
HALFBYTE_DEFINE_PLAN(AffineQdq, QdqImpl);
HALFBYTE_DEFINE_PLAN(AffineQdqBackward, BackwardImpl);

}  // namespace halfbyte
