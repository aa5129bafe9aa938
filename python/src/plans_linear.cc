// Integers with scales: quantize_linear, dequantize_linear, their gradient; observers and their parameters.
#include "halfbyte/observe.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "plans.h"

namespace halfbyte::python {
TensorView codes_view(const Array& array, const char* name, DType dtype, std::vector<int64_t> shape) {
  TensorView view = array.view;
  if (!is_packed(dtype) || view.dtype != DType::u8) return view;
  const int64_t needed = contiguous_bytes(dtype, shape);
  const int64_t given = is_contiguous(view) ? contiguous_bytes(view.dtype, view.shape) : -1;
  if (given != needed)
    throw Error(ErrorCode::usage, std::string(name) + ": must be " + std::to_string(needed) +
                                      " contiguous bytes of packed " + to_string(dtype) + ", got " +
                                      (given < 0 ? "strided memory" : std::to_string(given)));
  view.dtype = dtype;
  view.shape = shape;
  view.strides = {};
  view.num_bytes = given;
  return view;
}

namespace {

template <class Op, class View>
void add_codes(PlanClass<Op>& plan, const char* name, View Op::Args::*member, bool written,
               bool is_zero_point) {
  plan.row(name,
           [=](const LinearDescriptor& d, typename Op::Args& args, RunArguments& run, nb::handle value) {
             // Zero points that are given are read alone.
             const Array& array = run.take(value, name, written && (!is_zero_point || d.computed));
             const DType dtype = is_zero_point ? d.zero_point_dtype.value_or(DType::i32) : d.code_dtype;
             args.*member = codes_view(array, name, dtype, is_zero_point ? d.scale_shape() : d.shape);
           });
}

}  // namespace

void bind_linear_plans(nb::module_& module) {
  {
    using Args = QuantizeLinear::Args;
    PlanClass<QuantizeLinear> plan(
        module, "QuantizeLinearPlan",
        "q = clamp(rne(x / scale) + zero_point, q_min, q_max). x -> codes; scale and "
        "zero_point are read, and written where the descriptor has computed=True. Nothing overlaps.\n\n"
        "    >>> plan = halfbyte.QuantizeLinearPlan.select(\"cpu\", halfbyte.LinearDescriptor(shape=[3]))\n"
        "    >>> x, scale, codes = np.array([1, -2, 3], np.float32), np.array(0.5, np.float32), np.empty(3, "
        "np.int8)\n"
        "    >>> plan.run(x=x, scale=scale, codes=codes)\n"
        "    >>> codes\n"
        "    array([ 2, -4,  6], dtype=int8)");
    plan.read("x", &Args::x);
    plan.row("scale", [](const LinearDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      args.scale = run.take(value, "scale", d.computed).view;
    });
    add_codes(plan, "codes", &Args::codes, true, false);
    add_codes(plan, "zero_point", &Args::zero_point, true, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, codes: object, "
        "scale: object, zero_point: object = None) -> None");
  }
  {
    using Args = DequantizeLinear::Args;
    PlanClass<DequantizeLinear> plan(
        module, "DequantizeLinearPlan",
        "y = (q - zero_point) * scale. Nothing overlaps.\n\n"
        "    >>> plan = halfbyte.DequantizeLinearPlan.select(\"cpu\", halfbyte.LinearDescriptor(shape=[3]))\n"
        "    >>> y = np.empty(3, np.float32)\n"
        "    >>> plan.run(codes=np.array([2, -4, 6], np.int8), scale=np.array(0.5, np.float32), y=y)\n"
        "    >>> y\n"
        "    array([ 1., -2.,  3.], dtype=float32)");
    plan.read("scale", &Args::scale).write("y", &Args::y);
    add_codes(plan, "codes", &Args::codes, false, false);
    add_codes(plan, "zero_point", &Args::zero_point, false, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, codes: object, scale: object, "
        "zero_point: object = None, y: object) -> None");
  }
  {
    using Args = QuantizeLinearBackward::Args;
    PlanClass<QuantizeLinearBackward> plan(
        module, "QuantizeLinearBackwardPlan",
        "The straight-through estimator: dx = dy where q_min <= rne(x / "
        "scale) + zero_point <= q_max, else 0. dx may be dy.\n\n"
        "    >>> plan = halfbyte.QuantizeLinearBackwardPlan.select(\"cpu\", "
        "halfbyte.LinearDescriptor(shape=[2]))\n"
        "    >>> dy = np.ones(2, np.float32)\n"
        "    >>> plan.run(x=np.array([1, 200], np.float32), dy=dy, scale=np.array(1, np.float32), dx=dy)\n"
        "    >>> dy\n"
        "    array([1., 0.], dtype=float32)");
    plan.read("x", &Args::x).read("dy", &Args::dy).read("scale", &Args::scale).write("dx", &Args::dx);
    add_codes(plan, "zero_point", &Args::zero_point, false, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, dy: object, "
        "scale: object, zero_point: object = None, dx: object) -> None");
  }
  {
    using Args = Observe::Args;
    PlanClass<Observe> plan(
        module, "ObservePlan",
        "Adds a batch x to the state min, max, num_batches, which are read and written.\n\n"
        "    >>> plan = halfbyte.ObservePlan.select(\"cpu\", halfbyte.ObserveDescriptor(shape=[2]))\n"
        "    >>> low, high, count = np.empty((), np.float32), np.empty((), np.float32), np.empty((), "
        "np.int64)\n"
        "    >>> halfbyte.reset_observer(low, high, count)\n"
        "    >>> plan.run(x=np.array([1, -2], np.float32), min=low, max=high, num_batches=count)\n"
        "    >>> low.item(), high.item(), count.item()\n"
        "    (-2.0, 1.0, 1)");
    plan.read("x", &Args::x)
        .write("min", &Args::min)
        .write("max", &Args::max)
        .write("num_batches", &Args::num_batches);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, min: object, "
        "max: object, num_batches: object) -> None");
  }
  {
    using Args = ComputeQParams::Args;
    PlanClass<ComputeQParams> plan(
        module, "ComputeQParamsPlan",
        "min, max -> scale, zero_point.\n\n"
        "    >>> plan = halfbyte.ComputeQParamsPlan.select(\"cpu\", halfbyte.QParamsDescriptor(shape=[1]))\n"
        "    >>> scale = np.empty(1, np.float32)\n"
        "    >>> plan.run(min=np.array([-127], np.float32), max=np.array([3], np.float32), scale=scale)\n"
        "    >>> scale\n"
        "    array([1.], dtype=float32)");
    plan.read("min", &Args::min)
        .read("max", &Args::max)
        .write("scale", &Args::scale)
        .write("zero_point", &Args::zero_point);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, min: object, max: object, "
        "scale: object, zero_point: object = None) -> None");
  }
}

}  // namespace halfbyte::python
