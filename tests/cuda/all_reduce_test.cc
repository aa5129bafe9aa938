// Groups of CUDA devices: of all that there are, and at least two.
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>

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

// ---- Processes: this program once more, as a member of a group

constexpr const char* kMember = "HALFBYTE_TEST_MEMBER";  // rank, size, what it does, id in hexadecimal

// Not a test by itself.
TEST(AllReduceProcess, IsAMember) {
  const char* const given = std::getenv(kMember);
  if (given == nullptr) GTEST_SKIP() << "what other tests start as a process";
  std::istringstream words(given);
  int rank = 0, size = 0;
  std::string task, id;
  words >> rank >> size >> task;
  for (std::string byte(2, '0'); words >> byte[0] >> byte[1];)
    id += static_cast<char>(std::stoi(byte, nullptr, 16));
  ASSERT_EQ(id.size(), Communicator::kIdBytes);

  const Device device{DeviceKind::cuda, rank};
  const Communicator member = Communicator::connect(device, id, rank, size);
  EXPECT_EQ(member.rank(), rank);
  EXPECT_EQ(member.size(), size);
  const Stream stream(device);
  const auto sum = [&](int64_t count, float own) {
    const std::vector<float> values(static_cast<size_t>(count), own);
    const Memory memory(device, count * 4);
    copy(device, memory.data(), values.data(), count * 4, stream.handle());
    member.all_reduce({memory.data(), DType::f32, {count}, {}, device}, stream.handle());
    std::vector<float> sums(values.size());
    copy(device, sums.data(), memory.data(), count * 4, stream.handle());
    stream.synchronize();
    return sums;
  };
  const auto total = static_cast<float>(size * (size + 1) / 2);
  for (const int64_t count : {1, 1000, 3000001})
    EXPECT_EQ(std::ranges::count(sum(count, static_cast<float>(rank + 1)), total), count);
  if (task == "sum") return;

  // The last member goes without a word while the others wait for it. They stop by abort().
  if (rank == size - 1) std::_Exit(9);
  const Memory memory(device, 4096);
  member.all_reduce({memory.data(), DType::f32, {1024}, {}, device}, stream.handle());
  std::this_thread::sleep_for(std::chrono::seconds(1));
  member.abort();
  try {
    member.all_reduce({memory.data(), DType::f32, {1024}, {}, device}, stream.handle());
    ADD_FAILURE() << "goes on after abort()";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cancelled);
  }
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);  // the device may still have what was enqueued
}

// Starts a process for each device and returns their exit codes.
std::vector<int> exit_codes_of_members(size_t size, const char* task) {
  std::string hex;
  for (const char byte : Communicator::create_id())
    hex += fmt::format(" {:02x}", static_cast<unsigned char>(byte)).substr(1);
  std::vector<pid_t> processes(size);
  for (size_t rank = 0; rank < size; ++rank) {
    const std::string member = fmt::format("{}={} {} {} {}", kMember, rank, size, task, hex);
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
    environment.insert(environment.end(), {const_cast<char*>(member.c_str()), nullptr});
    const char* const arguments[] = {"halfbyte_cuda_tests", "--gtest_filter=AllReduceProcess.IsAMember",
                                     "--gtest_brief=1", nullptr};
    EXPECT_EQ(posix_spawn(&processes[rank], "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments),
                          environment.data()),
              0);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    EXPECT_EQ(waitpid(process, &status, 0), process);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  return codes;
}

TEST_F(AllReduceCuda, ProcessesConnectByAnId) {
  if (!cuda::find_nccl().problem.empty()) GTEST_SKIP() << cuda::find_nccl().problem;
  EXPECT_EQ(exit_codes_of_members(devices.size(), "sum"), std::vector<int>(devices.size(), 0));
}

TEST_F(AllReduceCuda, ProcessesStopWaitingForOneThatIsLost) {
  if (!cuda::find_nccl().problem.empty()) GTEST_SKIP() << cuda::find_nccl().problem;
  std::vector<int> expected(devices.size(), 0);
  expected.back() = 9;
  EXPECT_EQ(exit_codes_of_members(devices.size(), "lose"), expected);
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
