// For the tests of `qgemm_grouped`: random products with the weights of experts, and what their results must
// be.
#pragma once

#include <map>

#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte::testing {

// Who gets which row.
enum class Routing {
  random,  // rows of no expert among them
  even,    // as many for each
  one,     // all rows to one expert
  skewed,  // half to the first, a quarter to the next
  none,    // no row to any
};
inline constexpr Routing kRoutings[] = {Routing::random, Routing::even, Routing::one, Routing::skewed,
                                        Routing::none};

inline std::string describe(const QgemmGroupedDescriptor& d, Routing routing) {
  return fmt::format("{}{} {}{} g{} {} x {}, m {} n {} k {}, {} top_k {}{}{}{}{}{}{}{}{}, routing {}",
                     d.variant.empty() ? "" : d.variant + ": ", to_string(d.dtype), short_text(d.spec),
                     d.spec.double_quant ? " double quantized" : "", d.spec.group_size,
                     to_string(d.spec.granularity), d.num_experts, d.m, d.n, d.k, to_string(d.rows), d.top_k,
                     d.transposed ? " transposed" : "", d.x_per_slot ? " x per slot" : "",
                     d.sum_slots ? " sum" : "", d.routing_weights ? " weights" : "",
                     d.routing_gradient ? " gradient" : "", d.bias ? " bias" : "", d.swiglu ? " swiglu" : "",
                     d.accumulate ? " accumulate" : "", static_cast<int>(routing));
}

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

// A product: its tensors in host memory.
struct GroupedCase {
  QgemmGroupedDescriptor descriptor;
  Routing routing;
  QgemmProblem problem;
  std::vector<QgemmCase> weights;  // of each expert, with one row of x
  Values x, bias, before, forward_x;
  std::vector<int32_t> offsets, slots;
  std::vector<float> routing_weights;
  std::vector<uint8_t> stack;

  GroupedCase(const QgemmGroupedDescriptor& d, uint64_t seed, Routing with,
              QgemmData data = QgemmData::random)
      : descriptor(d), routing(with), random_(seed), data_(data) {
    descriptor.variant.clear();
    problem = make_qgemm_problem({}, descriptor, 1);
    descriptor.variant = d.variant;
    for (int64_t e = 0; e < d.num_experts; ++e) {
      QgemmDescriptor one{.spec = d.spec, .m = 1, .n = d.n, .k = d.k, .transposed = d.transposed};
      one.dtype = d.dtype;
      weights.emplace_back(one, random_(), data);
      stack.insert(stack.end(), weights.back().packed.begin(), weights.back().packed.end());
    }
    x = values(problem.experts.rows_of_x * problem.in_cols());
    if (d.bias) bias = values(d.num_experts * d.n);
    if (d.accumulate) before = values(num_outputs());
    if (d.routing_gradient) forward_x = values(problem.m * d.k);
    make_routing();
  }

  int64_t num_outputs() const { return problem.m / problem.experts.slots_per_y * problem.y_cols(); }

  // The expert of each row; -1: none.
  std::vector<int64_t> expert_of_rows() const {
    std::vector<int64_t> experts(static_cast<size_t>(problem.m), -1);
    int64_t begin = 0;
    for (int64_t e = 0; e < descriptor.num_experts; ++e) {
      const int64_t stored = offsets[static_cast<size_t>(e)];
      if (descriptor.rows == ExpertRows::masked) begin = e * descriptor.m;
      const int64_t end = descriptor.rows == ExpertRows::masked
                              ? begin + std::clamp<int64_t>(stored, 0, descriptor.m)
                              : stored;
      for (; begin < end; ++begin)
        experts[static_cast<size_t>(slots.empty() ? begin : slots[static_cast<size_t>(begin)])] = e;
    }
    return experts;
  }

 private:
  Values values(int64_t n) { return random_values(descriptor.dtype, n, data_, random_); }
  int64_t random_expert(int64_t row) {
    const auto num = static_cast<uint64_t>(descriptor.num_experts);
    switch (routing) {
      case Routing::random:
        return random_() % 8 == 0 ? (random_() % 2 == 0 ? -1 : descriptor.num_experts + 3)
                                  : static_cast<int64_t>(random_() % num);
      case Routing::even:
        return row % descriptor.num_experts;
      case Routing::one:
        return descriptor.num_experts / 2;
      case Routing::skewed:
        return static_cast<int64_t>(static_cast<uint64_t>(std::countr_zero(random_() | 1ull << 40)) % num);
      default:
        return -1;
    }
  }
  void make_routing() {
    const auto num = static_cast<size_t>(descriptor.num_experts);
    std::vector<std::vector<int32_t>> of(num + 1);  // the last: of none
    const int64_t rows = descriptor.rows == ExpertRows::masked ? descriptor.m : problem.m;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t expert = random_expert(row);
      of[expert < 0 || expert >= descriptor.num_experts ? num : static_cast<size_t>(expert)].push_back(
          static_cast<int32_t>(row));
    }
    if (descriptor.rows == ExpertRows::masked) {
      for (size_t e = 0; e < num; ++e)
        offsets.push_back(random_() % 8 == 0   ? -7
                          : random_() % 8 == 0 ? static_cast<int32_t>(descriptor.m) + 5
                                               : static_cast<int32_t>(of[e].size()));
      return;
    }
    for (size_t e = 0; e <= num; ++e) {
      slots.insert(slots.end(), of[e].begin(), of[e].end());
      if (e < num) offsets.push_back(static_cast<int32_t>(slots.size()));
    }
    if (descriptor.rows == ExpertRows::offsets) slots.clear();
    for (int64_t i = 0; descriptor.routing_weights && i < problem.m; ++i)
      routing_weights.push_back(data_ == QgemmData::integers
                                    ? std::ldexp(1.0f, static_cast<int>(random_() % 3) - 1)
                                    : std::uniform_real_distribution<float>(0.0f, 1.0f)(random_));
  }

  std::mt19937_64 random_;
  QgemmData data_;
};

// Where the tensors of a case lie.
struct GroupedTensors {
  const void *x = nullptr, *weight = nullptr, *bias = nullptr, *forward_x = nullptr;
  const void *offsets = nullptr, *slots = nullptr, *routing_weights = nullptr;
  void *routing_grad = nullptr, *y = nullptr;
};
inline QgemmGrouped::Args grouped_args(const GroupedCase& test, const GroupedTensors& t, Device device) {
  const QgemmGroupedDescriptor& d = test.descriptor;
  const QgemmProblem& p = test.problem;
  const auto view = [&](const void* data, DType dtype, std::vector<int64_t> shape) {
    return TensorView{const_cast<void*>(data), dtype, std::move(shape), {}, device};
  };
  const auto rows = [&](const void* data, int64_t n, int64_t cols) {
    if (d.rows == ExpertRows::masked) return view(data, d.dtype, {d.num_experts, d.m, cols});
    return view(data, d.dtype, {n, cols});
  };
  QgemmGrouped::Args args;
  args.x = rows(t.x, p.experts.rows_of_x, p.in_cols());
  args.weight = {d.spec, d.n, d.k, const_cast<void*>(t.weight), device};
  args.weight.num_bytes = static_cast<int64_t>(test.stack.size());
  args.offsets = view(t.offsets, DType::i32, {d.num_experts});
  if (d.rows == ExpertRows::indices) args.slots = view(t.slots, DType::i32, {p.m});
  if (d.routing_weights) args.routing_weights = view(t.routing_weights, DType::f32, {d.m, d.top_k});
  if (d.bias) args.bias = view(t.bias, d.dtype, {d.num_experts, d.n});
  if (d.routing_gradient) {
    args.forward_x = view(t.forward_x, d.dtype, {p.m, d.k});
    args.routing_grad = view(t.routing_grad, DType::f32, {d.m, d.top_k});
  }
  args.y = rows(t.y, p.m / p.experts.slots_per_y, p.y_cols());
  return args;
}

// ---- What must come out

struct GroupedReference {
  std::vector<double> y, bound, grad, grad_bound;
  std::vector<bool> is_written;  // of rows of y
};
// rounding_of(rows): of a product with one weight, of so many rows of `all`, those of the expert.
template <class RoundingOf>
GroupedReference grouped_ref(const GroupedCase& test, const RoundingOf& rounding_of) {
  const QgemmGroupedDescriptor& d = test.descriptor;
  const QgemmProblem& p = test.problem;
  const int64_t in = p.in_cols(), out = p.out_cols();
  const std::vector<int64_t> expert_of = test.expert_of_rows();
  std::vector<double> product(static_cast<size_t>(p.m * out), 0), error(product.size(), 0);
  for (int64_t e = 0; e < d.num_experts; ++e) {
    // In the order of the list.
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < p.m; ++i) {
      const int64_t row = test.slots.empty() ? i : test.slots[static_cast<size_t>(i)];
      if (expert_of[static_cast<size_t>(row)] == e) rows.push_back(row);
    }
    std::map<WeightRounding, std::vector<int64_t>> rounded;
    for (size_t at = 0; at < rows.size(); ++at) rounded[rounding_of(at, rows.size())].push_back(rows[at]);
    for (const auto& [rounding, some] : rounded) {
      QgemmCase one = test.weights[static_cast<size_t>(e)];
      one.problem.m = std::ssize(some);
      one.x.bytes.clear();
      for (const int64_t row : some) {
        const auto begin = test.x.bytes.begin() + row / p.experts.slots_per_x * in * size_of(d.dtype);
        one.x.bytes.insert(one.x.bytes.end(), begin, begin + in * size_of(d.dtype));
      }
      const QgemmReference of_rows = qgemm_ref(one.problem, one.tensors(), rounding);
      for (size_t at = 0; at < some.size(); ++at)
        for (int64_t col = 0; col < out; ++col) {
          const auto to = static_cast<size_t>(some[at] * out + col),
                     from = at * static_cast<size_t>(out) + static_cast<size_t>(col);
          product[to] = of_rows.y[from];
          error[to] = of_rows.error[from];
        }
    }
  }
  GroupedReference result;
  const int64_t slots = p.experts.slots_per_y;
  const auto load = [&](const Values& from, int64_t i) { return from.exact[static_cast<size_t>(i)]; };
  for (int64_t row = 0; row < p.m / slots; ++row) {
    result.is_written.push_back(d.rows != ExpertRows::masked || expert_of[static_cast<size_t>(row)] >= 0);
    for (int64_t col = 0; col < p.y_cols(); ++col) {
      double sum = 0, bound = 0, magnitude = 0;
      for (int64_t slot = row * slots; slot < (row + 1) * slots; ++slot) {
        const int64_t e = expert_of[static_cast<size_t>(slot)];
        const double weight =
            d.routing_weights ? static_cast<double>(test.routing_weights[static_cast<size_t>(slot)]) : 1;
        struct Term {
          double value, error, magnitude;
        };
        const auto term = [&](int64_t of_col) -> Term {
          const auto at = static_cast<size_t>(slot * out + of_col);
          const double bias = d.bias && e >= 0 ? load(test.bias, e * out + of_col) : 0;
          const double size = std::fabs(product[at]) + std::fabs(bias);
          return {product[at] + bias, error[at] + 0x1p-24 * size, size};
        };
        Term of_slot = term(col);
        if (d.swiglu) {
          const auto [gate, gate_error, gate_size] = of_slot;
          const auto [up, up_error, up_size] = term(p.y_cols() + col);
          const double silu = gate / (1 + std::exp(-gate));
          // The slope of silu is at most 1.1.
          of_slot = {silu * up, 1.1 * gate_error * (std::fabs(up) + up_error) + std::fabs(silu) * up_error,
                     8 * std::fabs(silu * up)};
        }
        sum += weight * of_slot.value;
        bound += std::fabs(weight) * of_slot.error;
        magnitude += std::fabs(weight) * of_slot.magnitude;
      }
      const double before = d.accumulate ? load(test.before, row * p.y_cols() + col) : 0;
      sum += before;
      magnitude += std::fabs(before);
      bound += static_cast<double>(slots + 3) * 0x1p-23 * magnitude;
      result.y.push_back(sum);
      result.bound.push_back(bound + half_ulp(std::fabs(sum) + bound, d.dtype));
    }
  }
  for (int64_t slot = 0; d.routing_gradient && slot < p.m; ++slot) {
    double sum = 0, bound = 0, magnitude = 0;
    for (int64_t col = 0; col < out; ++col) {
      const auto at = static_cast<size_t>(slot * out + col);
      const double factor = load(test.forward_x, slot * out + col);
      sum += product[at] * factor;
      bound += error[at] * std::fabs(factor);
      magnitude += std::fabs(product[at] * factor);
    }
    result.grad.push_back(sum);
    result.grad_bound.push_back(bound + static_cast<double>(out + 2) * 0x1p-23 * magnitude + 0x1p-126);
  }
  return result;
}

// y and routing_grad as they lie in memory, y as it was before where rows are not written.
inline ::testing::AssertionResult near_grouped(const GroupedCase& test, const std::vector<uint8_t>& y,
                                               const std::vector<uint8_t>& before,
                                               const std::vector<uint8_t>& grad,
                                               const GroupedReference& expected,
                                               QgemmData data = QgemmData::random) {
  const DType dtype = test.descriptor.dtype;
  const int64_t out = test.problem.y_cols();
  std::vector<uint8_t> exact(8);
  const auto text = describe(test.descriptor, test.routing);
  for (int64_t i = 0; i < static_cast<int64_t>(expected.y.size()); ++i) {
    const auto at = static_cast<size_t>(i);
    const auto actual = load_element<double>(y.data(), i, dtype);
    if (!expected.is_written[static_cast<size_t>(i / out)]) {
      const auto size = static_cast<size_t>(size_of(dtype));
      if (std::memcmp(y.data() + at * size, before.data() + at * size, size) == 0) continue;
      return ::testing::AssertionFailure() << text << fmt::format(": [{}, {}] was written", i / out, i % out);
    }
    bool good = std::fabs(actual - expected.y[at]) <= expected.bound[at];
    if (data == QgemmData::integers) {
      store_element(exact.data(), 0, expected.y[at], dtype);
      good = load_element<double>(exact.data(), 0, dtype) == actual;
    }
    if (!good)
      return ::testing::AssertionFailure()
             << text
             << fmt::format(": [{}, {}] is {}, expected {} within {}", i / out, i % out, actual,
                            expected.y[at], data == QgemmData::integers ? 0 : expected.bound[at]);
  }
  for (size_t i = 0; i < expected.grad.size(); ++i) {
    const auto actual = load_element<double>(grad.data(), static_cast<int64_t>(i), DType::f32);
    const double bound = data == QgemmData::integers ? 0 : expected.grad_bound[i];
    if (!(std::fabs(actual - expected.grad[i]) <= bound))
      return ::testing::AssertionFailure()
             << text
             << fmt::format(": gradient {} is {}, expected {} within {}", i, actual, expected.grad[i], bound);
  }
  return ::testing::AssertionSuccess();
}

// ---- Descriptions at random

inline QgemmGroupedDescriptor random_grouped(std::mt19937_64& random, const QuantSpec& format, int64_t most_m,
                                             QgemmData data = QgemmData::random) {
  const auto flip = [&] { return random() % 2 == 0; };
  QgemmDescriptor one = random_qgemm(random, format, true);
  set_random_extents(random, one);
  QgemmGroupedDescriptor d{.spec = one.spec, .n = one.n, .k = one.k, .transposed = one.transposed};
  constexpr int64_t kExperts[] = {1, 2, 3, 5, 8, 31, 33, 64};
  constexpr int64_t kRows[] = {1, 2, 3, 7, 16, 17, 40, 64, 129, 300};
  constexpr ExpertRows kKinds[] = {ExpertRows::offsets, ExpertRows::indices, ExpertRows::indices,
                                   ExpertRows::masked};
  d.num_experts = pick(random, kExperts);
  d.m = std::min(most_m, pick(random, kRows));
  d.dtype = one.dtype;
  d.rows = pick(random, kKinds);
  d.bias = !d.transposed && flip();
  d.accumulate = flip();
  d.swiglu = !d.transposed && data == QgemmData::random && d.n % 2 == 0 && random() % 3 == 0;
  if (random() % 3 == 0) d.alignment = size_of(d.dtype);
  if (d.rows == ExpertRows::masked) d.m = std::min<int64_t>(d.m, 1 + 200 / d.num_experts);
  if (d.rows != ExpertRows::indices) return d;
  d.top_k = 1 + static_cast<int64_t>(random() % 8);
  d.m = std::max<int64_t>(1, d.m / d.top_k);
  d.x_per_slot = flip();
  d.sum_slots = flip();
  d.routing_weights = flip();
  d.routing_gradient = d.transposed && flip();
  return d;
}

}  // namespace halfbyte::testing
