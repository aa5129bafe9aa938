// Groups of CUDA devices: of all that there are, and at least two.
#include "cuda/graph.h"
#include "cuda/nccl.h"
#include "harness.h"
#include "ops/all_reduce/all_reduce_testing.h"

namespace halfbyte {
namespace {

using testing::run_members;

std::vector<Device> all_devices() {
  std::vector<Device> devices;
  for (int i = 0; i < cuda::num_devices(); ++i) devices.push_back({DeviceKind::cuda, i});
  return devices;
}

class AllReduceCuda : public testing::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    devices = all_devices();
    if (devices.size() < 2) GTEST_SKIP() << "needs two devices";
  }
  std::vector<Device> devices;
};

TEST_F(AllReduceCuda, SumsByPeerMemory) {
  const std::vector<Communicator> members = Communicator::of_devices(devices, Transport::peer);
  EXPECT_EQ(members[0].transport(), "peer memory");
  uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t count : {0, 1, 3, 4, 5, 63, 1000, 8192, 100003, 262144, 1000001, 5000003})
      for (const int64_t offset : {int64_t{0}, size_of(dtype)})
        testing::expect_sum(members, dtype, count, offset, ++seed);
}

TEST_F(AllReduceCuda, SumsByNccl) {
  ASSERT_EQ(cuda::find_nccl().problem, "");
  const std::vector<Communicator> members = Communicator::of_devices(devices, Transport::nccl);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t count : {0, 1, 1000, 3000001}) testing::expect_sum(members, dtype, count, 0, 3, true);
}

// What processes do: by an id.
TEST_F(AllReduceCuda, ConnectsByAnId) {
  if (!cuda::find_nccl().problem.empty()) GTEST_SKIP() << cuda::find_nccl().problem;
  const std::string id = Communicator::create_id();
  const auto size = static_cast<int>(devices.size());
  std::vector<std::thread> threads;
  std::vector<float> sums(devices.size());
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      const Device device = devices[static_cast<size_t>(rank)];
      const Communicator member = Communicator::connect(device, id, rank, size);
      const Stream stream(device);
      const float one = 1;
      const Memory memory(device, 4);
      copy(device, memory.data(), &one, 4, stream.handle());
      member.all_reduce({memory.data(), DType::f32, {1}, {}, device}, stream.handle());
      copy(device, &sums[static_cast<size_t>(rank)], memory.data(), 4, stream.handle());
      stream.synchronize();
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sums, std::vector<float>(devices.size(), static_cast<float>(size)));
}

// Runs follow each other without a wait, in graphs too, of sizes that differ: no line is read before it is
// written, or after it is written again.
TEST_F(AllReduceCuda, ManyInARowAndInGraphs) {
  const std::vector<Communicator> members = Communicator::of_devices(devices);
  const auto size = static_cast<float>(members.size());
  const auto errors = run_members(members, [&](const Communicator& member) {
    const Device device = member.device();
    const Stream stream(device);
    constexpr int64_t kCounts[] = {30000, 5, 200000, 8192, 1, 1100001};
    std::vector<std::vector<float>> values;
    std::vector<Memory> memory;
    for (const int64_t count : kCounts) {
      values.emplace_back(static_cast<size_t>(count), static_cast<float>(member.rank() + 1));
      memory.emplace_back(device, count * 4);
    }
    const auto enqueue = [&] {
      for (size_t i = 0; i < memory.size(); ++i)
        for (int repeat = 0; repeat < 3; ++repeat)
          member.all_reduce({memory[i].data(), DType::f32, {kCounts[i]}, {}, device}, stream.handle());
    };
    cuda::Graph graph;
    {
      const cuda::Scope scope(cuda::context(device.index));
      graph.capture(stream.handle(), enqueue);
    }
    for (int round = 0; round < 20; ++round) {
      for (size_t i = 0; i < memory.size(); ++i)
        copy(device, memory[i].data(), values[i].data(), kCounts[i] * 4, stream.handle());
      if (round % 2 == 0) {
        enqueue();
      } else {
        const cuda::Scope scope(cuda::context(device.index));
        graph.launch(stream.handle());
      }
      const float expected = size * (size + 1) / 2 * size * size;
      for (size_t i = 0; i < memory.size(); ++i) {
        std::vector<float> sums(static_cast<size_t>(kCounts[i]));
        copy(device, sums.data(), memory[i].data(), kCounts[i] * 4, stream.handle());
        stream.synchronize();
        EXPECT_EQ(std::ranges::count(sums, expected), kCounts[i]) << "round " << round << ", sum " << i;
      }
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_F(AllReduceCuda, PartsGiveTheProductOfOneDevice) {
  testing::expect_parallel_products(Communicator::of_devices(devices), std::vector<int64_t>{1, 5, 70});
}

// A kernel that waits for a member that will not come ends, and the device is as before.
TEST_F(AllReduceCuda, AbortEndsWhatWaits) {
  const std::vector<Communicator> members = Communicator::of_devices(devices, Transport::peer);
  const Stream stream(devices[1]);
  const Memory memory(devices[1], 4096);
  members[1].all_reduce({memory.data(), DType::f32, {1024}, {}, devices[1]}, stream.handle());
  members[0].abort();
  stream.synchronize();
  EXPECT_THROW(members[1].all_reduce({memory.data(), DType::f32, {1024}, {}, devices[1]}, stream.handle()),
               Error);
  testing::expect_sum(Communicator::of_devices(devices, Transport::peer), DType::bf16, 1000, 0, 1);
}

TEST_F(AllReduceCuda, RefusesWhatOnlyTheDeviceKnows) {
  const std::vector<Device> twice(2, testing::kCuda);
  try {
    Communicator::of_devices(twice);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "communicator: CUDA devices must differ, got cuda:0,cuda:0");
  }
  const std::vector<Communicator> members = Communicator::of_devices(devices);
  float on_host = 0;
  EXPECT_THROW(members[0].all_reduce({&on_host, DType::f32, {1}, {}, testing::kCuda}), Error);
}

}  // namespace
}  // namespace halfbyte
