// Observers and their scales on a device: the bytes of the CPU for random descriptors, graphs, large tensors.
#include <thread>

#include "on_device.h"
#include "ops/compute_qparams/compute_qparams_testing.h"
#include "ops/observe/observe_testing.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::ObserveCase;
using testing::ObserveCases;
using testing::OnDevice;
using testing::Storage;

// 8 parts, so that processes can share them.
class ObserveOnCuda : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(ObserveOnCuda, random_descriptors) {
  OnDevice device(int64_t{1} << 26);
  ObserveCases cases(static_cast<uint64_t>(GetParam()) + 100);
  for (int i = 0; i < 500; ++i) {
    ObserveCase test = cases.next(i % 20 == 0 ? 300000 : i % 4 == 0 ? 9000 : 800);
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, ObserveOnCuda, ::testing::Range(0, 8));

ObserveDescriptor described(std::vector<int64_t> shape, Granularity granularity, int axis = -1,
                            int64_t group_size = 0) {
  ObserveDescriptor descriptor;
  descriptor.shape = std::move(shape);
  descriptor.granularity = granularity;
  descriptor.axis = axis;
  descriptor.group_size = group_size;
  return descriptor;
}

// Shapes that take each kernel, several blocks of it.
std::vector<ObserveCase> usual_cases(int64_t rows, int64_t cols) {
  std::vector<ObserveCase> cases;
  ObserveCases random(7);
  constexpr Granularity kChannel = Granularity::channel, kGroup = Granularity::group;
  for (const DType dtype : testing::kFloatDTypes)
    for (const ObserveDescriptor& shape :
         {described({rows, cols}, Granularity::tensor), described({rows * cols + 3}, Granularity::tensor),
          described({rows, cols}, kChannel, 0), described({rows, cols}, kChannel, 1),
          described({3, rows, cols}, kChannel, 1), described({rows, cols}, kGroup, 1, 64),
          described({rows, cols}, kGroup, 1, 16), described({rows, cols}, kGroup, 1, 200),
          described({rows, cols}, kGroup, 1, 24), described({rows, cols}, kGroup, 1, 256),
          described({rows, cols}, kGroup, 0, 32), described({rows, cols}, kGroup, 0, 1000),
          described({rows, cols - 1}, kGroup, 1, 33), described({rows, cols - 1}, kChannel, 1)})
      for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average}) {
        ObserveCase test;
        test.descriptor = shape;
        test.descriptor.dtype = dtype;
        test.descriptor.observer.kind = kind;
        random.fill(test);
        cases.push_back(std::move(test));
      }
  return cases;
}

class ObserveShapes : public testing::CudaTest {};

TEST_F(ObserveShapes, of_many_blocks) {
  OnDevice device(int64_t{1} << 26);
  for (ObserveCase& test : usual_cases(264, 2304))
    if (!compare(test, device)) return;
}
TEST_F(ObserveShapes, long_rows) {
  OnDevice device(int64_t{1} << 26);
  for (ObserveCase& test : usual_cases(5, 40000))
    if (!compare(test, device)) return;
}
TEST_F(ObserveShapes, long_columns) {
  OnDevice device(int64_t{1} << 26);
  for (ObserveCase& test : usual_cases(40000, 16))
    if (!compare(test, device)) return;
}
// Enough rows that blocks have one each.
TEST_F(ObserveShapes, many_long_rows) {
  OnDevice device(int64_t{1} << 26);
  ObserveCases random(8);
  for (const DType dtype : testing::kFloatDTypes)
    for (const int64_t cols : {520, 1032, 4800}) {
      ObserveCase test;
      test.descriptor = described({600, cols}, Granularity::channel, 0);
      test.descriptor.dtype = dtype;
      random.fill(test);
      if (!compare(test, device)) return;
    }
}

// A value alone, at every place: that none is left out.
TEST_F(ObserveShapes, every_element_counts) {
  OnDevice device(int64_t{1} << 22);
  ObserveCases random(9);
  for (const ObserveDescriptor& shape :
       {described({2, 136}, Granularity::tensor), described({2, 131}, Granularity::tensor),
        described({2, 136}, Granularity::channel, 0), described({34, 16}, Granularity::channel, 1),
        described({2, 136}, Granularity::group, 1, 40), described({34, 8}, Granularity::group, 0, 16),
        described({2, 4, 32}, Granularity::channel, 1), described({7, 13}, Granularity::channel, 1)})
    for (const double value : {2.0, -2.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      ObserveCase test;
      test.descriptor = shape;
      test.descriptor.dtype = DType::bf16;
      const int64_t n = contiguous_bytes(DType::u8, shape.shape);
      const auto plan = ObservePlan::select(kCuda, test.descriptor);
      for (int64_t i = 0; i < n; i += 1 + i % 3) {
        testing::Values x;
        x.dtype = DType::bf16;
        for (int64_t k = 0; k < n; ++k) x.push_back(k == i ? value : 0.5);
        random.fill(test);
        test.x = Storage(DType::bf16, shape.shape, x.bytes.data());
        if (!compare(test, device)) return;
      }
    }
}

// Every kernel once, at shapes with tails, in memory that nothing lies around.
class SanitizeObserve : public testing::CudaTest {};

TEST_F(SanitizeObserve, every_kernel) {
  std::vector<ObserveCase> cases = usual_cases(5, 72);
  ObserveCases random(11);
  for (int i = 0; i < 60; ++i) cases.push_back(random.next(200));
  for (const int64_t rows : {3, 600}) {  // blocks with parts, and with groups
    ObserveCase test;
    test.descriptor = described({rows, 2064}, Granularity::channel, 0);
    random.fill(test);
    cases.push_back(test);
  }
  for (ObserveCase& test : cases)
    testing::compare_exact(test, ObservePlan::select(kCuda, test.descriptor).workspace_size());
}

// ---- Graphs

TEST_F(ObserveShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  ObserveCases random(5);
  for (const ObserveDescriptor& shape :
       {described({24, 192}, Granularity::group, 1, 64), described({240, 192}, Granularity::channel, 1),
        described({1000, 200}, Granularity::tensor), described({23, 7}, Granularity::channel, 1)}) {
    ObserveCase test;
    test.descriptor = shape;
    test.descriptor.observer.kind = ObserverKind::moving_average;
    random.fill(test);
    SCOPED_TRACE(test.text());
    ObserveCase next = test;  // the state goes on from batch to batch
    random.fill(next);
    OnDevice device(int64_t{1} << 24);
    const Stream stream(kCuda);
    const auto memory = device.upload(test);
    const auto plan = ObservePlan::select(kCuda, test.descriptor);
    const Observe::Args args{test.x.at(memory[0], kCuda), test.min.at(memory[1], kCuda),
                             test.max.at(memory[2], kCuda), test.num_batches.at(memory[3], kCuda)};
    testing::Graph graph;
    cuda::synchronize(nullptr);
    graph.capture(stream.handle(), [&] { plan.run(stream.handle(), device.workspace(), args); });
    ObserveCase cpu = test;
    for (const ObserveCase* round : {&test, &next, &test}) {
      cpu.x = round->x;
      copy(kCuda, memory[0], cpu.x.bytes.data(), static_cast<int64_t>(cpu.x.bytes.size()));
      cuda::synchronize(nullptr);
      graph.launch(stream.handle());
      const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
      ObserveCase result = cpu;
      device.download(result, memory);
      testing::expect_same(cpu, result, status);
    }
  }
}

TEST_F(ObserveShapes, threads_share_a_plan) {
  ObserveDescriptor descriptor = described({512, 1024}, Granularity::channel, 1);
  descriptor.dtype = DType::f16;
  const auto plan = ObservePlan::select(kCuda, descriptor);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      OnDevice device(int64_t{1} << 22);
      const Stream stream(kCuda);
      ObserveCases random(t);
      for (int i = 0; i < 5; ++i) {
        ObserveCase test;
        test.descriptor = descriptor;
        random.fill(test);
        ObserveCase cpu = test;
        const auto memory = device.upload(test);
        plan.run(stream.handle(), device.workspace(),
                 {test.x.at(memory[0], kCuda), test.min.at(memory[1], kCuda), test.max.at(memory[2], kCuda),
                  test.num_batches.at(memory[3], kCuda)});
        const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
        device.download(test, memory);
        testing::expect_same(cpu, test, status);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ObserveShapes, states_are_reset_stored_and_loaded) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Memory low(kCuda, 24), high(kCuda, 24), batches(kCuda, 8);
    const TensorView min{low.data(), dtype, {3}, {}, kCuda}, max{high.data(), dtype, {3}, {}, kCuda},
        num_batches{batches.data(), DType::i64, {}, {}, kCuda};
    const Stream stream(kCuda);
    reset_observer(min, max, num_batches, stream.handle());
    EXPECT_EQ(load_observer(min, max, num_batches, stream.handle()), ObserverState::empty(3, dtype));
    ObserverState state = ObserverState::empty(3, dtype);
    state.update({}, std::vector<double>{-1, 0, 2}, std::vector<double>{1, 0, 3});
    store_observer(state, min, max, num_batches, stream.handle());
    EXPECT_EQ(load_observer(min, max, num_batches, stream.handle()), state);
    const Memory counts(kCuda, 24);
    const TensorView each{counts.data(), DType::i64, {3}, {}, kCuda};
    reset_observer(min, max, each, stream.handle());
    state = ObserverState::empty(3, dtype, ObserverKind::mse);
    EXPECT_EQ(load_observer(min, max, each, stream.handle()), state);
    state.min = state.max = {1, 2, 3};
    state.num_batches = {4, 5, 6};
    store_observer(state, min, max, each, stream.handle());
    EXPECT_EQ(load_observer(min, max, each, stream.handle()), state);
  }
}

// ---- More than 2^31 elements, with something to find at the end.

class ExhaustiveObserve : public testing::CudaTest {};

TEST_F(ExhaustiveObserve, more_than_2_31_elements) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 1, kCols = 4096, kRows = (int64_t{1} << 31) / kCols + 1;
  const Memory x(kCuda, kRows * kCols * 2), low(kCuda, kCols * 4), high(kCuda, kCols * 4), batches(kCuda, 8);
  const cuda::Scope scope(cuda::context(kCuda.index));
  const auto set = [&](int64_t index, double value) {
    const uint16_t bits = formats::to_bf16(value);
    cuda::copy(x.data() + 2 * index, &bits, 2, nullptr);
    cuda::synchronize(nullptr);
  };
  const auto observe = [&](const ObserveDescriptor& shape, int64_t offset) {
    ObserveDescriptor descriptor = shape;
    descriptor.dtype = DType::bf16;
    const auto plan = ObservePlan::select(kCuda, descriptor);
    const std::vector<int64_t> groups = descriptor.state_shape();
    const TensorView min{low.data(), DType::f32, groups, {}, kCuda},
        max{high.data(), DType::f32, groups, {}, kCuda},
        num_batches{batches.data(), DType::i64, {}, {}, kCuda};
    reset_observer(min, max, num_batches);
    const Memory workspace(kCuda, plan.workspace_size());
    plan.run(nullptr, workspace,
             {{x.data() + 2 * offset, DType::bf16, descriptor.shape, {}, kCuda}, min, max, num_batches});
    const QuantizeStatus status = plan.status(nullptr, workspace);
    return std::pair(status, load_observer(min, max, num_batches));
  };
  cuda::fill(x.data(), 0, x.num_bytes(), nullptr);
  set(kCount - 1, -3);
  set(kCount - 2, NAN);
  set(5, 2);
  // observe_parts with a tail, observe_elements; columns.
  for (const int64_t alignment : {16, 2}) {
    ObserveDescriptor descriptor = described({kCount}, Granularity::tensor);
    descriptor.alignment = alignment;
    const auto [status, state] = observe(descriptor, 0);
    EXPECT_EQ(status.num_nonfinite, 1);
    EXPECT_EQ(status.first_nonfinite, kCount - 2);
    EXPECT_EQ(state.min[0], -3);
    EXPECT_EQ(state.max[0], 2);
  }
  const auto [status, state] = observe(described({kRows, kCols}, Granularity::channel, 1), 0);
  EXPECT_EQ(status.num_nonfinite, 1);
  EXPECT_EQ(status.first_nonfinite, kCount - 2);
  EXPECT_EQ(state.min[(kCount - 1) % kCols], -3);
  EXPECT_EQ(state.max[5], 2);
  EXPECT_EQ(state.max[6], 0);
}

// ---- compute_qparams

class QParamsOnCuda : public testing::CudaTest {};

TEST_F(QParamsOnCuda, the_bytes_of_the_cpu) {
  testing::QParamsCases cases(3);
  const Memory memory(kCuda, int64_t{1} << 22), workspace(kCuda, 4096);
  for (int i = 0; i < 400; ++i) {
    testing::QParamsCase test = cases.next(i % 20 == 0 ? 30000 : 500), cpu = test;
    const auto num_bytes = static_cast<int64_t>(test.bytes.size());
    copy(kCuda, memory.data(), test.bytes.data(), num_bytes);
    const auto plan = ComputeQParamsPlan::select(kCuda, test.descriptor);
    ASSERT_LE(plan.workspace_size(), workspace.num_bytes());
    const ComputeQParams::Args args = test.args(memory.data(), kCuda);
    ASSERT_FALSE(plan.can_implement(args));
    plan.run(nullptr, workspace, args);
    const QuantizeStatus status = plan.status(nullptr, workspace);
    copy(kCuda, test.bytes.data(), memory.data(), num_bytes);
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
    const QuantizeStatus expected = testing::run_qparams_on_cpu(cpu);
    ASSERT_EQ(cpu.bytes, test.bytes) << test.text();
    ASSERT_TRUE(testing::same_status(expected, status)) << test.text() << testing::text_of(status);
  }
}

}  // namespace
}  // namespace halfbyte
