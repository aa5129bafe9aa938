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
             const Array& array = run.take(value, name, written);
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
        "zero_point are read, and written where the descriptor has computed=True. Nothing overlaps.");
    plan.read("x", &Args::x).write("scale", &Args::scale);
    add_codes(plan, "codes", &Args::codes, true, false);
    add_codes(plan, "zero_point", &Args::zero_point, true, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, codes: object, "
        "scale: object, zero_point: object = None) -> None");
  }
  {
    using Args = DequantizeLinear::Args;
    PlanClass<DequantizeLinear> plan(module, "DequantizeLinearPlan",
                                     "y = (q - zero_point) * scale. Nothing overlaps.");
    plan.read("scale", &Args::scale).write("y", &Args::y);
    add_codes(plan, "codes", &Args::codes, false, false);
    add_codes(plan, "zero_point", &Args::zero_point, false, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, codes: object, scale: object, "
        "zero_point: object = None, y: object) -> None");
  }
  {
    using Args = QuantizeLinearBackward::Args;
    PlanClass<QuantizeLinearBackward> plan(module, "QuantizeLinearBackwardPlan",
                                           "The straight-through estimator: dx = dy where q_min <= rne(x / "
                                           "scale) + zero_point <= q_max, else 0. dx may be dy.");
    plan.read("x", &Args::x).read("dy", &Args::dy).read("scale", &Args::scale).write("dx", &Args::dx);
    add_codes(plan, "zero_point", &Args::zero_point, false, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, dy: object, "
        "scale: object, zero_point: object = None, dx: object) -> None");
  }
  {
    using Args = Observe::Args;
    PlanClass<Observe> plan(module, "ObservePlan",
                            "Adds a batch x to the state min, max, num_batches, which are read and written.");
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
    PlanClass<ComputeQParams> plan(module, "ComputeQParamsPlan", "min, max -> scale, zero_point.");
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
