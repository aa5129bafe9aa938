// The matrix, barrier and bulk copy instructions of src/cuda/device compile for every GPU generation that has
// them, without a GPU or a driver, and cost no stack frame, spill or serialised wgmma. Without NVRTC the
// tests are skipped, but fail where CI is set.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iterator>
#include <regex>

#include "cuda/device_headers_program.h"

namespace halfbyte {
namespace {

struct Target {
  const char* name;
  std::ptrdiff_t num_kernels;
};

class DeviceHeaders : public ::testing::TestWithParam<Target> {};

TEST_P(DeviceHeaders, compile) {
  const Target target = GetParam();
  if (const std::string& problem = cuda::find_nvrtc().problem; !problem.empty()) {
    if (std::getenv("CI")) FAIL() << problem;
    GTEST_SKIP() << problem;
  }
  const auto [cubin, log] = testing::compile_device_headers(target.name);
  ASSERT_FALSE(cubin.empty()) << log;
  // "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
  EXPECT_FALSE(std::regex_search(log, std::regex("warning|Performance Loss"))) << log;
  const std::regex line(R"((\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads)");
  const std::sregex_iterator begin(log.begin(), log.end(), line), end;
  for (auto match = begin; match != end; ++match)
    EXPECT_EQ(match->str(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
        << match->prefix().str();
  EXPECT_EQ(std::distance(begin, end), target.num_kernels) << log;
}

INSTANTIATE_TEST_SUITE_P(, DeviceHeaders,
                         ::testing::Values(Target{"sm_75", 0}, Target{"sm_80", 3}, Target{"sm_89", 3},
                                           Target{"sm_90a", 58}, Target{"sm_100a", 4}, Target{"sm_120a", 4}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace halfbyte
