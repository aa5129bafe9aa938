#include "io/recode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "core/checks.h"
#include "core/format.h"
#include "formats/convert.h"
#include "io/checkpoint.h"

namespace halfbyte::io {
namespace {

// What codes stand for beside their scale.
enum class Form : uint8_t { symmetric, asymmetric, affine };

Form form_of(const QuantSpec& spec) {
  if (has_biases(spec)) return Form::affine;
  return spec.asymmetric ? Form::asymmetric : Form::symmetric;
}

std::optional<Format> format_of(Form form, int bits) {
  const FormatKind kind = form == Form::affine ? FormatKind::affine : FormatKind::integer;
  for (const FormatInfo& format : all_formats())
    if (format.kind == kind && format.bits == bits) return format.format;
  return std::nullopt;
}

bool holds(const LayoutInfo& layout, Format format, bool asymmetric) {
  return (layout.formats.empty() || std::ranges::find(layout.formats, format) != layout.formats.end()) &&
         (!asymmetric || layout.asymmetric);
}

// Elements of f32, f16 or bf16 in host memory.
std::vector<float> floats_of(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
  convert_elements(tensor.data(), tensor.dtype(), tensor.num_elements(),
                   reinterpret_cast<std::byte*>(values.data()), DType::f32);
  return values;
}
// Nothing if the dtype does not hold one of them as it is.
std::optional<Tensor> tensor_of(const std::vector<float>& values, DType dtype) {
  const auto n = static_cast<int64_t>(values.size());
  Tensor tensor(Device{}, dtype, {n});
  convert_elements(reinterpret_cast<const std::byte*>(values.data()), DType::f32, n, tensor.data(), dtype);
  const std::vector<float> back = floats_of(tensor);
  if (std::memcmp(back.data(), values.data(), values.size() * sizeof(float)) != 0) return std::nullopt;
  return tensor;
}

// The parameters of a weight of integer codes, and the same in another form.
class Parameters {
 public:
  explicit Parameters(const QuantizedTensor& weight)
      : bits_(info(weight.spec.format).bits),
        form_(form_of(weight.spec)),
        scales_(floats_of(weight.scales)),
        zeros_(scales_.size(), static_cast<uint8_t>(1 << (bits_ - 1))) {
    if (form_ == Form::asymmetric) std::memcpy(zeros_.data(), weight.zeros.data(), zeros_.size());
    if (form_ == Form::affine) biases_ = floats_of(weight.biases);
  }

  int bits() const { return bits_; }
  const std::vector<float>& scales() const { return scales_; }
  const std::vector<uint8_t>& zeros() const { return zeros_; }
  const std::vector<float>& biases() const { return biases_; }

  // Changes the form, and returns whether every code decodes to the same value.
  bool become(Form form) {
    const Parameters before = *this;
    if (form_ == Form::affine && form != Form::affine)
      for (size_t i = 0; i < zeros_.size(); ++i) {
        const float zero = scales_[i] == 0 ? 0 : std::nearbyint(-biases_[i] / scales_[i]);
        if (!(zero >= 0 && zero < static_cast<float>(1 << bits_))) return false;
        zeros_[i] = static_cast<uint8_t>(zero);
      }
    if (form == Form::symmetric &&
        std::ranges::any_of(zeros_, [&](uint8_t zero) { return zero != 1 << (bits_ - 1); }))
      return false;
    if (form == Form::affine && form_ != Form::affine) {
      biases_.resize(scales_.size());
      for (size_t i = 0; i < biases_.size(); ++i) biases_[i] = -static_cast<float>(zeros_[i]) * scales_[i];
    }
    form_ = form;
    if ((before.form_ == Form::affine) == (form == Form::affine)) return true;
    for (size_t i = 0; i < scales_.size(); ++i)
      for (int code = 0; code < 1 << bits_; ++code)
        if (!(value_of(code, i) == before.value_of(code, i))) return false;
    return true;
  }

 private:
  float value_of(int code, size_t group) const {
    if (form_ == Form::affine) return static_cast<float>(code) * scales_[group] + biases_[group];
    return static_cast<float>(code - zeros_[group]) * scales_[group];
  }

  int bits_;
  Form form_;
  std::vector<float> scales_;
  std::vector<uint8_t> zeros_;  // of symmetric codes the one that they are stored with
  std::vector<float> biases_;
};

// The dtypes that scales of the layout may have, the best first.
std::vector<DType> scale_dtypes(const LayoutInfo& layout, DType now, DType model_dtype) {
  switch (layout.scale_dtypes) {
    case ScaleDTypes::f32:
      return {DType::f32};
    case ScaleDTypes::f16:
      return {DType::f16};
    case ScaleDTypes::of_weight:
      return {model_dtype, now};
    case ScaleDTypes::any:
      return {now};
  }
  return {};
}

bool allows(const auto& list, const auto& value) {
  return list.empty() || std::ranges::find(list, value) != list.end();
}

// Groups as the layout has them; codes and scales are the same for all of these. Empty: there are none.
std::optional<QuantSpec> regrouped(const QuantSpec& spec, const LayoutInfo& layout, int64_t cols) {
  const bool divides = spec.group_size > 0 && cols % spec.group_size == 0;
  std::vector<QuantSpec> candidates;
  const auto add = [&](Granularity granularity, int64_t size) {
    candidates.push_back(spec);
    candidates.back().granularity = granularity;
    candidates.back().group_size = size;
  };
  // Groups of rows are what most layouts have.
  if (spec.granularity == Granularity::flat && divides) add(Granularity::group, spec.group_size);
  candidates.push_back(spec);
  switch (spec.granularity) {
    case Granularity::flat:
      break;
    case Granularity::group:
      if (divides) add(Granularity::flat, spec.group_size);
      if (spec.group_size == cols) add(Granularity::channel, QuantSpec{}.group_size);
      break;
    case Granularity::channel:
      add(Granularity::group, cols);
      add(Granularity::flat, cols);
      break;
    case Granularity::tensor:
      break;
  }
  for (const QuantSpec& candidate : candidates) {
    const bool sized =
        candidate.granularity == Granularity::group || candidate.granularity == Granularity::flat;
    if (allows(granularities_of(layout, spec.format), candidate.granularity) &&
        (!sized || allows(group_sizes_of(layout, spec.format), candidate.group_size)))
      return candidate;
  }
  return std::nullopt;
}

std::string text_of_groups(const QuantSpec& spec) {
  const bool sized = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  return sized ? fmt::format("groups of {}", spec.group_size)
               : fmt::format("a scale a {}", to_string(spec.granularity));
}

// Sets the parts that have the dtype of scales; false if it does not hold them.
bool set_scales(QuantizedTensor& weight, const Parameters& parameters, DType dtype) {
  auto scales = tensor_of(parameters.scales(), dtype);
  if (!scales) return false;
  if (has_biases(weight.spec)) {
    auto biases = tensor_of(parameters.biases(), dtype);
    if (!biases) return false;
    weight.biases = *std::move(biases);
  } else {
    weight.biases = {};
  }
  weight.scales = *std::move(scales);
  weight.spec.scale_dtype = dtype;
  return true;
}

}  // namespace

Recoded recode(const QuantizedTensor& from, const LayoutInfo& to, DType model_dtype) {
  const auto lost = [&](const std::string& what) {
    return Recoded{std::nullopt, fmt::format("layout {}: {}", to.name, what)};
  };
  const FormatInfo& format = info(from.spec.format);
  const auto spec = regrouped(from.spec, to, from.cols());
  if (!spec) return lost(fmt::format("has no {}", text_of_groups(from.spec)));

  QuantizedTensor weight = from;
  weight.spec = *spec;
  weight.dtype = model_dtype;
  if (from.spec.double_quant) {
    if (!to.double_quant || !holds(to, format.format, false))
      return lost(fmt::format("does not hold {} with double quantization", format.name));
    const std::span<const float> map(reinterpret_cast<const float*>(from.scales_map.data()), 256);
    const bool own_map = !std::ranges::equal(map, std::span(double_quant_map(), 256));
    if (own_map && to.layout != Layout::bitsandbytes)
      return lost("has no map of its own for double quantized scales");
    return {weight, {}};
  }

  if (format.kind == FormatKind::table || format.kind == FormatKind::floating) {
    if (!holds(to, format.format, false)) return lost(fmt::format("does not hold {}", format.name));
    if (format.scale_dtype) return {weight, cannot_hold(to, weight.spec, weight.shape)};
    const std::vector<float> scales = floats_of(from.scales);
    for (const DType dtype : scale_dtypes(to, from.spec.scale_dtype, model_dtype))
      if (auto tensor = tensor_of(scales, dtype)) {
        weight.scales = *std::move(tensor);
        weight.spec.scale_dtype = dtype;
        if (to.scale_dtypes == ScaleDTypes::of_weight && !hides_dtype(to, format.format))
          weight.dtype = dtype;
        if (!shares_scales(weight, scale_rows_of(to, weight.spec)))
          return lost("has a scale for a group of 128 rows, in which they differ");
        return {weight, cannot_hold(to, weight.spec, weight.shape)};
      }
    return lost(fmt::format("does not hold its scales in {}", to_string(from.spec.scale_dtype)));
  }

  // As it is; of scales and biases first the form that they may have come from.
  std::vector<Form> forms = {form_of(from.spec)};
  if (forms.front() == Form::affine) forms = {Form::symmetric, Form::asymmetric};
  for (const Form form : {Form::symmetric, Form::asymmetric, Form::affine})
    if (std::ranges::find(forms, form) == forms.end()) forms.push_back(form);
  std::string why = fmt::format("does not hold {}{}", format.name, from.spec.asymmetric ? " asymmetric" : "");
  for (const Form form : forms) {
    const auto held = format_of(form, format.bits);
    if (!held || !holds(to, *held, form == Form::asymmetric)) continue;
    Parameters parameters(from);
    if (!parameters.become(form)) {
      why = fmt::format("holds {}{}, which does not decode to the same values", info(*held).name,
                        form == Form::asymmetric ? " asymmetric" : "");
      continue;
    }
    weight.spec.format = *held;
    weight.spec.asymmetric = form == Form::asymmetric;
    weight.zeros = {};
    if (form == Form::asymmetric) {
      const auto n = static_cast<int64_t>(parameters.zeros().size());
      weight.zeros = Tensor(Device{}, DType::u8, {n});
      std::memcpy(weight.zeros.data(), parameters.zeros().data(), parameters.zeros().size());
    }
    for (const DType dtype : scale_dtypes(to, from.spec.scale_dtype, model_dtype))
      if (set_scales(weight, parameters, dtype)) {
        if (to.scale_dtypes == ScaleDTypes::of_weight) weight.dtype = dtype;
        if (const std::string reason = cannot_hold(to, weight.spec, weight.shape); !reason.empty())
          return {std::nullopt, reason};
        return {weight, {}};
      }
    why = fmt::format("does not hold its scales in {}", to_string(from.spec.scale_dtype));
  }
  return lost(why);
}

}  // namespace halfbyte::io
