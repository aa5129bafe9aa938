#include "ops/affine_qdq/affine_qdq.h"

#include <array>
#include <cmath>

#include "core/checks.h"
#include "core/plan.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "halfbyte/system.hpp"
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
  spec.scale_rule = d.scale_rule;
  spec.scale_dtype = d.scale_dtype;
  spec.code_scale = d.scale_rule == ScaleRule::mlx_edge ? CodeScale::unrounded : CodeScale::stored;
  return spec;
}
int code_bits(const AffineQdqDescriptor& d) { return d.packed ? d.bits : 8; }

// What the three plans have in common.
struct AffinePlan {
  const char* op;
  AffineQdqDescriptor descriptor;
  AffineProblem problem;
  std::vector<int64_t> code_shape, scale_shape, shape;

  AffinePlan(const char* name, Device device, const AffineQdqDescriptor& of, const PlanPreference& preference)
      : op(name), descriptor(of) {
    check_descriptor(of);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}", op,
                   preference.num_threads);
    check_device(device);
    problem = make_affine_problem(of);
    problem.num_threads = preference.num_threads;
    problem.device = device;
    problem.alignment = of.alignment;
    code_shape = of.code_shape();
    scale_shape = of.scale_shape();
    shape = {of.rows, of.cols};
  }

  TensorArgument dense(const char* name, const TensorView& view, bool written) const {
    return {name, &view, descriptor.dtype, shape, written, descriptor.alignment, true};
  }
  TensorArgument codes(const TensorView& view, bool written) const {
    return {"codes", &view, DType::u8, code_shape, written, descriptor.alignment, true};
  }
  TensorArgument parameters(const char* name, const TensorView& view, bool written, DType dtype) const {
    return {name, &view, dtype, scale_shape, written, size_of(dtype)};
  }
  TensorArgument parameters(const char* name, const TensorView& view, bool written) const {
    return parameters(name, view, written, descriptor.scale_dtype);
  }
  // Throws where something is wrong, with one of them or with two that overlap.
  std::vector<ArgumentMemory> check(std::span<const TensorArgument> arguments) const {
    std::vector<ArgumentMemory> memory;
    for (const TensorArgument& argument : arguments)
      memory.push_back(check_tensor(op, argument, problem.device));
    check_all_apart(op, memory);
    return memory;
  }

  // `target`: of the device; empty: the CPU.
  Sku sku(const std::string& kernel, const std::string& target, std::string dtypes) const {
    return {op, kernel, target.empty() ? "cpu " + system_info().simd_target : "cuda " + target,
            std::move(dtypes)};
  }
  std::string code_text() const {
    return descriptor.packed ? fmt::format("u{} packed", descriptor.bits)
                             : fmt::format("u{}", descriptor.bits);
  }
};

constexpr PrecisionGuarantee kGuarantee{DType::f32, DType::f32, true, true};

// ---- Init

struct InitImpl : AffineInitPlan::Impl {
  AffinePlan plan;
  std::shared_ptr<const AffineCuda> cuda;  // null: the CPU

  InitImpl(Device on, const AffineQdqDescriptor& of, const PlanPreference& preference)
      : plan("affine_init", on, of, preference) {
    if (on.kind == DeviceKind::cuda) cuda = select_affine_init_cuda(plan.problem);
    device = on;
    descriptor = of;
    sku = plan.sku(
        cuda ? kernel_name(*cuda) : "affine_init_cpu", cuda ? target(*cuda) : "",
        fmt::format("{} -> {}, scale {}", to_string(of.dtype), plan.code_text(), to_string(of.scale_dtype)));
    guarantee = kGuarantee;
    if (of.refit) guarantee.accumulator = DType::f64;
    workspace_size = cuda ? sizeof(QuantizeCounts) : sizeof(QuantizeStatus);
  }

  std::vector<ArgumentMemory> memory_of(const AffineInit::Args& args) const {
    return plan.check(std::array{plan.dense("w", args.w, false), plan.codes(args.codes, true),
                                 plan.parameters("scales", args.scales, true),
                                 plan.parameters("biases", args.biases, true)});
  }
  void check(const AffineInit::Args& args) const override { memory_of(args); }

  void run(void* stream, void* workspace, const AffineInit::Args& args) const override {
    check_workspace(plan.op, workspace, workspace_size, device, memory_of(args));
    const AffineInitTensors tensors{args.w.data, static_cast<uint8_t*>(args.codes.data), args.scales.data,
                                    args.biases.data};
    if (cuda)
      run_affine_init_cuda(*cuda, tensors, stream, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) = affine_init_cpu(plan.problem, tensors);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(plan.op, workspace, workspace_size, device);
    return cuda ? status_affine_init_cuda(*cuda, workspace, stream)
                : *static_cast<const QuantizeStatus*>(workspace);
  }
};

// ---- Forward: what `dequantize` does

struct QdqImpl : AffineQdqPlan::Impl {
  AffinePlan plan;
  QuantSpec spec;
  DequantizePlan dequantize;

  QdqImpl(Device on, const AffineQdqDescriptor& of, const PlanPreference& preference)
      : plan("affine_qdq", on, of, preference),
        spec(spec_of(of, code_bits(of))),
        dequantize(DequantizePlan::select(on, {spec, of.rows, of.cols, of.dtype, of.alignment}, preference)) {
    device = on;
    descriptor = of;
    sku = dequantize.sku();
    sku.op = plan.op;
    sku.dtypes =
        fmt::format("{} -> {}, scale {}", plan.code_text(), to_string(of.dtype), to_string(of.scale_dtype));
    guarantee = kGuarantee;
    workspace_size = dequantize.workspace_size();
  }

  std::vector<ArgumentMemory> memory_of(const AffineQdq::Args& args) const {
    return plan.check(std::array{plan.codes(args.codes, false), plan.parameters("scales", args.scales, false),
                                 plan.parameters("biases", args.biases, false),
                                 plan.dense("y", args.y, true)});
  }
  void check(const AffineQdq::Args& args) const override { memory_of(args); }

  void run(void* stream, void* workspace, const AffineQdq::Args& args) const override {
    check_workspace(plan.op, workspace, workspace_size, device, memory_of(args));
    const QuantizedView in{
        spec,    descriptor.rows, descriptor.cols, static_cast<uint8_t*>(args.codes.data), args.scales.data,
        nullptr, args.biases.data};
    dequantize.run(stream, workspace, {in, args.y});
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(plan.op, workspace, workspace_size, device);
    return dequantize.status(workspace, stream);
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
  HALFBYTE_CHECK(step.step >= 1, usage, "{}: adam.step must be at least 1, got {}", op, step.step);
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

struct BackwardImpl : AffineQdqBackwardPlan::Impl {
  AffinePlan plan;
  std::shared_ptr<const AffineCuda> cuda;  // null: the CPU

  BackwardImpl(Device on, const AffineQdqDescriptor& of, const PlanPreference& preference)
      : plan("affine_qdq_backward", on, of, preference) {
    if (on.kind == DeviceKind::cuda) cuda = select_affine_backward_cuda(plan.problem);
    device = on;
    descriptor = of;
    sku = plan.sku(
        cuda ? kernel_name(*cuda) : "affine_qdq_backward_cpu", cuda ? target(*cuda) : "",
        fmt::format("{}, {} -> f32{}", plan.code_text(), to_string(of.dtype), of.adam ? ", adam" : ""));
    guarantee = kGuarantee;
    workspace_size = 16;  // nothing is kept there
  }

  std::vector<ArgumentMemory> memory_of(const AffineQdqBackward::Args& args) const {
    struct Tensor {
      const char* name;
      const TensorView& view;
    };
    std::vector<TensorArgument> arguments{plan.codes(args.codes, false), plan.dense("dy", args.dy, false)};
    const bool adam = descriptor.adam;
    for (const Tensor& tensor : {Tensor{"dscales", args.dscales}, Tensor{"dbiases", args.dbiases}})
      if (!adam || tensor.view.data != nullptr)
        arguments.push_back(plan.parameters(tensor.name, tensor.view, true, DType::f32));
    for (const Tensor& tensor :
         {Tensor{"scales", args.scales}, Tensor{"biases", args.biases}, Tensor{"scale_m", args.scale_m},
          Tensor{"scale_v", args.scale_v}, Tensor{"bias_m", args.bias_m}, Tensor{"bias_v", args.bias_v}}) {
      HALFBYTE_CHECK(adam || tensor.view.data == nullptr, usage,
                     "{}: {} must have no data, as descriptor.adam is false", plan.op, tensor.name);
      if (adam) arguments.push_back(plan.parameters(tensor.name, tensor.view, true, DType::f32));
    }
    if (adam) check_step(plan.op, args.adam);
    return plan.check(arguments);
  }
  void check(const AffineQdqBackward::Args& args) const override { memory_of(args); }

  void run(void* stream, void* workspace, const AffineQdqBackward::Args& args) const override {
    check_workspace(plan.op, workspace, workspace_size, device, memory_of(args));
    const auto at = [](const TensorView& view) { return static_cast<float*>(view.data); };
    AffineBackwardArgs run{};
    run.codes = static_cast<const uint8_t*>(args.codes.data);
    run.dy = args.dy.data;
    run.scales = {at(args.dscales), at(args.scales), at(args.scale_m), at(args.scale_v)};
    run.biases = {at(args.dbiases), at(args.biases), at(args.bias_m), at(args.bias_v)};
    if (descriptor.adam) run.adam = factors_of(args.adam);
    if (cuda)
      run_affine_backward_cuda(*cuda, run, stream);
    else
      affine_backward_cpu(plan.problem, run);
  }

  QuantizeStatus status(const void* workspace, void* stream) const override {
    check_workspace(plan.op, workspace, workspace_size, device);
    if (cuda) wait_affine_cuda(*cuda, stream);
    return {};
  }
};

}  // namespace

// ---- The CPU

QuantizeStatus affine_init_cpu(const AffineProblem& problem, const AffineInitTensors& tensors) {
  const AffineShape& shape = problem.shape;
  QuantizeStatus status;
  if (problem.num_groups() == 0) return status;
  const int64_t unit = shape.group_size * affine_unit(shape.group_size, problem.code_bits);
  const int64_t units_per_row = (shape.cols - 1) / unit + 1, size = std::min<int64_t>(unit, shape.cols);
  struct Worker {
    std::vector<float> w;
    std::vector<uint8_t> codes;
    QuantizeStatus status;
  };
  std::vector<Worker> workers(static_cast<size_t>(effective_threads(problem.num_threads)));
  parallel_for(shape.rows * units_per_row, std::max<int64_t>(1, kTaskElements / size), problem.num_threads,
               [&](int64_t first, int64_t last, int worker) {
                 Worker& own = workers[static_cast<size_t>(worker)];
                 own.w.resize(static_cast<size_t>(size));
                 own.codes.resize(static_cast<size_t>(size));
                 for (int64_t i = first; i < last; ++i) {
                   const int64_t begin = i % units_per_row * unit;
                   QuantizeStatus found;
                   affine_init_ref(problem, tensors, i / units_per_row, begin,
                                   std::min<int64_t>(shape.cols, begin + unit), own.w.data(),
                                   own.codes.data(), found);
                   merge(own.status, found);
                 }
               });
  for (const Worker& worker : workers) merge(status, worker.status);
  return status;
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
  problem.codec = make_codec(spec_of(d, d.bits));
  problem.half_away = d.rounding == AffineRounding::half_away;
  problem.refit = d.refit;
  problem.adam = d.adam;
  return problem;
}

void check_descriptor(const AffineQdqDescriptor& d) {
  HALFBYTE_CHECK(d.rows >= 0 && d.cols >= 0, usage, "{}: rows and cols must not be negative, got {} and {}",
                 kDescriptor, d.rows, d.cols);
  HALFBYTE_CHECK((d.bits >= 2 && d.bits <= 6) || d.bits == 8, usage,
                 "{}: bits must be 2, 3, 4, 5, 6 or 8, got {}", kDescriptor, d.bits);
  HALFBYTE_CHECK(d.group_size > 0, usage, "{}: group_size must be positive, got {}", kDescriptor,
                 d.group_size);
  HALFBYTE_CHECK(is_short_float(d.dtype), usage, "{}: dtype must be f32, f16 or bf16, got {}", kDescriptor,
                 to_string(d.dtype));
  HALFBYTE_CHECK(is_short_float(d.scale_dtype), usage, "{}: scale_dtype must be f32, f16 or bf16, got {}",
                 kDescriptor, to_string(d.scale_dtype));
  HALFBYTE_CHECK(d.scale_rule == ScaleRule::minmax || d.scale_rule == ScaleRule::mlx_edge, usage,
                 "{}: scale_rule must be minmax or mlx-edge, got {}", kDescriptor, to_string(d.scale_rule));
  contiguous_bytes(d.dtype, std::array{d.rows, d.cols});  // throws for what is beyond 2^63 - 1 bytes
  quant_shape(spec_of(d, code_bits(d)), d.rows, d.cols);
  HALFBYTE_CHECK(d.alignment > 0 && (d.alignment & (d.alignment - 1)) == 0 && d.alignment >= size_of(d.dtype),
                 usage, "{}: alignment must be a power of two and at least the {} bytes of {}, got {}",
                 kDescriptor, size_of(d.dtype), to_string(d.dtype), d.alignment);
}

std::vector<int64_t> AffineQdqDescriptor::code_shape() const {
  check_descriptor(*this);
  return {rows, quant_shape(spec_of(*this, code_bits(*this)), rows, cols).row_bytes};
}
std::vector<int64_t> AffineQdqDescriptor::scale_shape() const {
  check_descriptor(*this);
  return {rows, quant_shape(spec_of(*this, code_bits(*this)), rows, cols).groups_per_row};
}

template <>
std::shared_ptr<const AffineInitPlan::Impl> make_plan<AffineInit>(Device device,
                                                                  const AffineQdqDescriptor& descriptor,
                                                                  const PlanPreference& preference) {
  return std::make_shared<InitImpl>(device, descriptor, preference);
}
template <>
std::shared_ptr<const AffineQdqPlan::Impl> make_plan<AffineQdq>(Device device,
                                                                const AffineQdqDescriptor& descriptor,
                                                                const PlanPreference& preference) {
  return std::make_shared<QdqImpl>(device, descriptor, preference);
}
template <>
std::shared_ptr<const AffineQdqBackwardPlan::Impl> make_plan<AffineQdqBackward>(
    Device device, const AffineQdqDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<BackwardImpl>(device, descriptor, preference);
}

template class Plan<AffineInit>;
template class Plan<AffineQdq>;
template class Plan<AffineQdqBackward>;

}  // namespace halfbyte
