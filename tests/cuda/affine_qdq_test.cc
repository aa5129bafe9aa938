// Affine quantization that is trained, on a device: the bytes of the CPU for random descriptors, graphs.
#include "harness.h"
#include "ops/affine_qdq/affine_qdq_testing.h"

namespace halfbyte {
namespace {

using testing::AffineCase;
using testing::AffineCases;
using testing::AffineMemory;
using testing::AffineOp;
using testing::AffineTensor;
using testing::kCuda;

void wait() {
  const cuda::Scope scope(cuda::context(kCuda.index));
  cuda::synchronize(nullptr);
}

// The tensors of a case on the device, one behind the other in memory that is kept.
class OnDevice {
 public:
  explicit OnDevice(int64_t num_bytes) : arena_(kCuda, num_bytes), workspace_(kCuda, 256) {}

  // The memory of each tensor, whole storages.
  AffineMemory upload(AffineCase& test) {
    AffineMemory memory{};
    int64_t at = 0;
    size_t i = 0;
    for (const AffineTensor* tensor : test.all()) {
      memory[i] = arena_.data() + at;
      const auto size = static_cast<int64_t>(tensor->bytes.size());
      if (at + size > arena_.num_bytes()) throw std::runtime_error("arena");
      copy(kCuda, memory[i++], tensor->bytes.data(), size);
      at += (size + 255) / 256 * 256;
    }
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::fill(workspace_.data(), 0xA5, 256, nullptr);
    return memory;
  }
  const Memory& workspace() const { return workspace_; }
  static void download(AffineCase& test, const AffineMemory& memory) {
    size_t i = 0;
    for (AffineTensor* tensor : test.all())
      copy(kCuda, tensor->bytes.data(), memory[i++], static_cast<int64_t>(tensor->bytes.size()));
    wait();
  }

 private:
  Memory arena_, workspace_;
};

::testing::AssertionResult same(AffineCase& cpu, AffineCase& cuda) {
  const auto all = cuda.all();
  size_t i = 0;
  for (const AffineTensor* tensor : cpu.all()) {
    const auto result = testing::same_bytes(AffineCase::kNames[i], tensor->bytes.data(), all[i]->bytes.data(),
                                            tensor->bytes.size());
    if (!result) return result;
    ++i;
  }
  return ::testing::AssertionSuccess();
}

// Runs a case on both; false where they differ.
bool compare(AffineCase& test, OnDevice& device) {
  AffineCase cpu = test;
  const AffineMemory memory = device.upload(test);
  const QuantizeStatus on_cuda = testing::run_affine(test, memory, kCuda, device.workspace().data());
  OnDevice::download(test, memory);
  const QuantizeStatus on_cpu = testing::run_on_cpu(cpu);
  EXPECT_TRUE(same(cpu, test)) << test.text();
  EXPECT_TRUE(testing::same_status(on_cpu, on_cuda))
      << test.text() << "\nCPU  " << testing::text_of(on_cpu) << "\nCUDA " << testing::text_of(on_cuda);
  return !::testing::Test::HasFailure();
}

// 16 parts, so that processes can share them.
class AffineQdq : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(AffineQdq, random_descriptors) {
  OnDevice device(int64_t{1} << 26);
  AffineCases cases(static_cast<uint64_t>(GetParam()) + 1000);
  for (int i = 0; i < 400; ++i) {
    AffineCase test = cases.next(i % 40 == 0 ? 100000 : i % 4 == 0 ? 20000 : 2000);
    if (!compare(test, device)) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, AffineQdq, ::testing::Range(0, 16));

// Every kernel with every width of codes, of shapes with several blocks and with tails.
std::vector<AffineCase> usual_cases(int64_t rows) {
  std::vector<AffineCase> cases;
  AffineCases random(7);
  for (const AffineOp op : {AffineOp::init, AffineOp::qdq, AffineOp::backward})
    for (const int bits : {2, 3, 4, 5, 6, 8})
      for (const int64_t group : {7, 16, 64, 100, 256, 512, 1024, 1500})
        for (const int flags : {0, 1, 2, 3}) {
          AffineCase test;
          test.op = op;
          AffineQdqDescriptor& d = test.descriptor;
          const DType dtypes[] = {DType::bf16, DType::f32, DType::f16};
          d = {rows, group * 3 + (flags == 1 ? 5 : 0), bits, group, flags != 2};
          d.dtype = dtypes[cases.size() % 3];
          d.scale_dtype = dtypes[cases.size() / 3 % 3];
          d.adam = d.refit = flags % 2 != 0;
          if (flags > 1) d.rounding = AffineRounding::half_away;
          if (flags == 1) d.scale_rule = ScaleRule::mlx_edge;
          random.fill(test);
          cases.push_back(std::move(test));
        }
  return cases;
}

class AffineQdqShapes : public testing::CudaTest {};

TEST_F(AffineQdqShapes, of_many_blocks) {
  OnDevice device(int64_t{1} << 26);
  for (AffineCase& test : usual_cases(37))
    if (!compare(test, device)) return;
}
TEST_F(AffineQdqShapes, long_rows) {
  OnDevice device(int64_t{1} << 26);
  AffineCases random(8);
  for (const AffineOp op : {AffineOp::init, AffineOp::qdq, AffineOp::backward})
    for (const int64_t group : {1024, 40000, 700001}) {
      AffineCase test;
      test.op = op;
      test.descriptor = {3, 700001, 5, group};
      test.descriptor.refit = true;
      random.fill(test);
      if (!compare(test, device)) return;
    }
}

// Every kernel once, in memory that nothing lies around.
class SanitizeAffineQdq : public testing::CudaTest {};

TEST_F(SanitizeAffineQdq, every_kernel) {
  std::vector<AffineCase> cases = usual_cases(3);
  AffineCases random(11);
  for (int i = 0; i < 60; ++i) cases.push_back(random.next(300));
  for (AffineCase& test : cases) {
    SCOPED_TRACE(test.text());
    AffineCase cpu = test;
    std::vector<Memory> memories;
    AffineMemory memory{};
    size_t i = 0;
    for (AffineTensor* tensor : test.all()) {
      const int64_t used = tensor->bytes.empty() ? 0 : tensor->num_bytes(), shift = tensor->offset % 256;
      memories.emplace_back(kCuda, used + shift);
      std::byte* const at = memories.back().data() + shift;
      if (used > 0) copy(kCuda, at, tensor->bytes.data() + tensor->offset, used);
      memory[i++] = used > 0 ? at - tensor->offset : nullptr;
    }
    const Memory workspace(kCuda, 256);
    const QuantizeStatus status = testing::run_affine(test, memory, kCuda, workspace.data());
    const QuantizeStatus expected = testing::run_on_cpu(cpu);
    i = 0;
    for (AffineTensor* tensor : test.all()) {
      if (!tensor->bytes.empty())
        copy(kCuda, tensor->bytes.data() + tensor->offset,
             static_cast<std::byte*>(memory[i]) + tensor->offset, tensor->num_bytes());
      ++i;
    }
    wait();
    EXPECT_TRUE(same(cpu, test));
    EXPECT_TRUE(testing::same_status(expected, status)) << testing::text_of(status);
  }
}

// A run that is captured is replayed with other data.
template <class Op, class Select>
void replay(AffineCase test, const Select& select) {
  SCOPED_TRACE(test.text());
  OnDevice device(int64_t{1} << 24);
  const Stream stream(kCuda);
  AffineCase other = test;
  for (AffineTensor* tensor : {&other.dense, &other.codes})  // of the same size
    if (!tensor->bytes.empty())
      std::reverse(tensor->data<uint8_t>(), tensor->data<uint8_t>() + tensor->num_bytes());
  const AffineMemory memory = device.upload(test);
  const auto plan = Plan<Op>::select(kCuda, test.descriptor);
  const typename Op::Args args = select(testing::args_of(test, memory, kCuda));
  testing::Graph graph;
  cuda::synchronize(nullptr);
  graph.capture(stream.handle(), [&] { plan.run(stream.handle(), device.workspace(), args); });
  for (AffineCase* round : {&test, &other, &test}) {
    AffineCase cpu = *round, result = *round;
    device.upload(*round);
    cuda::synchronize(nullptr);
    graph.launch(stream.handle());
    const QuantizeStatus status = plan.status(stream.handle(), device.workspace());
    OnDevice::download(result, memory);
    EXPECT_TRUE(testing::same_status(testing::run_on_cpu(cpu), status));
    EXPECT_TRUE(same(cpu, result));
  }
}

TEST_F(AffineQdqShapes, graphs_replay_with_new_data) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  AffineCases random(5);
  for (const int64_t cols : {192, 200})
    for (const AffineOp op : {AffineOp::init, AffineOp::qdq, AffineOp::backward}) {
      AffineCase test;
      test.op = op;
      test.descriptor = {24, cols, 4, 64, true, DType::bf16};
      test.descriptor.adam = test.descriptor.refit = true;
      random.fill(test);
      if (op == AffineOp::init)
        replay<AffineInit>(test, [](const auto& args) { return args.init; });
      else if (op == AffineOp::qdq)
        replay<halfbyte::AffineQdq>(test, [](const auto& args) { return args.qdq; });
      else
        replay<AffineQdqBackward>(test, [](const auto& args) { return args.backward; });
    }
}

// ---- More than 2^31 elements: a block of them over and over, then one group more

using Exhaustive = testing::CudaTest;

TEST_F(Exhaustive, AffineQdqOfMoreThan2ToThe31Elements) {
  constexpr int64_t kBlockRows = 4099, kBlocks = 128, kCols = 4096, kGroup = 64;
  static_assert(kBlockRows * kBlocks * kCols > int64_t{1} << 31);
  AffineCases random(12);
  for (const int64_t cols : {kCols, kCols + 1}) {  // the fast kernel, and the other
    AffineCase block;
    block.op = AffineOp::backward;
    block.descriptor = {kBlockRows, cols, 4, kGroup, true, DType::bf16};
    do random.fill(block);
    while (block.dscales.bytes.empty() || block.dbiases.bytes.empty());  // at times one is absent
    // The same on the whole: the tensors of the block, repeated.
    AffineQdqDescriptor whole = block.descriptor;
    whole.rows = kBlockRows * kBlocks;
    const auto repeated = [&](AffineTensor& tensor) {
      const int64_t n = tensor.num_bytes();
      Memory memory(kCuda, n * kBlocks);
      for (int64_t i = 0; i < kBlocks; ++i) copy(kCuda, memory.data() + i * n, tensor.data<uint8_t>(), n);
      wait();
      return memory;
    };
    const auto view = [&](const Memory& memory, DType dtype, const std::vector<int64_t>& shape) {
      return TensorView{memory.data(), dtype, shape, {}, kCuda, memory.num_bytes()};
    };
    const Memory codes = repeated(block.codes), dy = repeated(block.dense), workspace(kCuda, 256);
    const Memory dscales = repeated(block.dscales), dbiases = repeated(block.dbiases);  // poisoned
    AffineQdqBackward::Args args;
    args.codes = view(codes, DType::u8, whole.code_shape());
    args.dy = view(dy, DType::bf16, {whole.rows, whole.cols});
    args.dscales = view(dscales, DType::f32, whole.scale_shape());
    args.dbiases = view(dbiases, DType::f32, whole.scale_shape());
    AffineQdqBackwardPlan::select(kCuda, whole).run(nullptr, workspace, args);
    testing::run_on_cpu(block);
    const auto expect = [&](const char* name, const Memory& memory, AffineTensor& expected) {
      const int64_t n = expected.num_bytes();
      std::vector<uint8_t> bytes(static_cast<size_t>(n));
      for (int64_t i = 0; i < kBlocks; ++i) {
        copy(kCuda, bytes.data(), memory.data() + i * n, n);
        wait();
        ASSERT_TRUE(testing::same_bytes(name, expected.data<uint8_t>(), bytes.data(), bytes.size())) << i;
      }
    };
    expect("dscales", dscales, block.dscales);
    expect("dbiases", dbiases, block.dbiases);

    // Init and forward of as many.
    AffineCase init = block;
    init.op = AffineOp::init;
    init.descriptor.scale_dtype = DType::f32;
    random.fill(init);
    AffineCase forward = init;
    whole.scale_dtype = DType::f32;
    const Memory w = repeated(init.dense), init_codes = repeated(init.codes), scales = repeated(init.scales),
                 biases = repeated(init.biases);
    const TensorView code_view = view(init_codes, DType::u8, whole.code_shape()),
                     scale_view = view(scales, DType::f32, whole.scale_shape()),
                     bias_view = view(biases, DType::f32, whole.scale_shape());
    AffineInitPlan::select(kCuda, whole)
        .run(nullptr, workspace,
             {view(w, DType::bf16, {whole.rows, cols}), code_view, scale_view, bias_view});
    testing::run_on_cpu(init);
    expect("codes", init_codes, init.codes);
    expect("scales", scales, init.scales);
    expect("biases", biases, init.biases);
    forward.op = AffineOp::qdq;
    forward.codes = init.codes;
    forward.scales = init.scales;
    forward.biases = init.biases;
    testing::run_on_cpu(forward);
    halfbyte::AffineQdqPlan::select(kCuda, whole)
        .run(nullptr, workspace,
             {code_view, scale_view, bias_view, view(dy, DType::bf16, {whole.rows, cols})});
    expect("y", dy, forward.dense);
  }
}

}  // namespace
}  // namespace halfbyte
