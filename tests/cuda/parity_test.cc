// CPU = CUDA to the byte, for every spec, dtype, granularity and kind of shape.
#include "harness.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::Parts;
using testing::Placement;
using testing::Values;

// Every scale dtype with every grouping: HALFBYTE_CUDA_FULL; else they take turns, since kernels are
// compiled for each.
const bool kFull = std::getenv("HALFBYTE_CUDA_FULL") != nullptr;

struct Grouping {
  Granularity granularity;
  int64_t size;
};
constexpr Grouping kGroupings[] = {
    {Granularity::group, 32},   {Granularity::group, 64},  {Granularity::group, 128},
    {Granularity::group, 256},  {Granularity::group, 100}, {Granularity::group, 1},
    {Granularity::group, 7},    {Granularity::group, 8},   {Granularity::group, 1000},
    {Granularity::channel, 64}, {Granularity::tensor, 64}, {Granularity::flat, 64},
    {Granularity::flat, 100},
};
constexpr std::pair<int64_t, int64_t> kShapes[] = {
    {1, 1}, {3, 7}, {17, 8}, {3, 100}, {17, 257}, {3, 1000}, {1, 4096}, {17, 768}, {3, 2048},
};
constexpr int64_t kPool = 200000;  // values that cases are cut from

std::vector<DType> scale_dtypes(DType dtype) {
  std::vector<DType> dtypes = {DType::f32, DType::f16, DType::bf16};
  if (dtype == DType::f64) dtypes.push_back(DType::f64);
  return dtypes;
}

// Decoding does not depend on the rule that chose the scales: the first spec of each kind is decoded.
bool is_first_of_its_codes(const std::vector<testing::EncodedSpec>& specs, size_t index) {
  return std::none_of(specs.begin(), specs.begin() + static_cast<std::ptrdiff_t>(index),
                      [&](const testing::EncodedSpec& other) {
                        return other.format == specs[index].format &&
                               other.asymmetric == specs[index].asymmetric;
                      });
}

class Parity : public testing::CudaTest, public ::testing::WithParamInterface<std::tuple<size_t, DType>> {
 protected:
  const size_t index_ = std::get<0>(GetParam());
  const DType dtype_ = std::get<1>(GetParam());
  const std::vector<testing::EncodedSpec> specs_ = testing::all_specs();
  testing::EncodedSpec spec_ = specs_[index_];
  const bool decodes_ = is_first_of_its_codes(specs_, index_);
  std::mt19937_64 random_{index_ * 16 + static_cast<size_t>(dtype_)};
  Values clean_, nonfinite_;

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    clean_ = testing::random_values(dtype_, kPool, random_());
    nonfinite_ = testing::with_nonfinite(clean_);
  }

  void check(int64_t rows, int64_t cols, const Placement& place) {
    const Values& pool = random_() % 2 ? nonfinite_ : clean_;
    const auto first = static_cast<int64_t>(random_() % static_cast<uint64_t>(kPool - rows * cols));
    const uint8_t* const x = pool.bytes.data() + first * size_of(dtype_);
    SCOPED_TRACE(fmt::format("{} {} [{}, {}] from {}, placed at {} {} {}", testing::describe(spec_),
                             to_string(dtype_), rows, cols, first, place.values, place.codes, place.scales));
    Parts parts = testing::quantize_on_cpu(x, dtype_, spec_, rows, cols);
    EXPECT_TRUE(testing::same(parts, testing::quantize_on_cuda(x, dtype_, spec_, rows, cols, place)));
    if (!decodes_) return;
    EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(parts, dtype_),
                                     testing::dequantize_on_cuda(parts, dtype_, place), dtype_));
  }

  void check_shapes() {
    for (const auto& [rows, cols] : kShapes) {
      check(rows, cols, {});
      if (random_() % 3 == 0)
        check(rows, cols,
              {static_cast<int64_t>(random_() % 2), static_cast<int64_t>(random_() % 4),
               static_cast<int64_t>(random_() % 2)});
      if (HasFailure()) return;
    }
  }
};

TEST_P(Parity, quantize_and_dequantize) {
  const std::vector<DType> dtypes = scale_dtypes(dtype_);
  for (size_t g = 0; g < std::size(kGroupings); ++g)
    for (size_t s = 0; s < (kFull ? dtypes.size() : 1); ++s) {
      spec_.granularity = kGroupings[g].granularity;
      spec_.group_size = kGroupings[g].size;
      spec_.scale_dtype = dtypes[(index_ + g + s) % dtypes.size()];
      testing::fit_format(spec_);
      check_shapes();
      if (HasFailure()) return;
    }
  if (info(spec_.format).kind == FormatKind::affine) {
    spec_.encoding.code_scale = CodeScale::unrounded;
    for (const Grouping& grouping : {kGroupings[1], kGroupings[4]}) {
      spec_.granularity = grouping.granularity;
      spec_.group_size = grouping.size;
      spec_.scale_dtype = DType::f16;
      check_shapes();
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Parity,
                         ::testing::Combine(::testing::Range(size_t{0}, testing::all_specs().size()),
                                            ::testing::ValuesIn(testing::kFloatDTypes)),
                         [](const auto& info) {
                           return testing::test_name(
                               testing::short_name(testing::all_specs()[std::get<0>(info.param)]) + "_" +
                               to_string(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace halfbyte
