// Products with the weights of experts on the CPU, against the reference.
#include "ops/qgemm/qgemm_grouped_testing.h"

namespace halfbyte {
namespace {

using testing::bytes_of;
using testing::GroupedCase;
using testing::GroupedTensors;
using testing::GuardedMemory;
using testing::QgemmData;
using testing::Routing;

struct Results {
  std::vector<uint8_t> y, before, grad;
};

Results run_on_cpu(const GroupedCase& test, int threads) {
  const QgemmGroupedDescriptor& d = test.descriptor;
  const auto plan = QgemmGroupedPlan::select({}, d, {threads});
  GuardedMemory x(test.x.bytes, d.alignment), weight(test.stack, 64), bias(test.bias.bytes, d.alignment);
  GuardedMemory forward_x(test.forward_x.bytes, d.alignment), offsets(bytes_of(test.offsets), 4);
  GuardedMemory slots(bytes_of(test.slots), 4), routing_weights(bytes_of(test.routing_weights), 4);
  GuardedMemory y(test.num_outputs() * size_of(d.dtype), d.alignment);
  GuardedMemory grad(d.routing_gradient ? test.problem.m * 4 : 0, 4);
  GuardedMemory workspace(plan.workspace_size(), 16);
  std::copy(test.before.bytes.begin(), test.before.bytes.end(), y.data());
  Results results;
  results.before = y.content();
  plan.run(nullptr, {workspace.data(), plan.workspace_size()},
           testing::grouped_args(test,
                                 {x.data(), weight.data(), bias.data(), forward_x.data(), offsets.data(),
                                  slots.data(), routing_weights.data(), grad.data(), y.data()},
                                 {}));
  EXPECT_TRUE(x.content() == test.x.bytes && weight.content() == test.stack &&
              offsets.content() == bytes_of(test.offsets) && slots.content() == bytes_of(test.slots));
  for (GuardedMemory* memory : {&y, &grad, &workspace}) EXPECT_TRUE(memory->is_guarded());
  results.y = y.content();
  results.grad = grad.content();
  return results;
}

// Of a product with one weight, by the variant of the test, of the rows that are multiplied together.
WeightRounding rounding_on_cpu(const GroupedCase& test, size_t row, size_t rows) {
  constexpr size_t kMostRows = 512;
  const QgemmGroupedDescriptor& d = test.descriptor;
  const auto m = static_cast<int64_t>(std::min(rows - row / kMostRows * kMostRows, kMostRows));
  QgemmDescriptor one{.spec = d.spec, .m = m, .n = d.n, .k = d.k, .transposed = d.transposed};
  one.dtype = d.dtype;
  one.variant = d.variant;
  return QgemmPlan::select({}, one, {1}).precision_guarantee().weight_rounding;
}

void check(const QgemmGroupedDescriptor& descriptor, uint64_t seed, Routing routing,
           QgemmData data = QgemmData::random) {
  GroupedCase test(descriptor, seed, routing, data);
  const testing::GroupedReference expected =
      testing::grouped_ref(test, [&](size_t row, size_t rows) { return rounding_on_cpu(test, row, rows); });
  const Results results = run_on_cpu(test, 1);
  EXPECT_TRUE(testing::near_grouped(test, results.y, results.before, results.grad, expected, data));
  const Results again = run_on_cpu(test, 3);
  EXPECT_TRUE(results.y == again.y && results.grad == again.grad) << testing::describe(descriptor, routing);
}

class QgemmGroupedCpu : public ::testing::TestWithParam<size_t> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam()]; }
};

TEST_P(QgemmGroupedCpu, IsNearTheReference) {
  std::mt19937_64 random(GetParam());
  for (int i = 0; i < (testing::kSanitized ? 4 : 24); ++i) {
    const QgemmGroupedDescriptor d = testing::random_grouped(random, format(), 300);
    check(d, random(), testing::pick(random, testing::kRoutings));
  }
}

// Integers times powers of two: sums are exact, and so is what is made of them but for one rounding.
TEST_P(QgemmGroupedCpu, IntegersAreExact) {
  if (format().format == Format::nf4 || format().format == Format::fp4) return;  // their values are not short
  std::mt19937_64 random(GetParam() + 100);
  for (int i = 0; i < (testing::kSanitized ? 3 : 12); ++i) {
    const QgemmGroupedDescriptor d = testing::random_grouped(random, format(), 40, QgemmData::integers);
    check(d, random(), testing::pick(random, testing::kRoutings), QgemmData::integers);
  }
}

INSTANTIATE_TEST_SUITE_P(, QgemmGroupedCpu, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

QgemmGroupedDescriptor small(ExpertRows rows = ExpertRows::indices) {
  QgemmGroupedDescriptor d{.num_experts = 6, .m = 10, .n = 70, .k = 128, .rows = rows};
  if (rows == ExpertRows::indices) d.top_k = 3;
  return d;
}

// Every variant of the CPU that there is, on every SIMD target.
TEST(QgemmGrouped, EveryVariant) {
  for (const bool transposed : {false, true})
    for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked}) {
      QgemmGroupedDescriptor d = small(rows);
      d.transposed = transposed;
      d.m = 40;
      testing::for_each_target([&](const char*) {
        for (const QgemmChoice& choice : explain_qgemm_grouped({}, d)) {
          if (!choice.reason.empty()) continue;
          QgemmGroupedDescriptor named = d;
          named.variant = choice.variant;
          check(named, 7, Routing::skewed);
        }
      });
    }
}

// More rows than are multiplied at a time, and every number of rows around those that kernels are made for.
TEST(QgemmGrouped, NumbersOfRows) {
  std::vector<int64_t> numbers = {511, 512, 513, 600, 1025};
  for (int64_t m = 1; m < 90; ++m) numbers.push_back(m);
  if (testing::kSanitized) numbers = {1, 17, 70};
  for (const int64_t m : numbers) {
    QgemmGroupedDescriptor d = small(ExpertRows::offsets);
    d.m = m;
    d.n = 33;
    d.k = 64;
    check(d, static_cast<uint64_t>(m), Routing::one);
  }
}

TEST(QgemmGrouped, EmptyExtents) {
  for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked}) {
    const auto with = [&](auto change) {
      QgemmGroupedDescriptor d = small(rows);
      d.bias = true;
      change(d);
      check(d, 3, Routing::even);
    };
    with([](auto& d) { d.m = 0; });
    with([](auto& d) { d.n = 0; });
    with([](auto& d) { d.k = 0; });
  }
}

// Whatever routing says, nothing else is touched: guards around the tensors see it.
TEST(QgemmGrouped, RoutingOfAnyContent) {
#ifdef __SANITIZE_THREAD__  // a slot that comes twice is a race for its row of y, which either thread may win
  constexpr int kMostThreads = 1;
#else
  constexpr int kMostThreads = 2;
#endif
  std::mt19937_64 random(5);
  for (int i = 0; i < 200; ++i) {
    GroupedCase test(small(i % 3 == 0 ? ExpertRows::offsets : ExpertRows::indices), 1, Routing::random);
    const auto anything = [&]() -> int32_t {
      const auto bits = static_cast<int32_t>(random());
      return random() % 2 == 0 ? bits : bits % 40;
    };
    for (int32_t& offset : test.offsets) offset = anything();
    for (int32_t& slot : test.slots) slot = anything();
    run_on_cpu(test, 1 + i % kMostThreads);
  }
}

TEST(QgemmGrouped, Descriptors) {
  const auto error = [](auto change) -> std::string {
    QgemmGroupedDescriptor d = small();
    change(d);
    try {
      check_descriptor(d);
    } catch (const Error& caught) {
      EXPECT_EQ(caught.code(), ErrorCode::usage);
      return caught.what();
    }
    return "";
  };
  using D = QgemmGroupedDescriptor;
  EXPECT_EQ(error([](D&) {}), "");
  EXPECT_EQ(error([](D& d) { d.num_experts = 0; }),
            "qgemm_grouped descriptor: num_experts must be 1 to 2^20, got 0");
  EXPECT_EQ(error([](D& d) { d.top_k = 0; }), "qgemm_grouped descriptor: top_k must be 1 to 2^31 - 1, got 0");
  EXPECT_EQ(error([](D& d) { d.m = int64_t{1} << 30; }),
            "qgemm_grouped descriptor: m times top_k must be at most 2^31 - 1 rows, got 1073741824 times 3");
  EXPECT_EQ(error([](D& d) { d.rows = ExpertRows::masked; }),
            "qgemm_grouped descriptor: top_k above 1 needs rows indices, got masked");
  EXPECT_EQ(error([](D& d) {
              d.rows = ExpertRows::offsets;
              d.top_k = 1;
              d.sum_slots = true;
            }),
            "qgemm_grouped descriptor: sum_slots needs rows indices, got offsets");
  EXPECT_EQ(
      error([](D& d) { d.routing_gradient = true; }),
      "qgemm_grouped descriptor: routing_gradient needs transposed and k of at least 1, got false and 128");
  EXPECT_NE(error([](D& d) { d.dtype = DType::f64; }), "");
  EXPECT_NE(error([](D& d) {
              d.n = d.k = int64_t{1} << 29;
              d.num_experts = 1 << 20;
            }),
            "");
}

TEST(QgemmGrouped, Arguments) {
  GroupedCase test(small(), 1, Routing::even);
  const auto plan = QgemmGroupedPlan::select({}, test.descriptor);
  GuardedMemory weight(test.stack, 64), y(test.num_outputs() * 2, 16), x(test.x.bytes, 16);
  const auto error = [&](auto change) -> std::string {
    QgemmGrouped::Args args =
        testing::grouped_args(test,
                              {x.data(), weight.data(), nullptr, nullptr, test.offsets.data(),
                               test.slots.data(), nullptr, nullptr, y.data()},
                              {});
    change(args);
    const auto found = plan.can_implement(args);
    return found ? found->what() : "";
  };
  using A = QgemmGrouped::Args;
  EXPECT_EQ(error([](A&) {}), "");
  EXPECT_NE(error([](A& a) { a.weight.rows = 71; }).find("weight.rows must be 70"), std::string::npos);
  EXPECT_NE(error([](A& a) { a.weight.num_bytes -= 1; }).find("weight"), std::string::npos);
  EXPECT_NE(error([](A& a) { a.slots.shape = {29}; }).find("slots"), std::string::npos);
  EXPECT_NE(error([](A& a) { a.offsets.dtype = DType::i64; }).find("offsets"), std::string::npos);
  EXPECT_NE(error([](A& a) { a.bias = a.x; }).find("descriptor.bias is false"), std::string::npos);
}

TEST(PackedExperts, AreOneBehindTheOther) {
  const QuantSpec spec;
  const PackedExperts experts(spec, 3, 70, 128);
  const int64_t num_bytes = packed_weight_bytes(spec, 70, 128);
  EXPECT_EQ(experts.stack().num_bytes, 3 * num_bytes);
  EXPECT_EQ(static_cast<std::byte*>(experts.view(2).data) - static_cast<std::byte*>(experts.stack().data),
            2 * num_bytes);
  EXPECT_EQ(experts.view(2).num_bytes, num_bytes);
  EXPECT_THROW(experts.view(3), Error);
  EXPECT_THROW(experts.view(-1), Error);
  EXPECT_THROW(PackedExperts(spec, -1, 70, 128), Error);
}

}  // namespace
}  // namespace halfbyte
