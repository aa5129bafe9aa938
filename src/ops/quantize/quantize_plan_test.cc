// Plans of `quantize` and `dequantize`: the bytes of the functions, and what is refused.
#include "halfbyte/quantize_plan.hpp"

#include <functional>

#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::Parts;
using testing::Values;

constexpr Granularity kGranularities[] = {Granularity::tensor, Granularity::channel, Granularity::group,
                                          Granularity::flat};

QuantizeDescriptor descriptor_of(const testing::EncodedSpec& spec, int64_t rows, int64_t cols, DType dtype) {
  return {spec, rows, cols, dtype, size_of(dtype), spec.encoding};
}

void expect_equal(const QuantizeStatus& actual, const QuantizeStatus& expected) {
  EXPECT_TRUE(testing::same_status(actual, expected))
      << testing::text_of(actual) << "; expected " << testing::text_of(expected);
}

// Both operations, by plans and by the functions.
void compare(Values& x, const testing::EncodedSpec& spec, int64_t rows, int64_t cols,
             const PlanPreference& preference) {
  SCOPED_TRACE(fmt::format("{}, {} [{}, {}]", testing::describe(spec), to_string(x.dtype), rows, cols));
  const QuantizeDescriptor descriptor = descriptor_of(spec, rows, cols, x.dtype);
  alignas(16) std::array<uint8_t, 64> workspace;
  workspace.fill(Parts::kPoison);
  const auto quantize_plan = QuantizePlan::select(Device{}, descriptor, preference);
  ASSERT_LE(quantize_plan.workspace_size(), 64);
  Parts expected = testing::quantize_parts(x, spec, rows, cols), parts(spec, rows, cols);
  const Quantize::Args args{x.view({rows, cols}), parts.view()};
  const auto refusal = quantize_plan.can_implement(args);
  ASSERT_FALSE(refusal) << refusal->what();
  quantize_plan.run(nullptr, workspace, args);
  EXPECT_TRUE(parts.same_bytes(expected));
  expect_equal(quantize_plan.status(nullptr, workspace), expected.status);

  const auto size = static_cast<size_t>(rows * cols * size_of(x.dtype));
  std::vector<uint8_t> values(size + 1, Parts::kPoison), y = values;  // one more, so that there is some
  const auto view = [&](std::vector<uint8_t>& to) {
    return TensorView{to.data(), x.dtype, {rows, cols}, {}, {}, static_cast<int64_t>(size)};
  };
  dequantize(expected.view(), view(values));
  const auto dequantize_plan = DequantizePlan::select(Device{}, descriptor, preference);
  ASSERT_LE(dequantize_plan.workspace_size(), 64);
  dequantize_plan.run(nullptr, workspace, {parts.view(), view(y)});
  EXPECT_EQ(values, y);
  expect_equal(dequantize_plan.status(nullptr, workspace), {});
}

TEST(QuantizePlan, EqualsTheFunctions) {
  uint64_t seed = 0;
  for (testing::EncodedSpec spec : testing::all_specs())
    for (const DType dtype : testing::kFloatDTypes)
      for (const Granularity granularity : kGranularities)
        for (const DType scale_dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
          if (scale_dtype == DType::f64 && dtype != DType::f64) continue;
          spec.granularity = granularity;
          spec.scale_dtype = scale_dtype;
          spec.group_size = granularity == Granularity::flat ? 24 : 32;
          testing::fit_format(spec);
          Values x = testing::random_values(dtype, 5 * 77, ++seed);
          compare(x, spec, 5, 77, {1});
        }
}

// Codes lie anywhere, x and y at multiples of their elements, whatever `alignment` says.
TEST(QuantizePlan, AnyAddressOnTheCpu) {
  for (QuantSpec spec : testing::all_specs())
    for (const DType dtype : testing::kFloatDTypes) {
      spec.group_size = 64;
      testing::fit_format(spec);
      const int64_t size = size_of(dtype), rows = 3, cols = 320, num_bytes = rows * cols * size;
      Values x = testing::random_values(dtype, rows * cols, 8);
      Parts expected = testing::quantize_parts(x, spec, rows, cols);
      std::vector<uint8_t> y(static_cast<size_t>(num_bytes));
      const auto view = [&](uint8_t* to) { return TensorView{to, dtype, {rows, cols}, {}, {}}; };
      dequantize(expected.view(), view(y.data()));
      const QuantizeDescriptor descriptor{spec, rows, cols, dtype, 16};
      alignas(16) std::array<uint8_t, 64> workspace;
      for (const int64_t shift : {1, 3, 7}) {
        SCOPED_TRACE(fmt::format("{}, {}, shift {}", testing::describe(spec), to_string(dtype), shift));
        const QuantShape shape = quant_shape(spec, rows, cols);
        std::vector<uint8_t> codes(static_cast<size_t>(shape.code_bytes() + shift)),
            dense(static_cast<size_t>(num_bytes + shift * size));
        std::ranges::copy(x.bytes, dense.begin() + shift * size);
        Parts parts(spec, rows, cols);
        QuantizedView out = parts.view();
        out.codes = codes.data() + shift;
        const TensorView shifted = view(dense.data() + shift * size);
        QuantizePlan::select(Device{}, descriptor).run(nullptr, workspace, {shifted, out});
        EXPECT_EQ(std::memcmp(out.codes, expected.view().codes, static_cast<size_t>(shape.code_bytes())), 0);
        DequantizePlan::select(Device{}, descriptor).run(nullptr, workspace, {out, shifted});
        EXPECT_EQ(std::memcmp(shifted.data, y.data(), y.size()), 0);
      }
    }
}

TEST(QuantizePlan, ReportsWhatIsInTheData) {
  Values x = testing::random_values(DType::f32, 4 * 64, 1), bad;
  for (size_t i = 0; i < x.exact.size(); ++i) bad.push_back(i == 70 || i == 200 ? NAN : x.exact[i] * 1e7);
  for (const Granularity granularity : kGranularities) {
    QuantSpec spec;
    spec.format = Format::int4;
    spec.granularity = granularity;
    spec.scale_dtype = DType::f16;  // which cannot hold them
    compare(bad, spec, 4, 64, {2});
  }
}

TEST(QuantizePlan, EmptyTensors) {
  for (testing::EncodedSpec spec : testing::all_specs())
    for (const Granularity granularity : kGranularities)
      for (const auto& [rows, cols] : {std::pair(0, 64), std::pair(3, 0), std::pair(0, 0)}) {
        spec.granularity = granularity;
        testing::fit_format(spec);
        Values x;
        compare(x, spec, rows, cols, {});
      }
}

TEST(QuantizePlan, ManyThreadsAndHigherRanks) {
  QuantSpec spec;
  spec.format = Format::int8;
  spec.asymmetric = true;
  for (const Granularity granularity : kGranularities) {
    spec.granularity = granularity;
    Values x = testing::random_values(DType::bf16, int64_t{300} * 1000, 3);
    compare(x, spec, 300, 1000, {0});
  }
  spec.granularity = Granularity::group;
  Values x = testing::random_values(DType::f32, 6 * 64, 4);
  Parts expected = testing::quantize_parts(x, spec, 6, 64), parts(spec, 6, 64);
  const auto plan = QuantizePlan::select(Device{}, descriptor_of(spec, 6, 64, DType::f32));
  alignas(16) std::array<uint8_t, 64> workspace;
  plan.run(nullptr, workspace, {x.view({2, 3, 64}), parts.view()});
  EXPECT_TRUE(parts.same_bytes(expected));
}

TEST(QuantizePlan, SaysWhatItIs) {
  QuantSpec spec;
  const auto quantize = QuantizePlan::select(Device{}, {spec, 4, 64, DType::bf16});
  EXPECT_EQ(quantize.device(), Device{});
  EXPECT_EQ(quantize.descriptor(), (QuantizeDescriptor{spec, 4, 64, DType::bf16}));
  EXPECT_EQ(quantize.sku().op, "quantize");
  EXPECT_EQ(quantize.sku().kernel, "quantize_cpu");
  EXPECT_EQ(quantize.sku().backend.find("cpu "), 0u);
  EXPECT_EQ(quantize.sku().dtypes, "bf16 -> nf4, scale f32");
  EXPECT_EQ(quantize.precision_guarantee().math, DType::f32);
  EXPECT_TRUE(quantize.precision_guarantee().deterministic);
  EXPECT_TRUE(quantize.precision_guarantee().same_on_all_devices);
  EXPECT_EQ(quantize.workspace_size(), static_cast<int64_t>(sizeof(QuantizeStatus)));

  spec.format = Format::int4;
  spec.asymmetric = true;
  spec.scale_dtype = DType::f16;
  const auto dequantize = DequantizePlan::select(Device{}, {spec, 4, 64, DType::f64});
  EXPECT_EQ(dequantize.sku().op, "dequantize");
  EXPECT_EQ(dequantize.sku().kernel, "dequantize_cpu");
  EXPECT_EQ(dequantize.sku().dtypes, "int4 -> f64, scale f16, zero point u8");
  EXPECT_EQ(dequantize.precision_guarantee().math, DType::f64);
  EXPECT_GT(dequantize.workspace_size(), 0);
  spec.format = Format::affine3;
  spec.asymmetric = false;
  EXPECT_EQ(QuantizePlan::select(Device{}, {spec, 4, 64, DType::f32}).sku().dtypes,
            "f32 -> affine3, scale f16, bias f16");
}

// ---- What is refused

void expect_refused(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << words[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(QuantizePlan, BadDescriptors) {
  const QuantizeDescriptor good{{}, 4, 64};
  const auto refused = [&](const std::function<void(QuantizeDescriptor&)>& change,
                           const std::vector<std::string>& words, bool dequantize_too = true) {
    QuantizeDescriptor bad = good;
    change(bad);
    expect_refused([&] { QuantizePlan::select(Device{}, bad); }, words);
    if (dequantize_too) expect_refused([&] { DequantizePlan::select(Device{}, bad); }, words);
  };
  using D = QuantizeDescriptor;
  refused([](D& d) { d.spec.group_size = 0; }, {"group_size", "0"});
  refused([](D& d) { d.spec.double_quant = true; }, {"double_quant", "double_quantize"});
  refused([](D& d) { d.dtype = DType::i8; }, {"dtype", "i8"});
  refused([](D& d) { d.rows = -3; }, {"-3"});
  refused([](D& d) { d.cols = -1; }, {"-1"});
  refused([](D& d) { d.rows = d.cols = int64_t{1} << 31; }, {"2^63"});
  refused([](D& d) { d.alignment = 24; }, {"alignment", "24"});
  refused([](D& d) { d.alignment = 2; }, {"alignment", "4 bytes of f32", "2"});
  refused([](D& d) { d.spec.scale_dtype = DType::f64; }, {"quantize", "scale_dtype f64", "f32"}, false);
  expect_refused([&] { QuantizePlan::select(Device{}, good, {-1}); }, {"num_threads", "-1"});
  EXPECT_THROW(QuantizePlan::select({DeviceKind::cuda, 4711}, good), Error);
}

class PlanRefusals : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 4, kCols = 64;
  // Room for everything, at multiples of 64 bytes.
  struct alignas(64) Storage {
    std::array<float, kRows * kCols> dense;
    alignas(64) std::array<uint8_t, kRows * kCols> codes;
    alignas(64) std::array<float, 16> scales;
    alignas(64) std::array<uint8_t, 16> zeros;
    alignas(64) std::array<float, 16> biases;
  };

  explicit PlanRefusals() {
    spec_.format = Format::int4;
    spec_.asymmetric = true;
  }
  TensorView dense() { return {storage_.dense.data(), DType::f32, {kRows, kCols}, {}, {}}; }
  QuantizedView parts() {
    return {spec_,
            kRows,
            kCols,
            storage_.codes.data(),
            storage_.scales.data(),
            has_zeros(spec_) ? storage_.zeros.data() : nullptr,
            has_biases(spec_) ? storage_.biases.data() : nullptr};
  }
  // Refused by both plans, which name the arguments x or y, and out or in.
  template <class Change>
  void refused(const Change& change, const std::string& argument, const std::vector<std::string>& words) {
    TensorView dense = this->dense();
    QuantizedView parts = this->parts();
    const auto quantize = QuantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
    const auto dequantize = DequantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
    EXPECT_FALSE(quantize.can_implement({dense, parts}));
    EXPECT_FALSE(dequantize.can_implement({parts, dense}));
    change(dense, parts);
    const bool of_dense = argument.empty();
    alignas(16) std::array<uint8_t, 64> workspace;
    std::vector<std::string> expected = words;
    expected.push_back("quantize: " + (of_dense ? std::string("x") : "out." + argument));
    expect_refused([&] { quantize.run(nullptr, workspace, {dense, parts}); }, expected);
    expected.back() = "dequantize: " + (of_dense ? std::string("y") : "in." + argument);
    expect_refused([&] { dequantize.run(nullptr, workspace, {parts, dense}); }, expected);
    EXPECT_TRUE(quantize.can_implement({dense, parts}));
    EXPECT_TRUE(dequantize.can_implement({parts, dense}));
  }

  QuantSpec spec_;
  Storage storage_{};
};

TEST_F(PlanRefusals, Tensors) {
  using T = TensorView;
  using Q = QuantizedView;
  refused([](T& t, Q&) { t.dtype = DType::f16; }, "", {"must be f32, got f16"});
  refused([](T& t, Q&) { t.shape = {64, 4}; }, "", {"[4, 64]", "[64, 4]"});
  refused([](T& t, Q&) { t.shape = {int64_t{1} << 62, 4, 64}; }, "", {"[4, 64]", "[4611686018427387904, 4"});
  refused([](T& t, Q&) { t.shape = {-2, -2, 64}; }, "", {"[-2, -2, 64]"});
  refused([](T& t, Q&) { t.strides = {1}; }, "", {"stride", "2 axes, got 1"});
  refused([](T& t, Q&) { t.strides = {128, 1}; }, "", {"contiguous", "[128, 1]"});
  refused([](T& t, Q&) { t.device = {DeviceKind::cuda, 0}; }, "", {"must be on cpu, got cuda:0"});
  refused([](T& t, Q&) { t.data = nullptr; }, "", {"no data"});
  refused([](T& t, Q&) { t.num_bytes = 1000; }, "", {"needs 1024 bytes, its memory has 1000"});
  refused([](T& t, Q&) { t.data = static_cast<std::byte*>(t.data) + 2; }, "", {"must be aligned to 4 bytes"});
}

TEST_F(PlanRefusals, Parts) {
  using T = TensorView;
  using Q = QuantizedView;
  refused([](T&, Q& q) { q.spec.format = Format::int8; }, "spec.format", {"int4", "int8"});
  refused([](T&, Q& q) { q.spec.asymmetric = false; }, "spec.asymmetric", {"true", "false"});
  refused([](T&, Q& q) { q.spec.granularity = Granularity::channel; }, "spec.granularity",
          {"group", "channel"});
  refused([](T&, Q& q) { q.spec.group_size = 32; }, "spec.group_size", {"64", "32"});
  refused([](T&, Q& q) { q.spec.scale_dtype = DType::f16; }, "spec.scale_dtype", {"f32", "f16"});
  refused([](T&, Q& q) { q.spec.double_quant = true; }, "spec.double_quant", {"false", "true"});
  refused([](T&, Q& q) { q.spec.table[0] = 1; }, "spec", {"table"});
  refused([](T&, Q& q) { q.rows = 5; }, "rows", {"4", "5"});
  refused([](T&, Q& q) { q.cols = 63; }, "cols", {"64", "63"});
  refused([](T&, Q& q) { q.codes = nullptr; }, "codes", {"needs 128 bytes but has no data"});
  refused([](T&, Q& q) { q.scales = nullptr; }, "scales", {"needs 16 bytes"});
  refused([](T&, Q& q) { q.scales = static_cast<uint8_t*>(q.scales) + 2; }, "scales",
          {"must be aligned to 4 bytes"});
  refused([](T&, Q& q) { q.zeros = nullptr; }, "zeros", {"needs 4 bytes"});
  refused([](T&, Q& q) { q.biases = q.scales; }, "biases", {"must be null"});
  spec_.format = Format::affine4;
  spec_.asymmetric = false;
  refused([](T&, Q& q) { q.biases = nullptr; }, "biases", {"needs 16 bytes"});
  refused([](T&, Q& q) { q.biases = static_cast<uint8_t*>(q.biases) + 1; }, "biases",
          {"must be aligned to 4 bytes"});
  refused([](T&, Q& q) { q.zeros = q.codes; }, "zeros", {"must be null"});
}

TEST_F(PlanRefusals, Overlap) {
  const auto quantize = QuantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
  const auto dequantize = DequantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
  alignas(16) std::array<uint8_t, 64> workspace;
  const auto refused = [&](const QuantizedView& view, const std::vector<std::string>& words,
                           const std::vector<std::string>& other) {
    expect_refused([&] { quantize.run(nullptr, workspace, {dense(), view}); }, words);
    if (!other.empty())
      expect_refused([&] { dequantize.run(nullptr, workspace, {view, dense()}); }, other);
    else
      EXPECT_FALSE(dequantize.can_implement({view, dense()})) << "both are read only";
  };
  auto* const x = reinterpret_cast<uint8_t*>(storage_.dense.data());
  QuantizedView view = parts();
  view.codes = x;
  refused(view, {"out.codes must not overlap x"}, {"in.codes must not overlap y"});
  view = parts();
  view.scales = x + 1008;  // the last four elements
  refused(view, {"out.scales must not overlap x"}, {"in.scales must not overlap y"});
  view = parts();
  view.zeros = x + 5;
  refused(view, {"out.zeros must not overlap x"}, {"in.zeros must not overlap y"});
  view = parts();
  view.zeros = view.codes + 127;
  refused(view, {"out.zeros must not overlap out.codes"}, {});
  view.zeros = view.codes + 128;  // behind it
  EXPECT_FALSE(quantize.can_implement({dense(), view}));
}

TEST_F(PlanRefusals, Workspaces) {
  const auto quantize = QuantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
  const auto dequantize = DequantizePlan::select(Device{}, {spec_, kRows, kCols, DType::f32});
  alignas(16) std::array<uint8_t, 80> workspace{};
  for (void* const bad : {static_cast<void*>(nullptr), static_cast<void*>(workspace.data() + 8)}) {
    expect_refused([&] { quantize.run(nullptr, {bad, 72}, {dense(), parts()}); }, {"workspace", "bytes"});
    expect_refused([&] { dequantize.run(nullptr, {bad, 72}, {parts(), dense()}); }, {"workspace", "bytes"});
  }
  expect_refused([&] { quantize.status(nullptr, {}); }, {"workspace"});
  expect_refused([&] { dequantize.status(nullptr, {}); }, {"workspace"});
}

}  // namespace
}  // namespace halfbyte
