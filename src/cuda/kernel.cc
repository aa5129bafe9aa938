#include "cuda/kernel.h"

#include <charconv>

#include "core/checks.h"

namespace halfbyte::cuda {

KernelKey dtype_key(const char* description) {
  return {"dtype", {"f32", "f16", "bf16", "f64"}, false, description};
}

DType dtype_of(const KernelValues& values) { return parse_dtype(values.at("dtype")); }

KernelKey flag_key(const char* name, const char* description) {
  return {name, {"no", "yes"}, false, description};
}

bool is_set(const KernelValues& values, std::string_view flag) { return values.find(flag)->second == "yes"; }

std::vector<KernelKey> codec_keys() {
  std::vector<std::string> formats;
  for (const FormatInfo& format : all_formats()) formats.push_back(format.name);
  return {{"format", std::move(formats), false, "The format of the codes."},
          {"table", {}, true, "The 16 ascending values of lut4, separated by commas."},
          flag_key("asymmetric", "Integer formats: with a zero point."),
          scale_dtype_key("The dtype of scales and biases.")};
}

KernelKey scale_dtype_key(const char* description) {
  return {"scale-dtype", {"f32", "f16", "bf16", "f64"}, false, description};
}

std::string any_scale_dtype(const KernelValues& values) {
  return to_string(find_format(values.at("format")).scale_dtype.value_or(DType::f32));
}

QuantSpec spec_of(const KernelValues& values) {
  QuantSpec spec;
  const FormatInfo& format = find_format(values.at("format"));
  const std::string& table = values.at("table");
  HALFBYTE_CHECK((format.format == Format::lut4) == !table.empty(), usage,
                 "format lut4 and table go together, got format {} and {} table", format.name,
                 table.empty() ? "no" : "a");
  spec.format = format.format;
  if (!table.empty()) spec.table = parse_table(table);
  spec.asymmetric = is_set(values, "asymmetric");
  spec.scale_dtype = parse_dtype(values.at("scale-dtype"));
  if (format.group_size != 0) spec.group_size = format.group_size;
  check_spec(spec);
  return spec;
}

void set_group_size(QuantSpec& spec, const std::string& value) {
  if (info(spec.format).group_size != 0) return;
  if (value == "channel" || value == "tensor") {
    spec.granularity = value == "channel" ? Granularity::channel : Granularity::tensor;
    return;
  }
  const char* const last = value.data() + value.size();
  const auto [end, error] = std::from_chars(value.data(), last, spec.group_size);
  HALFBYTE_CHECK(error == std::errc() && end == last && spec.group_size > 0, usage,
                 "group-size must be a positive number, channel or tensor, got '{}'", value);
}

}  // namespace halfbyte::cuda
