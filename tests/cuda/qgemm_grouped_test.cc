// Products with the weights of experts on a device, and the routing before them: every variant against the
// reference, run to run, in graphs.
#include <map>

#include "ops/qgemm/qgemm_grouped_testing.h"
#include "surrounded.h"

namespace halfbyte {
namespace {

using testing::bytes_of;
using testing::GroupedCase;
using testing::kCuda;
using testing::QgemmData;
using testing::Routing;
using testing::Surrounded;

// The tensors of a case on the device. exact: without guards, for a checker of memory accesses.
class OnDevice {
 public:
  OnDevice(const GroupedCase& test, bool exact)
      : test_(test),
        y_(test.num_outputs() * size_of(test.descriptor.dtype), test.descriptor.alignment, exact),
        grad_(test.descriptor.routing_gradient ? test.problem.m * 4 : 0, 4, exact) {
    const int64_t alignment = test.descriptor.alignment;
    const auto add = [&](std::vector<uint8_t> bytes, int64_t place) -> const void* {
      inputs_.emplace_back(static_cast<int64_t>(bytes.size()), place, exact);
      inputs_.back().upload(bytes);
      contents_.push_back(std::move(bytes));
      return inputs_.back().data();
    };
    tensors_.x = add(test.x.bytes, alignment);
    tensors_.weight = add(test.stack, 256);
    tensors_.bias = add(test.bias.bytes, alignment);
    tensors_.forward_x = add(test.forward_x.bytes, alignment);
    tensors_.offsets = add(bytes_of(test.offsets), 4);
    tensors_.slots = add(bytes_of(test.slots), 4);
    tensors_.routing_weights = add(bytes_of(test.routing_weights), 4);
    tensors_.y = y_.data();
    tensors_.routing_grad = grad_.data();
    reset();
  }
  QgemmGrouped::Args args() const { return testing::grouped_args(test_, tensors_, kCuda); }
  // y and the gradient as they are before a run.
  void reset() {
    grad_.clear();
    if (test_.descriptor.accumulate)
      y_.upload(test_.before.bytes);
    else
      y_.clear();
  }
  std::vector<uint8_t> y() const { return y_.download(); }
  std::vector<uint8_t> grad() const { return grad_.download(); }
  void expect_inputs_as_before() const {
    for (size_t i = 0; i < inputs_.size(); ++i)
      EXPECT_TRUE(inputs_[i].download() == contents_[i]) << "input " << i << " was written";
  }

 private:
  const GroupedCase& test_;
  Surrounded y_, grad_;
  std::vector<Surrounded> inputs_;
  std::vector<std::vector<uint8_t>> contents_;
  testing::GroupedTensors tensors_;
};

std::vector<std::string> variants_of(const QgemmGroupedDescriptor& d) {
  std::vector<std::string> names;
  for (const QgemmChoice& choice : explain_qgemm_grouped(kCuda, d))
    if (choice.reason.empty()) names.push_back(choice.variant);
  return names;
}

// Why the variant that it names refuses it; empty if it takes it.
std::string refusal_of(const QgemmGroupedDescriptor& d) {
  for (const QgemmChoice& choice : explain_qgemm_grouped(kCuda, d))
    if (choice.variant == d.variant) return choice.reason;
  return "";
}

// As many rows, or one fewer, by indices: two slots a token, with routing weights.
void give_indices(QgemmGroupedDescriptor& d) {
  d.rows = ExpertRows::indices;
  d.top_k = 2;
  d.m /= 2;
  d.routing_weights = true;
}

// Every variant that takes it against the reference, and a second run against the first.
void check(QgemmGroupedDescriptor d, uint64_t seed, Routing routing, QgemmData data = QgemmData::random,
           bool exact = false) {
  const GroupedCase test(d, seed, routing, data);
  std::map<WeightRounding, testing::GroupedReference> references;
  std::vector<std::string> variants = d.variant.empty() ? variants_of(d) : std::vector{d.variant};
  if (test.problem.is_empty()) variants = {""};  // no variant is given it
  EXPECT_FALSE(variants.empty()) << testing::describe(d, routing);
  for (const std::string& variant : variants) {
    d.variant = variant;
    SCOPED_TRACE(variant);
    const auto plan = QgemmGroupedPlan::select(kCuda, d);
    const WeightRounding rounding = plan.precision_guarantee().weight_rounding;
    if (!references.contains(rounding))
      references[rounding] = testing::grouped_ref(test, [&](size_t, size_t) { return rounding; });
    const Surrounded workspace(plan.workspace_size(), 256, exact);
    OnDevice memory(test, exact);
    const std::vector<uint8_t> before = memory.y();
    std::vector<uint8_t> first;
    for (int i = 0; i < 2; ++i) {
      memory.reset();
      plan.run(nullptr, {workspace.data(), plan.workspace_size()}, memory.args());
      const std::vector<uint8_t> y = memory.y();
      if (i == 0) {
        first = y;
        EXPECT_TRUE(testing::near_grouped(test, y, before, memory.grad(), references[rounding], data));
      }
      EXPECT_TRUE(first == y) << testing::describe(d, routing);
    }
    memory.expect_inputs_as_before();
    workspace.download();  // what lies around it
  }
}

class QgemmGroupedCuda : public testing::CudaTest, public ::testing::WithParamInterface<size_t> {
 protected:
  QuantSpec format() const { return testing::qgemm_formats()[GetParam()]; }
};

TEST_P(QgemmGroupedCuda, IsNearTheReference) {
  std::mt19937_64 random(GetParam());
  for (int i = 0; i < 10; ++i) {
    const QgemmGroupedDescriptor d = testing::random_grouped(random, format(), 300);
    check(d, random(), testing::pick(random, testing::kRoutings));
  }
}
TEST_P(QgemmGroupedCuda, IntegersAreExact) {
  if (format().format == Format::nf4 || format().format == Format::fp4)
    GTEST_SKIP() << "values are not short";
  std::mt19937_64 random(GetParam() + 100);
  for (int i = 0; i < 6; ++i) {
    const QgemmGroupedDescriptor d = testing::random_grouped(random, format(), 130, QgemmData::integers);
    check(d, random(), testing::pick(random, testing::kRoutings), QgemmData::integers);
  }
}
INSTANTIATE_TEST_SUITE_P(, QgemmGroupedCuda, ::testing::Range(size_t{0}, testing::qgemm_formats().size()),
                         [](const auto& info) {
                           return testing::short_text(testing::qgemm_formats()[info.param]);
                         });

using QgemmGroupedDevice = testing::CudaTest;

// What layouts store, of 16 bits: tiles of few and of many rows, sums in parts, each way to give rows.
TEST_F(QgemmGroupedDevice, EveryTile) {
  std::mt19937_64 random(1);
  for (const int64_t m : {3, 40, 100, 200, 420, 900})
    for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked})
      for (const bool transposed : {false, true}) {
        QgemmGroupedDescriptor d{.num_experts = 5, .m = m, .n = 160, .k = 512, .transposed = transposed};
        d.spec.format = m % 3 == 0 ? Format::int4 : Format::nf4;
        d.dtype = m % 2 == 0 ? DType::bf16 : DType::f16;
        d.rows = rows;
        d.bias = !transposed;
        d.swiglu = !transposed && m % 4 == 0;
        if (rows == ExpertRows::masked) d.m = std::min<int64_t>(m, 200);
        if (rows == ExpertRows::indices) {
          d.top_k = 2;
          d.m /= 2;
          d.sum_slots = transposed;
          d.x_per_slot = transposed;
          d.routing_weights = true;
          d.routing_gradient = transposed;
        }
        if (d.m == 0) continue;
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

// By qgemm_sm90_large, which makes y of both halves itself: tiles of which the last one is cut. Then there
// are no sums in memory.
TEST_F(QgemmGroupedDevice, SwigluInTiles) {
  std::mt19937_64 random(3);
  for (const int64_t rows_of_expert : {17, 80, 130, 256})
    for (const int64_t n : {64, 190, 192})
      for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked}) {
        QgemmGroupedDescriptor d{.num_experts = 5, .m = 5 * rows_of_expert, .n = n, .k = 256, .rows = rows};
        d.spec.format = rows_of_expert == 80 ? Format::int4 : Format::nf4;
        d.dtype = rows_of_expert == 80 ? DType::f16 : DType::bf16;
        d.bias = random() % 2 == 0;
        d.accumulate = random() % 2 == 0;
        d.swiglu = true;
        d.variant = "qgemm_sm90_large";
        if (rows == ExpertRows::masked) d.m = rows_of_expert;
        if (rows == ExpertRows::indices) give_indices(d);
        if (rows_of_expert == 256 && (n > 64 || rows != ExpertRows::offsets)) continue;  // the widest tile
        if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
        if (rows == ExpertRows::offsets && n > 64) {
          const int64_t workspace = QgemmGroupedPlan::select(kCuda, d).workspace_size();
          EXPECT_EQ(workspace >= 4 * d.m * n, n == 190) << workspace;
        }
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

// By qgemm_sm90_large, of more tiles than there are multiprocessors: tiles of every width. Of few, it takes
// the smallest.
QgemmGroupedDescriptor many_tiles(int64_t rows_of_expert, bool transposed) {
  QgemmGroupedDescriptor d{
      .num_experts = 64, .m = 64 * rows_of_expert, .n = 576, .k = 72, .transposed = transposed};
  if (transposed) std::swap(d.n, d.k);
  d.variant = "qgemm_sm90_large";
  return d;
}
TEST_F(QgemmGroupedDevice, ManyTiles) {
  std::mt19937_64 random(5);
  const std::vector<QuantSpec> formats = testing::qgemm_formats();
  int num_checked = 0;
  for (const int64_t rows_of_expert : {17, 35, 63, 92, 150, 250})
    for (const int kind : {0, 1, 2}) {               // forward, transposed, SwiGLU
      if (kind == 1 + rows_of_expert % 2) continue;  // two of the three
      QgemmGroupedDescriptor d = many_tiles(rows_of_expert, kind == 1);
      d.spec = formats[random() % formats.size()];
      d.dtype = random() % 2 == 0 ? DType::bf16 : DType::f16;
      d.swiglu = kind == 2;
      if (random() % 2 != 0) give_indices(d);
      if (!refusal_of(d).empty()) d.spec = {.format = Format::nf4};
      if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
      check(d, random(), testing::pick(random, testing::kRoutings));
      ++num_checked;
    }
  EXPECT_EQ(num_checked, 12);
}

// Of few columns of y it gathers rows of x, where they lie, for all tiles of a block.
QgemmGroupedDescriptor gathered(int64_t num_experts, int64_t rows_of_expert, bool transposed) {
  QgemmGroupedDescriptor d = many_tiles(rows_of_expert, transposed);
  d.num_experts = num_experts;
  (transposed ? d.k : d.n) = 512;
  d.rows = ExpertRows::indices;
  d.top_k = 2;
  d.m = num_experts * rows_of_expert / 2;
  return d;
}
TEST_F(QgemmGroupedDevice, GatheredRows) {
  std::mt19937_64 random(6);
  for (const int64_t rows_of_expert : {17, 45, 100, 150, 250})
    for (const bool transposed : {false, true}) {
      QgemmGroupedDescriptor d = gathered(rows_of_expert > 100 ? 100 : 200, rows_of_expert, transposed);
      d.spec.format = random() % 2 == 0 ? Format::nf4 : Format::int4;
      d.dtype = random() % 2 == 0 ? DType::bf16 : DType::f16;
      (transposed ? d.n : d.k) = random() % 2 == 0 ? 72 : 264;
      d.routing_weights = random() % 2 == 0;
      d.x_per_slot = transposed;
      if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
      // No copy of x.
      EXPECT_LT(QgemmGroupedPlan::select(kCuda, d).workspace_size(), d.m * (transposed ? d.n : d.k) * 2);
      check(d, random(), testing::pick(random, testing::kRoutings));
    }
}

// By qgemm_sm90_large, of so few tiles, or so few more than multiprocessors, that blocks divide what is
// summed: tiles of every width, in pairs, too.
TEST_F(QgemmGroupedDevice, DividedTiles) {
  std::mt19937_64 random(9);
  for (const int64_t rows_of_expert : {20, 45, 90, 150, 280})
    for (const int kind : {0, 1, 2})  // forward, transposed, SwiGLU
      for (const bool few : {true, false}) {
        const int64_t num_tiles = few ? 2 : 48, tile = rows_of_expert <= 90 ? 256 : 128;
        const bool takes_long = rows_of_expert != (kind == 0 ? 150 : 20);  // the reference
        if (!few && (takes_long || kind == 2)) continue;
        QgemmGroupedDescriptor d{.num_experts = 3, .m = 3 * rows_of_expert, .n = num_tiles * tile, .k = 1000};
        d.transposed = kind == 1;
        d.swiglu = kind == 2;
        if (d.transposed) std::swap(d.n, d.k);
        d.spec.format = random() % 2 == 0 ? Format::nf4 : Format::int4;
        d.dtype = random() % 2 == 0 ? DType::bf16 : DType::f16;
        d.bias = !d.transposed;
        d.accumulate = random() % 2 == 0;
        if (random() % 2 == 0) give_indices(d);
        d.variant = "qgemm_sm90_large";
        if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

// Few rows of many experts: blocks go from tile to tile, one or some at a time.
QgemmGroupedDescriptor few_rows(int64_t rows_of_expert, int64_t summed, bool transposed) {
  QgemmGroupedDescriptor d = many_tiles(rows_of_expert, transposed);
  d.num_experts = 150;
  d.m = 150 * rows_of_expert;
  (transposed ? d.n : d.k) = summed;
  d.variant = transposed ? "qgemm_sm90_transposed" : "qgemm_sm90_wgmma";
  return d;
}
TEST_F(QgemmGroupedDevice, FewRowsOfManyTiles) {
  std::mt19937_64 random(7);
  for (const int64_t rows_of_expert : {1, 4, 10, 20})
    for (const int64_t summed : {40, 72, 328, 1000})
      for (const bool transposed : {false, true}) {
        QgemmGroupedDescriptor d = few_rows(rows_of_expert, summed, transposed);
        d.spec.format = random() % 2 == 0 ? Format::nf4 : Format::int4;
        d.dtype = random() % 2 == 0 ? DType::bf16 : DType::f16;
        if (random() % 2 == 0) give_indices(d);
        if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

// By qgemm_sm90_transposed, of weights with few rows and many columns: eight and sixteen tiles at once, whose
// warps share none or have one other. Few rows of x are gathered; others lie in a copy.
QgemmGroupedDescriptor many_columns(int64_t num_experts, int64_t m, int64_t n) {
  QgemmGroupedDescriptor d{.num_experts = num_experts, .m = m, .n = n, .k = 7168, .transposed = true};
  d.dtype = DType::bf16;
  d.variant = "qgemm_sm90_transposed";
  return d;
}
TEST_F(QgemmGroupedDevice, ManyTilesAtOnce) {
  std::mt19937_64 random(9);
  for (const int64_t n : {40, 200, 520})
    for (const int64_t m : {64, 512})
      for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices}) {
        QgemmGroupedDescriptor d = many_columns(64, m, n);
        d.spec.format = random() % 2 == 0 ? Format::nf4 : Format::int4;
        d.rows = rows;
        if (rows == ExpertRows::indices) give_indices(d);
        if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

// Few rows of x, gathered but for transposed codes of 8 bits, of weights with so many outputs that tiles are
// large, of qgemm_sm90_wgmma 256 rows: the ring has four stages or two, and the sums of a tile five; or that
// blocks have several.
TEST_F(QgemmGroupedDevice, FewRowsOfLargeTiles) {
  std::mt19937_64 random(8);
  for (const bool transposed : {false, true})
    for (const Format format : {Format::nf4, Format::int8})
      for (const int64_t m : {4, 16}) {
        QgemmGroupedDescriptor d{.num_experts = 8, .m = m, .n = 7168, .k = 1032, .transposed = transposed};
        if (transposed) std::swap(d.n, d.k);
        d.spec.format = format;
        d.rows = (format == Format::nf4) == (m == 4) ? ExpertRows::offsets : ExpertRows::indices;
        d.routing_weights = d.rows == ExpertRows::indices;
        d.dtype = DType::bf16;
        d.variant = transposed ? "qgemm_sm90_transposed" : "qgemm_sm90_wgmma";
        if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
        check(d, random(), testing::pick(random, testing::kRoutings));
      }
}

TEST_F(QgemmGroupedDevice, EmptyExtents) {
  for (const ExpertRows rows : {ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked})
    for (int empty = 0; empty < 3; ++empty) {
      QgemmGroupedDescriptor d{.num_experts = 3, .m = 5, .n = 40, .k = 64, .rows = rows, .bias = true};
      (empty == 0 ? d.m : empty == 1 ? d.n : d.k) = 0;
      check(d, 1, Routing::even);
    }
}

QgemmGroupedDescriptor layer(bool transposed, int64_t m) {
  QgemmGroupedDescriptor d{.num_experts = 16, .m = m, .n = 256, .k = 512, .transposed = transposed};
  d.rows = ExpertRows::indices;
  d.top_k = 4;
  d.sum_slots = d.routing_weights = true;
  return d;
}

// A graph reads routing where it is when it runs.
void expect_graphs_follow(const QgemmGroupedDescriptor& d) {
  const auto plan = QgemmGroupedPlan::select(kCuda, d);
  const auto route =
      RoutePlan::select(kCuda, {.tokens = d.m, .top_k = d.top_k, .num_experts = d.num_experts});
  GroupedCase test(d, 1, Routing::even);
  OnDevice memory(test, false);
  Surrounded experts(d.m * d.top_k * 4, 4, false);
  const Surrounded workspace(plan.workspace_size(), 256, false), offsets(d.num_experts * 4, 4, false),
      slots(d.m * d.top_k * 4, 4, false);
  QgemmGrouped::Args args = memory.args();
  args.offsets.data = offsets.data();
  args.slots.data = slots.data();
  const cuda::Scope scope(cuda::context(kCuda.index));
  const Stream stream(kCuda);
  const Memory route_workspace(kCuda, route.workspace_size());
  testing::Graph graph;
  graph.capture(stream.handle(), [&] {
    route.run(stream.handle(), route_workspace,
              {.experts = {experts.data(), DType::i32, {d.m, d.top_k}, {}, kCuda},
               .offsets = {offsets.data(), DType::i32, {d.num_experts}, {}, kCuda},
               .slots = {slots.data(), DType::i32, {d.m * d.top_k}, {}, kCuda}});
    plan.run(stream.handle(), {workspace.data(), plan.workspace_size()}, args);
  });
  std::mt19937_64 random(2);
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> chosen;
    std::vector<std::vector<int32_t>> of(17);
    for (int32_t slot = 0; slot < d.m * d.top_k; ++slot) {
      chosen.push_back(static_cast<int32_t>(random() % 17) - (random() % 20 == 0 ? 2 : 0));
      const int32_t expert = chosen.back();
      of[expert < 0 || expert > 15 ? 16 : static_cast<size_t>(expert)].push_back(slot);
    }
    experts.upload(bytes_of(chosen));
    test.offsets.clear();
    test.slots.clear();
    for (size_t e = 0; e <= 16; ++e) {
      test.slots.insert(test.slots.end(), of[e].begin(), of[e].end());
      if (e < 16) test.offsets.push_back(static_cast<int32_t>(test.slots.size()));
    }
    memory.reset();
    std::vector<uint8_t> first;
    for (int run = 0; run < 100; ++run) {
      graph.launch(stream.handle());
      stream.synchronize();
      const std::vector<uint8_t> y = memory.y();
      if (run == 0) first = y;
      ASSERT_TRUE(y == first);
    }
    EXPECT_TRUE(offsets.download() == bytes_of(test.offsets) && slots.download() == bytes_of(test.slots));
    const auto rounding = plan.precision_guarantee().weight_rounding;
    EXPECT_TRUE(testing::near_grouped(test, first, first, {},
                                      testing::grouped_ref(test, [&](size_t, size_t) { return rounding; })));
  }
}

TEST_F(QgemmGroupedDevice, GraphsFollowTheRouting) {
  for (const int64_t m : {5, 24, 100}) expect_graphs_follow(layer(false, m));
}

// Whatever routing says, nothing else is touched: guards see it, and under compute-sanitizer nothing hides.
TEST_F(QgemmGroupedDevice, RoutingOfAnyContent) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 60; ++i) {
    constexpr int64_t kTokens[] = {5, 24, 100};
    QgemmGroupedDescriptor d = layer(i % 2 == 1, kTokens[i % 3]);
    d.routing_gradient = d.transposed;
    GroupedCase test(d, 1, Routing::random);
    const auto anything = [&]() -> int32_t {
      const auto bits = static_cast<int32_t>(random());
      return random() % 2 == 0 ? bits : bits % 100;
    };
    for (int32_t& offset : test.offsets) offset = anything();
    for (int32_t& slot : test.slots) slot = anything();
    for (const std::string& variant : variants_of(d)) {
      d.variant = variant;
      const auto plan = QgemmGroupedPlan::select(kCuda, d);
      const Surrounded workspace(plan.workspace_size(), 256, false);
      OnDevice memory(test, false);
      plan.run(nullptr, {workspace.data(), plan.workspace_size()}, memory.args());
      memory.y();
      memory.grad();
      memory.expect_inputs_as_before();
      workspace.download();
    }
  }
}

// The same bytes as the CPU.
TEST_F(QgemmGroupedDevice, RouteAsTheCpu) {
  std::mt19937_64 random(3);
  for (const int64_t tokens : {0, 1, 7, 255, 256, 257, 5000})
    for (const int64_t num_experts : {1, 8, 128, 300})
      for (const DType dtype : {DType::i32, DType::i64}) {
        const RouteDescriptor d{.tokens = tokens, .top_k = 3, .num_experts = num_experts, .dtype = dtype};
        const int64_t num_slots = tokens * 3, size = size_of(dtype);
        std::vector<uint8_t> experts(static_cast<size_t>(num_slots * size));
        for (int64_t i = 0; i < num_slots; ++i) {
          const int64_t expert = static_cast<int64_t>(random() % static_cast<uint64_t>(num_experts + 2)) - 1;
          std::memcpy(experts.data() + i * size, &expert, static_cast<size_t>(size));
        }
        const auto run = [&](Device device, const void* from, void* offsets, void* slots) {
          const auto plan = RoutePlan::select(device, d);
          const Memory workspace(device, plan.workspace_size());
          plan.run(nullptr, workspace,
                   {.experts = {const_cast<void*>(from), dtype, {tokens, 3}, {}, device},
                    .offsets = {offsets, DType::i32, {num_experts}, {}, device},
                    .slots = {slots, DType::i32, {num_slots}, {}, device}});
        };
        std::vector<int32_t> offsets(static_cast<size_t>(num_experts)), slots(static_cast<size_t>(num_slots));
        run({}, experts.data(), offsets.data(), slots.data());
        const Surrounded to(num_experts * 4, 4, false), list(num_slots * 4, 4, false);
        Surrounded input(num_slots * size, 8, false);
        input.upload(experts);
        run(kCuda, input.data(), to.data(), list.data());
        EXPECT_TRUE(to.download() == bytes_of(offsets)) << tokens << " " << num_experts;
        EXPECT_TRUE(list.download() == bytes_of(slots)) << tokens << " " << num_experts;
      }
}

// For compute-sanitizer, without guards: every variant, each way to give rows.
class SanitizeGrouped : public testing::CudaTest, public ::testing::WithParamInterface<ExpertRows> {};
TEST_P(SanitizeGrouped, EveryVariant) {
  for (const int i : {0, 1, 2, 3, 4}) {
    const bool transposed = i % 2 == 1;
    QgemmGroupedDescriptor d{.num_experts = 3, .m = 60, .n = 72, .k = 200, .transposed = transposed};
    d.rows = GetParam();
    if (i == 2 || i == 3) d.m = 6;
    if (d.rows == ExpertRows::indices) {
      d.top_k = 2;
      d.m /= 2;
      d.sum_slots = d.routing_weights = true;
      d.routing_gradient = transposed;
    }
    if (d.rows == ExpertRows::masked) d.m = (d.m + 2) / 3;
    if (i == 4) {
      d.n = 192;
      d.swiglu = true;
      d.sum_slots = false;
    }
    check(d, 1, Routing::random, QgemmData::random, true);
  }
}
INSTANTIATE_TEST_SUITE_P(, SanitizeGrouped,
                         ::testing::Values(ExpertRows::offsets, ExpertRows::indices, ExpertRows::masked));

// Blocks that have several tiles each, but of qgemm_sm90_wgmma only some: racecheck reports each byte of the
// sums that warpgroups give each other in a second tile, and each lane that reads a place of a list that is
// used again, millions if all blocks have many.
class SanitizeGroupedTiles : public testing::CudaTest, public ::testing::WithParamInterface<int> {};
TEST_P(SanitizeGroupedTiles, EachKernel) {
  const bool transposed = GetParam() % 2 == 1;
  QgemmGroupedDescriptor d = GetParam() / 2 == 0   ? many_tiles(17, transposed)
                             : GetParam() / 2 == 1 ? gathered(40, 18, transposed)
                             : GetParam() / 2 == 2 ? few_rows(4, 72, transposed)
                                                   : many_columns(40, 64, 72);
  if (GetParam() == 4) d.n = 128;  // one tile an expert
  if (GetParam() == 5) {
    d.num_experts = 70;
    d.m = 4 * d.num_experts;
  }
  if (const std::string reason = refusal_of(d); !reason.empty()) GTEST_SKIP() << reason;
  check(d, 1, Routing::random, QgemmData::random, true);
}
INSTANTIATE_TEST_SUITE_P(, SanitizeGroupedTiles, ::testing::Range(0, 7));

}  // namespace
}  // namespace halfbyte
