// Products with quantized weights on a device: every variant against the reference, run to run, in graphs and
// in chains of kernels that start early.
#include <map>
#include <thread>
#include <tuple>

#include "ops/qgemm/qgemm_testing.h"
#include "surrounded.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::QgemmCase;
using testing::QgemmData;
using testing::Surrounded;

// The tensors of a case on the device.
class OnDevice {
 public:
  OnDevice(const QgemmCase& test, bool exact)
      : test_(test),
        y_(test.num_outputs() * size_of(test.descriptor.dtype), test.descriptor.alignment, exact) {
    const int64_t alignment = test.descriptor.alignment;
    const auto add = [&](const auto& content, auto QgemmTensors::*member, int64_t place) {
      std::vector<uint8_t> bytes(content.size() * sizeof(content[0]));
      if (!bytes.empty()) std::memcpy(bytes.data(), content.data(), bytes.size());
      inputs_.emplace_back(static_cast<int64_t>(bytes.size()), place, exact);
      inputs_.back().upload(bytes);
      contents_.push_back(std::move(bytes));
      const void* const at = inputs_.back().data();
      tensors_.*member = static_cast<std::remove_reference_t<decltype(tensors_.*member)>>(at);
    };
    const int64_t scale_bytes =
        test.descriptor.spec.double_quant ? 1 : size_of(test.descriptor.spec.scale_dtype);
    add(test.x.bytes, &QgemmTensors::x, alignment);
    add(test.bias.bytes, &QgemmTensors::bias, alignment);
    add(test.packed, &QgemmTensors::weight, 256);
    add(test.codes, &QgemmTensors::codes, alignment);
    add(test.scales, &QgemmTensors::scales, scale_bytes);
    add(test.zeros, &QgemmTensors::zeros, 4);
    add(test.biases, &QgemmTensors::biases, scale_bytes);
    add(test.absmax, &QgemmTensors::absmax, 4);
    add(test.map, &QgemmTensors::map, 4);
    add(test.offset, &QgemmTensors::offset, 4);
    add(test.global_scale, &QgemmTensors::global_scale, 4);
    tensors_.y = y_.data();
    reset();
  }

  Qgemm::Args args() const { return testing::qgemm_args(test_, tensors_, kCuda); }
  // y as it is before a run.
  void reset() {
    if (test_.descriptor.accumulate)
      y_.upload(test_.before.bytes);
    else
      y_.clear();
  }
  std::vector<uint8_t> y() const { return y_.download(); }
  void expect_inputs_as_before() const {
    for (size_t i = 0; i < inputs_.size(); ++i)
      EXPECT_TRUE(inputs_[i].download() == contents_[i]) << "input " << i << " was written";
  }

 private:
  const QgemmCase& test_;
  Surrounded y_;
  std::vector<Surrounded> inputs_;
  std::vector<std::vector<uint8_t>> contents_;
  QgemmTensors tensors_;
};

// A workspace that holds anything.
Surrounded workspace_of(const QgemmPlan& plan, bool exact = false) {
  return Surrounded(plan.workspace_size(), 256, exact);
}

// The variants that take the description.
std::vector<std::string> variants_of(QgemmDescriptor d) {
  std::vector<std::string> names;
  for (const QgemmChoice& choice : explain_qgemm(kCuda, d))
    if (choice.reason.empty()) names.push_back(choice.variant);
  return names;
}

// On Hopper bf16 and f16 are taken by the variant that is tuned for so many rows.
void expect_tuned_variant(const QgemmDescriptor& d) {
  if (d.dtype == DType::f32 || cuda::context(kCuda.index).target != "sm_90a") return;
  const std::vector<std::string> takers = variants_of(d);
  const char* const expected = d.m > 64       ? "qgemm_sm90_large"
                               : d.transposed ? "qgemm_sm90_transposed"
                                              : "qgemm_sm90_wgmma";
  EXPECT_NE(std::ranges::find(takers, expected), takers.end()) << testing::describe(d);
}

std::vector<uint8_t> run(const QgemmCase& test, const QgemmPlan& plan, bool exact) {
  const Surrounded workspace = workspace_of(plan, exact);
  const OnDevice memory(test, exact);
  plan.run(nullptr, {workspace.data(), plan.workspace_size()}, memory.args());
  EXPECT_TRUE(plan.status(nullptr, {workspace.data(), plan.workspace_size()}).ok());
  memory.expect_inputs_as_before();
  workspace.download();  // what lies around it
  return memory.y();
}

// Every variant that takes the description against the reference. Returns how many do.
size_t check_variants(QgemmDescriptor d, uint64_t seed, QgemmData data = QgemmData::random,
                      bool exact = false) {
  testing::fit_format(d.spec);
  const QgemmCase test(d, seed, data);
  std::map<WeightRounding, QgemmReference> references;
  const std::vector<std::string> variants = variants_of(d);
  for (const std::string& variant : variants) {
    d.variant = variant;
    SCOPED_TRACE(testing::describe(d));
    const auto plan = QgemmPlan::select(kCuda, d);
    const WeightRounding rounding = plan.precision_guarantee().weight_rounding;
    if (!references.contains(rounding))
      references[rounding] = qgemm_ref(test.problem, test.tensors(), rounding);
    EXPECT_TRUE(testing::near_reference(test, run(test, plan, exact), references[rounding], data))
        << plan.sku().kernel;
    EXPECT_TRUE(plan.precision_guarantee().deterministic);
  }
  EXPECT_FALSE(variants.empty()) << testing::describe(d);
  return variants.size();
}

QgemmDescriptor descriptor(const QuantSpec& spec, DType dtype, bool transposed) {
  QgemmDescriptor d;
  d.spec = spec;
  d.dtype = dtype;
  d.transposed = transposed;
  return d;
}
QuantSpec grouped(QuantSpec spec, int64_t size) {
  spec.granularity = size == 0 ? Granularity::channel : Granularity::group;
  spec.group_size = size == 0 ? 64 : size;
  return spec;
}
constexpr int64_t kGroups[] = {64, 32, 128, 256, 0};  // 0: per channel

// ---- Every format with every dtype, both directions

struct Config {
  size_t format;
  DType dtype;
  bool transposed;
};
std::vector<Config> all_configs() {
  std::vector<Config> configs;
  for (size_t format = 0; format < testing::qgemm_formats().size(); ++format)
    for (const DType dtype : testing::kQgemmDTypes)
      for (const bool transposed : {false, true}) configs.push_back({format, dtype, transposed});
  return configs;
}
std::string name_of(const Config& config) {
  return fmt::format("{}_{}_{}", testing::short_text(testing::qgemm_formats()[config.format]),
                     to_string(config.dtype), config.transposed ? "transposed" : "forward");
}

class QgemmCuda : public testing::CudaTest, public ::testing::WithParamInterface<Config> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam().format]; }
  // Another number for each configuration: groups, dtypes and rows of x take turns.
  size_t turn() const {
    return GetParam().format * 7 + static_cast<size_t>(GetParam().dtype) * 3 + GetParam().transposed;
  }
};

TEST_P(QgemmCuda, EveryVariant) {
  constexpr int64_t kM[] = {1, 5, 16, 37, 2, 64, 8, 3, 130, 24, 4, 70, 257};
  std::mt19937_64 random(turn());
  for (size_t i = 0; i < 4; ++i) {
    const size_t at = turn() + i * 3;
    QgemmDescriptor d =
        descriptor(grouped(format(), kGroups[(turn() + i / 2) % 5]), GetParam().dtype, GetParam().transposed);
    d.spec.scale_dtype = testing::kQgemmDTypes[(turn() / 2) % 3];
    d.m = kM[at % std::size(kM)];
    d.n = i % 2 == 0 ? 200 : testing::pick(random, testing::kQgemmExtents);
    d.k = i % 2 == 0 ? 512 : testing::pick(random, testing::kQgemmExtents);
    d.bias = !d.transposed && i % 2 == 1;
    d.accumulate = i >= 2;
    check_variants(d, random());
  }
}
// Of more rows than 64, in whole chunks of 16 bytes; groups that end amid a unit, too.
TEST_P(QgemmCuda, ManyRows) {
  constexpr int64_t kSizes[] = {64, 32, 128, 256, 0, 48, 8};
  std::mt19937_64 random(turn() + 2000);
  for (const int64_t size : kSizes) {
    QgemmDescriptor d = descriptor(grouped(format(), size), GetParam().dtype, GetParam().transposed);
    d.spec.scale_dtype = testing::kQgemmDTypes[random() % 3];
    d.m = 65 + static_cast<int64_t>(random() % 16);
    d.n = 200;
    d.k = 520;
    d.bias = !d.transposed && size != 32;
    d.accumulate = size >= 64;
    check_variants(d, random());
    if (size == 32 && format().format != Format::nf4 && format().format != Format::fp4) {
      d.bias = !d.transposed;
      check_variants(d, random(), QgemmData::integers);
    }
    if (info(d.spec.format).kind == FormatKind::affine || size == 8) continue;
    d.spec.scale_dtype = DType::f32;
    d.spec.double_quant = true;
    check_variants(d, random());
  }
}
// Integers and scales that are powers of two: sums in f32 are exact.
TEST_P(QgemmCuda, IntegersAreExact) {
  if (format().format == Format::nf4 || format().format == Format::fp4)
    GTEST_SKIP() << "values are not short";
  std::mt19937_64 random(turn() + 1000);
  QgemmDescriptor d =
      descriptor(grouped(format(), kGroups[turn() % 5]), GetParam().dtype, GetParam().transposed);
  d.spec.scale_dtype = testing::kQgemmDTypes[(turn() / 2) % 3];
  for (const int64_t m : {int64_t{1}, int64_t{16}, int64_t{64}, int64_t{100}}) {
    d.m = m;
    d.n = m == 100 ? 136 : 129;
    d.k = 640;
    d.bias = !d.transposed;
    check_variants(d, random(), QgemmData::integers);
  }
}
INSTANTIATE_TEST_SUITE_P(, QgemmCuda, ::testing::ValuesIn(all_configs()),
                         [](const auto& info) { return name_of(info.param); });

using QgemmCudaNan = testing::CudaTest;

TEST_F(QgemmCudaNan, OfTheWeightIsNan) {
  for (const DType dtype : testing::kQgemmDTypes)
    for (QgemmDescriptor d : testing::nan_products(dtype)) {
      QgemmCase test = testing::nan_case(d, 7);
      for (const std::string& variant : variants_of(d)) {
        test.descriptor.variant = variant;
        const auto plan = QgemmPlan::select(kCuda, test.descriptor);
        EXPECT_TRUE(testing::nan_as_reference(test, run(test, plan, false),
                                              plan.precision_guarantee().weight_rounding));
      }
    }
}

// ---- The rest of what kernels are compiled for: groups, double quantization, views, maths

class QgemmCudaFormat : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam()]; }
};

TEST_P(QgemmCudaFormat, EveryGroup) {
  std::mt19937_64 random(GetParam());
  for (size_t i = 0; i < std::size(kGroups); ++i)
    for (const bool transposed : {false, true}) {
      QgemmDescriptor d =
          descriptor(grouped(format(), kGroups[i]), testing::kQgemmDTypes[(GetParam() + i) % 3], transposed);
      d.m = transposed ? 9 : 3;
      d.n = 101;
      d.k = 520;
      check_variants(d, random());
      if (info(d.spec.format).kind == FormatKind::affine || i % 2 == 1) continue;
      d.spec.scale_dtype = DType::f32;
      d.spec.double_quant = true;
      d.k = 1040;  // more scales than a block of 256 has
      check_variants(d, random());
    }
}
TEST_P(QgemmCudaFormat, EveryGroupManyRows) {
  std::mt19937_64 random(GetParam() + 250);
  for (size_t i = 0; i < std::size(kGroups); ++i)
    for (const bool transposed : {false, true})
      for (const bool nested : {false, true}) {
        QgemmDescriptor d = descriptor(grouped(format(), kGroups[i]),
                                       (GetParam() + i) % 2 == 0 ? DType::bf16 : DType::f16, transposed);
        if (d.spec.format == Format::mxfp4) d.dtype = DType::bf16;  // tuned for it alone
        if (nested && info(d.spec.format).kind == FormatKind::affine) continue;
        d.spec.scale_dtype = nested ? DType::f32 : testing::kQgemmDTypes[(GetParam() + i / 2) % 3];
        d.spec.double_quant = nested;
        d.m = nested ? 70 : 150;
        d.n = 136;
        d.k = 1048;
        d.bias = !transposed;
        d.accumulate = i % 2 == 0;
        EXPECT_GE(check_variants(d, random()), formats::in_fragments(info(d.spec.format).bits) ? 2u : 1u);
      }
}
// Whatever goes together.
TEST_P(QgemmCudaFormat, Random) {
  std::mt19937_64 random(GetParam() + 500);
  for (int i = 0; i < 16; ++i) {
    QgemmDescriptor d = testing::random_qgemm(random, format(), i % 2 == 0);
    testing::set_random_extents(random, d);
    if (i % 4 >= 2) d.alignment = size_of(d.dtype);
    check_variants(d, random());
  }
}
INSTANTIATE_TEST_SUITE_P(, QgemmCudaFormat, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

// ---- Shapes, of few kernels

QuantSpec nf4() {
  QuantSpec spec;
  spec.scale_dtype = DType::f16;
  return spec;
}
// With a table of values and without, and scales of 8 bits.
std::array<QuantSpec, 3> table_codes_and_nested() {
  QuantSpec wide = grouped(nf4(), 128);
  wide.format = Format::int8;
  QuantSpec nested = grouped(nf4(), 64);
  nested.scale_dtype = DType::f32;
  nested.double_quant = true;
  return {nf4(), wide, nested};
}

class QgemmCudaShapes : public testing::CudaTest, public ::testing::WithParamInterface<bool> {};

TEST_P(QgemmCudaShapes, EveryNumberOfRows) {
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
  d.n = 97;
  d.k = 328;
  for (d.m = 1; d.m <= 66; ++d.m) check_variants(d, static_cast<uint64_t>(d.m));
  d.n = 136;
  for (const int64_t m :
       {65, 72, 96, 97, 127, 128, 129, 160, 161, 192, 200, 224, 225, 256, 257, 288, 289, 321}) {
    d.m = m;
    EXPECT_GE(check_variants(d, static_cast<uint64_t>(m)), 3u);
  }
}
// Tiles of 256 columns of y for most multiprocessors, then for all of them and more.
TEST_P(QgemmCudaShapes, WideTiles) {
  QuantSpec nested = nf4(), affine = grouped({.format = Format::affine4}, 32);
  nested.scale_dtype = DType::f32;
  nested.double_quant = true;
  affine.scale_dtype = DType::f16;
  for (const int64_t m : {20, 40, 66, 80, 100, 112}) {
    const QuantSpec& spec = m == 66 ? nested : m == 100 ? affine : nf4();
    QgemmDescriptor d = descriptor(spec, m % 16 == 0 ? DType::bf16 : DType::f16, GetParam());
    d.m = m;
    d.n = 72;
    d.k = m == 40 ? 65540 : 20006;
    if (!d.transposed) std::swap(d.n, d.k);
    d.bias = !d.transposed;
    d.accumulate = m == 80;
    EXPECT_GE(check_variants(d, static_cast<uint64_t>(m)), 3u);
  }
}
TEST_P(QgemmCudaShapes, ManyRowsTails) {
  std::mt19937_64 random(GetParam() + 100);
  const auto below = [&](uint64_t count) { return static_cast<int64_t>(random() % count); };
  for (int i = 0; i < 24; ++i) {
    QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
    const int64_t sum = 8 * (1 + below(130)), out = 2 * (1 + below(300));
    d.m = 65 + below(300);
    d.n = d.transposed ? sum : out;
    d.k = d.transposed ? out : sum;
    d.bias = !d.transposed && i % 2 == 0;
    d.accumulate = i % 4 >= 2;
    EXPECT_GE(check_variants(d, random()), 3u);
  }
  // Some rounds of large tiles, some of them with tails; then blocks share tiles, of which they sum up
  // unequal parts.
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
  constexpr int64_t kSum = 264, kOut = 12792;
  d.m = 1000;
  d.n = d.transposed ? kSum : kOut;
  d.k = d.transposed ? kOut : kSum;
  EXPECT_GE(check_variants(d, random()), 3u);
}
TEST_P(QgemmCudaShapes, Tails) {
  std::mt19937_64 random(GetParam());
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
  for (int i = 0; i < 60; ++i) {
    testing::set_random_extents(random, d, i % 3 == 0 ? 1 : 0);
    d.bias = !d.transposed && i % 2 == 0;
    d.accumulate = i % 4 >= 2;
    d.alignment = i % 5 == 0 ? 2 : 16;
    check_variants(d, random());
  }
}
// Odd extents: x is staged, y is stored by elements. Every variant that takes even ones takes these.
TEST_P(QgemmCudaShapes, OddExtents) {
  QuantSpec nested = grouped(nf4(), 64);
  nested.scale_dtype = DType::f32;
  nested.double_quant = true;
  QuantSpec affine = grouped(nf4(), 32);
  affine.format = Format::affine4;
  affine.scale_dtype = DType::f16;
  const QuantSpec specs[] = {nf4(), nested, affine};
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{129, 263}, {258, 1031}, {1027, 130}};
  size_t turn = 0;
  for (const int64_t m : {1, 7, 33, 64, 65, 130, 300})
    for (const DType dtype : testing::kQgemmDTypes) {
      QgemmDescriptor d = descriptor(specs[turn % 3], dtype, GetParam());
      std::tie(d.n, d.k) = kShapes[(turn + turn / 3) % 3];
      d.m = m;
      d.bias = !d.transposed && m % 2 == 1;
      d.accumulate = turn % 2 == 0;
      d.alignment = turn % 4 == 0 ? size_of(dtype) : 16;
      check_variants(d, ++turn);
      expect_tuned_variant(d);
    }
}
// Many blocks, splits of what is summed, units that do not fill the last round.
TEST_P(QgemmCudaShapes, Large) {
  constexpr int64_t kShapes[][3] = {{1, 4096, 4096},  {4, 3000, 1096}, {8, 1024, 4096},
                                    {16, 4100, 1000}, {33, 640, 2944}, {64, 512, 4096},
                                    {150, 600, 1000}, {100, 96, 8200}, {70, 8200, 96}};
  for (const auto& [m, n, k] : kShapes) {
    QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
    d.m = m;
    d.n = n;
    d.k = k;
    check_variants(d, static_cast<uint64_t>(n));
  }
}
// Few tiles, which clusters of 2, 4 and 8 blocks share.
TEST_P(QgemmCudaShapes, SharedTiles) {
  for (const QuantSpec& spec : table_codes_and_nested())
    for (const auto& [m, features, sums] :
         {std::array<int64_t, 3>{100, 1000, 1024}, {72, 250, 4090}, {200, 330, 2048}}) {
      QgemmDescriptor d = descriptor(spec, DType::bf16, GetParam());
      d.m = m;
      d.n = d.transposed ? sums : features;
      d.k = d.transposed ? features : sums;
      d.bias = !d.transposed;
      d.accumulate = m == 72;
      check_variants(d, static_cast<uint64_t>(sums));
    }
}
// Tiles whose sums four warpgroups share: of 64 columns of y and 32, 64, 96 or 128 rows, and of 128 by 128,
// by what qgemm_sm90_large chooses on 132 multiprocessors.
TEST_P(QgemmCudaShapes, SplitTiles) {
  for (const QuantSpec& spec : table_codes_and_nested())
    for (const auto& [m, features, sums] :
         {std::array<int64_t, 3>{17, 300, 1000},
          {50, 200, 4090},
          {65, 264, 520},
          {1500, 136, 136},
          GetParam() ? std::array<int64_t, 3>{1000, 520, 136} : std::array<int64_t, 3>{300, 2040, 136},
          {1500, 520, 520},
          {790, 2040, GetParam() ? 520 : 264}}) {
      QgemmDescriptor d = descriptor(spec, DType::bf16, GetParam());
      d.m = m;
      d.n = d.transposed ? sums : features;
      d.k = d.transposed ? features : sums;
      d.bias = !d.transposed;
      d.accumulate = m == 65;
      check_variants(d, static_cast<uint64_t>(sums));
    }
}
// Groups that are stored as such of 16 columns.
TEST_P(QgemmCudaShapes, GroupsOf16) {
  QuantSpec wide = grouped(nf4(), 48);
  wide.format = Format::int4;
  wide.asymmetric = true;
  wide.scale_dtype = DType::bf16;
  const QuantSpec specs[] = {grouped(nf4(), 16), wide};
  uint64_t turn = 0;
  for (const int64_t m : {1, 8, 13, 16, 27, 33, 64, 65, 128, 200, 300})
    for (const DType dtype : {DType::bf16, DType::f32}) {
      if (dtype == DType::f32 && m > 64) continue;
      QgemmDescriptor d = descriptor(specs[turn % 2], dtype, GetParam());
      d.m = m;
      d.n = turn % 3 == 0 ? 200 : 264;
      d.k = turn % 3 == 0 ? 712 : 130;
      d.accumulate = turn % 4 == 0;
      check_variants(d, ++turn);
      expect_tuned_variant(d);
    }
}
// Several rounds, tiles and slices a block, which take many rows or columns; tails everywhere.
TEST_P(QgemmCudaShapes, ManyTiles) {
  struct Shape {
    int64_t m, n, k;
  };
  const std::vector<Shape> shapes =
      GetParam() ? std::vector<Shape>{{12, 136, 17200},
                                      {64, 136, 17200},
                                      {40, 72, 34000},
                                      {512, 136, 8500},
                                      {70, 136, 25600}}
                 : std::vector<Shape>{{5, 4500, 8712},  {20, 8500, 264},  {64, 17100, 264},
                                      {64, 28672, 512}, {512, 8500, 136}, {70, 25600, 136}};
  for (const QuantSpec& spec : table_codes_and_nested())
    for (const auto& [m, n, k] : shapes) {
      QgemmDescriptor d = descriptor(spec, DType::bf16, GetParam());
      d.m = m;
      d.n = n;
      d.k = k;
      d.bias = !d.transposed;
      d.accumulate = m != 20;
      EXPECT_GE(check_variants(d, static_cast<uint64_t>(n)), 3u);
    }
}
// Of qgemm_cublas: two slices of nearly the same size. Sums are exact, so that another variant gives the same
// bytes.
TEST_P(QgemmCudaShapes, Slices) {
  struct Shape {
    int64_t m, features, sums;
  };
  for (const auto& [m, features, sums] : {Shape{4096, 2184, 8192}, Shape{72, 392, 45000}}) {
    QuantSpec spec = grouped(nf4(), 128);
    spec.format = Format::int4;
    QgemmDescriptor d = descriptor(spec, DType::bf16, GetParam());
    d.m = m;
    d.n = d.transposed ? sums : features;
    d.k = d.transposed ? features : sums;
    d.bias = !d.transposed;
    const std::vector<std::string> variants = variants_of(d);
    if (std::ranges::find(variants, "qgemm_cublas") == variants.end()) GTEST_SKIP() << "there is no cuBLASLt";
    const QgemmCase test(d, static_cast<uint64_t>(m), QgemmData::integers);
    std::vector<std::vector<uint8_t>> results;
    for (const char* variant : {"qgemm_sm80", "qgemm_cublas"}) {
      d.variant = variant;
      const auto plan = QgemmPlan::select(kCuda, d);
      EXPECT_LE(plan.workspace_size(), (int64_t{32} << 20) * (d.variant == "qgemm_cublas" ? 1 : 1000));
      results.push_back(run(test, plan, false));
    }
    EXPECT_TRUE(results[0] == results[1]) << testing::describe(d);
  }
}
// Threads share a plan, each with a workspace of its own.
TEST_P(QgemmCudaShapes, Threads) {
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
  d.m = 130;
  d.n = 520;
  d.k = 264;
  d.bias = !d.transposed;
  const QgemmCase test(d, 5);
  for (const std::string& variant : variants_of(d)) {
    d.variant = variant;
    SCOPED_TRACE(testing::describe(d));
    const auto plan = QgemmPlan::select(kCuda, d);
    const std::vector<uint8_t> expected = run(test, plan, false);
    std::vector<int> num_right(4);
    std::vector<std::jthread> threads;
    for (int& right : num_right)
      threads.emplace_back([&] {
        const Surrounded workspace = workspace_of(plan);
        const OnDevice memory(test, false);
        const Stream stream(kCuda);
        for (int i = 0; i < 20; ++i)
          plan.run(stream.handle(), {workspace.data(), plan.workspace_size()}, memory.args());
        stream.synchronize();
        right = memory.y() == expected;
      });
    threads.clear();
    EXPECT_EQ(num_right, std::vector<int>(4, 1));
  }
}
TEST_P(QgemmCudaShapes, Empty) {
  for (const bool packed : {true, false})
    for (const bool accumulate : {false, true})
      for (const auto& [m, n, k] : {std::array<int64_t, 3>{0, 40, 70}, {3, 0, 70}, {3, 40, 0}, {0, 0, 0}}) {
        QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
        d.m = m;
        d.n = n;
        d.k = k;
        d.packed = packed;
        d.accumulate = accumulate;
        d.bias = !d.transposed;
        if (m > 0 && (d.transposed ? k : n) > 0) {
          check_variants(d, 1);
          continue;
        }
        const QgemmCase test(d, 1);
        run(test, QgemmPlan::select(kCuda, d), false);
      }
}

// ---- Run to run

// One description for each way to sum: few and many rows, long and short sums.
std::vector<QgemmDescriptor> long_sums(bool transposed) {
  std::vector<QgemmDescriptor> all;
  for (const int64_t m : {1, 8, 16, 33, 64, 100}) {
    QgemmDescriptor d = descriptor(nf4(), DType::bf16, transposed);
    d.m = m;
    d.n = transposed ? 2056 : 160;
    d.k = transposed ? 192 : 2056;
    all.push_back(d);
  }
  // Longer: many rows that are still few tiles.
  (transposed ? all.back().n : all.back().k) = 8200;
  return all;
}

TEST_P(QgemmCudaShapes, RunsGiveTheSameBytes) {
  for (QgemmDescriptor d : long_sums(GetParam())) {
    const QgemmCase test(d, 7);
    for (const std::string& variant : variants_of(d)) {
      d.variant = variant;
      SCOPED_TRACE(testing::describe(d));
      const auto plan = QgemmPlan::select(kCuda, d);
      Surrounded workspace = workspace_of(plan);
      OnDevice memory(test, false);
      std::vector<uint8_t> first;
      int num_different = 0;
      for (int i = 0; i < 100; ++i) {
        memory.reset();
        if (i % 10 == 0) workspace.clear();  // else as the run before left it
        plan.run(nullptr, {workspace.data(), plan.workspace_size()}, memory.args());
        std::vector<uint8_t> y = memory.y();
        if (i == 0) first = y;
        num_different += y != first;
      }
      EXPECT_EQ(num_different, 0);
    }
  }
}

TEST_P(QgemmCudaShapes, Graphs) {
  for (QgemmDescriptor d : long_sums(GetParam())) {
    for (const bool early_start : {false, true}) {
      d.early_start = early_start;
      const QgemmCase test(d, 8);
      for (const std::string& variant : variants_of(d)) {
        d.variant = variant;
        SCOPED_TRACE(testing::describe(d));
        const auto plan = QgemmPlan::select(kCuda, d);
        const std::vector<uint8_t> expected = run(test, plan, false);
        const Surrounded workspace = workspace_of(plan);
        OnDevice memory(test, false);
        const Stream stream(kCuda);
        testing::Graph graph;
        const cuda::Scope scope(cuda::context(kCuda.index));
        graph.capture(stream.handle(), [&] {
          for (int i = 0; i < 3; ++i)
            plan.run(stream.handle(), {workspace.data(), plan.workspace_size()}, memory.args());
        });
        for (int i = 0; i < 3; ++i) {
          memory.reset();
          graph.launch(stream.handle());
          stream.synchronize();
          EXPECT_TRUE(memory.y() == expected);
        }
      }
      d.variant.clear();
    }
  }
}

// The variants that multiply f32 on tensor cores.
std::vector<std::string> splitting_variants(const QgemmDescriptor& d) {
  std::vector<std::string> names = variants_of(d);
  std::erase_if(names,
                [](const std::string& name) { return name != "qgemm_sm80" && name != "qgemm_sm90_split"; });
  return names;
}
// On random data their error is at most 4 times that of sums in f32, term by term.
TEST_P(QgemmCudaShapes, SplitF32IsAsExactAsF32) {
  const auto error_of = [](const std::vector<double>& expected, const auto& value) {
    double sum = 0;
    for (size_t i = 0; i < expected.size(); ++i) sum += std::pow(value(i) - expected[i], 2);
    return std::sqrt(sum / static_cast<double>(expected.size()));
  };
  for (const Format format : {Format::nf4, Format::int4, Format::int8, Format::affine4})
    for (const int64_t sums : {256, 4096}) {
      QuantSpec spec = grouped(nf4(), 64);
      spec.format = format;
      spec.scale_dtype = DType::f16;
      QgemmDescriptor d = descriptor(spec, DType::f32, GetParam());
      d.m = sums == 256 ? 16 : 40;
      d.n = d.transposed ? sums : 96;
      d.k = d.transposed ? 128 : sums;
      QgemmCase test(d, static_cast<uint64_t>(sums));
      SCOPED_TRACE(testing::describe(d));
      const QgemmReference expected = qgemm_ref(test.problem, test.tensors(), WeightRounding::none);
      std::vector<float> term_by_term;
      for (int64_t i = 0; i < d.m; ++i)
        for (int64_t j = 0; j < test.problem.out_cols(); ++j) {
          float sum = 0;
          for (int64_t l = 0; l < sums; ++l) {
            const auto weight =
                d.transposed ? reference_weight(test.problem, test.tensors(), l, j, WeightRounding::none)
                             : reference_weight(test.problem, test.tensors(), j, l, WeightRounding::none);
            sum = std::fma(load_element<float>(test.x.bytes.data(), i * sums + l, DType::f32),
                           static_cast<float>(weight.value), sum);
          }
          term_by_term.push_back(sum);
        }
      const double theirs =
          error_of(expected.y, [&](size_t i) { return static_cast<double>(term_by_term[i]); });
      for (const std::string& variant : splitting_variants(d)) {
        test.descriptor.variant = variant;
        const std::vector<uint8_t> y = run(test, QgemmPlan::select(kCuda, test.descriptor), false);
        const double ours = error_of(expected.y, [&](size_t i) {
          return load_element<double>(y.data(), static_cast<int64_t>(i), DType::f32);
        });
        EXPECT_LE(ours, 4 * theirs) << variant;
        RecordProperty(fmt::format("{}_{}_{}", variant, info(format).name, sums),
                       fmt::format("{:.3}", ours / theirs));
      }
    }
}
// One to four rows of f32: rings that wrap, parts of sums, several units a block; tails.
TEST_P(QgemmCudaShapes, FewRowsOfF32) {
  struct Shape {
    int64_t m, n, k;
  };
  QuantSpec zeros = grouped(nf4(), 32), biases = grouped(nf4(), 256);
  zeros.format = Format::int4;
  zeros.asymmetric = true;
  zeros.scale_dtype = DType::f16;
  biases.format = Format::affine4;
  uint64_t turn = 0;
  for (const QuantSpec& spec : {grouped(nf4(), 32), grouped(nf4(), 64), grouped(nf4(), 128), zeros, biases})
    for (const auto [m, n, k] :
         {Shape{1, 4501, 200}, Shape{2, 5000, 65}, Shape{2, 700, 9001}, Shape{1, 31, 17000},
          Shape{3, 5000, 65}, Shape{3, 700, 9001}, Shape{4, 4501, 200}, Shape{4, 31, 17000}}) {
      QgemmDescriptor d = descriptor(spec, DType::f32, GetParam());
      d.m = m;
      d.n = GetParam() ? n : k;
      d.k = GetParam() ? k : n;
      d.accumulate = turn % 2 == 0;
      check_variants(d, ++turn);
    }
}
// Groups and rows whose scales go into x, transposed; rings that wrap; stages, tiles and rows of x that are
// not whole.
TEST_P(QgemmCudaShapes, SplitF32InGroupsOfAllWidths) {
  struct Weight {
    Format format;
    bool asymmetric;
  };
  uint64_t turn = 0;
  for (const auto [format, asymmetric] : {Weight{Format::int4, false},
                                          {Format::int4, true},
                                          {Format::int8, false},
                                          {Format::int8, true},
                                          {Format::fp8, false}})
    for (const int64_t group : {64, 128, 0})
      for (const int64_t m : {1, 16, 29, 64, 65}) {
        QuantSpec spec = grouped(nf4(), group == 0 ? 64 : group);
        spec.format = format;
        spec.asymmetric = asymmetric;
        if (group == 0) spec.granularity = Granularity::channel;
        QgemmDescriptor d = descriptor(spec, DType::f32, GetParam());
        d.m = m;
        const int64_t sums = turn % 3 == 0 ? 712 : 1029, features = turn % 4 == 0 ? 264 : 386;
        d.n = d.transposed ? sums : features;
        d.k = d.transposed ? features : sums;
        d.accumulate = turn % 5 == 0;
        check_variants(d, ++turn);
      }
}
// What has no parts, infinity and NaN; large and small values.
TEST_P(QgemmCudaShapes, SplitF32KeepsWhatIsNotFinite) {
  for (const Format format : {Format::nf4, Format::int4}) {
    QuantSpec spec = grouped(nf4(), 64);
    spec.format = format;
    QgemmDescriptor d = descriptor(spec, DType::f32, GetParam());
    d.m = 4;
    d.n = d.k = 64;
    QgemmCase test(d, 3);
    const float values[] = {INFINITY, NAN, 0x1.fp120f, 0x1p-100f};
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t l = 0; l < 64; ++l)
        store_element(test.x.bytes.data(), i * 64 + l, l == 5 ? values[i] : 0.0f, DType::f32);
    for (const std::string& variant : splitting_variants(d)) {
      test.descriptor.variant = variant;
      const std::vector<uint8_t> y = run(test, QgemmPlan::select(kCuda, test.descriptor), false);
      for (int64_t j = 0; j < 64; ++j) {
        const auto weight = d.transposed
                                ? reference_weight(test.problem, test.tensors(), 5, j, WeightRounding::none)
                                : reference_weight(test.problem, test.tensors(), j, 5, WeightRounding::none);
        for (int64_t i = 0; i < 4; ++i) {
          const double expected = static_cast<double>(values[i]) * weight.value,
                       actual = load_element<double>(y.data(), i * 64 + j, DType::f32);
          const bool same = std::isnan(expected) ? std::isnan(actual)
                            : std::isinf(expected)
                                ? actual == expected
                                : std::fabs(actual - expected) <= std::fabs(expected) * 0x1p-21;
          EXPECT_TRUE(same) << variant << ": " << values[i] << " * " << weight.value << ": " << actual;
        }
      }
    }
  }
}

class QgemmCudaChoice : public testing::CudaTest {};

// Of more than 8 rows of x a view is packed first: the bytes of a weight that was packed by hand, in graphs
// and with kernels that may start early, too.
TEST_F(QgemmCudaChoice, AViewIsPackedFirst) {
  for (const int64_t m : {8, 9, 64, 70, 512})
    for (QgemmDescriptor d : testing::view_products(m)) {
      SCOPED_TRACE(testing::describe(d));
      QgemmDescriptor packed = d;
      packed.packed = true;
      packed.layout = Layout::halfbyte;
      for (const QgemmChoice& choice : explain_qgemm(kCuda, d)) {
        SCOPED_TRACE(choice.variant);
        EXPECT_TRUE(m > 8 || !choice.packs);
        if (!choice.packs) continue;
        d.variant = packed.variant = choice.variant;
        d.early_start = choice.variant == "qgemm_sm80";
        const auto plan = QgemmPlan::select(kCuda, d), of_packed = QgemmPlan::select(kCuda, packed);
        EXPECT_EQ(plan.sku().kernel, of_packed.sku().kernel);
        const QgemmCase test(d, static_cast<uint64_t>(m));
        const std::vector<uint8_t> y = run(test, plan, false);
        const Surrounded by_hand(packed_weight_bytes(d.spec, d.n, d.k), 256, false);
        const Surrounded workspace = workspace_of(of_packed), of_view = workspace_of(plan);
        OnDevice memory(test, false);
        of_packed.run(nullptr, {workspace.data(), of_packed.workspace_size()},
                      testing::pack_by_hand(d, memory.args(), by_hand.data()));
        EXPECT_TRUE(memory.y() == y);

        const Stream stream(kCuda);
        testing::Graph graph;
        const cuda::Scope scope(cuda::context(kCuda.index));
        graph.capture(stream.handle(), [&] {
          plan.run(stream.handle(), {of_view.data(), plan.workspace_size()}, memory.args());
        });
        for (int i = 0; i < 2; ++i) {
          memory.reset();
          graph.launch(stream.handle());
          stream.synchronize();
          EXPECT_TRUE(memory.y() == y);
        }
      }
      d.variant.clear();
      d.early_start = false;
      const bool reads_views = QgemmPlan::select(kCuda, d).sku().kernel.starts_with("qgemm_simt");
      EXPECT_TRUE(m > 8 ? !reads_views || d.dtype == DType::f32 : reads_views);
    }
}

// ---- Chains: a kernel that starts early reads what the one before it wrote, and writes what that one read

TEST_P(QgemmCudaShapes, ChainsThatStartEarly) {
  constexpr int64_t kWidth = 1024;
  constexpr int kLinks = 40;
  for (const int64_t m : {1, 4, 8, 16, 48, 64, 128}) {
    QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam());
    d.m = m;
    d.n = d.k = kWidth;
    const QgemmCase test(d, static_cast<uint64_t>(m));
    const int64_t num_bytes = m * kWidth * 2;
    for (const std::string& variant : variants_of(d)) {
      d.variant = variant;
      SCOPED_TRACE(testing::describe(d));
      d.early_start = false;
      const auto plain = QgemmPlan::select(kCuda, d);
      d.early_start = true;
      const auto early = QgemmPlan::select(kCuda, d);
      const OnDevice memory(test, false);
      Surrounded buffers[2] = {{num_bytes, 256, false}, {num_bytes, 256, false}};
      // Workspaces take turns, too: a kernel may still read that of the run before the last.
      const Surrounded workspaces[2] = {workspace_of(early), workspace_of(early)};
      const Surrounded plain_workspace = workspace_of(plain);
      const Stream stream(kCuda);
      const auto args_of = [&](int link) {
        Qgemm::Args args = memory.args();
        args.x.data = buffers[link % 2].data();
        args.y.data = buffers[(link + 1) % 2].data();
        return args;
      };
      std::vector<std::vector<uint8_t>> expected;
      buffers[0].upload(test.x.bytes);
      for (int link = 0; link < kLinks; ++link) {
        plain.run(stream.handle(), {plain_workspace.data(), plain.workspace_size()}, args_of(link));
        stream.synchronize();
        expected.push_back(buffers[(link + 1) % 2].download());
      }
      // All links in one workspace, or two in turn; then with a copy between links, which is no kernel of
      // ours.
      for (const int num_workspaces : {1, 2})
        for (const bool with_copies : {false, true})
          for (int repeat = 0; repeat < 3; ++repeat) {
            const Surrounded copied(num_bytes * kLinks, 256, false);
            buffers[0].upload(test.x.bytes);
            buffers[1].clear();
            for (int link = 0; link < kLinks; ++link) {
              early.run(stream.handle(), {workspaces[link % num_workspaces].data(), early.workspace_size()},
                        args_of(link));
              if (with_copies)
                copy(kCuda, copied.data() + link * num_bytes, buffers[(link + 1) % 2].data(), num_bytes,
                     stream.handle());
            }
            stream.synchronize();
            EXPECT_TRUE(buffers[kLinks % 2].download() == expected.back());
            EXPECT_TRUE(buffers[1 - kLinks % 2].download() == expected[kLinks - 2]);
            if (!with_copies) continue;
            const std::vector<uint8_t> all = copied.download();
            for (int link = 0; link < kLinks; ++link)
              EXPECT_TRUE(std::equal(expected[static_cast<size_t>(link)].begin(),
                                     expected[static_cast<size_t>(link)].end(),
                                     all.begin() + link * num_bytes))
                  << "link " << link;
          }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(, QgemmCudaShapes, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "transposed" : "forward"; });

// ---- What is chosen and refused

TEST_F(QgemmCudaChoice, EveryVariantTakesOrSaysWhy) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 200; ++i) {
    QgemmDescriptor d =
        testing::random_qgemm(random, testing::pick(random, testing::qgemm_formats()), i % 2 == 0);
    testing::set_random_extents(random, d);
    const auto choices = explain_qgemm(kCuda, d);
    EXPECT_EQ(choices.back().reason, "it is for the CPU");
    EXPECT_TRUE(std::ranges::any_of(choices, [](const QgemmChoice& choice) { return choice.reason.empty(); }))
        << testing::describe(d);
  }
}
TEST_F(QgemmCudaChoice, ARefusedVariantIsAnError) {
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, false);
  d.m = 3;
  d.n = d.k = 64;
  d.variant = "qgemm_ref";
  try {
    QgemmPlan::select(kCuda, d);
    ADD_FAILURE() << "it was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::device);
    EXPECT_STREQ(error.what(), "qgemm: descriptor.variant does not take this; qgemm_ref: it is for the CPU");
  }
}
TEST_F(QgemmCudaChoice, HostMemoryIsRefused) {
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, false);
  d.m = 3;
  d.n = d.k = 64;
  const QgemmCase test(d, 1);
  const OnDevice memory(test, false);
  const auto plan = QgemmPlan::select(kCuda, d);
  testing::GuardedMemory packed(test.packed, 256);
  Qgemm::Args args = memory.args();
  EXPECT_FALSE(plan.can_implement(args));
  args.weight.data = packed.data();
  const auto error = plan.can_implement(args);
  ASSERT_TRUE(error);
  EXPECT_TRUE(std::string_view(error->what()).starts_with("qgemm: weight")) << error->what();
}

// ---- For a checker of memory accesses and races: every kernel once, at tails, in arrays without guards

class SanitizeQgemm : public QgemmCudaFormat {};

TEST_P(SanitizeQgemm, every_kernel) {
  constexpr int64_t kM[] = {1, 2, 5, 8, 16, 33, 64, 70};
  for (const bool transposed : {false, true}) {
    QgemmDescriptor d = descriptor(grouped(format(), kGroups[GetParam() % 5]),
                                   testing::kQgemmDTypes[GetParam() % 3], transposed);
    d.m = kM[GetParam() % std::size(kM)];
    d.n = 45;
    d.k = 141;
    d.bias = !d.transposed;
    d.accumulate = GetParam() % 2 == 0;
    check_variants(d, GetParam(), QgemmData::random, true);
    d.packed = false;
    check_variants(d, GetParam(), QgemmData::random, true);
    // What the variants of sm_90 take.
    d.packed = true;
    d.dtype = GetParam() % 2 == 0 ? DType::bf16 : DType::f16;
    d.n = transposed ? 136 : 45;
    d.k = transposed ? 70 : 136;
    for (const int64_t m : {7, 20, 50, 70}) {
      d.m = m;
      if (m == 70 && !transposed) d.n = 46;
      check_variants(d, GetParam(), QgemmData::random, true);
    }
    d.m = 70;
    d.n = d.k = 136;
    check_variants(d, GetParam(), QgemmData::random, true);
  }
}
INSTANTIATE_TEST_SUITE_P(, SanitizeQgemm, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

// Sums that are split, kernels that start early, by direction and number of rows.
constexpr int64_t kSumsM[] = {1, 2, 4, 8, 16, 32, 64, 72};
class SanitizeQgemmSums : public testing::CudaTest, public ::testing::WithParamInterface<int> {};

TEST_P(SanitizeQgemmSums, every_kernel) {
  QgemmDescriptor d = descriptor(nf4(), DType::bf16, GetParam() % 2 == 1);
  d.m = kSumsM[GetParam() / 2];
  d.early_start = true;
  // Odd extents, and such as the variants of sm_90 take.
  for (const int64_t sum : {1045, 1048}) {
    d.n = d.transposed ? sum : 70;
    d.k = d.transposed ? 70 : sum;
    d.spec = nf4();
    check_variants(d, 1, QgemmData::random, true);
    d.spec.scale_dtype = DType::f32;
    d.spec.double_quant = true;
    check_variants(d, 1, QgemmData::random, true);
  }
}
INSTANTIATE_TEST_SUITE_P(, SanitizeQgemmSums, ::testing::Range(0, 2 * static_cast<int>(std::size(kSumsM))));

}  // namespace
}  // namespace halfbyte
