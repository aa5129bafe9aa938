#include <thread>

#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;

// Which plan that is: copies have the same texts.
const void* identity(const QgemmPlan& plan) { return &plan.sku(); }

QgemmDescriptor descriptor(int64_t n = 64, int64_t k = 96) {
  QgemmDescriptor d;
  d.n = n;
  d.k = k;
  return d;
}

std::vector<uint8_t> run(const QgemmPlans& plans, const QgemmCase& test, bool with_workspace) {
  const int64_t size = plans.workspace_size(test.descriptor.m);
  return testing::run_guarded(test, size, [&](const QgemmTensors& t, void* workspace) {
    plans.run(nullptr, with_workspace ? Workspace(workspace, size) : Workspace(), qgemm_args(test, t, {}));
  });
}

TEST(QgemmPlans, GiveTheBytesOfThePlanForEachM) {
  for (const bool transposed : {false, true}) {
    QgemmDescriptor d = descriptor(73, 161);
    d.transposed = transposed;
    d.bias = !transposed;
    d.accumulate = true;
    d.m = 12345;
    const QgemmPlans plans({}, d, {1}), copy = plans;
    EXPECT_EQ(plans.descriptor().m, 0);
    EXPECT_EQ(plans.descriptor().bias, d.bias);
    EXPECT_EQ(plans.device(), Device());
    for (const int64_t m : {0, 1, 3, 64, 65, 200, 3, 65}) {
      d.m = m;
      const QgemmCase test(d, 7 + static_cast<uint64_t>(m));
      const std::vector<uint8_t> expected = testing::run_on_cpu(test, 1).y;
      EXPECT_EQ(run(plans, test, true), expected) << testing::describe(d);
      EXPECT_EQ(run(copy, test, false), expected) << testing::describe(d);
      EXPECT_EQ(plans.at(m).descriptor(), d);
      EXPECT_EQ(plans.workspace_size(m), QgemmPlan::select({}, d, {1}).workspace_size());
      EXPECT_EQ(identity(copy.at(m)), identity(plans.at(m)));
    }
  }
}

TEST(QgemmPlans, KeepSmallOnesForGoodAndOthersThatWereUsedLast) {
  const QgemmPlans plans({}, descriptor());
  std::vector<QgemmPlan> held;  // so that no other lies where it lies
  for (int64_t m = 0; m <= 200; ++m) held.push_back(plans.at(m));
  const auto is_kept = [&](int64_t m) {
    return identity(plans.at(m)) == identity(held[static_cast<size_t>(m)]);
  };
  for (int64_t m = 0; m <= QgemmPlans::kSmall; ++m) EXPECT_TRUE(is_kept(m)) << m;
  for (int64_t m = 200; m > 200 - QgemmPlans::kMostOthers; --m) EXPECT_TRUE(is_kept(m)) << m;
  EXPECT_FALSE(is_kept(200 - QgemmPlans::kMostOthers));
  // That one took the place of the one that was not used for longest, 200.
  EXPECT_TRUE(is_kept(199));
  EXPECT_FALSE(is_kept(200));
  EXPECT_FALSE(is_kept(65));
  EXPECT_TRUE(is_kept(199));
}

TEST(QgemmPlans, ManyThreadsShareThem) {
  const QgemmPlans plans({}, descriptor(), {1});
  constexpr size_t kThreads = 6;
  constexpr int64_t kRows = 130;
  std::vector<QgemmCase> tests;
  std::vector<std::vector<uint8_t>> expected;
  for (const int64_t m : {1, 5, 64, 65, 130}) {
    QgemmDescriptor d = descriptor();
    d.m = m;
    tests.emplace_back(d, static_cast<uint64_t>(m));
    expected.push_back(testing::run_on_cpu(tests.back(), 1).y);
  }
  std::vector<std::vector<QgemmPlan>> found(kThreads);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const QgemmPlans own = plans;
      for (int64_t i = 0; i < 3 * kRows; ++i) {
        const int64_t m = (i * 7 + static_cast<int64_t>(t)) % kRows;
        const QgemmPlan plan = own.at(m);
        EXPECT_EQ(plan.descriptor().m, m);
        if (m <= QgemmPlans::kSmall) found[t].push_back(plan);
      }
      for (size_t i = 0; i < tests.size(); ++i) EXPECT_EQ(run(own, tests[i], false), expected[i]);
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<QgemmPlan>& of_thread : found)
    for (const QgemmPlan& plan : of_thread)
      EXPECT_EQ(identity(plan), identity(plans.at(plan.descriptor().m)));
}

TEST(QgemmPlans, RefuseWhatAPlanRefuses) {
  const auto error_of = [](const auto& body) {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  QgemmDescriptor d = descriptor();
  const QgemmPlans plans({}, d);
  EXPECT_EQ(error_of([&] { plans.at(-1); }), "qgemm descriptor: m must be 0 to 2^40, got -1");
  EXPECT_EQ(error_of([&] { plans.run(nullptr, {}, {}); }), "qgemm: x must have 2 axes, got the shape []");
  Qgemm::Args args;
  args.x = {nullptr, DType::bf16, {2, 96}, {}, {}};
  EXPECT_EQ(error_of([&] { plans.run(nullptr, {}, args); }),
            "qgemm: weight.rows must be 64 as in the descriptor, got 0");
  d.transposed = d.bias = true;
  EXPECT_EQ(error_of([&] { QgemmPlans({}, d); }),
            "qgemm descriptor: bias must be false where transposed is true");
  EXPECT_EQ(error_of([&] { QgemmPlans({}, descriptor(), {-1}); }),
            "qgemm: preference.num_threads must be >= 0, got -1");
}

}  // namespace
}  // namespace halfbyte
