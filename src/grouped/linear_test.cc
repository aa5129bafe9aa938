// Zero points from all of i32, in every op that takes them, against the formulas in 64 bits.
#include <cmath>

#include "grouped/testing.h"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/quantize_linear.hpp"

namespace halfbyte {
namespace {

using testing::Values;

// x, dy, scale and zero points of a problem, and what the formulas make of them. F is what is computed in.
template <class F>
struct ZeroPointCase {
  LinearDescriptor d;
  Values x, dy, scale;
  std::vector<int32_t> zero_point;
  std::vector<size_t> group;  // of each element, row-major
  std::vector<int64_t> codes, given_codes;
  Values y, decoded, dx, dscale;
  std::vector<bool> passes;

  void compute() {
    std::vector<std::vector<F>> terms(zero_point.size());
    for (Values* values : {&y, &decoded, &dx}) values->dtype = d.dtype;
    for (size_t i = 0; i < group.size(); ++i) {
      const auto v = static_cast<F>(x.exact[i]), s = static_cast<F>(scale.exact[group[i]]),
                 g = static_cast<F>(dy.exact[i]);
      const int64_t z = zero_point[group[i]];
      const bool is_nan = std::isnan(v);
      const F quotient = s == 0 || is_nan ? 0 : v / s, rounded = std::nearbyint(quotient);
      const auto position = static_cast<int64_t>(std::clamp(rounded, F{-1e15f}, F{1e15f})) + z;
      const int64_t q = std::clamp<int64_t>(position, d.q_min, d.q_max);
      codes.push_back(q);
      y.push_back(is_nan ? x.exact[i] : static_cast<double>(static_cast<F>(q - z) * s));
      decoded.push_back(static_cast<double>(static_cast<F>(given_codes[i] - z) * s));
      passes.push_back(!is_nan && (s == 0 || q == position));
      dx.push_back(passes[i] ? dy.exact[i] : 0);
      F term = g * (passes[i] ? rounded - quotient : static_cast<F>(q - z));
      if (s == 0 || is_nan) term = 0;
      terms[group[i]].push_back(term);
    }
    dscale.dtype = d.dtype == DType::f64 ? DType::f64 : DType::f32;
    for (const std::vector<F>& t : terms) dscale.push_back(static_cast<double>(sum(t, 0, 1024) + 0));
  }
  static F sum(const std::vector<F>& terms, size_t begin, size_t size) {
    if (size == 1) return terms[begin];
    const size_t half = size / 2;
    const F first = sum(terms, begin, half);
    return begin + half < terms.size() ? first + sum(terms, begin + half, half) : first;
  }
};

class ZeroPointCases : testing::RandomCases {
 public:
  explicit ZeroPointCases(uint64_t seed) : RandomCases(seed) {}

  template <class F>
  ZeroPointCase<F> next(DType dtype) {
    ZeroPointCase<F> c;
    LinearDescriptor& d = c.d;
    const int64_t rows = 1 + below(5), cols = 1 + below(below(4) ? 40 : 200);
    const int64_t axis = below(2);
    d = random_() % 3 == 0   ? LinearDescriptor::per_tensor({rows, cols})
        : random_() % 2 == 0 ? LinearDescriptor::per_channel({rows, cols}, static_cast<int>(axis))
                             : LinearDescriptor::per_group({rows, cols}, pick<int64_t>({2, 4, 16, 33}),
                                                           static_cast<int>(axis));
    d.dtype = dtype;
    d.scale_dtype = below(2) ? dtype : DType::f32;
    d.code_dtype = pick({DType::i8, DType::u8});
    const int lowest = d.code_dtype == DType::i8 ? -128 : 0;
    d.q_min = lowest + static_cast<int>(below(2) ? 0 : below(253));
    d.q_max = below(2) ? lowest + 255 : d.q_min + 2 + static_cast<int>(below(lowest + 254 - d.q_min));
    d.zero_point_dtype = DType::i32;
    d.alignment = size_of(dtype);

    int64_t num_groups = 1;
    for (const int64_t extent : d.scale_shape()) num_groups *= extent;
    c.scale.dtype = d.scale_dtype;
    const bool near = below(2);  // all of them
    for (int64_t i = 0; i < num_groups; ++i) {
      c.scale.push_back(below(12) == 0 ? 0 : scale(false));
      c.zero_point.push_back(zero_point(d, near));
    }
    c.x.dtype = c.dy.dtype = dtype;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < cols; ++k) {
        const int64_t along = axis == 0 ? r : k;
        const int64_t group = d.granularity == Granularity::tensor    ? 0
                              : d.granularity == Granularity::channel ? along
                              : axis == 0                             ? r / d.group_size * cols + k
                                          : r * d.scale_shape()[1] + k / d.group_size;
        const auto g = static_cast<size_t>(group);
        c.group.push_back(g);
        const double place = static_cast<double>(d.q_min - 3 + below(d.q_max - d.q_min + 7)) -
                             static_cast<double>(c.zero_point[g]);
        const double near_place =
            (place + pick<double>({0, 0.5, static_cast<double>(below(64)) / 64})) * c.scale.exact[g];
        c.x.push_back(below(8)
                          ? near_place
                          : pick<double>({NAN, INFINITY, -INFINITY, 0, 1e30, near_place * 2, -near_place}));
        c.dy.push_back(static_cast<double>(below(200)) / 64 - 1);
        c.given_codes.push_back(lowest + below(256));
      }
    c.compute();
    return c;
  }

 private:
  int32_t zero_point(const LinearDescriptor& d, bool near) {
    constexpr int64_t kLeast = std::numeric_limits<int32_t>::min(),
                      kMost = std::numeric_limits<int32_t>::max();
    const int64_t power = int64_t{1} << below(near ? 20 : 32);
    const int64_t any = pick<int64_t>(
        {d.q_min + below(d.q_max - d.q_min + 1), power + below(600) - 300, -power + below(600) - 300,
         (int64_t{1} << 20) + below(2), near ? d.q_max + 1 : static_cast<int32_t>(random_()),
         near ? d.q_min - 1 : kLeast + below(300), near ? d.q_max + 128 : kMost - below(300)});
    return static_cast<int32_t>(std::clamp(any, kLeast, kMost));
  }
};

template <class T>
TensorView view_of(std::vector<T>& values, DType dtype, const std::vector<int64_t>& shape) {
  return {values.data(), dtype, shape, {}, {}};
}
// Memory for as many values.
Values room_for(const Values& values) {
  Values result = values;
  std::ranges::fill(result.bytes, uint8_t{0xA5});
  return result;
}

template <class Op>
void run(const typename Op::Descriptor& d, const typename Op::Args& args) {
  alignas(16) QuantizeStatus workspace;
  const auto plan = Plan<Op>::select({}, d);
  plan.run(nullptr, {&workspace, sizeof workspace}, args);
  QuantizeStatus status = plan.status(nullptr, {&workspace, sizeof workspace});
  status.num_nonfinite = 0;
  EXPECT_TRUE(status.ok()) << testing::text_of(status);
}

template <class F>
void check(ZeroPointCase<F> c) {
  const LinearDescriptor& d = c.d;
  const std::vector<int64_t>&shape = d.shape, groups = d.scale_shape();
  const TensorView x = c.x.view(shape), dy = c.dy.view(shape), scale = c.scale.view(groups),
                   zero = view_of(c.zero_point, DType::i32, groups);
  std::vector<uint8_t> codes(c.codes.size()), want(c.codes.begin(), c.codes.end()),
      given(c.given_codes.begin(), c.given_codes.end());
  const TensorView code_view = view_of(codes, d.code_dtype, shape);
  run<QuantizeLinear>(d, {x, code_view, scale, zero});
  EXPECT_EQ(codes, want);
  Values y = room_for(c.y), dx = room_for(c.dx), dscale = room_for(c.dscale);
  run<DequantizeLinear>(d, {view_of(given, d.code_dtype, shape), scale, zero, y.view(shape)});
  EXPECT_EQ(y.bytes, c.decoded.bytes);
  run<QuantizeLinearBackward>(d, {x, dy, scale, zero, dx.view(shape)});
  EXPECT_EQ(dx.bytes, c.dx.bytes);

  FakeQuantizeDescriptor f;
  f.shape = shape;
  f.granularity = d.granularity;
  f.axis = d.axis;
  f.group_size = d.group_size;
  f.q_min = d.q_min;
  f.q_max = d.q_max;
  f.dtype = d.dtype;
  f.scale_dtype = d.scale_dtype;
  f.zero_point_dtype = DType::i32;
  f.alignment = d.alignment;
  y = room_for(c.y);
  run<FakeQuantize>(f, {x, y.view(shape), scale, zero, {}, {}, {}, {}});
  EXPECT_EQ(y.bytes, c.y.bytes);
  for (const bool learned : {false, true}) {
    dx = room_for(c.dx);
    if (learned)
      run<FakeQuantizeLearnedBackward>(f, {x, dy, scale, zero, dx.view(shape), dscale.view(groups), {}});
    else
      run<FakeQuantizeBackward>(f, {x, {}, dy, scale, zero, dx.view(shape)});
    EXPECT_EQ(dx.bytes, c.dx.bytes);
  }
  EXPECT_EQ(dscale.bytes, c.dscale.bytes);
  f.mask = true;
  std::vector<uint8_t> mask(static_cast<size_t>(f.mask_shape()[0] * f.mask_shape()[1])), bits(mask.size());
  for (size_t i = 0; i < c.passes.size(); ++i) {
    const size_t cols = static_cast<size_t>(shape[1]), row_bytes = static_cast<size_t>(f.mask_shape()[1]);
    if (c.passes[i]) bits[i / cols * row_bytes + i % cols / 8] |= static_cast<uint8_t>(1 << (i % cols % 8));
  }
  y = room_for(c.y);
  run<FakeQuantize>(f, {x, y.view(shape), scale, zero, view_of(mask, DType::u8, f.mask_shape()), {}, {}, {}});
  EXPECT_EQ(y.bytes, c.y.bytes);
  EXPECT_EQ(mask, bits);
}

TEST(Linear, AnyZeroPointIsExactOnEveryTarget) {
  const int cases = testing::kSanitized ? 200 : 2000;
  uint64_t seed = 1;
  testing::for_each_target([&](const char*) {
    ZeroPointCases maker(seed++);
    for (int i = 0; i < cases && !::testing::Test::HasFailure(); ++i) {
      const DType dtype = testing::kFloatDTypes[i % 4];
      if (dtype == DType::f64)
        check(maker.next<double>(dtype));
      else
        check(maker.next<float>(dtype));
      if (::testing::Test::HasFailure()) ADD_FAILURE() << "case " << i << " of " << to_string(dtype);
    }
  });
}

}  // namespace
}  // namespace halfbyte
