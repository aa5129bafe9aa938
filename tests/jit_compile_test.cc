// Every kernel compiles for every GPU generation, without a GPU or a driver, and none needs a stack frame or
// spills a register, but for what kSpills names. Of the valid configurations of a kernel, some are compiled:
// for sm_90a, the main target, so many that they have every pair of values; for the other targets, so many
// that they have every value, each for one target. HALFBYTE_JIT_SEED=WORD: for sm_90a, those of every value
// and a third of those of pairs. HALFBYTE_JIT_FULL: every configuration for every target. Without NVRTC the
// tests are skipped, but fail where CI is set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <queue>
#include <random>
#include <regex>
#include <set>

#include "core/checks.h"
#include "cuda/nvrtc.h"
#include "io/test_directory.h"
#include "kernels/kernels.h"

namespace halfbyte {
namespace {

constexpr const char* kMainTarget = "sm_90a";
constexpr const char* kOtherTargets[] = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"};
constexpr const char* kPtxTargets[] = {"sm_75", "sm_80", "sm_90a", "sm_120a"};

// All configurations of a kernel. A user's table has no listed values: one is added.
std::vector<KernelConfiguration> configurations_of(const cuda::Kernel& kernel) {
  std::vector<KernelConfiguration> configurations = all_configurations(kernel);
  cuda::Kernel with_table = kernel;
  for (KernelKey& key : with_table.info.keys) {
    if (key.name == "format") key.values = {"lut4"};
    if (key.name == "table") key.values = {"-7,-5,-3.5,-3,-2.25,-2,-1,-0.125,0,0.5,1,1.5,2,3,4,6"};
    if (key.name == "table")
      std::ranges::move(all_configurations(with_table), std::back_inserter(configurations));
  }
  return configurations;
}

// "dtype=f32". A table comes with its format.
std::vector<std::string> words_of(const KernelConfiguration& configuration) {
  std::vector<std::string> words;
  for (const auto& [key, value] : configuration.config)
    if (key != "table") words.push_back(key + "=" + value);
  return words;
}

// Some that have every word of all, or every pair of words that occurs: greedily, the one with the most that
// is missing, the first of equals. At least one.
std::vector<KernelConfiguration> covering(const std::vector<KernelConfiguration>& all, bool pairs) {
  std::map<std::pair<std::string, std::string>, size_t> numbers;  // a word twice: itself
  std::vector<std::vector<size_t>> parts;                         // that a configuration has
  for (const KernelConfiguration& configuration : all) {
    const std::vector<std::string> words = words_of(configuration);
    parts.emplace_back();
    for (size_t a = 0; a < words.size(); ++a)
      for (size_t b = a; b < (pairs ? words.size() : a + 1); ++b)
        parts.back().push_back(numbers.try_emplace({words[a], words[b]}, numbers.size()).first->second);
  }
  std::vector<bool> is_missing(numbers.size(), true);
  const auto gain_of = [&](size_t i) {
    return std::ranges::count_if(parts[i], [&](size_t part) { return is_missing[part]; });
  };
  // Gains only shrink: the largest is that of a configuration whose gain, up to date, is still the largest.
  std::priority_queue<std::pair<std::ptrdiff_t, std::ptrdiff_t>> queue;  // gain, -index
  for (size_t i = 0; i < all.size(); ++i) queue.emplace(gain_of(i), -static_cast<std::ptrdiff_t>(i));
  std::vector<KernelConfiguration> chosen;
  while (!queue.empty()) {
    const auto [old_gain, minus_index] = queue.top();
    const auto index = static_cast<size_t>(-minus_index);
    const std::ptrdiff_t gain = gain_of(index);
    queue.pop();
    if (gain == old_gain && (gain > 0 || chosen.empty())) {
      for (const size_t part : parts[index]) is_missing[part] = false;
      chosen.push_back(all[index]);
    } else if (gain > 0) {
      queue.emplace(gain, minus_index);
    }
  }
  return chosen;
}

// What spills all the same, in some configurations: at most so many bytes.
struct Spill {
  std::string_view kernel;
  int max_bytes;
};
constexpr Spill kSpills[] = {
    {"affine_init", 36},            // for sm_120a
    {"fake_chunks", 16},            // f16, i32 zero points, backward, for sm_80
    {"qgemm_simt_rows", 8},         // packed int8, 2 and 4 rows of f32 x, for sm_120a
    {"qgemm_sm80", 24},             // 8 bits, 16 rows of x, for sm_100a
    {"qgemm_sm90_transposed", 24},  // int8, 64 rows of x, f32 scales for 32 columns
    {"quantize_groups", 8},         // affine; 40 registers leave room for all warps
};

int max_spill_bytes(const std::string& kernel) {
  const auto* found = std::ranges::find(kSpills, std::string_view(kernel), &Spill::kernel);
  return found == std::end(kSpills) ? 0 : found->max_bytes;
}

void expect_compiles(const KernelConfiguration& configuration, const std::string& target) {
  SCOPED_TRACE(fmt::format("{} {} for {}", configuration.spec.function,
                           fmt::join(words_of(configuration), " "), target));
  std::string log;
  try {
    const cuda::Compilation compilation = cuda::compile(configuration.spec, target, {.verbose = true});
    EXPECT_FALSE(compilation.code.empty());
    log = compilation.log;
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
    return;
  }
  EXPECT_EQ(log.find("warning"), std::string::npos) << log;
  static const std::regex line(
      R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  int num_kernels = 0;
  for (std::sregex_iterator match(log.begin(), log.end(), line), end; match != end; ++match, ++num_kernels)
    for (const int number : {1, 2, 3})
      EXPECT_LE(std::stoi(match->str(number)), max_spill_bytes(configuration.spec.function)) << match->str();
  EXPECT_EQ(num_kernels, 1) << log;
}

// To the log of a test: how many of how many were compiled.
void report(size_t num_chosen, size_t num_all) {
  std::printf("%zu compilations, %zu configurations\n", num_chosen, num_all);
}

class NeedsNvrtc : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string& problem = cuda::find_nvrtc().problem; !problem.empty()) {
      if (std::getenv("CI")) FAIL() << problem;
      GTEST_SKIP() << problem;
    }
  }
};

// The parameter is the name of a kernel.
class JitCompile : public NeedsNvrtc, public ::testing::WithParamInterface<std::string> {
 protected:
  const std::vector<KernelConfiguration> all_ = configurations_of(find_kernel(GetParam()));
  const bool full_ = std::getenv("HALFBYTE_JIT_FULL") != nullptr;
};

TEST_P(JitCompile, for_the_main_target) {
  // The library does not run plain kernels: their values are enough.
  const bool plain = find_kernel(GetParam()).info.plain;
  std::vector<KernelConfiguration> chosen = full_ && !plain ? all_ : covering(all_, !plain);
  if (const char* seed = std::getenv("HALFBYTE_JIT_SEED"); seed && !full_ && !plain) {
    const std::string name = seed + GetParam();
    std::seed_seq numbers(name.begin(), name.end());
    std::mt19937 rng(numbers);
    std::ranges::shuffle(chosen, rng);
    chosen.resize(chosen.size() / 3);
    std::set<std::string> has;
    for (const KernelConfiguration& configuration : chosen) has.insert(configuration.spec.config);
    for (KernelConfiguration& configuration : covering(all_, false))
      if (has.insert(configuration.spec.config).second) chosen.push_back(std::move(configuration));
  }
  report(chosen.size(), all_.size());
  for (const KernelConfiguration& configuration : chosen) expect_compiles(configuration, kMainTarget);
}

TEST_P(JitCompile, for_the_others) {
  if (!find_kernel(GetParam()).is_for(kOtherTargets[0])) {
    expect_error(ErrorCode::usage, "kernel " + GetParam() + ": target must be sm_90a, got sm_75",
                 [&] { emit_ptx(GetParam(), {}, kOtherTargets[0]); });
    return;
  }
  const bool full = full_ && !find_kernel(GetParam()).info.plain;
  const std::vector<KernelConfiguration> chosen = full ? all_ : covering(all_, false);
  const size_t num_targets = std::size(kOtherTargets);
  const size_t count = full ? all_.size() * num_targets : std::max(chosen.size(), num_targets);
  report(count, all_.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t target = full ? i / all_.size() : i % num_targets;
    expect_compiles(chosen[i % chosen.size()], kOtherTargets[target]);
  }
}

// ptxas of a toolkit; not older than NVRTC. Empty if there is none.
std::string find_ptxas() {
  std::vector<std::string> paths;
  for (const char* variable : {"HALFBYTE_PTXAS", "CUDA_HOME"})
    if (const char* value = std::getenv(variable))
      paths.push_back(std::strcmp(variable, "CUDA_HOME") == 0 ? std::string(value) + "/bin/ptxas" : value);
  paths.push_back("/usr/local/cuda/bin/ptxas");
  for (const std::string& path : paths)
    if (std::filesystem::exists(path)) return path;
  return "";
}

// The PTX that users get is what ptxas takes: of each configuration for one target, of a kernel for all.
TEST_P(JitCompile, assembles_as_ptx) {
  const std::string ptxas = find_ptxas();
  if (ptxas.empty()) {
    if (std::getenv("CI")) FAIL() << "no ptxas: HALFBYTE_PTXAS may give its path";
    GTEST_SKIP() << "no ptxas";
  }
  const std::vector<KernelConfiguration> chosen = covering(all_, false);
  const cuda::Kernel& kernel = find_kernel(GetParam());
  const TestDirectory dir;
  const size_t num_targets = std::size(kPtxTargets), count = std::max(chosen.size(), num_targets);
  report(count, all_.size());
  for (size_t i = 0; i < count; ++i) {
    const KernelConfiguration& configuration = chosen[i % chosen.size()];
    const std::string target =
        kernel.is_for(kPtxTargets[0]) ? kPtxTargets[i % num_targets] : kernel.info.target;
    SCOPED_TRACE(fmt::format("{} for {}", fmt::join(words_of(configuration), " "), target));
    const std::string ptx = emit_ptx(GetParam(), configuration.config, target);
    EXPECT_NE(ptx.find(fmt::format("\n.target {}\n", target)), std::string::npos);
    EXPECT_NE(ptx.find(fmt::format(".visible .entry {}(", GetParam())), std::string::npos);
    std::ofstream(dir / "kernel.ptx") << ptx;
    const std::string command = fmt::format("'{}' -arch {} -o '{}' '{}' 2>'{}'", ptxas, target, dir / "cubin",
                                            dir / "kernel.ptx", dir / "log");
    EXPECT_EQ(std::system(command.c_str()), 0) << std::ifstream(dir / "log").rdbuf();
  }
}

INSTANTIATE_TEST_SUITE_P(, JitCompile, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const KernelInfo& kernel : all_kernels()) names.push_back(kernel.name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

class Emission : public NeedsNvrtc {};

TEST_F(Emission, targets) {
  const std::vector<std::string>& targets = kernel_targets();
  for (const char* target : {"sm_75", "sm_80", "sm_90", "sm_90a"})
    EXPECT_EQ(std::ranges::count(targets, target), 1) << target;
  for (const char* target : {"sm_75a", "sm_90f", "sm_70"})
    EXPECT_EQ(std::ranges::count(targets, target), 0) << target;
  for (const std::string target : {"", "sm_75a", "sm_1", "90a", "compute_90a", "sm_90a "})
    expect_error(ErrorCode::usage, "unknown target '" + target + "': must be one of sm_75, ",
                 [&] { emit_ptx("value_range", {}, target); });
}

// Each listed target is one that it does compile for.
TEST_F(Emission, one_module_with_one_kernel) {
  for (const std::string& target : kernel_targets()) {
    SCOPED_TRACE(target);
    const std::string ptx = emit_ptx("value_range", {{"dtype", "bf16"}}, target);
    const auto count = [&](const std::string& word) {
      size_t n = 0;
      for (size_t at = ptx.find(word); at != std::string::npos; at = ptx.find(word, at + 1)) ++n;
      return n;
    };
    EXPECT_EQ(count("\n.version "), 1u);
    EXPECT_EQ(count("\n.target " + target + "\n"), 1u);
    EXPECT_EQ(count(".entry "), 1u);
    EXPECT_EQ(count(".visible .entry value_range("), 1u);
    EXPECT_EQ(ptx.find('\0'), std::string::npos);
  }
  const std::vector<std::byte> cubin = emit_cubin("value_range", {}, "sm_90a");
  ASSERT_GT(cubin.size(), 100u);
  EXPECT_EQ(std::memcmp(cubin.data(),
                        "\x7f"
                        "ELF",
                        4),
            0);
}

// What is described is what the driver wants: in this order, of these sizes.
TEST_F(Emission, plain_kernels_have_the_parameters_that_are_described) {
  static const std::regex parameter(R"(\.param \.(\w+)(?: \.ptr(?: \.\w+ \d+)?)? \w+_param_(\d+))");
  int num_kernels = 0;
  for (const KernelInfo& kernel : all_kernels()) {
    if (!kernel.plain) continue;
    ++num_kernels;
    SCOPED_TRACE(kernel.name);
    const KernelDescription description = describe_kernel(kernel.name, {});
    const std::string ptx = emit_ptx(kernel.name, {}, "sm_80");
    const std::string entry = ptx.substr(ptx.find(".entry"), ptx.find(".maxntid") - ptx.find(".entry"));
    std::vector<std::string> expected, found;
    for (const KernelParameter& of : description.parameters)
      expected.push_back(of.is_pointer() || of.type == "i64" ? "u64" : of.type == "i32" ? "u32" : of.type);
    for (std::sregex_iterator match(entry.begin(), entry.end(), parameter), end; match != end; ++match) {
      EXPECT_EQ(match->str(2), std::to_string(found.size()));
      found.push_back(match->str(1));
    }
    EXPECT_EQ(found, expected) << entry;
    EXPECT_NE(ptx.find(fmt::format(".maxntid {}", description.block)), std::string::npos);
    EXPECT_EQ(ptx.find(".extern"), std::string::npos) << "dynamic shared memory";
  }
  EXPECT_EQ(num_kernels, 8);
}

}  // namespace
}  // namespace halfbyte
