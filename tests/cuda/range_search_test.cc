// Percentile and mse ranges on a device: the bytes of the CPU for random descriptors and every kernel,
// graphs, more than 2^31 elements.
#include "formats/percentile.h"
#include "on_device.h"
#include "ops/observe/range_search_testing.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::ObserveCase;
using testing::ObserveCases;
using testing::OnDevice;
using testing::Storage;

// 8 parts, so that processes can share them.
class RangeSearchOnCuda : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(RangeSearchOnCuda, random_descriptors) {
  OnDevice device(int64_t{1} << 24);
  ObserveCases cases(static_cast<uint64_t>(GetParam()) + 300);
  std::mt19937_64 random(static_cast<uint64_t>(GetParam()) + 1);
  for (int i = 0; i < 200; ++i) {
    ObserveCase test = cases.next(i % 20 == 0 ? 40000 : i % 4 == 0 ? 5000 : 800);
    test.descriptor.observer = testing::random_search(random);
    cases.fill(test);  // its state is of another form
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, RangeSearchOnCuda, ::testing::Range(0, 8));

// Shapes that take each kernel: groups that a warp has, a block, a block with many pieces, many blocks.
std::vector<ObserveCase> usual_cases(const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<ObserveCase> cases;
  ObserveCases random(7);
  std::mt19937_64 configs(8);
  for (const DType dtype : testing::kFloatDTypes)
    for (const std::vector<int64_t>& shape : shapes)
      for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse})
        for (const int axis : {-1, 0, 1}) {
          ObserveCase test;
          ObserveDescriptor& d = test.descriptor;
          d.shape = shape;
          d.dtype = dtype;
          if (axis >= static_cast<int>(shape.size())) continue;
          if (axis >= 0) {
            d.granularity = Granularity::channel;
            d.axis = axis;
          }
          d.observer = testing::random_search(configs);
          d.observer.kind = kind;
          if (d.observer.percentile > 99) d.observer.percentile = 95;
          random.fill(test);
          cases.push_back(std::move(test));
        }
  return cases;
}

class RangeSearchShapes : public testing::CudaTest {};

TEST_F(RangeSearchShapes, groups_of_every_length) {
  OnDevice device(int64_t{1} << 24);
  for (ObserveCase& test :
       usual_cases({{20, 256}, {20, 257}, {7, 4096}, {7, 4097}, {3, 30000}, {300, 5}, {4097, 6}}))
    if (!compare(test, device)) return;
}
TEST_F(RangeSearchShapes, many_long_groups) {
  OnDevice device(int64_t{1} << 26);
  ObserveCases random(9);
  std::mt19937_64 configs(10);
  for (const DType dtype : testing::kFloatDTypes)
    for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse}) {
      ObserveCase test;
      ObserveDescriptor& d = test.descriptor;
      d.shape = {520, kind == ObserverKind::mse ? 4500 : 9001};
      d.dtype = dtype;
      d.granularity = Granularity::channel;
      d.axis = 0;
      d.observer = testing::random_search(configs);
      d.observer.kind = kind;
      d.observer.percentile = 99.9;
      random.fill(test);
      if (!compare(test, device)) return;
    }
}
TEST_F(RangeSearchShapes, a_large_tensor) {
  OnDevice device(int64_t{1} << 24);
  for (ObserveCase& test : usual_cases({{1000003}}))
    if (test.descriptor.granularity == Granularity::tensor && !compare(test, device)) return;
}

TEST_F(RangeSearchShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  OnDevice device(int64_t{1} << 24);
  ObserveCases random(5);
  for (ObserveCase& test : usual_cases({{5, 200}, {3, 9000}})) {
    if (test.descriptor.dtype != DType::bf16) continue;
    ObserveCase drawn = test, next = test;
    random.fill(drawn);
    next.x = drawn.x;  // the state has its place, which a drawn one need not have
    testing::replay<Observe>(device, test, next, [&](const auto& memory) -> Observe::Args {
      return {test.x.at(memory[0], kCuda), test.min.at(memory[1], kCuda), test.max.at(memory[2], kCuda),
              test.num_batches.at(memory[3], kCuda)};
    });
  }
}

// A group weighs a batch by those in which it had finite values itself: means of 2, of 3, of none.
TEST_F(RangeSearchShapes, each_group_has_a_mean_of_its_own) {
  for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse})
    for (const DType dtype : testing::kFloatDTypes) {
      ObserveDescriptor descriptor;
      descriptor.shape = {3, 1};
      descriptor.granularity = Granularity::channel;
      descriptor.axis = 0;
      descriptor.dtype = dtype;
      descriptor.observer.kind = kind;
      const auto plan = ObservePlan::select(kCuda, descriptor), host = ObservePlan::select({}, descriptor);
      const Memory memory(kCuda, 1024), workspace(kCuda, plan.workspace_size());
      const DType state_dtype = descriptor.state_dtype();
      const auto at = [&](int64_t offset, DType of) {
        return TensorView{memory.data() + offset, of, {3}, {}, kCuda};
      };
      const TensorView min = at(0, state_dtype), max = at(256, state_dtype), counts = at(512, DType::i64);
      reset_observer(min, max, counts);
      std::array<double, 3> low, high;
      std::array<int64_t, 3> batches;
      const TensorView host_min{low.data(), state_dtype, {3}, {}, {}},
          host_max{high.data(), state_dtype, {3}, {}, {}},
          host_counts{batches.data(), DType::i64, {3}, {}, {}};
      reset_observer(host_min, host_max, host_counts);
      alignas(16) QuantizeStatus status;
      for (const std::array<double, 3>& batch :
           {std::array<double, 3>{NAN, 8, NAN}, {NAN, 8, NAN}, {10, NAN, NAN}, {20, 16, NAN}}) {
        testing::Values x;
        x.dtype = dtype;
        for (const double value : batch) x.push_back(value);
        copy(kCuda, memory.data() + 768, x.bytes.data(), static_cast<int64_t>(x.bytes.size()));
        plan.run(nullptr, workspace, {{memory.data() + 768, dtype, {3, 1}, {}, kCuda}, min, max, counts});
        plan.status(nullptr, workspace);
        host.run(nullptr, {&status, sizeof status}, {x.view({3, 1}), host_min, host_max, host_counts});
      }
      const ObserverState state = load_observer(min, max, counts);
      EXPECT_EQ(state, load_observer(host_min, host_max, host_counts)) << to_string(dtype);
      EXPECT_EQ(state.num_batches, std::vector<int64_t>({2, 3, 0}));
      if (kind == ObserverKind::percentile) {
        EXPECT_EQ(state.max[0], 15);
      }
    }
}

// Every kernel once, in memory that nothing lies around.
class SanitizeRangeSearch : public testing::CudaTest {};

TEST_F(SanitizeRangeSearch, every_kernel) {
  std::vector<ObserveCase> cases = usual_cases({{5, 72}, {2, 600}, {2, 4500}});
  ObserveCases random(11);
  for (const ObserverKind kind : {ObserverKind::percentile, ObserverKind::mse}) {
    ObserveCase test;
    test.descriptor.shape = {513, 4097};
    test.descriptor.granularity = Granularity::channel;
    test.descriptor.axis = 0;
    test.descriptor.dtype = DType::f16;
    test.descriptor.observer.kind = kind;
    test.descriptor.observer.percentile = 99;
    random.fill(test);
    cases.push_back(std::move(test));
  }
  for (ObserveCase& test : cases)
    testing::compare_exact(test, ObservePlan::select(kCuda, test.descriptor).workspace_size());
}

// ---- More than 2^31 elements

class ExhaustiveRangeSearch : public testing::CudaTest {
 protected:
  static constexpr int64_t kCount = (int64_t{1} << 31) + 1;

  static ObserverState observe(const Memory& x, const ObserverConfig& config) {
    ObserveDescriptor descriptor;
    descriptor.shape = {kCount};
    descriptor.dtype = DType::bf16;
    descriptor.observer = config;
    const auto plan = ObservePlan::select(kCuda, descriptor);
    const Memory state(kCuda, 16), workspace(kCuda, plan.workspace_size());
    const TensorView min{state.data(), DType::f32, {}, {}, kCuda},
        max{state.data() + 4, DType::f32, {}, {}, kCuda},
        num_batches{state.data() + 8, DType::i64, {}, {}, kCuda};
    reset_observer(min, max, num_batches);
    plan.run(nullptr, workspace,
             {{x.data(), DType::bf16, descriptor.shape, {}, kCuda}, min, max, num_batches});
    EXPECT_EQ(plan.status(nullptr, workspace).num_nonfinite, config.kind == ObserverKind::percentile ? 1 : 0);
    return load_observer(min, max, num_batches);
  }
};

// One element more or less above the rank decides.
TEST_F(ExhaustiveRangeSearch, percentiles) {
  const Memory x(kCuda, kCount * 2);
  const cuda::Scope scope(cuda::context(kCuda.index));
  ObserverConfig config;
  config.kind = ObserverKind::percentile;
  config.percentile = 90;
  const int64_t finite = kCount - 1, k = formats::percentile_rank(config.percentile, finite);
  const double low = static_cast<double>(formats::bf16_to_f32(0xC0C0)),
               middle = static_cast<double>(formats::bf16_to_f32(0x3F3F)),
               high = static_cast<double>(formats::bf16_to_f32(0x4040));
  for (const int64_t more : {0, 1}) {
    const int64_t above = finite - k + more;  // as many below
    cuda::fill(x.data(), 0x3F, x.num_bytes(), nullptr);
    cuda::fill(x.data(), 0xC0, above * 2, nullptr);
    cuda::fill(x.data() + (kCount - above) * 2, 0x40, above * 2, nullptr);
    const uint16_t nan = 0x7FC0;
    cuda::copy(x.data() + (kCount / 2) * 2, &nan, 2, nullptr);
    cuda::synchronize(nullptr);
    const ObserverState state = observe(x, config);
    EXPECT_EQ(state.min[0], more != 0 ? low : middle);
    EXPECT_EQ(state.max[0], more != 0 ? high : middle);
  }
}

// Copies of a block whose length is a power of two, and a zero, have the errors of the block times a power of
// two, and so the same range.
TEST_F(ExhaustiveRangeSearch, least_errors) {
  constexpr int64_t kBlock = 1 << 18;
  const Memory x(kCuda, kCount * 2);
  const cuda::Scope scope(cuda::context(kCuda.index));
  testing::Values values;
  values.dtype = DType::bf16;
  for (const float value : testing::values_of(testing::Shape::heavy, kBlock, 3))
    values.push_back(static_cast<double>(value));
  cuda::fill(x.data(), 0, x.num_bytes(), nullptr);
  copy(kCuda, x.data(), values.bytes.data(), kBlock * 2);
  for (int64_t n = kBlock; n < kCount - 1; n *= 2) cuda::copy(x.data() + n * 2, x.data(), n * 2, nullptr);
  cuda::synchronize(nullptr);
  for (const bool asymmetric : {false, true}) {
    ObserverConfig config;
    config.kind = ObserverKind::mse;
    config.qparams = QParamsConfig::of_bits(4, asymmetric);
    ObserveCase block;
    block.descriptor.shape = {kBlock};
    block.descriptor.dtype = DType::bf16;
    block.descriptor.observer = config;
    const float infinity = INFINITY, minus_infinity = -INFINITY;
    const int64_t none = 0;
    block.x = Storage(DType::bf16, {kBlock}, values.bytes.data());
    block.min = Storage(DType::f32, {}, &infinity);
    block.max = Storage(DType::f32, {}, &minus_infinity);
    block.num_batches = Storage(DType::i64, {}, &none);
    testing::run_on_cpu(block);
    const ObserverState expected =
        load_observer(block.min.at(block.min.bytes.data(), {}), block.max.at(block.max.bytes.data(), {}),
                      block.num_batches.at(block.num_batches.bytes.data(), {}));
    EXPECT_EQ(observe(x, config), expected) << asymmetric;
  }
}

}  // namespace
}  // namespace halfbyte
