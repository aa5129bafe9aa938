// With a workspace and one thread, a run of a plan on the CPU allocates nothing on the host. On a CUDA device
// the checks of a run are the same code.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "core/plan_base.h"
#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm_grouped.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "io/team.h"

namespace {

thread_local int64_t num_allocations = 0;

}  // namespace

// Sanitizers have an operator new of their own, which must stay.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCounts = false;
#else
constexpr bool kCounts = true;

namespace {

void* counted(size_t size, size_t alignment) {
  ++num_allocations;
  void* const data = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

// What allocates in this program: the other forms of new call these.
void* operator new(size_t size) { return counted(size, 16); }
void* operator new(size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }
#endif

namespace halfbyte {
namespace {

// Of small values, whatever the dtype.
Tensor tensor(DType dtype, std::vector<int64_t> shape) {
  Tensor result(Device{}, dtype, std::move(shape));
  std::memset(result.data(), 0, static_cast<size_t>(result.num_bytes()));
  if (dtype == DType::f32)
    for (int64_t i = 0; i < result.num_elements(); ++i)
      reinterpret_cast<float*>(result.data())[i] = static_cast<float>(i % 17) * 0.25F + 0.5F;
  return result;
}

// Without a workspace, and with the number of threads left to the library, for problems so small: but for the
// first run, which takes the memory of the thread.
template <class Op>
void expect_none_of_its_own(const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(Device{}, descriptor);
  SCOPED_TRACE(to_string(plan.sku()));
  plan.run(nullptr, {}, args);
  const int64_t before = num_allocations;
  plan.run(nullptr, {}, args);
  EXPECT_EQ(num_allocations - before, 0);
}

template <class Op>
void expect_none(const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(Device{}, descriptor, {.num_threads = 1});
  SCOPED_TRACE(to_string(plan.sku()));
  const Memory workspace(Device{}, plan.workspace_size());
  for (int run = 0; run < 2; ++run) {
    const int64_t before = num_allocations;
    plan.run(nullptr, workspace, args);
    EXPECT_EQ(num_allocations - before, 0) << "run " << run;
  }
  const int64_t before = num_allocations;
  plan.status(nullptr, workspace);
  EXPECT_FALSE(plan.can_implement(args));
  EXPECT_EQ(num_allocations - before, 0);
}

class Allocations : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kCounts) GTEST_SKIP() << "a sanitizer allocates";
  }
  static void SetUpTestSuite() { check_memory("", &num_allocations, 8, Device{}); }  // looks for a driver
};

TEST_F(Allocations, AreCounted) {
  const int64_t before = num_allocations;
  delete new int;
  EXPECT_EQ(num_allocations - before, 1);
  const Extents at_rank_8{1, 2, 3, 4, 5, 6, 7, 8};
  const TensorView view{nullptr, DType::f32, at_rank_8, at_rank_8, {}};
  EXPECT_EQ(ConstTensorView(view).shape.size(), 8U);
  EXPECT_EQ(num_allocations - before, 1);
}

TEST_F(Allocations, OfQuantize) {
  const int64_t rows = 48, cols = 256;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const Format format : {Format::nf4, Format::int4, Format::int8, Format::affine4})
      for (const Granularity granularity :
           {Granularity::tensor, Granularity::channel, Granularity::group, Granularity::flat}) {
        QuantSpec spec;
        spec.format = format;
        spec.asymmetric = format == Format::int4;
        spec.granularity = granularity;
        const QuantShape shape = quant_shape(spec, rows, cols);
        const Tensor x = tensor(dtype, {rows, cols}), codes = tensor(DType::u8, {shape.code_bytes()}),
                     scales = tensor(spec.scale_dtype, {shape.num_groups}),
                     zeros = tensor(DType::u8, {shape.num_groups}),
                     biases = tensor(spec.scale_dtype, {shape.num_groups});
        QuantizedView parts{spec, rows, cols, reinterpret_cast<uint8_t*>(codes.data()), scales.data()};
        if (has_zeros(spec)) parts.zeros = reinterpret_cast<uint8_t*>(zeros.data());
        if (has_biases(spec)) parts.biases = biases.data();
        const QuantizeDescriptor descriptor{.spec = spec, .rows = rows, .cols = cols, .dtype = dtype};
        expect_none<Quantize>(descriptor, {x.view(), parts});
        expect_none<Dequantize>(descriptor, {parts, x.view()});
      }
}

TEST_F(Allocations, OfQuantizeLinear) {
  const std::vector<int64_t> shape = {6, 40, 96};
  for (const bool computed : {false, true})
    for (LinearDescriptor d :
         {LinearDescriptor::per_tensor(shape), LinearDescriptor::per_channel(shape, 0),
          LinearDescriptor::per_channel(shape, 1), LinearDescriptor::per_channel(shape, 2),
          LinearDescriptor::per_group(shape, 32), LinearDescriptor::per_group(shape, 8, 1),
          LinearDescriptor::per_token(shape)}) {
      const Tensor x = tensor(DType::f32, shape), y = tensor(DType::f32, shape),
                   codes = tensor(DType::i8, shape), scale = tensor(DType::f32, d.scale_shape()),
                   zero = tensor(DType::i32, d.scale_shape());
      d.computed = computed;
      d.zero_point_dtype = DType::i32;
      if (computed) d.scale_rule = ScaleRule::minmax;
      d.strided = true;
      TensorView strided = x.view();
      strided.strides = {40 * 96, 96, 1};
      expect_none<QuantizeLinear>(d, {strided, codes.view(), scale.view(), zero.view()});
      if (computed) continue;
      expect_none<DequantizeLinear>(d, {codes.view(), scale.view(), zero.view(), y.view()});
      expect_none<QuantizeLinearBackward>(d, {strided, y.view(), scale.view(), zero.view(), y.view()});
    }
}

TEST_F(Allocations, OfFakeQuantize) {
  const std::vector<int64_t> shape = {6, 200, 96};
  const Tensor x = tensor(DType::f32, shape), y = tensor(DType::f32, shape);
  for (const auto& [granularity, axis, group] : {std::tuple(Granularity::tensor, -1, 0),
                                                 {Granularity::channel, 0, 0},
                                                 {Granularity::channel, 1, 0},
                                                 {Granularity::channel, 2, 0},
                                                 {Granularity::group, 2, 32},
                                                 {Granularity::group, 1, 80}}) {
    FakeQuantizeDescriptor given;
    given.shape = shape;
    given.granularity = granularity;
    given.axis = axis;
    given.group_size = group;
    const Tensor scale = tensor(DType::f32, given.scale_shape()),
                 min = tensor(DType::f32, given.scale_shape()), max = tensor(DType::f32, given.scale_shape()),
                 batches = tensor(DType::i64, {}), mask = tensor(DType::u8, given.mask_shape());
    expect_none<FakeQuantize>(given, {x.view(), y.view(), scale.view(), {}, {}, {}, {}, {}});
    expect_none<FakeQuantizeBackward>(given, {x.view(), {}, y.view(), scale.view(), {}, y.view()});
    const Tensor gradient = tensor(DType::f32, given.scale_shape()),
                 zero = tensor(DType::f32, given.scale_shape()),
                 of_zero = tensor(DType::f32, given.scale_shape());
    expect_none<FakeQuantizeLearnedBackward>(
        given, {x.view(), y.view(), scale.view(), {}, y.view(), gradient.view(), {}});
    FakeQuantizeDescriptor learned = given, table = given;
    learned.zero_point_dtype = DType::f32;
    expect_none<FakeQuantizeLearnedBackward>(
        learned, {x.view(), y.view(), scale.view(), zero.view(), y.view(), gradient.view(), of_zero.view()});
    table.format = Format::nf4;
    expect_none<FakeQuantize>(table, {x.view(), y.view(), scale.view(), {}, {}, {}, {}, {}});
    expect_none<FakeQuantizeLearnedBackward>(
        table, {x.view(), y.view(), scale.view(), {}, y.view(), gradient.view(), {}});
    FakeQuantizeDescriptor masked = given;
    masked.mask = true;
    expect_none<FakeQuantizeBackward>(masked, {{}, mask.view(), y.view(), {}, {}, y.view()});
    masked.computed = true;
    expect_none<FakeQuantize>(masked, {x.view(), y.view(), scale.view(), {}, mask.view(), {}, {}, {}});
    masked.observer.emplace().kind = ObserverKind::moving_average;
    expect_none<FakeQuantize>(
        masked, {x.view(), y.view(), scale.view(), {}, mask.view(), min.view(), max.view(), batches.view()});
  }
}

TEST_F(Allocations, OfFakeQuantizeOfBlockFloats) {
  const std::vector<int64_t> shape = {6, 200, 96};
  const Tensor x = tensor(DType::f32, shape), y = tensor(DType::f32, shape), global = tensor(DType::f32, {1});
  for (const int axis : {1, 2}) {
    FakeQuantizeDescriptor d;
    d.shape = shape;
    d.format = Format::nvfp4;
    d.granularity = Granularity::group;
    d.axis = axis;
    d.group_size = 16;
    d.scale_dtype = DType::f8_e4m3;
    d.computed = d.computed_global_scale = true;
    const Tensor scale = tensor(DType::f8_e4m3, d.scale_shape());
    expect_none<FakeQuantize>(d, {x.view(), y.view(), scale.view(), {}, {}, {}, {}, {}, global.view()});
  }
}

TEST_F(Allocations, OfObserve) {
  const std::vector<int64_t> shape = {6, 40, 9600};
  const Tensor x = tensor(DType::f32, shape);
  for (const auto& [granularity, axis, group] : {std::tuple(Granularity::tensor, -1, 0),
                                                 {Granularity::channel, 0, 0},
                                                 {Granularity::channel, 1, 0},
                                                 {Granularity::channel, 2, 0},
                                                 {Granularity::group, 2, 32},
                                                 {Granularity::group, 1, 16}})
    for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average}) {
      ObserveDescriptor d;
      d.shape = shape;
      d.granularity = granularity;
      d.axis = axis;
      d.group_size = group;
      d.observer.kind = kind;
      const Tensor min = tensor(DType::f32, d.state_shape()), max = tensor(DType::f32, d.state_shape()),
                   batches = tensor(DType::i64, {});
      expect_none<Observe>(d, {x.view(), min.view(), max.view(), batches.view()});
    }
  QParamsDescriptor d;
  d.shape = {100};
  const Tensor min = tensor(DType::f32, {100}), max = tensor(DType::f32, {100}),
               scale = tensor(DType::f32, {100});
  expect_none<ComputeQParams>(d, {min.view(), max.view(), scale.view(), {}});
}

TEST_F(Allocations, OfAffineQdq) {
  for (const int bits : {3, 4})
    for (const bool refit : {false, true}) {
      AffineQdqDescriptor d;
      d.rows = 24;
      d.cols = 320;
      d.bits = bits;
      d.refit = refit;
      d.adam = true;
      const Tensor w = tensor(DType::f32, {d.rows, d.cols}), codes = tensor(DType::u8, d.code_shape());
      std::vector<Tensor> parameters;
      for (int i = 0; i < 8; ++i) parameters.push_back(tensor(DType::f32, d.scale_shape()));
      const auto at = [&](size_t i) { return parameters[i].view(); };
      expect_none<AffineInit>(d, {w.view(), codes.view(), at(0), at(1)});
      expect_none<AffineQdq>(d, {codes.view(), at(0), at(1), w.view()});
      expect_none<AffineQdqBackward>(
          d, {codes.view(), w.view(), at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), {}});
    }
}

TEST_F(Allocations, OfQgemm) {
  int num_runs = 0;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int64_t m : {1, 40})
      for (const bool transposed : {false, true})
        for (const bool packed : {false, true}) {
          QgemmDescriptor d;
          d.m = m;
          d.n = 96;
          d.k = 256;
          d.dtype = dtype;
          d.transposed = transposed;
          d.packed = packed;
          const WeightViewBytes bytes = weight_view_bytes(d.spec, d.n, d.k, d.layout);
          const Tensor codes = tensor(DType::u8, {bytes.codes}),
                       scales = tensor(DType::f32, {bytes.scales / 4}),
                       memory = tensor(DType::u8, {packed_weight_bytes(d.spec, d.n, d.k)}),
                       x = tensor(dtype, {m, transposed ? d.n : d.k}),
                       y = tensor(dtype, {m, transposed ? d.k : d.n});
          const ConstWeightView view{
              .spec = d.spec, .rows = d.n, .cols = d.k, .codes = codes.data(), .scales = scales.data()};
          const PackedWeight weight{d.spec, d.n, d.k, memory.data(), {}};
          reorder(view, weight);
          Qgemm::Args args{.x = x.view(), .y = y.view()};
          if (packed)
            args.weight = weight;
          else
            args.view = view;
          for (const QgemmChoice& choice : explain_qgemm(Device{}, d)) {
            if (!choice.reason.empty()) continue;
            d.variant = choice.variant;
            expect_none<Qgemm>(d, args);
            expect_none_of_its_own<Qgemm>(d, args);
            ++num_runs;
          }
        }
  EXPECT_GE(num_runs, 16);
}

TEST_F(Allocations, OfQgemmGrouped) {
  constexpr int64_t kExperts = 5, kTokens = 12, kTopK = 3;
  for (const DType dtype : {DType::i32, DType::i64}) {
    const Tensor experts = tensor(dtype, {kTokens, kTopK}), offsets = tensor(DType::i32, {kExperts}),
                 slots = tensor(DType::i32, {kTokens * kTopK});
    const RouteDescriptor d{.tokens = kTokens, .top_k = kTopK, .num_experts = kExperts, .dtype = dtype};
    expect_none<Route>(d, {experts.view(), offsets.view(), slots.view()});
    expect_none_of_its_own<Route>(d, {experts.view(), offsets.view(), slots.view()});
  }
  int num_runs = 0;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const bool transposed : {false, true})
      for (const bool indices : {false, true}) {
        QgemmGroupedDescriptor d{.num_experts = kExperts, .m = kTokens, .n = 96, .k = 256};
        d.transposed = transposed;
        d.dtype = dtype;
        if (indices) {
          d.rows = ExpertRows::indices;
          d.top_k = kTopK;
          d.sum_slots = true;
        }
        const PackedExperts weights(d.spec, kExperts, d.n, d.k);
        std::memset(weights.stack().data, 0, static_cast<size_t>(weights.stack().num_bytes));
        const Tensor experts = tensor(DType::i32, {kTokens, d.top_k}),
                     offsets = tensor(DType::i32, {kExperts}),
                     slots = tensor(DType::i32, {kTokens * d.top_k}),
                     x = tensor(dtype, {d.m, transposed ? d.n : d.k}),
                     y = tensor(dtype, {d.m, transposed ? d.k : d.n});
        RoutePlan::select(Device{}, {.tokens = kTokens, .top_k = d.top_k, .num_experts = kExperts})
            .run(nullptr, {}, {experts.view(), offsets.view(), slots.view()});
        QgemmGrouped::Args args{.x = x.view(), .weight = weights.stack(), .offsets = offsets.view()};
        if (indices) args.slots = slots.view();
        args.y = y.view();
        for (const QgemmChoice& choice : explain_qgemm_grouped(Device{}, d)) {
          if (!choice.reason.empty()) continue;
          d.variant = choice.variant;
          expect_none<QgemmGrouped>(d, args);
          expect_none_of_its_own<QgemmGrouped>(d, args);
          ++num_runs;
        }
      }
  EXPECT_GE(num_runs, 16);
}

// The memory that the thread keeps grows, serves runs that are nested in no way, and is not kept where it is
// large.
TEST_F(Allocations, OfWorkspacesOfTheThread) {
  const auto allocations = [](int64_t num_bytes) {
    const int64_t before = num_allocations;
    const ThreadWorkspace memory(num_bytes);
    std::memset(memory.data(), 1, static_cast<size_t>(num_bytes));
    return num_allocations - before;
  };
  allocations(100000);
  EXPECT_EQ(allocations(100000), 0);
  EXPECT_EQ(allocations(16), 0);
  EXPECT_GT(allocations(1 << 20), 0);
  EXPECT_EQ(allocations((1 << 20) - 5), 0);
  {
    const ThreadWorkspace outer(1 << 20);
    EXPECT_GT(allocations(16), 0);  // within a run
  }
  EXPECT_EQ(allocations(1 << 20), 0);
  EXPECT_GT(allocations(ThreadWorkspace::kMostKept + 1), 0);
  EXPECT_GT(allocations(ThreadWorkspace::kMostKept + 1), 0);
}

// The output has its name then: what fails without memory would be told of a call that is done.
TEST_F(Allocations, OfOneProcessBehindItsWork) {
  io::Team team(nullptr);
  int64_t before = -1;
  EXPECT_EQ(team.run([&] {
    before = num_allocations;
    return 7;
  }),
            7);
  EXPECT_EQ(num_allocations - before, 0);
}

}  // namespace
}  // namespace halfbyte
