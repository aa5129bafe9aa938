// CPU = CUDA for very many values, and for more than 2^32. Each test uses all processors.
#include "cpu/parallel.h"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "harness.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::Parts;

using Exhaustive = testing::CudaTest;

constexpr int64_t kGroup = 64;

testing::EncodedSpec spec_of(Format format) {
  testing::EncodedSpec spec{{.format = format, .group_size = kGroup}, {info(format).default_rule}};
  testing::fit_format(spec);
  return spec;
}
// Every table format but that of the user, and `others`.
std::vector<testing::EncodedSpec> tables_and(std::initializer_list<Format> others) {
  std::vector<testing::EncodedSpec> specs;
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::table && format.format != Format::lut4)
      specs.push_back(spec_of(format.format));
  for (const Format format : others) specs.push_back(spec_of(format));
  return specs;
}

// All 65,536 bf16 values (those beyond the scale become its largest) with each of 4,096 scales, which the
// first two elements of a group set.
TEST_F(Exhaustive, AllBf16ValuesAgainst4096Scales) {
  constexpr int64_t kWalk = kGroup - 2, kGroups = (0x10000 + kWalk - 1) / kWalk;  // that one scale needs
  constexpr int64_t kScales = 4096, kBlock = 128;                                 // scales at a time
  std::mt19937_64 random(3);
  std::vector<uint16_t> scales;  // half of them where weights are, half anywhere
  for (int i = 0; i < kScales; ++i)
    scales.push_back(static_cast<uint16_t>(i % 2 ? 1 + random() % 0x7F7F : 0x3800 + random() % 0x800));
  std::vector<uint16_t> x(kBlock * kGroups * kGroup);
  for (int64_t first = 0; first < kScales; first += kBlock) {
    parallel_for(kBlock, 1, 0, [&](int64_t begin, int64_t end, int) {
      for (int64_t s = begin; s < end; ++s) {
        const uint16_t largest = scales[static_cast<size_t>(first + s)];
        uint16_t* group = x.data() + s * kGroups * kGroup;
        for (int64_t v = 0; v < kGroups * kWalk; ++v) {
          if (v % kWalk == 0) {
            *group++ = largest;
            *group++ = static_cast<uint16_t>(largest | 0x8000);
          }
          *group++ = static_cast<uint16_t>((v & 0x7FFF) <= largest ? v : largest);
        }
      }
    });
    const auto* const bytes = reinterpret_cast<const uint8_t*>(x.data());
    for (const testing::EncodedSpec& spec :
         tables_and({Format::int4, Format::int8, Format::affine4, Format::fp8})) {
      SCOPED_TRACE(fmt::format("{} scales from {}", testing::describe(spec), first));
      const auto n = static_cast<int64_t>(x.size());
      const Parts cpu = testing::quantize_on_cpu(bytes, DType::bf16, spec, 1, n);
      EXPECT_TRUE(testing::same(cpu, testing::quantize_on_cuda(bytes, DType::bf16, spec, 1, n)));
      if (first % 1024 == 0) {  // the kernel for any alignment
        EXPECT_TRUE(testing::same(cpu, testing::quantize_on_cuda(bytes, DType::bf16, spec, 1, n, {1, 1, 1})));
      }
      if (HasFailure()) return;
    }
  }
}

// ---- A billion values per format

// SplitMix64.
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
};

float to_float(uint32_t bits) { return formats::bit_cast<float>(bits); }
float to_float(uint16_t bits) { return formats::bf16_to_f32(bits); }
template <class Bits>
Bits from_float(float x) {
  if constexpr (sizeof(Bits) == 2)
    return formats::to_bf16(x);
  else
    return formats::bit_cast<Bits>(x);
}

// A group (f32 or bf16, as bits) with a largest magnitude of any kind, and with random values or with such
// within two units of the thresholds between codes.
template <class Bits>
void fill_group(Random& random, const formats::Codec& codec, Bits* group) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const auto infinity = from_float<Bits>(INFINITY);
  constexpr float kUnits[] = {7, 7.5f, 1};  // give scales that are powers of two, and so ties
  Bits largest = 0;
  switch (random() % 8) {
    case 0:
      largest = static_cast<Bits>(1 + random() % (infinity - 1u));
      break;
    case 1:
      largest = static_cast<Bits>(infinity - 1 - random() % 64);
      break;
    case 2:
      largest = static_cast<Bits>(1 + random() % (sizeof(Bits) == 2 ? 256 : 1 << 24));
      break;
    case 3:
      largest = from_float<Bits>(std::ldexp(kUnits[random() % 3], static_cast<int>(random() % 20) - 14));
      break;
    default:
      largest = from_float<Bits>(std::ldexp(1 + static_cast<float>(random() % (1 << 23)) / (1 << 23),
                                            static_cast<int>(random() % 12) - 9));
      break;
  }
  const float absmax = to_float(largest);
  const formats::GroupParams<float> params = formats::group_params(-absmax, absmax, codec);
  const bool adversarial = random() % 2 == 0;
  group[0] = largest;
  group[1] = static_cast<Bits>(largest | kSign);
  for (int64_t i = 2; i < kGroup; ++i) {
    const uint64_t r = random();
    if (!adversarial) {  // nearly normal: a sum of four
      const auto sum = static_cast<int>((r & 0xFFFF) + (r >> 16 & 0xFFFF) + (r >> 32 & 0xFFFF) + (r >> 48));
      group[i] = from_float<Bits>(static_cast<float>(sum - 131070) / 131070 * absmax);
      continue;
    }
    double threshold = 0;
    if (codec.kind == formats::Kind::table)
      threshold = codec.book.edges_f64[r % 15] * static_cast<double>(params.code_scale);
    else if (codec.kind == formats::Kind::floating)  // half way to the next code
      threshold = (static_cast<double>(formats::e4m3_to_f32(static_cast<formats::u8>(r % 126))) +
                   static_cast<double>(formats::e4m3_to_f32(static_cast<formats::u8>(r % 126 + 1)))) /
                  2 * static_cast<double>(params.code_scale);
    else
      threshold = (static_cast<double>(r % 17) - (codec.kind == formats::Kind::affine ? 0.5 : 8.5)) *
                      static_cast<double>(params.code_scale) +
                  static_cast<double>(params.code_bias);
    const auto bits = from_float<Bits>(static_cast<float>(threshold));
    const int64_t magnitude =
        static_cast<int64_t>(bits & static_cast<Bits>(~kSign)) + static_cast<int>(r >> 32) % 3;
    group[i] = static_cast<Bits>((bits & kSign) | std::clamp<int64_t>(magnitude, 0, largest));
  }
}

template <class Bits>
void check_many(const testing::EncodedSpec& chosen, DType dtype) {
  constexpr int64_t kBlock = 1 << 24, kBlocks = 32;
  testing::EncodedSpec spec = chosen;
  std::vector<Bits> x(kBlock);
  for (int64_t block = 0; block < kBlocks; ++block) {
    // f16 holds the scales of weights only; the status tells of the others.
    spec.scale_dtype = block % 4 == 3 ? DType::f16 : DType::f32;
    testing::fit_format(spec);
    const formats::Codec codec = make_codec(spec, spec.encoding);
    parallel_for(kBlock / kGroup, 1024, 0, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        Random random{static_cast<uint64_t>(block * kBlock + i)};
        fill_group(random, codec, x.data() + i * kGroup);
      }
    });
    SCOPED_TRACE(fmt::format("{} {} block {}", testing::describe(spec), to_string(dtype), block));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(x.data());
    const Parts cpu = testing::quantize_on_cpu(bytes, dtype, spec, kBlock / 4096, 4096);
    EXPECT_EQ(cpu.status.num_nonfinite, 0);
    EXPECT_TRUE(testing::same(cpu, testing::quantize_on_cuda(bytes, dtype, spec, kBlock / 4096, 4096)));
    if (::testing::Test::HasFailure()) return;
  }
}

// 2^29 values for each dtype of each format.
TEST_F(Exhaustive, ABillionRandomAndAdversarialValues) {
  for (const testing::EncodedSpec& spec : tables_and({Format::int4, Format::affine4, Format::fp8})) {
    check_many<uint32_t>(spec, DType::f32);
    check_many<uint16_t>(spec, DType::bf16);
    if (HasFailure()) return;
  }
}

// ---- More than 2^32 elements

// Element i of the tensor is element i % kPeriod of the block: no power of two, so that an index that has
// lost its high bits is seen.
constexpr int64_t kPeriod = (int64_t{1} << 26) - 1237 * kGroup;

// Fills device memory with the `num_bytes` bytes at its start, over and over.
void repeat(const Memory& memory, int64_t num_bytes) {
  for (int64_t filled = num_bytes; filled < memory.num_bytes();) {
    const int64_t n = std::min(filled, memory.num_bytes() - filled);
    copy(kCuda, memory.data() + filled, memory.data(), n);
    filled += n;
  }
}
void poison(const Memory& memory) {
  const std::vector<uint8_t> bytes(4096, Parts::kPoison);
  copy(kCuda, memory.data(), bytes.data(), std::min<int64_t>(4096, memory.num_bytes()));
  repeat(memory, std::min<int64_t>(4096, memory.num_bytes()));
}
void wait() {
  const cuda::Scope scope(cuda::context(kCuda.index));
  cuda::synchronize(nullptr);
}
// The first num_bytes bytes on the device are `block`, over and over; then come those of `tail`.
void expect_repeated(const char* name, const Memory& memory, const uint8_t* block, int64_t block_bytes,
                     int64_t num_bytes, const std::vector<uint8_t>& tail) {
  const Memory host = Memory::host(kCuda, block_bytes);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(host.data());
  for (int64_t begin = 0; begin < num_bytes; begin += block_bytes) {
    const int64_t n = std::min(block_bytes, num_bytes - begin);
    copy(kCuda, host.data(), memory.data() + begin, n);
    wait();
    ASSERT_TRUE(testing::same_bytes(name, block, bytes, static_cast<size_t>(n)))
        << "in the block at byte " << begin;
  }
  ASSERT_EQ(memory.num_bytes() - num_bytes, static_cast<int64_t>(tail.size()));
  copy(kCuda, host.data(), memory.data() + num_bytes, static_cast<int64_t>(tail.size()));
  wait();
  EXPECT_TRUE(testing::same_bytes(name, tail.data(), bytes, tail.size())) << "in the last group";
}

// The block in bf16: nearly normal, within 1 / 32.
std::vector<uint16_t> huge_block() {
  std::vector<uint16_t> block(kPeriod);
  parallel_for(kPeriod, 1 << 16, 0, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t r = Random{static_cast<uint64_t>(i)}();
      const auto sum = static_cast<int>((r & 0xFFFF) + (r >> 16 & 0xFFFF) + (r >> 32 & 0xFFFF) + (r >> 48));
      block[static_cast<size_t>(i)] = formats::to_bf16(static_cast<float>(sum - 131070) * 0x1p-22f);
    }
  });
  return block;
}

void check_huge(Format format, int64_t rows, int64_t cols) {
  const testing::EncodedSpec spec = spec_of(format);
  SCOPED_TRACE(fmt::format("{} [{}, {}]", testing::describe(spec), rows, cols));
  const int64_t n = rows * cols, last_group = (n - 1) / kGroup * kGroup;
  const std::vector<uint16_t> block = huge_block();
  // The last group, whose last element is not finite.
  std::vector<uint16_t> tail;
  for (int64_t i = last_group; i < n; ++i) tail.push_back(block[static_cast<size_t>(i % kPeriod)]);
  tail.back() = 0x7FC0;

  const auto without_guard = [](std::vector<uint8_t> bytes) {
    bytes.resize(bytes.size() - Parts::kGuard);
    return bytes;
  };
  Parts cpu =
      testing::quantize_on_cpu(reinterpret_cast<const uint8_t*>(block.data()), DType::bf16, spec, 1, kPeriod);
  Parts cpu_tail = testing::quantize_on_cpu(reinterpret_cast<const uint8_t*>(tail.data()), DType::bf16, spec,
                                            1, static_cast<int64_t>(tail.size()));
  ASSERT_TRUE(testing::same(cpu.status, {}));
  QuantizeStatus expected = cpu_tail.status;
  expected.first_nonfinite = n - 1;

  const QuantShape shape = quant_shape(spec, rows, cols);
  const Memory x(kCuda, 2 * n), codes(kCuda, shape.code_bytes()), scales(kCuda, 4 * shape.num_groups);
  poison(codes);
  poison(scales);
  copy(kCuda, x.data(), block.data(), 2 * kPeriod);
  repeat(x, 2 * kPeriod);
  copy(kCuda, x.data() + 2 * (n - 1), &tail.back(), 2);
  const QuantizedView view{spec,          rows,    cols,   reinterpret_cast<uint8_t*>(codes.data()),
                           scales.data(), nullptr, nullptr};
  EXPECT_TRUE(
      testing::same(expected, quantize(testing::matrix(x.data(), DType::bf16, rows, cols, kCuda), view)));
  expect_repeated("codes", codes, cpu.codes.data(), kPeriod / 2, last_group / 2,
                  without_guard(cpu_tail.codes));
  expect_repeated("scales", scales, cpu.scales.data(), kPeriod / kGroup * 4, last_group / kGroup * 4,
                  without_guard(cpu_tail.scales));
  poison(x);
  dequantize(view, testing::matrix(x.data(), DType::bf16, rows, cols, kCuda));
  expect_repeated("y", x, testing::dequantize_on_cpu(cpu, DType::bf16).data(), 2 * kPeriod, 2 * last_group,
                  testing::dequantize_on_cpu(cpu_tail, DType::bf16));
}

TEST_F(Exhaustive, MoreThan2ToThe32ElementsInAlignedRows) { check_huge(Format::nf4, (1 << 20) + 1, 4096); }
TEST_F(Exhaustive, MoreThan2ToThe32ElementsInOneRow) { check_huge(Format::int4, 1, (int64_t{1} << 32) + 1); }

// Rows of 2^16 chunks of 16 elements.
void check_huge_linear(int64_t rows, const char* kernel) {
  SCOPED_TRACE(kernel);
  constexpr int64_t kCols = 1 << 20, kPeriod = 4099;
  if (cuda_info().devices[0].memory_bytes < uint64_t{100} << 30) GTEST_SKIP() << "needs 86 GB";
  const testing::Values row = testing::random_values(DType::bf16, kCols, 3);
  const Memory x(kCuda, 2 * rows * kCols), codes(kCuda, rows * kCols / 2), scales(kCuda, 4 * rows);
  std::vector<float> scale(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r)
    scale[static_cast<size_t>(r)] = 0.001f * static_cast<float>(1 + r % kPeriod);
  poison(codes);
  copy(kCuda, x.data(), row.bytes.data(), 2 * kCols);
  repeat(x, 2 * kCols);
  copy(kCuda, scales.data(), scale.data(), 4 * rows);
  constexpr uint16_t kNan = 0x7FC0;
  copy(kCuda, x.data() + 2 * (rows * kCols - 1), &kNan, 2);

  LinearDescriptor descriptor = LinearDescriptor::per_channel({rows, kCols}, 0);
  descriptor.dtype = DType::bf16;
  descriptor.code_dtype = DType::i4;
  descriptor.q_min = -8;
  descriptor.q_max = 7;
  const auto plan = QuantizeLinearPlan::select(kCuda, descriptor);
  EXPECT_EQ(plan.sku().kernel, kernel);
  const Memory workspace(kCuda, plan.workspace_size());
  plan.run(nullptr, workspace,
           {{x.data(), DType::bf16, {rows, kCols}, {}, kCuda},
            {codes.data(), DType::i4, {rows, kCols}, {}, kCuda},
            {scales.data(), DType::f32, {rows}, {}, kCuda},
            {}});
  const QuantizeStatus status = plan.status(nullptr, workspace);
  EXPECT_EQ(status.num_nonfinite, 1);
  EXPECT_EQ(status.first_nonfinite, rows * kCols - 1);
  EXPECT_EQ(status.num_invalid_scales, 0);

  descriptor.shape = {1, kCols};
  const auto of_row = QuantizeLinearPlan::select(Device{}, descriptor);
  for (const int64_t r : {int64_t{0}, int64_t{1}, kPeriod, rows / 2, rows - 2, rows - 1}) {
    std::vector<uint8_t> values = row.bytes, expected(kCols / 2), actual(kCols / 2);
    if (r == rows - 1) std::memcpy(values.data() + 2 * (kCols - 1), &kNan, 2);
    alignas(16) QuantizeStatus found;
    of_row.run(nullptr, {&found, sizeof found},
               {{values.data(), DType::bf16, {1, kCols}, {}, {}},
                {expected.data(), DType::i4, {1, kCols}, {}, {}},
                {&scale[static_cast<size_t>(r)], DType::f32, {1}, {}, {}},
                {}});
    copy(kCuda, actual.data(), codes.data() + r * kCols / 2, kCols / 2);
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
    EXPECT_TRUE(testing::same_bytes("codes", expected.data(), actual.data(), expected.size())) << "row " << r;
  }
}

// Nearly as many chunks as 32 bits count, and more, for which kernels of elements count in 64 bits.
TEST_F(Exhaustive, LinearQuantizationOfNearly2ToThe31Chunks) {
  check_huge_linear((1 << 15) - 1, "linear_chunks");
}
TEST_F(Exhaustive, LinearQuantizationOfMoreThan2ToThe31Chunks) {
  check_huge_linear((1 << 15) + 1, "linear_elements");
}

// And 2^31 lanes: a warp for each of 2^26 groups.
TEST_F(Exhaustive, LinearQuantizationOfMoreThan2ToThe26Groups) {
  constexpr int64_t kPeriod = 1 << 16, kRows = (int64_t{1} << 26) + kPeriod, kCols = 7;
  const testing::Values part = testing::random_values(DType::bf16, kPeriod * kCols, 4);
  const Memory x(kCuda, 2 * kRows * kCols), codes(kCuda, kRows * kCols), scales(kCuda, 4 * kRows);
  poison(codes);
  poison(scales);
  copy(kCuda, x.data(), part.bytes.data(), 2 * kPeriod * kCols);
  repeat(x, 2 * kPeriod * kCols);
  const auto run = [](Device device, int64_t rows, const void* values, void* to, void* scale,
                      const Workspace& space) {
    LinearDescriptor descriptor = LinearDescriptor::per_token({rows, kCols});
    descriptor.dtype = DType::bf16;
    descriptor.computed = true;
    const auto plan = QuantizeLinearPlan::select(device, descriptor);
    plan.run(nullptr, space,
             {{const_cast<void*>(values), DType::bf16, {rows, kCols}, {}, device},
              {to, DType::i8, {rows, kCols}, {}, device},
              {scale, DType::f32, {rows, 1}, {}, device},
              {}});
    return plan.status(nullptr, space);
  };
  const Memory workspace(kCuda, 16 * kRows + 4096);
  const QuantizeStatus status = run(kCuda, kRows, x.data(), codes.data(), scales.data(), workspace);
  alignas(16) QuantizeStatus space;
  std::vector<uint8_t> expected(kPeriod * kCols), expected_scales(4 * kPeriod);
  const QuantizeStatus once =
      run({}, kPeriod, part.bytes.data(), expected.data(), expected_scales.data(), {&space, sizeof space});
  EXPECT_EQ(status.num_coarse_scales, once.num_coarse_scales * (kRows / kPeriod));
  expect_repeated("codes", codes, expected.data(), kPeriod * kCols, (kRows - kPeriod) * kCols, expected);
  expect_repeated("scales", scales, expected_scales.data(), 4 * kPeriod, 4 * (kRows - kPeriod),
                  expected_scales);
}

// Fake quantization that writes the mask, then gradients by it, both in place.
void check_huge_fake(int64_t n, const char* kernel) {
  SCOPED_TRACE(fmt::format("[{}]", n));
  const int64_t last_byte = (n - 1) / 8 * 8;  // of the mask: its first element
  std::vector<uint16_t> block = huge_block(), tail;
  for (int64_t i = last_byte; i < n; ++i) tail.push_back(block[static_cast<size_t>(i % kPeriod)]);
  tail.back() = 0x7FC0;

  const auto run = [](bool forward, Device device, int64_t count, void* dense, void* mask, void* scale,
                      const Workspace& workspace) {
    FakeQuantizeDescriptor descriptor;
    descriptor.shape = {count};
    descriptor.dtype = DType::bf16;
    descriptor.mask = true;
    const TensorView in_place{dense, DType::bf16, {count}, {}, device},
        bits{mask, DType::u8, descriptor.mask_shape(), {}, device};
    const auto run_plan = [&](const auto& plan, const auto& args) {
      EXPECT_LE(plan.workspace_size(), 1024);
      plan.run(nullptr, workspace, args);
      return std::pair(plan.sku().kernel, plan.status(nullptr, workspace));
    };
    if (forward)
      return run_plan(
          FakeQuantizePlan::select(device, descriptor),
          FakeQuantize::Args{in_place, in_place, {scale, DType::f32, {}, {}, device}, {}, bits, {}, {}, {}});
    return run_plan(FakeQuantizeBackwardPlan::select(device, descriptor),
                    FakeQuantizeBackward::Args{{}, bits, in_place, {}, {}, in_place});
  };
  float scale = 0.0021f;
  const Memory dense(kCuda, 2 * n), mask(kCuda, (n + 7) / 8), scale_memory(kCuda, 4), workspace(kCuda, 1024);
  alignas(16) std::array<std::byte, 1024> host_workspace;
  poison(mask);
  copy(kCuda, dense.data(), block.data(), 2 * kPeriod);
  repeat(dense, 2 * kPeriod);
  copy(kCuda, dense.data() + 2 * (n - 1), &tail.back(), 2);
  copy(kCuda, scale_memory.data(), &scale, 4);
  std::vector<uint8_t> block_mask(kPeriod / 8), tail_mask(1);
  for (const bool forward : {true, false}) {
    const auto [name, status] =
        run(forward, kCuda, n, dense.data(), mask.data(), scale_memory.data(), workspace);
    EXPECT_EQ(name, forward ? kernel : "mask_gradients");
    QuantizeStatus expected;
    if (forward) expected.num_nonfinite = 1, expected.first_nonfinite = n - 1;
    EXPECT_TRUE(testing::same(expected, status));
    run(forward, {}, kPeriod, block.data(), block_mask.data(), &scale, host_workspace);
    run(forward, {}, n - last_byte, tail.data(), tail_mask.data(), &scale, host_workspace);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(block.data());
    const auto* const tail_bytes = reinterpret_cast<const uint8_t*>(tail.data());
    expect_repeated(forward ? "y" : "dx", dense, bytes, 2 * kPeriod, 2 * last_byte,
                    {tail_bytes, tail_bytes + 2 * tail.size()});
    if (::testing::Test::HasFailure()) return;
    expect_repeated("mask", mask, block_mask.data(), kPeriod / 8, last_byte / 8, tail_mask);
  }
}

TEST_F(Exhaustive, FakeQuantizationOfMoreThan2ToThe31Elements) {
  check_huge_fake((int64_t{1} << 31) + 1, "fake_elements");
}
// And of nearly as many chunks of 8, and more.
TEST_F(Exhaustive, FakeQuantizationOf2ToThe31Chunks) {
  if (cuda_info().devices[0].memory_bytes < uint64_t{50} << 30) GTEST_SKIP() << "needs 37 GB";
  check_huge_fake((int64_t{1} << 34) - 8 * 1237, "fake_chunks");
  check_huge_fake((int64_t{1} << 34) + 8 * 1237, "fake_elements");
}

// The gradients of a learned scale, one for 2^31 + 1 elements: sums in several stages.
TEST_F(Exhaustive, LearnedScaleOfMoreThan2ToThe31Elements) {
  constexpr int64_t kElements = (int64_t{1} << 31) + 1, kPeriod = 1000003;
  FakeQuantizeDescriptor descriptor;
  descriptor.shape = {kElements};
  descriptor.dtype = DType::bf16;
  descriptor.zero_point_dtype = DType::f32;
  descriptor.gradient_scale = 1e-4;
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal(0, 0.02);
  testing::Values block;
  block.dtype = DType::bf16;
  for (int64_t i = 0; i < 2 * kPeriod; ++i) block.push_back(normal(random));
  const Memory x(kCuda, 2 * kElements), dx(kCuda, 2 * kElements), small(kCuda, 1024);
  copy(kCuda, x.data(), block.bytes.data(), 2 * kPeriod);
  repeat(x, 2 * kPeriod);
  copy(kCuda, dx.data(), block.bytes.data() + 2 * kPeriod, 2 * kPeriod);
  repeat(dx, 2 * kPeriod);
  const std::array<float, 2> parameters = {0.004f, 1.25f};
  copy(kCuda, small.data(), &parameters[0], 4);
  copy(kCuda, small.data() + 256, &parameters[1], 4);
  std::vector<uint8_t> host_x(static_cast<size_t>(2 * kElements)), host_dx(host_x.size());
  copy(kCuda, host_x.data(), x.data(), 2 * kElements);
  copy(kCuda, host_dx.data(), dx.data(), 2 * kElements);
  wait();
  const auto run = [&](Device device, void* x_data, void* dx_data, const std::array<void*, 4>& one,
                       const Workspace& workspace) {
    const auto plan = FakeQuantizeLearnedBackwardPlan::select(device, descriptor);
    const auto view = [&](void* data, DType dtype, std::vector<int64_t> shape) {
      return TensorView{data, dtype, std::move(shape), {}, device};
    };
    const TensorView dense = view(dx_data, DType::bf16, {kElements});
    plan.run(
        nullptr, workspace,
        {view(x_data, DType::bf16, {kElements}), dense, view(one[0], DType::f32, {}),
         view(one[1], DType::f32, {}), dense, view(one[2], DType::f32, {}), view(one[3], DType::f32, {})});
    EXPECT_TRUE(testing::same(plan.status(nullptr, workspace), {}));
  };
  const Memory workspace(kCuda, FakeQuantizeLearnedBackwardPlan::select(kCuda, descriptor).workspace_size());
  run(kCuda, x.data(), dx.data(), {small.data(), small.data() + 256, small.data() + 512, small.data() + 768},
      workspace);
  std::array<float, 4> host = {parameters[0], parameters[1]};
  alignas(16) QuantizeStatus host_status;
  run(Device{}, host_x.data(), host_dx.data(), {&host[0], &host[1], &host[2], &host[3]},
      {&host_status, sizeof host_status});
  std::array<float, 2> sums{};
  copy(kCuda, &sums[0], small.data() + 512, 4);
  copy(kCuda, &sums[1], small.data() + 768, 4);
  copy(kCuda, host_x.data(), dx.data(), 2 * kElements);
  wait();
  EXPECT_TRUE(testing::same_bytes("dx", host_dx.data(), host_x.data(), host_dx.size()));
  EXPECT_EQ(sums[0], host[2]);
  EXPECT_EQ(sums[1], host[3]);
  EXPECT_NE(sums[0], 0);
}

// Groups of 17 chunks, each filled up to 32: 2^26 of them have 2^31 places.
void check_many_learned_scales(int64_t groups_beyond, const char* kernel) {
  SCOPED_TRACE(kernel);
  constexpr int64_t kPeriod = 1 << 12, kCols = 17 * 8;
  const int64_t rows = (int64_t{1} << 26) + groups_beyond;  // a multiple of kPeriod
  if (cuda_info().devices[0].memory_bytes < uint64_t{50} << 30) GTEST_SKIP() << "needs 40 GB";
  const testing::Values part = testing::random_values(DType::bf16, kPeriod * kCols, 6),
                        gradients = testing::random_values(DType::bf16, kPeriod * kCols, 7);
  std::vector<float> scale(kPeriod);
  for (int64_t r = 0; r < kPeriod; ++r)
    scale[static_cast<size_t>(r)] = 0.001f * static_cast<float>(1 + r % 99);
  const Memory x(kCuda, 2 * rows * kCols), dx(kCuda, 2 * rows * kCols), scales(kCuda, 4 * rows),
      dscale(kCuda, 4 * rows);
  copy(kCuda, x.data(), part.bytes.data(), 2 * kPeriod * kCols);
  repeat(x, 2 * kPeriod * kCols);
  copy(kCuda, dx.data(), gradients.bytes.data(), 2 * kPeriod * kCols);
  repeat(dx, 2 * kPeriod * kCols);
  copy(kCuda, scales.data(), scale.data(), 4 * kPeriod);
  repeat(scales, 4 * kPeriod);
  poison(dscale);
  const auto run = [](Device device, int64_t count, void* x_data, void* dx_data, void* scale_data,
                      void* dscale_data, const Workspace& workspace) {
    FakeQuantizeDescriptor descriptor;
    descriptor.shape = {count, kCols};
    descriptor.granularity = Granularity::channel;
    descriptor.axis = 0;
    descriptor.dtype = DType::bf16;
    const auto plan = FakeQuantizeLearnedBackwardPlan::select(device, descriptor);
    const TensorView dense{dx_data, DType::bf16, {count, kCols}, {}, device};
    plan.run(nullptr, workspace,
             {{x_data, DType::bf16, {count, kCols}, {}, device},
              dense,
              {scale_data, DType::f32, {count}, {}, device},
              {},
              dense,
              {dscale_data, DType::f32, {count}, {}, device},
              {}});
    EXPECT_TRUE(testing::same(plan.status(nullptr, workspace), {}));
    return plan.sku().kernel;
  };
  const Memory workspace(kCuda, 1024);
  EXPECT_EQ(run(kCuda, rows, x.data(), dx.data(), scales.data(), dscale.data(), workspace), kernel);
  std::vector<uint8_t> host_x = part.bytes, host_dx = gradients.bytes;
  std::vector<float> host_dscale(kPeriod);
  alignas(16) QuantizeStatus status;
  run(Device{}, kPeriod, host_x.data(), host_dx.data(), scale.data(), host_dscale.data(),
      {&status, sizeof status});
  expect_repeated("dx", dx, host_dx.data(), 2 * kPeriod * kCols, 2 * rows * kCols, {});
  expect_repeated("dscale", dscale, reinterpret_cast<const uint8_t*>(host_dscale.data()), 4 * kPeriod,
                  4 * rows, {});
}
TEST_F(Exhaustive, LearnedScalesOfNearly2ToThe26Groups) { check_many_learned_scales(-(1 << 12), "lsq_rows"); }
TEST_F(Exhaustive, LearnedScalesOfMoreThan2ToThe26Groups) {
  check_many_learned_scales(1 << 12, "lsq_elements");
}

}  // namespace
}  // namespace halfbyte
