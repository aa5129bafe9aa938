#include "halfbyte/simple.hpp"
#include "core/arithmetic.h"

#include <array>

#include "core/checks.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

void check_sizes(const char* op, int64_t n, int64_t group_size) {
  HALFBYTE_CHECK(n >= 0, usage, "{}: n must not be negative, got {} elements", op, n);
  HALFBYTE_CHECK(group_size > 0, usage, "{}: group_size must be positive, got {} elements", op, group_size);
}

QuantSpec spec_of(Format format, int64_t group_size, bool asymmetric, DType scale_dtype) {
  QuantSpec spec;
  spec.format = format;
  spec.asymmetric = asymmetric;
  spec.granularity = Granularity::flat;
  spec.group_size = group_size;
  spec.scale_dtype = scale_dtype;
  return spec;
}

// The buffers of one call.
class Buffers {
 public:
  Buffers(const char* op, Device device) : op_(op), device_(device) {}

  // `num_needed` elements of a floating dtype, or of u8 that are called `unit`.
  void floats(const char* name, const ConstTensorView& view, int64_t num_needed, bool written) {
    HALFBYTE_CHECK(is_floating(view.dtype), usage, "{}: {} must be f32, f16, bf16 or f64, got {}", op_, name,
                   to_string(view.dtype));
    check(name, view, num_needed, "elements", written);
  }
  void bytes(const char* name, const ConstTensorView& view, int64_t num_needed, const char* unit,
             bool written) {
    HALFBYTE_CHECK(view.dtype == DType::u8, usage, "{}: {} must be u8, got {}", op_, name,
                   to_string(view.dtype));
    check(name, view, num_needed, unit, written);
  }

 private:
  struct Bytes {
    const char* name = nullptr;
    uintptr_t begin = 0, end = 0;
    bool written = false;
  };

  void check(const char* name, const ConstTensorView& view, int64_t num_needed, const char* unit,
             bool written) {
    HALFBYTE_CHECK(is_contiguous(view), usage, "{}: {} must be contiguous", op_, name);
    HALFBYTE_CHECK(view.device == device_, usage, "{}: {} must be on {} as the others, got {}", op_, name,
                   to_string(device_), to_string(view.device));
    const int64_t num_given = num_elements(view), size = size_of(view.dtype);
    HALFBYTE_CHECK(num_given >= num_needed, usage, "{}: {} must have at least {} {}, got {}", op_, name,
                   num_needed, unit, num_given);
    HALFBYTE_CHECK(view.num_bytes < 0 || view.num_bytes / size >= num_needed, usage,
                   "{}: {} must have at least {} {}, but its memory of {} bytes holds {}", op_, name,
                   num_needed, unit, view.num_bytes, view.num_bytes / size);
    if (num_needed == 0) return;
    HALFBYTE_CHECK(view.data != nullptr, usage, "{}: {} needs {} {} but has no data", op_, name, num_needed,
                   unit);
    check_memory(fmt::format("{}: {}", op_, name).c_str(), view.data, num_needed * size, device_);
    const auto begin = reinterpret_cast<uintptr_t>(view.data);
    const Bytes now{name, begin, begin + static_cast<uintptr_t>(num_needed * size), written};
    for (size_t i = 0; i < count_; ++i)
      HALFBYTE_CHECK(
          !(now.written || before_[i].written) || now.begin >= before_[i].end || before_[i].begin >= now.end,
          usage, "{}: {} must not overlap {}: their bytes are {:#x} to {:#x} and {:#x} to {:#x}", op_, name,
          before_[i].name, now.begin, now.end, before_[i].begin, before_[i].end);
    before_[count_++] = now;
  }

  const char* op_;
  Device device_;
  std::array<Bytes, 4> before_;
  size_t count_ = 0;
};

template <class Data>
BasicQuantizedView<Data> parts_of(const QuantSpec& spec, int64_t n, const BasicTensorView<Data>& codes,
                                  const BasicTensorView<Data>& scales, const BasicTensorView<Data>& zeros) {
  using Byte = ConstAs<Data, uint8_t>;
  return {.spec = spec,
          .rows = 1,
          .cols = n,
          .codes = static_cast<Byte*>(codes.data),
          .scales = scales.data,
          .zeros = has_zeros(spec) ? static_cast<Byte*>(zeros.data) : nullptr};
}

void quantize_flat(const char* op, const QuantSpec& spec, const ConstTensorView& x, const TensorView& codes,
                   const TensorView& scales, const TensorView& zeros, int64_t n, Execution execution) {
  const int64_t num_groups = ceil_div(n, spec.group_size);
  Buffers buffers(op, x.device);
  buffers.floats("x", x, n, false);
  buffers.bytes("codes", codes, ceil_div(n, 2), "bytes", true);
  buffers.floats("scales", scales, num_groups, true);
  HALFBYTE_CHECK(scales.dtype != DType::f64 || x.dtype == DType::f64, usage,
                 "{}: scales must not be f64 where x is {}", op, to_string(x.dtype));
  if (has_zeros(spec)) buffers.bytes("zeros", zeros, num_groups, "elements", true);
  if (n == 0) return;
  const QuantizeStatus status =
      quantize({x.data, x.dtype, {n}, {}, x.device}, parts_of(spec, n, codes, scales, zeros), {}, execution);
  HALFBYTE_CHECK(status.num_nonfinite == 0, bad_input,
                 "{}: x has {} elements that are not finite, the first at index {}", op, status.num_nonfinite,
                 status.first_nonfinite);
  HALFBYTE_CHECK(status.num_unheld_scales == 0, bad_input, "{}: {} cannot hold {} of the {} scales", op,
                 to_string(scales.dtype), status.num_unheld_scales, num_groups);
}

void dequantize_flat(const char* op, const QuantSpec& spec, const ConstTensorView& codes,
                     const ConstTensorView& scales, const ConstTensorView& zeros, const TensorView& y,
                     int64_t n, Execution execution) {
  const int64_t num_groups = ceil_div(n, spec.group_size);
  Buffers buffers(op, y.device);
  buffers.bytes("codes", codes, ceil_div(n, 2), "bytes", false);
  buffers.floats("scales", scales, num_groups, false);
  if (has_zeros(spec)) buffers.bytes("zeros", zeros, num_groups, "elements", false);
  buffers.floats("y", y, n, true);
  if (n == 0) return;
  dequantize(parts_of(spec, n, codes, scales, zeros), {y.data, y.dtype, {n}, {}, y.device}, execution);
}

}  // namespace

int64_t Int4Config::num_groups(int64_t n) const {
  check_sizes("num_groups", n, group_size);
  return ceil_div(n, group_size);
}

int64_t Int4Config::packed_bytes(int64_t n) const {
  check_sizes("packed_bytes", n, group_size);
  return ceil_div(n, 2);
}

void quantize_int4(const ConstTensorView& x, const TensorView& codes, const TensorView& scales,
                   const TensorView& zeros, int64_t n, const Int4Config& config, Execution execution) {
  check_sizes("quantize_int4", n, config.group_size);
  const QuantSpec spec = spec_of(Format::int4, config.group_size, !config.symmetric, scales.dtype);
  quantize_flat("quantize_int4", spec, x, codes, scales, zeros, n, execution);
}

void dequantize_int4(const ConstTensorView& codes, const ConstTensorView& scales,
                     const ConstTensorView& zeros, const TensorView& y, int64_t n, const Int4Config& config,
                     Execution execution) {
  check_sizes("dequantize_int4", n, config.group_size);
  const QuantSpec spec = spec_of(Format::int4, config.group_size, !config.symmetric, scales.dtype);
  dequantize_flat("dequantize_int4", spec, codes, scales, zeros, y, n, execution);
}

void quantize_nf4(const ConstTensorView& x, const TensorView& codes, const TensorView& scales, int64_t n,
                  int64_t group_size, Execution execution) {
  check_sizes("quantize_nf4", n, group_size);
  const QuantSpec spec = spec_of(Format::nf4, group_size, false, scales.dtype);
  quantize_flat("quantize_nf4", spec, x, codes, scales, {}, n, execution);
}

void dequantize_nf4(const ConstTensorView& codes, const ConstTensorView& scales, const TensorView& y,
                    int64_t n, int64_t group_size, Execution execution) {
  check_sizes("dequantize_nf4", n, group_size);
  const QuantSpec spec = spec_of(Format::nf4, group_size, false, scales.dtype);
  dequantize_flat("dequantize_nf4", spec, codes, scales, {}, y, n, execution);
}

}  // namespace halfbyte
