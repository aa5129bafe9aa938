// Quantized weights cut and joined: what a part decodes to is that part of the whole.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "halfbyte/qgemm.hpp"
#include "ops/testing.h"

namespace halfbyte {
namespace {

using testing::bytes_of;

std::vector<float> some_values(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

QuantizedTensor quantized(std::vector<int64_t> shape, const QuantSpec& spec, unsigned seed = 1) {
  std::vector<float> values = some_values(num_elements(shape), seed);
  return quantize({values.data(), DType::f32, Extents(shape)}, spec);
}

std::vector<float> decoded(const QuantizedTensor& q) {
  std::vector<float> values(static_cast<size_t>(num_elements(q.shape)));
  dequantize(q, {values.data(), DType::f32, Extents(q.shape)});
  return values;
}

// The elements of a row-major array that belong to a slice.
std::vector<float> sliced(const std::vector<float>& values, const std::vector<int64_t>& shape,
                          const Slice& slice) {
  int64_t inner = 1, outer = 1;
  for (int i = 0; i < std::ssize(shape); ++i)
    (i < slice.axis ? outer : inner) *= i == slice.axis ? 1 : shape[static_cast<size_t>(i)];
  const int64_t extent = shape[static_cast<size_t>(slice.axis)];
  std::vector<float> result;
  for (int64_t i = 0; i < outer; ++i)
    for (int64_t j = slice.begin * inner; j < slice.end * inner; ++j)
      result.push_back(values[static_cast<size_t>(i * extent * inner + j)]);
  return result;
}

void expect_slice(const QuantizedTensor& q, const Slice& slice) {
  SCOPED_TRACE(fmt::format("{} [{}, {}] axis {}: {} to {}", info(q.spec.format).name, q.rows(), q.cols(),
                           slice.axis, slice.begin, slice.end));
  const QuantizedTensor part = q.slice(slice);
  EXPECT_EQ(part.shape[static_cast<size_t>(slice.axis)], slice.end - slice.begin);
  EXPECT_EQ(part.spec, q.spec);
  const std::vector<float> expected = sliced(decoded(q), q.shape, slice), actual = decoded(part);
  ASSERT_EQ(actual.size(), expected.size());
  if (actual.empty()) return;
  EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)), 0);
}

std::string refusal(const QuantizedTensor& q, const Slice& slice) {
  try {
    q.slice(slice);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "accepted";
}

TEST(Slice, DecodesToThatPartOfTheWhole) {
  for (const testing::EncodedSpec& each : testing::all_specs()) {
    for (const Granularity granularity :
         {Granularity::group, Granularity::channel, Granularity::tensor, Granularity::flat}) {
      QuantSpec spec = each;
      spec.granularity = granularity;
      spec.group_size = 32;
      testing::fit_format(spec);
      const int64_t cols = granularity == Granularity::flat ? 192 : 203;  // groups of flat ones divide rows
      try {
        check_spec(spec);
      } catch (const Error&) {
        continue;
      }
      const QuantizedTensor q = quantized({19, cols}, spec);
      for (const Slice& slice : {Slice{0, 0, 19}, Slice{0, 5, 12}, Slice{0, 18, 19}, Slice{0, 7, 7},
                                 Slice{1, 0, cols}, Slice{1, 32, 128}, Slice{1, 160, cols}, Slice{1, 64, 64}})
        expect_slice(q, slice);
      const QuantizedTensor experts = quantized({3, 6, cols}, spec);
      for (const Slice& slice : {Slice{0, 1, 3}, Slice{1, 2, 5}, Slice{2, 64, 160}})
        expect_slice(experts, slice);
    }
  }
}

// What is quantized in parts has the bytes of these parts, padding included.
TEST(Slice, HasTheBytesOfAWeightOfItsOwn) {
  for (const Format format : {Format::nf4, Format::int4, Format::affine3, Format::affine6, Format::int8}) {
    const QuantSpec spec{.format = format, .group_size = 32};
    std::vector<float> values = some_values(11 * 203, 7);
    const QuantizedTensor q = quantize({values.data(), DType::f32, {11, 203}}, spec);
    for (const Slice& slice : {Slice{0, 3, 9}, Slice{1, 96, 203}}) {
      std::vector<float> own = sliced(values, {11, 203}, slice);
      const QuantizedTensor part = q.slice(slice);
      const QuantizedTensor expected = quantize({own.data(), DType::f32, Extents(part.shape)}, spec);
      EXPECT_EQ(bytes_of(part.codes), bytes_of(expected.codes));
      EXPECT_EQ(bytes_of(part.scales), bytes_of(expected.scales));
      EXPECT_EQ(bytes_of(part.biases), bytes_of(expected.biases));
    }
  }
}

// Groups that run across the rows, and double quantization.
TEST(Slice, OfRowsThatShareGroups) {
  const QuantSpec flat{.granularity = Granularity::flat, .group_size = 64};
  const QuantizedTensor q = quantized({32, 40}, flat);
  expect_slice(q, {0, 8, 16});  // 320 to 640
  expect_slice(q, {0, 24, 32});
  EXPECT_NE(refusal(q, {0, 1, 8}).find("element 40 is not the first of a group of 64"), std::string::npos);
  EXPECT_NE(refusal(q, {1, 0, 8}).find("groups of 64 run across rows of 40"), std::string::npos);

  QuantizedTensor nested = quantized({64, 512}, {.format = Format::nf4, .group_size = 64});
  const QuantizedTensor plain = nested;
  nested =
      QuantizedTensor({.format = Format::nf4, .group_size = 64, .double_quant = true}, {64, 512}, DType::f32);
  std::memcpy(nested.codes.data(), plain.codes.data(), static_cast<size_t>(plain.codes.num_bytes()));
  DoubleQuantizedView view{reinterpret_cast<uint8_t*>(nested.scales.data()),
                           reinterpret_cast<float*>(nested.scales_absmax.data())};
  double_quantize(reinterpret_cast<const float*>(plain.scales.data()), plain.scales.num_elements(), view);
  std::memcpy(nested.scales_offset.data(), &view.offset, sizeof view.offset);
  expect_slice(nested, {0, 32, 64});  // from scale 256 on
  expect_slice(nested, {0, 32, 45});
  expect_slice(nested.expanded(), {0, 5, 45});
  expect_slice(nested.expanded(), {1, 64, 448});
  EXPECT_NE(refusal(nested, {0, 5, 45}).find("scale 40 is not the first of a block of 256"),
            std::string::npos);
  EXPECT_NE(refusal(nested, {1, 64, 448}).find("take a slice of expanded()"), std::string::npos);
}

TEST(Slice, RefusesWithAReason) {
  const QuantizedTensor q = quantized({16, 100}, {.format = Format::affine3, .group_size = 20});
  expect_slice(q, {1, 40, 80});
  const auto expect = [&](const Slice& slice, const char* text) {
    EXPECT_NE(refusal(q, slice).find(text), std::string::npos) << refusal(q, slice);
  };
  expect({1, 20, 80}, "element 20, of 3 bits, is not the first of a byte");
  expect({1, 40, 90}, "element 90 is not the first of a group of 20");
  expect({2, 0, 1}, "slice.axis must be an axis of [16, 100], got 2");
  expect({-1, 0, 1}, "slice.axis");
  expect({0, 4, 17}, "slice must lie within the 16 elements of axis 0, got 4 to 17");
  expect({0, 5, 4}, "got 5 to 4");
  expect({0, -1, 4}, "got -1 to 4");
}

// ---- Packed weights

std::vector<uint8_t> bytes_of(const PackedTensor& packed) {
  const auto* const data = static_cast<const uint8_t*>(packed.view().data);
  return {data, data + packed.view().num_bytes};
}

PackedTensor poisoned(const ConstPackedWeight& form) {
  PackedTensor result(form.spec, form.rows, form.cols);
  auto* const data = static_cast<uint8_t*>(result.view().data);
  std::fill(data, data + result.view().num_bytes, uint8_t{0x5a});
  return result;
}

TEST(PackedSlice, IsThePackedPartAndJoinsAgain) {
  for (const FormatInfo& format : all_formats()) {
    for (const int64_t group :
         {int64_t{0}, int64_t{16}, int64_t{20}, int64_t{48}, int64_t{64}, int64_t{96}, int64_t{256}}) {
      QuantSpec spec{.format = format.format, .group_size = group};
      if (group == 0) spec.granularity = Granularity::channel, spec.group_size = 64;
      if (format.format == Format::lut4)
        for (int i = 0; i < 16; ++i) spec.table[static_cast<size_t>(i)] = static_cast<float>(i - 8);
      testing::fit_format(spec);
      // Of so many columns a weight of one group a row has the form of longer ones.
      const int64_t group_cols = spec.granularity == Granularity::channel ? 320 : spec.group_size;
      const int64_t unit = std::lcm(group_cols, int64_t{64});
      const int64_t rows = 109, cols = 4 * unit + (group == 20 ? 50 : 8);
      SCOPED_TRACE(fmt::format("{} groups of {}", format.name, group));
      const QuantizedTensor q = quantized({rows, cols}, spec);
      const PackedTensor packed = q.pack();
      for (const Slice& slice : {Slice{0, 32, 96}, Slice{0, 64, rows}, Slice{1, unit, 3 * unit},
                                 Slice{1, unit, cols}, Slice{1, 0, cols}, Slice{0, 32, 32}}) {
        const PackedTensor expected = q.slice(slice).pack();
        EXPECT_EQ(bytes_of(packed.slice(slice)), bytes_of(expected)) << slice.axis << ": " << slice.begin;
        const PackedTensor given = poisoned(expected.view());
        copy_slice(packed.view(), slice, given.view());
        EXPECT_EQ(bytes_of(given), bytes_of(expected));
      }
      const auto joins = [&](int axis, std::vector<int64_t> cuts, const auto& concat, const auto& into) {
        std::vector<PackedTensor> parts;
        std::vector<ConstPackedWeight> views;
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          parts.push_back(packed.slice({axis, cuts[i], cuts[i + 1]}));
          views.push_back(parts.back().view());
        }
        EXPECT_EQ(bytes_of(concat(views)), bytes_of(packed)) << "axis " << axis;
        const PackedTensor given = poisoned(packed.view());
        into(views, given.view());
        EXPECT_EQ(bytes_of(given), bytes_of(packed)) << "axis " << axis;
      };
      joins(
          0, {0, 64, 96, rows}, [](auto& views) { return PackedTensor::concat_rows(views); },
          [](auto& views, auto& to) { concat_rows(views, to); });
      joins(
          1, {0, 2 * unit, 2 * unit, 3 * unit, cols},
          [](auto& views) { return PackedTensor::concat_cols(views); },
          [](auto& views, auto& to) { concat_cols(views, to); });
    }
  }
}

TEST(PackedSlice, RefusesWithAReason) {
  const auto expect = [](const char* text, const auto& call) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  const PackedTensor packed = quantized({96, 256}, {}).pack();
  expect("is cut at rows that are multiples of 32, got 16", [&] { packed.slice({0, 16, 96}); });
  expect("is cut at columns that are multiples of 64, got 96", [&] { packed.slice({1, 0, 96}); });
  expect("slice must lie within the 256 elements of axis 1", [&] { packed.slice({1, 0, 257}); });
  const int64_t most = std::numeric_limits<int64_t>::max();
  const PackedTensor of_rows = quantized({32, 256}, {.group_size = most}).pack();
  expect("multiples of 9223372036854775807, got 64", [&] { of_rows.slice({1, 0, 64}); });
  const PackedTensor wide = quantized({32, 1024}, {.group_size = 512}).pack();
  expect("512 columns are stored in another form than 1024", [&] { wide.slice({1, 0, 512}); });
  const PackedTensor half = quantized({32, 512}, {.group_size = 512}).pack();
  const std::vector<ConstPackedWeight> halves = {half.view(), half.view()};
  expect("weights[0], of 512 columns, is stored in another form than 1024 columns",
         [&] { PackedTensor::concat_cols(halves); });
  expect("weights[1].rows must be 96 as of the first, got 32", [&] {
    const PackedTensor other = quantized({32, 256}, {}).pack();
    const ConstPackedWeight both[] = {packed.view(), other.view()};
    PackedTensor::concat_cols(both);
  });
  const QuantSpec nested{.double_quant = true};
  expect("scales must not be double quantized", [&] { PackedTensor(nested, 64, 64).slice({0, 0, 32}); });
  expect("to must be [32, 256], the slice, got [64, 256]", [&] {
    copy_slice(packed.view(), {0, 0, 32}, PackedTensor({}, 64, 256).view());
  });
  expect("overlap", [&] { copy_slice(packed.view(), {0, 0, 96}, packed.view()); });
}

}  // namespace
}  // namespace halfbyte
