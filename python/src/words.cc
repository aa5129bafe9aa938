#include "words.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "halfbyte/error.hpp"

namespace halfbyte::python {
namespace {

std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

std::string to_text(nb::handle object, const char* name) {
  if (!nb::isinstance<nb::str>(object)) wrong_type(name, "a str", object);
  return nb::cast<std::string>(object);
}

[[noreturn]] void refuse(const std::string& message, const char* name, const std::string& actual) {
  throw Error(ErrorCode::usage, message, ErrorDetails{ErrorKind::invalid_argument, name, {}, actual});
}

// A word by the parse function of the library, whose error gets the name of the argument.
template <class T, class Parse>
void from_word(nb::handle object, const char* name, T& value, Parse parse) {
  const std::string word = to_text(object, name);
  try {
    value = parse(word);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage) throw;
    refuse(std::string(name) + ": " + error.what(), name, word);
  }
}

// A word of a list, for enumerators that the library does not parse.
template <class T, size_t N>
T find_word(std::string_view word, const std::array<T, N>& all) {
  std::string known;
  for (const T value : all) {
    if (word == to_string(value)) return value;
    known += (known.empty() ? "" : ", ") + std::string(to_string(value));
  }
  throw Error(ErrorCode::usage, "must be one of " + known + ", got " + std::string(word));
}

Granularity parse_granularity(std::string_view word) {
  return find_word(
      word, std::array{Granularity::tensor, Granularity::channel, Granularity::group, Granularity::flat});
}

template <class T>
void from_int(nb::handle object, const char* name, T& value) {
  if (nb::isinstance<nb::bool_>(object) || !PyIndex_Check(object.ptr())) wrong_type(name, "an int", object);
  const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid()) nb::raise_python_error();
  if (!nb::try_cast(number, value))
    refuse(std::string(name) + " is out of range: " + text_of(object), name, text_of(object));
}

template <class T>
void from_instance(nb::handle object, const char* name, T& value, const char* what) {
  if (!nb::isinstance<T>(object)) wrong_type(name, what, object);
  value = nb::cast<const T&>(object);
}

template <class Value>
std::vector<Value> to_list(nb::handle object, const char* name, const char* what) {
  if (nb::isinstance<nb::str>(object) || !nb::isinstance<nb::iterable>(object))
    wrong_type(name, what, object);
  std::vector<Value> values;
  for (const nb::handle item : nb::borrow<nb::iterable>(object))
    from_python(item, name, values.emplace_back());
  return values;
}

}  // namespace

void wrong_type(std::string_view name, std::string_view what, nb::handle got) {
  std::ostringstream text;
  text << name << " must be " << what << ", got " << text_of(nb::inst_name(got));
  throw nb::type_error(text.str().c_str());
}

void from_python(nb::handle object, const char* name, bool& value) {
  if (!nb::isinstance<nb::bool_>(object)) wrong_type(name, "a bool", object);
  value = nb::cast<bool>(object);
}
void from_python(nb::handle object, const char* name, int& value) { from_int(object, name, value); }
void from_python(nb::handle object, const char* name, int64_t& value) { from_int(object, name, value); }
void from_python(nb::handle object, const char* name, uint64_t& value) { from_int(object, name, value); }
void from_python(nb::handle object, const char* name, double& value) {
  const nb::object number = nb::steal(PyNumber_Float(object.ptr()));
  if (!number.is_valid() || nb::isinstance<nb::str>(object)) {
    PyErr_Clear();
    wrong_type(name, "a float", object);
  }
  value = nb::cast<double>(number);
}
void from_python(nb::handle object, const char* name, std::string& value) { value = to_text(object, name); }
void from_python(nb::handle object, const char* name, DType& value) {
  if (nb::isinstance<nb::str>(object)) return from_word(object, name, value, parse_dtype);
  // torch.bfloat16, numpy.dtype("float32"), numpy.float32, ml_dtypes.bfloat16
  std::string text = nb::isinstance<nb::type_object>(object) ? text_of(object.attr("__name__"))
                     : nb::hasattr(object, "name")           ? text_of(object.attr("name"))
                                                             : text_of(object);
  text = text.substr(text.rfind('.') + 1);
  constexpr std::pair<const char*, DType> kNames[] = {
      {"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16},
      {"float64", DType::f64}, {"int8", DType::i8},     {"uint8", DType::u8},
      {"int32", DType::i32},   {"uint32", DType::u32},  {"int64", DType::i64}};
  for (const auto& [word, dtype] : kNames)
    if (text == word) {
      value = dtype;
      return;
    }
  wrong_type(
      name,
      "a dtype or one of the words f32, f16, bf16, f64, i8, u8, i32, u32, i64, i4, u4, f8_e4m3, f8_e8m0",
      object);
}
void from_python(nb::handle object, const char* name, Device& value) {
  if (nb::isinstance<nb::str>(object)) return from_word(object, name, value, parse_device);
  if (!nb::hasattr(object, "type") || !nb::hasattr(object, "index"))
    wrong_type(name, "a device: \"cpu\", \"cuda\" or \"cuda:1\"", object);
  const nb::object index = object.attr("index");  // torch.device
  std::string word = text_of(object.attr("type"));
  if (!index.is_none() && word != "cpu") word += ":" + text_of(index);
  from_word(nb::str(word.c_str()), name, value, parse_device);
}
void from_python(nb::handle object, const char* name, std::vector<Device>& value) {
  if (nb::isinstance<nb::str>(object)) return from_word(object, name, value, parse_devices);
  value.clear();
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    for (const nb::handle each : object) from_python(each, name, value.emplace_back());
  } else {
    from_python(object, name, value.emplace_back());
  }
}
void from_python(nb::handle object, const char* name, Format& value) {
  from_word(object, name, value, [](std::string_view word) { return find_format(word).format; });
}
void from_python(nb::handle object, const char* name, ScaleRule& value) {
  from_word(object, name, value, parse_scale_rule);
}
void from_python(nb::handle object, const char* name, CodeScale& value) {
  from_word(object, name, value, [](std::string_view word) {
    return find_word(word, std::array{CodeScale::stored, CodeScale::unrounded});
  });
}
void from_python(nb::handle object, const char* name, Granularity& value) {
  from_word(object, name, value, parse_granularity);
}
void from_python(nb::handle object, const char* name, Layout& value) {
  from_word(object, name, value, parse_layout);
}
void from_python(nb::handle object, const char* name, Reader& value) {
  from_word(object, name, value, parse_reader);
}
void from_python(nb::handle object, const char* name, ExpertForm& value) {
  from_word(object, name, value, parse_expert_form);
}
void from_python(nb::handle object, const char* name, ObserverKind& value) {
  from_word(object, name, value, parse_observer_kind);
}
void from_python(nb::handle object, const char* name, AffineRounding& value) {
  from_word(object, name, value, [](std::string_view word) {
    return find_word(word, std::array{AffineRounding::half_even, AffineRounding::half_away});
  });
}
void from_python(nb::handle object, const char* name, QgemmMath& value) {
  from_word(object, name, value, parse_qgemm_math);
}
void from_python(nb::handle object, const char* name, ExpertRows& value) {
  from_word(object, name, value, parse_expert_rows);
}
void from_python(nb::handle object, const char* name, QgemmTile& value) {
  const std::vector<int64_t> tile = to_list<int64_t>(object, name, "a tuple (m, n)");
  if (tile.size() != 2) refuse(std::string(name) + " must have two extents", name, text_of(object));
  value = {static_cast<int>(tile[0]), static_cast<int>(tile[1])};
}
void from_python(nb::handle object, const char* name, NonFinite& value) {
  from_word(object, name, value, [](std::string_view word) {
    return find_word(word, std::array{NonFinite::error, NonFinite::keep_dense});
  });
}
void from_python(nb::handle object, const char* name, Unfinished& value) {
  from_word(object, name, value, [](std::string_view word) {
    return find_word(word, std::array{Unfinished::keep, Unfinished::resume, Unfinished::discard});
  });
}
void from_python(nb::handle object, const char* name, std::vector<int64_t>& value) {
  value = to_list<int64_t>(object, name, "a list of ints");
}
void from_python(nb::handle object, const char* name, std::vector<std::string>& value) {
  value = to_list<std::string>(object, name, "a list of str");
}
void from_python(nb::handle object, const char* name, std::array<float, 16>& value) {
  const std::vector<double> values = to_list<double>(object, name, "a list of 16 floats");
  if (values.size() != value.size())
    refuse(std::string(name) + " must have 16 values, got " + std::to_string(values.size()), name,
           std::to_string(values.size()));
  std::ranges::transform(values, value.begin(), [](double of) { return static_cast<float>(of); });
}
void from_python(nb::handle object, const char* name, QuantSpec& value) {
  if (nb::isinstance<nb::str>(object)) return from_word(object, name, value, parse_spec);
  from_instance(object, name, value, "a QuantSpec or the text of one");
}
void from_python(nb::handle object, const char* name, Encoding& value) {
  if (nb::isinstance<nb::str>(object))
    from_python(object, name, value.scale_rule.emplace());
  else
    from_instance(object, name, value, "an Encoding or a word for its scale_rule");
}
void from_python(nb::handle object, const char* name, QParamsConfig& value) {
  from_instance(object, name, value, "a QParamsConfig");
}
void from_python(nb::handle object, const char* name, ObserverConfig& value) {
  if (nb::isinstance<nb::str>(object))
    from_python(object, name, value.kind);
  else
    from_instance(object, name, value, "an ObserverConfig or a word for its kind");
}

const char* to_string(CodeScale scale) { return scale == CodeScale::stored ? "stored" : "unrounded"; }
const char* to_string(AffineRounding rounding) {
  return rounding == AffineRounding::half_even ? "half-even" : "half-away";
}
const char* to_string(Unfinished unfinished) {
  return unfinished == Unfinished::keep ? "keep" : unfinished == Unfinished::resume ? "resume" : "discard";
}
const char* to_string(NonFinite nonfinite) { return nonfinite == NonFinite::error ? "error" : "keep-dense"; }

// ---- The text of a spec

std::string to_string(const QuantSpec& spec) {
  const QuantSpec defaults;
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << info(spec.format).name;
  if (spec.asymmetric) text << ",asymmetric";
  if (spec.granularity != defaults.granularity) text << ",granularity=" << to_string(spec.granularity);
  if (spec.group_size != defaults.group_size) text << ",group_size=" << spec.group_size;
  if (spec.scale_dtype != defaults.scale_dtype) text << ",scale_dtype=" << to_string(spec.scale_dtype);
  if (spec.double_quant) text << ",double_quant";
  if (spec.format == Format::lut4) {
    text << ",table=";
    text.precision(9);  // enough for every float
    for (size_t i = 0; i < spec.table.size(); ++i) text << (i == 0 ? "" : ":") << spec.table[i];
  }
  return text.str();
}

QuantSpec parse_spec(std::string_view text) {
  QuantSpec spec;
  bool first = true;
  while (first || !text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals);
    const std::string_view value = equals == word.npos ? std::string_view() : word.substr(equals + 1);
    if (first) {
      const FormatInfo& format = find_format(word);
      spec.format = format.format;
      if (format.scale_dtype) {
        spec.scale_dtype = *format.scale_dtype;
        spec.group_size = format.group_size;
      }
    } else if (word == "asymmetric") {
      spec.asymmetric = true;
    } else if (word == "double_quant") {
      spec.double_quant = true;
    } else if (key == "granularity") {
      spec.granularity = parse_granularity(value);
    } else if (key == "scale_dtype") {
      spec.scale_dtype = parse_dtype(value);
    } else if (key == "group_size") {
      const auto [rest, error] = std::from_chars(value.data(), value.data() + value.size(), spec.group_size);
      if (error != std::errc() || rest != value.data() + value.size())
        throw Error(ErrorCode::usage, "spec: group_size must be a number, got " + std::string(value));
    } else if (key == "table") {
      std::string numbers(value);
      std::ranges::replace(numbers, ':', ',');
      spec.table = parse_table(numbers);
    } else {
      throw Error(ErrorCode::usage, "spec: unknown word \"" + std::string(word) +
                                        "\": known are asymmetric, granularity=, group_size=, scale_dtype=, "
                                        "double_quant, table=");
    }
    first = false;
  }
  check_spec(spec);
  return spec;
}

// ---- To Python

nb::object to_python(bool value) { return nb::bool_(value); }
nb::object to_python(int value) { return nb::int_(value); }
nb::object to_python(int64_t value) { return nb::int_(value); }
nb::object to_python(uint64_t value) { return nb::int_(value); }
nb::object to_python(double value) { return nb::float_(value); }
nb::object to_python(const std::string& value) { return nb::str(value.c_str(), value.size()); }
nb::object to_python(const char* word) { return nb::str(word); }
nb::object to_python(std::span<const int64_t> value) {
  nb::list list;
  for (const int64_t each : value) list.append(each);
  return nb::tuple(list);
}
nb::object to_python(const std::vector<std::string>& value) {
  nb::list list;
  for (const std::string& each : value) list.append(nb::str(each.c_str(), each.size()));
  return list;
}
nb::object to_python(const std::array<float, 16>& value) {
  nb::list list;
  for (const float each : value) list.append(each);
  return nb::tuple(list);
}
nb::object to_python(Device device) { return to_python(halfbyte::to_string(device)); }
nb::object to_python(Format format) { return nb::str(info(format).name); }
nb::object to_python(QgemmTile tile) { return nb::make_tuple(tile.m, tile.n); }
nb::object to_python(const QuantSpec& spec) { return nb::cast(spec); }
nb::object to_python(const Encoding& encoding) { return nb::cast(encoding); }
nb::object to_python(const QParamsConfig& config) { return nb::cast(config); }
nb::object to_python(const ObserverConfig& config) { return nb::cast(config); }
nb::object to_python(const QuantizeStatus& status) { return nb::cast(status); }
nb::object to_python(const Sku& sku) { return nb::cast(sku); }
nb::object to_python(const PrecisionGuarantee& guarantee) { return nb::cast(guarantee); }

}  // namespace halfbyte::python
