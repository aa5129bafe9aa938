// Fake quantization on a device: the bytes of the CPU for random descriptors, in place, in graphs.
#include "on_device.h"
#include "ops/fake_quantize/fake_quantize_testing.h"

namespace halfbyte {
namespace {

using testing::FakeCase;
using testing::FakeCases;
using testing::kCuda;
using testing::OnDevice;
using testing::Storage;

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

// But for that of the user.
std::vector<Format> tables() {
  std::vector<Format> formats = testing::table_formats();
  std::erase(formats, Format::lut4);
  return formats;
}

// Shapes that take each kernel: what is one of few choices by turns.
std::vector<FakeCase> usual_cases(int64_t rows, int64_t cols) {
  struct Shape {
    Granularity granularity;
    int axis;
    int64_t group_size;
  };
  std::vector<FakeCase> cases;
  FakeCases random(7);
  const std::vector<Format> formats = tables();
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
            d.format = formats[static_cast<size_t>(turn / 10) % formats.size()];
          else if (turn % 3 != 1)
            d.zero_point_dtype = d.computed || turn % 2 ? DType::i32 : d.state_dtype();
          if (kind == 2)
            d.observer.emplace().kind = turn % 2 ? ObserverKind::min_max : ObserverKind::moving_average;
          random.fill(test);
          cases.push_back(std::move(test));
        }
  // Groups along each axis: scales of x in one pass and in two, and given.
  for (const DType dtype : testing::kFloatDTypes)
    for (const int axis : {0, 1})
      for (const int kind : {0, 1, 2, 3, 4, 5}) {
        FakeCase test;
        test.in_place = ++turn % 3 == 0;
        FakeQuantizeDescriptor& d = test.descriptor;
        d.shape = {rows, cols};
        d.axis = axis;
        d.dtype = dtype;
        d.computed = kind < 4;
        if (turn % 2) d.alignment = size_of(dtype);
        random.make_block_floats(d);
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
  std::vector<std::optional<Format>> formats = {std::nullopt};
  for (const Format format : tables()) formats.emplace_back(format);
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const std::optional<Format> format : formats)
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

TEST_F(FakeQuantizeShapes, every_value_of_16_bits_as_block_floats) {
  OnDevice device(int64_t{1} << 24);
  FakeCases random(5);
  for (const DType dtype : {DType::bf16, DType::f16})
    for (int round = 0; round < 8; ++round) {
      FakeCase test;
      test.descriptor.shape = {256, 256};
      test.descriptor.axis = round % 2;
      test.descriptor.dtype = dtype;
      test.descriptor.computed = round % 4 < 2;
      random.make_block_floats(test.descriptor);
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
  for (FakeCase& test : cases) testing::compare_exact(test, OnDevice::kWorkspace);
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
      const auto memory = device.upload(test);
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
        const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
        device.download(test, memory);
        testing::expect_same(cpu, test, status);
        std::reverse(test.x.bytes.begin() + 256, test.x.bytes.end() - 256);
        cpu.x = test.x;
        copy(kCuda, memory[0], test.x.bytes.data(), static_cast<int64_t>(test.x.bytes.size()));
        cuda::synchronize(nullptr);
      }
    }
}

}  // namespace
}  // namespace halfbyte
