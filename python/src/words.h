// Values between Python and C++: words for enumerators, numbers, lists, and the descriptors of plans as
// classes with a property for each field.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/checkpoint.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/format.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte::python {

namespace nb = nanobind;

// Throws TypeError: "<name> must be <what>, got <type>".
[[noreturn]] void wrong_type(std::string_view name, std::string_view what, nb::handle got);

// from_python(object, name, value) sets the value, or throws TypeError or Error(usage), which becomes
// ValueError, naming it.
void from_python(nb::handle object, const char* name, bool& value);
void from_python(nb::handle object, const char* name, int& value);
void from_python(nb::handle object, const char* name, int64_t& value);
void from_python(nb::handle object, const char* name, uint64_t& value);
void from_python(nb::handle object, const char* name, double& value);
void from_python(nb::handle object, const char* name, std::string& value);
void from_python(nb::handle object, const char* name, DType& value);   // "bf16", also numpy and torch dtypes
void from_python(nb::handle object, const char* name, Device& value);  // "cuda:1", also torch.device
// "cpu,cuda:1", a device, or a sequence of them.
void from_python(nb::handle object, const char* name, std::vector<Device>& value);
void from_python(nb::handle object, const char* name, Format& value);
void from_python(nb::handle object, const char* name, ScaleRule& value);
void from_python(nb::handle object, const char* name, CodeScale& value);
void from_python(nb::handle object, const char* name, Granularity& value);
void from_python(nb::handle object, const char* name, Layout& value);
void from_python(nb::handle object, const char* name, Reader& value);
void from_python(nb::handle object, const char* name, ExpertForm& value);
void from_python(nb::handle object, const char* name, ObserverKind& value);
void from_python(nb::handle object, const char* name, AffineRounding& value);
void from_python(nb::handle object, const char* name, QgemmMath& value);
void from_python(nb::handle object, const char* name, ExpertRows& value);
void from_python(nb::handle object, const char* name, QgemmTile& value);  // (m, n)
void from_python(nb::handle object, const char* name, NonFinite& value);  // "error", "keep-dense"
void from_python(nb::handle object, const char* name, Unfinished& value);
void from_python(nb::handle object, const char* name, std::vector<int64_t>& value);
void from_python(nb::handle object, const char* name, std::vector<std::string>& value);
void from_python(nb::handle object, const char* name, std::array<float, 16>& value);
void from_python(nb::handle object, const char* name, QuantSpec& value);  // also a text: "int4,group_size=32"
void from_python(nb::handle object, const char* name, Encoding& value);   // also a word of ScaleRule
void from_python(nb::handle object, const char* name, QParamsConfig& value);
void from_python(nb::handle object, const char* name, ObserverConfig& value);
template <class T>
void from_python(nb::handle object, const char* name, std::optional<T>& value) {
  if (object.is_none())
    value.reset();
  else
    from_python(object, name, value.emplace());
}
template <class T>
T from_python(nb::handle object, const char* name) {
  T value{};
  from_python(object, name, value);
  return value;
}

const char* to_string(CodeScale scale);
const char* to_string(AffineRounding rounding);
const char* to_string(NonFinite nonfinite);
const char* to_string(Unfinished unfinished);
// "int4,group_size=32,scale_dtype=f16": the format, then what differs from a QuantSpec of it.
std::string to_string(const QuantSpec& spec);
QuantSpec parse_spec(std::string_view text);  // throws Error(usage)

nb::object to_python(bool value);
nb::object to_python(int value);
nb::object to_python(int64_t value);
nb::object to_python(uint64_t value);
nb::object to_python(double value);
nb::object to_python(const std::string& value);
nb::object to_python(const char* word);
nb::object to_python(std::span<const int64_t> value);  // a tuple
nb::object to_python(const std::vector<std::string>& value);
nb::object to_python(const std::array<float, 16>& value);
nb::object to_python(Device device);
nb::object to_python(Format format);
nb::object to_python(QgemmTile tile);
nb::object to_python(const QuantSpec& spec);
nb::object to_python(const Encoding& encoding);
nb::object to_python(const QParamsConfig& config);
nb::object to_python(const ObserverConfig& config);
nb::object to_python(const QuantizeStatus& status);
nb::object to_python(const Sku& sku);
nb::object to_python(const PrecisionGuarantee& guarantee);
template <class T>
requires std::is_enum_v<T> nb::object to_python(T value) { return to_python(to_string(value)); }
template <class T>
nb::object to_python(const std::optional<T>& value) {
  return value ? to_python(*value) : nb::none();
}

// A class of plain fields: Fields<T>("LinearDescriptor")("shape", &T::shape)...: an immutable class with
// keyword arguments, properties, ==, hash, repr and replace(**changes).
template <class T>
class Fields {
 public:
  Fields(nb::module_& module, const char* name, const char* doc) : name_(name), class_(module, name, doc) {
    rows().clear();
  }
  template <class Member>
  Fields& operator()(const char* name, Member T::*member) {
    rows().push_back({name, [member, name](T& to, nb::handle value) { from_python(value, name, to.*member); },
                      [member](const T& from) { return to_python(from.*member); }});
    class_.def_prop_ro(name, [member](const T& self) { return to_python(self.*member); });
    return *this;
  }
  // `first`: the field that may be given without its name; null: none.
  nb::class_<T>& done(const char* signature, const char* first = nullptr) {
    class_.def(
        "__init__",
        [name = name_, first](T* self, nb::args args, nb::kwargs kwargs) {
          new (self) T();
          try {
            if (args.size() > (first != nullptr ? 1u : 0u))
              throw nb::type_error((std::string(name) + ": fields are given by name").c_str());
            if (args.size() == 1) set(name, *self, first, args[0]);
            for (const auto& [key, value] : kwargs) set(name, *self, nb::cast<std::string>(key), value);
          } catch (...) {
            self->~T();
            throw;
          }
        },
        nb::sig(signature));
    class_.def(
        "replace",
        [name = name_](const T& self, nb::kwargs kwargs) {
          T copy = self;
          for (const auto& [key, value] : kwargs) set(name, copy, nb::cast<std::string>(key), value);
          return copy;
        },
        "The same with other values of the fields that are named.");
    class_.def(
        "__eq__", [](const T& a, nb::handle b) { return nb::isinstance<T>(b) && a == nb::cast<const T&>(b); },
        nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"));
    class_.def("__repr__", [name = name_](const T& self) { return repr(name, self); });
    class_.def("__hash__",
               [name = name_](const T& self) { return nb::hash(nb::str(repr(name, self).c_str())); });
    class_.def("__reduce__", [name = name_](const T& self) {
      nb::dict fields;
      for (const Row& row : rows()) fields[row.name] = row.get(self);
      return nb::make_tuple(nb::module_::import_("halfbyte._values").attr("rebuild"),
                            nb::make_tuple(name, fields));
    });
    return class_;
  }

 private:
  struct Row {
    const char* name;
    std::function<void(T& to, nb::handle value)> set;
    std::function<nb::object(const T& from)> get;
  };
  static std::vector<Row>& rows() {
    static std::vector<Row> rows;
    return rows;
  }
  static void set(const char* name, T& to, std::string_view key, nb::handle value) {
    for (const Row& row : rows())
      if (key == row.name) return row.set(to, value);
    std::string text = std::string(name) + " has no field " + std::string(key) + "; its fields are ";
    for (const Row& row : rows()) text += std::string(&row == rows().data() ? "" : ", ") + row.name;
    throw nb::type_error(text.c_str());
  }
  // What differs from the defaults.
  static std::string repr(const char* name, const T& value) {
    const T defaults;
    std::string text = std::string(name) + "(";
    bool first = true;
    for (const Row& row : rows()) {
      const nb::object mine = row.get(value);
      if (mine.equal(row.get(defaults))) continue;
      text += (first ? "" : ", ") + std::string(row.name) + "=" + nb::cast<std::string>(nb::repr(mine));
      first = false;
    }
    return text + ")";
  }

  const char* name_;
  nb::class_<T> class_;
};

}  // namespace halfbyte::python
