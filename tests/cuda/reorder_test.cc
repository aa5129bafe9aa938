// reorder on a CUDA device: the bytes of the CPU, and back.
#include "harness.h"
#include "ops/reorder/reorder_testing.h"

namespace halfbyte {
namespace {

using testing::DeviceBytes;
using testing::GuardedBytes;
using testing::kCuda;
using testing::Placement;
using testing::StoredWeight;
using testing::WeightCase;

class Reorder : public testing::CudaTest {};
class SanitizeReorder : public testing::CudaTest {};

// The parts of a weight on the device, poisoned.
class DeviceWeight {
 public:
  DeviceWeight(const WeightCase& c, const Placement& place) : like_(c.spec, c.rows, c.cols, c.layout) {
    for (int i = 0; i < StoredWeight::kParts; ++i)
      parts_.emplace_back(like_.parts[i].num_bytes(),
                          i == StoredWeight::kCodes ? place.codes : 4 * place.scales, place.exact);
  }
  WeightView view() {
    WeightView v = like_.view();
    v.device = kCuda;
    v.codes = address(StoredWeight::kCodes);
    v.scales = address(StoredWeight::kScales);
    v.zeros = address(StoredWeight::kZeros);
    v.biases = address(StoredWeight::kBiases);
    v.absmax = static_cast<float*>(address(StoredWeight::kAbsmax));
    v.map = static_cast<float*>(address(StoredWeight::kMap));
    v.offset = static_cast<float*>(address(StoredWeight::kOffset));
    v.global_scale = static_cast<float*>(address(StoredWeight::kGlobalScale));
    return v;
  }
  void upload(const StoredWeight& weight) {
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i].upload(weight.parts[i].data());
  }
  StoredWeight download() {
    StoredWeight weight = like_;
    for (size_t i = 0; i < parts_.size(); ++i) parts_[i].download(weight.parts[i].data());
    return weight;
  }

 private:
  void* address(StoredWeight::Part part) { return like_.of(part) ? parts_[part].data() : nullptr; }
  StoredWeight like_;
  std::vector<DeviceBytes> parts_;
};

PackedWeight packed_weight(const WeightView& view, void* data, int64_t num_bytes) {
  PackedWeight packed;
  packed.spec = view.spec;
  packed.rows = view.rows;
  packed.cols = view.cols;
  packed.data = data;
  packed.device = view.device;
  packed.num_bytes = num_bytes;
  return packed;
}

void check_case(const WeightCase& c, const Placement& place, uint64_t seed) {
  SCOPED_TRACE(fmt::format("{} placed at {}", testing::describe(c), place.codes));
  StoredWeight stored(c.spec, c.rows, c.cols, c.layout);
  stored.fill(seed);
  const int64_t num_bytes = packed_weight_bytes(c.spec, c.rows, c.cols);
  GuardedBytes expected(num_bytes), packed(num_bytes);
  reorder(stored.view(), packed_weight(stored.view(), expected.data(), num_bytes));

  DeviceWeight from(c, place), to(c, place);
  from.upload(stored);
  const DeviceBytes memory(num_bytes, 0, place.exact);
  const PackedWeight on_device = packed_weight(from.view(), memory.data(), num_bytes);
  reorder(from.view(), on_device);
  memory.download(packed.data());
  EXPECT_TRUE(testing::same_packed(expected, packed));
  EXPECT_TRUE(testing::same_parts(stored, from.download())) << "what is read was written";
  reorder(on_device, to.view());
  EXPECT_TRUE(testing::same_parts(stored, to.download()));
}

TEST_F(Reorder, HasTheBytesOfTheCpuAndComesBack) {
  uint64_t seed = 1;
  for (const WeightCase& c : testing::weight_cases(11, 40)) {
    check_case(c, {}, ++seed);
    if (seed % 4 == 0) check_case(c, {0, 3, 1}, seed);  // codes at odd addresses
  }
}

TEST_F(Reorder, WholeVectors) {
  uint64_t seed = 1;
  for (const QuantSpec& spec : testing::packed_specs())
    for (const auto layout : {Layout::halfbyte, Layout::bitsandbytes, Layout::compressed_tensors})
      for (const int64_t cols : {128, 1152, 4096}) {
        WeightCase c{spec, 70, cols, layout};
        c.spec.group_size = cols == 1152 ? 32 : 128;
        if (layout == Layout::bitsandbytes) c.spec.granularity = Granularity::flat;
        testing::fit_format(c.spec);
        if (testing::is_held(c.spec, layout)) check_case(c, {}, ++seed);
      }
}

TEST_F(Reorder, EmptyWeights) {
  for (QuantSpec spec : testing::packed_specs())
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 64}, {32, 0}}) {
      testing::fit_format(spec);
      check_case({spec, rows, cols, Layout::halfbyte}, {}, 1);
    }
}

// More than 2^32 bytes: offsets of 64 bits.
TEST_F(Reorder, LargeWeight) {
  QuantSpec spec;
  spec.format = Format::int8;
  spec.group_size = 128;
  const int64_t rows = 65536 + 5, cols = 65536 + 128, scale_bytes = rows * cols / 128 * 4;
  const int64_t num_bytes = packed_weight_bytes(spec, rows, cols);
  const Memory codes(kCuda, rows * cols), scales(kCuda, scale_bytes), back(kCuda, rows * cols),
      packed(kCuda, num_bytes);
  const cuda::Scope scope(cuda::context(kCuda.index));
  cuda::fill(codes.data(), 0x5A, rows * cols, nullptr);
  cuda::fill(scales.data(), 0x11, scale_bytes, nullptr);
  cuda::fill(back.data(), 0xA5, rows * cols, nullptr);
  std::vector<uint8_t> last(4096);
  for (size_t i = 0; i < last.size(); ++i) last[i] = static_cast<uint8_t>(i * 7);
  const int64_t at = rows * cols - static_cast<int64_t>(last.size());
  copy(kCuda, codes.data() + at, last.data(), static_cast<int64_t>(last.size()));
  WeightView view;
  view.spec = spec;
  view.rows = rows;
  view.cols = cols;
  view.codes = codes.data();
  view.scales = scales.data();
  view.device = kCuda;
  reorder(view, packed_weight(view, packed.data(), num_bytes));
  view.codes = back.data();
  reorder(packed_weight(view, packed.data(), num_bytes), view);
  std::vector<uint8_t> first(4096), end(4096);
  copy(kCuda, first.data(), back.data(), 4096);
  copy(kCuda, end.data(), back.data() + at, 4096);
  cuda::synchronize(nullptr);
  EXPECT_EQ(first, std::vector<uint8_t>(4096, 0x5A));
  EXPECT_EQ(end, last);
}

TEST_F(SanitizeReorder, every_kernel) {
  uint64_t seed = 1;
  for (const WeightCase& c : testing::weight_cases(12, 8)) check_case(c, {.exact = true}, ++seed);
  for (QuantSpec spec : testing::packed_specs()) {
    testing::fit_format(spec);
    check_case({spec, 33, 192, Layout::halfbyte}, {.exact = true}, ++seed);
  }
}

}  // namespace
}  // namespace halfbyte
