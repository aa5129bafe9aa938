// CPU = CUDA for tables of the user, the nasty ones included.
#include <set>

#include "harness.h"

namespace halfbyte {
namespace {

using testing::Parts;
using testing::Values;

constexpr size_t kTables = 100;

// Sixteen ascending values of a kind that `index` chooses.
std::array<float, 16> random_table(size_t index) {
  std::mt19937_64 random(index);
  std::normal_distribution<float> normal;
  std::set<float> values;
  while (values.size() < 16) {
    const float v = normal(random);
    switch (index % 10) {
      case 0:
        values.insert(v);
        break;
      case 1:
        values.insert(v * 1e-30f);
        break;
      case 2:  // clustered
        values.insert(values.empty() ? 1 : 0.25f + v * 1e-6f);
        break;
      case 3:
        values.insert(-std::fabs(v));
        break;
      case 4:
        values.insert(std::fabs(v));
        break;
      case 5:  // of all magnitudes
        values.insert(std::ldexp(v, static_cast<int>(random() % 60) - 50));
        break;
      case 6:
        values.insert(static_cast<float>(static_cast<int>(random() % 64) - 20));
        break;
      case 7:  // neighbours
        values.insert(values.empty() ? v : std::nextafter(*values.rbegin(), INFINITY));
        break;
      case 8:
        values.insert(v * 1e-42f);
        break;
      default:
        values.insert(v * 3e37f);
        break;
    }
  }
  std::array<float, 16> table;
  std::copy(values.begin(), values.end(), table.begin());
  return table;
}

// Groups of 64: their largest magnitude, and values within two units of all thresholds.
Values near_thresholds(const testing::EncodedSpec& spec, DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  const formats::Codec codec = make_codec(spec, spec.encoding);
  Values x;
  x.dtype = dtype;
  for (int group = 0; group < 60; ++group) {
    const double absmax = std::ldexp(1 + static_cast<double>(random() % 4096) / 4096,
                                     group % 3 == 0 ? static_cast<int>(random() % 28) - 14 : -6);
    const auto scale = static_cast<double>(
        formats::group_params(static_cast<float>(-absmax), static_cast<float>(absmax), codec).scale);
    x.push_back(group % 2 ? absmax : -absmax);
    for (int i = 1; i < 64; ++i) {
      float v = static_cast<float>(codec.book.edges_f64[random() % 15] * scale);
      for (auto steps = random() % 3; steps > 0; --steps) v = std::nextafter(v, i % 2 ? INFINITY : -INFINITY);
      x.push_back(std::clamp(static_cast<double>(v), -absmax, absmax));
    }
  }
  return x;
}

class Tables : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {};

TEST_P(Tables, equal_the_cpu) {
  const size_t index = GetParam();
  testing::EncodedSpec spec{{.format = Format::lut4}};
  spec.table = random_table(index);
  spec.group_size = index % 5 == 4 ? 100 : 64;
  const DType dtype = testing::kFloatDTypes[index / 10 % 4];
  for (const Values& x : {near_thresholds(spec, dtype, index), testing::random_values(dtype, 3840, index),
                          testing::with_nonfinite(testing::random_values(dtype, 3840, index))}) {
    SCOPED_TRACE(fmt::format("{} {}", to_string(dtype), fmt::join(spec.table, ", ")));
    Parts parts = testing::quantize_on_cpu(x.bytes.data(), dtype, spec, 6, 640);
    EXPECT_TRUE(testing::same(parts, testing::quantize_on_cuda(x.bytes.data(), dtype, spec, 6, 640)));
    EXPECT_TRUE(testing::same_values(testing::dequantize_on_cpu(parts, dtype),
                                     testing::dequantize_on_cuda(parts, dtype), dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(, Tables, ::testing::Range(size_t{0}, kTables));

}  // namespace
}  // namespace halfbyte
