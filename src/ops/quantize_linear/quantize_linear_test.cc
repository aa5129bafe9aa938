#include <functional>

#include "ops/quantize_linear/quantize_linear_ref.h"
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
  static int64_t storage(const LinearCodes& codes, int64_t n) {
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

void expect_equal(const QuantizeStatus& a, const QuantizeStatus& b) {
  EXPECT_EQ(a.num_nonfinite, b.num_nonfinite);
  EXPECT_EQ(a.first_nonfinite, b.first_nonfinite);
  EXPECT_EQ(a.num_unheld_scales, b.num_unheld_scales);
  EXPECT_EQ(a.num_coarse_scales, b.num_coarse_scales);
  EXPECT_EQ(a.num_invalid_scales, b.num_invalid_scales);
  EXPECT_EQ(a.num_invalid_zero_points, b.num_invalid_zero_points);
}

std::string first_difference(const Bytes& a, const Bytes& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i])
      return fmt::format("byte {} of {}: {:02x} instead of {:02x}", static_cast<int64_t>(i) - kGuard,
                         a.size() - 2 * kGuard, b[i], a[i]);
  return "";
}

// 25,000 problems on four targets: whole buffers compared, guards and gaps with them.
TEST(QuantizeLinear, RandomProblemsEqualTheReferenceOnEveryTarget) {
  const int cases = testing::kSanitized ? 2000 : 25000;
  testing::for_each_target([&](const char*) {
    if (::testing::Test::HasFailure()) return;
    CaseMaker maker(17);
    Case expected, actual;
    for (int i = 0; i < cases; ++i) {
      const Case c = maker.make();
      const QuantizeStatus want = c.run(expected, linear_ref::run), got = c.run(actual, quantize_linear_cpu);
      expect_equal(want, got);
      EXPECT_EQ(first_difference(expected.codes, actual.codes), "") << "codes";
      EXPECT_EQ(first_difference(expected.scale, actual.scale), "") << "scale";
      EXPECT_EQ(first_difference(expected.zero, actual.zero), "") << "zero";
      EXPECT_EQ(first_difference(expected.y, actual.y), "") << "y";
      if (::testing::Test::HasFailure())
        for (int k = 0; k < 6; ++k)
          fmt::print("x {} scale {} codes {} {}\n",
                     linear_ref::load_element<float>(c.x.data() + kGuard, c.problem.dtype, k),
                     formats::load_scale<float>(c.scale.data() + kGuard, k, c.problem.codec.scale_type),
                     expected.codes[kGuard + k], actual.codes[kGuard + k]);
      if (::testing::Test::HasFailure()) FAIL() << "case " << i << ": " << describe(c.problem);
    }
  });
}

}  // namespace
}  // namespace halfbyte
