// What this build and this machine can do.
#include "halfbyte/system.hpp"

#include <nanobind/stl/vector.h>

#include "halfbyte/device.hpp"
#include "halfbyte/qgemm_grouped.hpp"
#include "plans.h"
#include "tensors.h"

namespace halfbyte::python {
namespace {

const char* kind_name(FormatKind kind) {
  switch (kind) {
    case FormatKind::table:
      return "table";
    case FormatKind::integer:
      return "integer";
    case FormatKind::affine:
      return "affine";
    case FormatKind::floating:
      return "floating";
  }
  return "";
}

nb::list choices_of(const std::vector<QgemmChoice>& choices) {
  const nb::object make = nb::module_::import_("halfbyte._values").attr("QgemmChoice");
  nb::list list;
  for (const QgemmChoice& each : choices) list.append(make(each.variant, each.reason, each.packs));
  return list;
}

// Where this interpreter imports packages from, and so those of CUDA. Only the names are read here.
void add_packages_of_interpreter() {
  for (const nb::handle entry : nb::module_::import_("sys").attr("path"))
    if (std::string directory; nb::try_cast(entry, directory) && directory.starts_with('/'))
      add_site_packages(directory);
}

}  // namespace

void bind_system(nb::module_& module) {
  add_packages_of_interpreter();
  nb::class_<CudaDevice>(module, "CudaDevice", "A CUDA device.")
      .def_ro("index", &CudaDevice::index)
      .def_ro("name", &CudaDevice::name)
      .def_ro("capability", &CudaDevice::capability, "10 * major + minor.")
      .def_ro("target", &CudaDevice::target, "What kernels are compiled for: \"sm_90a\"; \"\": not usable.")
      .def_ro("num_multiprocessors", &CudaDevice::num_multiprocessors)
      .def_ro("memory_bytes", &CudaDevice::memory_bytes)
      .def_ro("problem", &CudaDevice::problem, "Why it cannot be used; \"\" if it can.")
      .def("__repr__", [](const CudaDevice& self) {
        return "<CudaDevice " + std::to_string(self.index) + ": " + self.name + ", " +
               (self.problem.empty() ? self.target : self.problem) + ">";
      });
  nb::class_<CudaInfo>(module, "CudaInfo", "What this machine has of CUDA.")
      .def_ro("problem", &CudaInfo::problem, "Why no device can be used; \"\" if one can.")
      .def_ro("driver_path", &CudaInfo::driver_path)
      .def_ro("driver_version", &CudaInfo::driver_version, "1000 * major + 10 * minor.")
      .def_ro("nvrtc_path", &CudaInfo::nvrtc_path)
      .def_ro("nvrtc_version", &CudaInfo::nvrtc_version)
      .def_ro("devices", &CudaInfo::devices)
      .def_ro("cache_directory", &CudaInfo::cache_directory, "Of compiled kernels; \"\": none is used.")
      .def_ro("cache_problem", &CudaInfo::cache_problem)
      .def_prop_ro("usable", &CudaInfo::usable)
      .def("__repr__", [](const CudaInfo& self) {
        return "<CudaInfo: " +
               (self.usable() ? std::to_string(self.devices.size()) + " devices" : self.problem) + ">";
      });
  module.def(
      "cuda_info",
      [] {
        const nb::gil_scoped_release release;
        return cuda_info();
      },
      "What this machine has of CUDA, and why it can or cannot be used. Raises nothing.\n\n"
      "    >>> isinstance(halfbyte.cuda_info().usable, bool)\n"
      "    True");
  nb::class_<SystemInfo>(module, "SystemInfo", "What this build and this machine can do.")
      .def_ro("version", &SystemInfo::version)
      .def_ro("simd_target", &SystemInfo::simd_target,
              "What CPU kernels use here: \"AVX3_DL\", \"AVX2\", ...")
      .def_ro("compiled_targets", &SystemInfo::compiled_targets,
              "What this build has kernels for, best first.")
      .def_ro("num_threads", &SystemInfo::num_threads, "The default of operations.")
      .def("__repr__", [](const SystemInfo& self) {
        return "<SystemInfo: halfbyte " + self.version + ", " + self.simd_target + ", " +
               std::to_string(self.num_threads) + " threads>";
      });
  module.def("system_info", &system_info,
             "What this build and this machine can do.\n\n"
             "    >>> halfbyte.system_info().version == halfbyte.__version__\n"
             "    True");
  module.def(
      "explain_qgemm",
      [](nb::handle device, const QgemmDescriptor& descriptor) {
        return choices_of(explain_qgemm(from_python<Device>(device, "device"), descriptor));
      },
      nb::arg("device"), nb::arg("descriptor"),
      nb::sig("def explain_qgemm(device: object, descriptor: QgemmDescriptor) -> "
              "list[QgemmChoice]"),
      "The (variant, reason, packs) of each implementation of a product, in the order in which they are "
      "tried; reason: why it refuses, \"\" if it takes the description; packs: it takes a view by packing it "
      "first, in each run.\n\n"
      "    >>> d = halfbyte.QgemmDescriptor(spec=\"nf4\", m=1, n=64, k=64, dtype=\"f32\")\n"
      "    >>> next(each.variant for each in halfbyte.explain_qgemm(\"cpu\", d) if not each.reason)\n"
      "    'qgemm_simd'");
  module.def(
      "explain_qgemm_grouped",
      [](nb::handle device, const QgemmGroupedDescriptor& descriptor) {
        return choices_of(explain_qgemm_grouped(from_python<Device>(device, "device"), descriptor));
      },
      nb::arg("device"), nb::arg("descriptor"),
      nb::sig("def explain_qgemm_grouped(device: object, descriptor: QgemmGroupedDescriptor) -> "
              "list[QgemmChoice]"),
      "The same of products with the weights of experts.\n\n"
      "    >>> d = halfbyte.QgemmGroupedDescriptor(spec=\"nf4\", num_experts=2, m=1, n=64, k=64, "
      "dtype=\"f32\")\n"
      "    >>> next(each.variant for each in halfbyte.explain_qgemm_grouped(\"cpu\", d) if not each.reason)\n"
      "    'qgemm_simd'");
  module.def(
      "all_formats",
      [] {
        const nb::object make = nb::module_::import_("halfbyte._values").attr("FormatInfo");
        nb::list list;
        for (const FormatInfo& each : all_formats())
          list.append(
              make(each.name, kind_name(each.kind), each.bits, halfbyte::to_string(each.default_rule)));
        return list;
      },
      nb::sig("def all_formats() -> list[FormatInfo]"),
      "The (name, kind, bits, default_rule) of every format.\n\n"
      "    >>> halfbyte.all_formats()[0]\n"
      "    FormatInfo(name='nf4', kind='table', bits=4, default_rule='absmax')");
}

}  // namespace halfbyte::python
