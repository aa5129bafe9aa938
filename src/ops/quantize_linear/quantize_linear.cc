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
    case LinearOp::backward:
      break;
  }
  return "quantize_linear_backward";
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

// What decides how many scales there are.
void check_groups(const LinearDescriptor& d) {
  const int rank = static_cast<int>(d.shape.size());
  contiguous_bytes(d.dtype, d.shape);  // throws for negative extents and what is beyond 2^63 - 1 bytes
  HALFBYTE_CHECK(d.granularity == Granularity::tensor || d.granularity == Granularity::channel ||
                     d.granularity == Granularity::group,
                 usage, "{}: granularity must be tensor, channel or group, got {}", kOp,
                 d.granularity == Granularity::flat ? "flat: give a shape of one axis" : "none of these");
  HALFBYTE_CHECK(rank > 0 || d.granularity == Granularity::tensor, usage,
                 "{}: granularity {} needs an axis, shape is []", kOp, to_string(d.granularity));
  if (rank > 0)
    HALFBYTE_CHECK(-rank <= d.axis && d.axis < rank, usage,
                   "{}: axis must be in [{}, {}) for shape {}, got {}", kOp, -rank, rank, text_of(d.shape),
                   d.axis);
  if (d.granularity == Granularity::group)
    HALFBYTE_CHECK(d.group_size > 0, usage, "{}: group_size must be positive, got {}", kOp, d.group_size);
}

// `axis` from the front; 0 for a tensor without axes.
int axis_of(const LinearDescriptor& descriptor) {
  const int rank = static_cast<int>(descriptor.shape.size());
  return descriptor.axis < 0 ? std::max(0, descriptor.axis + rank) : descriptor.axis;
}

LinearCodes codes_of(DType dtype, std::span<const int64_t> shape) {
  LinearCodes codes;
  codes.dtype = dtype;
  codes.cols = shape.empty() ? 1 : shape.back();
  codes.row_bytes = (codes.cols + 1) / 2;
  return codes;
}

// Of extents of a checked descriptor: no overflow, unless one of the others is 0.
int64_t product(std::span<const int64_t> extents) {
  int64_t result = 1;
  for (const int64_t extent : extents)
    if (__builtin_mul_overflow(result, extent, &result)) return 0;
  return result;
}

LinearProblem problem_of(LinearOp op, Device device, const LinearDescriptor& descriptor,
                         const PlanPreference& preference) {
  const std::span<const int64_t> shape = descriptor.shape;
  const auto axis = static_cast<size_t>(axis_of(descriptor));
  LinearProblem problem;
  problem.op = op;
  problem.dtype = descriptor.dtype;
  if (!shape.empty()) {
    problem.outer = product(shape.first(axis));
    problem.axis = shape[axis];
    problem.inner = product(shape.subspan(axis + 1));
  }
  if (std::ranges::find(shape, 0) != shape.end())
    problem.outer = problem.inner = 0;  // their product may not exist
  const std::vector<int64_t> scale_shape = descriptor.scale_shape();
  problem.num_scales = product(scale_shape);
  switch (descriptor.granularity) {
    case Granularity::channel:
      problem.group_size = 1;
      problem.scale_strides.axis = 1;
      break;
    case Granularity::group: {
      problem.group_size = std::min(descriptor.group_size, std::max<int64_t>(1, problem.axis));
      const int64_t groups = (problem.axis + problem.group_size - 1) / problem.group_size;
      problem.scale_strides = {groups * problem.inner, problem.inner, 1};
      break;
    }
    default:  // tensor: as one axis where that can be
      if (!descriptor.strided) {
        problem.axis = problem.num_elements();
        problem.outer = problem.inner = 1;
      }
      problem.group_size = std::max<int64_t>(1, problem.axis);
      break;
  }
  problem.contiguous = !descriptor.strided;
  problem.codes = codes_of(descriptor.code_dtype, shape);
  problem.has_zeros = descriptor.zero_point_dtype.has_value();
  problem.zeros = codes_of(descriptor.zero_point_dtype.value_or(DType::i32), scale_shape);
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

// An argument of a plan, what it must be, and where its elements lie.
struct Argument {
  const char* name = nullptr;
  const TensorView* view = nullptr;
  DType dtype = DType::f32;
  std::span<const int64_t> shape;
  bool walked = false;   // as [outer, axis, inner], with strides where the descriptor says so
  bool written = false;  // else read
  int64_t alignment = 1;
};

// One past the last byte that the tensor touches, from its data.
int64_t extent_bytes(const char* op, const Argument& argument) {
  const TensorView& view = *argument.view;
  if (view.strides.empty() || is_packed(argument.dtype))
    return contiguous_bytes(argument.dtype, argument.shape);
  int64_t last = 0;
  for (size_t i = 0; i < argument.shape.size(); ++i) {
    int64_t step = 0;
    if (argument.shape[i] == 0) return 0;
    HALFBYTE_CHECK(!__builtin_mul_overflow(argument.shape[i] - 1, view.strides[i], &step) &&
                       !__builtin_add_overflow(last, step, &last),
                   usage, "{}: {}: strides {} of shape {} exceed 2^63 - 1 elements", op, argument.name,
                   text_of(view.strides), text_of(argument.shape));
  }
  int64_t num_bytes = 0;
  HALFBYTE_CHECK(!__builtin_mul_overflow(last + 1, size_of(argument.dtype), &num_bytes), usage,
                 "{}: strides {} of shape {} exceed 2^63 - 1 bytes", argument.name, text_of(view.strides),
                 text_of(argument.shape));
  return num_bytes;
}

// The stride that walks the axes [begin, end) as one; 0 where there is nothing to walk.
int64_t folded_stride(const char* op, const Argument& argument, size_t begin, size_t end, const char* which) {
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

class LinearTensorCheck {
 public:
  LinearTensorCheck(const char* op, const LinearDescriptor& descriptor, Device device)
      : op_(op), descriptor_(descriptor), device_(device) {}

  // Dtype, shape, strides, memory. Returns what is touched.
  ArgumentMemory check(const Argument& argument) const {
    const TensorView& view = *argument.view;
    const char* const name = argument.name;
    HALFBYTE_CHECK(view.dtype == argument.dtype, usage, "{}: {} must be {}, got {}", op_, name,
                   to_string(argument.dtype), to_string(view.dtype));
    // One scale may also have the shape [1].
    const bool one = argument.shape.empty() && view.shape.size() == 1 && view.shape[0] == 1;
    HALFBYTE_CHECK(one || std::ranges::equal(view.shape, argument.shape), usage,
                   "{}: {} must have the shape {}, got {}", op_, name, text_of(argument.shape),
                   text_of(view.shape));
    HALFBYTE_CHECK(view.strides.empty() || view.strides.size() == view.shape.size(), usage,
                   "{}: {} must have a stride for each of its {} axes, got {}", op_, name, view.shape.size(),
                   view.strides.size());
    HALFBYTE_CHECK(view.device == device_, usage, "{}: {} must be on {}, got {}", op_, name,
                   to_string(device_), to_string(view.device));
    for (const int64_t stride : view.strides)
      HALFBYTE_CHECK(stride >= 0, usage, "{}: {} must have strides >= 0, got {}", op_, name,
                     text_of(view.strides));
    if (!(argument.walked && descriptor_.strided && !is_packed(argument.dtype)))
      HALFBYTE_CHECK(is_contiguous(view), usage, "{}: {} must be contiguous{}, got strides {} of shape {}",
                     op_, name, argument.walked ? " as descriptor.strided is false" : "",
                     text_of(view.strides), text_of(view.shape));
    const int64_t num_bytes = one ? contiguous_bytes(argument.dtype, {}) : extent_bytes(op_, argument);
    const ArgumentMemory memory{
        name, view.data, num_bytes, view.num_bytes, argument.alignment, argument.walked, argument.written};
    check_argument(op_, memory, device_);
    return memory;
  }

  // Of a tensor that was checked, where it is walked.
  LinearStrides strides(const LinearProblem& problem, const Argument& argument) const {
    const TensorView& view = *argument.view;
    if (problem.contiguous || view.strides.empty() || is_packed(argument.dtype) ||
        problem.num_elements() == 0)
      return {problem.axis * problem.inner, problem.inner, 1};
    LinearStrides strides;
    const auto axis = static_cast<size_t>(axis_of(descriptor_));
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
  void check_distinct(const Argument& argument, const LinearProblem& problem,
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
  Device device_;
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
    scale_shape_ = descriptor.scale_shape();
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
      case LinearOp::backward:
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
    const LinearTensorCheck checker(op_, descriptor_, problem_.device);
    const bool quantizes = problem_.op == LinearOp::quantize;
    const int64_t scale_size = size_of(descriptor_.scale_dtype);
    const DType zero_dtype = descriptor_.zero_point_dtype.value_or(DType::i32);
    const std::span<const int64_t> shape = descriptor_.shape, scale_shape = scale_shape_;
    const int64_t alignment = descriptor_.alignment;
    const std::array<Argument, 6> arguments{
        {{"x", views.x, descriptor_.dtype, shape, true, false, alignment},
         {"dy", views.dy, descriptor_.dtype, shape, true, false, alignment},
         {"codes", views.codes, descriptor_.code_dtype, shape, true, quantizes, alignment},
         {"scale", views.scale, descriptor_.scale_dtype, scale_shape, false, problem_.computed, scale_size},
         {"zero_point", problem_.has_zeros ? views.zero_point : nullptr, zero_dtype, scale_shape, false,
          problem_.computed, is_packed(zero_dtype) ? 1 : size_of(zero_dtype)},
         {problem_.op == LinearOp::backward ? "dx" : "y", views.y, descriptor_.dtype, shape, true, true,
          alignment}}};
    if (!problem_.has_zeros)
      HALFBYTE_CHECK(views.zero_point->data == nullptr, usage,
                     "{}: zero_point must have no data, as descriptor.zero_point_dtype is not set", op_);
    Checked checked;
    std::array<ArgumentMemory, 6>& memory = checked.memory;
    std::array<LinearStrides, 6> strides;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].view == nullptr) continue;
      memory[i] = checker.check(arguments[i]);
      if (arguments[i].walked) strides[i] = checker.strides(problem_, arguments[i]);
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
  std::vector<int64_t> scale_shape_;
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

std::vector<int64_t> LinearDescriptor::scale_shape() const {
  check_groups(*this);
  const auto at = static_cast<size_t>(axis_of(*this));
  switch (granularity) {
    case Granularity::channel:
      return {shape[at]};
    case Granularity::group: {
      std::vector<int64_t> result = shape;
      result[at] = shape[at] == 0 ? 0 : (shape[at] - 1) / group_size + 1;
      return result;
    }
    default:
      return {};
  }
}

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
  check_groups(d);
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
