#include <limits>

#include "grouped/linear_ref.h"
#include "halfbyte/device.hpp"
#include "ops/quantize_linear/quantize_linear.h"
#include "ops/quantize_linear/quantize_linear_testing.h"
#include "ops/testing.h"

namespace halfbyte {
namespace {

// ---- Kernels against the scalar reference -----------------------------------------------------

constexpr uint8_t kPoison = 0xA5;
constexpr int64_t kGuard = 64;
using Bytes = std::vector<uint8_t>;

// A problem with tensors of its own. Everything but what `op` reads is poison.
struct Case {
  LinearProblem problem;
  LinearTensors tensors;  // without addresses
  Bytes x, dy, codes, scale, zero, y;

  QuantizeStatus run(Case& on, QuantizeStatus (*kernel)(const LinearProblem&, const LinearTensors&)) const {
    on = *this;
    const bool quantize = problem.op == LinearOp::quantize, dequantize = problem.op == LinearOp::dequantize;
    LinearTensors t = tensors;
    t.x = dequantize ? nullptr : on.x.data() + kGuard;
    t.dy = problem.op == LinearOp::backward ? on.dy.data() + kGuard : nullptr;
    t.codes = problem.op == LinearOp::backward ? nullptr : on.codes.data() + kGuard;
    t.scale = on.scale.data() + kGuard;
    t.zero = problem.has_zeros ? on.zero.data() + kGuard : nullptr;
    t.y = quantize ? nullptr : on.y.data() + kGuard;
    return kernel(on.problem, t);
  }
};

Bytes poison(int64_t num_bytes) { return Bytes(static_cast<size_t>(num_bytes + 2 * kGuard), kPoison); }

class CaseMaker {
 public:
  explicit CaseMaker(uint64_t seed) : random_(seed) {}

  Case make() {
    Case c;
    LinearProblem& p = c.problem;
    p.op = static_cast<LinearOp>(below(3));
    p.dtype = testing::kFloatDTypes[below(4)];
    int64_t room = one_in(100) ? 200000 : one_in(8) ? 3000 : 300;
    const auto extent_within = [&] {
      const int64_t n = extent(room);
      room /= std::max<int64_t>(1, n);
      return n;
    };
    p.outer = extent_within();
    p.axis = extent_within();
    p.inner = one_in(3) ? 1 : extent_within();
    if (one_in(4)) std::swap(p.outer, p.inner);
    p.computed = p.op == LinearOp::quantize && one_in(2);
    p.num_threads = one_in(8) ? 16 : one_in(6) ? 3 : 1;
    make_codes(p);
    make_groups(p);
    c.scale = poison(p.num_scales * formats::scale_bytes(p.codec.scale_type));
    c.zero = poison(storage(p.zeros, p.num_scales));
    if (!p.computed) fill_params(c);

    const bool strided = one_in(3);
    const auto make_tensor = [&](Bytes& bytes, LinearStrides& strides, int64_t element_bytes, bool input) {
      strides = strided ? some_strides(p, input) : LinearStrides{p.axis * p.inner, p.inner, 1};
      bytes = poison(element_bytes * (1 + strides.outer * std::max<int64_t>(0, p.outer - 1) +
                                      strides.axis * std::max<int64_t>(0, p.axis - 1) +
                                      strides.inner * std::max<int64_t>(0, p.inner - 1)));
    };
    p.contiguous = !strided;
    const bool quantize = p.op == LinearOp::quantize, dequantize = p.op == LinearOp::dequantize;
    if (!dequantize) {
      make_tensor(c.x, c.tensors.x_strides, size_of(p.dtype), true);
      fill_values(c);
    }
    if (!quantize) make_tensor(c.y, c.tensors.y_strides, size_of(p.dtype), false);
    if (p.op == LinearOp::backward) {
      make_tensor(c.dy, c.tensors.dy_strides, size_of(p.dtype), true);
      fill_bits(c.dy);
    } else if (is_packed(p.codes.dtype)) {
      c.codes = poison(storage(p.codes, p.num_elements()));
    } else {
      make_tensor(c.codes, c.tensors.code_strides, 1, dequantize);
    }
    if (dequantize) fill_bits(c.codes);
    return c;
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  int64_t extent(int64_t most) {
    const int64_t kinds[] = {1, 2, 3, 7, 16, 31, 64, 127};
    const int64_t n = one_in(40) ? 0 : one_in(3) ? kinds[below(8)] : 1 + below(std::max<int64_t>(1, most));
    return std::min(n, std::max<int64_t>(1, most));
  }
  static int64_t storage(const CodeStorage& codes, int64_t n) {
    return is_packed(codes.dtype) ? codes.cols == 0 ? 0 : n / codes.cols * codes.row_bytes
                                  : n * size_of(codes.dtype);
  }
  int64_t divisor(int64_t n) {
    if (n == 0) return 0;
    int64_t d = 1 + below(n);
    while (n % d != 0) --d;
    return d;
  }

  void make_codes(LinearProblem& p) {
    const DType dtypes[] = {DType::i8, DType::u8, DType::i4, DType::u4};
    const int index = static_cast<int>(below(4));
    p.codes.dtype = dtypes[index];
    int low[] = {-128, 0, -8, 0}, high[] = {127, 255, 7, 15};
    p.codec.q_min = low[index];
    p.codec.q_max = high[index];
    if (one_in(3)) {
      p.codec.q_min += static_cast<int>(below(p.codec.levels() + 1));
      p.codec.q_max -= static_cast<int>(below(p.codec.levels() + 1));
    }
    p.codes.cols = p.inner == 1 ? p.axis : divisor(p.inner);
    p.codes.row_bytes = (p.codes.cols + 1) / 2;
    p.has_zeros = one_in(2);
    p.zeros.dtype = one_in(2) ? DType::i32 : p.codes.dtype;
    p.codec.kind = formats::Kind::integer;
    p.codec.bits = is_packed(p.codes.dtype) ? 4 : 8;
    p.codec.asymmetric = p.has_zeros;
    p.codec.rule = p.has_zeros ? formats::Rule::minmax
                   : one_in(2) ? formats::Rule::absmax
                               : formats::Rule::half_range;
    // Rules need a range on which they are defined.
    if (p.computed && p.codec.rule == formats::Rule::absmax && p.codec.q_max <= 0) p.codec.q_max = 1;
    if (p.computed && p.codec.q_max <= p.codec.q_min) p.codec.q_min = p.codec.q_max - 1;
    p.codec.scale_type = one_in(2) ? formats::ScaleType::f32 : scale_type(p.dtype);
  }

  void make_groups(LinearProblem& p) {
    switch (below(3)) {
      case 0:  // tensor
        p.group_size = std::max<int64_t>(1, p.axis);
        p.zeros.cols = 1;
        if (p.inner == 1) p.codes.cols = divisor(p.axis);
        p.codes.row_bytes = (p.codes.cols + 1) / 2;
        break;
      case 1:  // channel
        p.group_size = 1;
        p.scale_strides = {0, 1, 0};
        p.num_scales = p.zeros.cols = p.axis;
        break;
      default: {  // group
        const int64_t sizes[] = {1, 2, 3, 16, 32, 100, p.axis};
        p.group_size = std::max<int64_t>(1, std::min(p.axis, sizes[below(7)]));
        const int64_t groups = (p.axis + p.group_size - 1) / p.group_size;
        p.scale_strides = {groups * p.inner, p.inner, 1};
        p.num_scales = p.outer * groups * p.inner;
        p.zeros.cols = p.inner == 1 ? groups : p.codes.cols;
      }
    }
    p.zeros.row_bytes = (p.zeros.cols + 1) / 2;
  }

  // Any order of the three axes in memory, with gaps; for inputs also broadcast.
  LinearStrides some_strides(const LinearProblem& p, bool input) {
    LinearStrides strides;
    std::pair<int64_t*, int64_t> axes[] = {
        {&strides.outer, p.outer}, {&strides.axis, p.axis}, {&strides.inner, p.inner}};
    if (one_in(2)) std::swap(axes[below(3)], axes[below(3)]);
    int64_t next = one_in(4) ? 2 : 1;
    for (int i = 2; i >= 0; --i) {
      *axes[i].first = input && one_in(12) ? 0 : next;
      next = std::max<int64_t>(next, next * axes[i].second) + (one_in(3) ? below(5) : 0);
    }
    return strides;
  }

  void fill_bits(Bytes& bytes) {
    for (size_t i = kGuard; i + kGuard < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(random_());
  }

  void fill_params(Case& c) {
    const LinearProblem& p = c.problem;
    base_ = std::ldexp(1 + static_cast<double>(below(1 << 23)) / (1 << 23),
                       static_cast<int>(below(one_in(4) ? 260 : 12)) - (one_in(4) ? 140 : 8));
    const bool bad = one_in(4), same = one_in(4);
    for (int64_t i = 0; i < p.num_scales; ++i) {
      double s = same ? base_ : base_ * static_cast<double>(64 + below(192)) / 128;
      const double odd[] = {0.0, -0.0, -1.0, NAN, INFINITY, -INFINITY, 1e-45, 1e-40, 3e38, 1e300};
      if (bad && one_in(5)) s = odd[below(10)];
      linear_ref::store_element(c.scale.data() + kGuard, dtype_of(p.codec.scale_type), i, s);
      int zero = p.codec.q_min + static_cast<int>(below(p.codec.levels() + 1));
      if (bad && one_in(5)) zero = one_in(2) ? static_cast<int>(random_()) : p.codec.q_max + 1;
      linear_ref::store_integer(c.zero.data() + kGuard, p.zeros, i, zero);
    }
  }
  static DType dtype_of(formats::ScaleType type) {
    for (const DType dtype : testing::kFloatDTypes)
      if (scale_type(dtype) == type) return dtype;
    return DType::f32;
  }

  void fill_values(Case& c) {
    const LinearProblem& p = c.problem;
    const bool special = one_in(3), constant = one_in(10);
    const double fixed = static_cast<double>(below(200) - 100) / 8 * base_;
    linear_ref::for_each_element(p, [&](int64_t o, int64_t a, int64_t i) {
      double s = base_;
      if (!p.computed)
        s = formats::load_scale<double>(c.scale.data() + kGuard, p.scale_index(o, a, i), p.codec.scale_type);
      if (!(s > 0 && std::isfinite(s))) s = base_;
      double v = fixed;
      switch (constant ? 9 : below(6)) {
        case 0:  // a tie, or beside one
          v = static_cast<double>(static_cast<float>((static_cast<double>(below(530) - 265) + 0.5) * s));
          if (one_in(2))
            v = static_cast<double>(
                std::nextafter(static_cast<float>(v), one_in(2) ? HUGE_VALF : -HUGE_VALF));
          break;
        case 1:
          v = static_cast<double>(below(600) - 300) * s;
          break;
        case 2:
          v = static_cast<double>(below(1 << 20) - (1 << 19)) / (1 << 17) * s;
          break;
        case 9:
          break;
        default:
          v = static_cast<double>(below(1 << 24) - (1 << 23)) / (1 << 15) * s;
      }
      const double odd[] = {0.0,    -0.0, NAN,  INFINITY, -INFINITY, 1e-45,
                            -1e-39, 3e38, -6e4, 1e300,    -1e-310,   6e-8};
      if (special && one_in(12)) v = odd[below(12)];
      linear_ref::store_element(c.x.data() + kGuard, p.dtype,
                                linear_ref::offset(c.tensors.x_strides, o, a, i), v);
    });
  }

  std::mt19937_64 random_;
  double base_ = 0.25;
};

std::string describe(const LinearProblem& p) {
  return fmt::format(
      "op {} {} [{}, {}, {}] group {} scale strides {} {} {} ({} scales of type {}), codes {} cols {} [{}, "
      "{}] "
      "zeros {} {} cols {}, computed {} rule {}, contiguous {}, threads {}",
      static_cast<int>(p.op), to_string(p.dtype), p.outer, p.axis, p.inner, p.group_size,
      p.scale_strides.outer, p.scale_strides.axis, p.scale_strides.inner, p.num_scales,
      static_cast<int>(p.codec.scale_type), to_string(p.codes.dtype), p.codes.cols, p.codec.q_min,
      p.codec.q_max, p.has_zeros, to_string(p.zeros.dtype), p.zeros.cols, p.computed,
      static_cast<int>(p.codec.rule), p.contiguous, p.num_threads);
}

std::string first_difference(const Bytes& a, const Bytes& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i])
      return fmt::format("byte {} of {}: {:02x} instead of {:02x}", static_cast<int64_t>(i) - kGuard,
                         a.size() - 2 * kGuard, b[i], a[i]);
  return "";
}

// 25,000 problems on each of four targets, 100,000 in all: whole buffers compared, guards and gaps with them.
TEST(QuantizeLinear, RandomProblemsEqualTheReferenceOnEveryTarget) {
  CaseMaker maker(17);
  Case expected, actual;
  for (int i = 0; i < (testing::kSanitized ? 2000 : 10000); ++i) {
    const Case c = maker.make();
    const QuantizeStatus want = c.run(expected, linear_ref::run);
    testing::for_each_target([&](const char*) {
      const QuantizeStatus got = c.run(actual, quantize_linear_cpu);
      EXPECT_TRUE(testing::same_status(want, got));
      EXPECT_EQ(first_difference(expected.codes, actual.codes), "") << "codes";
      EXPECT_EQ(first_difference(expected.scale, actual.scale), "") << "scale";
      EXPECT_EQ(first_difference(expected.zero, actual.zero), "") << "zero";
      EXPECT_EQ(first_difference(expected.y, actual.y), "") << "y";
    });
    if (::testing::Test::HasFailure()) FAIL() << "case " << i << ": " << describe(c.problem);
  }
}

// ---- Plans against the formulas ---------------------------------------------------------------

// Written from <halfbyte/quantize_linear.hpp>, on logical indices, sharing only the conversions of the
// dtypes. F is what the arithmetic is done in.
template <class F>
class Oracle {
 public:
  explicit Oracle(testing::LinearCase& test) : test_(test), d_(test.descriptor) {
    rank_ = d_.shape.size();
    axis_ = static_cast<size_t>(d_.axis < 0 ? d_.axis + static_cast<int>(rank_) : d_.axis);
    if (d_.granularity == Granularity::channel) scale_shape_ = {d_.shape[axis_]};
    if (d_.granularity == Granularity::group) {
      scale_shape_ = d_.shape;
      scale_shape_[axis_] = (d_.shape[axis_] + d_.group_size - 1) / d_.group_size;
    }
  }

  // Fills what the operation writes.
  QuantizeStatus run() {
    int64_t num_scales = 1;
    for (const int64_t extent : scale_shape_) num_scales *= extent;
    if (d_.computed) compute(num_scales);
    bool empty = false;
    for (const int64_t extent : d_.shape) empty = empty || extent == 0;
    for (int64_t i = 0; i < num_scales && !empty; ++i) load(i, !d_.computed);
    for_each([&](const std::vector<int64_t>& at, int64_t index) { element(at, index); });
    return status_;
  }

 private:
  using Storage = testing::Storage;
  struct Scale {
    F scale;
    int64_t zero;
  };

  template <class Body>
  void for_each(const Body& body) {
    int64_t n = 1;
    for (const int64_t extent : d_.shape) n *= extent;
    std::vector<int64_t> at(rank_, 0);
    for (int64_t index = 0; index < n; ++index) {
      body(at, index);
      for (size_t i = rank_; i-- > 0 && ++at[i] == d_.shape[i];) at[i] = 0;
    }
  }
  // Row-major, of the scale of an element.
  int64_t scale_of(const std::vector<int64_t>& at) const {
    if (d_.granularity == Granularity::tensor) return 0;
    if (d_.granularity == Granularity::channel) return at[axis_];
    int64_t number = 0;
    for (size_t i = 0; i < rank_; ++i)
      number = number * scale_shape_[i] + (i == axis_ ? at[i] / d_.group_size : at[i]);
    return number;
  }
  static int64_t place(const Storage& storage, const std::vector<int64_t>& at, int64_t index) {
    if (storage.view.strides.empty()) return index;
    int64_t result = 0;
    for (size_t i = 0; i < at.size(); ++i) result += at[i] * storage.view.strides[i];
    return result;
  }
  static uint8_t* data(Storage& storage) { return storage.bytes.data() + storage.offset; }
  static F get(Storage& storage, int64_t i) {
    return formats::load_scale<F>(data(storage), i, scale_type(storage.view.dtype));
  }
  static void put(Storage& storage, int64_t i, F value) {
    switch (storage.view.dtype) {
      case DType::f16:
        reinterpret_cast<uint16_t*>(data(storage))[i] = formats::to_f16(value);
        break;
      case DType::bf16:
        reinterpret_cast<uint16_t*>(data(storage))[i] = formats::to_bf16(value);
        break;
      case DType::f32:
        reinterpret_cast<float*>(data(storage))[i] = static_cast<float>(value);
        break;
      default:
        reinterpret_cast<double*>(data(storage))[i] = static_cast<double>(value);
    }
  }
  // Of packed integers `i` is the row-major index.
  static int get_integer(Storage& storage, int64_t i) {
    switch (storage.view.dtype) {
      case DType::i32:
        return reinterpret_cast<int32_t*>(data(storage))[i];
      case DType::i8:
        return static_cast<int8_t>(data(storage)[i]);
      case DType::u8:
        return data(storage)[i];
      default: {
        const int64_t cols = storage.view.shape.empty() ? 1 : storage.view.shape.back();
        const int nibble =
            data(storage)[i / cols * ((cols + 1) / 2) + i % cols / 2] >> (i % cols % 2 * 4) & 15;
        return storage.view.dtype == DType::i4 && nibble > 7 ? nibble - 16 : nibble;
      }
    }
  }
  static void put_integer(Storage& storage, int64_t i, int value) {
    if (storage.view.dtype == DType::i32) {
      reinterpret_cast<int32_t*>(data(storage))[i] = value;
    } else if (!is_packed(storage.view.dtype)) {
      data(storage)[i] = static_cast<uint8_t>(value);
    } else {
      const int64_t cols = storage.view.shape.empty() ? 1 : storage.view.shape.back();
      uint8_t& byte = data(storage)[i / cols * ((cols + 1) / 2) + i % cols / 2];
      byte = static_cast<uint8_t>(i % cols % 2 ? byte + (value & 15) * 16 : value & 15);
    }
  }

  void compute(int64_t num_scales) {
    const auto n = static_cast<size_t>(num_scales);
    std::vector<F> low(n, 0), high(n, 0);
    std::vector<bool> any(n, false);
    for_each([&](const std::vector<int64_t>& at, int64_t index) {
      const F v = get(test_.x, place(test_.x, at, index));
      const auto k = static_cast<size_t>(scale_of(at));
      if (!std::isfinite(v)) return;
      low[k] = any[k] ? std::min(low[k], v) : v;
      high[k] = any[k] ? std::max(high[k], v) : v;
      any[k] = true;
    });
    const F levels = static_cast<F>(d_.q_max - d_.q_min);
    for (size_t k = 0; k < n; ++k) {
      F scale = 0;
      bool is_zero;
      if (d_.zero_point_dtype) {
        low[k] = std::min(low[k], F{0});
        high[k] = std::max(high[k], F{0});
        is_zero = low[k] == high[k];
        scale =
            std::isinf(high[k] - low[k]) ? high[k] / levels - low[k] / levels : (high[k] - low[k]) / levels;
      } else {
        const F absmax = std::max(std::abs(low[k]), std::abs(high[k]));
        is_zero = absmax == 0;
        scale = absmax / (d_.scale_rule == ScaleRule::absmax ? static_cast<F>(d_.q_max) : levels / 2);
      }
      if (scale == 0 && !is_zero) scale = std::numeric_limits<F>::denorm_min();
      put(test_.scale, static_cast<int64_t>(k), scale);
      F stored = get(test_.scale, static_cast<int64_t>(k));
      if (stored == 0 && !is_zero) {  // the smallest of its dtype: the bits of 1
        const int64_t size = size_of(d_.scale_dtype);
        std::memset(data(test_.scale) + static_cast<int64_t>(k) * size, 0, static_cast<size_t>(size));
        data(test_.scale)[static_cast<int64_t>(k) * size] = 1;
        stored = get(test_.scale, static_cast<int64_t>(k));
      }
      const F eight_bits = d_.scale_dtype == DType::f16    ? static_cast<F>(0x1p-17)
                           : d_.scale_dtype == DType::bf16 ? static_cast<F>(0x1p-126)
                                                           : 0;
      if (scale != 0 && scale < eight_bits) ++status_.num_coarse_scales;
      int zero = 0;
      if (d_.zero_point_dtype) {
        const F steps = stored == 0 ? 0 : std::max(-levels, low[k] / stored);
        zero = d_.q_min - static_cast<int>(std::nearbyint(steps));
        put_integer(test_.zero_point, static_cast<int64_t>(k), zero);
      }
      const auto finite = [&](F x) {  // what is decoded of it
        const F code = std::clamp(std::nearbyint(x / stored), static_cast<F>(d_.q_min - zero),
                                  static_cast<F>(d_.q_max - zero));
        return stored == 0 || std::isfinite(code * stored);
      };
      if (!std::isfinite(stored) || !finite(std::min<F>(0, low[k])) || !finite(std::max<F>(0, high[k])))
        ++status_.num_unheld_scales;
    }
  }

  Scale load(int64_t number, bool counted) {
    Scale result{get(test_.scale, number), 0};
    if (!(result.scale >= 0 && std::isfinite(result.scale))) {
      result.scale = 0;
      if (counted) ++status_.num_invalid_scales;
    }
    if (d_.zero_point_dtype) {
      result.zero = get_integer(test_.zero_point, number);
    }
    return result;
  }

  void element(const std::vector<int64_t>& at, int64_t index) {
    const Scale scale = load(scale_of(at), false);
    const int64_t code_place = is_packed(d_.code_dtype) ? index : place(test_.codes, at, index);
    if (test_.op == LinearOp::dequantize) {
      const int q = get_integer(test_.codes, code_place);
      return put(test_.y, place(test_.y, at, index), static_cast<F>(q - scale.zero) * scale.scale);
    }
    const F x = get(test_.x, place(test_.x, at, index));
    const F steps = scale.scale == 0 || std::isnan(x) ? 0 : std::nearbyint(x / scale.scale);
    const int64_t position =
        static_cast<int64_t>(std::clamp(steps, static_cast<F>(-1e15), static_cast<F>(1e15))) + scale.zero;
    if (test_.op == LinearOp::quantize) {
      if (!std::isfinite(x) && status_.num_nonfinite++ == 0) status_.first_nonfinite = index;
      const int64_t q = std::clamp<int64_t>(position, d_.q_min, d_.q_max);
      return put_integer(test_.codes, code_place, static_cast<int>(q));
    }
    const bool passes =
        !std::isnan(x) && (scale.scale == 0 || (d_.q_min <= position && position <= d_.q_max));
    const int64_t size = size_of(d_.dtype);
    uint8_t* const to = data(test_.y) + place(test_.y, at, index) * size;
    if (passes)
      std::copy_n(data(test_.dy) + place(test_.dy, at, index) * size, size, to);
    else
      std::fill_n(to, size, uint8_t{0});
  }

  testing::LinearCase& test_;
  const LinearDescriptor& d_;
  size_t rank_, axis_;
  std::vector<int64_t> scale_shape_;
  QuantizeStatus status_;
};

TEST(QuantizeLinear, RandomPlansEqualTheFormulas) {
  testing::LinearCases cases(3);
  const int count = testing::kSanitized ? 1000 : 10000;
  for (int i = 0; i < count; ++i) {
    testing::LinearCase actual = cases.next(i % 50 == 0 ? 20000 : 400), expected = actual;
    const QuantizeStatus want = actual.descriptor.dtype == DType::f64 ? Oracle<double>(expected).run()
                                                                      : Oracle<float>(expected).run();
    EXPECT_TRUE(testing::same_status(want, testing::run_on_cpu(actual, {i % 3 == 0 ? 3 : 1})));
    EXPECT_TRUE(testing::same_tensors(expected, actual));
    if (HasFailure()) FAIL() << "case " << i << ": " << actual.text();
  }
}

// ---- Golden vectors ---------------------------------------------------------------------------

// What a plan on the CPU makes of a few numbers.
struct Golden {
  LinearDescriptor descriptor;
  testing::Values scale;
  std::vector<int32_t> zeros;  // where the descriptor has zero points: i32
  QuantizeStatus status;

  explicit Golden(LinearDescriptor d, const std::vector<double>& scales = {},
                  std::vector<int32_t> zero_points = {})
      : descriptor(std::move(d)), zeros(std::move(zero_points)) {
    scale.dtype = descriptor.scale_dtype;
    for (const double s : scales) scale.push_back(s);
    descriptor.computed = scales.empty();
    if (!zeros.empty()) descriptor.zero_point_dtype = DType::i32;
    if (!descriptor.computed) return;
    int64_t n = 1;
    for (const int64_t extent : descriptor.scale_shape()) n *= extent;
    for (int64_t i = 0; i < n; ++i) scale.push_back(0);
    zeros.resize(static_cast<size_t>(n));
  }
  template <class Op>
  void run(const typename Op::Args& args) {
    alignas(16) QuantizeStatus workspace;
    const auto plan = Plan<Op>::select({}, descriptor);
    plan.run(nullptr, {&workspace, sizeof workspace}, args);
    status = plan.status(nullptr, {&workspace, sizeof workspace});
  }
  TensorView scale_view() { return scale.view(descriptor.scale_shape()); }
  TensorView zero_view() {
    return {
        descriptor.zero_point_dtype ? zeros.data() : nullptr, DType::i32, descriptor.scale_shape(), {}, {}};
  }
  testing::Values values(const std::vector<double>& x) const {
    testing::Values result;
    result.dtype = descriptor.dtype;
    result.bytes.reserve(1024);  // at one address: aligned
    for (const double v : x) result.push_back(v);
    return result;
  }
  Bytes bytes(const std::vector<double>& x) {
    testing::Values in = values(x);
    Bytes codes(static_cast<size_t>(contiguous_bytes(descriptor.code_dtype, descriptor.shape)));
    run<QuantizeLinear>({in.view(descriptor.shape),
                         {codes.data(), descriptor.code_dtype, descriptor.shape, {}, {}},
                         scale_view(),
                         zero_view()});
    return codes;
  }
  std::vector<int> codes(const std::vector<double>& x) {
    const Bytes codes = bytes(x);
    const CodeStorage how{descriptor.code_dtype, descriptor.shape.back(), (descriptor.shape.back() + 1) / 2};
    std::vector<int> result;
    for (size_t i = 0; i < x.size(); ++i)
      result.push_back(linear_ref::load_integer(codes.data(), how, static_cast<int64_t>(i)));
    return result;
  }
  // Of codes that `bytes` made; f32 only.
  std::vector<float> decoded(Bytes codes) {
    std::vector<float> y(static_cast<size_t>(descriptor.shape.back()));
    run<DequantizeLinear>({{codes.data(), descriptor.code_dtype, descriptor.shape, {}, {}},
                           scale_view(),
                           zero_view(),
                           {y.data(), DType::f32, descriptor.shape, {}, {}}});
    return y;
  }
  // 1 where the gradient passes.
  std::vector<int> passes(const std::vector<double>& x) {
    testing::Values in = values(x), dy = values(std::vector<double>(x.size(), 1.0));
    run<QuantizeLinearBackward>({in.view(descriptor.shape), dy.view(descriptor.shape), scale_view(),
                                 zero_view(), dy.view(descriptor.shape)});
    std::vector<int> result;
    for (size_t i = 0; i < x.size(); ++i)
      result.push_back(static_cast<int>(
          linear_ref::load_element<double>(dy.bytes.data(), descriptor.dtype, static_cast<int64_t>(i))));
    return result;
  }
  float scale_value(size_t i = 0) const { return static_cast<float>(scale_at(i)); }
  double scale_at(size_t i) const {
    return linear_ref::load_element<double>(scale.bytes.data(), descriptor.scale_dtype,
                                            static_cast<int64_t>(i));
  }
};

LinearDescriptor vector_of(int64_t n, DType code_dtype, int q_min, int q_max, DType dtype = DType::f32) {
  LinearDescriptor d = LinearDescriptor::per_tensor({n});
  d.code_dtype = code_dtype;
  d.q_min = q_min;
  d.q_max = q_max;
  d.dtype = dtype;
  d.alignment = size_of(dtype);
  return d;
}

using Ints = std::vector<int>;

TEST(QuantizeLinear, RoundsHalfToEvenAndSaturates) {
  Golden int4(vector_of(8, DType::i4, -8, 7), {1});
  const std::vector<double> x{-7, -3.5, -.5, .5, 1.5, 2.5, 3.49, 7};
  EXPECT_EQ(int4.codes(x), (Ints{-7, -4, 0, 0, 2, 2, 3, 7}));
  EXPECT_EQ(int4.bytes(x), (Bytes{0xC9, 0x00, 0x22, 0x73}));
  Golden half(vector_of(10, DType::i8, -128, 127), {0.5});
  EXPECT_EQ(half.codes({.25, .75, 1.25, 1.75, -.25, -.75, -1.25, 63.25, 64, -64.25}),
            (Ints{0, 2, 2, 4, 0, -2, -2, 126, 127, -128}));
}

TEST(QuantizeLinear, RoundsBeforeTheZeroPointIsAdded) {
  const auto codes = [](int zero) {
    return Golden(vector_of(4, DType::i8, -10, 10), {2}, {zero}).codes({1, 3, 5, -1});
  };
  EXPECT_EQ(codes(0), (Ints{0, 2, 2, 0}));
  EXPECT_EQ(codes(1), (Ints{1, 3, 3, 1}));
  EXPECT_EQ(codes(2), (Ints{2, 4, 4, 2}));
  EXPECT_EQ(codes(3), (Ints{3, 5, 5, 3}));
}

// linear_test.cc has many more.
TEST(QuantizeLinear, ZeroPointsOutsideTheCodes) {
  Golden golden(vector_of(4, DType::i4, -8, 7), {1}, {100});
  EXPECT_EQ(golden.codes({-120, -105, -101, -90}), (Ints{-8, -5, -1, 7}));
  EXPECT_TRUE(golden.status.ok());
  EXPECT_EQ(golden.passes({-120, -105, -101, -90}), (Ints{0, 1, 1, 0}));
  EXPECT_EQ(golden.decoded(golden.bytes({-120, -105, -101, -90})),
            (std::vector<float>{-108, -105, -101, -93}));
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  Golden least(vector_of(4, DType::i8, -128, 127), {1}, {kLeast});
  EXPECT_EQ(least.codes({0x1p31, 0x1p31 - 128, 0x1p31 + 256, NAN}), (Ints{0, -128, 127, -128}));
  EXPECT_EQ(least.decoded({0x80, 0x7F, 64, 65}), (std::vector<float>{0x1p31 - 128, 0x1p31, 0x1p31, 0x1p31}));
}

TEST(QuantizeLinear, DividesInTheArithmeticOfTheData) {
  Golden f32(vector_of(3, DType::i8, -128, 127), {0.00100000005});
  EXPECT_EQ(f32.codes({0.00150000001, 0.0175000001, 0.057500001}), (Ints{2, 18, 58}));
  for (const DType dtype : {DType::f32, DType::f64}) {
    LinearDescriptor d = vector_of(1, DType::i8, -128, 127, dtype);
    d.scale_dtype = dtype;
    EXPECT_EQ(Golden(d, {0.1}).codes({0.15}), (Ints{dtype == DType::f64 ? 1 : 2}));
    EXPECT_EQ(Golden(d, {1}).codes({2.5000000001}), (Ints{dtype == DType::f64 ? 3 : 2}));
  }
}

TEST(QuantizeLinear, GroupsWithGivenScales) {
  LinearDescriptor d = LinearDescriptor::per_group({2, 8}, 4);
  d.q_min = -10;
  d.q_max = 10;
  d.alignment = 4;
  Golden golden(d, {.1, 1, .5, .1}, {0, 0, 0, 0});
  EXPECT_EQ(golden.codes({.1, .2, .3, -.4, 1, 2, -3, 4, 15, 1, .5, -1, .05, .10, .15, -.20}),
            (Ints{1, 2, 3, -4, 1, 2, -3, 4, 10, 2, 1, -2, 0, 1, 2, -2}));
  EXPECT_TRUE(golden.status.ok());
}

TEST(QuantizeLinear, NonFiniteElementsAndScales) {
  const std::vector<double> x{1, INFINITY, -INFINITY, NAN, -NAN, 0, -0.0, 3e38};
  Golden golden(vector_of(8, DType::i8, -100, 100), {1}, {3});
  EXPECT_EQ(golden.codes(x), (Ints{4, 100, -100, 3, 3, 3, 3, 100}));
  EXPECT_EQ(golden.status.num_nonfinite, 4);
  EXPECT_EQ(golden.status.first_nonfinite, 1);
  EXPECT_EQ(golden.passes(x), (Ints{1, 0, 0, 0, 0, 1, 1, 0}));
  for (const double scale : {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY), 0.0}) {
    Golden none(vector_of(8, DType::i8, -100, 100), {scale}, {200});
    EXPECT_EQ(none.codes(x), Ints(8, 100));
    EXPECT_EQ(none.status.num_invalid_scales, scale == 0 ? 0 : 1);
    EXPECT_EQ(none.status.num_invalid_zero_points, 0);
    EXPECT_EQ(none.passes(x), (Ints{1, 1, 1, 0, 0, 1, 1, 1}));
    EXPECT_EQ(none.decoded(Bytes(8, 100)), std::vector<float>(8, 0.0f));
  }
}

TEST(QuantizeLinear, GradientPassesWithinTheRoundedRange) {
  EXPECT_EQ(Golden(vector_of(6, DType::i4, -8, 7), {.1}).passes({.74, .76, -.84, -.86, .70, -.80}),
            (Ints{1, 0, 1, 0, 1, 1}));
  // Half a step beyond: 7.5 rounds to 8, out; -8.5 to -8, in.
  EXPECT_EQ(Golden(vector_of(2, DType::i4, -8, 7), {1}).passes({7.5, -8.5}), (Ints{0, 1}));
}

TEST(QuantizeLinear, ComputedScales) {
  Golden int8(vector_of(8, DType::i8, -127, 127));
  EXPECT_EQ(int8.codes({-1, -.5, .00390625, .1, .25, .5, .75, 1}), (Ints{-127, -64, 0, 13, 32, 64, 95, 127}));
  EXPECT_EQ(formats::bit_cast<uint32_t>(int8.scale_value()), 0x3C010204u);
  Golden int4(vector_of(2, DType::i4, -8, 7));
  EXPECT_EQ(int4.codes({-1, 0.5}), (Ints{-7, 3}));  // 0x3E124925 is above 1 / 7: 0.5 is 3.4999998 of it
  EXPECT_EQ(formats::bit_cast<uint32_t>(int4.scale_value()), 0x3E124925u);
  int4.descriptor.scale_rule = ScaleRule::half_range;
  EXPECT_EQ(int4.codes({-1, 1}), (Ints{-7, 7}));  // 7.4999996
  EXPECT_EQ(formats::bit_cast<uint32_t>(int4.scale_value()), 0x3E088889u);
  // That the code -8 would be infinite does not count where no value has it.
  Golden large(vector_of(2, DType::i4, -8, 7));
  EXPECT_EQ(large.codes({-3.3e38, 1e38}), (Ints{-7, 2}));
  EXPECT_EQ(large.status.num_unheld_scales, 0);

  const auto asymmetric = [](int64_t n, DType code_dtype, int q_min, int q_max) {
    LinearDescriptor d = vector_of(n, code_dtype, q_min, q_max);
    d.zero_point_dtype = DType::i32;
    return Golden(d);
  };
  Golden u4 = asymmetric(8, DType::u4, 0, 15);
  const std::vector<double> x{-1, -.5, 0, .25, .5, 1, 1.5, 2};
  EXPECT_EQ(u4.codes(x), (Ints{0, 3, 5, 6, 7, 10, 13, 15}));
  EXPECT_EQ(formats::bit_cast<uint32_t>(u4.scale_value()), 0x3E4CCCCDu);
  EXPECT_EQ(u4.zeros[0], 5);
  const float s = u4.scale_value();
  EXPECT_EQ(u4.decoded(u4.bytes(x)), (std::vector<float>{-5 * s, -2 * s, 0, s, 2 * s, 5 * s, 8 * s, 10 * s}));
  Golden u8 = asymmetric(8, DType::u8, 0, 255);
  EXPECT_EQ(u8.codes({0, 1, 2, 3, 4, 5, 6, 7}), (Ints{0, 36, 73, 109, 146, 182, 219, 255}));
  EXPECT_EQ(u8.scale_value(), 0.0274509806f);
  EXPECT_EQ(u8.zeros[0], 0);

  struct Range {
    double low, high;
    int q_min, q_max;
    float scale;
    int zero;
  };
  for (const Range& range :
       {Range{-.5, 2, -8, 7, 0.16666667f, -5}, Range{-.5, 2, -128, 127, 9.803922e-3f, -77},
        Range{0, 1, -128, 127, 3.921569e-3f, -128}, Range{1, 3, -128, 127, 3.0f / 255, -128},
        Range{5, 5, -128, 127, 5.0f / 255, -128}}) {
    Golden golden = asymmetric(2, DType::i8, range.q_min, range.q_max);
    const Bytes codes = golden.bytes({range.low, range.high});
    EXPECT_EQ(golden.scale_value(), range.scale) << range.low;
    EXPECT_EQ(golden.zeros[0], range.zero) << range.low;
    EXPECT_NEAR(golden.decoded(codes)[1], range.high, static_cast<double>(range.scale) / 2);
  }
}

// ---- What is refused --------------------------------------------------------------------------

// `words` of the message of a usage error.
void expect_refused(const std::optional<Error>& error, std::initializer_list<const char*> words) {
  ASSERT_TRUE(error.has_value()) << *words.begin();
  EXPECT_EQ(error->code(), ErrorCode::usage);
  for (const char* const word : words)
    EXPECT_NE(std::string(error->what()).find(word), std::string::npos) << word << " in: " << error->what();
}
void expect_refused(const LinearDescriptor& descriptor, std::initializer_list<const char*> words) {
  try {
    QuantizeLinearPlan::select({}, descriptor);
    ADD_FAILURE() << "not refused: " << *words.begin();
  } catch (const Error& error) {
    expect_refused(error, words);
  }
}

TEST(QuantizeLinear, RefusesDescriptorsThatBreakARule) {
  const auto with = [](const auto& change) {
    LinearDescriptor d = LinearDescriptor::per_group({4, 64}, 32);
    change(d);
    return d;
  };
  using D = LinearDescriptor;
  EXPECT_NO_THROW(check_descriptor(with([](D&) {})));
  expect_refused(with([](D& d) { d.dtype = DType::i32; }), {"dtype", "f32, f64, f16 or bf16", "i32"});
  expect_refused(with([](D& d) { d.code_dtype = DType::i32; }), {"code_dtype", "i8, u8, i4 or u4", "i32"});
  expect_refused(with([](D& d) { d.scale_dtype = DType::f16; }), {"scale_dtype", "f32", "f16"});
  expect_refused(with([](D& d) { d.dtype = DType::bf16, d.scale_dtype = DType::f64; }),
                 {"scale_dtype", "bf16", "f64"});
  expect_refused(with([](D& d) { d.zero_point_dtype = DType::u8; }), {"zero_point_dtype", "i32", "i8", "u8"});
  expect_refused(with([](D& d) { d.shape = {4, -1}; }), {"negative", "-1"});
  expect_refused(with([](D& d) { d.shape = {int64_t{1} << 40, int64_t{1} << 40}; }), {"2^63 - 1"});
  expect_refused(with([](D& d) { d.granularity = Granularity::flat; }), {"granularity", "flat"});
  expect_refused(with([](D& d) { d.shape = {}; }), {"granularity group", "[]"});
  expect_refused(with([](D& d) { d.axis = 2; }), {"axis", "[-2, 2)", "[4, 64]", "got 2"});
  expect_refused(with([](D& d) { d.axis = -3; }), {"axis", "[-2, 2)", "got -3"});
  expect_refused(with([](D& d) { d.granularity = Granularity::tensor, d.axis = 2; }),
                 {"axis", "[-2, 2)", "got 2"});
  expect_refused(with([](D& d) { d.granularity = static_cast<Granularity>(9); }), {"granularity"});
  EXPECT_THROW(with([](D& d) { d.group_size = 0; }).scale_shape(), Error);
  EXPECT_NO_THROW(check_descriptor(with([](D& d) { d.shape = {0, int64_t{1} << 40, int64_t{1} << 40}; })));
  EXPECT_NO_THROW(check_descriptor(with([](D& d) { d.shape = {int64_t{1} << 40, int64_t{1} << 40, 0}; })));
  expect_refused(with([](D& d) { d.group_size = 0; }), {"group_size", "positive", "got 0"});
  expect_refused(with([](D& d) { d.group_size = -5; }), {"group_size", "positive", "got -5"});
  expect_refused(with([](D& d) { d.q_min = 8, d.q_max = 7, d.zero_point_dtype = DType::i32; }),
                 {"q_min", "q_max", "8", "7"});
  expect_refused(with([](D& d) { d.q_max = 128; }), {"q_max", "[-128, 127]", "i8", "128"});
  expect_refused(with([](D& d) { d.code_dtype = DType::u4; }), {"q_min", "[0, 15]", "u4", "-128"});
  expect_refused(with([](D& d) { d.q_min = 1; }), {"zero point", "[1, 127]"});
  expect_refused(with([](D& d) { d.q_max = -1; }), {"zero point", "[-128, -1]"});
  const auto computed = [&](const auto& change) {
    return with([&](D& d) {
      d.computed = true;
      change(d);
    });
  };
  expect_refused(computed([](D& d) { d.scale_rule = ScaleRule::signed_max; }),
                 {"scale_rule", "absmax", "signed-max"});
  expect_refused(computed([](D& d) { d.q_min = d.q_max = 0; }), {"q_min", "q_max", "0 and 0"});
  expect_refused(computed([](D& d) { d.q_max = 0; }), {"q_max > 0", "got 0"});
  expect_refused(with([](D& d) { d.alignment = 0; }), {"alignment", "power of two", "got 0"});
  expect_refused(with([](D& d) { d.alignment = 24; }), {"alignment", "power of two", "got 24"});
  expect_refused(with([](D& d) { d.alignment = 2; }), {"alignment", "4 bytes of f32", "got 2"});
  EXPECT_NO_THROW(check_descriptor(computed([](D& d) {
    d.zero_point_dtype = DType::i8;
    d.scale_rule = ScaleRule::minmax;
  })));
  EXPECT_THROW(QuantizeLinearPlan::select({}, with([](D&) {}), {-1}), Error);
}

TEST(QuantizeLinear, RefusesTensorsThatBreakARule) {
  LinearDescriptor descriptor = LinearDescriptor::per_group({4, 64}, 32);
  descriptor.zero_point_dtype = DType::i8;
  alignas(64) static uint8_t x[4096], y[4096], codes[1024], scale[64], zero[64];
  using Args = QuantizeLinear::Args;
  const Args good{{x, DType::f32, {4, 64}, {}, {}},
                  {codes, DType::i8, {4, 64}, {}, {}},
                  {scale, DType::f32, {4, 2}, {}, {}},
                  {zero, DType::i8, {4, 2}, {}, {}}};
  const auto refusal = [&](const auto& change) {
    Args args = good;
    change(args);
    return QuantizeLinearPlan::select({}, descriptor).can_implement(args);
  };
  EXPECT_FALSE(refusal([](Args&) {}).has_value());
  expect_refused(refusal([](Args& a) { a.x.dtype = DType::f16; }), {"quantize_linear", "x", "f32", "f16"});
  expect_refused(refusal([](Args& a) { a.codes.dtype = DType::u8; }), {"codes", "i8", "u8"});
  expect_refused(refusal([](Args& a) { a.scale.dtype = DType::bf16; }), {"scale", "f32", "bf16"});
  expect_refused(refusal([](Args& a) { a.zero_point.dtype = DType::i32; }), {"zero_point", "i8", "i32"});
  expect_refused(refusal([](Args& a) { a.x.shape = {64, 4}; }), {"x", "[4, 64]", "[64, 4]"});
  expect_refused(refusal([](Args& a) { a.scale.shape = {4, 3}; }), {"scale", "[4, 2]", "[4, 3]"});
  expect_refused(refusal([](Args& a) { a.zero_point.shape = {8}; }), {"zero_point", "[4, 2]", "[8]"});
  expect_refused(refusal([](Args& a) { a.x.strides = {64}; }), {"x", "stride", "2", "1"});
  expect_refused(refusal([](Args& a) { a.x.strides = {128, 1}; }), {"x", "contiguous", "[128, 1]"});
  expect_refused(refusal([](Args& a) { a.scale.strides = {4, 1}; }), {"scale", "contiguous", "[4, 1]"});
  expect_refused(refusal([](Args& a) { a.x.strides = {64, -1}; }), {"x", "strides", "-1"});
  expect_refused(refusal([](Args& a) { a.codes.data = nullptr; }), {"codes", "no data"});
  expect_refused(refusal([](Args& a) { a.scale.data = nullptr; }), {"scale", "no data"});
  expect_refused(refusal([](Args& a) { a.x.num_bytes = 1023; }), {"x", "1024", "1023"});
  expect_refused(refusal([](Args& a) { a.zero_point.num_bytes = 7; }), {"zero_point", "8", "7"});
  expect_refused(refusal([](Args& a) { a.x.data = x + 2; }), {"x", "aligned", "4"});
  expect_refused(refusal([](Args& a) { a.scale.data = scale + 1; }), {"scale", "aligned", "4"});
  expect_refused(refusal([](Args& a) { a.x.device = {DeviceKind::cuda, 0}; }), {"x", "cpu", "cuda"});
  expect_refused(refusal([](Args& a) { a.codes.data = x + 1008; }), {"codes", "x", "overlap"});
  expect_refused(refusal([](Args& a) { a.codes.data = scale; }), {"scale", "codes", "overlap"});
  EXPECT_FALSE(refusal([](Args& a) { a.codes.data = x + 1024; }).has_value());
  EXPECT_FALSE(refusal([](Args& a) { a.x.num_bytes = 1024; }).has_value());

  Args args = good;
  args.x.dtype = DType::f64;
  alignas(16) QuantizeStatus workspace;
  EXPECT_THROW(QuantizeLinearPlan::select({}, descriptor).run(nullptr, {&workspace, sizeof workspace}, args),
               Error);
  EXPECT_THROW(QuantizeLinearPlan::select({}, descriptor).run(nullptr, {&workspace, 47}, good), Error);

  // Strides.
  descriptor.strided = true;
  EXPECT_FALSE(refusal([](Args& a) { a.x.strides = {128, 2}, a.codes.strides = {1, 4}; }).has_value());
  EXPECT_FALSE(refusal([](Args& a) { a.x.strides = {0, 0}; }).has_value());
  expect_refused(refusal([](Args& a) { a.codes.strides = {0, 1}; }), {"codes", "place of its own", "[0, 1]"});
  expect_refused(refusal([](Args& a) { a.codes.strides = {3, 1}; }), {"codes", "place of its own", "[3, 1]"});
  expect_refused(refusal([](Args& a) { a.x.strides = {int64_t{1} << 62, 1}; }), {"x", "2^63 - 1"});
  expect_refused(refusal([](Args& a) {
                   a.x.strides = {128, 1}, a.x.num_bytes = 1024;
                 }),
                 {"x", "1792", "1024"});
  {
    LinearDescriptor far = LinearDescriptor::per_group({2, 1}, 1);
    far.strided = true;
    const TensorView one_each{y, DType::f32, {2, 1}, {}, {}};
    const TensorView apart{codes, DType::i8, {2, 1}, {std::numeric_limits<int64_t>::max(), 1}, {}};
    expect_refused(DequantizeLinearPlan::select({}, far).can_implement(
                       {apart, {scale, DType::f32, {2, 1}, {}, {}}, {}, one_each}),
                   {"codes", "2^63 - 1 bytes", "[9223372036854775807, 1]"});
  }
  descriptor.shape = {2, 2, 64};
  Args three = good;
  three.x.shape = three.codes.shape = {2, 2, 64};
  three.scale.shape = three.zero_point.shape = {2, 2, 2};
  three.x.strides = {512, 64, 1};
  expect_refused(QuantizeLinearPlan::select({}, descriptor).can_implement(three),
                 {"x", "before `axis`", "[512, 64, 1]"});
  descriptor = LinearDescriptor::per_group({4, 64}, 32);
  expect_refused(refusal([](Args&) {}), {"zero_point", "no data"});
  descriptor.zero_point_dtype = DType::i8;

  // Gradients may be made in place, and nothing else.
  using Gradient = QuantizeLinearBackward::Args;
  const TensorView dense{y, DType::f32, {4, 64}, {}, {}};
  const auto backward = QuantizeLinearBackwardPlan::select({}, descriptor);
  EXPECT_FALSE(
      backward.can_implement(Gradient{good.x, dense, good.scale, good.zero_point, dense}).has_value());
  expect_refused(backward.can_implement(Gradient{good.x, dense, good.scale, good.zero_point,
                                                 TensorView{x, DType::f32, {4, 64}, {}, {}}}),
                 {"quantize_linear_backward", "dx", "x", "overlap"});
  TensorView shifted = dense;
  shifted.data = y + 16;
  expect_refused(backward.can_implement(Gradient{good.x, dense, good.scale, good.zero_point, shifted}),
                 {"dx", "dy", "overlap"});
  const auto dequantize = DequantizeLinearPlan::select({}, descriptor);
  EXPECT_FALSE(dequantize.can_implement({good.codes, good.scale, good.zero_point, dense}).has_value());
  // A workspace is memory of the device, apart from all tensors.
  alignas(16) QuantizeStatus space;
  const DequantizeLinear::Args fine{good.codes, good.scale, good.zero_point, dense};
  EXPECT_NO_THROW(dequantize.run(nullptr, {&space, sizeof space}, fine));
  for (void* const bad : {static_cast<void*>(nullptr), static_cast<void*>(y), static_cast<void*>(codes),
                          static_cast<void*>(reinterpret_cast<std::byte*>(&space) + 4)})
    EXPECT_THROW(dequantize.run(nullptr, {bad, sizeof space}, fine), Error);
  EXPECT_THROW(static_cast<void>(dequantize.status(nullptr, {})), Error);
  TensorView over = dense;
  over.data = codes;
  expect_refused(dequantize.can_implement({good.codes, good.scale, good.zero_point, over}),
                 {"y", "codes", "overlap"});
}

// Codes of one byte lie anywhere, other tensors at multiples of their elements, whatever `alignment` says.
TEST(QuantizeLinear, AnyAddressOnTheCpu) {
  for (const DType dtype : testing::kFloatDTypes)
    for (const DType code_dtype : {DType::i8, DType::u8, DType::i4, DType::u4})
      for (const int64_t n : {7, 3000}) {
        LinearDescriptor d = LinearDescriptor::per_token({3, n});
        d.dtype = dtype;
        d.code_dtype = code_dtype;
        d.q_min = 0;
        d.q_max = 7;
        d.zero_point_dtype = code_dtype;
        d.computed = true;
        testing::LinearCase c;
        c.descriptor = d;
        const testing::Values x = testing::random_values(dtype, 3 * n, 5);
        std::array<std::vector<Bytes>, 3> results;
        for (const int64_t shift : {0, 1, 3}) {
          using testing::Storage;
          c.x = Storage(dtype, d.shape, x.bytes.data(), shift * size_of(dtype));
          c.codes = Storage(code_dtype, d.shape, shift);
          c.scale = Storage(DType::f32, d.scale_shape(), 4 * shift);
          c.zero_point = Storage(code_dtype, d.scale_shape(), shift);
          c.y = c.dy = c.x;
          for (const LinearOp op : {LinearOp::quantize, LinearOp::dequantize, LinearOp::backward}) {
            c.op = op;
            testing::run_on_cpu(c);
            for (Storage* const s : {&c.codes, &c.y})
              results[static_cast<size_t>(op)].emplace_back(s->data(), s->data() + s->num_bytes());
          }
        }
        for (const auto& result : results)
          for (size_t i = 2; i < result.size(); ++i) ASSERT_EQ(result[i], result[i % 2]);
      }
}

TEST(QuantizeLinear, CountsLevels) {
  LinearDescriptor d = LinearDescriptor::per_tensor({4});
  EXPECT_EQ(d.num_levels(), 256);
  d.q_min = -7, d.q_max = 7;
  EXPECT_EQ(d.num_levels(), 15);
}

TEST(QuantizeLinear, PlansSayWhatTheyAre) {
  LinearDescriptor descriptor = LinearDescriptor::per_token({4, 64});
  descriptor.dtype = DType::bf16;
  descriptor.zero_point_dtype = DType::i32;
  const auto plan = QuantizeLinearPlan::select({}, descriptor);
  EXPECT_EQ(plan.descriptor(), descriptor);
  EXPECT_EQ(plan.descriptor().group_size, 64);
  EXPECT_EQ(plan.device(), Device{});
  EXPECT_GT(plan.workspace_size(), 0);
  EXPECT_EQ(plan.sku().op, "quantize_linear");
  EXPECT_EQ(plan.sku().kernel, "quantize_linear_cpu");
  EXPECT_EQ(plan.sku().backend.rfind("cpu ", 0), 0u);
  EXPECT_EQ(plan.sku().dtypes, "bf16 -> i8, scale f32, zero point i32");
  EXPECT_EQ(plan.precision_guarantee().math, DType::f32);
  descriptor.dtype = DType::f64;
  EXPECT_EQ(QuantizeLinearPlan::select({}, descriptor).precision_guarantee().math, DType::f64);
}

}  // namespace
}  // namespace halfbyte
