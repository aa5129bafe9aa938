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
        "descriptor has computed=True; mask, min, max and num_batches belong to descriptors that have them.");
    plan.read("x", &Args::x)
        .write("y", &Args::y)
        .write("scale", &Args::scale)
        .write("zero_point", &Args::zero_point);
    plan.write("mask", &Args::mask)
        .write("min", &Args::min)
        .write("max", &Args::max)
        .write("num_batches", &Args::num_batches);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, y: object, "
        "scale: object, zero_point: object = None, mask: object = None, min: object = None, "
        "max: object = None, num_batches: object = None) -> None");
  }
  {
    using Args = FakeQuantizeBackward::Args;
    PlanClass<FakeQuantizeBackward> plan(
        module, "FakeQuantizeBackwardPlan",
        "The straight-through estimator: x (or mask), dy -> dx. dx may be dy.");
    plan.read("x", &Args::x).read("mask", &Args::mask).read("dy", &Args::dy).read("scale", &Args::scale);
    plan.read("zero_point", &Args::zero_point).write("dx", &Args::dx);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object = None, "
        "mask: object = None, dy: object, scale: object = None, zero_point: object = None, dx: object) -> "
        "None");
  }
  {
    using Args = FakeQuantizeLearnedBackward::Args;
    PlanClass<FakeQuantizeLearnedBackward> plan(module, "FakeQuantizeLearnedBackwardPlan",
                                                "x, dy -> dx and the gradients of scale and zero point (LSQ, "
                                                "arXiv:1902.08153; LSQ+, arXiv:2004.09576). dx may be dy.");
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
    PlanClass<AffineInit> plan(module, "AffineInitPlan", "w -> codes, scales, biases, group by group.");
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
    PlanClass<AffineQdq> plan(module, "AffineQdqPlan", "y = codes * scales + biases.");
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
    PlanClass<AffineQdqBackward> plan(module, "AffineQdqBackwardPlan",
                                      "dscales = sum of codes * dy, dbiases = sum of dy over a group; with "
                                      "descriptor.adam a step of Adam on scales "
                                      "and biases in the same pass.");
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
