// For the tests of `qgemm`: random products in host memory, and what their results must be.
#pragma once

#include "core/packed_weight.h"
#include "core/weight_view.h"
#include "ops/qgemm/qgemm_ref.h"
#include "ops/testing.h"

namespace halfbyte::testing {

// All formats, with everything that they can be.
inline std::vector<QuantSpec> qgemm_formats() {
  std::vector<QuantSpec> specs;
  for (const FormatInfo& format : all_formats()) {
    QuantSpec spec;
    spec.format = format.format;
    spec.scale_dtype = DType::f16;
    fit_format(spec);
    if (format.format == Format::lut4)
      spec.table = {-20, -13, -8, -7, -5, -3, -2, -1, 0, 1, 2, 4, 6, 7, 11, 16};
    specs.push_back(spec);
    if (format.kind != FormatKind::integer) continue;
    spec.asymmetric = true;
    specs.push_back(spec);
  }
  return specs;
}
inline std::string short_text(const QuantSpec& spec) {
  return fmt::format("{}{}", info(spec.format).name, spec.asymmetric ? "_asymmetric" : "");
}
inline std::string describe(const QgemmDescriptor& d) {
  return fmt::format("{}{} {}{} {}{}, m {} n {} k {}, {} {}{}{}{}, math {}, alignment {}, tile {} x {}",
                     d.variant.empty() ? "" : d.variant + ": ", to_string(d.dtype), short_text(d.spec),
                     d.spec.double_quant ? " double quantized" : "",
                     d.spec.granularity == Granularity::group ? "g" : to_string(d.spec.granularity),
                     d.spec.group_size, d.m, d.n, d.k, to_string(d.spec.scale_dtype),
                     d.packed ? "packed" : to_string(d.layout), d.transposed ? " transposed" : "",
                     d.bias ? " bias" : "", d.accumulate ? " accumulate" : "", to_string(d.math), d.alignment,
                     d.tile.m, d.tile.n);
}

enum class QgemmData {
  random,    // of a normal distribution
  integers,  // small ones, and scales that are powers of two: sums are exact
};

// Host memory between bytes that are NaN, at an address of an alignment (to 256) and no greater one.
class GuardedMemory {
 public:
  GuardedMemory(int64_t num_bytes, int64_t alignment)
      : num_bytes_(num_bytes),
        offset_(alignment % kGuard),
        bytes_(static_cast<size_t>(num_bytes + 3 * kGuard), kNaN) {}
  GuardedMemory(const std::vector<uint8_t>& content, int64_t alignment)
      : GuardedMemory(static_cast<int64_t>(content.size()), alignment) {
    std::copy(content.begin(), content.end(), data());
  }
  uint8_t* data() {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes_.data()));
    return bytes_.data() + kGuard + (kGuard - address % kGuard) % kGuard + offset_;
  }
  std::vector<uint8_t> content() { return {data(), data() + num_bytes_}; }
  bool is_guarded() {
    const uint8_t* const begin = data();
    for (const uint8_t& byte : bytes_)
      if ((&byte < begin || &byte >= begin + num_bytes_) && byte != kNaN) return false;
    return true;
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr uint8_t kNaN = 0xFF;  // in every type
  int64_t num_bytes_, offset_;
  std::vector<uint8_t> bytes_;
};

// n values of x, a bias or y.
inline Values random_values(DType dtype, int64_t n, QgemmData data, std::mt19937_64& random) {
  Values result;
  result.dtype = dtype;
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < n; ++i)
    result.push_back(data == QgemmData::random ? normal(random) : static_cast<double>(random() % 9) - 4);
  return result;
}

// A product: its tensors in host memory. The weight is in the form that the descriptor says.
struct QgemmCase {
  QgemmDescriptor descriptor;
  QgemmProblem problem;  // of the CPU
  Values x, bias;
  Values before;  // y, where the descriptor says to accumulate
  std::vector<uint8_t> packed, codes, scales, zeros, biases;
  std::vector<float> absmax, map, offset, global_scale;

  QgemmCase(const QgemmDescriptor& d, uint64_t seed, QgemmData data = QgemmData::random)
      : descriptor(d), random_(seed), data_(data) {
    descriptor.variant.clear();
    problem = make_qgemm_problem({}, descriptor, 1);
    descriptor.variant = d.variant;
    x = values(d.m * problem.in_cols());
    if (d.bias) bias = values(d.n);
    if (d.accumulate) before = values(d.m * problem.out_cols());
    make_weight();
  }

  int64_t num_outputs() const { return problem.m * problem.out_cols(); }
  QgemmTensors tensors() const {
    QgemmTensors t;
    t.x = x.bytes.data();
    t.bias = bias.bytes.data();
    t.y = const_cast<uint8_t*>(before.bytes.data());
    t.weight = packed.data();
    t.codes = codes.data();
    t.scales = scales.data();
    t.zeros = zeros.data();
    t.biases = biases.data();
    t.absmax = absmax.data();
    t.map = map.data();
    t.offset = offset.data();
    t.global_scale = global_scale.data();
    return t;
  }

 private:
  Values values(int64_t n) { return random_values(descriptor.dtype, n, data_, random_); }
  float scale() {
    const bool may_be_negative = descriptor.spec.scale_dtype != DType::f8_e8m0;
    const double sign = may_be_negative && random_() % 4 == 0 ? -1 : 1;
    if (data_ == QgemmData::integers)
      return static_cast<float>(sign * std::ldexp(1.0, static_cast<int>(random_() % 3) - 2));
    return static_cast<float>(sign * std::uniform_real_distribution<double>(0.01, 0.05)(random_));
  }

  // But NaN; of integers, floating codes are of few exponents, so that sums are exact.
  uint8_t random_code() {
    const auto code = static_cast<uint8_t>(random_() & ((1u << problem.codec.bits) - 1));
    if (problem.codec.kind != formats::Kind::floating) return code;
    if (data_ == QgemmData::integers) return static_cast<uint8_t>((code & 0x80) | (0x30 + (code & 0x1F)));
    return (code & 0x7F) == 0x7F ? static_cast<uint8_t>(code - 1) : code;
  }

  // Codes at random, all of them equally often, and as many parameters as the weight has groups.
  void make_weight() {
    make_parameters(descriptor.packed ? problem.n * problem.weight.groups : problem.view.num_scales());
    std::vector<uint8_t> code_of(static_cast<size_t>(problem.n * problem.k));
    for (uint8_t& code : code_of) code = random_code();
    if (descriptor.packed)
      put_packed(code_of);
    else
      put_view(code_of);
  }

  // Scales, zero points (a byte each) and biases as they are stored, in the order of their numbers.
  void make_parameters(int64_t num_scales) {
    const QuantSpec& spec = descriptor.spec;
    const auto scale_type = halfbyte::scale_type(spec.scale_dtype);
    const auto scale_size = static_cast<size_t>(size_of(spec.scale_dtype));
    const auto count = static_cast<size_t>(num_scales);
    scales.resize(count * (spec.double_quant ? 1 : scale_size));
    zeros.resize(has_zeros(spec) ? count : 0);
    if (has_biases(spec)) biases.resize(count * scale_size);
    if (has_global_scale(spec)) global_scale = {data_ == QgemmData::integers ? 8.0f : 1234.5f};
    for (int64_t i = 0; i < num_scales; ++i) {
      const auto at = static_cast<size_t>(i);
      if (spec.double_quant)
        scales[at] = static_cast<uint8_t>(random_());
      else
        formats::store_scale(scales.data(), i, scale(), scale_type,
                             global_scale.empty() ? 1 : global_scale[0]);
      if (has_zeros(spec)) zeros[at] = random_code();
      if (has_biases(spec)) formats::store_scale(biases.data(), i, scale() * 4, scale_type);
    }
    if (!spec.double_quant) return;
    // Integers: map * absmax + offset are powers of two.
    const bool exact = data_ == QgemmData::integers;
    for (int i = 0; i < 256; ++i) map.push_back(exact ? std::ldexp(1.0f, i % 3) - 4 : double_quant_map()[i]);
    for (int64_t i = 0; i < (num_scales + 255) / 256; ++i)
      absmax.push_back(exact ? 1.0f : static_cast<float>(i % 5 + 1) * 0.003f);
    offset.push_back(exact ? 4.0f : 0.02f);
  }

  // All of them to `packed`.
  void put_packed(const std::vector<uint8_t>& code_of) {
    const QuantSpec& spec = descriptor.spec;
    const formats::PackedLayout& p = problem.weight;
    const bool one = spec.granularity == Granularity::tensor;
    const auto scale_size = static_cast<size_t>(size_of(spec.scale_dtype));
    packed.assign(static_cast<size_t>(p.num_bytes), 0);
    const auto put = [&](int64_t at, const void* from, size_t size) {
      std::memcpy(packed.data() + at, from, size);
    };
    for (int64_t row = 0; row < problem.n; ++row)
      for (int64_t col = 0; col < problem.k; ++col) {
        formats::set_code_at(&packed[static_cast<size_t>(p.code(row, col))], p.place_in_unit(row, col).shift,
                             p.bits, code_of[static_cast<size_t>(row * problem.k + col)]);
        if (col % p.group != 0) continue;
        const int64_t group = col / p.group;
        const auto from = static_cast<size_t>(one ? 0 : row * p.groups + group);
        const size_t size = spec.double_quant ? 1 : scale_size;
        put(p.scale(row, group), &scales[from * size], size);
        if (has_zeros(spec)) put(p.zero(row, group), &zeros[from], 1);
        if (has_biases(spec)) put(p.bias(row, group), &biases[from * scale_size], scale_size);
      }
    if (spec.double_quant) {
      put(p.absmax, absmax.data(), absmax.size() * 4);
      put(p.map, map.data(), 256 * 4);
      put(p.offset, offset.data(), 4);
    }
    if (has_global_scale(spec)) put(p.global_scale, global_scale.data(), 4);
    for (auto* part : {&scales, &zeros, &biases}) part->clear();
    for (auto* part : {&absmax, &map, &offset, &global_scale}) part->clear();
  }

  // Codes to `codes`, zero points as the layout has them.
  void put_view(const std::vector<uint8_t>& code_of) {
    const formats::WeightViewLayout& v = problem.view;
    codes.assign(static_cast<size_t>(v.code_bytes()), 0);
    for (int64_t row = 0; row < problem.n; ++row)
      for (int64_t col = 0; col < problem.k; ++col) {
        formats::set_code_at(&codes[static_cast<size_t>(v.code(row, col))], v.code_shift(row, col), v.bits,
                             code_of[static_cast<size_t>(row * problem.k + col)]);
      }
    if (!has_zeros(descriptor.spec) || !v.zero_words) return;
    const std::vector<uint8_t> zero_of = zeros;
    zeros.assign(static_cast<size_t>(v.zero_bytes()), 0);
    for (int64_t row = 0; row < problem.n; ++row)
      for (int64_t col = 0; col < problem.k; col += v.group) {
        const int zero = zero_of[static_cast<size_t>(v.scale(row, col))];
        for (int64_t i = 0; i < v.bits; ++i) {  // bit by bit: words of a group are v.groups apart
          const int64_t bit = row * v.bits + i, word = bit / 32 * v.groups + col / v.group;
          uint8_t& byte = zeros[static_cast<size_t>(word * 4 + bit % 32 / 8)];
          byte = static_cast<uint8_t>(byte | (zero >> i & 1) << bit % 8);
        }
      }
  }

  std::mt19937_64 random_;
  QgemmData data_;
};

// Results, elements of the dtype of the descriptor, within the bound of the reference; of integers: to the
// bit.
inline ::testing::AssertionResult near_reference(const QgemmCase& test, const std::vector<uint8_t>& y,
                                                 const QgemmReference& expected,
                                                 QgemmData data = QgemmData::random) {
  const DType dtype = test.descriptor.dtype;
  int64_t num_bad = 0, first = -1;
  std::string text;
  std::vector<uint8_t> exact(8);
  for (size_t i = 0; i < expected.y.size(); ++i) {
    const auto actual = load_element<double>(y.data(), static_cast<int64_t>(i), dtype);
    bool good = std::fabs(actual - expected.y[i]) <= expected.bound[i];
    if (data == QgemmData::integers) {
      store_element(exact.data(), 0, expected.y[i], dtype);
      good = load_element<double>(exact.data(), 0, dtype) == actual;
    }
    if (good || num_bad++ > 0) continue;
    first = static_cast<int64_t>(i);
    text = fmt::format("got {}, expected {} within {}", actual, expected.y[i],
                       data == QgemmData::integers ? 0 : expected.bound[i]);
  }
  if (num_bad == 0) return ::testing::AssertionSuccess();
  const int64_t cols = test.problem.out_cols();
  return ::testing::AssertionFailure() << fmt::format(
             "{}: {} of {} outputs are wrong, the first at [{}, {}]: {}", describe(test.descriptor), num_bad,
             expected.y.size(), first / cols, first % cols, text);
}

inline ::testing::AssertionResult near_reference(const QgemmCase& test, const std::vector<uint8_t>& y,
                                                 WeightRounding rounding,
                                                 QgemmData data = QgemmData::random) {
  return near_reference(test, y, qgemm_ref(test.problem, test.tensors(), rounding), data);
}

// A product with a weight in which one number is NaN: a code of fp8, a scale of nvfp4 and mxfp4.
inline std::vector<QgemmDescriptor> nan_products(DType dtype) {
  std::vector<QgemmDescriptor> products;
  for (const Format format : {Format::fp8, Format::nvfp4, Format::mxfp4})
    for (const bool transposed : {false, true})
      for (const int64_t m : {1, 3, 12, 70}) {
        QgemmDescriptor d{.m = m, .n = 72, .k = 256, .transposed = transposed, .dtype = dtype};
        d.spec.format = format;
        d.spec.group_size = 128;
        fit_format(d.spec);
        products.push_back(d);
      }
  return products;
}
inline QgemmCase nan_case(const QgemmDescriptor& d, uint64_t seed) {
  constexpr int64_t kRow = 37, kCol = 150;
  QgemmCase test(d, seed);
  const formats::PackedLayout& p = test.problem.weight;
  const int64_t at = d.spec.format == Format::fp8 ? p.code(kRow, kCol) : p.scale(kRow, kCol / p.group);
  test.packed[static_cast<size_t>(at)] = d.spec.format == Format::mxfp4 ? 0xFF : 0x7F;
  return test;
}
// NaN where the reference has it, and near it elsewhere.
inline ::testing::AssertionResult nan_as_reference(const QgemmCase& test, const std::vector<uint8_t>& y,
                                                   WeightRounding rounding) {
  const QgemmReference expected = qgemm_ref(test.problem, test.tensors(), rounding);
  for (size_t i = 0; i < expected.y.size(); ++i) {
    const auto actual = load_element<double>(y.data(), static_cast<int64_t>(i), test.descriptor.dtype);
    if (std::isnan(expected.y[i]) ? std::isnan(actual)
                                  : std::fabs(actual - expected.y[i]) <= expected.bound[i])
      continue;
    return ::testing::AssertionFailure() << fmt::format("{}: output {} is {}, expected {}",
                                                        describe(test.descriptor), i, actual, expected.y[i]);
  }
  return ::testing::AssertionSuccess();
}

// ---- Descriptions at random

inline constexpr int64_t kQgemmExtents[] = {1,  2,  3,  5,  7,   8,   13,  16,  17,  31,  32,  33,  37,  40,
                                            63, 64, 65, 96, 100, 127, 128, 129, 131, 192, 255, 256, 257, 320};
inline constexpr DType kQgemmDTypes[] = {DType::bf16, DType::f16, DType::f32};

template <class List>
const auto& pick(std::mt19937_64& random, const List& list) {
  return list[random() % std::size(list)];
}

inline bool is_valid(const QgemmDescriptor& descriptor) {
  try {
    check_descriptor(descriptor);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// Everything but extents, variant and tile; `packed` or in one of the layouts.
inline QgemmDescriptor random_qgemm(std::mt19937_64& random, const QuantSpec& format, bool packed) {
  constexpr int64_t kGroups[] = {16, 32, 64, 128, 256, 100, 96};
  constexpr Granularity kGranularities[] = {Granularity::group,   Granularity::group,  Granularity::group,
                                            Granularity::channel, Granularity::tensor, Granularity::flat};
  constexpr Layout kLayouts[] = {Layout::halfbyte, Layout::bitsandbytes, Layout::compressed_tensors,
                                 Layout::mlx};
  constexpr QgemmMath kMaths[] = {QgemmMath::automatic, QgemmMath::automatic, QgemmMath::tf32,
                                  QgemmMath::f64};
  QgemmDescriptor d;
  do {
    d = {};
    d.spec = format;
    d.spec.granularity = pick(random, kGranularities);
    d.spec.group_size = pick(random, kGroups);
    d.spec.scale_dtype = pick(random, kQgemmDTypes);
    d.spec.double_quant = random() % 4 == 0;
    fit_format(d.spec);
    d.dtype = pick(random, kQgemmDTypes);
    d.transposed = random() % 2 == 0;
    d.packed = packed;
    d.layout = packed ? Layout::halfbyte : pick(random, kLayouts);
    d.bias = random() % 2 == 0;
    d.accumulate = random() % 2 == 0;
    d.math = pick(random, kMaths);
    d.m = d.n = 1;
    d.k = d.spec.group_size;
  } while (!is_valid(d));
  return d;
}
inline void set_random_extents(std::mt19937_64& random, QgemmDescriptor& d, int64_t m = 0) {
  d.m = m > 0 ? m : pick(random, kQgemmExtents);
  d.n = pick(random, kQgemmExtents);
  d.k = pick(random, kQgemmExtents);
  const bool groups_divide_rows = d.packed || d.layout == Layout::compressed_tensors;
  if (groups_divide_rows && d.spec.granularity == Granularity::flat) d.k = d.spec.group_size * (1 + d.k % 3);
}

// ---- Runs

// The arguments of a run: the weight of the test where it is, tensors where they are given.
inline Qgemm::Args qgemm_args(const QgemmCase& test, const QgemmTensors& t, Device device) {
  const QgemmDescriptor& d = test.descriptor;
  const auto view = [&](const void* data, std::vector<int64_t> shape) {
    return TensorView{const_cast<void*>(data), d.dtype, std::move(shape), {}, device};
  };
  const auto part = [](const void* data, bool has) { return has ? const_cast<void*>(data) : nullptr; };
  Qgemm::Args args;
  args.x = view(t.x, {d.m, test.problem.in_cols()});
  args.y = view(t.y, {d.m, test.problem.out_cols()});
  if (d.bias) args.bias = view(t.bias, {d.n});
  if (d.packed) {
    args.weight = {d.spec, d.n, d.k, const_cast<void*>(t.weight), device};
    args.weight.num_bytes = test.problem.weight.num_bytes;
    return args;
  }
  const bool nested = d.spec.double_quant;
  args.view = {d.spec,
               d.n,
               d.k,
               d.layout,
               const_cast<void*>(t.codes),
               const_cast<void*>(t.scales),
               part(t.zeros, has_zeros(d.spec)),
               part(t.biases, has_biases(d.spec)),
               static_cast<float*>(part(t.absmax, nested)),
               static_cast<float*>(part(t.map, nested)),
               static_cast<float*>(part(t.offset, nested)),
               static_cast<float*>(part(t.global_scale, has_global_scale(d.spec))),
               device};
  return args;
}

// y of run(tensors, workspace) in host memory. Inputs and what lies around y and workspace must be as they
// were.
template <class Run>
std::vector<uint8_t> run_guarded(const QgemmCase& test, int64_t workspace_bytes, const Run& run) {
  const int64_t alignment = test.descriptor.alignment;
  GuardedMemory x(test.x.bytes, alignment), bias(test.bias.bytes, alignment), packed(test.packed, 64);
  GuardedMemory codes(test.codes, alignment),
      y(test.num_outputs() * size_of(test.descriptor.dtype), alignment);
  GuardedMemory workspace(workspace_bytes, 16);
  if (test.descriptor.accumulate) std::copy(test.before.bytes.begin(), test.before.bytes.end(), y.data());
  QgemmTensors t = test.tensors();
  t.x = x.data();
  t.bias = bias.data();
  t.weight = packed.data();
  t.codes = codes.data();
  t.y = y.data();
  run(t, workspace.data());
  EXPECT_TRUE(y.is_guarded() && workspace.is_guarded()) << "memory beyond y or the workspace was written";
  EXPECT_TRUE(x.content() == test.x.bytes && bias.content() == test.bias.bytes &&
              packed.content() == test.packed && codes.content() == test.codes)
      << "an input was written";
  return y.content();
}

// Of a plan on the CPU.
struct CpuRun {
  std::vector<uint8_t> y;
  PrecisionGuarantee guarantee;
};
inline CpuRun run_on_cpu(const QgemmCase& test, int num_threads) {
  const auto plan = QgemmPlan::select({}, test.descriptor, {num_threads});
  return {run_guarded(test, plan.workspace_size(),
                      [&](const QgemmTensors& t, void* workspace) {
                        plan.run(nullptr, {workspace, plan.workspace_size()}, qgemm_args(test, t, {}));
                      }),
          plan.precision_guarantee()};
}
// It gives y again, with each of these numbers of threads.
inline void expect_same_bytes(const QgemmCase& test, const std::vector<uint8_t>& y,
                              std::initializer_list<int> numbers_of_threads) {
  for (const int threads : numbers_of_threads)
    EXPECT_TRUE(y == run_on_cpu(test, threads).y)
        << describe(test.descriptor) << ": with " << threads << " threads";
}

// The same product with the weight packed by hand; `packed`: memory for it.
inline Qgemm::Args pack_by_hand(const QgemmDescriptor& d, Qgemm::Args args, void* packed) {
  const PackedWeight weight{d.spec, d.n, d.k, packed, args.view.device};
  reorder(args.view, weight);
  args.weight = weight;
  args.view = {};
  return args;
}
// Products of views in several layouts, of m rows: with scales of each kind, and tails.
inline std::vector<QgemmDescriptor> view_products(int64_t m) {
  std::vector<QgemmDescriptor> products;
  const auto add = [&](const QuantSpec& spec, Layout layout, int64_t n, int64_t k) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const bool transposed : {false, true}) {
        QgemmDescriptor d{.spec = spec, .m = m, .n = n, .k = k, .transposed = transposed, .dtype = dtype};
        d.packed = false;
        d.layout = layout;
        d.bias = !transposed;
        d.accumulate = dtype == DType::bf16;
        products.push_back(d);
      }
  };
  add({.format = Format::nf4, .granularity = Granularity::flat}, Layout::bitsandbytes, 136, 512);
  add({.format = Format::nf4, .granularity = Granularity::flat, .double_quant = true}, Layout::bitsandbytes,
      129, 576);
  add({.format = Format::int4, .asymmetric = true, .group_size = 128, .scale_dtype = DType::bf16},
      Layout::compressed_tensors, 200, 520);
  add({.format = Format::affine4, .group_size = 32, .scale_dtype = DType::f16}, Layout::mlx, 96, 320);
  add({.format = Format::int8, .granularity = Granularity::tensor}, Layout::halfbyte, 64, 200);
  return products;
}

// Why a variant of the CPU does not take a product; empty if it does.
inline std::string reason_of(std::string_view variant, const QgemmDescriptor& descriptor) {
  for (const QgemmChoice& choice : explain_qgemm({}, descriptor))
    if (choice.variant == variant) return choice.reason;
  return "it is not listed";
}

}  // namespace halfbyte::testing
