// The class PackedExperts.
#include <locale>
#include <sstream>

#include "halfbyte/error.hpp"
#include "tensors.h"

namespace halfbyte::python {
namespace {

struct Experts {
  Packed stack;  // whose memory has the weights of all, one behind the other
  int64_t num_experts = 0;

  const PackedWeight& weight() const { return stack.view(); }
  int64_t bytes_of_one() const {
    const PackedWeight& w = weight();
    return packed_weight_bytes(w.spec, w.rows, w.cols);
  }
};

[[noreturn]] void refuse(const std::string& name, const std::string& rule, const std::string& actual) {
  throw Error(ErrorCode::usage, name + " must " + rule + ", got " + actual,
              ErrorDetails{ErrorKind::invalid_argument, name, rule, actual});
}

// u8 [num_experts, bytes of one], with the number of experts.
Array stack_array(nb::handle object, const QuantSpec& spec, int64_t rows, int64_t cols) {
  Array array = to_array(object, "data");
  const int64_t one = packed_weight_bytes(spec, rows, cols);
  const Extents& shape = array.view.shape;
  if (array.view.dtype != DType::u8 || shape.size() != 2 || shape[1] != one || !is_contiguous(array.view))
    refuse("data", "be u8 [num_experts, " + std::to_string(one) + "], contiguous",
           std::string(to_string(array.view.dtype)) + " " + shape_text(shape));
  return array;
}

Packed view_of(const Experts& self, int64_t expert) {
  if (expert < 0 || expert >= self.num_experts) throw nb::index_error("there is no such expert");
  const PackedWeight& w = self.weight();
  const int64_t one = self.bytes_of_one();
  const TensorView view{static_cast<std::byte*>(w.data) + expert * one, DType::u8, {one}, {}, w.device, one};
  Tensor memory = Tensor::of(view, std::make_shared<PackedTensor>(self.stack));
  return {PackedTensor::of(w.spec, w.rows, w.cols, std::move(memory)), self.stack.home};
}

Tensor data_of(const Experts& self, const Tensor& memory) {
  const TensorView view{memory.data(),   DType::u8,         {self.num_experts, self.bytes_of_one()}, {},
                        memory.device(), memory.num_bytes()};
  return Tensor::of(view, std::make_shared<Tensor>(memory));
}

// A weight that is to be one of several: quantized, or packed.
struct Source {
  const Packed* packed = nullptr;
  const Quantized* quantized = nullptr;
  int64_t expert = 0;  // of a quantized one

  QuantSpec spec() const { return packed ? packed->view().spec : quantized->tensor.spec; }
  Device device() const { return packed ? packed->view().device : quantized->tensor.device(); }
  Extents shape() const {
    if (packed) return {packed->view().rows, packed->view().cols};
    const WeightView view = quantized->tensor.weight_view(expert);
    return {view.rows, view.cols};
  }
  const Array& home() const { return packed ? packed->home : quantized->home; }
};

std::vector<Source> sources_of(nb::handle weights) {
  std::vector<Source> sources;
  if (nb::isinstance<Quantized>(weights)) {
    const Quantized& all = nb::cast<const Quantized&>(weights);
    if (all.tensor.shape.size() != 3)
      refuse("weights", "be a list, or a QuantizedTensor [num_experts, rows, cols]",
             "one of shape " + shape_text(all.tensor.shape));
    for (int64_t e = 0; e < all.tensor.shape[0]; ++e) sources.push_back({nullptr, &all, e});
    if (sources.empty()) refuse("weights", "have at least one weight", "none");
    return sources;
  }
  if (!nb::isinstance<nb::sequence>(weights) || nb::isinstance<nb::str>(weights))
    wrong_type("weights", "a list of QuantizedTensor or PackedTensor, or a QuantizedTensor", weights);
  for (const nb::handle each : nb::borrow<nb::sequence>(weights)) {
    const std::string name = "weights[" + std::to_string(sources.size()) + "]";
    if (nb::isinstance<Packed>(each))
      sources.push_back({&nb::cast<const Packed&>(each)});
    else if (nb::isinstance<Quantized>(each))
      sources.push_back({nullptr, &nb::cast<const Quantized&>(each)});
    else
      wrong_type(name, "a QuantizedTensor or a PackedTensor", each);
    const Source& first = sources.front();
    const Source& last = sources.back();
    if (!(last.spec() == first.spec()))
      refuse(name, "be of " + to_string(first.spec()) + " as weights[0]", to_string(last.spec()));
    if (last.shape() != first.shape())
      refuse(name, "have the shape " + shape_text(first.shape()) + " as weights[0]",
             shape_text(last.shape()));
    if (last.device() != first.device())
      refuse(name, "be on " + halfbyte::to_string(first.device()) + " as weights[0]",
             halfbyte::to_string(last.device()));
  }
  if (sources.empty()) refuse("weights", "have at least one weight", "none");
  return sources;
}

Experts pack_experts(nb::handle weights, int num_threads, nb::handle stream) {
  const std::vector<Source> sources = sources_of(weights);
  const Source& first = sources.front();
  const Extents shape = first.shape();
  const auto count = static_cast<int64_t>(sources.size());
  const Experts experts{empty_packed(first.spec(), shape[0], shape[1], first.home(), nb::none(), count),
                        count};
  const Execution execution = execution_of(num_threads, stream, first.home());
  const nb::gil_scoped_release release;
  for (int64_t e = 0; e < count; ++e) {
    const Source& from = sources[static_cast<size_t>(e)];
    PackedWeight to = experts.weight();
    to.num_bytes = experts.bytes_of_one();
    to.data = static_cast<std::byte*>(to.data) + e * to.num_bytes;
    if (from.packed)
      copy(to.device, to.data, from.packed->view().data, to.num_bytes, execution.stream);
    else
      reorder(from.quantized->tensor.weight_view(from.expert), to, execution);
  }
  return experts;
}

}  // namespace

void bind_experts(nb::module_& module) {
  nb::class_<Experts>(
      module, "PackedExperts",
      "The packed weights [rows, cols] of experts, of one spec, one behind the other in one piece of memory; "
      "pack_experts makes them.\n\n"
      "    >>> q = halfbyte.quantize(np.ones((3, 32, 64), np.float32), \"int4,scale_dtype=f16\")\n"
      "    >>> experts = halfbyte.pack_experts(q)\n"
      "    >>> len(experts), experts.data.shape == (3, q.spec.packed_bytes(32, 64))\n"
      "    (3, True)\n"
      "    >>> bool((experts[1].data == q.pack(1).data).all())\n"
      "    True")
      .def_static(
          "of",
          [](nb::handle spec_or_text, int64_t rows, int64_t cols, nb::handle data) {
            const auto spec = from_python<QuantSpec>(spec_or_text, "spec");
            const Array array = stack_array(data, spec, rows, cols);
            return Experts{{PackedTensor::of(spec, rows, cols, to_tensor(array)), home_of(array)},
                           array.view.shape[0]};
          },
          nb::arg("spec"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::sig("def of(spec: QuantSpec | str, rows: int, cols: int, data: object) -> PackedExperts"),
          "The weights that an array of bytes holds, which is shared: u8 [num_experts, "
          "spec.packed_bytes(rows, cols)], contiguous, at a multiple of 64 bytes (256 on CUDA devices). "
          "Raises "
          "ValueError otherwise.")
      .def_static(
          "copy_of",
          [](nb::handle spec_or_text, int64_t rows, int64_t cols, nb::handle data) {
            const auto spec = from_python<QuantSpec>(spec_or_text, "spec");
            const Array array = stack_array(data, spec, rows, cols);
            void* const stream = to_stream(nb::none(), array);
            const int64_t count = array.view.shape[0];
            const Experts experts{empty_packed(spec, rows, cols, home_of(array), nb::none(), count), count};
            const PackedWeight& w = experts.weight();
            copy(w.device, w.data, array.view.data, w.num_bytes, stream);
            return experts;
          },
          nb::arg("spec"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::sig("def copy_of(spec: QuantSpec | str, rows: int, cols: int, data: object) -> PackedExperts"),
          "The same of bytes that lie anywhere, which are copied.")
      .def_prop_ro(
          "data",
          [](const Experts& self) {
            return to_python(data_of(self, memory_of(self.stack)), self.stack.home);
          },
          nb::sig("def data(self) -> object"), "u8 [num_experts, bytes of one], without a copy.")
      .def_prop_ro("spec", [](const Experts& self) { return self.weight().spec; })
      .def_ro("num_experts", &Experts::num_experts)
      .def_prop_ro("rows", [](const Experts& self) { return self.weight().rows; })
      .def_prop_ro("cols", [](const Experts& self) { return self.weight().cols; })
      .def_prop_ro(
          "num_bytes", [](const Experts& self) { return self.weight().num_bytes; }, "Of all.")
      .def_prop_ro(
          "device", [](const Experts& self) { return to_python(self.weight().device); },
          nb::sig("def device(self) -> str"))
      .def_prop_ro(
          "framework", [](const Experts& self) { return to_python(self.stack.home.framework); },
          nb::sig("def framework(self) -> str"))
      .def("__len__", [](const Experts& self) { return self.num_experts; })
      .def("__getitem__", &view_of, nb::arg("expert"),
           nb::sig("def __getitem__(self, expert: int) -> PackedTensor"),
           "The weight of one expert, which shares the memory.")
      .def(
          "to",
          [](const Experts& self, nb::handle device, nb::handle stream) {
            const auto to = from_python<Device>(device, "device");
            if (to == self.weight().device) return self;
            const Array home = home_on(self.stack.home, to);
            void* const handle = to_stream(stream, to.kind == DeviceKind::cuda ? home : self.stack.home);
            const PackedWeight& w = self.weight();
            Tensor memory = moved(memory_of(self.stack), self.stack.home, to, handle);
            return Experts{{PackedTensor::of(w.spec, w.rows, w.cols, std::move(memory)), home},
                           self.num_experts};
          },
          nb::arg("device"), nb::arg("stream") = nb::none(),
          nb::sig("def to(self, device: object, stream: object = None) -> PackedExperts"),
          "The same weights on another device. Waits for the stream.")
      .def("__repr__",
           [](const Experts& self) {
             const PackedWeight& w = self.weight();
             return "<PackedExperts " + to_string(w.spec) + ": " +
                    shape_text(std::array{self.num_experts, w.rows, w.cols}) + ", " +
                    halfbyte::to_string(w.device) + ">";
           })
      .def("__reduce__", [](const Experts& self) {
        const PackedWeight& w = self.weight();
        const bool as_it_is = self.stack.home.framework == Framework::torch;
        const Tensor memory = memory_of(self.stack);
        const Tensor bytes = data_of(self, as_it_is ? memory : memory.to({}));
        const Array home = as_it_is ? self.stack.home : home_on(self.stack.home, {});
        return nb::make_tuple(nb::module_::import_("halfbyte._values").attr("rebuild_experts"),
                              nb::make_tuple(w.spec, w.rows, w.cols, to_python(bytes, home)));
      });
  module.def(
      "pack_experts", &pack_experts, nb::arg("weights"), nb::kw_only(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig("def pack_experts(weights: QuantizedTensor | Sequence[QuantizedTensor | PackedTensor], *, "
              "num_threads: int = 0, stream: object = None) -> PackedExperts"),
      "The weights of experts in the form that qgemm_grouped reads: of a QuantizedTensor [num_experts, rows, "
      "cols], or of a list of one weight [rows, cols] for each, all of one spec and shape, on one device. A "
      "copy, exact; on CUDA devices it is enqueued on the stream. Raises ValueError naming the weight that "
      "does not fit.\n\n"
      "    >>> of_each = [halfbyte.quantize(np.full((32, 64), i, np.float32), \"nf4\") for i in (1, 2)]\n"
      "    >>> halfbyte.pack_experts(of_each)\n"
      "    <PackedExperts nf4: (2, 32, 64), cpu>");
}

}  // namespace halfbyte::python
