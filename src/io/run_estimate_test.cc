// What a sample takes of weights, and what its rates say of a run.
#include "io/run_estimate.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace halfbyte::io {
namespace {

TEST(RunEstimate, SampleIsSpreadByBytes) {
  // 1000 MiB: a large weight, many small ones, and one that is not divided.
  std::vector<SampledWeight> weights = {{600, uint64_t{600} << 20}};
  for (int i = 0; i < 300; ++i) weights.push_back({1, uint64_t{1} << 20});
  weights.push_back({0, 0});
  weights.push_back({100, uint64_t{100} << 20});
  const auto sets = choose_sample(weights, 4, uint64_t{50} << 20, uint64_t{5} << 20);
  ASSERT_EQ(sets.size(), 4);
  std::set<std::pair<size_t, int64_t>> taken;
  std::map<size_t, int64_t> of_group;
  for (const auto& set : sets) {
    int64_t in_set = 0;
    for (size_t i = 0; i < set.size(); ++i) {
      EXPECT_LE(i == 0 ? 0 : set[i - 1].weight, set[i].weight);
      for (int64_t unit = set[i].begin; unit < set[i].end; ++unit)
        EXPECT_TRUE(taken.emplace(set[i].weight, unit).second) << "twice";
      EXPECT_LE(set[i].end, weights[set[i].weight].num_units);
      in_set += set[i].end - set[i].begin;
      of_group[set[i].weight == 0 ? 0 : set[i].weight <= 300 ? 1 : 2] += set[i].end - set[i].begin;
    }
    EXPECT_NEAR(in_set, 50, 5);
  }
  EXPECT_NEAR(of_group[0], 120, 10);
  EXPECT_NEAR(of_group[1], 60, 10);
  EXPECT_NEAR(of_group[2], 20, 10);
}

TEST(RunEstimate, SmallModelsAreSampledWhole) {
  const std::vector<SampledWeight> weights = {{3, 3000}, {0, 0}, {1, 10}};
  const auto sets = choose_sample(weights, 4, 1 << 20, 1 << 20);
  ASSERT_EQ(sets.size(), 4);
  for (const auto& set : sets) {
    ASSERT_EQ(set.size(), 2);
    EXPECT_EQ(set[0].end - set[0].begin, 3);
    EXPECT_EQ(set[1].weight, 2);
  }
}

TEST(RunEstimate, SomeUnitIsTakenWhereUnitsAreLarge) {
  const std::vector<SampledWeight> weights = {{1, uint64_t{1} << 30}};
  const auto sets = choose_sample(weights, 4, 1 << 20, 1 << 20);
  ASSERT_EQ(sets.size(), 1);
  ASSERT_EQ(sets[0].size(), 1);
  EXPECT_EQ(sets[0][0].end, 1);
}

TEST(RunEstimate, TimesOfFilesOneAfterTheOther) {
  SampleRates rates;
  rates.alone = {2, 1, 0.5};
  rates.beside = {100, 100, 100};
  rates.read = 1, rates.write = 0.25, rates.compute = 3, rates.copy = 2;
  rates.ranges = 0.125, rates.reserve = 0.25, rates.start = 7;
  const RunTimes times = estimate_times(rates, {{10, 20}, 8, 16, /*overlaps=*/false});
  EXPECT_DOUBLE_EQ(times.run, 60);
  EXPECT_DOUBLE_EQ(times.verify, 30);
  EXPECT_DOUBLE_EQ(times.sync, 15);
  EXPECT_DOUBLE_EQ(times.read, 30);
  EXPECT_DOUBLE_EQ(times.write, 7.5);
  EXPECT_DOUBLE_EQ(times.compute, 90);
  EXPECT_DOUBLE_EQ(times.copy, 60);
  EXPECT_DOUBLE_EQ(times.total, 60 + 30 + 15 + 7 + 8 * 0.25 + 16 * 0.125);
}

TEST(RunEstimate, TimesOfFilesBesideEachOther) {
  SampleRates rates;
  rates.alone = {2, 1, 0.5};
  rates.beside = {3, 2, 0.25};
  // The first is written alone, the last is completed alone; of what is side by side the longer counts.
  const RunTimes times = estimate_times(rates, {{10, 10, 2}, 0, 0, /*overlaps=*/true});
  EXPECT_DOUBLE_EQ(times.run, 20 + 30 + 6);
  EXPECT_DOUBLE_EQ(times.verify, 20 + 20 + 2);
  EXPECT_DOUBLE_EQ(times.sync, 2.5 + 2.5 + 1);
  EXPECT_DOUBLE_EQ(times.total, 20 + 30 + 22.5 + 3);
}

TEST(RunEstimate, StartsWhileSpaceIsReserved) {
  SampleRates rates;
  rates.start = 3, rates.reserve = 0.25;
  RunPlan plan{{}, 8};
  EXPECT_DOUBLE_EQ(estimate_times(rates, plan).total, 5);
  plan.starts_beside = true;
  EXPECT_DOUBLE_EQ(estimate_times(rates, plan).total, 3);
  plan.reserved_bytes = 16;
  EXPECT_DOUBLE_EQ(estimate_times(rates, plan).total, 4);
}

TEST(RunEstimate, NothingToDoTakesTheStart) {
  SampleRates rates;
  rates.start = 1;
  EXPECT_DOUBLE_EQ(estimate_times(rates, {}).total, 1);
}

}  // namespace
}  // namespace halfbyte::io
