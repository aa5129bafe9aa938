// Searched scales: CPU = CUDA to the byte.
#include "halfbyte/quantize_plan.hpp"
#include "harness.h"

namespace halfbyte {
namespace {

using testing::EncodedSpec;
using testing::kCuda;
using testing::Parts;
using testing::Values;

struct Shape {
  Granularity granularity;
  int64_t group_size, rows, cols;
};
constexpr Shape kShapes[] = {
    {Granularity::group, 64, 40, 512},   {Granularity::group, 128, 9, 1024},
    {Granularity::group, 32, 3, 96},     {Granularity::group, 100, 5, 1000},
    {Granularity::group, 7, 3, 257},     {Granularity::group, 1000, 3, 3500},
    {Granularity::group, 2000, 3, 4100}, {Granularity::flat, 64, 7, 100},
    {Granularity::channel, 64, 5, 1500}, {Granularity::channel, 64, 2, 9001},
    {Granularity::group, 64, 0, 64},     {Granularity::channel, 64, 3, 1},
};

class ScaleSearch : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {};

TEST_P(ScaleSearch, EqualsTheCpu) {
  std::mt19937_64 random(GetParam());
  EncodedSpec spec = testing::searched_specs()[GetParam()];
  for (const DType dtype : testing::kFloatDTypes) {
    for (size_t s = 0; s < std::size(kShapes); ++s) {
      const Shape& shape = kShapes[s];
      spec.granularity = shape.granularity;
      spec.group_size = shape.group_size;
      const DType scale_dtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
      spec.scale_dtype = scale_dtypes[(GetParam() + s) % (dtype == DType::f64 ? 4 : 3)];
      testing::fit_format(spec);
      const int64_t rows = shape.rows, cols = shape.cols;
      std::vector<float> weights;
      for (int64_t i = 0; i < cols; ++i)
        weights.push_back(random() % 8 == 0 ? 0.0f : static_cast<float>(random() % 1000) / 64);
      const Values clean = testing::random_values(dtype, rows * cols, random());
      const Values x = s % 3 == 1 ? testing::with_nonfinite(clean) : clean;
      for (const bool weighted : {false, true}) {
        const Importance importance =
            weighted ? Importance{weights.data(), cols, static_cast<int64_t>(s) % cols} : Importance{};
        const testing::Placement place{static_cast<int64_t>(random() % 2), static_cast<int64_t>(random() % 4),
                                       static_cast<int64_t>(random() % 2)};
        SCOPED_TRACE(fmt::format("{} {} [{}, {}]{}", testing::describe(spec), to_string(dtype), rows, cols,
                                 weighted ? " weighted" : ""));
        const Parts cpu =
            testing::quantize_on_cpu(x.bytes.data(), dtype, spec, rows, cols, nullptr, importance);
        EXPECT_TRUE(testing::same(cpu, testing::quantize_on_cuda(x.bytes.data(), dtype, spec, rows, cols,
                                                                 place, nullptr, importance)));
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ScaleSearch, ::testing::Range(size_t{0}, testing::searched_specs().size()),
                         [](const auto& info) {
                           return testing::test_name(
                               testing::short_name(testing::searched_specs()[info.param]));
                         });

using ScaleSearchPlan = testing::CudaTest;

TEST_F(ScaleSearchPlan, IsTheKernelOfAPlan) {
  EncodedSpec spec;
  spec.encoding.search = true;
  const auto plan =
      QuantizePlan::select(kCuda, {.spec = spec, .rows = 4, .cols = 256, .encoding = spec.encoding});
  EXPECT_EQ(plan.sku().kernel, "quantize_search");
}

TEST_F(ScaleSearchPlan, ImportanceThatIsNotAlignedIsRefused) {
  EncodedSpec spec;
  spec.encoding.search = true;
  const testing::DeviceBytes x(256, 0, false), weights(257, 1, false);
  const testing::DeviceParts parts(spec, 1, 64, {});
  EXPECT_THROW(quantize(testing::matrix(x.data(), DType::f32, 1, 64, kCuda), parts.view(), spec.encoding, {},
                        nullptr, {reinterpret_cast<const float*>(weights.data()), 64, 0}),
               Error);
}

}  // namespace
}  // namespace halfbyte
