// Which layers of a model are quantized, and their weights.
#include <nanobind/stl/string.h>

#include "halfbyte/checkpoint.hpp"
#include "plans.h"
#include "tensors.h"

namespace halfbyte::python {

void bind_selection(nb::module_& module) {
  // weights: (name, shape, dtype), dtype None where it is none of halfbyte.
  module.def("_dense_reasons",
             [](const std::string& config, nb::list weights, nb::handle include, nb::handle exclude) {
               std::vector<Weight> of;
               for (const nb::handle item : weights) {
                 Weight& weight = of.emplace_back();
                 weight.name = nb::cast<std::string>(item[0]);
                 from_python(item[1], "shape", weight.shape);
                 from_python(item[2], "dtype", weight.dtype);
               }
               QuantizeOptions options;
               from_python(include, "include", options.include);
               from_python(exclude, "exclude", options.exclude);
               return to_python(dense_reasons(config, of, options));
             });
  // A dense weight of a Checkpoint as a QuantizedTensor of PyTorch.
  module.def("_quantize_weight", [](const Checkpoint& checkpoint, const std::string& name, nb::handle spec,
                                    nb::handle encoding, nb::handle device, int num_threads) {
    const auto of = from_python<QuantSpec>(spec, "spec");
    const auto by = from_python<Encoding>(encoding, "encoding");
    const auto on = from_python<Device>(device, "device");
    Quantized result{{}, home_of(Framework::torch, on)};
    void* const stream = to_stream(nb::none(), result.home);
    const nb::gil_scoped_release release;
    result.tensor = quantize_weight(checkpoint, name, of, by, on, {num_threads, stream});
    return result;
  });
}

}  // namespace halfbyte::python
