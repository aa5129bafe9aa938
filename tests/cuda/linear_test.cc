// Linear quantization on a device: the bytes of the CPU for random descriptors, graphs, threads, what is
// refused.
#include <thread>

#include "on_device.h"
#include "ops/quantize_linear/quantize_linear_testing.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::LinearCase;
using testing::LinearCases;
using testing::OnDevice;
using testing::Storage;

// 16 parts, so that processes can share them.
class Linear : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(Linear, random_descriptors) {
  OnDevice device(int64_t{1} << 26);
  LinearCases cases(static_cast<uint64_t>(GetParam()) + 1000);
  for (int i = 0; i < 640; ++i) {
    LinearCase test = cases.next(i % 40 == 0 ? 100000 : i % 4 == 0 ? 5000 : 600);
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, Linear, ::testing::Range(0, 16));

// Shapes that take each kernel, several blocks of it.
std::vector<LinearCase> usual_cases(int64_t rows, int64_t cols) {
  std::vector<LinearCase> cases;
  LinearCases random(7);
  for (const DType dtype : testing::kFloatDTypes)
    for (const DType code : {DType::i8, DType::u4})
      for (const LinearDescriptor& shape :
           {LinearDescriptor::per_tensor({rows, cols}), LinearDescriptor::per_channel({rows, cols}, 0),
            LinearDescriptor::per_channel({rows, cols}, 1), LinearDescriptor::per_group({rows, cols}, 64),
            LinearDescriptor::per_group({rows, cols}, 32, 0), LinearDescriptor::per_group({rows, cols}, 200),
            LinearDescriptor::per_token({rows, cols}), LinearDescriptor::per_channel({3, rows, cols}, 1)})
        for (const int op : {0, 1, 2, 3}) {
          LinearCase test;
          test.op = static_cast<LinearOp>(op % 3);
          test.descriptor = shape;
          test.descriptor.dtype = dtype;
          test.descriptor.scale_dtype = op % 2 ? DType::f32 : dtype;
          test.descriptor.code_dtype = code;
          test.descriptor.q_min = code == DType::i8 ? -127 : 0;
          test.descriptor.q_max = code == DType::i8 ? 127 : 15;
          test.descriptor.computed = op == 3;
          if (code != DType::i8 || op == 1) test.descriptor.zero_point_dtype = op < 2 ? code : DType::i32;
          random.fill(test);
          cases.push_back(std::move(test));
        }
  return cases;
}

class LinearShapes : public testing::CudaTest {};

TEST_F(LinearShapes, of_many_blocks) {
  OnDevice device(int64_t{1} << 26);
  for (LinearCase& test : usual_cases(264, 2304))
    if (!compare(test, device)) return;
}
TEST_F(LinearShapes, rows_that_a_block_has) {
  OnDevice device(int64_t{1} << 26);
  for (const int64_t cols : {6144, 12288, 24576})
    for (LinearCase& test : usual_cases(3, cols))
      if (!compare(test, device)) return;
}
TEST_F(LinearShapes, long_rows) {
  OnDevice device(int64_t{1} << 26);
  for (LinearCase& test : usual_cases(3, 40000))
    if (!compare(test, device)) return;
}

// Every kernel once, at shapes with tails, in memory that nothing lies around.
class SanitizeLinear : public testing::CudaTest {};

TEST_F(SanitizeLinear, every_kernel) {
  std::vector<LinearCase> cases = usual_cases(5, 72);
  LinearCases random(11);
  for (int i = 0; i < 60; ++i) cases.push_back(random.next(200));
  for (const int64_t cols : {1000 * 8, 2000 * 8}) {  // blocks of 4 and 8 chunks a thread
    LinearCase test;
    test.descriptor = LinearDescriptor::per_token({2, cols});
    test.descriptor.dtype = DType::bf16;
    test.descriptor.computed = true;
    random.fill(test);
    cases.push_back(test);
  }
  for (LinearCase& test : cases) testing::compare_exact(test, OnDevice::kWorkspace);
}

// ---- Graphs

template <class Op, class MakeArgs>
void replay(LinearCase& test, const MakeArgs& make_args) {
  OnDevice device(int64_t{1} << 24);
  LinearCase other = test;
  for (Storage* storage : {&other.x, &other.dy, &other.codes})  // of the same size; gaps too
    std::reverse(storage->bytes.begin(), storage->bytes.end());
  testing::replay<Op>(device, test, other, [&](const auto& memory) { return make_args(test, memory); });
}

TEST_F(LinearShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  LinearCases random(5);
  for (const LinearDescriptor& shape :
       {LinearDescriptor::per_group({24, 192}, 64), LinearDescriptor::per_channel({24, 192}, 1),
        LinearDescriptor::per_tensor({23, 7})})
    for (const int op : {0, 1, 2, 3}) {
      LinearCase test;
      test.op = static_cast<LinearOp>(op % 3);
      test.descriptor = shape;
      test.descriptor.dtype = DType::bf16;
      test.descriptor.computed = op == 3;
      test.descriptor.zero_point_dtype = DType::i32;
      random.fill(test);
      const auto at = [](const Storage& storage, void* memory) { return storage.at(memory, kCuda); };
      if (test.op == LinearOp::quantize)
        replay<QuantizeLinear>(test, [&](const LinearCase& c, const auto& m) {
          return QuantizeLinear::Args{at(c.x, m[0]), at(c.codes, m[2]), at(c.scale, m[3]),
                                      at(c.zero_point, m[4])};
        });
      else if (test.op == LinearOp::dequantize)
        replay<DequantizeLinear>(test, [&](const LinearCase& c, const auto& m) {
          return DequantizeLinear::Args{at(c.codes, m[2]), at(c.scale, m[3]), at(c.zero_point, m[4]),
                                        at(c.y, m[5])};
        });
      else
        replay<QuantizeLinearBackward>(test, [&](const LinearCase& c, const auto& m) {
          return QuantizeLinearBackward::Args{at(c.x, m[0]), at(c.dy, m[1]), at(c.scale, m[3]),
                                              at(c.zero_point, m[4]), at(c.y, m[5])};
        });
    }
}

TEST_F(LinearShapes, threads_share_a_plan) {
  LinearDescriptor descriptor = LinearDescriptor::per_token({64, 1024});
  descriptor.dtype = DType::f16;
  descriptor.computed = true;
  const auto plan = QuantizeLinearPlan::select(kCuda, descriptor);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      OnDevice device(int64_t{1} << 22);
      const Stream stream(kCuda);
      LinearCases random(t);
      for (int i = 0; i < 10; ++i) {
        LinearCase test;
        test.descriptor = descriptor;
        random.fill(test);
        LinearCase cpu = test;
        const auto memory = device.upload(test);
        plan.run(stream.handle(), device.workspace(),
                 {test.x.at(memory[0], kCuda),
                  test.codes.at(memory[2], kCuda),
                  test.scale.at(memory[3], kCuda),
                  {}});
        const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
        device.download(test, memory);
        testing::expect_same(cpu, test, status);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// ---- What is refused

TEST_F(LinearShapes, memory_of_the_wrong_kind) {
  const LinearDescriptor descriptor = LinearDescriptor::per_tensor({64});
  const Memory x(kCuda, 256), codes(kCuda, 64), scale(kCuda, 4);
  alignas(16) std::array<float, 64> host{};
  const auto view = [&](void* data, DType dtype, std::vector<int64_t> shape, Device device) {
    return TensorView{data, dtype, std::move(shape), {}, device};
  };
  const auto plan = QuantizeLinearPlan::select(kCuda, descriptor);
  const auto refused = [](const auto& error, const std::vector<std::string>& words) {
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error->what()).find(word), std::string::npos) << error->what();
  };
  const QuantizeLinear::Args good{view(x.data(), DType::f32, {64}, kCuda),
                                  view(codes.data(), DType::i8, {64}, kCuda),
                                  view(scale.data(), DType::f32, {}, kCuda),
                                  {}};
  EXPECT_FALSE(plan.can_implement(good));
  std::thread([&] { EXPECT_FALSE(plan.can_implement(good)); }).join();  // no context is current there
  QuantizeLinear::Args args = good;
  args.x.data = host.data();
  refused(plan.can_implement(args), {"x", "host memory"});
  args = good;
  args.x.device = Device{};
  refused(plan.can_implement(args), {"x", "cuda:0", "cpu"});
  args = good;
  args.x.data = x.data() + 16;
  refused(plan.can_implement(args), {"x", "needs 256 bytes", "240"});
  const Memory pinned = Memory::host(kCuda, 256);  // a device can read it
  args = good;
  args.x.data = pinned.data();
  EXPECT_FALSE(plan.can_implement(args));
  EXPECT_THROW(plan.run(nullptr, host, good), Error);  // the workspace

  const auto on_cpu = QuantizeLinearPlan::select(Device{}, descriptor);
  args = good;
  args.x.device = args.codes.device = args.scale.device = Device{};
  refused(on_cpu.can_implement(args), {"x", "host memory", "cuda:0"});
}

}  // namespace
}  // namespace halfbyte
