#include <gtest/gtest.h>

#include "core/packed_weight.h"
#include "formats/bits.h"
#include "ops/reorder/reorder_ref.h"
#include "ops/reorder/reorder_testing.h"

namespace halfbyte {
namespace {

using testing::GuardedBytes;
using testing::StoredWeight;
using testing::WeightCase;

PackedWeight packed_weight(const WeightView& view, GuardedBytes& bytes) {
  PackedWeight packed;
  packed.spec = view.spec;
  packed.rows = view.rows;
  packed.cols = view.cols;
  packed.data = bytes.data();
  packed.num_bytes = bytes.num_bytes();
  return packed;
}

// The packed form has the bytes of the reference; the way back has those of the view.
void check_case(const WeightCase& c, uint64_t seed, int num_threads) {
  SCOPED_TRACE(testing::describe(c));
  StoredWeight stored(c.spec, c.rows, c.cols, c.layout);
  stored.fill(seed);
  StoredWeight from = stored;
  const int64_t num_bytes = packed_weight_bytes(c.spec, c.rows, c.cols);
  GuardedBytes expected(num_bytes), packed(num_bytes);
  reorder_ref_to_packed(make_reorder_args(stored.view(), expected.data()));
  reorder(from.view(), packed_weight(from.view(), packed), {num_threads});
  EXPECT_TRUE(testing::same_packed(expected, packed));
  EXPECT_TRUE(testing::same_parts(stored, from)) << "what is read was written";
  StoredWeight back(c.spec, c.rows, c.cols, c.layout);
  reorder(packed_weight(back.view(), packed), back.view(), {num_threads});
  EXPECT_TRUE(testing::same_parts(stored, back));
  EXPECT_TRUE(testing::same_packed(expected, packed)) << "what is read was written";
}

TEST(Reorder, EqualsTheReferenceAndComesBack) {
  testing::for_each_target([](const char*) {
    uint64_t seed = 1;
    for (const WeightCase& c : testing::weight_cases(7, testing::kSanitized ? 12 : 40)) {
      ++seed;
      check_case(c, seed, seed % 3 == 0 ? 4 : 1);
    }
  });
}

TEST(Reorder, LongRowsAreSplitOverThreads) {
  const QuantSpec nf4;
  for (const int64_t cols : {8192, 8191, 20000})
    for (const Granularity granularity : {Granularity::group, Granularity::channel}) {
      WeightCase c{nf4, 40, cols, Layout::halfbyte};
      c.spec.granularity = granularity;
      check_case(c, 3, 4);
      if (cols % 64 != 0) continue;
      c.spec.granularity = Granularity::flat;
      c.layout = Layout::bitsandbytes;
      check_case(c, 4, 4);
    }
}

TEST(Reorder, WhatQuantizeMakesComesBack) {
  for (const QuantSpec& base : testing::all_specs()) {
    for (const Granularity granularity :
         {Granularity::group, Granularity::channel, Granularity::tensor, Granularity::flat}) {
      QuantSpec spec = base;
      spec.granularity = granularity;
      spec.group_size = 35;
      if (info(spec.format).scale_dtype) spec = base;
      const int64_t rows = 37, cols = 105;
      testing::Values x = testing::random_values(DType::f32, rows * cols, 9);
      StoredWeight stored(spec, rows, cols, Layout::halfbyte);
      const testing::Parts parts = testing::quantize_parts(x, spec, rows, cols);
      const auto take = [&](StoredWeight::Part part, const std::vector<uint8_t>& bytes) {
        ASSERT_EQ(static_cast<size_t>(stored.parts[part].num_bytes()), bytes.size() - testing::Parts::kGuard);
        std::copy_n(bytes.data(), stored.parts[part].num_bytes(), stored.parts[part].data());
      };
      take(StoredWeight::kCodes, parts.codes);
      take(StoredWeight::kScales, parts.scales);
      take(StoredWeight::kZeros, parts.zeros);
      take(StoredWeight::kBiases, parts.biases);
      take(StoredWeight::kGlobalScale, parts.global_scale);
      SCOPED_TRACE(testing::describe(spec));
      GuardedBytes packed(packed_weight_bytes(spec, rows, cols));
      reorder(stored.view(), packed_weight(stored.view(), packed));
      StoredWeight back(spec, rows, cols, Layout::halfbyte);
      reorder(packed_weight(back.view(), packed), back.view());
      EXPECT_TRUE(testing::same_parts(stored, back));
    }
  }
}

// A matrix has one packed form, whatever layout it comes from.
TEST(Reorder, LayoutsHaveTheSamePackedForm) {
  const auto make = [](const QuantSpec& spec, Layout layout) {
    StoredWeight w(spec, 45, 192, layout);
    std::mt19937_64 random(5);
    for (int64_t row = 0; row < w.rows; ++row)
      for (int64_t col = 0; col < w.cols; ++col)
        w.set_code(row, col, static_cast<int>(random() % (1u << w.bits)));
    for (const auto part : {StoredWeight::kScales, StoredWeight::kBiases})
      for (int64_t i = 0; i < w.parts[part].num_bytes(); ++i)
        w.parts[part].data()[i] = static_cast<uint8_t>(i * 31 + part);
    for (int64_t row = 0; has_zeros(spec) && row < w.rows; ++row)
      for (int64_t group = 0; group < w.groups; ++group)
        w.set_zero(row, group, static_cast<int>(row * 5 + group * 3) & ((1 << w.bits) - 1));
    GuardedBytes packed(packed_weight_bytes(spec, w.rows, w.cols));
    reorder(w.view(), packed_weight(w.view(), packed));
    return packed;
  };
  QuantSpec nf4, flat = nf4, int4, int8, int3, affine4;
  flat.granularity = Granularity::flat;
  int4.format = Format::int4;
  int4.asymmetric = true;
  int8 = int4;
  int8.format = Format::int8;
  int3 = int4;
  int3.format = Format::int3;
  affine4.format = Format::affine4;
  EXPECT_TRUE(make(nf4, Layout::halfbyte) == make(flat, Layout::bitsandbytes));
  EXPECT_TRUE(make(nf4, Layout::halfbyte) == make(flat, Layout::halfbyte));
  EXPECT_TRUE(make(int4, Layout::halfbyte) == make(int4, Layout::compressed_tensors));
  EXPECT_TRUE(make(int8, Layout::halfbyte) == make(int8, Layout::compressed_tensors));
  EXPECT_TRUE(make(int3, Layout::halfbyte) == make(int3, Layout::compressed_tensors));
  EXPECT_TRUE(make(affine4, Layout::halfbyte) == make(affine4, Layout::mlx));
}

// Bytes that the tools themselves wrote, and the codes that they stand for.
TEST(Reorder, ReadsWhatOtherToolsWrite) {
  const auto codes_of = [](WeightView view) {
    GuardedBytes packed(packed_weight_bytes(view.spec, view.rows, view.cols));
    reorder(view, packed_weight(view, packed));
    const formats::PackedLayout p = packed_layout_of(view.spec, view.rows, view.cols);
    std::vector<int> codes;
    for (int row = 0; row < view.rows; ++row)
      for (int col = 0; col < view.cols; ++col) codes.push_back(p.load_code(packed.data(), row, col));
    if (p.has_zeros)
      for (int row = 0; row < view.rows; ++row) codes.push_back(packed.data()[p.zero(row, 0)]);
    return codes;
  };
  float scales[2] = {1, 2};
  uint8_t nf4[] = {0x94, 0xb2, 0xd1, 0xf0, 0x87, 0x3e};
  WeightView view;
  view.spec.granularity = Granularity::flat;
  view.spec.group_size = 6;
  view.rows = 2;
  view.cols = 6;
  view.layout = Layout::bitsandbytes;
  view.codes = nf4;
  view.scales = scales;
  EXPECT_EQ(codes_of(view), (std::vector<int>{9, 4, 11, 2, 13, 1, 15, 0, 8, 7, 3, 14}));

  uint32_t words[] = {0x39f5880f, 0xfdb98642}, zeros[] = {0x00000008};
  view.spec = {};
  view.spec.format = Format::int4;
  view.spec.asymmetric = true;
  view.spec.group_size = 8;
  view.cols = 8;
  view.layout = Layout::compressed_tensors;
  view.codes = words;
  view.zeros = zeros;
  // q + 8 of [7, -8, 0, 0, -3, 7, 1, -5], [-6, -4, -2, 0, 1, 3, 5, 7]; zero points 0 and -8.
  EXPECT_EQ(codes_of(view), (std::vector<int>{15, 0, 8, 8, 5, 15, 9, 3, 2, 4, 6, 8, 9, 11, 13, 15, 8, 0}));
  uint32_t bytes[] = {0xff807f00};
  view.spec = {};
  view.spec.format = Format::int8;
  view.spec.group_size = 4;
  view.rows = 1;
  view.cols = 4;
  view.codes = bytes;
  view.zeros = nullptr;
  EXPECT_EQ(codes_of(view), (std::vector<int>{0, 127, 128, 255}));
}

TEST(Reorder, EmptyWeights) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {32, 0}, {0, 0}})
    for (QuantSpec spec : testing::packed_specs())
      for (const Granularity granularity : {Granularity::group, Granularity::channel, Granularity::flat}) {
        spec.granularity = granularity;
        testing::fit_format(spec);
        for (const auto layout : {Layout::halfbyte, Layout::compressed_tensors})
          if (testing::is_held(spec, layout)) check_case({spec, rows, cols, layout}, 2, 1);
      }
}

TEST(Reorder, SizesOfThePackedForm) {
  QuantSpec spec;
  EXPECT_EQ(packed_weight_bytes(spec, 4096, 4096), 4096 * 4096 / 2 + 4096 * 64 * 4);
  spec.granularity = Granularity::flat;
  EXPECT_EQ(packed_weight_bytes(spec, 4096, 4096), 4096 * 4096 / 2 + 4096 * 64 * 4);
  spec.double_quant = true;
  EXPECT_EQ(packed_weight_bytes(spec, 4096, 4096), 4096 * 4096 / 2 + 4096 * 64 + 1024 * 4 + 1280);
  for (QuantSpec s : testing::packed_specs())
    for (const Granularity granularity : {Granularity::group, Granularity::channel, Granularity::tensor})
      for (const int64_t group_size : {32, 64, 128, 256, 512}) {
        s.granularity = granularity;
        s.group_size = group_size;
        testing::fit_format(s);
        const StoredWeight native(s, 1024, 2048, Layout::halfbyte);
        int64_t num_bytes = 0;
        for (const GuardedBytes& part : native.parts) num_bytes += part.num_bytes();
        // Scales and biases in f32 of 2-bit codes lie there once for 128 columns.
        const double most = granularity == Granularity::group && group_size > 128 ? 1.2 : 1.01;
        EXPECT_LE(static_cast<double>(packed_weight_bytes(s, 1024, 2048)),
                  most * static_cast<double>(num_bytes))
            << testing::describe(s);
      }
}

template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Reorder, NoPackedForm) {
  const auto message = [](const QuantSpec& spec, int64_t rows, int64_t cols) {
    return message_of([&] { packed_weight_bytes(spec, rows, cols); });
  };
  QuantSpec spec;
  spec.scale_dtype = DType::f64;
  EXPECT_EQ(message(spec, 32, 64), "packed weight: spec.scale_dtype must have 32 bits at most, got f64");
  spec.scale_dtype = DType::f32;
  spec.granularity = Granularity::flat;
  EXPECT_EQ(message(spec, 2, 32),
            "packed weight: spec.group_size of granularity flat must divide the columns, got 64 for 32");
  spec.granularity = Granularity::group;
  // 32 rows of them are too many.
  EXPECT_NE(message(spec, 1, int64_t{1} << 59).find("exceeds 2^63 - 1 bytes"), std::string::npos);
  EXPECT_NE(message(spec, INT64_MAX, 0).find("exceeds 2^63 - 1 bits"), std::string::npos);
  EXPECT_NE(message(spec, -1, 64).find("negative"), std::string::npos);
}

TEST(Reorder, Errors) {
  QuantSpec spec;
  spec.format = Format::int4;
  spec.asymmetric = true;
  spec.scale_dtype = DType::f16;
  StoredWeight stored(spec, 32, 128, Layout::halfbyte);
  stored.fill(1);
  GuardedBytes bytes(packed_weight_bytes(spec, 32, 128));
  const GuardedBytes before = bytes;
  const auto message = [&](const auto& change) {
    WeightView view = stored.view();
    PackedWeight packed = packed_weight(view, bytes);
    change(view, packed);
    return message_of([&] { reorder(view, packed); });
  };
  using V = WeightView&;
  using P = PackedWeight&;
  const std::pair<const char*, std::string> cases[] = {
      {"reorder: to.version must be 2, got 3", message([](V, P p) { p.version = 3; })},
      {"reorder: from.spec.format must be int8 as in to, got int4",
       message([](V, P p) { p.spec.format = Format::int8; })},
      {"reorder: from.spec.group_size must be 128 as in to, got 64",
       message([](V, P p) { p.spec.group_size = 128; })},
      {"reorder: from.rows must be that of to, 64, got 32", message([](V, P p) { p.rows = 64; })},
      {"reorder: from.device must be that of to, cuda:3, got cpu", message([](V, P p) {
         p.device = {DeviceKind::cuda, 3};
       })},
      {"reorder: from.scales needs 128 bytes but has no data", message([](V v, P) { v.scales = nullptr; })},
      {"reorder: from.zeros needs 64 bytes but has no data", message([](V v, P) { v.zeros = nullptr; })},
      {"reorder: from.biases must be null", message([&](V v, P) { v.biases = v.scales; })},
      {"reorder: from.map must be null", message([&](V v, P) { v.map = static_cast<float*>(v.scales); })},
      {"reorder: to must be aligned to 64 bytes",
       message([](V, P p) { p.data = static_cast<uint8_t*>(p.data) + 32; })},
      {"reorder: to needs 2304 bytes, its memory has 2303", message([](V, P p) { p.num_bytes = 2303; })},
      {"must not overlap", message([](V v, P p) { v.codes = p.data; })},
      {"reorder: from.scales must be aligned to 2 bytes",
       message([](V v, P) { v.scales = static_cast<uint8_t*>(v.scales) + 1; })},
      {"layout bitsandbytes has codes of 4 bits, got int8", message([](V v, P p) {
         v.layout = Layout::bitsandbytes;
         v.spec.format = p.spec.format = Format::int8;
       })},
  };
  for (const auto& [expected, actual] : cases) EXPECT_NE(actual.find(expected), std::string::npos) << actual;
  EXPECT_TRUE(bytes == before) << "an error wrote something";
  // Back, the arguments have changed their names.
  const WeightView view = stored.view();
  PackedWeight packed = packed_weight(view, bytes);
  packed.cols = 64;
  EXPECT_EQ(message_of([&] { reorder(packed, view); }), "reorder: to.cols must be that of from, 64, got 128");
}

}  // namespace
}  // namespace halfbyte
