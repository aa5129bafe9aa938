// What an observer has seen, in Python and in the tensors of its plans.
#include "halfbyte/observe.hpp"

#include <nanobind/stl/vector.h>

#include "plans.h"
#include "tensors.h"

namespace halfbyte::python {
namespace {

std::vector<double> to_values(nb::handle object) {
  if (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr()))
    return {from_python<double>(object, "range")};
  std::vector<double> values;
  for (const nb::handle item : nb::borrow<nb::iterable>(object))
    values.push_back(from_python<double>(item, "range"));
  return values;
}

// The three tensors of a state.
struct StateArrays {
  Array min, max, num_batches;
  void* stream;

  StateArrays(nb::handle min_, nb::handle max_, nb::handle num_batches_, bool written, nb::handle on)
      : min(to_array(min_, "min", written, on)),
        max(to_array(max_, "max", written, on)),
        num_batches(to_array(num_batches_, "num_batches", written, on)),
        stream(to_stream(on, min)) {}
};

void bind_state(nb::module_& module) {
  using State = ObserverState;
  nb::class_<State>(module, "ObserverState",
                    "What an observer has seen: all that it keeps between batches, as plain values.\n\n"
                    "    >>> config = halfbyte.ObserverConfig(\"min-max\")\n"
                    "    >>> state = halfbyte.ObserverState.empty(1)\n"
                    "    >>> state.update(config, -1.0, 2.0)\n"
                    "    >>> state.update(config, [-3.0], [1.0])\n"
                    "    >>> state\n"
                    "    ObserverState(min=[-3.0], max=[2.0], dtype='f32', num_batches=[2])\n"
                    "    >>> state.qparams(halfbyte.QParamsConfig.of_bits(8))\n"
                    "    [QParams(scale=0.023622047156095505, zero_point=0)]\n\n"
                    "min, max: a value for each group, in the order of the scales; inf and -inf: nothing "
                    "seen. dtype: of the "
                    "arithmetic, f32, or f64 for f64 tensors. num_batches: one count; percentile and mse: "
                    "one of each group.")
      .def(
          "__init__",
          [](State* self, nb::handle min, nb::handle max, nb::handle dtype,
             std::vector<int64_t> num_batches) {
            new (self) State{to_values(min), to_values(max), from_python<DType>(dtype, "dtype"),
                             std::move(num_batches)};
          },
          nb::arg("min"), nb::arg("max"), nb::arg("dtype") = "f32",
          nb::arg("num_batches") = std::vector<int64_t>{0},
          nb::sig("def __init__(self, min: Sequence[float], max: Sequence[float], dtype: object = 'f32', "
                  "num_batches: Sequence[int] = [0]) -> None"))
      .def_static(
          "empty",
          [](int64_t num_groups, nb::handle dtype, nb::handle kind) {
            return State::empty(num_groups, from_python<DType>(dtype, "dtype"),
                                from_python<ObserverKind>(kind, "kind"));
          },
          nb::arg("num_groups"), nb::arg("dtype") = "f32", nb::arg("kind") = "min-max",
          nb::sig(
              "def empty(num_groups: int, dtype: object = 'f32', kind: str = 'min-max') -> ObserverState"),
          "Before the first batch.")
      .def_ro("min", &State::min)
      .def_ro("max", &State::max)
      .def_prop_ro(
          "dtype", [](const State& self) { return to_python(self.dtype); }, nb::sig("def dtype(self) -> str"))
      .def_ro("num_batches", &State::num_batches)
      .def(
          "update",
          [](State& self, nb::handle config, nb::handle min, nb::handle max) {
            self.update(from_python<ObserverConfig>(config, "config"), to_values(min), to_values(max));
          },
          nb::arg("config"), nb::arg("batch_min"), nb::arg("batch_max"),
          nb::sig("def update(self, config: ObserverConfig | str, batch_min: float | Sequence[float], "
                  "batch_max: float | Sequence[float]) -> None"),
          "Adds a batch by its ranges. Raises ValueError for other lengths, Error (BAD_INPUT) for NaN and "
          "min "
          "> max; the state is then unchanged.")
      .def(
          "merge",
          [](State& self, nb::handle config, const State& other) {
            self.merge(from_python<ObserverConfig>(config, "config"), other);
          },
          nb::arg("config"), nb::arg("other"),
          nb::sig("def merge(self, config: ObserverConfig | str, other: ObserverState) -> None"),
          "Adds what another observer of as many groups has seen.")
      .def(
          "qparams",
          [](const State& self, const QParamsConfig& config, nb::handle scale_dtype) {
            const nb::object make = nb::module_::import_("halfbyte._values").attr("QParams");
            nb::list list;
            for (const QParams& each : self.qparams(config, from_python<DType>(scale_dtype, "scale_dtype")))
              list.append(make(each.scale, each.zero_point));
            return list;
          },
          nb::arg("config"), nb::arg("scale_dtype") = "f32",
          nb::sig("def qparams(self, config: QParamsConfig, scale_dtype: object = 'f32') -> "
                  "list[QParams]"),
          "The (scale, zero_point) of every group. Raises ValueError if a group has seen nothing.")
      .def(
          "__eq__",
          [](const State& a, nb::handle b) {
            return nb::isinstance<State>(b) && a == nb::cast<const State&>(b);
          },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__",
           [](const State& self) {
             const auto text = [](const auto& of) { return nb::cast<std::string>(nb::repr(nb::cast(of))); };
             return "ObserverState(min=" + text(self.min) + ", max=" + text(self.max) + ", dtype='" +
                    to_string(self.dtype) + "', num_batches=" + text(self.num_batches) + ")";
           })
      .def("__reduce__", [](const State& self) {
        return nb::make_tuple(nb::type<State>(),
                              nb::make_tuple(self.min, self.max, to_python(self.dtype), self.num_batches));
      });
}

}  // namespace

void bind_observers(nb::module_& module) {
  bind_state(module);
  module.def(
      "reset_observer",
      [](nb::handle min, nb::handle max, nb::handle num_batches, nb::handle stream) {
        const StateArrays arrays(min, max, num_batches, true, stream);
        const nb::gil_scoped_release release;
        reset_observer(arrays.min.view, arrays.max.view, arrays.num_batches.view, arrays.stream);
      },
      nb::arg("min"), nb::arg("max"), nb::arg("num_batches"), nb::arg("stream") = nb::none(),
      nb::sig(
          "def reset_observer(min: object, max: object, num_batches: object, stream: object = None) -> None"),
      "Sets the arrays of a state (min, max f32 or f64; num_batches i64, [] or of their shape) to what they "
      "are "
      "before the first batch: inf, -inf and 0.\n\n"
      "    >>> low, high, count = np.zeros(2, np.float32), np.zeros(2, np.float32), np.array(3)\n"
      "    >>> halfbyte.reset_observer(low, high, count)\n"
      "    >>> low.tolist(), high.tolist(), count.item()\n"
      "    ([inf, inf], [-inf, -inf], 0)");
  module.def(
      "load_observer",
      [](nb::handle min, nb::handle max, nb::handle num_batches, nb::handle stream) {
        const StateArrays arrays(min, max, num_batches, false, stream);
        const nb::gil_scoped_release release;
        return load_observer(arrays.min.view, arrays.max.view, arrays.num_batches.view, arrays.stream);
      },
      nb::arg("min"), nb::arg("max"), nb::arg("num_batches"), nb::arg("stream") = nb::none(),
      nb::sig("def load_observer(min: object, max: object, num_batches: object, stream: object = None) -> "
              "ObserverState"),
      "What the arrays of a state hold, as plain values. Waits for the stream.\n\n"
      "    >>> state = halfbyte.observe(np.array([1, -2], np.float32))\n"
      "    >>> halfbyte.load_observer(*state)\n"
      "    ObserverState(min=[-2.0], max=[1.0], dtype='f32', num_batches=[1])");
  module.def(
      "store_observer",
      [](const ObserverState& state, nb::handle min, nb::handle max, nb::handle num_batches,
         nb::handle stream) {
        const StateArrays arrays(min, max, num_batches, true, stream);
        const nb::gil_scoped_release release;
        store_observer(state, arrays.min.view, arrays.max.view, arrays.num_batches.view, arrays.stream);
      },
      nb::arg("state"), nb::arg("min"), nb::arg("max"), nb::arg("num_batches"),
      nb::arg("stream") = nb::none(),
      nb::sig("def store_observer(state: ObserverState, min: object, max: object, num_batches: object, "
              "stream: object = None) -> None"),
      "The reverse of load_observer. Raises ValueError for arrays that do not fit the state.\n\n"
      "    >>> arrays = np.zeros(1, np.float32), np.zeros(1, np.float32), np.array(0)\n"
      "    >>> halfbyte.store_observer(halfbyte.ObserverState([-1.0], [2.0], num_batches=[5]), *arrays)\n"
      "    >>> [each.tolist() for each in arrays]\n"
      "    [[-1.0], [2.0], 5]");
}

}  // namespace halfbyte::python
