#include <algorithm>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte {
namespace {

// Against a stable sort.
TEST(Route, SortsSlotsByExpert) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const RouteDescriptor d{.tokens = static_cast<int64_t>(random() % 70),
                            .top_k = 1 + static_cast<int64_t>(random() % 8),
                            .num_experts = 1 + static_cast<int64_t>(random() % 40),
                            .dtype = random() % 2 == 0 ? DType::i32 : DType::i64};
    const int64_t num_slots = d.tokens * d.top_k;
    std::vector<int64_t> experts(static_cast<size_t>(num_slots));
    for (int64_t& expert : experts)
      expert = random() % 9 == 0 ? (random() % 2 == 0 ? INT64_C(-1) : d.num_experts + 2)
                                 : static_cast<int64_t>(random()) % d.num_experts;
    std::vector<int32_t> narrow(experts.begin(), experts.end());
    std::vector<int32_t> offsets(static_cast<size_t>(d.num_experts), -5), slots(experts.size(), -5);
    void* const data = d.dtype == DType::i64 ? static_cast<void*>(experts.data()) : narrow.data();
    const auto plan = RoutePlan::select({}, d);
    plan.run(nullptr, {},
             {.experts = {data, d.dtype, {d.tokens, d.top_k}},
              .offsets = {offsets.data(), DType::i32, {d.num_experts}},
              .slots = {slots.data(), DType::i32, {num_slots}}});
    const auto rank = [&](int32_t slot) {
      const int64_t expert = experts[static_cast<size_t>(slot)];
      return expert < 0 || expert >= d.num_experts ? d.num_experts : expert;
    };
    std::vector<int32_t> expected(experts.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::ranges::stable_sort(expected, {}, rank);
    EXPECT_EQ(slots, expected);
    for (int64_t e = 0; e < d.num_experts; ++e)
      EXPECT_EQ(offsets[static_cast<size_t>(e)],
                std::ranges::count_if(expected, [&](int32_t slot) { return rank(slot) <= e; }));
  }
}

TEST(Route, Descriptors) {
  const auto error = [](const RouteDescriptor& d) -> std::string {
    try {
      check_descriptor(d);
    } catch (const Error& caught) {
      return caught.what();
    }
    return "";
  };
  EXPECT_EQ(error({.tokens = -1, .num_experts = 1}), "route descriptor: tokens must be >= 0, got -1");
  EXPECT_EQ(error({.tokens = 1}), "route descriptor: num_experts must be 1 to 2^20, got 0");
  EXPECT_EQ(error({.tokens = 1, .top_k = 0, .num_experts = 1}),
            "route descriptor: top_k must be >= 1, got 0");
  EXPECT_EQ(error({.tokens = int64_t{1} << 31, .num_experts = 1}),
            "route descriptor: tokens times top_k must be at most 2^31 - 1, got 2147483648 times 1");
  EXPECT_EQ(error({.tokens = 1, .num_experts = 1, .dtype = DType::u8}),
            "route descriptor: dtype must be i32 or i64, got u8");
}

}  // namespace
}  // namespace halfbyte
