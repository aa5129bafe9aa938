// The module halfbyte._core: what halfbyte exports to Python. Errors.
#include <nanobind/nanobind.h>

#include <exception>

#include "halfbyte/error.hpp"
#include "halfbyte/system.hpp"
#include "halfbyte/version.hpp"
#include "plans.h"
#include "tensors.h"

namespace halfbyte::python {
namespace {

void raise(const Error& error) {
  const nb::object make = nb::module_::import_("halfbyte._errors").attr("make_error");
  const nb::object made = make(error.what(), static_cast<int>(error.code()), to_string(error.kind()),
                               error.argument(), error.expected(), error.actual());
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise(error);
  }
}

}  // namespace
}  // namespace halfbyte::python

NB_MODULE(_core, module) {
  using namespace halfbyte::python;
  nb::set_leak_warnings(false);  // an interpreter that ends with tensors alive is no fault
  nb::register_exception_translator(translate);
  module.attr("__version__") = halfbyte::kVersion;
  bind_values(module);
  bind_linear_plans(module);
  bind_training_plans(module);
  bind_weight_plans(module);
  bind_expert_plans(module);
  bind_tensors(module);
  bind_experts(module);
  bind_functions(module);
  bind_observers(module);
  bind_system(module);
  bind_products(module);
  bind_checkpoints(module);
  bind_selection(module);
}
