#include "grouped/fake_problem.h"

#include <cmath>

#include "core/expect.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"

namespace halfbyte {
namespace {

constexpr const char* kDescriptor = "fake quantization descriptor";

Grouping grouping_of(const FakeQuantizeDescriptor& d) {
  return make_grouping(kDescriptor, {d.shape, d.granularity, d.axis, d.group_size}, d.dtype);
}

bool is_block_float(const FakeQuantizeDescriptor& d) {
  return d.format && info(*d.format).scale_dtype.has_value();
}

// Of a table format; where its scales are floats, its other fields do not matter.
QuantSpec spec_of(const FakeQuantizeDescriptor& d) {
  QuantSpec spec;
  spec.format = *d.format;
  spec.table = d.table;
  if (is_block_float(d)) {
    spec.granularity = d.granularity;
    spec.group_size = d.group_size;
    spec.scale_dtype = d.scale_dtype;
  }
  return spec;
}

void check_integers(const FakeQuantizeDescriptor& d) {
  HALFBYTE_CHECK(-128 <= d.q_min && d.q_max <= 255, usage,
                 "{}: q_min and q_max must be within [-128, 255], got {} and {}", kDescriptor, d.q_min,
                 d.q_max);
  HALFBYTE_CHECK(d.q_min <= d.q_max && 2 <= d.q_max - d.q_min && d.q_max - d.q_min <= 255, usage,
                 "{}: q_max - q_min must be in [2, 255], got {} - {}", kDescriptor, d.q_max, d.q_min);
  if (d.zero_point_dtype)
    HALFBYTE_MUST(*d.zero_point_dtype == DType::i32 || *d.zero_point_dtype == d.state_dtype(), unsupported,
                  kDescriptor, "zero_point_dtype", "be",
                  fmt::format("i32, or {} for learned ones", to_string(d.state_dtype())),
                  to_string(*d.zero_point_dtype));
  else
    HALFBYTE_CHECK(d.q_min <= 0 && 0 <= d.q_max, usage,
                   "{}: without a zero point 0 must be in [q_min, q_max], got [{}, {}]", kDescriptor, d.q_min,
                   d.q_max);
}

void check_table(const FakeQuantizeDescriptor& d) {
  const FormatInfo& format = info(*d.format);
  HALFBYTE_CHECK(
      format.kind == FormatKind::table, usage,
      "{}: format must be a table (nf4, fp4, fp4_e2m1, lut4, nvfp4, mxfp4), got {}: integers have q_min and "
      "q_max",
      kDescriptor, format.name);
  check_spec(spec_of(d));
  HALFBYTE_CHECK(!d.zero_point_dtype, usage, "{}: format {} has no zero points, got zero_point_dtype {}",
                 kDescriptor, format.name, to_string(*d.zero_point_dtype));
  if (!is_block_float(d)) return;
  HALFBYTE_CHECK(d.eps == 0, usage, "{}: format {} has no eps, got {}", kDescriptor, format.name, d.eps);
  HALFBYTE_CHECK(!d.observer, usage, "{}: format {} has no observer: its scales are those of x", kDescriptor,
                 format.name);
  HALFBYTE_CHECK(!d.mask, usage, "{}: format {} has no mask: dx is dy", kDescriptor, format.name);
}

void check_computed(const FakeQuantizeDescriptor& d) {
  HALFBYTE_CHECK(!d.zero_point_dtype || *d.zero_point_dtype == DType::i32, usage,
                 "{}: computed zero points must be i32, got zero_point_dtype {}", kDescriptor,
                 to_string(*d.zero_point_dtype));
  const bool absmax = d.scale_rule == ScaleRule::absmax;
  if (d.format)
    HALFBYTE_MUST(absmax, invalid_problem, kDescriptor, "scale_rule of a table", "be", "absmax",
                  to_string(d.scale_rule));
  else if (!d.zero_point_dtype)
    HALFBYTE_MUST(absmax || d.scale_rule == ScaleRule::half_range, invalid_problem, kDescriptor,
                  "scale_rule without a zero point", "be", "absmax or half-range", to_string(d.scale_rule));
  if (!d.format && !d.zero_point_dtype)
    HALFBYTE_CHECK(d.q_max > 0, usage, "{}: computed scales without a zero point need q_max > 0, got {}",
                   kDescriptor, d.q_max);
}

}  // namespace

std::vector<int64_t> FakeQuantizeDescriptor::scale_shape() const { return grouping_of(*this).scale_shape; }
std::vector<int64_t> FakeQuantizeDescriptor::mask_shape() const {
  if (shape.empty()) return {1};
  std::vector<int64_t> result = shape;
  result.back() = result.back() / 8 + (result.back() % 8 != 0 ? 1 : 0);
  return result;
}

void check_descriptor(const FakeQuantizeDescriptor& d) {
  HALFBYTE_MUST(is_floating(d.dtype), unsupported, kDescriptor, "dtype", "be", "f32, f64, f16 or bf16",
                to_string(d.dtype));
  if (!is_block_float(d))  // else check_table does
    HALFBYTE_MUST(d.scale_dtype == DType::f32 || d.scale_dtype == d.dtype, unsupported, kDescriptor,
                  "scale_dtype", "be", fmt::format("f32 or dtype ({})", to_string(d.dtype)),
                  to_string(d.scale_dtype));
  grouping_of(d);  // throws
  if (d.format)
    check_table(d);
  else
    check_integers(d);
  if (d.computed) check_computed(d);
  const auto used = [&](double value) {  // as it is computed with
    return d.dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
  };
  HALFBYTE_MUST(std::isfinite(used(d.eps)) && d.eps >= 0, invalid_problem, kDescriptor, "eps", "be",
                "finite and >= 0", d.eps);
  if (d.observer) {
    HALFBYTE_CHECK(d.computed, usage, "{}: an observer needs computed scales", kDescriptor);
    const ObserverConfig& observer = *d.observer;
    HALFBYTE_CHECK(
        observer.kind == ObserverKind::min_max || observer.kind == ObserverKind::moving_average, usage,
        "{}: observer.kind must be min-max or moving-average; others are plans of their own", kDescriptor);
    check_config(observer);
  }
  HALFBYTE_CHECK(!d.computed_global_scale || (d.computed && d.format == Format::nvfp4), usage,
                 "{}: computed_global_scale needs computed scales of format nvfp4", kDescriptor);
  HALFBYTE_MUST(std::isfinite(used(d.gradient_scale)) && used(d.gradient_scale) > 0, invalid_problem,
                kDescriptor, "gradient_scale", "be", "finite and > 0", d.gradient_scale);
  check_alignment(kDescriptor, d.alignment, d.dtype);
}

LinearProblem fake_quantize_problem(LinearOp op, Device device, const FakeQuantizeDescriptor& d,
                                    const PlanPreference& preference) {
  HALFBYTE_CHECK(op == LinearOp::fake_quantize || !is_block_float(d), usage,
                 "{}: format {} has no plans of gradients: dx is dy", kDescriptor, info(*d.format).name);
  LinearProblem problem;
  static_cast<Grouping&>(problem) = grouping_of(d);
  problem.op = op;
  problem.fake = true;
  problem.dtype = d.dtype;
  problem.has_zeros = d.zero_point_dtype.has_value();
  problem.zeros.dtype = d.zero_point_dtype.value_or(DType::i32);
  if (d.format) problem.codec = make_codec(spec_of(d));
  problem.codec.kind = d.format ? formats::Kind::table : formats::Kind::integer;
  problem.codec.rule = static_cast<formats::Rule>(problem.has_zeros ? ScaleRule::minmax : d.scale_rule);
  problem.codec.scale_type = scale_type(d.scale_dtype);
  problem.codec.bits = 8;
  problem.codec.asymmetric = problem.has_zeros;
  problem.codec.q_min = d.format ? 0 : d.q_min;
  problem.codec.q_max = d.format ? 0 : d.q_max;
  problem.codec.eps = d.eps;
  problem.has_mask = d.mask && op != LinearOp::backward;
  problem.mask.cols = d.shape.empty() ? 1 : d.shape.back();
  problem.mask.row_bytes = d.mask_shape().back();
  problem.computed = d.computed && op == LinearOp::fake_quantize;
  problem.computed_global_scale = problem.computed && d.computed_global_scale;
  problem.codec.saturate =
      problem.codec.scale_type == formats::ScaleType::e4m3 && !problem.computed_global_scale;
  problem.observed = problem.computed && d.observer.has_value();
  if (problem.observed && d.observer->kind == ObserverKind::moving_average)
    problem.history = d.observer->momentum;
  problem.num_threads = threads_for(preference.num_threads, static_cast<double>(problem.num_elements()));
  problem.device = device;
  return problem;
}

std::string dtypes_of(const FakeQuantizeDescriptor& d) {
  std::string text = fmt::format("{}, scale {}", to_string(d.dtype), to_string(d.scale_dtype));
  if (d.zero_point_dtype) text += fmt::format(", zero point {}", to_string(*d.zero_point_dtype));
  return text;
}

}  // namespace halfbyte
