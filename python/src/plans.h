// Plans as classes: select, run with arrays by name, status.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "halfbyte/plan.hpp"
#include "words.h"

namespace halfbyte::python {

// The descriptors, statuses and other values that plans take and give.
void bind_values(nb::module_& module);
// Plans by what they work on.
void bind_linear_plans(nb::module_& module);
void bind_training_plans(nb::module_& module);
void bind_weight_plans(nb::module_& module);
void bind_expert_plans(nb::module_& module);
void bind_products(nb::module_& module);
void bind_selection(nb::module_& module);

// The memory of a part of a weight: contiguous, of that dtype, at least so many bytes, on that device. Throws
// Error(usage).
void* part_data(const Array& array, const char* name, DType dtype, int64_t num_bytes, Device device);

// Codes of 4 bits come as bytes, [..., ceil(K / 2)]: what they are is in the descriptor.
TensorView codes_view(const Array& array, const char* name, DType dtype, std::vector<int64_t> shape);

// The workspace of a run: what the caller gives; on a CUDA device otherwise memory of the framework of
// `like`, or one that `kept` has for the stream.
struct KeptWorkspaces {
  std::mutex mutex;
  std::map<void*, Tensor> by_stream;
};
struct RunWorkspace {
  Workspace workspace;
  nb::object owner;
};
RunWorkspace workspace_of(nb::handle given, nb::handle stream, void* handle, const Array& like, Device device,
                          int64_t num_bytes, KeptWorkspaces& kept);

// What a run has collected of its arguments.
struct RunArguments {
  std::vector<Array> arrays;  // kept until the run is done
  nb::object stream;
  Device device;

  Array& take(nb::handle object, const char* name, bool written) {
    return arrays.emplace_back(to_array(object, name, written, stream));
  }
};

template <class Op>
class PlanClass {
 public:
  using Descriptor = typename Op::Descriptor;
  using Args = typename Op::Args;
  struct Value {
    Plan<Op> plan;
    std::shared_ptr<KeptWorkspaces> kept = std::make_shared<KeptWorkspaces>();
  };

  PlanClass(nb::module_& module, const char* name, const char* doc) : name_(name), class_(module, name, doc) {
    rows().clear();
    class_.def_static(
        "select",
        [](nb::handle device, const Descriptor& descriptor, int num_threads) {
          const Device on = from_python<Device>(device, "device");
          const nb::gil_scoped_release release;
          return Value{Plan<Op>::select(on, descriptor, {num_threads})};
        },
        nb::arg("device"), nb::arg("descriptor"), nb::kw_only(), nb::arg("num_threads") = 0,
        "Checks the descriptor, chooses the kernels and compiles them. num_threads is of the CPU; 0: all. "
        "Raises "
        "ValueError for a bad descriptor, and Error if the device cannot be used.");
    class_.def_prop_ro("device", [](const Value& self) { return to_python(self.plan.device()); });
    class_.def_prop_ro("descriptor", [](const Value& self) { return self.plan.descriptor(); });
    class_.def_prop_ro("sku", [](const Value& self) { return self.plan.sku(); });
    class_.def_prop_ro("precision_guarantee",
                       [](const Value& self) { return self.plan.precision_guarantee(); });
    class_.def_prop_ro(
        "workspace_size", [](const Value& self) { return self.plan.workspace_size(); },
        "Bytes of memory that a run needs; at multiples of 16.");
    class_.def("__repr__", [name](const Value& self) {
      return std::string("<") + name + ": " + to_string(self.plan.sku()) + ">";
    });
  }

  PlanClass& read(const char* name, ConstTensorView Args::*member) {
    return row(name, [name, member](const Descriptor&, Args& args, RunArguments& run, nb::handle value) {
      args.*member = run.take(value, name, false).view;
    });
  }
  PlanClass& write(const char* name, TensorView Args::*member) {
    return row(name, [name, member](const Descriptor&, Args& args, RunArguments& run, nb::handle value) {
      args.*member = run.take(value, name, true).view;
    });
  }
  using Set = std::function<void(const Descriptor& of, Args& args, RunArguments& run, nb::handle value)>;
  PlanClass& row(const char* name, Set set) {
    rows().push_back({name, std::move(set)});
    return *this;
  }

  void done(const char* run_signature) {
    class_.def(
        "run",
        [name = name_](const Value& self, nb::object workspace, nb::object stream, nb::kwargs kwargs) {
          RunArguments run;
          const Args args = take(name, self, run, stream, kwargs);
          const Array& like = first_on_device(run);
          void* const handle = to_stream(stream, like);
          const RunWorkspace memory = workspace_of(workspace, stream, handle, like, run.device,
                                                   self.plan.workspace_size(), *self.kept);
          const nb::gil_scoped_release release;
          self.plan.run(handle, memory.workspace, args);
        },
        nb::arg("workspace") = nb::none(), nb::arg("stream") = nb::none(), nb::arg("tensors"),
        nb::sig(run_signature),
        "Enqueues the work on `stream`: an int or a stream of PyTorch or CuPy; None: the current one of the "
        "framework "
        "that the arrays come from. On the CPU it is done when the call returns. `workspace`: an array of "
        "workspace_size bytes on the device, which keeps the status; None: memory of its own.");
    class_.def(
        "can_implement",
        [name = name_](const Value& self, nb::kwargs kwargs) -> nb::object {
          RunArguments run;
          const Args args = take(name, self, run, nb::none(), kwargs);
          const std::optional<Error> error = self.plan.can_implement(args);
          return error ? to_python(error->what()) : nb::none();
        },
        "Why `run` would refuse these tensors, as a text; None if it would not.");
    class_.def(
        "status",
        [](const Value& self, nb::handle workspace, nb::handle stream) {
          const Array memory = to_array(workspace, "workspace", true, stream);
          void* const handle = to_stream(stream, memory);
          const Workspace of{memory.view.data, contiguous_bytes(memory.view.dtype, memory.view.shape)};
          const nb::gil_scoped_release release;
          return self.plan.status(handle, of);
        },
        nb::arg("workspace"), nb::arg("stream") = nb::none(),
        "What the last run with this workspace found in the data. Waits for the stream.");
  }

 private:
  struct Row {
    std::string_view name;
    Set set;
  };
  static std::vector<Row>& rows() {
    static std::vector<Row> rows;
    return rows;
  }
  [[noreturn]] static void unknown(const char* name, std::string_view word) {
    std::string text = std::string(name) + " has no tensor " + std::string(word) + "; it has ";
    for (const Row& row : rows())
      text += std::string(&row == rows().data() ? "" : ", ") + std::string(row.name);
    throw nb::type_error(text.c_str());
  }
  static Args take(const char* name, const Value& self, RunArguments& run, nb::object stream,
                   nb::kwargs& kwargs) {
    run.stream = std::move(stream);
    run.device = self.plan.device();
    run.arrays.reserve(16);
    Args args;
    for (const auto& [key, value] : kwargs) {
      const std::string_view word = nb::cast<std::string_view>(key);
      const auto found = std::ranges::find(rows(), word, &Row::name);
      if (found == rows().end()) unknown(name, word);
      if (!value.is_none()) found->set(self.plan.descriptor(), args, run, value);
    }
    return args;
  }
  static const Array& first_on_device(RunArguments& run) {
    for (const Array& array : run.arrays)
      if (array.view.device == run.device) return array;
    run.arrays.emplace_back().view.device = run.device;
    run.arrays.back().framework = Framework::other;
    return run.arrays.back();
  }

  const char* name_;
  nb::class_<Value> class_;
};

}  // namespace halfbyte::python
