// For the tests of ops on grouped tensors (grouped/testing.h): cases on a device, compared with the CPU.
#pragma once

#include "grouped/testing.h"
#include "harness.h"

namespace halfbyte::testing {

// The tensors of a case on the device, whole storages one behind the other, in memory that is kept.
class OnDevice {
 public:
  static constexpr int64_t kWorkspace = int64_t{1} << 24;

  explicit OnDevice(int64_t num_bytes) : arena_(kCuda, num_bytes), workspace_(kCuda, kWorkspace) {}

  // The memory of each tensor. The workspace is poisoned.
  template <class Case>
  auto upload(Case& test) {
    auto memory = host_memory(test);
    int64_t at = 0;
    for (size_t i = 0; i < memory.size(); ++i) {
      const auto size = static_cast<int64_t>(test.all()[i]->bytes.size());
      if (at + size > arena_.num_bytes()) throw std::runtime_error("arena");
      const void* const host = memory[i];
      memory[i] = arena_.data() + at;
      copy(kCuda, memory[i], host, size);
      at += (size + 255) / 256 * 256;
    }
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::fill(workspace_.data(), Storage::kPoison, 1 << 16, nullptr);
    return memory;
  }
  template <class Case, size_t n>
  void download(Case& test, const std::array<void*, n>& memory) const {
    for (size_t i = 0; i < n; ++i) {
      std::vector<uint8_t>& bytes = test.all()[i]->bytes;
      copy(kCuda, bytes.data(), memory[i], static_cast<int64_t>(bytes.size()));
    }
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
  }
  const Memory& workspace() const { return workspace_; }

 private:
  Memory arena_, workspace_;
};

// What a device made of `test`, against what the CPU makes of `cpu`; false where they differ.
template <class Case>
bool expect_same(Case& cpu, Case& test, const QuantizeStatus& on_cuda) {
  const QuantizeStatus on_cpu = run_on_cpu(cpu);
  EXPECT_TRUE(same_tensors(cpu, test));
  EXPECT_TRUE(same_status(on_cpu, on_cuda))
      << test.text() << "\nCPU  " << text_of(on_cpu) << "\nCUDA " << text_of(on_cuda);
  return !::testing::Test::HasFailure();
}

// Runs a case on both; false where they differ.
template <class Case>
bool compare(Case& test, OnDevice& device) {
  Case cpu = test;
  const auto memory = device.upload(test);
  const QuantizeStatus status =
      run_case(test, memory, kCuda, device.workspace().data(), OnDevice::kWorkspace, nullptr, {});
  device.download(test, memory);
  return expect_same(cpu, test, status);
}

// The same in memory that nothing lies around, so that a checker of accesses sees what guards would hide.
template <class Case>
void compare_exact(Case& test, int64_t workspace_bytes) {
  Case cpu = test;
  std::vector<Memory> memories;
  auto memory = host_memory(test);
  for (size_t i = 0; i < memory.size(); ++i) {
    Storage& storage = *test.all()[i];
    const int64_t used = storage.num_bytes(), shift = storage.offset % 256;
    memories.emplace_back(kCuda, used + shift);
    std::byte* const at = memories.back().data() + shift;
    if (used > 0) copy(kCuda, at, storage.data(), used);
    memory[i] = used > 0 ? at - storage.offset : nullptr;
  }
  const Memory workspace(kCuda, workspace_bytes);
  const QuantizeStatus status = run_case(test, memory, kCuda, workspace.data(), workspace_bytes, nullptr, {});
  for (size_t i = 0; i < memory.size(); ++i) {
    Storage& storage = *test.all()[i];
    if (storage.num_bytes() > 0)
      copy(kCuda, storage.data(), static_cast<std::byte*>(memory[i]) + storage.offset, storage.num_bytes());
  }
  const cuda::Scope scope(cuda::context(kCuda.index));
  cuda::synchronize(nullptr);
  expect_same(cpu, test, status);
}

// Captures a run of a case, replays it with its data, with that of `other`, and again. make_args(memory).
template <class Op, class Case, class MakeArgs>
void replay(OnDevice& device, Case& test, Case& other, const MakeArgs& make_args) {
  SCOPED_TRACE(test.text());
  const Stream stream(kCuda);
  const auto memory = device.upload(test);
  const auto plan = Plan<Op>::select(kCuda, test.descriptor);
  const typename Op::Args args = make_args(memory);
  Graph graph;
  cuda::synchronize(nullptr);
  graph.capture(stream.handle(), [&] { plan.run(stream.handle(), device.workspace(), args); });
  for (Case* round : {&test, &other, &test}) {
    Case cpu = *round, result = *round;
    device.upload(*round);
    cuda::synchronize(nullptr);
    graph.launch(stream.handle());
    const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
    device.download(result, memory);
    expect_same(cpu, result, status);
  }
}

}  // namespace halfbyte::testing
