#include "ops/quantize_linear/quantize_linear.h"

#include <algorithm>
#include <array>

#include "core/plan.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"
#include "halfbyte/system.hpp"

namespace halfbyte {
namespace {

constexpr const char* kOp = "linear descriptor";

const char* name_of(LinearOp op) {
  switch (op) {
    case LinearOp::quantize:
      return "quantize_linear";
    case LinearOp::dequantize:
      return "dequantize_linear";
    default:
      return "quantize_linear_backward";
  }
}

struct IntegerRange {
  int min, max;
};
IntegerRange range_of(DType code_dtype) {
  switch (code_dtype) {
    case DType::i8:
      return {-128, 127};
    case DType::u8:
      return {0, 255};
    case DType::i4:
      return {-8, 7};
    default:
      return {0, 15};
  }
}

Grouping grouping_of(const LinearDescriptor& d) {
  return make_grouping(kOp, {d.shape, d.granularity, d.axis, d.group_size}, d.dtype, d.strided);
}

LinearCodes codes_of(DType dtype, std::span<const int64_t> shape) {
  LinearCodes codes;
  codes.dtype = dtype;
  codes.cols = shape.empty() ? 1 : shape.back();
  codes.row_bytes = (codes.cols + 1) / 2;
  return codes;
}

LinearProblem problem_of(LinearOp op, Device device, const LinearDescriptor& descriptor,
                         const PlanPreference& preference) {
  LinearProblem problem;
  static_cast<Grouping&>(problem) = grouping_of(descriptor);
  problem.op = op;
  problem.dtype = descriptor.dtype;
  problem.contiguous = !descriptor.strided;
  problem.codes = codes_of(descriptor.code_dtype, descriptor.shape);
  problem.has_zeros = descriptor.zero_point_dtype.has_value();
  problem.zeros = codes_of(descriptor.zero_point_dtype.value_or(DType::i32), problem.scale_shape);
  problem.codec.kind = formats::Kind::integer;
  problem.codec.rule =
      static_cast<formats::Rule>(problem.has_zeros ? ScaleRule::minmax : descriptor.scale_rule);
  problem.codec.scale_type = scale_type(descriptor.scale_dtype);
  problem.codec.bits = is_packed(descriptor.code_dtype) ? 4 : 8;
  problem.codec.asymmetric = problem.has_zeros;
  problem.codec.q_min = descriptor.q_min;
  problem.codec.q_max = descriptor.q_max;
  problem.computed = descriptor.computed;
  problem.num_threads = preference.num_threads;
  problem.device = device;
  return problem;
}

// ---- Tensors

// The stride that walks the axes [begin, end) as one; 0 where there is nothing to walk.
int64_t folded_stride(const char* op, const TensorArgument& argument, size_t begin, size_t end,
                      const char* which) {
  const TensorView& view = *argument.view;
  int64_t stride = 0, expected = 0;
  bool first = true;
  for (size_t i = end; i-- > begin;) {
    if (argument.shape[i] == 1) continue;
    if (first) stride = expected = view.strides[i];
    HALFBYTE_CHECK(
        view.strides[i] == expected, usage,
        "{}: {}: the axes {} must be walked as one, but its strides are {} for shape {}: copy it first", op,
        argument.name, which, text_of(view.strides), text_of(argument.shape));
    expected *= argument.shape[i];
    first = false;
  }
  return stride;
}

// How the tensors of an operation are walked as [outer, axis, inner].
class LinearWalk {
 public:
  LinearWalk(const char* op, const LinearDescriptor& descriptor) : op_(op), descriptor_(descriptor) {}

  // Of a tensor that was checked, where it is walked.
  LinearStrides strides(const LinearProblem& problem, const TensorArgument& argument) const {
    const TensorView& view = *argument.view;
    if (problem.contiguous || view.strides.empty() || is_packed(argument.dtype) ||
        problem.num_elements() == 0)
      return {problem.axis * problem.inner, problem.inner, 1};
    LinearStrides strides;
    const auto axis =
        static_cast<size_t>(axis_of({descriptor_.shape, descriptor_.granularity, descriptor_.axis, 0}));
    const size_t rank = argument.shape.size();
    if (rank > 0) {
      strides.outer = folded_stride(op_, argument, 0, axis, "before `axis`");
      strides.axis = argument.shape[axis] > 1 ? view.strides[axis] : 0;
      strides.inner = folded_stride(op_, argument, axis + 1, rank, "behind `axis`");
    }
    if (argument.written) check_distinct(argument, problem, strides);
    return strides;
  }

 private:
  // No two elements of what is written lie at one place.
  void check_distinct(const TensorArgument& argument, const LinearProblem& problem,
                      const LinearStrides& strides) const {
    struct Axis {
      int64_t stride, extent;
    };
    std::array<Axis, 3> axes{
        {{strides.outer, problem.outer}, {strides.axis, problem.axis}, {strides.inner, problem.inner}}};
    std::ranges::sort(axes, {}, &Axis::stride);
    int64_t reach = 0;  // of the axes so far
    for (const auto& [stride, extent] : axes) {
      if (extent <= 1) continue;
      HALFBYTE_CHECK(stride > reach, usage,
                     "{}: {} is written and must have each element at a place of its own, got strides {} of "
                     "shape {}",
                     op_, argument.name, text_of(argument.view->strides), text_of(argument.shape));
      reach += (extent - 1) * stride;
    }
  }

  const char* op_;
  const LinearDescriptor& descriptor_;
};

// The arguments of an operation; those that it has not are null.
struct LinearViews {
  const TensorView* x = nullptr;
  const TensorView* dy = nullptr;
  const TensorView* codes = nullptr;
  const TensorView* scale = nullptr;
  const TensorView* zero_point = nullptr;
  const TensorView* y = nullptr;
};
LinearViews views_of(const QuantizeLinear::Args& args) {
  return {&args.x, nullptr, &args.codes, &args.scale, &args.zero_point, nullptr};
}
LinearViews views_of(const DequantizeLinear::Args& args) {
  return {nullptr, nullptr, &args.codes, &args.scale, &args.zero_point, &args.y};
}
LinearViews views_of(const QuantizeLinearBackward::Args& args) {
  return {&args.x, &args.dy, nullptr, &args.scale, &args.zero_point, &args.dx};
}

template <class Op>
constexpr LinearOp op_of() {
  if constexpr (std::is_same_v<Op, QuantizeLinear>) return LinearOp::quantize;
  if constexpr (std::is_same_v<Op, DequantizeLinear>) return LinearOp::dequantize;
  return LinearOp::backward;
}

// What is the same for the three operations.
class LinearPlan {
 public:
  LinearPlan(LinearOp op, Device device, const LinearDescriptor& descriptor, const PlanPreference& preference)
      : op_(name_of(op)), descriptor_(descriptor) {
    check_descriptor(descriptor);
    HALFBYTE_CHECK(op == LinearOp::quantize || !descriptor.computed, usage,
                   "{}: descriptor.computed must be false: scale and zero point are given", op_);
    HALFBYTE_CHECK(preference.num_threads >= 0, usage, "{}: preference.num_threads must be >= 0, got {}", op_,
                   preference.num_threads);
    check_device(device);
    problem_ = problem_of(op, device, descriptor, preference);
    if (device.kind == DeviceKind::cuda) cuda_ = select_linear_cuda(problem_, descriptor.alignment);
  }

  Sku sku() const {
    Sku sku{op_, cuda_ ? kernel_name(*cuda_) : op_ + std::string("_cpu"),
            cuda_ ? "cuda " + target(*cuda_) : "cpu " + system_info().simd_target, ""};
    const char *const dense = to_string(descriptor_.dtype), *const code = to_string(descriptor_.code_dtype);
    switch (problem_.op) {
      case LinearOp::quantize:
        sku.dtypes = fmt::format("{} -> {}", dense, code);
        break;
      case LinearOp::dequantize:
        sku.dtypes = fmt::format("{} -> {}", code, dense);
        break;
      default:
        sku.dtypes = fmt::format("{}, {} -> {}", dense, dense, dense);
        break;
    }
    sku.dtypes += fmt::format(", scale {}", to_string(descriptor_.scale_dtype));
    if (problem_.has_zeros)
      sku.dtypes += fmt::format(", zero point {}", to_string(*descriptor_.zero_point_dtype));
    return sku;
  }
  PrecisionGuarantee guarantee() const {
    const DType math = descriptor_.dtype == DType::f64 ? DType::f64 : DType::f32;
    return {math, math, true, true};
  }
  int64_t workspace_size() const {
    return cuda_ ? workspace_bytes(*cuda_) : static_cast<int64_t>(sizeof(QuantizeStatus));
  }

  // The tensors of a run, and what they touch: x, dy, codes, scale, zero_point, y.
  struct Checked {
    LinearTensors tensors;
    std::array<ArgumentMemory, 6> memory;
  };
  // Throws where something is wrong.
  Checked check(const LinearViews& views) const {
    const LinearWalk walk(op_, descriptor_);
    const bool quantizes = problem_.op == LinearOp::quantize;
    const int64_t scale_size = size_of(descriptor_.scale_dtype);
    const DType zero_dtype = descriptor_.zero_point_dtype.value_or(DType::i32);
    const std::span<const int64_t> shape = descriptor_.shape, scale_shape = problem_.scale_shape;
    const int64_t alignment = descriptor_.alignment;
    const bool strided = descriptor_.strided;
    const std::array<TensorArgument, 6> arguments{
        {{"x", views.x, descriptor_.dtype, shape, false, alignment, true, strided},
         {"dy", views.dy, descriptor_.dtype, shape, false, alignment, true, strided},
         {"codes", views.codes, descriptor_.code_dtype, shape, quantizes, alignment, true, strided},
         {"scale", views.scale, descriptor_.scale_dtype, scale_shape, problem_.computed, scale_size},
         {"zero_point", problem_.has_zeros ? views.zero_point : nullptr, zero_dtype, scale_shape,
          problem_.computed, is_packed(zero_dtype) ? 1 : size_of(zero_dtype)},
         {problem_.op == LinearOp::backward ? "dx" : "y", views.y, descriptor_.dtype, shape, true, alignment,
          true, strided}}};
    if (!problem_.has_zeros)
      HALFBYTE_CHECK(views.zero_point->data == nullptr, usage,
                     "{}: zero_point must have no data, as descriptor.zero_point_dtype is not set", op_);
    Checked checked;
    std::array<ArgumentMemory, 6>& memory = checked.memory;
    std::array<LinearStrides, 6> strides;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].view == nullptr) continue;
      memory[i] = check_tensor(op_, arguments[i], problem_.device);
      if (arguments[i].promised) strides[i] = walk.strides(problem_, arguments[i]);
    }
    for (size_t i = 0; i < arguments.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        // In place: each gradient is read before it is written, by the same thread.
        if (i == 5 && j == 1 && memory[i].data == memory[j].data && same(strides[i], strides[j])) continue;
        check_apart(op_, memory[i], memory[j]);
      }
    const auto data = [](const TensorView* view) { return view == nullptr ? nullptr : view->data; };
    LinearTensors& tensors = checked.tensors;
    tensors.x = data(views.x);
    tensors.dy = data(views.dy);
    tensors.codes = data(views.codes);
    tensors.scale = views.scale->data;
    tensors.zero = problem_.has_zeros ? views.zero_point->data : nullptr;
    tensors.y = data(views.y);
    tensors.x_strides = strides[0];
    tensors.dy_strides = strides[1];
    tensors.code_strides = strides[2];
    tensors.y_strides = strides[5];
    return checked;
  }

  void run(void* stream, void* workspace, const LinearViews& views) const {
    const Checked checked = check(views);
    check_workspace(op_, workspace, workspace_size(), problem_.device, checked.memory);
    if (cuda_)
      run_linear_cuda(*cuda_, checked.tensors, stream, workspace);
    else
      *static_cast<QuantizeStatus*>(workspace) = quantize_linear_cpu(problem_, checked.tensors);
  }
  QuantizeStatus status(const void* workspace, void* stream) const {
    check_workspace(op_, workspace, workspace_size(), problem_.device);
    return cuda_ ? status_linear_cuda(*cuda_, workspace, stream)
                 : *static_cast<const QuantizeStatus*>(workspace);
  }

 private:
  static bool same(const LinearStrides& a, const LinearStrides& b) {
    return a.outer == b.outer && a.axis == b.axis && a.inner == b.inner;
  }

  const char* op_;
  LinearDescriptor descriptor_;
  LinearProblem problem_;
  std::shared_ptr<const LinearCuda> cuda_;  // null: the CPU
};

template <class Op>
struct LinearImpl : Plan<Op>::Impl {
  LinearPlan plan;

  LinearImpl(Device device, const LinearDescriptor& descriptor, const PlanPreference& preference)
      : plan(op_of<Op>(), device, descriptor, preference) {
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

LinearDescriptor LinearDescriptor::per_tensor(std::vector<int64_t> shape) {
  LinearDescriptor descriptor;
  descriptor.shape = std::move(shape);
  return descriptor;
}
LinearDescriptor LinearDescriptor::per_channel(std::vector<int64_t> shape, int axis) {
  LinearDescriptor descriptor = per_tensor(std::move(shape));
  descriptor.granularity = Granularity::channel;
  descriptor.axis = axis;
  return descriptor;
}
LinearDescriptor LinearDescriptor::per_group(std::vector<int64_t> shape, int64_t group_size, int axis) {
  LinearDescriptor descriptor = per_channel(std::move(shape), axis);
  descriptor.granularity = Granularity::group;
  descriptor.group_size = group_size;
  return descriptor;
}
LinearDescriptor LinearDescriptor::per_token(std::vector<int64_t> shape) {
  const int64_t last = shape.empty() ? 1 : shape.back();
  return per_group(std::move(shape), std::max<int64_t>(1, last));
}

std::vector<int64_t> LinearDescriptor::scale_shape() const { return grouping_of(*this).scale_shape; }

void check_descriptor(const LinearDescriptor& d) {
  HALFBYTE_CHECK(is_floating(d.dtype), usage, "{}: dtype must be f32, f64, f16 or bf16, got {}", kOp,
                 to_string(d.dtype));
  HALFBYTE_CHECK(d.code_dtype == DType::i8 || d.code_dtype == DType::u8 || is_packed(d.code_dtype), usage,
                 "{}: code_dtype must be i8, u8, i4 or u4, got {}", kOp, to_string(d.code_dtype));
  HALFBYTE_CHECK(d.scale_dtype == DType::f32 || d.scale_dtype == d.dtype, usage,
                 "{}: scale_dtype must be f32 or dtype ({}), got {}", kOp, to_string(d.dtype),
                 to_string(d.scale_dtype));
  if (d.zero_point_dtype)
    HALFBYTE_CHECK(*d.zero_point_dtype == DType::i32 || *d.zero_point_dtype == d.code_dtype, usage,
                   "{}: zero_point_dtype must be i32 or code_dtype ({}), got {}", kOp,
                   to_string(d.code_dtype), to_string(*d.zero_point_dtype));
  grouping_of(d);  // throws
  if (!d.zero_point_dtype)
    HALFBYTE_CHECK(d.q_min <= 0 && 0 <= d.q_max, usage,
                   "{}: without a zero point 0 must be in [q_min, q_max], got [{}, {}]", kOp, d.q_min,
                   d.q_max);
  const IntegerRange range = range_of(d.code_dtype);
  HALFBYTE_CHECK(d.q_min <= d.q_max, usage, "{}: q_min must be at most q_max, got {} and {}", kOp, d.q_min,
                 d.q_max);
  HALFBYTE_CHECK(range.min <= d.q_min && d.q_max <= range.max, usage,
                 "{}: q_min and q_max must be within [{}, {}] of code_dtype {}, got {} and {}", kOp,
                 range.min, range.max, to_string(d.code_dtype), d.q_min, d.q_max);
  if (d.computed) {
    HALFBYTE_CHECK(
        d.zero_point_dtype || d.scale_rule == ScaleRule::absmax || d.scale_rule == ScaleRule::half_range,
        usage, "{}: scale_rule without a zero point must be absmax or half-range, got {}", kOp,
        to_string(d.scale_rule));
    HALFBYTE_CHECK(d.q_min < d.q_max, usage, "{}: computed scales need q_min less than q_max, got {} and {}",
                   kOp, d.q_min, d.q_max);
    HALFBYTE_CHECK(d.zero_point_dtype || d.q_max > 0, usage,
                   "{}: computed scales without a zero point need q_max > 0, got {}", kOp, d.q_max);
  }
  HALFBYTE_CHECK(d.alignment > 0 && (d.alignment & (d.alignment - 1)) == 0 && d.alignment >= size_of(d.dtype),
                 usage, "{}: alignment must be a power of two and at least the {} bytes of {}, got {}", kOp,
                 size_of(d.dtype), to_string(d.dtype), d.alignment);
}

template <>
std::shared_ptr<const QuantizeLinearPlan::Impl> make_plan<QuantizeLinear>(Device device,
                                                                          const LinearDescriptor& descriptor,
                                                                          const PlanPreference& preference) {
  return std::make_shared<LinearImpl<QuantizeLinear>>(device, descriptor, preference);
}
template <>
std::shared_ptr<const DequantizeLinearPlan::Impl> make_plan<DequantizeLinear>(
    Device device, const LinearDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<LinearImpl<DequantizeLinear>>(device, descriptor, preference);
}
template <>
std::shared_ptr<const QuantizeLinearBackwardPlan::Impl> make_plan<QuantizeLinearBackward>(
    Device device, const LinearDescriptor& descriptor, const PlanPreference& preference) {
  return std::make_shared<LinearImpl<QuantizeLinearBackward>>(device, descriptor, preference);
}

template class Plan<QuantizeLinear>;
template class Plan<DequantizeLinear>;
template class Plan<QuantizeLinearBackward>;

}  // namespace halfbyte
