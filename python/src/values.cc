// The values that operations take and give, as classes of fields; what plans share.
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "plans.h"

namespace halfbyte::python {
namespace {

void bind_specs(nb::module_& module) {
  Fields<QuantSpec> spec(
      module, "QuantSpec",
      "How the codes of a quantized tensor are read.\n\n"
      "    >>> halfbyte.QuantSpec(\"int4\", group_size=32, scale_dtype=\"f16\").num_groups(64, 128)\n"
      "    256\n\n"
      "Wherever a spec is asked for, its text will do: \"int4,group_size=32,scale_dtype=f16\".");
  spec("format", &QuantSpec::format)("asymmetric", &QuantSpec::asymmetric)(
      "granularity", &QuantSpec::granularity)("group_size", &QuantSpec::group_size)(
      "scale_dtype", &QuantSpec::scale_dtype)("double_quant", &QuantSpec::double_quant)("table",
                                                                                        &QuantSpec::table);
  nb::class_<QuantSpec>& of_spec = spec.done(
      "def __init__(self, format: str = 'nf4', *, asymmetric: bool = False, granularity: str = 'group', "
      "group_size: int = 64, scale_dtype: str = 'f32', double_quant: bool = False, "
      "table: Sequence[float] = ...) -> None",
      "format");
  of_spec.def("__str__", [](const QuantSpec& self) { return to_string(self); });
  of_spec.def_static(
      "parse", [](std::string_view text) { return parse_spec(text); }, nb::arg("text"),
      "The spec of a text as str() gives it. Raises ValueError.");
  of_spec.def_prop_ro(
      "bits", [](const QuantSpec& self) { return info(self.format).bits; }, "Of a code.");
  of_spec.def_prop_ro("has_zeros", [](const QuantSpec& self) { return has_zeros(self); });
  of_spec.def_prop_ro("has_biases", [](const QuantSpec& self) { return has_biases(self); });
  of_spec.def_prop_ro("has_global_scale", [](const QuantSpec& self) { return has_global_scale(self); });
  of_spec.def(
      "num_groups",
      [](const QuantSpec& self, int64_t rows, int64_t cols) {
        return quant_shape(self, rows, cols).num_groups;
      },
      nb::arg("rows"), nb::arg("cols"), "Scales of a matrix.");
  of_spec.def(
      "part_shapes",
      [](const QuantSpec& self, int64_t rows, int64_t cols) {
        const QuantShape s = quant_shape(self, rows, cols);
        const bool by_rows =
            self.granularity == Granularity::group || self.granularity == Granularity::channel;
        const std::vector<int64_t> codes = self.granularity == Granularity::flat
                                               ? std::vector<int64_t>{s.row_bytes}
                                               : std::vector<int64_t>{s.rows, s.row_bytes};
        const std::vector<int64_t> groups =
            by_rows ? std::vector<int64_t>{s.rows, s.groups_per_row} : std::vector<int64_t>{s.num_groups};
        return nb::make_tuple(to_python(codes), to_python(groups));
      },
      nb::arg("rows"), nb::arg("cols"),
      "The shapes of the codes (u8) and of scales, zeros and biases of a matrix in the native layout.");
  of_spec.def(
      "packed_bytes",
      [](const QuantSpec& self, int64_t rows, int64_t cols) { return packed_weight_bytes(self, rows, cols); },
      nb::arg("rows"), nb::arg("cols"),
      "Bytes of the packed form that products read. Raises ValueError if there is none.");

  Fields<Encoding> encoding(
      module, "Encoding",
      "How codes are chosen: what encoding needs beside the spec. A word for scale_rule will do.\n\n"
      "    >>> halfbyte.Encoding(\"half-range\", code_scale=\"unrounded\")\n"
      "    Encoding(scale_rule='half-range', code_scale='unrounded')");
  encoding("scale_rule", &Encoding::scale_rule)("code_scale", &Encoding::code_scale)("search",
                                                                                     &Encoding::search);
  encoding.done(
      "def __init__(self, scale_rule: str | None = None, *, code_scale: str = 'stored', search: bool = "
      "False) -> "
      "None",
      "scale_rule");

  Fields<QParamsConfig> qparams(module, "QParamsConfig",
                                "How a range of values becomes scale and zero point of integer codes.\n\n"
                                "    >>> halfbyte.QParamsConfig.of_bits(4)\n"
                                "    QParamsConfig(q_min=-8, q_max=7)");
  qparams("q_min", &QParamsConfig::q_min)("q_max", &QParamsConfig::q_max)(
      "asymmetric", &QParamsConfig::asymmetric)("scale_rule", &QParamsConfig::scale_rule)(
      "eps", &QParamsConfig::eps);
  qparams
      .done(
          "def __init__(self, *, q_min: int = -128, q_max: int = 127, asymmetric: bool = False, "
          "scale_rule: str = 'absmax', eps: float = 0.0) -> None")
      .def_static("of_bits", &QParamsConfig::of_bits, nb::arg("bits"), nb::arg("asymmetric") = false,
                  "All two's complement codes of 2 to 8 bits.");

  Fields<ObserverConfig> observer(module, "ObserverConfig",
                                  "What an observer records: min-max, moving-average, percentile or mse.\n\n"
                                  "    >>> halfbyte.ObserverConfig(\"percentile\", percentile=99.9)\n"
                                  "    ObserverConfig(kind='percentile', percentile=99.9)");
  observer("kind", &ObserverConfig::kind)("momentum", &ObserverConfig::momentum)(
      "percentile", &ObserverConfig::percentile)("qparams", &ObserverConfig::qparams);
  observer.done(
      "def __init__(self, kind: str = 'min-max', *, momentum: float = 0.99, percentile: float = 99.99, "
      "qparams: QParamsConfig = ...) -> None",
      "kind");
  Fields<AdamStep> adam(module, "AdamStep",
                        "A step of Adam (Kingma and Ba, 2015), with the formula of PyTorch.\n\n"
                        "    >>> halfbyte.AdamStep(learning_rate=1e-4).replace(step=2)\n"
                        "    AdamStep(learning_rate=0.0001, step=2)");
  adam("learning_rate", &AdamStep::learning_rate)("beta1", &AdamStep::beta1)("beta2", &AdamStep::beta2)(
      "epsilon", &AdamStep::epsilon)("step", &AdamStep::step);
  adam.done(
      "def __init__(self, *, learning_rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, "
      "epsilon: float = 1e-08, step: int = 1) -> None");
}

void bind_descriptors(nb::module_& module) {
  using Linear = LinearDescriptor;
  Fields<Linear> linear(
      module, "LinearDescriptor",
      "Of quantize_linear, dequantize_linear and their gradient.\n\n"
      "    >>> d = halfbyte.LinearDescriptor(shape=[4, 100], granularity=\"group\", group_size=64)\n"
      "    >>> d.scale_shape, d.num_levels\n"
      "    ((4, 2), 256)");
  linear("shape", &Linear::shape)("granularity", &Linear::granularity)("axis", &Linear::axis)(
      "group_size", &Linear::group_size)("q_min", &Linear::q_min)("q_max", &Linear::q_max)(
      "dtype", &Linear::dtype)("code_dtype", &Linear::code_dtype)("scale_dtype", &Linear::scale_dtype)(
      "zero_point_dtype", &Linear::zero_point_dtype)("computed", &Linear::computed)(
      "scale_rule", &Linear::scale_rule)("strided", &Linear::strided)("alignment", &Linear::alignment);
  linear
      .done(
          "def __init__(self, *, shape: Sequence[int], granularity: str = 'tensor', axis: int = -1, "
          "group_size: int = 0, q_min: int = -128, q_max: int = 127, dtype: str = 'f32', code_dtype: str = "
          "'i8', "
          "scale_dtype: str = 'f32', zero_point_dtype: str | None = None, computed: bool = False, "
          "scale_rule: str = 'absmax', strided: bool = False, alignment: int = 16) -> None")
      .def_prop_ro(
          "scale_shape", [](const Linear& self) { return to_python(self.scale_shape()); },
          "The shape of scale and zero point.")
      .def_prop_ro("num_levels", &Linear::num_levels);

  using Fake = FakeQuantizeDescriptor;
  Fields<Fake> fake(module, "FakeQuantizeDescriptor",
                    "Of fake quantization and its gradients.\n\n"
                    "    >>> d = halfbyte.FakeQuantizeDescriptor(shape=[4, 100], granularity=\"channel\", "
                    "axis=0, mask=True)\n"
                    "    >>> d.scale_shape, d.mask_shape\n"
                    "    ((4,), (4, 13))");
  fake("shape", &Fake::shape)("granularity", &Fake::granularity)("axis", &Fake::axis)(
      "group_size", &Fake::group_size)("format", &Fake::format)("table", &Fake::table)("q_min", &Fake::q_min)(
      "q_max", &Fake::q_max)("dtype", &Fake::dtype)("scale_dtype", &Fake::scale_dtype)(
      "zero_point_dtype", &Fake::zero_point_dtype)("computed", &Fake::computed)(
      "scale_rule", &Fake::scale_rule)("eps", &Fake::eps)("observer", &Fake::observer)("mask", &Fake::mask)(
      "gradient_scale", &Fake::gradient_scale)("alignment", &Fake::alignment)("computed_global_scale",
                                                                              &Fake::computed_global_scale);
  fake.done(
          "def __init__(self, *, shape: Sequence[int], granularity: str = 'tensor', axis: int = -1, "
          "group_size: int = 0, format: str | None = None, table: Sequence[float] = ..., q_min: int = -8, "
          "q_max: int = 7, dtype: str = 'f32', scale_dtype: str = 'f32', zero_point_dtype: str | None = "
          "None, "
          "computed: bool = False, scale_rule: str = 'absmax', eps: float = 0.0, "
          "observer: ObserverConfig | None = None, mask: bool = False, gradient_scale: float = 1.0, "
          "alignment: int = 16, computed_global_scale: bool = False) -> None")
      .def_prop_ro(
          "scale_shape", [](const Fake& self) { return to_python(self.scale_shape()); },
          "The shape of scale, zero point and the observer's state.")
      .def_prop_ro("mask_shape", [](const Fake& self) { return to_python(self.mask_shape()); })
      .def_prop_ro("state_dtype", [](const Fake& self) { return to_python(self.state_dtype()); })
      .def_prop_ro("num_levels", &Fake::num_levels);

  Fields<ObserveDescriptor> observe(module, "ObserveDescriptor",
                                    "Of observers.\n\n"
                                    "    >>> halfbyte.ObserveDescriptor(shape=[4, 100], "
                                    "granularity=\"channel\", axis=0, observer=\"mse\").count_shape\n"
                                    "    (4,)");
  observe("shape", &ObserveDescriptor::shape)("granularity", &ObserveDescriptor::granularity)(
      "axis", &ObserveDescriptor::axis)("group_size", &ObserveDescriptor::group_size)(
      "dtype", &ObserveDescriptor::dtype)("observer", &ObserveDescriptor::observer)(
      "alignment", &ObserveDescriptor::alignment);
  observe
      .done(
          "def __init__(self, *, shape: Sequence[int], granularity: str = 'tensor', axis: int = -1, "
          "group_size: int = 0, dtype: str = 'f32', observer: ObserverConfig = ..., alignment: int = 16) -> "
          "None")
      .def_prop_ro("state_shape", [](const ObserveDescriptor& self) { return to_python(self.state_shape()); })
      .def_prop_ro("count_shape", [](const ObserveDescriptor& self) { return to_python(self.count_shape()); })
      .def_prop_ro("state_dtype",
                   [](const ObserveDescriptor& self) { return to_python(self.state_dtype()); });

  Fields<QParamsDescriptor> qparams(module, "QParamsDescriptor",
                                    "Of compute_qparams.\n\n"
                                    "    >>> halfbyte.QParamsDescriptor(shape=[4], scale_dtype=\"f16\")\n"
                                    "    QParamsDescriptor(shape=(4,), scale_dtype='f16')");
  qparams("shape", &QParamsDescriptor::shape)("config", &QParamsDescriptor::config)(
      "dtype", &QParamsDescriptor::dtype)("scale_dtype", &QParamsDescriptor::scale_dtype)(
      "zero_point_dtype", &QParamsDescriptor::zero_point_dtype);
  qparams.done(
      "def __init__(self, *, shape: Sequence[int], config: QParamsConfig = ..., dtype: str = 'f32', "
      "scale_dtype: str = 'f32', zero_point_dtype: str | None = None) -> None");

  using Affine = AffineQdqDescriptor;
  Fields<Affine> affine(module, "AffineQdqDescriptor",
                        "Of affine quantization with trained scales and biases (DWQ).\n\n"
                        "    >>> d = halfbyte.AffineQdqDescriptor(rows=4, cols=128, bits=3)\n"
                        "    >>> d.code_shape, d.scale_shape\n"
                        "    ((4, 48), (4, 2))");
  affine("rows", &Affine::rows)("cols", &Affine::cols)("bits", &Affine::bits)(
      "group_size", &Affine::group_size)("packed", &Affine::packed)("dtype", &Affine::dtype)(
      "scale_dtype", &Affine::scale_dtype)("scale_rule", &Affine::scale_rule)("rounding", &Affine::rounding)(
      "refit", &Affine::refit)("adam", &Affine::adam)("alignment", &Affine::alignment)("n_bins",
                                                                                       &Affine::n_bins);
  affine
      .done(
          "def __init__(self, *, rows: int, cols: int, bits: int = 4, group_size: int = 64, packed: bool = "
          "True, "
          "dtype: str = 'f32', scale_dtype: str = 'f32', scale_rule: str = 'minmax', rounding: str = "
          "'half-even', "
          "refit: bool = False, adam: bool = False, alignment: int = 16, n_bins: int = 0) -> None")
      .def_prop_ro("code_shape", [](const Affine& self) { return to_python(self.code_shape()); })
      .def_prop_ro("scale_shape", [](const Affine& self) { return to_python(self.scale_shape()); })
      .def_prop_ro("num_levels", &Affine::num_levels);

  using Weight = QuantizeDescriptor;
  Fields<Weight> weight(
      module, "QuantizeDescriptor",
      "Of quantize and dequantize.\n\n"
      "    >>> halfbyte.QuantizeDescriptor(spec=\"nf4\", rows=4, cols=128).replace(dtype=\"bf16\")\n"
      "    QuantizeDescriptor(rows=4, cols=128, dtype='bf16')");
  weight("spec", &Weight::spec)("rows", &Weight::rows)("cols", &Weight::cols)("dtype", &Weight::dtype)(
      "alignment", &Weight::alignment)("encoding", &Weight::encoding);
  weight.done(
      "def __init__(self, *, spec: QuantSpec | str, rows: int, cols: int, dtype: str = 'f32', "
      "alignment: int = 16, encoding: Encoding | str = ...) -> None");

  using Product = QgemmDescriptor;
  Fields<Product> product(module, "QgemmDescriptor",
                          "Of products with a quantized weight [n, k].\n\n"
                          "    >>> halfbyte.QgemmDescriptor(spec=\"int4\", m=1, n=64, k=128)\n"
                          "    QgemmDescriptor(spec=QuantSpec(format='int4'), m=1, n=64, k=128)");
  product("spec", &Product::spec)("m", &Product::m)("n", &Product::n)("k", &Product::k)(
      "transposed", &Product::transposed)("dtype", &Product::dtype)("packed", &Product::packed)(
      "layout", &Product::layout)("bias", &Product::bias)("accumulate", &Product::accumulate)(
      "math", &Product::math)("early_start", &Product::early_start)("alignment", &Product::alignment)(
      "variant", &Product::variant)("tile", &Product::tile);
  product.done(
      "def __init__(self, *, spec: QuantSpec | str, m: int = 0, n: int, k: int, transposed: bool = False, "
      "dtype: str = 'bf16', packed: bool = True, layout: str = 'halfbyte', bias: bool = False, "
      "accumulate: bool = False, math: str = 'auto', early_start: bool = False, alignment: int = 16, "
      "variant: str = '', tile: tuple[int, int] = (0, 0)) -> None");

  Fields<RouteDescriptor> route(module, "RouteDescriptor",
                                "Of slots in the order of their experts.\n\n"
                                "    >>> halfbyte.RouteDescriptor(tokens=4, top_k=2, num_experts=8)\n"
                                "    RouteDescriptor(tokens=4, top_k=2, num_experts=8)");
  route("tokens", &RouteDescriptor::tokens)("top_k", &RouteDescriptor::top_k)(
      "num_experts", &RouteDescriptor::num_experts)("dtype", &RouteDescriptor::dtype);
  route.done(
      "def __init__(self, *, tokens: int, top_k: int = 1, num_experts: int, dtype: str = 'i32') -> None");

  using Grouped = QgemmGroupedDescriptor;
  Fields<Grouped> grouped(module, "QgemmGroupedDescriptor",
                          "Of products with the quantized weights [n, k] of experts.\n\n"
                          "    >>> halfbyte.QgemmGroupedDescriptor(spec=\"nf4\", num_experts=8, m=4, n=64, "
                          "k=128, rows=\"indices\", top_k=2)\n"
                          "    QgemmGroupedDescriptor(num_experts=8, m=4, n=64, k=128, rows='indices', "
                          "top_k=2)");
  grouped("spec", &Grouped::spec)("num_experts", &Grouped::num_experts)("m", &Grouped::m)("n", &Grouped::n)(
      "k", &Grouped::k)("transposed", &Grouped::transposed)("dtype", &Grouped::dtype)("rows", &Grouped::rows)(
      "top_k", &Grouped::top_k)("x_per_slot", &Grouped::x_per_slot)("sum_slots", &Grouped::sum_slots)(
      "routing_weights", &Grouped::routing_weights)("routing_gradient", &Grouped::routing_gradient)(
      "bias", &Grouped::bias)("swiglu", &Grouped::swiglu)("accumulate", &Grouped::accumulate)(
      "alignment", &Grouped::alignment)("variant", &Grouped::variant);
  grouped.done(
      "def __init__(self, *, spec: QuantSpec | str, num_experts: int, m: int = 0, n: int, k: int, "
      "transposed: bool = False, dtype: str = 'bf16', rows: str = 'offsets', top_k: int = 1, "
      "x_per_slot: bool = False, sum_slots: bool = False, routing_weights: bool = False, "
      "routing_gradient: bool = False, bias: bool = False, swiglu: bool = False, accumulate: bool = False, "
      "alignment: int = 16, variant: str = '') -> None");
}

}  // namespace

void bind_values(nb::module_& module) {
  bind_specs(module);
  bind_descriptors(module);
  nb::class_<QuantizeStatus>(module, "QuantizeStatus", "What an operation found in its data.")
      .def_ro("num_nonfinite", &QuantizeStatus::num_nonfinite)
      .def_ro("first_nonfinite", &QuantizeStatus::first_nonfinite)
      .def_ro("num_unheld_scales", &QuantizeStatus::num_unheld_scales)
      .def_ro("num_coarse_scales", &QuantizeStatus::num_coarse_scales)
      .def_ro("num_invalid_scales", &QuantizeStatus::num_invalid_scales)
      .def_ro("num_invalid_zero_points", &QuantizeStatus::num_invalid_zero_points)
      .def_prop_ro("ok", &QuantizeStatus::ok)
      .def("__repr__", [](const QuantizeStatus& self) {
        std::string text = "QuantizeStatus(";
        const auto add = [&](const char* name, int64_t value) {
          if (value > 0)
            text += (text.back() == '(' ? "" : ", ") + std::string(name) + "=" + std::to_string(value);
        };
        add("num_nonfinite", self.num_nonfinite);
        if (self.num_nonfinite > 0) text += ", first_nonfinite=" + std::to_string(self.first_nonfinite);
        add("num_unheld_scales", self.num_unheld_scales);
        add("num_coarse_scales", self.num_coarse_scales);
        add("num_invalid_scales", self.num_invalid_scales);
        add("num_invalid_zero_points", self.num_invalid_zero_points);
        return text + ")";
      });
  nb::class_<Sku>(module, "Sku", "Which kernel a plan runs.")
      .def_ro("op", &Sku::op)
      .def_ro("kernel", &Sku::kernel)
      .def_ro("backend", &Sku::backend)
      .def_ro("dtypes", &Sku::dtypes)
      .def("__str__", [](const Sku& self) { return to_string(self); })
      .def("__repr__", [](const Sku& self) { return "<Sku: " + to_string(self) + ">"; });
  nb::class_<PrecisionGuarantee>(module, "PrecisionGuarantee", "What holds for the results of a plan.")
      .def_prop_ro("math", [](const PrecisionGuarantee& self) { return to_python(self.math); })
      .def_prop_ro("accumulator", [](const PrecisionGuarantee& self) { return to_python(self.accumulator); })
      .def_ro("deterministic", &PrecisionGuarantee::deterministic)
      .def_ro("same_on_all_devices", &PrecisionGuarantee::same_on_all_devices)
      .def_prop_ro("weight_rounding",
                   [](const PrecisionGuarantee& self) { return to_python(self.weight_rounding); });
}

void* part_data(const Array& array, const char* name, DType dtype, int64_t num_bytes, Device device) {
  const TensorView& view = array.view;
  const auto refuse = [&](const std::string& rule, const std::string& actual) {
    throw Error(ErrorCode::usage, std::string(name) + " must " + rule + ", got " + actual,
                ErrorDetails{ErrorKind::invalid_argument, name, rule, actual});
  };
  if (view.dtype != dtype) refuse(std::string("be ") + to_string(dtype), to_string(view.dtype));
  if (view.device != device) refuse("be on " + to_string(device), to_string(view.device));
  if (!is_contiguous(view)) refuse("be contiguous", "other strides");
  const int64_t given = contiguous_bytes(view.dtype, view.shape);
  if (given < num_bytes) refuse("have " + std::to_string(num_bytes) + " bytes", std::to_string(given));
  return view.data;
}

RunWorkspace workspace_of(nb::handle given, nb::handle stream, void* handle, const Array& like, Device device,
                          int64_t num_bytes, KeptWorkspaces& kept) {
  if (!given.is_none()) {
    Array memory = to_array(given, "workspace", true, stream);
    void* const data = part_data(memory, "workspace", DType::u8, num_bytes, device);
    return {{data, contiguous_bytes(DType::u8, memory.view.shape)}, std::move(memory.owner)};
  }
  if (device.kind == DeviceKind::cpu) return {};
  if (like.framework == Framework::torch) {  // its allocator knows the stream, and graphs that are captured
    const nb::object memory = empty_beside(like, DType::u8, std::array{num_bytes});
    if (!stream.is_none()) {
      const nb::object torch = nb::module_::import_("torch");
      memory.attr("record_stream")(torch.attr("cuda").attr("ExternalStream")(
          reinterpret_cast<uintptr_t>(handle), nb::arg("device") = device.index));
    }
    void* const data = to_array(memory, "workspace", true).view.data;
    return {{data, num_bytes}, memory};
  }
  const std::scoped_lock lock(kept.mutex);
  auto [found, added] = kept.by_stream.try_emplace(handle);
  if (added) found->second = Tensor(device, DType::u8, {num_bytes});
  return {{found->second.data(), num_bytes}, nb::object()};
}

}  // namespace halfbyte::python
