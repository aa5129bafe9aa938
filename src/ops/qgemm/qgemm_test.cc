#include <algorithm>
#include <map>

#include "cpu/features.h"
#include "halfbyte/system.hpp"
#include "ops/qgemm/qgemm_testing.h"

namespace halfbyte {
namespace {

using testing::QgemmCase;
using testing::QgemmData;

// Every variant that takes it, qgemm_simd with every SIMD target: within the bound, and the same bytes with
// more threads.
void check_on_cpu(const QgemmDescriptor& descriptor, uint64_t seed, QgemmData data = QgemmData::random) {
  QgemmCase test(descriptor, seed, data);
  std::map<WeightRounding, QgemmReference> expected;
  const auto check = [&](const std::string& variant) {
    test.descriptor.variant = variant;
    const testing::CpuRun run = testing::run_on_cpu(test, 1);
    const WeightRounding rounding = run.guarantee.weight_rounding;
    if (!expected.count(rounding))
      expected.emplace(rounding, qgemm_ref(test.problem, test.tensors(), rounding));
    EXPECT_TRUE(testing::near_reference(test, run.y, expected.at(rounding), data));
    testing::expect_same_bytes(test, run.y, {3});
  };
  if (test.problem.is_empty()) return check("");
  const auto check_taken = [&](std::string_view name) {
    for (const QgemmChoice& choice : explain_qgemm({}, descriptor))
      if (choice.reason.empty() && (choice.variant == "qgemm_simd") == (name == "qgemm_simd"))
        check(choice.variant);
  };
  check_taken("");
  testing::for_each_target([&](const char*) { check_taken("qgemm_simd"); });
}

class QgemmCpu : public ::testing::TestWithParam<size_t> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam()]; }
};

TEST_P(QgemmCpu, IsNearTheReference) {
  std::mt19937_64 random(GetParam());
  for (int i = 0; i < (testing::kSanitized ? 8 : 60); ++i) {
    QgemmDescriptor d = testing::random_qgemm(random, format(), i % 2 == 0);
    testing::set_random_extents(random, d);
    if (i % 3 == 0) d.alignment = size_of(d.dtype);
    check_on_cpu(d, random());
  }
}

// Every way to group, of both forms, in both directions.
TEST_P(QgemmCpu, EveryGroup) {
  std::mt19937_64 random(GetParam() + 100);
  struct Grouping {
    Granularity granularity;
    int64_t size;
  };
  constexpr Grouping kGroupings[] = {{Granularity::group, 16},   {Granularity::group, 32},
                                     {Granularity::group, 64},   {Granularity::group, 128},
                                     {Granularity::group, 256},  {Granularity::group, 100},
                                     {Granularity::channel, 64}, {Granularity::tensor, 64},
                                     {Granularity::flat, 64},    {Granularity::flat, 100}};
  for (const auto& [granularity, size] : kGroupings)
    for (const bool packed : {true, false})
      for (const bool transposed : {true, false}) {
        if (info(format().format).scale_dtype) continue;  // of one group size
        QgemmDescriptor d;
        d.spec = format();
        d.spec.granularity = granularity;
        d.spec.group_size = size;
        d.spec.double_quant = false;
        d.m = transposed == packed ? 3 : 20;
        d.n = 70;
        d.k = packed && granularity == Granularity::flat ? 3 * size : 290;
        d.packed = packed;
        d.transposed = transposed;
        d.dtype = DType::f32;
        check_on_cpu(d, random());
      }
}

// Integers times powers of two: f32 sums are exact, and so is the result but for the rounding of the output.
TEST_P(QgemmCpu, IntegersAreExact) {
  if (format().format == Format::nf4 || format().format == Format::fp4) return;  // their values are not short
  std::mt19937_64 random(GetParam() + 200);
  for (int i = 0; i < 20; ++i) {
    QgemmDescriptor d = testing::random_qgemm(random, format(), i % 2 == 0);
    testing::set_random_extents(random, d);
    check_on_cpu(d, random(), QgemmData::integers);
  }
}

INSTANTIATE_TEST_SUITE_P(, QgemmCpu, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

TEST(Qgemm, NanOfTheWeightIsNan) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (QgemmDescriptor d : testing::nan_products(dtype)) {
      QgemmCase test = testing::nan_case(d, 7);
      const auto check = [&] {
        for (const QgemmChoice& choice : explain_qgemm({}, d)) {
          if (!choice.reason.empty()) continue;
          test.descriptor.variant = choice.variant;
          const testing::CpuRun run = testing::run_on_cpu(test, 1);
          EXPECT_TRUE(testing::nan_as_reference(test, run.y, run.guarantee.weight_rounding));
        }
      };
      testing::for_each_target([&](const char*) { check(); });
    }
}

// Blocks and panels of every width, and rows behind them: the same bytes for every number of threads and
// every run, with each SIMD target.
TEST(QgemmSimd, SameBytes) {
  std::mt19937_64 random(1);
  for (const int64_t m : {1, 2, 3, 4, 5, 7, 9, 12, 14, 17, 22, 27, 40, 263})
    for (const bool transposed : {false, true}) {
      QgemmDescriptor d;
      d.spec.group_size = 32;
      d.dtype = testing::pick(random, testing::kQgemmDTypes);
      d.m = m;
      d.n = 5 * 64 + 9;
      d.k = 9 * 64 + 3;
      d.transposed = transposed;
      d.variant = "qgemm_simd";
      if (testing::kSanitized && m > 40) continue;
      const QgemmCase test(d, random());
      const QgemmReference expected = qgemm_ref(test.problem, test.tensors(), WeightRounding::none);
      testing::for_each_target([&](const char*) {
        if (!testing::reason_of("qgemm_simd", d).empty()) return;
        const testing::CpuRun run = testing::run_on_cpu(test, 1);
        EXPECT_TRUE(testing::near_reference(test, run.y, expected));
        testing::expect_same_bytes(test, run.y, {1, 2, 3, 4, 5});
      });
    }
}

TEST(QgemmSimd, Refusals) {
  const auto reason = [](auto change) {
    QgemmDescriptor d;
    d.m = d.n = 3;
    d.k = 128;
    d.dtype = DType::f32;
    change(d);
    return testing::reason_of("qgemm_simd", d);
  };
  using D = QgemmDescriptor;
  testing::for_each_target([&](std::string_view target) {
    if (const std::string none = reason([](D&) {}); !none.empty()) {
      EXPECT_EQ(none, "the CPU has none of the vectors that it is compiled for");
      EXPECT_TRUE(target == "SCALAR" || target == "AVX3_DL");  // as AVX3
      return;
    }
    EXPECT_EQ(reason([](D& d) { d.math = QgemmMath::tf32; }), "");
    EXPECT_EQ(reason([](D& d) { d.math = QgemmMath::f64; }), "its sums are f32, not f64");
    EXPECT_EQ(reason([](D& d) { d.packed = false; }), "");
    EXPECT_EQ(reason([](D& d) {
                d.packed = false;
                d.spec.granularity = Granularity::flat;
                d.k = 100;
              }),
              "it takes packed weights, not views");
    EXPECT_EQ(reason([](D& d) { d.spec.group_size = 100; }),
              "its groups are multiples of 16 columns, or rows, not 100");
    EXPECT_EQ(reason([](D& d) { d.spec.group_size = 96; }), "");
    EXPECT_EQ(reason([](D& d) { d.k = d.spec.group_size = 100; }), "");
    EXPECT_EQ(reason([](D& d) { d.k = 0; }), "there is nothing to sum");
  });
}

QgemmDescriptor descriptor(int64_t m, int64_t n, int64_t k) {
  QgemmDescriptor d;
  d.m = m;
  d.n = n;
  d.k = k;
  return d;
}

// Nothing to write, nothing to sum.
TEST(QgemmPlan, EmptyExtents) {
  for (const bool transposed : {false, true})
    for (const bool packed : {false, true})
      for (const bool accumulate : {false, true})
        for (const auto& [m, n, k] : {std::array<int64_t, 3>{0, 40, 70}, {3, 0, 70}, {3, 40, 0}, {0, 0, 0}}) {
          QgemmDescriptor d = descriptor(m, n, k);
          d.transposed = transposed;
          d.packed = packed;
          d.accumulate = accumulate;
          d.bias = !transposed;
          check_on_cpu(d, 1);
        }
  const auto plan = QgemmPlan::select({}, descriptor(0, 40, 64));
  EXPECT_EQ(plan.sku().kernel, "none");
  EXPECT_EQ(explain_qgemm({}, descriptor(0, 40, 64)).front().reason, "y has no elements");
}

// What each layout means, by hand: W = [[1, 2, 3], [4, 5, 6]] in three forms, times the identity.
TEST(QgemmPlan, LayoutsByHand) {
  const float identity[9] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
  const auto decoded = [&](const WeightView& view) {
    QgemmDescriptor d = descriptor(3, 2, 3);
    d.spec = view.spec;
    d.packed = false;
    d.layout = view.layout;
    d.dtype = DType::f32;
    const auto plan = QgemmPlan::select({}, d);
    std::vector<float> y(6, NAN);
    Qgemm::Args args;
    args.x = {const_cast<float*>(identity), DType::f32, {3, 3}, {}, {}};
    args.y = {y.data(), DType::f32, {3, 2}, {}, {}};
    args.view = view;
    plan.run(nullptr, {}, args);
    return y;
  };
  const std::vector<float> expected{1, 4, 2, 5, 3, 6};
  WeightView view;
  view.rows = 2;
  view.cols = 3;
  view.spec.group_size = 32;
  float scales[2] = {1, 1};
  view.scales = scales;
  view.spec.format = Format::lut4;
  for (int i = 0; i < 16; ++i) view.spec.table[static_cast<size_t>(i)] = static_cast<float>(i);
  alignas(16)
      uint8_t rows[] = {0x21, 0x03, 0x54, 0x06};  // the second half of the last byte of a row is padding
  view.codes = rows;
  EXPECT_EQ(decoded(view), expected);

  alignas(16) uint8_t flat[] = {0x12, 0x34, 0x56};
  view.codes = flat;
  view.spec.granularity = Granularity::flat;
  view.layout = Layout::bitsandbytes;
  EXPECT_EQ(decoded(view), expected);

  // q = code - 8, zero point = stored - 8: rows 0 and 1 are at 2 and 3 of their codes' scale.
  alignas(16) uint8_t words[] = {0x43, 0x05, 0, 0, 0x87, 0x09, 0, 0};
  alignas(4) uint8_t zeros[] = {0x32, 0, 0, 0};
  view.spec.format = Format::int4;
  view.spec.asymmetric = true;
  view.spec.granularity = Granularity::channel;
  view.layout = Layout::compressed_tensors;
  view.codes = words;
  view.zeros = zeros;
  EXPECT_EQ(decoded(view), expected);

  alignas(16) uint8_t affine[] = {0x10, 0x02, 0, 0, 0x10, 0x02, 0, 0};
  float biases[2] = {1, 4};
  view.spec.format = Format::affine4;
  view.spec.asymmetric = false;
  view.spec.granularity = Granularity::group;
  view.layout = Layout::mlx;
  view.codes = affine;
  view.zeros = nullptr;
  view.biases = biases;
  EXPECT_EQ(decoded(view), expected);
}

// What reads no views gets them packed: the same kernel gives the bytes that it gives of a weight that was
// packed by hand, and says the same of itself.
TEST(QgemmPlan, AViewIsPackedFirst) {
  for (const int64_t m : {1, 9, 70})
    for (QgemmDescriptor d : testing::view_products(m)) {
      const QgemmCase test(d, static_cast<uint64_t>(m));
      QgemmDescriptor packed = d;
      packed.packed = true;
      packed.layout = Layout::halfbyte;
      const int64_t packed_bytes = packed_weight_bytes(d.spec, d.n, d.k);
      testing::GuardedMemory by_hand(packed_bytes, 64);
      int num_packing = 0;
      for (const QgemmChoice& choice : explain_qgemm({}, d)) {
        SCOPED_TRACE(testing::describe(d) + " " + choice.variant);
        EXPECT_EQ(choice.reason, testing::reason_of(choice.variant, packed));
        EXPECT_EQ(choice.packs, choice.reason.empty() && choice.variant != "qgemm_ref");
        if (!choice.packs) continue;
        d.variant = packed.variant = choice.variant;
        const auto plan = QgemmPlan::select({}, d, {1}), of_packed = QgemmPlan::select({}, packed, {1});
        EXPECT_EQ(plan.sku().kernel, of_packed.sku().kernel);
        EXPECT_EQ(plan.precision_guarantee().weight_rounding,
                  of_packed.precision_guarantee().weight_rounding);
        EXPECT_GE(plan.workspace_size(), packed_bytes + of_packed.workspace_size());
        QgemmCase given = test;
        given.descriptor = d;
        const std::vector<uint8_t> y = testing::run_on_cpu(given, 1).y;
        EXPECT_TRUE(y == testing::run_guarded(
                             given, of_packed.workspace_size(), [&](const QgemmTensors& t, void* workspace) {
                               of_packed.run(nullptr, {workspace, of_packed.workspace_size()},
                                             testing::pack_by_hand(d, testing::qgemm_args(given, t, {}),
                                                                   by_hand.data()));
                             }));
        testing::expect_same_bytes(given, y, {3});
        if (num_packing++ > 0) continue;
        d.variant.clear();
        EXPECT_EQ(QgemmPlan::select({}, d).sku().kernel, choice.variant) << "another is chosen";
      }
      EXPECT_GT(num_packing, 0) << testing::describe(d);
    }
}
// Groups that run across rows have no packed form: qgemm_ref reads them.
TEST(QgemmPlan, AViewWithoutAPackedFormIsReadAsItIs) {
  QgemmDescriptor d = testing::view_products(70).front();
  d.k = 100;
  for (const QgemmChoice& choice : explain_qgemm({}, d))
    EXPECT_TRUE(!choice.packs && choice.reason.empty() == (choice.variant == "qgemm_ref")) << choice.variant;
  EXPECT_EQ(QgemmPlan::select({}, d).sku().kernel, "qgemm_ref");
}

// ---- What is refused

template <class Body>
std::string error_of(const Body& body, ErrorCode code = ErrorCode::usage) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

TEST(QgemmPlan, BadDescriptors) {
  const auto refused = [](auto change) {
    QgemmDescriptor d = descriptor(1, 64, 128);
    change(d);
    return error_of([&] { QgemmPlan::select({}, d); });
  };
  using D = QgemmDescriptor;
  EXPECT_EQ(refused([](D& d) { d.m = -1; }), "qgemm descriptor: m must be 0 to 2^40, got -1");
  EXPECT_EQ(refused([](D& d) { d.k = int64_t{1} << 41; }),
            "qgemm descriptor: k must be 0 to 2^40, got 2199023255552");
  EXPECT_EQ(refused([](D& d) { d.dtype = DType::f64; }),
            "qgemm descriptor: dtype must be bf16, f16 or f32, got f64");
  EXPECT_EQ(refused([](D& d) {
              d.spec.scale_dtype = DType::f64;
              d.packed = false;
            }),
            "weight view: spec.scale_dtype must have 32 bits at most, got f64");
  EXPECT_EQ(
      refused([](D& d) {
        d.spec.double_quant = true;
        d.spec.scale_dtype = DType::f16;
      }),
      "spec: double quantization needs f32 scales and a format without biases, got nf4 with f16 scales");
  EXPECT_EQ(refused([](D& d) {
              d.packed = false;
              d.spec.format = Format::int8;
              d.layout = Layout::bitsandbytes;
            }),
            "weight view: layout bitsandbytes has codes of 4 bits, got int8");
  EXPECT_EQ(refused([](D& d) {
              d.packed = false;
              d.spec.format = Format::int4;
              d.layout = Layout::gptq;
            }),
            "weight view: layout gptq is transposed, which products do not read: give the native parts");
  EXPECT_EQ(
      refused([](D& d) {
        d.packed = false;
        d.spec.format = Format::int4;
        d.spec.asymmetric = true;
        d.spec.granularity = Granularity::tensor;
        d.layout = Layout::compressed_tensors;
      }),
      "weight view: zero points of layout compressed-tensors are of groups within rows, got granularity "
      "tensor for 128 columns");
  EXPECT_EQ(refused([](D& d) { d.transposed = d.bias = true; }),
            "qgemm descriptor: bias must be false where transposed is true");
  EXPECT_EQ(refused([](D& d) { d.math = QgemmMath::tf32; }),
            "qgemm descriptor: math tf32 needs dtype f32, got bf16");
  EXPECT_EQ(refused([](D& d) { d.alignment = 1; }),
            "qgemm descriptor: alignment must be a power of two and at least the 2 bytes of bf16, got 1");
  EXPECT_EQ(refused([](D& d) { d.tile.m = 64; }),
            "qgemm: tile is for qgemm_simt on CUDA devices, got 64 x 0 on the CPU");
  EXPECT_EQ(refused([](D& d) { d.tile.m = -1; }), "qgemm descriptor: tile must not be negative, got -1 x 0");
  const std::string unknown = refused([](D& d) { d.variant = "qgemm_sm60"; });
  EXPECT_TRUE(unknown.starts_with("qgemm descriptor: variant must be empty or one of ")) << unknown;
  EXPECT_TRUE(unknown.ends_with("qgemm_ref, got 'qgemm_sm60'")) << unknown;
  EXPECT_EQ(error_of([] { QgemmPlan::select({}, descriptor(1, 64, 128), {-1}); }),
            "qgemm: preference.num_threads must be >= 0, got -1");
}

TEST(QgemmPlan, BadArguments) {
  QgemmDescriptor d = descriptor(3, 64, 128);
  d.bias = true;
  const QgemmCase test(d, 1);
  const auto plan = QgemmPlan::select({}, d);
  testing::GuardedMemory packed(test.packed, 256), y(3 * 64 * 2, 16), bias(test.bias.bytes, 16);
  testing::GuardedMemory workspace(plan.workspace_size(), 16), x(test.x.bytes, 16);
  QgemmTensors tensors;
  tensors.x = x.data();
  tensors.weight = packed.data();
  tensors.bias = bias.data();
  tensors.y = y.data();
  const Qgemm::Args good = testing::qgemm_args(test, tensors, {});
  EXPECT_FALSE(plan.can_implement(good));
  const auto refused = [&](auto change) {
    Qgemm::Args args = good;
    change(args);
    const auto error = plan.can_implement(args);
    EXPECT_EQ(error_of([&] {
                plan.run(nullptr, {workspace.data(), plan.workspace_size()}, args);
              }),
              error ? error->what() : "");
    return error ? std::string(error->what()) : std::string();
  };
  using A = Qgemm::Args;
  EXPECT_EQ(refused([](A& a) { a.x.dtype = DType::f16; }), "qgemm: x must be bf16, got f16");
  EXPECT_EQ(refused([](A& a) { a.x.shape = {3, 64}; }), "qgemm: x must have the shape [3, 128], got [3, 64]");
  EXPECT_EQ(refused([](A& a) {
              a.y.shape = {3, 128};
            }),
            "qgemm: y must have the shape [3, 64], got [3, 128]");
  EXPECT_EQ(refused([](A& a) { a.bias.shape = {3}; }), "qgemm: bias must have the shape [64], got [3]");
  EXPECT_EQ(refused([](A& a) { a.y.device = {DeviceKind::cuda, 0}; }), "qgemm: y must be on cpu, got cuda:0");
  EXPECT_EQ(refused([](A& a) {
              a.weight.device = {DeviceKind::cuda, 0};
            }),
            "qgemm: weight must be on cpu, got cuda:0");
  EXPECT_EQ(refused([](A& a) { a.weight.data = nullptr; }), "qgemm: weight needs 4608 bytes but has no data");
  EXPECT_EQ(refused([](A& a) { a.weight.num_bytes = 4607; }),
            "qgemm: weight needs 4608 bytes, its memory has 4607");
  EXPECT_EQ(refused([](A& a) { a.weight.version = 3; }), "qgemm: weight.version must be 2, got 3");
  EXPECT_EQ(refused([](A& a) { a.weight.rows = 32; }),
            "qgemm: weight.rows must be 64 as in the descriptor, got 32");
  EXPECT_EQ(refused([](A& a) { a.weight.spec.group_size = 32; }),
            "qgemm: weight.spec.group_size must be 64 as in the descriptor, got 32");
  EXPECT_EQ(refused([&](A& a) { a.view.codes = packed.data(); }),
            "qgemm: view must have no data, as descriptor.packed is true");
  const auto starts = [&](auto change, const char* text) {
    const std::string error = refused(change);
    EXPECT_TRUE(error.starts_with(text)) << error;
  };
  starts([&](A& a) { a.weight.data = packed.data() + 32; }, "qgemm: weight must be aligned to 64 bytes");
  starts([&](A& a) { a.x.data = x.data() + 1; }, "qgemm: x must be aligned to 2 bytes, ");
  starts([&](A& a) { a.y.data = x.data(); }, "qgemm: y must not overlap x");
  starts([&](A& a) { a.y.data = packed.data() + 4592; }, "qgemm: y must not overlap weight");
  starts([&](A& a) { a.y.data = bias.data() - 16; }, "qgemm: y must not overlap bias");
  const int64_t size = plan.workspace_size();
  EXPECT_EQ(error_of([&] {
              plan.run(nullptr, {nullptr, size}, good);
            }),
            fmt::format("qgemm: workspace needs {} bytes but has no data", size));
  EXPECT_EQ(error_of([&] {
              plan.run(nullptr, {workspace.data(), size - 1}, good);
            }),
            fmt::format("qgemm: workspace needs {} bytes, its memory has {}", size, size - 1));
  plan.run(nullptr, {}, good);
  EXPECT_TRUE(error_of([&] {
                plan.run(nullptr, {bias.data() - 16, size}, good);
              }).starts_with("qgemm: workspace must not overlap "));
  EXPECT_TRUE(plan.status(nullptr, {workspace.data(), size}).ok());
}

TEST(QgemmPlan, BadViews) {
  QgemmDescriptor d = descriptor(3, 64, 128);
  d.packed = false;
  const QgemmCase test(d, 1);
  const auto plan = QgemmPlan::select({}, d);
  std::vector<float> absmax(1);
  testing::GuardedMemory y(3 * 64 * 2, 16), x(test.x.bytes, 16), codes(test.codes, 16);
  QgemmTensors tensors = test.tensors();
  tensors.x = x.data();
  tensors.codes = codes.data();
  tensors.y = y.data();
  const Qgemm::Args good = testing::qgemm_args(test, tensors, {});
  EXPECT_FALSE(plan.can_implement(good));
  const auto refused = [&](auto change) {
    Qgemm::Args args = good;
    change(args);
    const auto error = plan.can_implement(args);
    return error ? std::string(error->what()) : std::string();
  };
  using A = Qgemm::Args;
  EXPECT_EQ(refused([](A& a) { a.view.scales = nullptr; }),
            "qgemm: view.scales needs 512 bytes but has no data");
  EXPECT_EQ(refused([](A& a) { a.view.zeros = a.view.codes; }),
            "qgemm: view.zeros must be null: spec has none");
  EXPECT_EQ(refused([&](A& a) { a.view.absmax = absmax.data(); }),
            "qgemm: view.absmax must be null: spec has none");
  EXPECT_EQ(refused([](A& a) { a.view.layout = Layout::mlx; }),
            "qgemm: view.layout must be halfbyte as in the descriptor, got mlx");
  EXPECT_EQ(refused([](A& a) { a.view.cols = 64; }),
            "qgemm: view.cols must be 128 as in the descriptor, got 64");
  EXPECT_EQ(refused([](A& a) { a.weight.data = a.view.codes; }),
            "qgemm: weight must have no data, as descriptor.packed is false");
  EXPECT_EQ(refused([&](A& a) {
              a.bias = {x.data(), DType::bf16, {64}, {}, {}};
            }),
            "qgemm: bias must have no data, as descriptor.bias is false");
}

// ---- What plans say

TEST(QgemmPlan, SkuAndGuarantee) {
  QgemmDescriptor d = descriptor(3, 64, 128);
  d.spec.scale_dtype = DType::f16;
  d.variant = "qgemm_ref";
  const auto plan = QgemmPlan::select({}, d);
  EXPECT_EQ(plan.sku().op, "qgemm");
  EXPECT_EQ(plan.sku().kernel, "qgemm_ref");
  EXPECT_TRUE(plan.sku().backend.starts_with("cpu "));
  EXPECT_EQ(plan.sku().dtypes, "bf16 x nf4 (g64, scale f16) -> bf16");
  EXPECT_EQ(plan.precision_guarantee().accumulator, DType::f32);
  EXPECT_TRUE(plan.precision_guarantee().deterministic);
  EXPECT_FALSE(plan.precision_guarantee().same_on_all_devices);
  EXPECT_EQ(plan.precision_guarantee().weight_rounding, WeightRounding::none);
  d.dtype = DType::f32;
  d.math = QgemmMath::f64;
  d.transposed = true;
  d.spec = {
      .format = Format::int4, .asymmetric = true, .granularity = Granularity::channel, .double_quant = true};
  const auto other = QgemmPlan::select({}, d);
  EXPECT_EQ(other.sku().dtypes,
            "f32 x int4 transposed (channel, scale f32 double quantized, zero point u8) -> f32");
  EXPECT_EQ(other.precision_guarantee().accumulator, DType::f64);
}

TEST(QgemmPlan, Variants) {
  QgemmDescriptor d = descriptor(3, 64, 128);
  const auto choices = explain_qgemm({}, d);
  ASSERT_EQ(choices.size(), qgemm_variants({}).size());
  bool is_cpu = true;  // those of the device come first
  for (const auto& [variant, reason, packs] : choices) {
    EXPECT_FALSE(packs) << variant;
    const std::vector<const QgemmVariant*> known_variants = qgemm_variants({});
    const auto found = std::ranges::find_if(
        known_variants, [&](const QgemmVariant* known) { return known->name == variant; });
    const bool was_cpu = std::exchange(is_cpu, (*found)->device == DeviceKind::cpu);
    EXPECT_TRUE(was_cpu || !is_cpu) << variant;
    if (!is_cpu) {
      EXPECT_EQ(reason, "it is for CUDA devices");
    }
    if (variant == "qgemm_ref") {
      EXPECT_EQ(reason, "");
    }
    d.variant = variant;
    if (reason.empty())
      EXPECT_EQ(QgemmPlan::select({}, d).sku().kernel, variant);
    else
      EXPECT_EQ(error_of([&] { QgemmPlan::select({}, d); }, ErrorCode::device),
                fmt::format("qgemm: descriptor.variant does not take this; {}: {}", variant, reason));
  }
  d.variant = "qgemm_ref";
  EXPECT_EQ(QgemmPlan::select({}, d).sku().kernel, "qgemm_ref");
}

// The variants of a device, in the order in which they are tried for a problem: without "qgemm_".
std::string order_of(const QgemmProblem& problem) {
  std::string order;
  for (const QgemmVariant* variant : qgemm_variants(problem))
    if (variant->device == problem.device.kind)
      order += (order.empty() ? "" : " ") + std::string(variant->name).substr(6);
  return order;
}
TEST(QgemmPlan, TheSkuNamesTheTargetThatRuns) {
  testing::for_each_target([](const std::string& target) {
    QgemmDescriptor d = descriptor(1, 64, 64);
    d.variant = "qgemm_ref";
    EXPECT_EQ(QgemmPlan::select({}, d).sku().backend, "cpu " + target);
    EXPECT_EQ(system_info().simd_target, target);
  });
}

TEST(QgemmPlan, OrderOfVariants) {
  constexpr const char *kLoaded =
                           "sm90_mma sm90_wgmma sm90_transposed sm90_f32 sm90_f32_transposed sm90_split "
                           "sm90_large cublas sm80 simt",
                       *kUsual =
                           "sm90_wgmma sm90_mma sm90_transposed sm90_f32 sm90_f32_transposed sm90_split "
                           "sm90_large cublas sm80 simt",
                       *kMany =
                           "sm90_large sm90_wgmma sm90_mma sm90_transposed sm90_f32 sm90_f32_transposed "
                           "sm90_split cublas sm80 simt",
                       *kDecoded =
                           "sm90_wgmma sm90_mma sm90_transposed sm90_f32 sm90_f32_transposed sm90_split "
                           "cublas sm90_large sm80 simt";
  struct Case {
    int64_t m, n, k, group;
    bool transposed;
    const char* order;
  };
  constexpr Case kCases[] = {
      {1, 4096, 4096, 64, false, kLoaded},      {1, 28672, 8192, 32, false, kLoaded},
      {1, 64, 8192, 128, true, kLoaded},        {1, 8192, 8200, 64, false, kUsual},
      {1, 8192, 28672, 64, false, kUsual},      {2, 8192, 8192, 64, false, kUsual},
      {2, 16384, 4096, 64, false, kUsual},      {2, 16385, 4096, 64, false, kLoaded},
      {8, 28672, 8192, 64, false, kLoaded},     {8, 28672, 8200, 64, false, kUsual},
      {33, 4096, 8448, 64, true, kMany},        {33, 4096, 8449, 64, true, kUsual},
      {64, 28672, 8448, 64, true, kMany},       {33, 4096, 28672, 64, true, kMany},
      {64, 4096, 65536, 64, true, kMany},       {32, 4096, 28672, 64, true, kUsual},
      {64, 4096, 14336, 64, true, kUsual},      {64, 4096, 36864, 64, true, kUsual},
      {16, 8192, 4096, 64, true, kUsual},       {17, 6144, 4096, 64, true, kMany},
      {17, 6143, 4096, 64, true, kUsual},       {17, 4096, 512, 64, true, kMany},
      {65, 8192, 8192, 64, true, kUsual},       {512, 8192, 8192, 64, true, kUsual},
      {6143, 8192, 8192, 64, true, kUsual},     {6144, 8192, 8192, 64, true, kDecoded},
      {6144, 8192, 8192, 128, true, kDecoded},  {6144, 8192, 8192, 127, false, kDecoded},
      {6144, 8192, 8192, 128, false, kUsual},   {8192, 8192, 8192, 8192, false, kUsual},
      {8192, 8192, 8192, 8192, true, kDecoded}, {1025, 3072, 3072, 64, true, kDecoded},
      {1025, 3072, 3104, 64, true, kUsual},     {1024, 3072, 3072, 64, true, kUsual},
      {1025, 3072, 3072, 64, false, kUsual},    {640, 2048, 2048, 64, true, kDecoded},
      {639, 2048, 2048, 64, true, kUsual},      {640, 2048, 2080, 64, true, kUsual},
      {640, 2080, 1024, 64, true, kUsual},      {64, 8448, 8192, 64, false, kMany},
      {64, 8449, 8192, 64, false, kUsual},      {48, 8449, 8192, 64, false, kMany},
      {32, 8449, 8192, 64, false, kUsual},      {33, 4225, 4096, 64, false, kMany},
      {33, 4224, 4096, 64, false, kUsual},      {33, 1024, 1024, 64, false, kMany},
      {33, 1025, 1024, 64, false, kUsual},      {32, 1024, 8192, 64, false, kMany},
      {32, 1024, 8191, 64, false, kUsual},      {16, 1024, 8192, 64, false, kUsual},
      {33, 1024, 1024, 1024, false, kUsual},
  };
  QgemmProblem problem;
  problem.device.kind = DeviceKind::cuda;
  problem.codec.bits = 4;
  for (const auto& [m, n, k, group, transposed, order] : kCases) {
    SCOPED_TRACE(fmt::format("m {} n {} k {} group {} transposed {}", m, n, k, group, transposed));
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.group = group;
    problem.weight.groups = (k + group - 1) / group;
    problem.transposed = transposed;
    EXPECT_EQ(order_of(problem), order);
  }
  problem.m = 1025;
  problem.n = problem.k = 4096;
  problem.transposed = problem.weight.has_biases = true;
  for (const int bits : {4, 8}) {
    problem.codec.bits = bits;
    EXPECT_EQ(order_of(problem), bits == 4 ? kUsual : kDecoded);
  }
  problem.m = 33;
  problem.n = 8192;
  problem.transposed = false;
  EXPECT_EQ(order_of(problem), kUsual);  // of 8 bits
  problem.device.kind = DeviceKind::cpu;
  problem.dtype = DType::bf16;
  problem.packed = true;
  // Vectors come before tiles with one and two rows, forward but for codes of 4 bits with scales alone;
  // transposed sums of f32 do where there are tiles, with up to four rows but for such codes in groups of 64
  // and more.
  for (const int bits : {4, 8})
    for (const bool has_biases : {false, true})
      for (const int64_t m : {1, 2, 3, 4, 5, 64})
        for (const int64_t group : {32, 64, 128})
          for (const bool transposed : {false, true}) {
            problem.codec.bits = bits;
            problem.weight.has_biases = has_biases;
            problem.m = m;
            problem.group = group;
            problem.transposed = transposed;
            const bool has_scales_alone = bits == 4 && !has_biases;
            const char* expected = "int8 amx avx512 simd ref";
            if (!transposed && m <= 2 && bits != 4) expected = "int8 avx512 amx simd ref";
            if (transposed && cpu_features().amx_bf16 && m <= (has_scales_alone && group >= 64 ? 2 : 4))
              expected = "int8 simd amx avx512 ref";
            EXPECT_EQ(order_of(problem), expected);
          }
}

// Of experts qgemm_sm80 comes first where tiles are short or few, and rows too.
TEST(QgemmPlan, TheOrderOfVariantsOfExperts) {
  struct Case {
    int bits;
    int64_t m, n, k;
    bool transposed, sm80_first;
  };
  constexpr Case kCases[] = {
      {4, 12, 255, 7168, true, true},   {4, 13, 255, 7168, true, false},   {4, 12, 256, 7168, true, false},
      {4, 12, 7168, 256, true, true},   {4, 13, 7168, 256, true, false},   {4, 12, 7168, 512, true, false},
      {4, 12, 7168, 128, false, true},  {4, 13, 7168, 128, false, false},  {4, 12, 7168, 129, false, false},
      {8, 12, 7168, 128, false, true},  {8, 12, 7168, 129, false, false},  {8, 8, 511, 7168, true, true},
      {8, 5120, 511, 7168, true, true}, {8, 5121, 511, 7168, true, false}, {8, 8, 512, 7168, true, false},
      {8, 15, 7168, 256, true, true},   {8, 16, 7168, 256, true, false},
  };
  QgemmProblem problem;
  problem.device.kind = DeviceKind::cuda;
  problem.experts.num = 256;
  for (const auto& [bits, m, n, k, transposed, sm80_first] : kCases) {
    SCOPED_TRACE(fmt::format("{} bits, m {} n {} k {} transposed {}", bits, m, n, k, transposed));
    problem.codec.bits = bits;
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.transposed = transposed;
    problem.weight.groups = 1;
    EXPECT_EQ(order_of(problem).starts_with("sm80"), sm80_first);
    problem.weight.groups = 2;  // it has wide tiles, and refuses rows that are too few for them
    EXPECT_EQ(order_of(problem).substr(0, 10), "sm90_large") << order_of(problem);
  }
}

TEST(QgemmPlan, Words) {
  for (const auto math : {QgemmMath::automatic, QgemmMath::tf32, QgemmMath::f64, QgemmMath::int8})
    EXPECT_EQ(parse_qgemm_math(to_string(math)), math);
  EXPECT_EQ(error_of([] { parse_qgemm_math("f16"); }),
            "unknown math of qgemm 'f16': must be one of auto, tf32, f64, int8");
}

}  // namespace
}  // namespace halfbyte
