// The gradients of learned scales on a device: the bytes of the CPU for random descriptors, every kernel,
// graphs.
#include "harness.h"
#include "ops/learned_scale/learned_scale_testing.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::LsqCase;
using testing::LsqCases;
using testing::Storage;
using LearnedPlan = FakeQuantizeLearnedBackwardPlan;

constexpr int64_t kWorkspace = int64_t{1} << 22;

// The tensors of a case on the device, one behind the other, in memory that is kept.
class OnDevice {
 public:
  explicit OnDevice(int64_t num_bytes) : arena_(kCuda, num_bytes), workspace_(kCuda, kWorkspace) {}

  std::array<void*, 7> upload(LsqCase& test) {
    std::array<void*, 7> memory{};
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
    cuda::fill(workspace_.data(), 0xA5, kWorkspace, nullptr);
    return memory;
  }
  void* workspace() const { return workspace_.data(); }
  void download(LsqCase& test, const std::array<void*, 7>& memory) {
    size_t i = 0;
    for (Storage* storage : test.all())
      copy(kCuda, storage->bytes.data(), memory[i++], static_cast<int64_t>(storage->bytes.size()));
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
  }

 private:
  Memory arena_, workspace_;
};

QuantizeStatus run_on_cpu(LsqCase& test) {
  std::array<void*, 7> memory{};
  size_t i = 0;
  for (Storage* storage : test.all()) memory[i++] = storage->bytes.data();
  alignas(16) QuantizeStatus workspace;
  return testing::run_lsq(test, memory, Device{}, &workspace, sizeof workspace);
}

::testing::AssertionResult same(LsqCase& cpu, LsqCase& cuda) {
  constexpr std::array kNames = {"x", "dy", "scale", "zero_point", "dx", "dscale", "dzero_point"};
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

// Runs a case on both; false where they differ.
bool compare(LsqCase& test, OnDevice& device) {
  LsqCase cpu = test;
  const auto memory = device.upload(test);
  const QuantizeStatus on_cuda = testing::run_lsq(test, memory, kCuda, device.workspace(), kWorkspace);
  device.download(test, memory);
  const QuantizeStatus on_cpu = run_on_cpu(cpu);
  EXPECT_TRUE(same(cpu, test)) << test.text();
  EXPECT_TRUE(testing::same_status(on_cpu, on_cuda))
      << test.text() << "\nCPU  " << testing::text_of(on_cpu) << "\nCUDA " << testing::text_of(on_cuda);
  return !::testing::Test::HasFailure();
}

// 8 parts, so that processes can share them.
class Lsq : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(Lsq, random_descriptors) {
  OnDevice device(int64_t{1} << 26);
  LsqCases cases(static_cast<uint64_t>(GetParam()) + 2000);
  for (int i = 0; i < 500; ++i) {
    LsqCase test = cases.next(i % 40 == 0 ? 300000 : i % 4 == 0 ? 6000 : 600);
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, Lsq, ::testing::Range(0, 8));

struct Shape {
  Granularity granularity;
  int axis;
  int64_t group_size;
  std::vector<int64_t> shape;
};
// Cases that take each kernel; groups of `sizes` elements along the last axis.
std::vector<LsqCase> usual_cases(int64_t rows, int64_t cols, const std::vector<int64_t>& sizes) {
  std::vector<Shape> shapes = {
      {Granularity::tensor, -1, 0, {rows, cols}},   {Granularity::channel, 0, 0, {rows, cols}},
      {Granularity::channel, 1, 0, {rows, cols}},   {Granularity::group, 0, 40, {rows, cols}},
      {Granularity::group, 1, 32, {3, rows, cols}}, {Granularity::channel, 1, 0, {3, rows, cols}}};
  for (const int64_t size : sizes) shapes.push_back({Granularity::group, -1, size, {rows, cols}});
  std::vector<LsqCase> cases;
  LsqCases random(7);
  for (const DType dtype : testing::kFloatDTypes)
    for (const int zero : {0, 1, 2})
      for (const Shape& shape : shapes) {
        LsqCase test;
        FakeQuantizeDescriptor& d = test.descriptor;
        d.shape = shape.shape;
        d.granularity = shape.granularity;
        d.axis = shape.axis;
        d.group_size = shape.group_size;
        d.dtype = dtype;
        d.scale_dtype = zero == 1 ? dtype : DType::f32;
        if (zero == 1) d.zero_point_dtype = d.state_dtype();
        if (zero == 2) d.format = Format::nf4;
        d.gradient_scale = 0.01;
        test.in_place = zero == 2;
        random.fill(test);
        cases.push_back(std::move(test));
      }
  return cases;
}

class LsqShapes : public testing::CudaTest {};

// Groups of 2^0 to 2^10 chunks, and between.
TEST_F(LsqShapes, of_many_blocks) {
  OnDevice device(int64_t{1} << 26);
  for (LsqCase& test :
       usual_cases(132, 4608, {8, 16, 24, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 4608}))
    if (!compare(test, device)) return;
}
TEST_F(LsqShapes, groups_of_several_blocks) {
  OnDevice device(int64_t{1} << 27);
  for (LsqCase& test : usual_cases(3, 140000, {10000, 20480, 70000}))
    if (!compare(test, device)) return;
}
// Totals in several stages: more than 16384 pieces.
TEST_F(LsqShapes, sums_of_many_pieces) {
  OnDevice device(int64_t{1} << 28);
  LsqCases random(8);
  LsqCase test;
  test.descriptor.shape = {(int64_t{1} << 24) + 12};
  test.descriptor.zero_point_dtype = DType::f32;
  test.descriptor.alignment = 4;
  random.fill(test);
  compare(test, device);
}
// Quotients at all distances from ties, tiny elements, scales at the ends of the fast way.
TEST_F(LsqShapes, every_f16_by_many_scales) {
  OnDevice device(int64_t{1} << 26);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    LsqCases random(9);
    LsqCase test;
    FakeQuantizeDescriptor& d = test.descriptor;
    d.shape = {64, 65536};
    d.granularity = Granularity::channel;
    d.axis = 0;
    d.dtype = dtype;
    d.zero_point_dtype = DType::f32;
    random.fill(test);
    for (int64_t i = 0; i < 64 * 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(test.x.bytes.data() + test.x.offset + 2 * i, &bits, 2);
    }
    for (int64_t i = 0; i < 64; ++i) {
      const auto scale = static_cast<float>(std::exp2(4 * i - 130) * (1 + 0.013 * static_cast<double>(i)));
      std::memcpy(test.scale.bytes.data() + test.scale.offset + 4 * i, &scale, 4);
    }
    if (!compare(test, device)) return;
  }
}

// Every kernel once, at shapes with tails, in memory that nothing lies around.
class SanitizeLsq : public testing::CudaTest {};

TEST_F(SanitizeLsq, every_kernel) {
  std::vector<LsqCase> cases = usual_cases(5, 72, {8, 24, 64});
  for (LsqCase& test : usual_cases(2, 9000, {8992})) cases.push_back(std::move(test));
  LsqCases random(11);
  for (int i = 0; i < 60; ++i) cases.push_back(random.next(200));
  for (LsqCase& test : cases) {
    SCOPED_TRACE(test.text());
    LsqCase cpu = test;
    std::vector<Memory> memories;
    std::array<void*, 7> memory{};
    size_t i = 0;
    for (Storage* storage : test.all()) {  // without what lies around
      const auto size = static_cast<int64_t>(storage->bytes.size());
      const int64_t used = size == 0 ? 0 : size - storage->offset - 256, shift = storage->offset % 256;
      memories.emplace_back(kCuda, used + shift);
      std::byte* const at = memories.back().data() + shift;
      if (used > 0) copy(kCuda, at, storage->bytes.data() + storage->offset, used);
      memory[i++] = used > 0 ? at - storage->offset : nullptr;
    }
    const auto plan = LearnedPlan::select(kCuda, test.descriptor);
    const Memory workspace(kCuda, plan.workspace_size());
    plan.run(nullptr, workspace.data(), test.args(memory, kCuda));
    const QuantizeStatus status = plan.status(workspace.data());
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

// Captures a run of a case of each kernel, replays it with its data, with other data, and again.
TEST_F(LsqShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  OnDevice device(int64_t{1} << 26);
  for (LsqCase& test : usual_cases(24, 9216, {64, 1000})) {
    if (test.descriptor.dtype != DType::bf16 || test.in_place) continue;
    SCOPED_TRACE(test.text());
    LsqCase other = test;
    std::reverse(other.x.bytes.begin(), other.x.bytes.end());  // of the same size; gaps too
    const Stream stream(kCuda);
    const auto memory = device.upload(test);
    const auto plan = LearnedPlan::select(kCuda, test.descriptor);
    const auto args = test.args(memory, kCuda);
    testing::Graph graph;
    cuda::synchronize(nullptr);
    graph.capture(stream.handle(), [&] { plan.run(stream.handle(), device.workspace(), args); });
    for (LsqCase* round : {&test, &other, &test}) {
      LsqCase cpu = *round, result = *round;
      device.upload(*round);
      cuda::synchronize(nullptr);
      graph.launch(stream.handle());
      const QuantizeStatus status = plan.status(device.workspace(), stream.handle());
      device.download(result, memory);
      EXPECT_TRUE(testing::same_status(run_on_cpu(cpu), status));
      EXPECT_TRUE(same(cpu, result));
    }
  }
}

}  // namespace
}  // namespace halfbyte
