// Fake quantization on a device: the bytes of the CPU for random descriptors, in place, in graphs.
#include "harness.h"
#include "ops/fake_quantize/fake_quantize_testing.h"

namespace halfbyte {
namespace {

using testing::FakeCase;
using testing::FakeCases;
using testing::kCuda;
using testing::Storage;
using Addresses = std::array<void*, 9>;

constexpr int64_t kWorkspace = int64_t{1} << 22;

Addresses host_memory(FakeCase& test) {
  Addresses memory{};
  size_t i = 0;
  for (Storage* storage : test.all()) memory[i++] = storage->bytes.data();
  return memory;
}
QuantizeStatus run_on_cpu(FakeCase& test) {
  alignas(16) QuantizeStatus workspace;
  return testing::run_fake(test, host_memory(test), Device{}, &workspace, sizeof workspace);
}

::testing::AssertionResult same(FakeCase& cpu, FakeCase& cuda) {
  constexpr std::array kNames = {"x", "mask", "dy", "scale", "zero_point", "min", "max", "num_batches", "y"};
  const auto all = cuda.all();
  size_t i = 0;
  for (const Storage* storage : cpu.all()) {
    const auto result =
        testing::same_bytes(kNames[i], storage->bytes.data(), all[i]->bytes.data(), storage->bytes.size());
    if (!result) return result;
    ++i;
  }
  return ::testing::AssertionSuccess();
}

// The tensors of a case on the device, one behind the other in memory that is kept.
class OnDevice {
 public:
  explicit OnDevice(int64_t num_bytes) : arena_(kCuda, num_bytes), workspace_(kCuda, kWorkspace) {}

  Addresses upload(FakeCase& test) {
    Addresses memory{};
    int64_t at = 0;
    size_t i = 0;
    for (const Storage* storage : test.all()) {
      memory[i] = arena_.data() + at;
      const auto size = static_cast<int64_t>(storage->bytes.size());
      if (at + size > arena_.num_bytes()) throw std::runtime_error("arena");
      copy(kCuda, memory[i++], storage->bytes.data(), size);
      at += (size + 255) / 256 * 256;
    }
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::fill(workspace_.data(), 0xA5, 4096, nullptr);
    return memory;
  }
  void download(FakeCase& test, const Addresses& memory) {
    size_t i = 0;
    for (Storage* storage : test.all())
      copy(kCuda, storage->bytes.data(), memory[i++], static_cast<int64_t>(storage->bytes.size()));
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
  }
  void* workspace() const { return workspace_.data(); }

 private:
  Memory arena_, workspace_;
};

// Runs a case on both; false where they differ.
bool compare(FakeCase& test, OnDevice& device) {
  FakeCase cpu = test;
  const Addresses memory = device.upload(test);
  const QuantizeStatus on_cuda = testing::run_fake(test, memory, kCuda, device.workspace(), kWorkspace);
  device.download(test, memory);
  const QuantizeStatus on_cpu = run_on_cpu(cpu);
  EXPECT_TRUE(same(cpu, test)) << test.text();
  EXPECT_TRUE(testing::same_status(on_cpu, on_cuda))
      << test.text() << "\nCPU  " << testing::text_of(on_cpu) << "\nCUDA " << testing::text_of(on_cuda);
  return !::testing::Test::HasFailure();
}

// 16 parts, so that processes can share them.
class FakeQuantizeRandom : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(FakeQuantizeRandom, descriptors) {
  OnDevice device(int64_t{1} << 26);
  FakeCases cases(static_cast<uint64_t>(GetParam()) + 1000);
  for (int i = 0; i < 640; ++i) {
    FakeCase test = cases.next(i % 40 == 0 ? 100000 : i % 4 == 0 ? 5000 : 600);
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, FakeQuantizeRandom, ::testing::Range(0, 16));

// Shapes that take each kernel: what is one of few choices by turns.
std::vector<FakeCase> usual_cases(int64_t rows, int64_t cols) {
  struct Shape {
    Granularity granularity;
    int axis;
    int64_t group_size;
  };
  std::vector<FakeCase> cases;
  FakeCases random(7);
  int turn = 0;
  for (const DType dtype : testing::kFloatDTypes)
    for (const Shape& shape : {Shape{Granularity::tensor, -1, 0}, Shape{Granularity::channel, 0, 0},
                               Shape{Granularity::channel, 1, 0}, Shape{Granularity::group, 1, 64},
                               Shape{Granularity::group, 0, 32}, Shape{Granularity::group, 1, 200},
                               Shape{Granularity::group, 1, cols}})
      for (const bool table : {false, true})
        for (const int kind : {0, 1, 2, 3, 4}) {  // given, computed, observed, backward from x, from the mask
          FakeCase test;
          test.forward = kind < 3;
          test.in_place = ++turn % 3 == 0;
          FakeQuantizeDescriptor& d = test.descriptor;
          d.shape = {rows, cols};
          d.granularity = shape.granularity;
          d.axis = shape.axis;
          d.group_size = shape.group_size;
          d.dtype = dtype;
          d.scale_dtype = turn % 2 ? DType::f32 : dtype;
          d.mask = kind == 4 || (test.forward && turn % 4 < 2);
          d.computed = kind == 1 || kind == 2;
          if (table)
            d.format = turn % 5 == 0 ? Format::fp4 : turn % 5 == 1 ? Format::fp4_e2m1 : Format::nf4;
          else if (turn % 3 != 1)
            d.zero_point_dtype = d.computed || turn % 2 ? DType::i32 : d.state_dtype();
          if (kind == 2)
            d.observer.emplace().kind = turn % 2 ? ObserverKind::min_max : ObserverKind::moving_average;
          random.fill(test);
          cases.push_back(std::move(test));
        }
  return cases;
}

class FakeQuantizeShapes : public testing::CudaTest {};

TEST_F(FakeQuantizeShapes, of_many_blocks) {
  OnDevice device(int64_t{1} << 26);
  for (FakeCase& test : usual_cases(264, 2304))
    if (!compare(test, device)) return;
}
TEST_F(FakeQuantizeShapes, rows_that_a_block_has) {
  OnDevice device(int64_t{1} << 26);
  for (const int64_t cols : {6144, 12288, 24576})
    for (FakeCase& test : usual_cases(3, cols))
      if (!compare(test, device)) return;
}
TEST_F(FakeQuantizeShapes, long_rows) {
  OnDevice device(int64_t{1} << 26);
  for (FakeCase& test : usual_cases(3, 40000))
    if (!compare(test, device)) return;
}

// Each value of bf16, and what lies about every edge of a table, by the fast way and the other.
TEST_F(FakeQuantizeShapes, every_value_of_16_bits) {
  OnDevice device(int64_t{1} << 24);
  FakeCases random(3);
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const std::optional<Format> format : {std::optional<Format>(), std::optional(Format::nf4),
                                               std::optional(Format::fp4), std::optional(Format::fp4_e2m1)})
      for (int round = 0; round < 4; ++round) {
        FakeCase test;
        test.descriptor.shape = {256, 256};
        test.descriptor.granularity = Granularity::channel;
        test.descriptor.axis = round % 2;
        test.descriptor.dtype = dtype;
        test.descriptor.format = format;
        test.descriptor.mask = true;
        random.fill(test);
        for (uint16_t i = 0;; ++i) {
          std::memcpy(test.x.bytes.data() + test.x.offset + 2 * i, &i, 2);
          if (i == 0xFFFF) break;
        }
        if (!compare(test, device)) return;
      }
}

// Every kernel once, at shapes with tails, in memory that nothing lies around.
class SanitizeFakeQuantize : public testing::CudaTest {};

TEST_F(SanitizeFakeQuantize, every_kernel) {
  std::vector<FakeCase> cases = usual_cases(5, 72);
  FakeCases random(11);
  for (int i = 0; i < 60; ++i) cases.push_back(random.next(200));
  for (const int64_t cols : {1000 * 8, 2000 * 8}) {  // blocks of 4 and 8 chunks a thread
    FakeCase test;
    FakeQuantizeDescriptor& d = test.descriptor;
    d.shape = {2, cols};
    d.granularity = Granularity::group;
    d.group_size = cols;
    d.dtype = DType::bf16;
    d.computed = d.mask = true;
    d.observer.emplace();
    random.fill(test);
    cases.push_back(test);
  }
  for (FakeCase& test : cases) {
    SCOPED_TRACE(test.text());
    FakeCase cpu = test;
    std::vector<Memory> memories;
    Addresses memory{};
    size_t i = 0;
    for (Storage* storage : test.all()) {  // without what lies around
      const auto size = static_cast<int64_t>(storage->bytes.size());
      const int64_t used = size == 0 ? 0 : size - storage->offset - 256, shift = storage->offset % 256;
      memories.emplace_back(kCuda, used + shift);
      std::byte* const at = memories.back().data() + shift;
      if (used > 0) copy(kCuda, at, storage->bytes.data() + storage->offset, used);
      memory[i++] = used > 0 ? at - storage->offset : nullptr;
    }
    const Memory workspace(kCuda, kWorkspace);
    const QuantizeStatus status = testing::run_fake(test, memory, kCuda, workspace.data(), kWorkspace);
    const QuantizeStatus expected = run_on_cpu(cpu);
    i = 0;
    for (Storage* storage : test.all()) {
      if (!storage->bytes.empty())
        copy(kCuda, storage->bytes.data() + storage->offset,
             static_cast<std::byte*>(memory[i]) + storage->offset,
             static_cast<int64_t>(storage->bytes.size()) - storage->offset - 256);
      ++i;
    }
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
    EXPECT_TRUE(same(cpu, test));
    EXPECT_TRUE(testing::same_status(expected, status)) << testing::text_of(status);
  }
}

// Captured once and replayed with other data: the state of the observer goes on from where it was.
TEST_F(FakeQuantizeShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  FakeCases random(5);
  for (const int64_t group_size : {64, 24})  // fused, and in three kernels
    for (const bool observed : {false, true}) {
      FakeCase test;
      FakeQuantizeDescriptor& d = test.descriptor;
      d.shape = {24, 192};
      d.granularity = Granularity::group;
      d.group_size = group_size;
      d.dtype = DType::bf16;
      d.zero_point_dtype = DType::i32;
      d.mask = true;
      d.computed = true;
      if (observed) d.observer.emplace().kind = ObserverKind::moving_average;
      random.fill(test);
      OnDevice device(int64_t{1} << 24);
      const Stream stream(kCuda);
      const Addresses memory = device.upload(test);
      const auto plan = FakeQuantizePlan::select(kCuda, d);
      const auto at = [&](const Storage& storage, size_t i) { return storage.at(memory[i], kCuda); };
      const FakeQuantize::Args args{at(test.x, 0),          at(test.y, 8),          at(test.scale, 3),
                                    at(test.zero_point, 4), at(test.mask, 1),       at(test.min, 5),
                                    at(test.max, 6),        at(test.num_batches, 7)};
      testing::Graph graph;
      cuda::synchronize(nullptr);
      graph.capture(stream.handle(), [&] { plan.run(stream.handle(), device.workspace(), args); });
      FakeCase cpu = test;
      for (int round = 0; round < 3; ++round) {
        graph.launch(stream.handle());
        const QuantizeStatus status = plan.status(device.workspace(), stream.handle());
        device.download(test, memory);
        EXPECT_TRUE(testing::same_status(run_on_cpu(cpu), status)) << test.text();
        EXPECT_TRUE(same(cpu, test)) << test.text();
        std::reverse(test.x.bytes.begin() + 256, test.x.bytes.end() - 256);
        cpu.x = test.x;
        copy(kCuda, memory[0], test.x.bytes.data(), static_cast<int64_t>(test.x.bytes.size()));
        cuda::synchronize(nullptr);
      }
    }
}

}  // namespace
}  // namespace halfbyte
