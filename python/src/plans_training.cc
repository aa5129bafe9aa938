// Fake quantization and its gradients; affine quantization with trained scales and biases.
#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "plans.h"

namespace halfbyte::python {
namespace {

template <class Op>
PlanClass<Op>& adam_row(PlanClass<Op>& plan) {
  return plan.row("adam", [](const auto&, typename Op::Args& args, RunArguments&, nb::handle value) {
    if (!nb::isinstance<AdamStep>(value)) wrong_type("adam", "an AdamStep", value);
    args.adam = nb::cast<const AdamStep&>(value);
  });
}

}  // namespace

void bind_training_plans(nb::module_& module) {
  {
    using Args = FakeQuantize::Args;
    PlanClass<FakeQuantize> plan(
        module, "FakeQuantizePlan",
        "x -> y, rounded to the values of a quantized tensor. y may be x. scale and zero_point are written "
        "where the "
        "descriptor has computed=True, global_scale (nvfp4) with computed_global_scale=True; mask, min, max "
        "and num_batches belong to descriptors that have them.\n\n"
        "    >>> plan = halfbyte.FakeQuantizePlan.select(\"cpu\", "
        "halfbyte.FakeQuantizeDescriptor(shape=[2]))\n"
        "    >>> x = np.array([0.3, 9.0], np.float32)\n"
        "    >>> plan.run(x=x, y=x, scale=np.array(0.5, np.float32))\n"
        "    >>> x\n"
        "    array([0.5, 3.5], dtype=float32)");
    plan.read("x", &Args::x).write("y", &Args::y);
    // Scales of 8 bits come as bytes: what they are is in the descriptor.
    plan.row("scale", [](const FakeQuantizeDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      args.scale = run.take(value, "scale", d.computed).view;
      if (args.scale.dtype == DType::u8 && size_of(d.scale_dtype) == 1) args.scale.dtype = d.scale_dtype;
    });
    plan.row("zero_point",
             [](const FakeQuantizeDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
               args.zero_point = run.take(value, "zero_point", d.computed).view;
             });
    plan.row("global_scale",
             [](const FakeQuantizeDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
               args.global_scale = run.take(value, "global_scale", d.computed_global_scale).view;
             });
    plan.write("mask", &Args::mask)
        .write("min", &Args::min)
        .write("max", &Args::max)
        .write("num_batches", &Args::num_batches);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, y: object, "
        "scale: object, zero_point: object = None, mask: object = None, min: object = None, "
        "max: object = None, num_batches: object = None, global_scale: object = None) -> None");
  }
  {
    using Args = FakeQuantizeBackward::Args;
    PlanClass<FakeQuantizeBackward> plan(
        module, "FakeQuantizeBackwardPlan",
        "The straight-through estimator: x (or mask), dy -> dx. dx may be dy.\n\n"
        "    >>> plan = halfbyte.FakeQuantizeBackwardPlan.select(\"cpu\", "
        "halfbyte.FakeQuantizeDescriptor(shape=[2]))\n"
        "    >>> dx = np.empty(2, np.float32)\n"
        "    >>> x, scale = np.array([0.3, 9.0], np.float32), np.array(0.5, np.float32)\n"
        "    >>> plan.run(x=x, dy=np.ones(2, np.float32), scale=scale, dx=dx)\n"
        "    >>> dx\n"
        "    array([1., 0.], dtype=float32)");
    plan.read("x", &Args::x).read("mask", &Args::mask).read("dy", &Args::dy).read("scale", &Args::scale);
    plan.read("zero_point", &Args::zero_point).write("dx", &Args::dx);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object = None, "
        "mask: object = None, dy: object, scale: object = None, zero_point: object = None, dx: object) -> "
        "None");
  }
  {
    using Args = FakeQuantizeLearnedBackward::Args;
    PlanClass<FakeQuantizeLearnedBackward> plan(
        module, "FakeQuantizeLearnedBackwardPlan",
        "x, dy -> dx and the gradients of scale and zero point (LSQ, "
        "arXiv:1902.08153; LSQ+, arXiv:2004.09576). dx may be dy.\n\n"
        "    >>> d = halfbyte.FakeQuantizeDescriptor(shape=[2])\n"
        "    >>> plan = halfbyte.FakeQuantizeLearnedBackwardPlan.select(\"cpu\", d)\n"
        "    >>> dx, dscale = np.empty(2, np.float32), np.empty((), np.float32)\n"
        "    >>> x, scale = np.array([0.25, 9.0], np.float32), np.array(1, np.float32)\n"
        "    >>> plan.run(x=x, dy=np.ones(2, np.float32), scale=scale, dx=dx, dscale=dscale)\n"
        "    >>> dscale.item()\n"
        "    6.75");
    plan.read("x", &Args::x)
        .read("dy", &Args::dy)
        .read("scale", &Args::scale)
        .read("zero_point", &Args::zero_point);
    plan.write("dx", &Args::dx).write("dscale", &Args::dscale).write("dzero_point", &Args::dzero_point);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, dy: object, "
        "scale: object, zero_point: object = None, dx: object, dscale: object, "
        "dzero_point: object = None) -> None");
  }
  {
    using Args = AffineInit::Args;
    PlanClass<AffineInit> plan(module, "AffineInitPlan",
                               "w -> codes, scales, biases, group by group.\n\n"
                               "    >>> d = halfbyte.AffineQdqDescriptor(rows=1, cols=4, bits=2)\n"
                               "    >>> plan = halfbyte.AffineInitPlan.select(\"cpu\", d)\n"
                               "    >>> codes, scales, biases = np.empty(d.code_shape, np.uint8), "
                               "*np.empty((2, *d.scale_shape), np.float32)\n"
                               "    >>> plan.run(w=np.array([[1, 2, 3, 4]], np.float32), codes=codes, "
                               "scales=scales, biases=biases)\n"
                               "    >>> codes.tolist(), scales.tolist(), biases.tolist()\n"
                               "    ([[228]], [[1.0]], [[1.0]])");
    plan.read("w", &Args::w)
        .write("codes", &Args::codes)
        .write("scales", &Args::scales)
        .write("biases", &Args::biases);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, w: object, codes: object, "
        "scales: object, biases: object) -> None");
  }
  {
    using Args = AffineQdq::Args;
    PlanClass<AffineQdq> plan(
        module, "AffineQdqPlan",
        "y = codes * scales + biases.\n\n"
        "    >>> plan = halfbyte.AffineQdqPlan.select(\"cpu\", halfbyte.AffineQdqDescriptor(rows=1, cols=4, "
        "bits=2))\n"
        "    >>> y, one = np.empty((1, 4), np.float32), np.ones((1, 1), np.float32)\n"
        "    >>> plan.run(codes=np.array([[228]], np.uint8), scales=one, biases=one, y=y)\n"
        "    >>> y\n"
        "    array([[1., 2., 3., 4.]], dtype=float32)");
    plan.read("codes", &Args::codes)
        .read("scales", &Args::scales)
        .read("biases", &Args::biases)
        .write("y", &Args::y);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, codes: object, scales: object, "
        "biases: object, y: object) -> None");
  }
  {
    using Args = AffineQdqBackward::Args;
    PlanClass<AffineQdqBackward> plan(
        module, "AffineQdqBackwardPlan",
        "dscales = sum of codes * dy, dbiases = sum of dy over a group; with "
        "descriptor.adam a step of Adam on scales "
        "and biases in the same pass.\n\n"
        "    >>> plan = halfbyte.AffineQdqBackwardPlan.select(\"cpu\", halfbyte.AffineQdqDescriptor(rows=1, "
        "cols=4, bits=2))\n"
        "    >>> dscales, dbiases = np.empty((2, 1, 1), np.float32)\n"
        "    >>> dy = np.ones((1, 4), np.float32)\n"
        "    >>> plan.run(codes=np.array([[228]], np.uint8), dy=dy, dscales=dscales, dbiases=dbiases)\n"
        "    >>> dscales.item(), dbiases.item()\n"
        "    (6.0, 4.0)");
    plan.read("codes", &Args::codes)
        .read("dy", &Args::dy)
        .write("dscales", &Args::dscales)
        .write("dbiases", &Args::dbiases);
    plan.write("scales", &Args::scales).write("biases", &Args::biases);
    plan.write("scale_m", &Args::scale_m).write("scale_v", &Args::scale_v);
    plan.write("bias_m", &Args::bias_m).write("bias_v", &Args::bias_v);
    adam_row(plan).done(
        "def run(self, *, workspace: object = None, stream: object = None, codes: object, dy: object, "
        "dscales: object = None, dbiases: object = None, scales: object = None, biases: object = None, "
        "scale_m: object = None, scale_v: object = None, bias_m: object = None, bias_v: object = None, "
        "adam: AdamStep | None = None) -> None");
  }
}

}  // namespace halfbyte::python
