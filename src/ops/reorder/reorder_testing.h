// For the tests of `reorder`: weights in every layout between guards, and cases.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

#include "formats/convert.h"
#include "halfbyte/qgemm.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

// Bytes before a guard, poisoned like it, at a multiple of 64 and of no greater power of two.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t num_bytes = 0)
      : num_bytes_(num_bytes), bytes_(static_cast<size_t>(num_bytes) + 4 * kAlignment, Parts::kPoison) {}
  GuardedBytes(const GuardedBytes& other) : GuardedBytes(other.num_bytes_) {
    std::copy_n(other.data(), num_bytes_, data());
  }
  GuardedBytes(GuardedBytes&&) = default;
  GuardedBytes& operator=(GuardedBytes&&) = default;
  uint8_t* data() {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (3 * kAlignment - address % (2 * kAlignment)) % (2 * kAlignment);
  }
  const uint8_t* data() const { return const_cast<GuardedBytes*>(this)->data(); }
  int64_t num_bytes() const { return num_bytes_; }
  bool guard_intact() const {
    return std::all_of(data() + num_bytes_, bytes_.data() + bytes_.size(),
                       [](uint8_t byte) { return byte == Parts::kPoison; });
  }
  bool operator==(const GuardedBytes& other) const {
    return num_bytes_ == other.num_bytes_ && std::equal(data(), data() + num_bytes_, other.data());
  }

 private:
  static constexpr size_t kAlignment = 64;
  int64_t num_bytes_;
  std::vector<uint8_t> bytes_;
};

// What is stored of a weight in a layout, poisoned.
struct StoredWeight {
  enum Part { kCodes, kScales, kZeros, kBiases, kAbsmax, kMap, kOffset, kGlobalScale, kParts };
  static constexpr const char* kNames[kParts] = {"codes",  "scales", "zeros",  "biases",
                                                 "absmax", "map",    "offset", "global_scale"};

  QuantSpec spec;
  int64_t rows, cols;
  Layout layout;
  int bits;
  bool words, joined;  // rows of codes: padded to words; one behind the other
  int64_t row_bits, groups, num_scales;
  GuardedBytes parts[kParts];

  StoredWeight(const QuantSpec& s, int64_t n, int64_t k, Layout l)
      : spec(s), rows(n), cols(k), layout(l), bits(info(s.format).bits) {
    words = layout == Layout::compressed_tensors || layout == Layout::mlx;
    joined = layout == Layout::bitsandbytes ||
             (layout == Layout::halfbyte && spec.granularity == Granularity::flat);
    const int64_t unit = joined ? 1 : words ? 32 : 8;
    row_bits = (cols * bits + unit - 1) / unit * unit;
    const bool one = spec.granularity == Granularity::tensor;
    const bool sized = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
    groups = sized ? (cols + spec.group_size - 1) / spec.group_size : cols > 0 ? 1 : 0;
    num_scales = one ? (rows * cols > 0 ? 1 : 0) : rows * groups;
    const int64_t size = spec.double_quant ? 1 : size_of(spec.scale_dtype);
    const int64_t zero_rows = one ? std::min<int64_t>(1, num_scales) : rows;
    parts[kCodes] = GuardedBytes((rows * row_bits + 7) / 8);
    parts[kScales] = GuardedBytes(num_scales * size);
    if (has_zeros(spec))
      parts[kZeros] = GuardedBytes(
          layout == Layout::compressed_tensors ? (zero_rows * bits + 31) / 32 * groups * 4 : num_scales);
    if (has_biases(spec)) parts[kBiases] = GuardedBytes(num_scales * size);
    if (has_global_scale(spec)) parts[kGlobalScale] = GuardedBytes(4);
    if (!spec.double_quant) return;
    parts[kAbsmax] = GuardedBytes((num_scales + 255) / 256 * 4);
    parts[kMap] = GuardedBytes(256 * 4);
    parts[kOffset] = GuardedBytes(4);
  }

  uint8_t* of(Part part) { return parts[part].num_bytes() > 0 ? parts[part].data() : nullptr; }
  WeightView view() {
    WeightView v;
    v.spec = spec;
    v.rows = rows;
    v.cols = cols;
    v.layout = layout;
    v.codes = of(kCodes);
    v.scales = of(kScales);
    v.zeros = of(kZeros);
    v.biases = of(kBiases);
    v.absmax = reinterpret_cast<float*>(of(kAbsmax));
    v.map = reinterpret_cast<float*>(of(kMap));
    v.offset = reinterpret_cast<float*>(of(kOffset));
    v.global_scale = reinterpret_cast<float*>(of(kGlobalScale));
    return v;
  }

  // Bit by bit, from number `at` of `bytes` on: in bitsandbytes the halves of bytes change places.
  void set_bits(uint8_t* bytes, int64_t at, int num_bits, int value) const {
    for (int i = 0; i < num_bits; ++i) {
      const int64_t bit = (at + i) ^ (layout == Layout::bitsandbytes ? 4 : 0);
      uint8_t& byte = bytes[bit / 8];
      byte = static_cast<uint8_t>((byte & ~(1 << bit % 8)) | (value >> i & 1) << bit % 8);
    }
  }
  void set_code(int64_t row, int64_t col, int value) {
    set_bits(parts[kCodes].data(), row * row_bits + col * bits, bits, value);
  }
  // In words, zero points of a group are one stream of words that are `groups` apart.
  void set_zero(int64_t row, int64_t group, int value) {
    uint8_t* const zeros = parts[kZeros].data();
    if (layout != Layout::compressed_tensors) {
      zeros[row * groups + group] = static_cast<uint8_t>(value);
      return;
    }
    for (int i = 0; i < bits; ++i) {
      const int64_t bit = row * bits + i;
      set_bits(zeros + (bit / 32 * groups + group) * 4, bit % 32, 1, value >> i);
    }
  }
  int last_zero(int64_t row) const {  // but in words
    return parts[kZeros].data()[(spec.granularity == Granularity::tensor ? 1 : row + 1) * groups - 1];
  }
  // What quantize() puts behind the codes of a row.
  int padding(int64_t row) const {
    const FormatInfo& format = info(spec.format);
    if (words) return 0;
    if (format.kind == FormatKind::table)
      return spec.format == Format::nf4 ? 7 : make_codec(spec).book.zero_code;
    if (format.kind == FormatKind::integer) return has_zeros(spec) ? last_zero(row) : 1 << (bits - 1);
    const int64_t last = spec.granularity == Granularity::tensor ? 0 : (row + 1) * groups - 1;
    const auto type = scale_type(spec.scale_dtype);
    const float q = (0 - formats::load_scale<float>(parts[kBiases].data(), last, type)) /
                    formats::load_scale<float>(parts[kScales].data(), last, type);
    return std::isnan(q)
               ? 0
               : static_cast<int>(std::nearbyint(std::clamp(q, 0.0f, static_cast<float>((1 << bits) - 1))));
  }

  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto mask = (1u << bits) - 1;
    for (const Part part : {kScales, kBiases}) {
      if (spec.double_quant || size_of(spec.scale_dtype) == 1) {
        for (int64_t i = 0; i < parts[part].num_bytes(); ++i)
          parts[part].data()[i] = static_cast<uint8_t>(random());
      } else if (parts[part].num_bytes() > 0) {
        const Values values = random_values(spec.scale_dtype, num_scales, random());
        std::copy_n(values.bytes.data(), parts[part].num_bytes(), parts[part].data());
      }
    }
    std::fill_n(parts[kZeros].data(), parts[kZeros].num_bytes(), uint8_t{0});
    if (layout == Layout::compressed_tensors) {
      const int64_t zero_rows = num_scales > 0 && has_zeros(spec) ? num_scales / groups : 0;
      for (int64_t row = 0; row < zero_rows; ++row)
        for (int64_t group = 0; group < groups; ++group)
          set_zero(row, group, static_cast<int>(random() & mask));
    } else {
      for (int64_t i = 0; i < parts[kZeros].num_bytes(); ++i)
        parts[kZeros].data()[i] = static_cast<uint8_t>(random() & mask);
    }
    for (const Part part : {kAbsmax, kMap, kOffset, kGlobalScale})
      for (int64_t i = 0; i < parts[part].num_bytes(); ++i)
        parts[part].data()[i] = static_cast<uint8_t>(random());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) set_code(row, col, static_cast<int>(random() & mask));
      // Of the last code of padding what there is room for.
      const int64_t end = row + 1 < rows ? (row + 1) * row_bits : parts[kCodes].num_bytes() * 8;
      for (int64_t bit = row * row_bits + cols * bits; bit < end; bit += bits)
        set_bits(parts[kCodes].data(), bit, static_cast<int>(std::min<int64_t>(bits, end - bit)),
                 padding(row));
    }
  }
};

inline ::testing::AssertionResult same_parts(const StoredWeight& expected, const StoredWeight& actual) {
  for (int i = 0; i < StoredWeight::kParts; ++i) {
    const GuardedBytes &a = expected.parts[i], &b = actual.parts[i];
    const char* const name = StoredWeight::kNames[i];
    if (!b.guard_intact()) return ::testing::AssertionFailure() << "bytes behind " << name << " were written";
    if (a == b) continue;
    const int64_t at = std::mismatch(a.data(), a.data() + a.num_bytes(), b.data()).first - a.data();
    return ::testing::AssertionFailure() << fmt::format("byte {} of {} of {}: {:02x} instead of {:02x}", at,
                                                        a.num_bytes(), name, b.data()[at], a.data()[at]);
  }
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult same_packed(const GuardedBytes& expected, const GuardedBytes& actual) {
  if (!actual.guard_intact())
    return ::testing::AssertionFailure() << "bytes behind the packed form were written";
  if (expected == actual) return ::testing::AssertionSuccess();
  const int64_t at =
      std::mismatch(expected.data(), expected.data() + expected.num_bytes(), actual.data()).first -
      expected.data();
  return ::testing::AssertionFailure()
         << fmt::format("byte {} of {} of the packed form: {:02x} instead of {:02x}", at,
                        expected.num_bytes(), actual.data()[at], expected.data()[at]);
}

// Of every number of bits formats that have other parts.
inline std::vector<QuantSpec> packed_specs() {
  const auto spec = [](Format format, DType scale, bool asymmetric = false, bool double_quant = false) {
    QuantSpec s;
    s.format = format;
    s.scale_dtype = scale;
    s.asymmetric = asymmetric;
    s.double_quant = double_quant;
    return s;
  };
  return {spec(Format::nf4, DType::f32),
          spec(Format::nf4, DType::f32, false, true),
          spec(Format::fp4, DType::bf16),
          spec(Format::int4, DType::bf16),
          spec(Format::int4, DType::f16, true),
          spec(Format::int4, DType::f32, true, true),
          spec(Format::affine4, DType::f32),
          spec(Format::affine4, DType::bf16),
          spec(Format::int8, DType::f16),
          spec(Format::int8, DType::f32, true),
          spec(Format::int8, DType::f32, true, true),
          spec(Format::affine8, DType::f16),
          spec(Format::int2, DType::f16),
          spec(Format::affine2, DType::bf16),
          spec(Format::int3, DType::f32, true),
          spec(Format::affine3, DType::f16),
          spec(Format::int5, DType::bf16, true),
          spec(Format::int5, DType::f32, true, true),
          spec(Format::affine5, DType::f32),
          spec(Format::int6, DType::f32, false, true),
          spec(Format::affine6, DType::bf16),
          spec(Format::nvfp4, DType::f8_e4m3),
          spec(Format::mxfp4, DType::f8_e8m0)};
}

struct WeightCase {
  QuantSpec spec;
  int64_t rows, cols;
  Layout layout;
};
inline std::string describe(const WeightCase& c) {
  return fmt::format("{}{} [{}, {}] in {}", describe(c.spec), c.spec.double_quant ? " double quantized" : "",
                     c.rows, c.cols, to_string(c.layout));
}

// What the layouts hold that products read.
inline bool is_held(const QuantSpec& spec, Layout layout) {
  const FormatKind kind = info(spec.format).kind;
  switch (layout) {
    case Layout::bitsandbytes:
      return kind == FormatKind::table && spec.granularity == Granularity::flat;
    case Layout::compressed_tensors:
      return kind == FormatKind::integer && !spec.double_quant &&
             (spec.granularity == Granularity::group || spec.granularity == Granularity::channel);
    case Layout::mlx:
      return kind == FormatKind::affine && spec.granularity == Granularity::group;
    case Layout::gptq:
    case Layout::awq:
    case Layout::modelopt:
    case Layout::fp8:
    case Layout::gpt_oss:
      return false;
    case Layout::halfbyte:
      break;
  }
  return true;
}

// Shapes with and without tails, every granularity, every layout; half of them in one that is not halfbyte's,
// where there is one.
inline std::vector<WeightCase> weight_cases(uint64_t seed, int per_spec) {
  std::mt19937_64 random(seed);
  constexpr int64_t kGroups[] = {32, 64, 128, 256, 1, 7, 16, 48, 100, 512, 96, 192};
  std::vector<WeightCase> cases;
  for (const QuantSpec& base : packed_specs())
    for (int i = 0; i < per_spec; ++i) {
      WeightCase c{base, 0, 0, Layout::halfbyte};
      const FormatKind kind = info(base.format).kind;
      c.spec.granularity = static_cast<Granularity>(random() % 4);
      if (i % 2 == 0 && kind == FormatKind::table) c.spec.granularity = Granularity::flat;
      for (const Layout layout : {Layout::bitsandbytes, Layout::compressed_tensors, Layout::mlx})
        if (i % 2 == 0 && is_held(c.spec, layout)) c.layout = layout;
      c.spec.group_size = kGroups[random() % std::size(kGroups)];
      fit_format(c.spec);
      const auto pick = [&](auto... sizes) {
        const int64_t all[] = {sizes...};
        return all[random() % sizeof...(sizes)];
      };
      c.rows = pick(1, 2, 31, 32, 33, 64, 67, 96, 130);
      c.cols = pick(1, 2, 5, 31, 32, 63, 64, 65, 100, 128, 192, 256, 300, 511, 512, 1025, 2112);
      if (c.spec.granularity == Granularity::flat)
        c.cols = (c.cols / c.spec.group_size + 1) * c.spec.group_size;
      cases.push_back(c);
    }
  return cases;
}

}  // namespace halfbyte::testing
