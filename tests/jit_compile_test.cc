// Every kernel of quantize and dequantize compiles for every GPU generation, without a GPU or a driver, and
// none needs a stack frame or spills a register: on sm_90a for every pair of what they are specialised on,
// elsewhere for every value; everywhere for every combination where HALFBYTE_JIT_FULL is set. Without NVRTC
// the tests are skipped, but fail where CI is set.
#include <array>
#include <cstdlib>
#include <regex>
#include <set>

#include "cuda/nvrtc.h"
#include "ops/dequantize/dequantize_cuda.h"
#include "ops/quantize/quantize_cuda.h"
#include "ops/testing.h"

namespace halfbyte {
namespace {

// What a kernel is chosen by besides spec and dtypes. Channels, tensors and other groups have the kernels of
// group 100.
struct Shape {
  const char* name;
  int64_t group_size, cols;
};
constexpr Shape kShapes[] = {{"group 32", 32, 4096},   {"group 64", 64, 4096},   {"group 128", 128, 4096},
                             {"group 256", 256, 4096}, {"group 100", 100, 4000}, {"unaligned", 64, 4095}};

// Indices along the axes: dtype, scale dtype, shape, spec and, to quantize, code scale.
using Choice = std::vector<size_t>;

bool is_valid(const Choice& choice) {  // f64 scales need f64 data
  return testing::kFloatDTypes[choice[1]] != DType::f64 || testing::kFloatDTypes[choice[0]] == DType::f64;
}

std::vector<Choice> all_choices(const Choice& sizes) {
  std::vector<Choice> choices = {Choice(sizes.size())};
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    std::vector<Choice> longer;
    for (Choice choice : choices)
      for (choice[axis] = 0; choice[axis] < sizes[axis]; ++choice[axis]) longer.push_back(choice);
    choices = std::move(longer);
  }
  std::erase_if(choices, [](const Choice& choice) { return !is_valid(choice); });
  return choices;
}

// Choices that bring every value of every axis, or every pair of values of two axes, greedily: each has the
// first pair that is missing and brings the most others of some that are tried at random.
std::vector<Choice> covering_choices(const Choice& sizes, bool pairs) {
  using Pair = std::array<size_t, 4>;  // axis, value, axis, value; twice the same for a single value
  const auto brought = [&](const Choice& choice) {
    std::vector<Pair> result;
    for (size_t a = 0; a < sizes.size(); ++a)
      for (size_t b = pairs ? a + 1 : a; b < (pairs ? sizes.size() : a + 1); ++b)
        result.push_back({a, choice[a], b, choice[b]});
    return result;
  };
  std::set<Pair> missing;
  for (const Choice& choice : all_choices(sizes))
    for (const Pair& pair : brought(choice)) missing.insert(pair);
  std::vector<Choice> chosen;
  std::mt19937_64 random(1);
  while (!missing.empty()) {
    const auto [a, value_a, b, value_b] = *missing.begin();
    Choice best;
    size_t most = 0;
    for (int attempt = 0; attempt < 200; ++attempt) {
      Choice choice;
      for (const size_t size : sizes) choice.push_back(random() % size);
      choice[a] = value_a;
      choice[b] = value_b;
      if (!is_valid(choice)) continue;
      size_t count = 0;
      for (const Pair& pair : brought(choice)) count += missing.count(pair);
      if (count > most) {
        most = count;
        best = choice;
      }
    }
    if (best.empty()) continue;
    for (const Pair& pair : brought(best)) missing.erase(pair);
    chosen.push_back(best);
  }
  return chosen;
}

// The kernels of choices, as the host code specialises them. No pointer is followed.
alignas(64) uint8_t memory[64];

QuantizeProblem problem_of(QuantSpec spec, const Choice& choice) {
  const Shape& shape = kShapes[choice[2]];
  spec.group_size = shape.group_size;
  spec.scale_dtype = testing::kFloatDTypes[choice[1]];
  const QuantizedView view{spec,
                           16,
                           shape.cols,
                           memory,
                           memory,
                           has_zeros(spec) ? memory : nullptr,
                           has_biases(spec) ? memory : nullptr};
  const DType dtype = testing::kFloatDTypes[choice[0]];
  return make_quantize_problem({memory, dtype, {16, shape.cols}, {}, {DeviceKind::cuda, 0}}, view, {},
                               nullptr);
}
cuda::KernelSpec quantize_kernel_of(QuantSpec spec, const Choice& choice) {
  spec.code_scale = choice[4] == 0 ? CodeScale::stored : CodeScale::unrounded;
  return quantize_kernel(problem_of(spec, choice));
}
cuda::KernelSpec dequantize_kernel_of(const QuantSpec& spec, const Choice& choice) {
  const QuantizeProblem problem = problem_of(spec, choice);
  DequantizeProblem inverse;
  inverse.shape = problem.shape;
  inverse.codec = problem.codec;
  inverse.codes = memory;
  inverse.scales = memory;
  inverse.zeros = problem.zeros;
  inverse.biases = static_cast<const uint8_t*>(problem.biases);
  inverse.y = memory;
  inverse.dtype = problem.dtype;
  return dequantize_kernel(inverse);
}

std::vector<cuda::KernelSpec> kernels_to_compile(bool pairs) {
  const auto choices = [&](size_t num_specs, std::initializer_list<size_t> more) {
    Choice sizes = {std::size(testing::kFloatDTypes), std::size(testing::kFloatDTypes), std::size(kShapes),
                    num_specs};
    sizes.insert(sizes.end(), more);
    return std::getenv("HALFBYTE_JIT_FULL") ? all_choices(sizes) : covering_choices(sizes, pairs);
  };
  // Decoding does not depend on the rule that chose the scales.
  const std::vector<QuantSpec> specs = testing::all_specs();
  std::vector<QuantSpec> decoded;
  for (const QuantSpec& spec : specs)
    if (decoded.empty() || decoded.back().format != spec.format ||
        decoded.back().asymmetric != spec.asymmetric)
      decoded.push_back(spec);
  std::vector<cuda::KernelSpec> kernels;
  for (const Choice& choice : choices(specs.size(), {2}))
    kernels.push_back(quantize_kernel_of(specs[choice[3]], choice));
  for (const Choice& choice : choices(decoded.size(), {}))
    kernels.push_back(dequantize_kernel_of(decoded[choice[3]], choice));
  for (const DType dtype : testing::kFloatDTypes) kernels.push_back(value_range_kernel(dtype));
  return kernels;
}

class JitCompile : public ::testing::TestWithParam<const char*> {};

TEST_P(JitCompile, every_kernel) {
  const std::string target = GetParam();
  if (const std::string& problem = cuda::find_nvrtc().problem; !problem.empty()) {
    if (std::getenv("CI")) FAIL() << problem;
    GTEST_SKIP() << problem;
  }
  const std::regex line(R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  for (const cuda::KernelSpec& kernel : kernels_to_compile(target == "sm_90a")) {
    SCOPED_TRACE(fmt::format("{} with\n{}", kernel.source, kernel.config));
    std::string log;
    try {
      const cuda::Compilation compilation = cuda::compile(kernel, target, true);
      EXPECT_FALSE(compilation.cubin.empty());
      log = compilation.log;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      continue;
    }
    EXPECT_FALSE(std::regex_search(log, std::regex("warning"))) << log;
    int num_kernels = 0;
    for (std::sregex_iterator match(log.begin(), log.end(), line), end; match != end; ++match, ++num_kernels)
      EXPECT_EQ(match->str(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads");
    EXPECT_EQ(num_kernels, 1) << log;
  }
}

INSTANTIATE_TEST_SUITE_P(, JitCompile,
                         ::testing::Values("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a",
                                           "sm_120a"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace halfbyte
