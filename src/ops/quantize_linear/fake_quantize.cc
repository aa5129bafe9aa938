#include "ops/quantize_linear/fake_quantize.h"

#include <array>
#include <cmath>

#include "core/plan.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"
#include "halfbyte/system.hpp"

namespace halfbyte {
namespace {

constexpr const char* kDescriptor = "fake quantization descriptor";

Grouping grouping_of(const FakeQuantizeDescriptor& d) {
  return make_grouping(kDescriptor, {d.shape, d.granularity, d.axis, d.group_size}, d.dtype);
}

// Of a table format; its other fields do not matter.
QuantSpec spec_of(const FakeQuantizeDescriptor& d) {
  QuantSpec spec;
  spec.format = *d.format;
  spec.table = d.table;
  return spec;
}

void check_integers(const FakeQuantizeDescriptor& d) {
  HALFBYTE_CHECK(-128 <= d.q_min && d.q_max <= 255, usage,
                 "{}: q_min and q_max must be within [-128, 255], got {} and {}", kDescriptor, d.q_min,
                 d.q_max);
  HALFBYTE_CHECK(d.q_min <= d.q_max && 2 <= d.q_max - d.q_min && d.q_max - d.q_min <= 255, usage,
                 "{}: q_max - q_min must be in [2, 255], got {} - {}", kDescriptor, d.q_max, d.q_min);
  if (d.zero_point_dtype)
    HALFBYTE_CHECK(*d.zero_point_dtype == DType::i32 || *d.zero_point_dtype == d.state_dtype(), usage,
                   "{}: zero_point_dtype must be i32, or {} for learned ones, got {}", kDescriptor,
                   to_string(d.state_dtype()), to_string(*d.zero_point_dtype));
  else
    HALFBYTE_CHECK(d.q_min <= 0 && 0 <= d.q_max, usage,
                   "{}: without a zero point 0 must be in [q_min, q_max], got [{}, {}]", kDescriptor, d.q_min,
                   d.q_max);
}

void check_table(const FakeQuantizeDescriptor& d) {
  const FormatInfo& format = info(*d.format);
  HALFBYTE_CHECK(
      format.kind == FormatKind::table, usage,
      "{}: format must be a table (nf4, fp4, fp4_e2m1, lut4), got {}: integers have q_min and q_max",
      kDescriptor, format.name);
  check_spec(spec_of(d));
  HALFBYTE_CHECK(!d.zero_point_dtype, usage, "{}: format {} has no zero points, got zero_point_dtype {}",
                 kDescriptor, format.name, to_string(*d.zero_point_dtype));
}

void check_computed(const FakeQuantizeDescriptor& d) {
  HALFBYTE_CHECK(!d.zero_point_dtype || *d.zero_point_dtype == DType::i32, usage,
                 "{}: computed zero points must be i32, got zero_point_dtype {}", kDescriptor,
                 to_string(*d.zero_point_dtype));
  const bool absmax = d.scale_rule == ScaleRule::absmax;
  if (d.format)
    HALFBYTE_CHECK(absmax, usage, "{}: scale_rule of a table must be absmax, got {}", kDescriptor,
                   to_string(d.scale_rule));
  else if (!d.zero_point_dtype)
    HALFBYTE_CHECK(absmax || d.scale_rule == ScaleRule::half_range, usage,
                   "{}: scale_rule without a zero point must be absmax or half-range, got {}", kDescriptor,
                   to_string(d.scale_rule));
  if (!d.format && !d.zero_point_dtype)
    HALFBYTE_CHECK(d.q_max > 0, usage, "{}: computed scales without a zero point need q_max > 0, got {}",
                   kDescriptor, d.q_max);
}

}  // namespace

std::vector<int64_t> FakeQuantizeDescriptor::scale_shape() const { return grouping_of(*this).scale_shape; }
std::vector<int64_t> FakeQuantizeDescriptor::mask_shape() const {
  if (shape.empty()) return {1};
  std::vector<int64_t> result = shape;
  result.back() = result.back() / 8 + (result.back() % 8 != 0 ? 1 : 0);
  return result;
}

void check_descriptor(const FakeQuantizeDescriptor& d) {
  HALFBYTE_CHECK(is_floating(d.dtype), usage, "{}: dtype must be f32, f64, f16 or bf16, got {}", kDescriptor,
                 to_string(d.dtype));
  HALFBYTE_CHECK(d.scale_dtype == DType::f32 || d.scale_dtype == d.dtype, usage,
                 "{}: scale_dtype must be f32 or dtype ({}), got {}", kDescriptor, to_string(d.dtype),
                 to_string(d.scale_dtype));
  grouping_of(d);  // throws
  if (d.format)
    check_table(d);
  else
    check_integers(d);
  if (d.computed) check_computed(d);
  const auto used = [&](double value) {  // as it is computed with
    return d.dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
  };
  HALFBYTE_CHECK(std::isfinite(used(d.eps)) && d.eps >= 0, usage, "{}: eps must be finite and >= 0, got {}",
                 kDescriptor, d.eps);
  if (d.observer) {
    HALFBYTE_CHECK(d.computed, usage, "{}: an observer needs computed scales", kDescriptor);
    const ObserverConfig& observer = *d.observer;
    HALFBYTE_CHECK(
        observer.kind == ObserverKind::min_max || observer.kind == ObserverKind::moving_average, usage,
        "{}: observer.kind must be min-max or moving-average; others are plans of their own", kDescriptor);
    check_config(observer);
  }
  HALFBYTE_CHECK(std::isfinite(used(d.gradient_scale)) && used(d.gradient_scale) > 0, usage,
                 "{}: gradient_scale must be finite and > 0, got {}", kDescriptor, d.gradient_scale);
  HALFBYTE_CHECK(d.alignment > 0 && (d.alignment & (d.alignment - 1)) == 0 && d.alignment >= size_of(d.dtype),
                 usage, "{}: alignment must be a power of two and at least the {} bytes of {}, got {}",
                 kDescriptor, size_of(d.dtype), to_string(d.dtype), d.alignment);
}

LinearProblem fake_quantize_problem(LinearOp op, Device device, const FakeQuantizeDescriptor& d,
                                    const PlanPreference& preference) {
  LinearProblem problem;
  static_cast<Grouping&>(problem) = grouping_of(d);
  problem.op = op;
  problem.fake = true;
  problem.dtype = d.dtype;
  problem.has_zeros = d.zero_point_dtype.has_value();
  problem.zeros.dtype = d.zero_point_dtype.value_or(DType::i32);
  if (d.format) problem.codec = make_codec(spec_of(d));
  problem.codec.kind = d.format ? formats::Kind::table : formats::Kind::integer;
  problem.codec.rule = static_cast<formats::Rule>(problem.has_zeros ? ScaleRule::minmax : d.scale_rule);
  problem.codec.scale_type = scale_type(d.scale_dtype);
  problem.codec.bits = 8;
  problem.codec.asymmetric = problem.has_zeros;
  problem.codec.q_min = d.format ? 0 : d.q_min;
  problem.codec.q_max = d.format ? 0 : d.q_max;
  problem.codec.eps = d.eps;
  problem.has_mask = d.mask;
  problem.mask.cols = d.shape.empty() ? 1 : d.shape.back();
  problem.mask.row_bytes = d.mask_shape().back();
  problem.computed = d.computed;
  problem.observed = d.observer.has_value();
  if (d.observer && d.observer->kind == ObserverKind::moving_average) problem.history = d.observer->momentum;
  problem.num_threads = preference.num_threads;
  problem.device = device;
  return problem;
}

std::string dtypes_of(const FakeQuantizeDescriptor& d) {
  std::string text = fmt::format("{}, scale {}", to_string(d.dtype), to_string(d.scale_dtype));
  if (d.zero_point_dtype) text += fmt::format(", zero point {}", to_string(*d.zero_point_dtype));
  return text;
}

namespace {

// Arguments by name; those that an operation has not are null.
struct FakeViews {
  const TensorView* x = nullptr;
  const TensorView* mask = nullptr;
  const TensorView* dy = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* zero_point = nullptr;
  const TensorView* min = nullptr;
  const TensorView* max = nullptr;
  const TensorView* num_batches = nullptr;
  const TensorView* y = nullptr;  // dx
};
FakeViews views_of(const FakeQuantize::Args& args) {
  return {&args.x,   &args.mask, nullptr,           &args.scale, &args.zero_point,
          &args.min, &args.max,  &args.num_batches, &args.y};
}
FakeViews views_of(const FakeQuantizeBackward::Args& args) {
  return {&args.x, &args.mask, &args.dy, &args.scale, &args.zero_point, nullptr, nullptr, nullptr, &args.dx};
}

// What is the same for forward and backward.
class FakePlan {
 public:
  FakePlan(bool forward, Device device, const FakeQuantizeDescriptor& descriptor,
           const PlanPreference& preference)
      : name_(forward ? "fake_quantize" : "fake_quantize_backward"), descriptor_(descriptor) {
    check_descriptor(descriptor);
    HALFBYTE_CHECK(forward || !descriptor.computed, usage,
                   "{}: descriptor.computed must be false: scale and zero point are given", name_);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}",
                   name_, preference.num_threads);
    check_device(device);
    const LinearOp op = forward           ? LinearOp::fake_quantize
                        : descriptor.mask ? LinearOp::mask_gradients
                                          : LinearOp::backward;
    problem_ = fake_quantize_problem(op, device, descriptor, preference);
    if (device.kind == DeviceKind::cuda) cuda_ = select_linear_cuda(problem_, descriptor.alignment);
  }

  Sku sku() const {
    return {name_, cuda_ ? kernel_name(*cuda_) : name_ + std::string("_cpu"),
            cuda_ ? "cuda " + target(*cuda_) : "cpu " + system_info().simd_target, dtypes_of(descriptor_)};
  }
  PrecisionGuarantee guarantee() const {
    return {descriptor_.state_dtype(), descriptor_.state_dtype(), true, true};
  }
  int64_t workspace_size() const {
    return cuda_ ? workspace_bytes(*cuda_) : static_cast<int64_t>(sizeof(QuantizeStatus));
  }

  struct Checked {
    LinearTensors tensors;
    std::array<ArgumentMemory, 9> memory;
  };
  // Throws where something is wrong.
  Checked check(const FakeViews& views) const {
    const FakeQuantizeDescriptor& d = descriptor_;
    const bool forward = problem_.op == LinearOp::fake_quantize;
    const bool masked = problem_.op == LinearOp::mask_gradients;
    const std::vector<int64_t> mask_shape = d.mask_shape();
    const std::span<const int64_t> scale_shape = problem_.scale_shape;
    const DType zero_dtype = problem_.zeros.dtype, state = d.state_dtype();
    const char* const given = masked ? "the mask is read in its place" : nullptr;
    const char* const no_zeros = problem_.has_zeros ? given : "descriptor.zero_point_dtype is not set";
    const char* const no_observer = problem_.observed ? nullptr : "descriptor.observer is not set";
    struct Argument {
      TensorArgument tensor;
      const char* absent;  // why it must have no data; null: it must
    };
    const std::array<Argument, 9> arguments{{
        {{"x", views.x, d.dtype, d.shape, false, d.alignment, true}, given},
        {{"mask", views.mask, DType::u8, mask_shape, forward}, d.mask ? nullptr : "descriptor.mask is false"},
        {{"dy", views.dy, d.dtype, d.shape, false, d.alignment, true}, nullptr},
        {{"scale", views.scale, d.scale_dtype, scale_shape, d.computed, size_of(d.scale_dtype)}, given},
        {{"zero_point", views.zero_point, zero_dtype, scale_shape, d.computed, size_of(zero_dtype)},
         no_zeros},
        {{"min", views.min, state, scale_shape, true, size_of(state)}, no_observer},
        {{"max", views.max, state, scale_shape, true, size_of(state)}, no_observer},
        {{"num_batches", views.num_batches, DType::i64, {}, true, size_of(DType::i64)}, no_observer},
        {{forward ? "y" : "dx", views.y, d.dtype, d.shape, true, d.alignment, true}, nullptr},
    }};
    Checked checked;
    std::array<ArgumentMemory, 9>& memory = checked.memory;
    std::array<void*, 9> data{};
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& [tensor, absent] = arguments[i];
      if (tensor.view == nullptr) continue;
      if (absent != nullptr) {
        HALFBYTE_CHECK(tensor.view->data == nullptr, usage, "{}: {} must have no data, as {}", name_,
                       tensor.name, absent);
        continue;
      }
      memory[i] = check_tensor(name_, tensor, problem_.device);
      data[i] = tensor.view->data;
    }
    constexpr size_t kX = 0, kDy = 2, kY = 8;
    for (size_t i = 0; i < arguments.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        // In place: each element is read before it is written, by the same thread.
        if (i == kY && j == (forward ? kX : kDy) && memory[i].data == memory[j].data) continue;
        check_apart(name_, memory[i], memory[j]);
      }
    LinearTensors& tensors = checked.tensors;
    tensors.x = data[kX];
    tensors.mask = data[1];
    tensors.dy = data[kDy];
    tensors.scale = data[3];
    tensors.zero = data[4];
    tensors.observer = {data[5], data[6], static_cast<formats::i64*>(data[7])};
    tensors.y = data[kY];
    tensors.x_strides = tensors.dy_strides =
        tensors.y_strides = {problem_.axis * problem_.inner, problem_.inner, 1};
    return checked;
  }

  void run(void* stream, void* workspace, const FakeViews& views) const {
    const Checked checked = check(views);
    check_workspace(name_, workspace, workspace_size(), problem_.device, checked.memory);
    if (cuda_)
      run_linear_cuda(*cuda_, checked.tensors, stream, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) = run_cpu(checked.tensors);
  }
  QuantizeStatus status(const void* workspace, void* stream) const {
    check_workspace(name_, workspace, workspace_size(), problem_.device);
    return cuda_ ? status_linear_cuda(*cuda_, workspace, stream)
                 : *static_cast<const QuantizeStatus*>(workspace);
  }

 private:
  QuantizeStatus run_cpu(const LinearTensors& tensors) const {
    if (problem_.op == LinearOp::mask_gradients) {
      mask_gradients_cpu(problem_, tensors);
      return {};
    }
    const bool is_table = problem_.codec.kind == formats::Kind::table;
    return problem_.op == LinearOp::backward && !is_table ? quantize_linear_cpu(problem_, tensors)
                                                          : fake_quantize_cpu(problem_, tensors);
  }

  const char* name_;
  FakeQuantizeDescriptor descriptor_;
  LinearProblem problem_;
  std::shared_ptr<const LinearCuda> cuda_;  // null: the CPU
};

template <class Op>
struct FakeImpl : Plan<Op>::Impl {
  FakePlan plan;

  FakeImpl(Device device, const FakeQuantizeDescriptor& descriptor, const PlanPreference& preference)
      : plan(std::is_same_v<Op, FakeQuantize>, device, descriptor, preference) {
    this->device = device;
    this->descriptor = descriptor;
    this->sku = plan.sku();
    this->guarantee = plan.guarantee();
    this->workspace_size = plan.workspace_size();
  }
  void check(const typename Op::Args& args) const override { plan.check(views_of(args)); }
  void run(void* stream, void* workspace, const typename Op::Args& args) const override {
    plan.run(stream, workspace, views_of(args));
  }
  QuantizeStatus status(const void* workspace, void* stream) const override {
    return plan.status(workspace, stream);
  }
};

}  // namespace

template <>
std::shared_ptr<const FakeQuantizePlan::Impl> make_plan<FakeQuantize>(
    Device device, const FakeQuantizeDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<FakeImpl<FakeQuantize>>(device, descriptor, preference);
}
template <>
std::shared_ptr<const FakeQuantizeBackwardPlan::Impl> make_plan<FakeQuantizeBackward>(
    Device device, const FakeQuantizeDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<FakeImpl<FakeQuantizeBackward>>(device, descriptor, preference);
}

template class Plan<FakeQuantize>;
template class Plan<FakeQuantizeBackward>;

}  // namespace halfbyte
