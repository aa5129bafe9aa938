// The products of one shape of weights, for any number of rows of x: what layers and the operators of PyTorch
// call.
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfbyte/error.hpp"
#include "halfbyte/qgemm.hpp"
#include "plans.h"

namespace halfbyte::python {
namespace {

// Products on the CPU of at least so many multiplications release the GIL: 0.2 ms on one core.
constexpr int64_t kReleaseGil = int64_t{1} << 24;

struct Products {
  QgemmPlans plans;
  int64_t weight_bytes;
  KeptWorkspaces kept;
  // What a product asks for that works in none: no kernel touches it, so runs on any streams may share it.
  static constexpr int64_t kUnusedBytes = 16;
  Memory unused;

  Products(Device device, const QgemmDescriptor& descriptor, int num_threads)
      : plans(device, descriptor, {num_threads}),
        weight_bytes(packed_weight_bytes(descriptor.spec, descriptor.n, descriptor.k)),
        unused(device, kUnusedBytes) {}
};

[[noreturn]] void refuse(const char* name, const std::string& rule, const std::string& actual) {
  throw Error(ErrorCode::usage, std::string(name) + " must " + rule + ", got " + actual,
              ErrorDetails{ErrorKind::invalid_argument, name, rule, actual});
}

std::string text_of(const Extents& shape) {
  std::string text;
  for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

// [..., cols] as [m, cols].
int64_t fold_rows(TensorView& view, const char* name, int64_t cols) {
  if (view.shape.empty() || view.shape.back() != cols)
    refuse(name, "have the shape [..., " + std::to_string(cols) + "]", text_of(view.shape));
  if (!is_contiguous(view)) refuse(name, "be contiguous", "other strides");
  int64_t m = 1;
  for (size_t axis = 0; axis + 1 < view.shape.size(); ++axis) m *= view.shape[axis];
  view.shape = {m, cols};
  view.strides = {};
  return m;
}

// y where none is given. On CUDA devices x makes it: what the exchange table allocates there, the allocator
// of PyTorch does not know as its own, and record_stream does nothing for it.
Array new_rows(const Array& x, const Extents& shape) {
  if (x.framework != Framework::torch || x.view.device.kind == DeviceKind::cpu)
    return new_beside(x, x.view.dtype, shape);
  return to_array(x.source.attr("new_empty")(nb::tuple(to_python(shape))), "out", true);
}

ConstPackedWeight weight_of(const Products& self, nb::handle weight, nb::handle stream, nb::object& owner) {
  if (nb::isinstance<PackedTensor>(weight)) {
    const PackedWeight& packed = nb::cast<const PackedTensor&>(weight).view();
    owner = nb::borrow(weight);
    return packed;
  }
  const QgemmDescriptor& d = self.plans.descriptor();
  Array array = to_array(weight, "weight", false, stream);
  const TensorView& view = array.view;
  const int64_t given = is_contiguous(view) ? contiguous_bytes(view.dtype, view.shape) : -1;
  if (given != self.weight_bytes)
    refuse("weight",
           "be the " + std::to_string(self.weight_bytes) + " contiguous bytes of a packed weight " +
               halfbyte::python::to_string(d.spec) + " [" + std::to_string(d.n) + ", " + std::to_string(d.k) +
               "]",
           given < 0 ? "strided memory"
                     : std::to_string(given) + " bytes (" + to_string(view.dtype) + " " +
                           text_of(view.shape) + "): a cast destroys them");
  owner = std::move(array.owner);
  return {d.spec, d.n, d.k, view.data, view.device, kPackedWeightVersion, given};
}

nb::object multiply_rows(Products& self, Array rows, nb::handle weight, nb::handle bias, nb::handle out,
                         nb::handle stream) {
  const QgemmDescriptor& d = self.plans.descriptor();
  const Device device = self.plans.device();
  Qgemm::Args args;
  Extents shape = rows.view.shape;
  const int64_t m = fold_rows(rows.view, "x", d.transposed ? d.n : d.k);
  if (rows.view.dtype != d.dtype)
    refuse("x", std::string("be ") + to_string(d.dtype), to_string(rows.view.dtype));
  if (rows.view.device != device)
    refuse("x", "be on " + halfbyte::to_string(device), halfbyte::to_string(rows.view.device));
  args.x = rows.view;
  nb::object weight_owner;
  args.weight = weight_of(self, weight, stream, weight_owner);
  Array bias_array;
  if (!bias.is_none()) {
    bias_array = to_array(bias, "bias", false, stream);
    args.bias = bias_array.view;
  }
  const int64_t cols = d.transposed ? d.k : d.n;
  shape.back() = cols;
  if (out.is_none() && d.accumulate) refuse("out", "be given to products that accumulate", "None");
  Array y = out.is_none() ? new_rows(rows, shape) : to_array(out, "out", true, stream);
  if (y.view.shape != shape) refuse("out", "have the shape " + text_of(shape), text_of(y.view.shape));
  fold_rows(y.view, "out", cols);
  args.y = y.view;

  const QgemmPlan plan = self.plans.at(m);
  if (device.kind == DeviceKind::cpu) {
    if (m * d.n * d.k < kReleaseGil) {
      plan.run(nullptr, {}, args);
    } else {
      const nb::gil_scoped_release release;
      plan.run(nullptr, {}, args);
    }
  } else {
    void* const handle = to_stream(stream, rows);
    RunWorkspace memory{self.unused, {}};
    if (plan.workspace_size() > self.unused.num_bytes())
      memory = workspace_of(nb::none(), stream, handle, rows, device, plan.workspace_size(), self.kept);
    const nb::gil_scoped_release release;
    plan.run(handle, memory.workspace, args);
  }
  return out.is_none() ? give_back(rows, y.source) : y.source;
}

nb::object multiply(Products& self, nb::handle x, nb::handle weight, nb::handle bias, nb::handle out,
                    nb::handle stream) {
  return multiply_rows(self, to_array(x, "x", false, stream), weight, bias, out, stream);
}

// The products of one shape of weights for x of any dtype and device, on as many threads as PyTorch has.
class AnyProducts {
 public:
  AnyProducts(const QuantSpec& spec, int64_t n, int64_t k) : spec_(spec), n_(n), k_(k) {}
  AnyProducts(const AnyProducts&) = delete;

  nb::object multiply(nb::handle x, nb::handle weight, nb::handle bias, bool transposed, nb::handle out) {
    Array rows = to_contiguous(x, "x");
    const Kind kind{rows.view.dtype, rows.view.device, transposed,
                    !bias.is_none(), !out.is_none(),   num_threads()};
    Products& products = find(kind);
    return multiply_rows(products, std::move(rows), weight, bias, out, nb::none());
  }

 private:
  struct Kind {
    DType dtype;
    Device device;
    bool transposed, bias, accumulate;
    int num_threads;
    bool operator==(const Kind&) const = default;
  };
  struct Entry {
    Kind kind;
    std::unique_ptr<Products> products;
  };

  static int num_threads() {
    static PyObject* const get =
        nb::object(nb::module_::import_("torch").attr("get_num_threads")).release().ptr();
    return nb::cast<int>(nb::steal(PyObject_CallObject(get, nullptr)));
  }

  // Calls have the GIL.
  Products& find(const Kind& kind) {
    for (const Entry& entry : entries_)
      if (entry.kind == kind) return *entry.products;
    QgemmDescriptor d;
    d.spec = spec_;
    d.n = n_;
    d.k = k_;
    d.dtype = kind.dtype;
    d.transposed = kind.transposed;
    d.bias = kind.bias;
    d.accumulate = kind.accumulate;
    entries_.push_back({kind, std::make_unique<Products>(kind.device, d, kind.num_threads)});
    return *entries_.back().products;
  }

  QuantSpec spec_;
  int64_t n_, k_;
  std::vector<Entry> entries_;
};

// The parts of a packed weight, into arrays by name that the caller has made.
void unpack_into(nb::handle spec_or_text, int64_t n, int64_t k, nb::handle packed, nb::kwargs parts) {
  const auto spec = from_python<QuantSpec>(spec_or_text, "spec");
  const Array memory = to_array(packed, "packed");
  const Device device = memory.view.device;
  const int64_t num_bytes = packed_weight_bytes(spec, n, k);
  const ConstPackedWeight weight{
      spec,     n, k, part_data(memory, "packed", DType::u8, num_bytes, device), device, kPackedWeightVersion,
      num_bytes};
  const WeightViewBytes bytes = weight_view_bytes(spec, n, k, Layout::halfbyte);
  WeightView view{spec, n, k};
  view.device = device;
  std::vector<Array> arrays;
  const auto take = [&](const char* name, auto& data, DType dtype, int64_t size) {
    if (size == 0) return;
    const Array& array = arrays.emplace_back(to_array(parts[name], name, true));
    data = static_cast<std::remove_reference_t<decltype(data)>>(part_data(array, name, dtype, size, device));
  };
  take("codes", view.codes, DType::u8, bytes.codes);
  const bool bytes_of_scales = spec.double_quant || size_of(spec.scale_dtype) == 1;
  take("scales", view.scales, bytes_of_scales ? DType::u8 : spec.scale_dtype, bytes.scales);
  take("zeros", view.zeros, DType::u8, bytes.zeros);
  take("biases", view.biases, spec.scale_dtype, bytes.biases);
  take("absmax", view.absmax, DType::f32, bytes.absmax);
  take("map", view.map, DType::f32, bytes.map);
  take("offset", view.offset, DType::f32, bytes.offset);
  take("global_scale", view.global_scale, DType::f32, bytes.global_scale);
  const Execution execution{0, to_stream(nb::none(), memory)};
  const nb::gil_scoped_release release;
  reorder(weight, view, execution);
}

}  // namespace

void bind_products(nb::module_& module) {
  nb::class_<Products>(
      module, "QgemmPlans",
      "The products of one shape of packed weights: a plan for each number of rows of x.\n\n"
      "    y[..., n] = x[..., k] . W^T (+ bias[n])    transposed: y[..., k] = x[..., n] . W\n\n"
      "x, bias, y: dtype (bf16, f16, f32), contiguous, on the device. W [n, k] is packed; which "
      "weight it is, each call says. Threads may share the object.\n\n"
      "    >>> w = halfbyte.quantize(np.eye(64, dtype=np.float32), \"int8\").pack()\n"
      "    >>> plans = halfbyte.QgemmPlans(w.spec, w.rows, w.cols, \"f32\")\n"
      "    >>> plans(np.ones((2, 3, 64), np.float32), w).shape\n"
      "    (2, 3, 64)")
      .def(
          "__init__",
          [](Products* self, nb::handle spec, int64_t n, int64_t k, nb::handle dtype, bool transposed,
             bool bias, bool accumulate, nb::handle device, int num_threads) {
            QgemmDescriptor d;
            from_python(spec, "spec", d.spec);
            from_python(dtype, "dtype", d.dtype);
            d.n = n;
            d.k = k;
            d.transposed = transposed;
            d.bias = bias;
            d.accumulate = accumulate;
            new (self) Products(from_python<Device>(device, "device"), d, num_threads);
          },
          nb::arg("spec"), nb::arg("n"), nb::arg("k"), nb::arg("dtype") = "bf16", nb::kw_only(),
          nb::arg("transposed") = false, nb::arg("bias") = false, nb::arg("accumulate") = false,
          nb::arg("device") = "cpu", nb::arg("num_threads") = 0,
          nb::sig("def __init__(self, spec: QuantSpec | str, n: int, k: int, dtype: object = 'bf16', *, "
                  "transposed: bool = False, bias: bool = False, accumulate: bool = False, "
                  "device: object = 'cpu', num_threads: int = 0) -> None"),
          "accumulate: y += instead of y =. num_threads is of the CPU; 0: all. Raises ValueError for what "
          "cannot "
          "be packed or multiplied.")
      .def(
          "__call__", &multiply, nb::arg("x"), nb::arg("weight"), nb::arg("bias") = nb::none(),
          nb::arg("out") = nb::none(), nb::arg("stream") = nb::none(),
          nb::sig(
              "def __call__(self, x: object, weight: object, bias: object | None = None, out: object | None "
              "= None, stream: object = None) -> object"),
          "The product: a new array beside x, or `out`, which overlaps nothing. x may have any number of "
          "leading "
          "axes, also with no rows. weight: a PackedTensor, or an array with exactly its bytes, of any shape "
          "and "
          "dtype. stream: as QgemmPlan.run takes it. Raises ValueError for arrays of other shapes, dtypes or "
          "devices, naming them.")
      .def(
          "at", [](const Products& self, int64_t m) { return PlanClass<Qgemm>::Value{self.plans.at(m)}; },
          nb::arg("m"), nb::sig("def at(self, m: int) -> QgemmPlan"), "The plan for m rows.")
      .def(
          "workspace_size", [](const Products& self, int64_t m) { return self.plans.workspace_size(m); },
          nb::arg("m"), "Bytes that the plan for m rows works in.")
      .def_prop_ro("descriptor", [](const Products& self) { return self.plans.descriptor(); })
      .def_prop_ro("device", [](const Products& self) { return to_python(self.plans.device()); })
      .def_ro("weight_bytes", &Products::weight_bytes, "Bytes of the packed weight.");
  nb::class_<AnyProducts>(module, "_AnyProducts")
      .def("__init__", [](AnyProducts* self, nb::handle spec, int64_t n,
                          int64_t k) { new (self) AnyProducts(from_python<QuantSpec>(spec, "spec"), n, k); })
      .def("multiply", &AnyProducts::multiply, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
           nb::arg("transposed"), nb::arg("out").none() = nb::none());
  module.def("_unpack", &unpack_into);  // for halfbyte.torch, whose operators allocate
  module.attr("_packed_version") = kPackedWeightVersion;
}

}  // namespace halfbyte::python
