// Weights: quantize, dequantize, products.
#include "halfbyte/qgemm.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "plans.h"

namespace halfbyte::python {
namespace {

// The parts of a quantized matrix in the native layout.
template <class Op, class View>
void add_parts(PlanClass<Op>& plan, View Op::Args::*member, bool written) {
  const auto part = [&plan, member, written](const char* name, auto View::*data) {
    plan.row(
        name, [=](const QuantizeDescriptor& d, typename Op::Args& args, RunArguments& run, nb::handle value) {
          const QuantShape s = quant_shape(d.spec, d.rows, d.cols);
          const std::string_view word = name;
          const bool bytes = word == "codes" || word == "zeros" || size_of(d.spec.scale_dtype) == 1;
          const bool global = word == "global_scale";
          const DType dtype = global ? DType::f32 : bytes ? DType::u8 : d.spec.scale_dtype;
          const int64_t size = global            ? size_of(dtype)
                               : word == "codes" ? s.code_bytes()
                                                 : s.num_groups * size_of(dtype);
          void* const memory = part_data(run.take(value, name, written), name, dtype, size, run.device);
          (args.*member).*data = static_cast<std::remove_reference_t<decltype((args.*member).*data)>>(memory);
        });
  };
  part("codes", &View::codes);
  part("scales", &View::scales);
  part("zeros", &View::zeros);
  part("biases", &View::biases);
  part("global_scale", &View::global_scale);
}

// What a view of the descriptor says of itself.
template <class View>
void describe(View& view, const QuantizeDescriptor& d) {
  view.spec = d.spec;
  view.rows = d.rows;
  view.cols = d.cols;
}

}  // namespace

void bind_weight_plans(nb::module_& module) {
  {
    using Args = Quantize::Args;
    PlanClass<Quantize> plan(
        module, "QuantizePlan",
        "x [rows, cols] -> codes, scales (and zeros, biases), in the native layout.\n\n"
        "    >>> d = halfbyte.QuantizeDescriptor(spec=\"int8\", rows=1, cols=2)\n"
        "    >>> plan = halfbyte.QuantizePlan.select(\"cpu\", d)\n"
        "    >>> codes, scales = np.empty((1, 2), np.uint8), np.empty((1, 1), np.float32)\n"
        "    >>> plan.run(x=np.array([[1, -127]], np.float32), codes=codes, scales=scales)\n"
        "    >>> codes.tolist(), scales.tolist()\n"
        "    ([[129, 1]], [[1.0]])");
    plan.row("x", [](const QuantizeDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      args.x = run.take(value, "x", false).view;
      describe(args.out, d);
    });
    add_parts(plan, &Args::out, true);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, codes: object, "
        "scales: object, zeros: object = None, biases: object = None, global_scale: object = None) -> None");
  }
  {
    using Args = Dequantize::Args;
    PlanClass<Dequantize> plan(
        module, "DequantizePlan",
        "codes, scales (and zeros, biases) -> y [rows, cols].\n\n"
        "    >>> d = halfbyte.QuantizeDescriptor(spec=\"int8\", rows=1, cols=2, dtype=\"f16\")\n"
        "    >>> plan = halfbyte.DequantizePlan.select(\"cpu\", d)\n"
        "    >>> y = np.empty((1, 2), np.float16)\n"
        "    >>> plan.run(codes=np.array([[129, 1]], np.uint8), scales=np.ones((1, 1), np.float32), y=y)\n"
        "    >>> y\n"
        "    array([[   1., -127.]], dtype=float16)");
    plan.row("y", [](const QuantizeDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      args.y = run.take(value, "y", true).view;
      describe(args.in, d);
    });
    add_parts(plan, &Args::in, false);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, codes: object, scales: object, "
        "zeros: object = None, biases: object = None, global_scale: object = None, y: object) -> None");
  }
  {
    using Args = Qgemm::Args;
    PlanClass<Qgemm> plan(
        module, "QgemmPlan",
        "y = x . W^T (+ bias), or with descriptor.transposed y = x . W. The weight is "
        "`weight`, the bytes of a packed "
        "weight; or, with descriptor.packed = False, the parts of a view.\n\n"
        "    >>> w = halfbyte.quantize(np.eye(64, dtype=np.float32), \"int8\")\n"
        "    >>> d = halfbyte.QgemmDescriptor(spec=w.spec, m=1, n=64, k=64, dtype=\"f32\")\n"
        "    >>> plan = halfbyte.QgemmPlan.select(\"cpu\", d)\n"
        "    >>> x, y = np.ones((1, 64), np.float32), np.empty((1, 64), np.float32)\n"
        "    >>> plan.run(x=x, weight=w.pack().data, y=y)\n"
        "    >>> bool((x == y).all())\n"
        "    True");
    plan.read("x", &Args::x).read("bias", &Args::bias).write("y", &Args::y);
    plan.row("weight", [](const QgemmDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      const Array& array = run.take(value, "weight", false);
      const int64_t size = packed_weight_bytes(d.spec, d.n, d.k);
      void* const memory = part_data(array, "weight", DType::u8, size, run.device);
      args.weight = PackedWeight{d.spec, d.n, d.k, memory, run.device, kPackedWeightVersion, size};
    });
    const auto part = [&plan](const char* name, auto ConstWeightView::*data,
                              int64_t WeightViewBytes::*bytes) {
      plan.row(name, [=](const QgemmDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
        const std::string_view word = name;
        const bool scale =
            word == "biases" || (word == "scales" && !d.spec.double_quant && size_of(d.spec.scale_dtype) > 1);
        const bool floats = word == "absmax" || word == "map" || word == "offset" || word == "global_scale";
        const Array& array = run.take(value, name, false);
        DType dtype = scale ? d.spec.scale_dtype : floats ? DType::f32 : DType::u8;
        // Codes come in words of any size: what counts is their bytes.
        if (!scale && !floats) dtype = array.view.dtype;
        const int64_t size = weight_view_bytes(d.spec, d.n, d.k, d.layout).*bytes;
        const void* const memory = part_data(array, name, dtype, size, run.device);
        args.view.spec = d.spec;
        args.view.rows = d.n;
        args.view.cols = d.k;
        args.view.layout = d.layout;
        args.view.device = run.device;
        args.view.*data = static_cast<std::remove_reference_t<decltype(args.view.*data)>>(memory);
      });
    };
    part("codes", &ConstWeightView::codes, &WeightViewBytes::codes);
    part("scales", &ConstWeightView::scales, &WeightViewBytes::scales);
    part("zeros", &ConstWeightView::zeros, &WeightViewBytes::zeros);
    part("biases", &ConstWeightView::biases, &WeightViewBytes::biases);
    part("absmax", &ConstWeightView::absmax, &WeightViewBytes::absmax);
    part("map", &ConstWeightView::map, &WeightViewBytes::map);
    part("offset", &ConstWeightView::offset, &WeightViewBytes::offset);
    part("global_scale", &ConstWeightView::global_scale, &WeightViewBytes::global_scale);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, y: object, "
        "weight: object = None, bias: object = None, codes: object = None, scales: object = None, "
        "zeros: object = None, biases: object = None, absmax: object = None, map: object = None, "
        "offset: object = None, global_scale: object = None) -> None");
  }
}

}  // namespace halfbyte::python
