// Every kind of kernel once, at small shapes with tails and in arrays without guards: for a checker of memory
// accesses and races (compute-sanitizer).
#include "harness.h"

namespace halfbyte {
namespace {

using testing::Parts;
using testing::Placement;
using testing::Values;

// One spec per format; the rules take turns.
std::vector<testing::EncodedSpec> specs_of_formats() {
  std::vector<testing::EncodedSpec> specs;
  for (const FormatInfo& format : all_formats()) {
    std::vector<testing::EncodedSpec> candidates;
    for (const testing::EncodedSpec& spec : testing::all_specs())
      if (spec.format == format.format) candidates.push_back(spec);
    specs.push_back(candidates[specs.size() % candidates.size()]);
  }
  return specs;
}

struct Case {
  Granularity granularity;
  int64_t group_size, rows, cols;
  Placement place;
};
constexpr Case kCases[] = {
    {Granularity::group, 32, 3, 96, {.exact = true}},   {Granularity::group, 64, 3, 192, {.exact = true}},
    {Granularity::group, 128, 3, 384, {.exact = true}}, {Granularity::group, 256, 5, 256, {.exact = true}},
    {Granularity::group, 100, 3, 200, {.exact = true}},  // any group size, aligned
    {Granularity::group, 7, 3, 37, {1, 1, 1, true}},     // any group size, unaligned
    {Granularity::tensor, 64, 3, 88, {.exact = true}},   // with ranges, aligned
    {Granularity::tensor, 64, 3, 61, {1, 1, 1, true}},   // with ranges, unaligned
};

class Sanitize : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {};

TEST_P(Sanitize, quantize_and_dequantize) {
  const size_t index = GetParam();
  testing::EncodedSpec spec = specs_of_formats()[index];
  for (size_t c = 0; c < std::size(kCases); ++c) {
    const Case& test = kCases[c];
    const DType dtype = testing::kFloatDTypes[(index + c) % 4];
    spec.granularity = test.granularity;
    spec.group_size = test.group_size;
    spec.scale_dtype = testing::kFloatDTypes[(index / 4 + c) % (dtype == DType::f64 ? 4 : 3)];
    testing::fit_format(spec);
    SCOPED_TRACE(
        fmt::format("{} {} [{}, {}]", testing::describe(spec), to_string(dtype), test.rows, test.cols));
    const Values clean = testing::random_values(dtype, test.rows * test.cols, index * 8 + c);
    for (const Values& x : {clean, testing::with_nonfinite(clean)}) {
      Parts parts = testing::quantize_on_cpu(x.bytes.data(), dtype, spec, test.rows, test.cols);
      EXPECT_TRUE(testing::same(
          parts, testing::quantize_on_cuda(x.bytes.data(), dtype, spec, test.rows, test.cols, test.place)));
      EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(parts, dtype),
                                       testing::dequantize_on_cuda(parts, dtype, test.place), dtype));
      if (spec.granularity != Granularity::tensor && info(spec.format).kind != FormatKind::floating) {
        testing::EncodedSpec searched = spec;
        searched.encoding.search = true;
        const std::vector<float> weights(static_cast<size_t>(test.cols), 0.5f);
        const Importance importance = c % 2 ? Importance{weights.data(), test.cols, 0} : Importance{};
        EXPECT_TRUE(testing::same(testing::quantize_on_cpu(x.bytes.data(), dtype, searched, test.rows,
                                                           test.cols, nullptr, importance),
                                  testing::quantize_on_cuda(x.bytes.data(), dtype, searched, test.rows,
                                                            test.cols, test.place, nullptr, importance)));
      }
      const testing::DeviceBytes device(static_cast<int64_t>(x.bytes.size()), 0, true);
      device.upload(x.bytes.data());
      const ValueRange range =
          value_range(testing::matrix(device.data(), dtype, test.rows, test.cols, testing::kCuda));
      const ValueRange expected =
          value_range({const_cast<uint8_t*>(x.bytes.data()), dtype, {test.rows, test.cols}, {}, {}});
      EXPECT_EQ(range.min, expected.min);
      EXPECT_EQ(range.max, expected.max);
      EXPECT_EQ(range.num_nonfinite, parts.status.num_nonfinite);
      EXPECT_EQ(range.first_nonfinite, parts.status.first_nonfinite);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Sanitize, ::testing::Range(size_t{0}, all_formats().size()),
                         [](const auto& info) { return std::string(all_formats()[info.param].name); });

}  // namespace
}  // namespace halfbyte
