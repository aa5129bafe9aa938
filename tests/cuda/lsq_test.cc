// The gradients of learned scales on a device: the bytes of the CPU for random descriptors, every kernel,
// graphs.
#include "on_device.h"
#include "ops/learned_scale/learned_scale_testing.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::LsqCase;
using testing::LsqCases;
using testing::OnDevice;
using LearnedPlan = FakeQuantizeLearnedBackwardPlan;

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
  for (LsqCase& test : cases)
    testing::compare_exact(test, LearnedPlan::select(kCuda, test.descriptor).workspace_size());
}

TEST_F(LsqShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  OnDevice device(int64_t{1} << 26);
  for (LsqCase& test : usual_cases(24, 9216, {64, 1000})) {
    if (test.descriptor.dtype != DType::bf16 || test.in_place) continue;
    LsqCase other = test;
    std::reverse(other.x.bytes.begin(), other.x.bytes.end());  // of the same size; gaps too
    testing::replay<FakeQuantizeLearnedBackward>(
        device, test, other, [&](const auto& memory) { return test.args(memory, kCuda); });
  }
}

}  // namespace
}  // namespace halfbyte
