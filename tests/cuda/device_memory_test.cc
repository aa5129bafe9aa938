// What happens where the memory of the device does not suffice. Nothing else can run on the device meanwhile.
#include <optional>

#include "halfbyte/checkpoint.hpp"
#include "harness.h"
#include "io/safetensors.h"
#include "io/test_directory.h"

namespace halfbyte {
namespace {

using DeviceMemory = testing::CudaTest;

// All memory of the device, down to 4 KiB.
std::vector<Memory> take_all_memory(Device device) {
  std::vector<Memory> taken;
  for (int64_t size = int64_t{1} << 30; size >= 4096; size /= 4) try {
      for (;;) taken.emplace_back(device, size);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::device) throw;
    }
  return taken;
}

TEST_F(DeviceMemory, TheSameBytesWhereItIsShort) {
  const Device device = testing::kCuda;
  const TestDirectory directory;
  std::vector<StoredTensor> tensors = {{"a.weight", "F32", {2048, 8192}, "", 0, 0}};
  const io::SafetensorsLayout layout = io::lay_out_safetensors(tensors, {});
  std::string bytes = layout.prefix;
  bytes.resize(layout.file_bytes);
  std::mt19937 rng(1);
  for (size_t i = tensors[0].offset; i < bytes.size(); i += 4) {
    const float value = static_cast<float>(rng()) * 0x1p-32f - 0.5f;
    std::memcpy(bytes.data() + i, &value, 4);
  }
  write_file(directory / "in", bytes);

  QuantizeOptions options;
  options.num_threads = 1;
  options.verify = false;
  options.force = true;
  quantize_checkpoint(directory / "in", directory / "cpu", options);
  options.devices = {device};
  quantize_checkpoint(directory / "in", directory / "warm", options);  // the kernels are loaded now

  // 16 MiB: a quarter of the memory that blocks of the usual size take.
  std::optional<Memory> some(std::in_place, device, int64_t{16} << 20);
  const std::vector<Memory> taken = take_all_memory(device);
  expect_error(ErrorCode::device, "memory",
               [&] { quantize_checkpoint(directory / "in", directory / "none", options); });
  EXPECT_EQ(directory.names(), (std::vector<std::string>{"cpu", "in", "warm"}));
  some.reset();
  quantize_checkpoint(directory / "in", directory / "short", options);
  EXPECT_TRUE(read_file(directory / "short") == read_file(directory / "cpu"));
}

}  // namespace
}  // namespace halfbyte
