// What the matrix of parity_test.cc leaves out: large groups, given ranges, empty tensors, value ranges,
// streams, threads, refusals.
#include <dlfcn.h>

#include <thread>

#include "harness.h"

namespace halfbyte {
namespace {

using testing::DeviceBytes;
using testing::DeviceParts;
using testing::kCuda;
using testing::Parts;
using testing::Placement;
using testing::Values;

using Quantize = testing::CudaTest;
using Runtime = testing::CudaTest;

testing::EncodedSpec with_table(testing::EncodedSpec spec) {
  for (const testing::EncodedSpec& known : testing::all_specs())
    if (known.format == spec.format) spec.table = known.table;
  return spec;
}

TEST_F(Quantize, GroupsLargerThanABlockAndWholeTensors) {
  struct Case {
    testing::EncodedSpec spec;
    DType dtype;
    int64_t rows, cols;
  };
  const Case cases[] = {
      {{{.format = Format::nf4, .granularity = Granularity::channel}}, DType::bf16, 3, 70001},
      {{{.format = Format::nf4, .granularity = Granularity::channel}}, DType::bf16, 3, 70008},
      {{{.format = Format::int4, .asymmetric = true, .group_size = 65544}, {ScaleRule::minmax}},
       DType::f32,
       2,
       200000},
      {{{.format = Format::affine4, .group_size = 65537}, {ScaleRule::minmax}}, DType::f16, 2, 150001},
      {{{.format = Format::int3, .granularity = Granularity::tensor}}, DType::f64, 17, 4099},
      {{{.format = Format::int8, .granularity = Granularity::flat, .group_size = 100000},
        {ScaleRule::signed_max}},
       DType::bf16,
       7,
       50001},
      {{{.format = Format::fp4, .granularity = Granularity::channel}}, DType::f32, 2, 1 << 20},
      {{{.format = Format::affine8, .granularity = Granularity::tensor}, {ScaleRule::mlx_edge}},
       DType::bf16,
       33,
       8192},
      {{{.format = Format::int6, .group_size = 131072}, {ScaleRule::half_range}},
       DType::f16,
       1,
       (1 << 21) + 24},
      {{{.format = Format::lut4, .group_size = 65536}}, DType::bf16, 2, 131072},
      {{{.format = Format::int2, .group_size = 65535}}, DType::bf16, 1, 524281},
      {{{.format = Format::affine5, .granularity = Granularity::tensor}, {ScaleRule::minmax}},
       DType::f32,
       1,
       1},
  };
  for (const Case& test : cases) {
    const testing::EncodedSpec spec = with_table(test.spec);
    const Values clean = testing::random_values(test.dtype, test.rows * test.cols, 5);
    for (const Values& x : {clean, testing::with_nonfinite(clean)})
      for (const Placement& place : {Placement{}, Placement{1, 3, 1}}) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}] placed at {}", testing::describe(spec),
                                 to_string(test.dtype), test.rows, test.cols, place.values));
        Parts parts = testing::quantize_on_cpu(x.bytes.data(), test.dtype, spec, test.rows, test.cols);
        EXPECT_TRUE(testing::same(
            parts, testing::quantize_on_cuda(x.bytes.data(), test.dtype, spec, test.rows, test.cols, place)));
        EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(parts, test.dtype),
                                         testing::dequantize_on_cuda(parts, test.dtype, place), test.dtype));
      }
  }
}

// Groups whose last code would be infinite, if a value had it.
TEST_F(Quantize, ValuesNearTheLargest) {
  constexpr int64_t kRows = 96, kCols = 64;
  for (const Format format : {Format::int2, Format::int4, Format::int5, Format::int8})
    for (const ScaleRule rule :
         {ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max, ScaleRule::minmax})
      for (const DType scale_dtype : {DType::f32, DType::bf16}) {
        const testing::EncodedSpec spec{
            {.format = format, .asymmetric = rule == ScaleRule::minmax, .scale_dtype = scale_dtype}, {rule}};
        SCOPED_TRACE(testing::describe(spec));
        Values x;
        for (int64_t i = 0; i < kRows * kCols; ++i) {
          const double largest = 2.6e38 + static_cast<double>(i / kCols) * (8e37 / kRows);
          x.push_back(i % kCols == 5 ? (i / kCols % 2 ? largest : -largest) : 1e36 * (i % 7));
        }
        Parts parts = testing::quantize_on_cpu(x.bytes.data(), DType::f32, spec, kRows, kCols);
        // int2 with half-range has a code of 4/3 of absmax, which none of these groups holds.
        const bool none_held = format == Format::int2 && rule == ScaleRule::half_range;
        if (!none_held) {
          EXPECT_LT(parts.status.num_unheld_scales, kRows);
        }
        if (rule == ScaleRule::absmax && scale_dtype == DType::f32) {
          EXPECT_EQ(parts.status.num_unheld_scales, 0);
        }
        EXPECT_TRUE(
            testing::same(parts, testing::quantize_on_cuda(x.bytes.data(), DType::f32, spec, kRows, kCols)));
      }
}

TEST_F(Quantize, AGivenRangeIsThatOfTheTensor) {
  const int64_t rows = 5, cols = 1000;
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    const Values x = testing::random_values(dtype, rows * cols, 6);
    const ValueRange whole = value_range(testing::matrix(x.bytes.data(), dtype, rows, cols));
    const ValueRange ranges[] = {
        whole, {whole.min / 1024, whole.max / 1024, 0, -1}, {-0.03, 0.01, 0, -1}, {0, 0, 0, -1}, {}};
    for (testing::EncodedSpec spec : testing::all_specs()) {
      // One per format and dtype: the kernels are the same for all rules of one.
      if (spec.encoding.scale_rule != info(spec.format).default_rule) continue;
      spec.granularity = Granularity::tensor;
      testing::fit_format(spec);
      for (const ValueRange& range : ranges) {
        SCOPED_TRACE(fmt::format("{} {} range {} {}", testing::describe(spec), to_string(dtype), range.min,
                                 range.max));
        EXPECT_TRUE(
            testing::same(testing::quantize_on_cpu(x.bytes.data(), dtype, spec, rows, cols, &range),
                          testing::quantize_on_cuda(x.bytes.data(), dtype, spec, rows, cols, {}, &range)));
      }
    }
  }
}

TEST_F(Quantize, ScalarsAndEmptyTensors) {
  const std::vector<int64_t> shapes[] = {{}, {1}, {0}, {0, 64}, {4, 0}, {2, 0, 3}, {0, 2, 3}};
  const testing::EncodedSpec specs[] = {
      {{.format = Format::nf4}},
      {{.format = Format::int4, .asymmetric = true}, {ScaleRule::minmax}},
      {{.format = Format::affine4, .scale_dtype = DType::f16}, {ScaleRule::minmax}},
      {{.format = Format::nvfp4}}};
  Values x = testing::random_values(DType::bf16, 8, 7);
  const ValueRange given{-0.5, 0.25};
  struct Grouping {
    Granularity granularity;
    const ValueRange* range = nullptr;
  };
  for (testing::EncodedSpec spec : specs)
    for (const Grouping grouping :
         {Grouping{Granularity::tensor}, Grouping{Granularity::tensor, &given},
          Grouping{Granularity::channel}, Grouping{Granularity::group}, Grouping{Granularity::flat}})
      for (const auto& shape : shapes) {
        spec.granularity = grouping.granularity;
        testing::fit_format(spec);
        SCOPED_TRACE(fmt::format("{} [{}]", testing::describe(spec), fmt::join(shape, ", ")));
        int64_t rows = 1;
        for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
        const int64_t cols = shape.empty() ? 1 : shape.back();
        Parts cpu(spec, rows, cols);
        cpu.status = quantize(x.view(shape), cpu.view(), spec.encoding, {}, grouping.range);
        const DeviceBytes source(2 * rows * cols, 0, false), target(2 * rows * cols, 0, false);
        source.upload(x.bytes.data());
        const DeviceParts device(spec, rows, cols, {});
        const QuantizeStatus status = quantize({source.data(), DType::bf16, shape, {}, kCuda}, device.view(),
                                               spec.encoding, {}, grouping.range);
        Parts cuda = device.download();
        cuda.status = status;
        EXPECT_TRUE(testing::same(cpu, cuda));
        dequantize(device.view(), {target.data(), DType::bf16, shape, {}, kCuda});
        std::vector<uint8_t> y(static_cast<size_t>(target.num_bytes()));
        target.download(y.data());
        EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(cpu, DType::bf16), y, DType::bf16));
      }
}

TEST_F(Quantize, ValueRangeFindsWhatTheCpuFinds) {
  for (const DType dtype : testing::kFloatDTypes) {
    const Values clean = testing::random_values(dtype, 1000003, 8), mixed = testing::with_nonfinite(clean);
    Values nothing;
    nothing.dtype = dtype;
    for (int i = 0; i < 40000; ++i) nothing.push_back(i % 2 ? NAN : INFINITY);
    for (const Values* x : {&clean, &mixed, static_cast<const Values*>(&nothing)})
      for (const int64_t n : {0, 1, 7, 255, 256, 257, 32767, 32768, 32769, 1000003})
        for (const int64_t offset : {0, 1}) {
          if (n > static_cast<int64_t>(x->exact.size())) continue;
          SCOPED_TRACE(fmt::format("{} {} values", to_string(dtype), n));
          const ValueRange cpu = value_range({const_cast<uint8_t*>(x->bytes.data()), dtype, {n}, {}, {}});
          const DeviceBytes device(n * size_of(dtype), offset * size_of(dtype), false);
          device.upload(x->bytes.data());
          const ValueRange cuda = value_range({device.data(), dtype, {n}, {}, kCuda});
          EXPECT_EQ(cpu.min, cuda.min);
          EXPECT_EQ(cpu.max, cuda.max);
          EXPECT_EQ(cpu.num_nonfinite, cuda.num_nonfinite);
          EXPECT_EQ(cpu.first_nonfinite, cuda.first_nonfinite);
        }
  }
}

TEST_F(Quantize, ArraysThatAreNotAlignedToTheirElementsAreRefused) {
  const DeviceBytes x(4096, 0, false), y(4096, 0, false);
  const DeviceParts parts({}, 4, 64, {});
  const auto refused = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::device);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  QuantizedView shifted = parts.view();
  shifted.scales = static_cast<uint8_t*>(shifted.scales) + 2;
  const TensorView from = testing::matrix(x.data(), DType::bf16, 4, 64, kCuda),
                   from_odd = testing::matrix(x.data() + 1, DType::bf16, 4, 64, kCuda),
                   to_odd = testing::matrix(y.data() + 2, DType::f32, 4, 64, kCuda);
  EXPECT_NE(refused([&] { quantize(from_odd, parts.view()); }).find("x is not aligned"), std::string::npos);
  EXPECT_NE(refused([&] { quantize(from, shifted); }).find("scales or biases are not aligned"),
            std::string::npos);
  EXPECT_NE(refused([&] { dequantize(parts.view(), to_odd); }).find("y is not aligned"), std::string::npos);
  EXPECT_NE(refused([&] { value_range(from_odd); }).find("x is not aligned"), std::string::npos);
}

// ---- Streams, threads, contexts

struct Work {
  testing::EncodedSpec spec;
  DType dtype;
  int64_t rows, cols;
  Values x;
  Parts parts;
  std::vector<uint8_t> y;
};
std::vector<Work> make_work() {
  std::vector<Work> work;
  const auto add = [&](const testing::EncodedSpec& spec, DType dtype, int64_t rows, int64_t cols) {
    Values x = testing::random_values(dtype, rows * cols, work.size());
    Parts parts = testing::quantize_on_cpu(x.bytes.data(), dtype, spec, rows, cols);
    std::vector<uint8_t> y = testing::dequantize_on_cpu(parts, dtype);
    work.push_back({spec, dtype, rows, cols, std::move(x), std::move(parts), std::move(y)});
  };
  add({{.format = Format::nf4}}, DType::bf16, 256, 1024);
  add({{.format = Format::int4, .group_size = 128, .scale_dtype = DType::f16}}, DType::f16, 64, 2048);
  add({{.format = Format::affine4}, {ScaleRule::minmax}}, DType::f32, 33, 640);
  add({{.format = Format::int5, .granularity = Granularity::tensor}}, DType::bf16, 40, 999);
  add({{.format = Format::int4, .asymmetric = true, .group_size = 100}, {ScaleRule::minmax}}, DType::bf16,
      100, 1000);
  return work;
}

// Everything on one stream that is not the default one: nothing waits in between.
TEST_F(Runtime, WorkIsEnqueuedOnTheGivenStream) {
  const Stream stream(kCuda);
  for (Work& work : make_work()) {
    const auto num_bytes = static_cast<int64_t>(work.x.bytes.size());
    const Memory source = Memory::host(kCuda, num_bytes), target = Memory::host(kCuda, num_bytes);
    std::memcpy(source.data(), work.x.bytes.data(), work.x.bytes.size());
    const Memory x(kCuda, num_bytes), y(kCuda, num_bytes);
    const DeviceParts device(work.spec, work.rows, work.cols, {});
    copy(kCuda, x.data(), source.data(), num_bytes, stream.handle());
    const QuantizeStatus status = quantize(testing::matrix(x.data(), work.dtype, work.rows, work.cols, kCuda),
                                           device.view(), work.spec.encoding, {.stream = stream.handle()});
    dequantize(device.view(), testing::matrix(y.data(), work.dtype, work.rows, work.cols, kCuda),
               {.stream = stream.handle()});
    copy(kCuda, target.data(), y.data(), num_bytes, stream.handle());
    stream.synchronize();
    Parts parts = device.download();
    parts.status = status;
    EXPECT_TRUE(testing::same(work.parts, parts));
    EXPECT_TRUE(testing::same_values(work.y.data(), reinterpret_cast<const uint8_t*>(target.data()),
                                     work.rows * work.cols, work.dtype));
  }
}

TEST_F(Runtime, SixteenThreadsOnEightStreamsGiveTheSameBytes) {
  const std::vector<Work> all = make_work();
  std::vector<Stream> streams;
  for (int i = 0; i < 8; ++i) streams.emplace_back(kCuda);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 16; ++t)
    threads.emplace_back([&all, &streams, t] {
      for (size_t i = 0; i < 3 * all.size(); ++i) {
        const Work& work = all[(t + i) % all.size()];
        void* const stream = streams[t % streams.size()].handle();
        const DeviceBytes x(static_cast<int64_t>(work.x.bytes.size()), 0, false), y(x.num_bytes(), 0, false);
        x.upload(work.x.bytes.data());
        const DeviceParts device(work.spec, work.rows, work.cols, {});
        for (int round = 0; round < 10; ++round) {
          const QuantizeStatus status =
              quantize(testing::matrix(x.data(), work.dtype, work.rows, work.cols, kCuda), device.view(),
                       work.spec.encoding, {.stream = stream});
          EXPECT_TRUE(testing::same(work.parts.status, status));
          dequantize(device.view(), testing::matrix(y.data(), work.dtype, work.rows, work.cols, kCuda),
                     {.stream = stream});
        }
        Parts parts = device.download();
        parts.status = work.parts.status;
        EXPECT_TRUE(testing::same(work.parts, parts));
        std::vector<uint8_t> bytes(work.y.size());
        y.download(bytes.data());
        EXPECT_TRUE(testing::same_values(work.y, bytes, work.dtype));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// Callers that use no context of their own get along, and find none afterwards.
TEST_F(Runtime, TheCurrentContextOfTheCallerStays) {
  const auto current = [] {
    void* const library = dlopen(cuda::driver().path.c_str(), RTLD_NOW);
    const auto get =
        reinterpret_cast<cuda::CUresult (*)(cuda::CUcontext*)>(dlsym(library, "cuCtxGetCurrent"));
    cuda::CUcontext context = nullptr;
    EXPECT_EQ(get(&context), 0);
    return context;
  };
  std::thread([&] {
    EXPECT_EQ(current(), nullptr);
    const Work work = make_work()[0];
    EXPECT_TRUE(testing::same(work.parts, testing::quantize_on_cuda(work.x.bytes.data(), work.dtype,
                                                                    work.spec, work.rows, work.cols)));
    EXPECT_EQ(current(), nullptr);
    const cuda::Scope scope(cuda::context(0));
    EXPECT_EQ(testing::dequantize_on_cuda(work.parts, work.dtype), work.y);
    EXPECT_EQ(current(), cuda::context(0).context);
  }).join();
}

}  // namespace
}  // namespace halfbyte
