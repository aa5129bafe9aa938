// Plans of `quantize` and `dequantize` on a device: the bytes of the CPU, graphs, threads, what is refused.
#include <thread>

#include "halfbyte/quantize_plan.hpp"
#include "harness.h"

namespace halfbyte {
namespace {

using testing::DeviceBytes;
using testing::DeviceParts;
using testing::kCuda;
using testing::Parts;
using testing::Placement;
using testing::Values;

struct Grouping {
  Granularity granularity;
  int64_t size;
};
constexpr Grouping kGroupings[] = {{Granularity::group, 64},
                                   {Granularity::group, 100},
                                   {Granularity::channel, 64},
                                   {Granularity::tensor, 64},
                                   {Granularity::flat, 128}};

// What a plan runs on: memory of the device, and a workspace that holds anything.
struct OnDevice {
  OnDevice(const QuantizeDescriptor& d, const Placement& place)
      : dense(d.rows * d.cols * size_of(d.dtype), place.values * size_of(d.dtype), place.exact),
        parts(d.spec, d.rows, d.cols, place),
        view(testing::matrix(dense.data(), d.dtype, d.rows, d.cols, kCuda)) {}

  DeviceBytes dense;
  DeviceParts parts;
  TensorView view;
};

DeviceBytes workspace_of(int64_t num_bytes) { return DeviceBytes(num_bytes, 0, false); }

// Both operations on the device against the CPU.
void compare(const uint8_t* x, const QuantizeDescriptor& descriptor, const Placement& place = {},
             void* stream = nullptr) {
  const auto& [of, rows, cols, dtype, alignment, encoding] = descriptor;
  const testing::EncodedSpec spec(of, encoding);
  SCOPED_TRACE(fmt::format("{}, {} [{}, {}], alignment {}", testing::describe(spec), to_string(dtype), rows,
                           cols, alignment));
  Parts expected = testing::quantize_on_cpu(x, dtype, spec, rows, cols);
  const cuda::Scope scope(cuda::context(kCuda.index));
  OnDevice memory(descriptor, place);
  memory.dense.upload(x);
  const auto quantize = QuantizePlan::select(kCuda, descriptor);
  const DeviceBytes workspace = workspace_of(quantize.workspace_size());
  cuda::synchronize(nullptr);
  quantize.run(stream, workspace.workspace(), {memory.view, memory.parts.view()});
  const QuantizeStatus status = quantize.status(stream, workspace.workspace());
  Parts parts = memory.parts.download();
  parts.status = status;
  EXPECT_TRUE(testing::same(expected, parts));

  const OnDevice target(descriptor, place);
  const auto dequantize = DequantizePlan::select(kCuda, descriptor);
  const DeviceBytes unused = workspace_of(dequantize.workspace_size());
  cuda::synchronize(nullptr);
  dequantize.run(stream, unused.workspace(), {memory.parts.view(), target.view});
  EXPECT_TRUE(testing::same({}, dequantize.status(stream, unused.workspace())));
  std::vector<uint8_t> y(static_cast<size_t>(target.dense.num_bytes()));
  target.dense.download(y.data());
  EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(expected, dtype), y, dtype));
  std::vector<uint8_t> after(static_cast<size_t>(memory.dense.num_bytes()));
  memory.dense.download(after.data());
  EXPECT_TRUE(testing::same_bytes("x", x, after.data(), after.size())) << "x was written";
  std::vector<uint8_t> used(static_cast<size_t>(std::max(workspace.num_bytes(), unused.num_bytes())));
  workspace.download(used.data());  // its guards must be as they were
  unused.download(used.data());
}

class PackedPlan : public testing::CudaTest {};

// A kernel is compiled for each case.
void compare_with_cpu(testing::EncodedSpec spec, DType dtype, const Grouping& grouping, bool aligned,
                      std::mt19937_64& random) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{3, 256}, {5, 77}, {2, 1000}};
  constexpr DType kScales[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
  spec.granularity = grouping.granularity;
  spec.group_size = grouping.size;
  spec.scale_dtype = kScales[random() % (dtype == DType::f64 ? 4 : 3)];
  testing::fit_format(spec);
  const auto& [rows, cols] = kShapes[random() % 3];
  const Values x = testing::with_nonfinite(testing::random_values(dtype, rows * cols, random()));
  Placement place;
  if (!aligned) place = {1, size_of(dtype), 1};
  compare(x.bytes.data(), {spec, rows, cols, dtype, aligned ? 16 : size_of(dtype), spec.encoding}, place);
}

// Every spec once, and every way to choose kernels for one of them.
TEST_F(PackedPlan, EqualsTheCpu) {
  std::mt19937_64 random(1);
  for (const testing::EncodedSpec& spec : testing::all_specs())
    if (spec.format != Format::lut4)
      compare_with_cpu(spec, testing::kFloatDTypes[random() % 4],
                       kGroupings[random() % std::size(kGroupings)], random() % 2 == 0, random);
  for (const DType dtype : testing::kFloatDTypes)
    for (const Grouping& grouping : kGroupings)
      for (const bool aligned : {true, false}) compare_with_cpu({}, dtype, grouping, aligned, random);
}
// Its kernels contain the user's table: no kernel pack can have them.
TEST_F(PackedPlan, EqualsTheCpuForlut4) {
  std::mt19937_64 random(2);
  for (const testing::EncodedSpec& spec : testing::all_specs())
    if (spec.format == Format::lut4)
      for (const Grouping& grouping : kGroupings) compare_with_cpu(spec, DType::bf16, grouping, true, random);
}

// Groups that blocks share, alone and many.
TEST_F(PackedPlan, LargeGroups) {
  const Values x = testing::with_nonfinite(testing::random_values(DType::f32, int64_t{3} * 100000, 3));
  testing::EncodedSpec spec;
  spec.format = Format::affine4;
  spec.encoding.scale_rule = ScaleRule::mlx_edge;
  for (const Granularity granularity : {Granularity::channel, Granularity::tensor, Granularity::flat}) {
    spec.granularity = granularity;
    spec.group_size = 70000;
    compare(x.bytes.data(), {spec, 3, 100000, DType::f32, 16, spec.encoding});
  }
}

// Memory with nothing around it, for checkers of accesses.
TEST_F(PackedPlan, ExactMemory) {
  const Values x = testing::random_values(DType::bf16, 17 * 257, 5);
  for (const auto& [granularity, size] : kGroupings) {
    testing::EncodedSpec spec;
    spec.granularity = granularity;
    spec.group_size = size;
    Placement place;
    place.exact = true;
    compare(x.bytes.data(), {spec, 17, 257, DType::bf16}, place);
  }
}

TEST_F(PackedPlan, EmptyTensors) {
  const Stream stream(kCuda);
  for (testing::EncodedSpec spec : testing::all_specs())
    for (const auto& [granularity, size] : kGroupings)
      for (const auto& [rows, cols] : {std::pair(0, 64), std::pair(3, 0)})
        for (const DType scale_dtype : {DType::f32, DType::f16, DType::f64}) {
          spec.granularity = granularity;
          spec.group_size = size;
          spec.scale_dtype = scale_dtype;
          testing::fit_format(spec);
          compare(nullptr, {spec, rows, cols, scale_dtype == DType::f64 ? DType::f64 : DType::f32}, {},
                  stream.handle());
        }
}

TEST_F(PackedPlan, SaysWhatItIs) {
  const testing::EncodedSpec spec;
  const auto quantize = QuantizePlan::select(kCuda, {spec, 4, 256, DType::f16});
  EXPECT_EQ(quantize.sku().kernel, "quantize_groups");
  EXPECT_EQ(quantize.sku().backend.find("cuda sm_"), 0u);
  EXPECT_EQ(quantize.sku().dtypes, "f16 -> nf4, scale f32");
  EXPECT_EQ(QuantizePlan::select(kCuda, {spec, 4, 256, DType::f16, 2}).sku().kernel, "quantize_spans");
  EXPECT_EQ(QuantizePlan::select(kCuda, {spec, 4, 255, DType::f16}).sku().kernel, "quantize_spans");
  EXPECT_EQ(QuantizePlan::select(kCuda, {spec, 0, 256, DType::f16}).sku().kernel, "none");
  EXPECT_EQ(DequantizePlan::select(kCuda, {spec, 4, 256, DType::f16}).sku().kernel, "dequantize");
}

// ---- Graphs

// Captured globally: a run that waited, allocated or compiled would fail.
TEST_F(PackedPlan, GraphsReplayWithNewData) {
  const cuda::Scope scope(cuda::context(kCuda.index));
  const Stream stream(kCuda);
  for (const auto& [granularity, size] : kGroupings)
    for (const int64_t rows : {24, 0}) {
      testing::EncodedSpec spec;
      spec.format = Format::int4;
      spec.asymmetric = true;
      spec.scale_dtype = DType::f16;
      spec.granularity = granularity;
      spec.group_size = size;
      const QuantizeDescriptor descriptor{spec, rows, 192, DType::bf16};
      const auto quantize = QuantizePlan::select(kCuda, descriptor);
      const auto dequantize = DequantizePlan::select(kCuda, descriptor);
      const OnDevice memory(descriptor, {}), target(descriptor, {});
      const DeviceBytes workspace = workspace_of(quantize.workspace_size());
      cuda::synchronize(nullptr);
      testing::Graph graph;
      graph.capture(stream.handle(), [&] {
        quantize.run(stream.handle(), workspace.workspace(), {memory.view, memory.parts.view()});
        // The workspace of `dequantize` holds nothing: it may be the same.
        dequantize.run(stream.handle(), workspace.workspace(), {memory.parts.view(), target.view});
      });
      for (uint64_t seed = 0; seed < 3; ++seed) {
        Values x = testing::random_values(DType::bf16, rows * 192, seed);
        if (seed == 1) x = testing::with_nonfinite(x);
        memory.dense.upload(x.bytes.data());
        cuda::synchronize(nullptr);
        graph.launch(stream.handle());
        const QuantizeStatus status = quantize.status(stream.handle(), workspace.workspace());
        Parts expected = testing::quantize_on_cpu(x.bytes.data(), DType::bf16, spec, rows, 192);
        Parts parts = memory.parts.download();
        parts.status = status;
        EXPECT_TRUE(testing::same(expected, parts)) << testing::describe(spec) << " rows " << rows;
        std::vector<uint8_t> y(static_cast<size_t>(target.dense.num_bytes()));
        target.dense.download(y.data());
        EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(expected, DType::bf16), y, DType::bf16));
      }
    }
}

TEST_F(PackedPlan, ThreadsShareAPlan) {
  const QuantizeDescriptor descriptor{{}, 64, 1024, DType::f16};
  const auto plan = QuantizePlan::select(kCuda, descriptor);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      const Stream stream(kCuda);
      const OnDevice memory(descriptor, {});
      const DeviceBytes workspace = workspace_of(plan.workspace_size());
      for (uint64_t i = 0; i < 10; ++i) {
        const Values x = testing::random_values(DType::f16, 64 * 1024, 10 * t + i);
        memory.dense.upload(x.bytes.data());
        {
          const cuda::Scope scope(cuda::context(kCuda.index));
          cuda::synchronize(nullptr);
        }
        plan.run(stream.handle(), workspace.workspace(), {memory.view, memory.parts.view()});
        const QuantizeStatus status = plan.status(stream.handle(), workspace.workspace());
        Parts parts = memory.parts.download();
        parts.status = status;
        EXPECT_TRUE(testing::same(
            testing::quantize_on_cpu(x.bytes.data(), DType::f16, descriptor.spec, 64, 1024), parts));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// ---- What is refused

TEST_F(PackedPlan, MemoryOfTheWrongKind) {
  testing::EncodedSpec spec;
  const QuantizeDescriptor descriptor{spec, 4, 64};
  const auto quantize = QuantizePlan::select(kCuda, descriptor);
  const auto dequantize = DequantizePlan::select(kCuda, descriptor);
  const Memory dense(kCuda, 4 * 64 * 4), codes(kCuda, 4 * 32), scales(kCuda, 4 * 4), workspace(kCuda, 256);
  alignas(16) std::array<uint8_t, 1024> host{};
  const TensorView good{dense.data(), DType::f32, {4, 64}, {}, kCuda};
  const QuantizedView parts{spec,          4,       64,     reinterpret_cast<uint8_t*>(codes.data()),
                            scales.data(), nullptr, nullptr};
  const auto refused = [&](const TensorView& x, const QuantizedView& q,
                           const std::vector<std::string>& words) {
    for (const auto& error : {quantize.can_implement({x, q}), dequantize.can_implement({q, x})}) {
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->code(), ErrorCode::usage);
      for (const std::string& word : words)
        EXPECT_NE(std::string(error->what()).find(word), std::string::npos) << error->what();
    }
  };
  EXPECT_FALSE(quantize.can_implement({good, parts}));
  EXPECT_FALSE(dequantize.can_implement({parts, good}));
  TensorView x = good;
  x.data = host.data();
  refused(x, parts, {"host memory"});
  x = good;
  x.device = Device{};
  refused(x, parts, {"must be on cuda:0, got cpu"});
  x = good;
  x.data = dense.data() + 16;
  refused(x, parts, {"needs 1024 bytes", "1008"});
  QuantizedView q = parts;
  q.codes = host.data();
  refused(good, q, {"codes", "host memory"});
  q = parts;
  q.scales = host.data();
  refused(good, q, {"scales", "host memory"});
  EXPECT_THROW(quantize.run(nullptr, host, {good, parts}), Error);  // the workspace
  EXPECT_THROW(dequantize.run(nullptr, host, {parts, good}), Error);
  const auto on_cpu = QuantizePlan::select(Device{}, descriptor);
  x = good;
  x.device = Device{};
  const auto error = on_cpu.can_implement({x, parts});
  ASSERT_TRUE(error.has_value());
  EXPECT_NE(std::string(error->what()).find("host memory"), std::string::npos) << error->what();
}

}  // namespace
}  // namespace halfbyte
