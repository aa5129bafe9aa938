#include "ops/quantize_linear/quantize_linear.h"

#include <algorithm>
#include <array>

#include "core/expect.h"
#include "core/plan.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/quantize_linear.hpp"

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

CodeStorage codes_of(DType dtype, std::span<const int64_t> shape) {
  CodeStorage codes;
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
  problem.computed = descriptor.computed && op == LinearOp::quantize;
  problem.num_threads = threads_for(preference.num_threads, static_cast<double>(problem.num_elements()));
  problem.device = device;
  return problem;
}

// ---- Tensors

// How the tensors of an operation, as their rows have them, are walked as [outer, axis, inner].
class LinearWalk {
 public:
  LinearWalk(const char* op, const LinearDescriptor& descriptor, const LinearProblem& problem)
      : op_(op), shape_(descriptor.shape), descriptor_(descriptor), problem_(problem) {}

  LinearStrides strides(const char* name, const ConstTensorView& view, bool written = false) const {
    if (problem_.contiguous || view.strides.empty() || is_packed(view.dtype) || problem_.num_elements() == 0)
      return {problem_.axis * problem_.inner, problem_.inner, 1};
    LinearStrides strides;
    const auto axis = static_cast<size_t>(axis_of({shape_, descriptor_.granularity, descriptor_.axis, 0}));
    if (!shape_.empty()) {
      strides.outer = folded_stride(name, view, 0, axis, "before `axis`");
      strides.axis = shape_[axis] > 1 ? view.strides[axis] : 0;
      strides.inner = folded_stride(name, view, axis + 1, shape_.size(), "behind `axis`");
    }
    if (written) check_distinct(name, view, strides);
    return strides;
  }

 private:
  // The stride that walks the axes [begin, end) as one; 0 where there is nothing to walk.
  int64_t folded_stride(const char* name, const ConstTensorView& view, size_t begin, size_t end,
                        const char* which) const {
    int64_t stride = 0, expected = 0;
    bool first = true;
    for (size_t i = end; i-- > begin;) {
      if (shape_[i] == 1) continue;
      if (first) stride = expected = view.strides[i];
      HALFBYTE_CHECK(
          view.strides[i] == expected, usage,
          "{}: {}: the axes {} must be walked as one, but its strides are {} for shape {}: copy it first",
          op_, name, which, text_of(view.strides), text_of(shape_));
      expected *= shape_[i];
      first = false;
    }
    return stride;
  }

  // No two elements of what is written lie at one place.
  void check_distinct(const char* name, const ConstTensorView& view, const LinearStrides& strides) const {
    struct Axis {
      int64_t stride, extent;
    };
    std::array<Axis, 3> axes{
        {{strides.outer, problem_.outer}, {strides.axis, problem_.axis}, {strides.inner, problem_.inner}}};
    std::ranges::sort(axes, {}, &Axis::stride);
    int64_t reach = 0;  // of the axes so far
    for (const auto& [stride, extent] : axes) {
      if (extent <= 1) continue;
      HALFBYTE_CHECK(stride > reach, usage,
                     "{}: {} is written and must have each element at a place of its own, got strides {} of "
                     "shape {}",
                     op_, name, text_of(view.strides), text_of(shape_));
      reach += (extent - 1) * stride;
    }
  }

  const char* op_;
  std::span<const int64_t> shape_;
  const LinearDescriptor& descriptor_;
  const LinearProblem& problem_;
};

std::string text_of_dtypes(LinearOp op, const LinearDescriptor& d) {
  const char *const dense = to_string(d.dtype), *const code = to_string(d.code_dtype);
  std::string text = op == LinearOp::quantize     ? fmt::format("{} -> {}", dense, code)
                     : op == LinearOp::dequantize ? fmt::format("{} -> {}", code, dense)
                                                  : fmt::format("{}, {} -> {}", dense, dense, dense);
  text += fmt::format(", scale {}", to_string(d.scale_dtype));
  if (d.zero_point_dtype) text += fmt::format(", zero point {}", to_string(*d.zero_point_dtype));
  return text;
}

template <class Op>
struct LinearImpl : Plan<Op>::Impl {
  using Args = typename Op::Args;
  static constexpr bool kQuantizes = std::is_same_v<Op, QuantizeLinear>;
  static constexpr bool kDequantizes = std::is_same_v<Op, DequantizeLinear>;
  static constexpr LinearOp kLinearOp = kQuantizes     ? LinearOp::quantize
                                        : kDequantizes ? LinearOp::dequantize
                                                       : LinearOp::backward;

  LinearProblem problem;
  std::shared_ptr<const LinearCuda> cuda;  // null: the CPU

  LinearImpl(Device on, const LinearDescriptor& d, const PlanPreference& preference)
      : Plan<Op>::Impl(name_of(kLinearOp), on, d, preference),
        problem(problem_of(kLinearOp, on, d, preference)) {
    declare(d);
    this->sku.dtypes = text_of_dtypes(kLinearOp, d);
    if (kQuantizes || kDequantizes) this->sku.aux_element = d.code_dtype;
    this->needs_scratch(linear_scratch_bytes(problem));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_linear_cuda(problem, d.alignment);
    this->sku.kernel = kernel_name(*cuda);
    this->workspace_size = workspace_bytes(*cuda);
  }

  void declare(const LinearDescriptor& d) {
    const auto dense = [&](const char* name, auto view, DType dtype) -> ArgumentRow& {
      return this->tensor(name, view, dtype, d.shape).promised(d.alignment).strided(d.strided);
    };
    if constexpr (requires { &Args::x; }) dense("x", &Args::x, d.dtype);
    if constexpr (requires { &Args::dy; }) dense("dy", &Args::dy, d.dtype);
    if constexpr (requires { &Args::codes; }) dense("codes", &Args::codes, d.code_dtype).written(kQuantizes);
    this->tensor("scale", &Args::scale, d.scale_dtype, problem.scale_shape).written(problem.computed);
    this->tensor("zero_point", &Args::zero_point, problem.zeros.dtype, problem.scale_shape)
        .written(problem.computed)
        .absent_unless(problem.has_zeros, "descriptor.zero_point_dtype is not set");
    if constexpr (requires { &Args::y; }) dense("y", &Args::y, d.dtype).written();
    if constexpr (requires { &Args::dx; }) {
      dense("dx", &Args::dx, d.dtype).written();
      this->in_place("dx", "dy");
    }
  }

  void check_strides(const Args& args) const override {
    if (!problem.contiguous) tensors_of(args);
  }

  LinearTensors tensors_of(const Args& args) const {
    const LinearWalk walk(this->op, this->descriptor, problem);
    LinearTensors tensors;
    if constexpr (requires { args.x; }) {
      tensors.x = args.x.data;
      tensors.x_strides = walk.strides("x", args.x);
    }
    if constexpr (requires { args.dy; }) {
      tensors.dy = args.dy.data;
      tensors.dy_strides = walk.strides("dy", args.dy);
    }
    if constexpr (requires { args.codes; }) {
      tensors.codes = address_of(args.codes);
      tensors.code_strides = walk.strides("codes", args.codes, kQuantizes);
    }
    tensors.scale = address_of(args.scale);
    tensors.zero = address_of(args.zero_point);
    if constexpr (requires { args.y; }) {
      tensors.y = args.y.data;
      tensors.y_strides = walk.strides("y", args.y, true);
    }
    if constexpr (requires { args.dx; }) {
      tensors.y = args.dx.data;
      tensors.y_strides = walk.strides("dx", args.dx, true);
    }
    return tensors;
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    LinearTensors tensors = tensors_of(args);
    Scratch scratch = this->scratch(workspace);
    tensors.scratch = &scratch;
    if (cuda)
      run_linear_cuda(*cuda, tensors, stream, workspace);
    else
      this->status_in(workspace) = quantize_linear_cpu(problem, tensors);
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
  HALFBYTE_MUST(is_floating(d.dtype), unsupported, kOp, "dtype", "be", "f32, f64, f16 or bf16",
                to_string(d.dtype));
  HALFBYTE_MUST(d.code_dtype == DType::i8 || d.code_dtype == DType::u8 || is_packed(d.code_dtype),
                unsupported, kOp, "code_dtype", "be", "i8, u8, i4 or u4", to_string(d.code_dtype));
  HALFBYTE_MUST(d.scale_dtype == DType::f32 || d.scale_dtype == d.dtype, unsupported, kOp, "scale_dtype",
                "be", fmt::format("f32 or dtype ({})", to_string(d.dtype)), to_string(d.scale_dtype));
  if (d.zero_point_dtype)
    HALFBYTE_MUST(*d.zero_point_dtype == DType::i32 || *d.zero_point_dtype == d.code_dtype, unsupported, kOp,
                  "zero_point_dtype", "be", fmt::format("i32 or code_dtype ({})", to_string(d.code_dtype)),
                  to_string(*d.zero_point_dtype));
  grouping_of(d);  // throws
  if (!d.zero_point_dtype)
    HALFBYTE_CHECK(d.q_min <= 0 && 0 <= d.q_max, usage,
                   "{}: without a zero point 0 must be in [q_min, q_max], got [{}, {}]", kOp, d.q_min,
                   d.q_max);
  const IntegerRange range = range_of(d.code_dtype);
  HALFBYTE_MUST(d.q_min <= d.q_max, invalid_problem, kOp, "q_min", "be", "at most q_max",
                fmt::format("{} and {}", d.q_min, d.q_max));
  HALFBYTE_CHECK(range.min <= d.q_min && d.q_max <= range.max, usage,
                 "{}: q_min and q_max must be within [{}, {}] of code_dtype {}, got {} and {}", kOp,
                 range.min, range.max, to_string(d.code_dtype), d.q_min, d.q_max);
  if (d.computed) {
    HALFBYTE_MUST(
        d.zero_point_dtype || d.scale_rule == ScaleRule::absmax || d.scale_rule == ScaleRule::half_range,
        invalid_problem, kOp, "scale_rule without a zero point", "be", "absmax or half-range",
        to_string(d.scale_rule));
    HALFBYTE_CHECK(d.q_min < d.q_max, usage, "{}: computed scales need q_min less than q_max, got {} and {}",
                   kOp, d.q_min, d.q_max);
    HALFBYTE_CHECK(d.zero_point_dtype || d.q_max > 0, usage,
                   "{}: computed scales without a zero point need q_max > 0, got {}", kOp, d.q_max);
  }
  check_alignment(kOp, d.alignment, d.dtype);
}

HALFBYTE_DEFINE_PLAN(QuantizeLinear, LinearImpl<QuantizeLinear>);
HALFBYTE_DEFINE_PLAN(DequantizeLinear, LinearImpl<DequantizeLinear>);
HALFBYTE_DEFINE_PLAN(QuantizeLinearBackward, LinearImpl<QuantizeLinearBackward>);

}  // namespace halfbyte
