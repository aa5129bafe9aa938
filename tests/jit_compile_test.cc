// Every kernel compiles for every GPU generation, without a GPU or a driver, and none needs a stack frame or
// spills a register: on sm_90a for every pair of what it is specialised on, elsewhere for every value;
// everywhere for every combination where HALFBYTE_JIT_FULL is set. Without NVRTC the tests are skipped, but
// fail where CI is set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <regex>
#include <set>

#include "core/checks.h"
#include "cuda/nvrtc.h"
#include "kernels/kernels.h"

namespace halfbyte {
namespace {

// All configurations of a kernel. A user's table has no listed values: one is added.
std::vector<KernelVariant> variants_of(const cuda::Kernel& kernel) {
  std::vector<KernelVariant> variants = all_variants(kernel);
  cuda::Kernel with_table = kernel;
  for (KernelKey& key : with_table.info.keys) {
    if (key.name == "format") key.values = {"lut4"};
    if (key.name == "table") key.values = {"-7,-5,-3.5,-3,-2.25,-2,-1,-0.125,0,0.5,1,1.5,2,3,4,6"};
    if (key.name == "table") std::ranges::move(all_variants(with_table), std::back_inserter(variants));
  }
  return variants;
}

// What a kernel can depend on: "dtype=f32". How a group is encoded is one thing, since format, zero points
// and rules go together in few ways.
std::vector<std::string> features_of(const KernelVariant& variant) {
  std::string encoding;
  std::vector<std::string> features;
  for (const auto& [key, value] : variant.config)
    if (key == "format" || key == "asymmetric" || key == "scale-rule")
      encoding += value + " ";
    else if (key != "table")
      features.push_back(key + "=" + value);
  if (!encoding.empty()) features.push_back(encoding);
  return features;
}

using Pair = std::pair<std::string, std::string>;  // twice the same for a single feature

std::vector<Pair> pairs_of(const KernelVariant& variant, bool singles) {
  const std::vector<std::string> features = features_of(variant);
  std::vector<Pair> pairs;
  for (size_t a = 0; a < features.size(); ++a)
    for (size_t b = singles ? a : a + 1; b < (singles ? a + 1 : features.size()); ++b)
      pairs.emplace_back(features[a], features[b]);
  return pairs;
}

// Some of them that have every feature, or every pair of features, greedily: each has the first pair that is
// missing and the most others of some that are tried at random.
std::vector<KernelVariant> covering(const std::vector<KernelVariant>& all, bool singles) {
  if (features_of(all.front()).empty()) return all;
  singles |= features_of(all.front()).size() == 1;
  std::map<Pair, std::vector<size_t>> missing;  // who has it
  for (size_t i = 0; i < all.size(); ++i)
    for (Pair& pair : pairs_of(all[i], singles)) missing[std::move(pair)].push_back(i);
  std::vector<KernelVariant> chosen;
  std::mt19937_64 random(1);
  while (!missing.empty()) {
    const std::vector<size_t>& candidates = missing.begin()->second;
    size_t best = candidates.front(), most = 0;
    for (int attempt = 0; attempt < 100; ++attempt) {
      const size_t candidate = candidates[random() % candidates.size()];
      size_t count = 0;
      for (const Pair& pair : pairs_of(all[candidate], singles)) count += missing.count(pair);
      if (count > most) best = candidate, most = count;
    }
    for (const Pair& pair : pairs_of(all[best], singles)) missing.erase(pair);
    chosen.push_back(all[best]);
  }
  return chosen;
}

// f64 scales are those of f64 data. That they can be decoded to another dtype is not worth registers.
bool is_rare(const KernelVariant& variant) {
  const std::map<std::string, std::string> values(variant.config.begin(), variant.config.end());
  const auto scale = values.find("scale-dtype");
  return scale != values.end() && scale->second == "f64" && values.at("dtype") != "f64";
}

class JitCompile : public ::testing::TestWithParam<const char*> {};

TEST_P(JitCompile, every_kernel) {
  const std::string target = GetParam();
  if (const std::string& problem = cuda::find_nvrtc().problem; !problem.empty()) {
    if (std::getenv("CI")) FAIL() << problem;
    GTEST_SKIP() << problem;
  }
  const std::regex line(R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  for (const cuda::Kernel& kernel : kernel_table()) {
    std::vector<KernelVariant> variants = variants_of(kernel);
    if (!std::getenv("HALFBYTE_JIT_FULL")) variants = covering(variants, target != "sm_90a");
    for (const KernelVariant& variant : variants) {
      SCOPED_TRACE(fmt::format("{} {}", kernel.info.name, fmt::join(features_of(variant), " ")));
      std::string log;
      try {
        const cuda::Compilation compilation = cuda::compile(variant.spec, target, {.verbose = true});
        EXPECT_FALSE(compilation.code.empty());
        log = compilation.log;
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
        continue;
      }
      EXPECT_FALSE(std::regex_search(log, std::regex("warning"))) << log;
      if (is_rare(variant)) continue;
      int num_kernels = 0;
      for (std::sregex_iterator match(log.begin(), log.end(), line), end; match != end;
           ++match, ++num_kernels)
        EXPECT_EQ(match->str(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads");
      EXPECT_EQ(num_kernels, 1) << log;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, JitCompile,
                         ::testing::Values("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a",
                                           "sm_120a"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace halfbyte
