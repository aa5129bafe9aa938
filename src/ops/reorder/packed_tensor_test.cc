// The owner of a quantized weight: its parts, its views, its experts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "halfbyte/qgemm.hpp"
#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::bytes_of;

TensorView of(std::vector<float>& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::f32, shape, {}, {}};
}

std::vector<float> some_values(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i * i % 1009));
  return values;
}

template <class Body>
void expect_usage(const std::string& text, const Body& body) {
  try {
    body();
    ADD_FAILURE() << "no error with \"" << text << '"';
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(QuantizedTensor, HasTheParts) {
  const QuantizedTensor q({.format = Format::int4, .asymmetric = true}, {3, 5, 100}, DType::bf16);
  EXPECT_EQ(q.rows(), 15);
  EXPECT_EQ(q.cols(), 100);
  EXPECT_EQ(q.num_experts(), 3);
  EXPECT_EQ(q.codes.shape(), (std::vector<int64_t>{15, 50}));
  EXPECT_EQ(q.scales.shape(), (std::vector<int64_t>{15, 2}));
  EXPECT_EQ(q.scales.dtype(), DType::f32);
  EXPECT_EQ(q.zeros.shape(), q.scales.shape());
  EXPECT_EQ(q.biases.num_elements(), 0);
  EXPECT_EQ(q.num_bytes(), 15 * 50 + 30 * 4 + 30);
  const QuantizedView view = q.view();
  EXPECT_EQ(view.rows, 15);
  EXPECT_EQ(static_cast<void*>(view.zeros), q.zeros.data());
  EXPECT_EQ(view.biases, nullptr);
}

TEST(QuantizedTensor, RefusesPartsThatDoNotFit) {
  QuantizedTensor q({.format = Format::affine4}, {4, 64}, DType::f32);
  q.biases = Tensor({}, DType::f32, {3});
  expect_usage("biases must be 4 elements of f32", [&] { q.view(); });
  q.biases = Tensor({}, DType::f16, {4});
  expect_usage("biases must be 4 elements of f32", [&] { q.weight_view(); });
  q.biases = Tensor({}, DType::f32, {1, 4});
  EXPECT_NO_THROW(q.view());
  q.zeros = Tensor({}, DType::u8, {4});
  expect_usage("zeros must be empty", [&] { q.pack(); });
  expect_usage("expert must be 0 to 0, got 1", [] {
    QuantizedTensor(QuantSpec{}, {4, 64}, DType::f32).weight_view(1);
  });
  expect_usage("double quantization", [] {
    QuantizedTensor({.granularity = Granularity::flat, .double_quant = true}, {4, 64}, DType::f32).view();
  });
}

// Every expert decodes and multiplies as the matrix that it is.
TEST(QuantizedTensor, ExpertsAreSlices) {
  const int64_t experts = 3, n = 33, k = 130;
  std::vector<float> x = some_values(experts * n * k);
  for (const QuantSpec& spec :
       {QuantSpec{.format = Format::nf4}, QuantSpec{.format = Format::int8, .asymmetric = true},
        QuantSpec{.format = Format::affine4, .granularity = Granularity::channel},
        QuantSpec{.format = Format::int4, .granularity = Granularity::tensor},
        QuantSpec{.format = Format::fp4, .granularity = Granularity::flat, .group_size = 130}}) {
    SCOPED_TRACE(testing::describe(spec));
    const QuantizedTensor q = quantize(of(x, {experts, n, k}), spec);
    for (int64_t expert = 0; expert < experts; ++expert) {
      const WeightView view = q.weight_view(expert);
      const QuantizedView parts{view.spec,   view.rows,
                                view.cols,   static_cast<uint8_t*>(view.codes),
                                view.scales, static_cast<uint8_t*>(view.zeros),
                                view.biases};
      std::vector<float> own(static_cast<size_t>(n * k)), all(x.size());
      dequantize(parts, of(own, {n, k}));
      dequantize(q, of(all, {experts, n, k}));
      EXPECT_EQ(own, std::vector<float>(all.begin() + expert * n * k, all.begin() + (expert + 1) * n * k));
      // The packed form gives the parts back.
      const PackedTensor packed = q.pack({}, expert);
      QuantizedTensor back(spec, {n, k}, DType::f32);
      reorder(packed.view(), back.weight_view());
      std::vector<float> again(own.size());
      dequantize(back, of(again, {n, k}));
      EXPECT_EQ(own, again);
    }
  }
  const QuantSpec straddling{.granularity = Granularity::flat, .group_size = 64};
  const QuantizedTensor q = quantize(of(x, {experts, n, k}), straddling);
  expect_usage("not whole groups of 64", [&] { q.weight_view(1); });
}

TEST(QuantizedTensor, DoubleQuantizationHasAViewAndExpands) {
  const int64_t n = 40, k = 512;
  std::vector<float> x = some_values(n * k), y(x.size()), z(x.size());
  const QuantSpec spec{.granularity = Granularity::flat, .double_quant = true};
  const QuantizedTensor q = quantize(of(x, {n, k}), spec);
  EXPECT_EQ(q.scales.dtype(), DType::u8);
  const WeightView view = q.weight_view();
  EXPECT_EQ(static_cast<void*>(view.absmax), q.scales_absmax.data());
  EXPECT_EQ(*view.offset, *reinterpret_cast<float*>(q.scales_offset.data()));
  EXPECT_EQ(std::memcmp(view.map, double_quant_map(), 1024), 0);
  const QuantizedTensor expanded = q.expanded();
  EXPECT_FALSE(expanded.spec.double_quant);
  dequantize(q, of(y, {n, k}));
  dequantize(expanded, of(z, {n, k}));
  EXPECT_EQ(y, z);
  // A map of its own is used.
  QuantizedTensor other = q;
  other.scales_map = Tensor({}, DType::f32, {256});
  for (int i = 0; i < 256; ++i) reinterpret_cast<float*>(other.scales_map.data())[i] = 0;
  dequantize(other, of(z, {n, k}));
  EXPECT_NE(y, z);
}

TEST(QuantizedTensor, CopiesShareTheMemory) {
  std::vector<float> x = some_values(64);
  const QuantizedTensor q = quantize(of(x, {1, 64}), QuantSpec{});
  const QuantizedTensor copy = q.to(Device{});
  EXPECT_EQ(copy.codes.data(), q.codes.data());
  EXPECT_EQ(q.encoding->scale_rule, ScaleRule::absmax);
  EXPECT_EQ(q.dtype, DType::f32);
}

// Parts and packed memory of another owner, such as arrays of Python, without a copy.
TEST(PackedTensor, SharesMemoryOfAnotherOwner) {
  const int64_t n = 33, k = 130;
  std::vector<float> x = some_values(n * k);
  const QuantSpec spec{.format = Format::int4, .asymmetric = true};
  const QuantizedTensor q = quantize(of(x, {n, k}), spec);
  QuantizedTensor shared = q;
  for (Tensor* const part : {&shared.codes, &shared.scales, &shared.zeros})
    *part = Tensor::of(part->view(), std::make_shared<Tensor>(*part));
  EXPECT_EQ(shared.codes.data(), q.codes.data());
  const PackedTensor expected = q.pack();
  const int64_t num_bytes = expected.view().num_bytes;

  const Tensor memory({}, DType::u8, {2, num_bytes});
  const PackedTensor packed = PackedTensor::of(spec, n, k, Tensor::of(memory.view(), nullptr));
  EXPECT_EQ(packed.view().data, memory.data());
  EXPECT_EQ(packed.view().num_bytes, 2 * num_bytes);
  reorder(shared.weight_view(), packed.view());
  EXPECT_EQ(std::memcmp(packed.view().data, expected.view().data, static_cast<size_t>(num_bytes)), 0);
  EXPECT_EQ(packed.to(Device{}).view().data, memory.data());
}

TEST(PackedTensor, RefusesMemoryThatCannotHoldIt) {
  const QuantSpec spec;
  const int64_t num_bytes = packed_weight_bytes(spec, 64, 64);
  const auto make = [&](const Tensor& memory) { PackedTensor::of(spec, 64, 64, memory); };
  const Tensor memory({}, DType::u8, {num_bytes + 256});
  expect_usage("packed tensor: memory must be u8, got i8", [&] { make(Tensor({}, DType::i8, {num_bytes})); });
  expect_usage("packed tensor: memory needs " + std::to_string(num_bytes) + " bytes, its memory has " +
                   std::to_string(num_bytes - 1),
               [&] { make(Tensor({}, DType::u8, {num_bytes - 1})); });
  expect_usage("packed tensor: memory must be aligned to", [&] {
    make(Tensor::of({memory.data() + 32, DType::u8, {num_bytes}, {}, {}}, nullptr));
  });
  expect_usage("packed weight: spec.scale_dtype must have 32 bits at most, got f64",
               [&] { PackedTensor::of({.scale_dtype = DType::f64}, 64, 64, memory); });
}

TEST(QuantizedTensor, MayBeEmpty) {
  std::vector<float> none;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0}, {0, 64}, {3, 0}, {0, 4, 64}}) {
    const QuantizedTensor q = quantize(of(none, shape), QuantSpec{});
    EXPECT_NO_THROW(dequantize(q, of(none, shape)));
  }
  EXPECT_NO_THROW(QuantizedTensor().expanded());
}

// The bytes of a concatenated weight are those of a weight that is packed as one.
TEST(PackedTensor, ConcatenatesRows) {
  for (const FormatInfo& format : all_formats()) {
    if (format.format == Format::lut4) continue;
    for (const Granularity granularity : {Granularity::group, Granularity::channel}) {
      QuantSpec spec{.format = format.format, .granularity = granularity, .group_size = 32};
      testing::fit_format(spec);
      constexpr int64_t kCols = 200;
      const std::vector<int64_t> rows = {64, 32, 0, 45};
      std::vector<float> values = some_values(141 * kCols);
      const QuantizedTensor whole = quantize(of(values, {141, kCols}), spec);
      const PackedTensor expected = whole.pack();
      std::vector<PackedTensor> parts;
      std::vector<ConstPackedWeight> views;
      int64_t row = 0;
      for (const int64_t n : rows) {
        const WeightViewBytes bytes = weight_view_bytes(spec, row, kCols, Layout::halfbyte);
        WeightView view = whole.weight_view();
        const auto behind = [](void* part, int64_t num_bytes) -> void* {
          return part == nullptr ? nullptr : static_cast<std::byte*>(part) + num_bytes;
        };
        view.rows = n;
        view.codes = behind(view.codes, bytes.codes);
        view.scales = behind(view.scales, bytes.scales);
        view.zeros = behind(view.zeros, bytes.zeros);
        view.biases = behind(view.biases, bytes.biases);
        parts.emplace_back(spec, n, kCols);
        reorder(view, parts.back().view());
        views.push_back(parts.back().view());
        row += n;
      }
      const PackedTensor joined = PackedTensor::concat_rows(views);
      EXPECT_EQ(joined.view().rows, 141);
      ASSERT_EQ(joined.view().num_bytes, expected.view().num_bytes);
      const auto num_bytes = static_cast<size_t>(expected.view().num_bytes);
      EXPECT_EQ(std::memcmp(joined.view().data, expected.view().data, num_bytes), 0) << format.name;
      const PackedTensor given(spec, 141, kCols);
      std::memset(given.view().data, 0x5a, num_bytes);
      concat_rows(views, given.view());
      EXPECT_EQ(std::memcmp(given.view().data, expected.view().data, num_bytes), 0) << format.name;
    }
  }
}

TEST(PackedTensor, RefusesRowsThatDoNotGoTogether) {
  const PackedTensor a({}, 32, 64), b({}, 40, 64), wide({}, 32, 128);
  const PackedTensor other({.format = Format::int4}, 32, 64), nested({.double_quant = true}, 32, 64);
  const auto concat = [](std::vector<ConstPackedWeight> weights) { PackedTensor::concat_rows(weights); };
  expect_usage("weights must not be empty", [&] { concat({}); });
  expect_usage("weights[1].rows must be a multiple of 32", [&] { concat({a.view(), b.view(), a.view()}); });
  expect_usage("weights[1].cols must be 64", [&] { concat({a.view(), wide.view()}); });
  expect_usage("weights[1]", [&] { concat({a.view(), other.view()}); });
  expect_usage("must not be double quantized", [&] { concat({nested.view(), nested.view()}); });
  PackedTensor one({.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3}, 32, 64),
      two = one;
  two = PackedTensor(one.view().spec, 32, 64);
  const auto set = [](PackedTensor& weight, float scale) {
    const int64_t at = weight.view().num_bytes - 256;  // the last section
    std::memcpy(static_cast<std::byte*>(weight.view().data) + at, &scale, sizeof scale);
  };
  set(one, 2.0f);
  set(two, 3.0f);
  expect_usage("the global scale of weights[1] must be 2 as of the first, got 3", [&] {
    concat({one.view(), two.view()});
  });

  const PackedTensor twice({}, 64, 64), thrice({}, 96, 64);
  const auto into = [&](const PackedWeight& to) {
    const ConstPackedWeight weights[] = {a.view(), a.view()};
    concat_rows(weights, to);
  };
  EXPECT_NO_THROW(into(twice.view()));
  expect_usage("to must be [64, 64], the rows of all weights, got [96, 64]", [&] { into(thrice.view()); });
  expect_usage("to must be [64, 64], the rows of all weights, got [32, 128]", [&] { into(wide.view()); });
  expect_usage("to.spec.format must be nf4 as in weights[0], got int4",
               [&] { into(PackedTensor({.format = Format::int4}, 64, 64).view()); });
  expect_usage("overlap", [&] {
    PackedWeight over = twice.view();
    const ConstPackedWeight part = {{}, 32, 64, over.data, {}};
    const ConstPackedWeight weights[] = {a.view(), part};
    concat_rows(weights, over);
  });
}

}  // namespace
}  // namespace halfbyte
