// The words of devices.
#include "halfbyte/device.hpp"

#include <gtest/gtest.h>

#include "io/test_directory.h"

namespace halfbyte {
namespace {

TEST(Device, Words) {
  EXPECT_EQ(parse_device("cpu"), Device{});
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceKind::cuda, 0}));
  EXPECT_EQ(parse_device("cuda:0"), (Device{DeviceKind::cuda, 0}));
  EXPECT_EQ(parse_device("cuda:12"), (Device{DeviceKind::cuda, 12}));
  const std::vector<Device> several = {{DeviceKind::cuda, 1}, {}, {DeviceKind::cuda, 0}};
  EXPECT_EQ(parse_devices("cuda:1,cpu,cuda"), several);
  EXPECT_EQ(to_string(several), "cuda:1,cpu,cuda:0");
  EXPECT_EQ(parse_devices("cpu"), std::vector<Device>{{}});
  for (const char* words : {"", ",", "cpu,", "cpu,cpu", "cuda,cuda:0", "cpu;cuda", "all"})
    expect_error(ErrorCode::usage, "", [&] { parse_devices(words); });
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceKind::cuda, 0}), "cuda:0");
  EXPECT_EQ(to_string(Device{DeviceKind::cuda, 12}), "cuda:12");
  for (const std::string word :
       {"", "CPU", "cpu:0", "gpu", "auto", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1x", "cuda:1:2",
        "cuda1", "cuda:4294967296", "cuda:99999999999999999999"})
    expect_error(ErrorCode::usage, '"' + word + '"', [&] { parse_device(word); });
}

TEST(Device, EveryDeviceIsUsableOrHasAReason) {
  const CudaInfo info = cuda_info();
  for (const CudaDevice& device : info.devices) {
    const Device cuda = {DeviceKind::cuda, device.index};
    if (device.problem.empty() && info.usable()) {
      check_device(cuda);
    } else {
      expect_error(ErrorCode::device, device.problem, [&] { check_device(cuda); });
    }
  }
  const Device missing = {DeviceKind::cuda, static_cast<int>(info.devices.size())};
  expect_error(ErrorCode::device, "", [&] { check_device(missing); });
}

}  // namespace
}  // namespace halfbyte
