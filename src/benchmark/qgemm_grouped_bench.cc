#include <algorithm>
#include <cmath>
#include <random>

#include "benchmark/harness.h"
#include "core/arithmetic.h"
#include "core/checks.h"
#include "formats/convert.h"
#include "halfbyte/bench.hpp"

namespace halfbyte {
namespace {

constexpr int kRoutings = 16;  // that take turns

// Who gets which row, in memory of the host: the expert of each slot, and slots in the order of experts.
struct Routing {
  std::vector<int32_t> experts, offsets, slots;
  int64_t touched = 0;  // experts that have rows
};

class QgemmGroupedBench {
 public:
  QgemmGroupedBench(Device device, const BenchOptions& options)
      : device_(device),
        harness_(device, options),
        backend_(harness_.backend()),
        stream_(backend_.stream()),
        times_only_(options.times_only) {
    std::mt19937_64 random(1);
    random_bytes_.resize(static_cast<size_t>(kBenchPoolValues));
    for (uint8_t& byte : random_bytes_) byte = static_cast<uint8_t>(random() >> 32);
  }

  QgemmGroupedBenchRow run(const QgemmGroupedBenchCase& test) {
    QgemmGroupedBenchRow row;
    row.test = test;
    try {
      measure(test, row);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::device && error.code() != ErrorCode::usage) throw;
      row.problem = error.what();
      stream_.synchronize();
    }
    return row;
  }

 private:
  // Values from -1 to 1 times `scale`, plus `offset`.
  std::vector<uint8_t> values(DType dtype, float scale, float offset) const {
    std::mt19937_64 random(2);
    const auto size = static_cast<size_t>(size_of(dtype));
    std::vector<uint8_t> bytes(static_cast<size_t>(kBenchPoolValues) * size);
    for (size_t i = 0; i < bytes.size(); i += size) {
      const float value = static_cast<float>(static_cast<int64_t>(random())) * 0x1p-63f * scale + offset;
      const uint16_t half = dtype == DType::f16 ? formats::f32_to_f16(value) : formats::f32_to_bf16(value);
      std::memcpy(bytes.data() + i, dtype == DType::f32 ? static_cast<const void*>(&value) : &half, size);
    }
    return bytes;
  }
  Memory filled(int64_t num_bytes, const std::vector<uint8_t>& pool) const {
    Memory memory(device_, num_bytes);
    harness_.fill(memory.data(), num_bytes, pool);
    return memory;
  }

  // Random codes, other ones for each expert; scales of 0.005 to 0.015.
  void prepare_weights(const QgemmGroupedDescriptor& d) {
    if (weights_.num_experts() > 0 && weights_.stack().spec == d.spec && weights_.stack().rows == d.n &&
        weights_.stack().cols == d.k && weights_.num_experts() / copies_ == d.num_experts)
      return;
    HALFBYTE_CHECK(
        !d.spec.double_quant && !has_zeros(d.spec) && !has_biases(d.spec) && size_of(d.spec.scale_dtype) > 1,
        usage, "bench_qgemm_grouped: weights must have nothing but scales of 16 or 32 bits");
    constexpr int64_t kShift = 4096,
                      kCodes = 64;  // of the codes of an expert against the one before; of these
    weights_ = {};
    const int64_t bytes = packed_weight_bytes(d.spec, d.n, d.k);
    copies_ = std::max<int64_t>(1, ceil_div(backend_.weight_rotation_bytes(), bytes * d.num_experts));
    weights_ = PackedExperts(d.spec, d.num_experts * copies_, d.n, d.k, device_);
    const QuantShape shape = quant_shape(d.spec, d.n, d.k);
    const Memory codes = filled(shape.code_bytes() + kCodes * kShift, random_bytes_);
    const Memory scales =
        filled(shape.num_groups * size_of(d.spec.scale_dtype), values(d.spec.scale_dtype, 0.005f, 0.01f));
    for (int64_t e = 0; e < weights_.num_experts(); ++e) {
      WeightView view{.spec = d.spec, .rows = d.n, .cols = d.k};
      view.codes = codes.data() + e % kCodes * kShift;
      view.scales = scales.data();
      view.device = device_;
      reorder(view, weights_.view(e), {.stream = stream_.handle()});
    }
    stream_.synchronize();
  }

  static Routing random_routing(const QgemmGroupedBenchCase& test, std::mt19937_64& random) {
    const QgemmGroupedDescriptor& d = test.descriptor;
    const auto num = static_cast<size_t>(d.num_experts);
    std::vector<double> weights(num);
    for (size_t e = 0; e < num; ++e) weights[e] = std::pow(static_cast<double>(e + 1), -test.skew);
    std::ranges::shuffle(weights, random);
    Routing routing;
    std::vector<std::vector<int32_t>> of(num);
    for (int64_t token = 0; token < d.m; ++token) {
      std::vector<double> left = weights;  // a token takes no expert twice
      for (int64_t j = 0; j < d.top_k; ++j) {
        const size_t expert = std::discrete_distribution<size_t>(left.begin(), left.end())(random);
        left[expert] = 0;
        routing.experts.push_back(static_cast<int32_t>(expert));
        of[expert].push_back(static_cast<int32_t>(token * d.top_k + j));
      }
    }
    for (const std::vector<int32_t>& slots : of) {
      routing.slots.insert(routing.slots.end(), slots.begin(), slots.end());
      routing.offsets.push_back(static_cast<int32_t>(routing.slots.size()));
      routing.touched += !slots.empty();
    }
    return routing;
  }

  void measure(const QgemmGroupedBenchCase& test, QgemmGroupedBenchRow& row) {
    const QgemmGroupedDescriptor& d = test.descriptor;
    prepare_weights(d);
    const int64_t bytes = packed_weight_bytes(d.spec, d.n, d.k), size = size_of(d.dtype);
    const int64_t in = d.transposed ? d.n : d.k, out = d.transposed ? d.k : d.n, num_slots = d.m * d.top_k;
    const auto plan = QgemmGroupedPlan::select(device_, d, backend_.preference());
    const auto route = RoutePlan::select(
        device_, {.tokens = d.m, .top_k = d.top_k, .num_experts = d.num_experts}, backend_.preference());
    row.sku = plan.sku();

    std::mt19937_64 random(3);
    std::vector<Routing> routings;
    for (int i = 0; i < kRoutings; ++i) routings.push_back(random_routing(test, random));
    for (const Routing& routing : routings) row.experts += static_cast<double>(routing.touched) / kRoutings;
    row.weight_bytes = row.experts * static_cast<double>(bytes);
    row.flops = 2.0 * static_cast<double>(num_slots) * static_cast<double>(d.n) * static_cast<double>(d.k);

    const auto upload = [&](auto member) {
      std::vector<int32_t> all;
      for (const Routing& routing : routings)
        all.insert(all.end(), (routing.*member).begin(), (routing.*member).end());
      Memory memory(device_, static_cast<int64_t>(all.size()) * 4);
      copy(device_, memory.data(), all.data(), memory.num_bytes(), stream_.handle());
      stream_.synchronize();
      return memory;
    };
    const Memory experts = upload(&Routing::experts), offsets = upload(&Routing::offsets),
                 slots = upload(&Routing::slots);
    const int64_t rows_of_x = d.x_per_slot ? num_slots : d.m, rows_of_y = d.sum_slots ? d.m : num_slots;
    const int64_t x_bytes = bench_padded(rows_of_x * in * size), y_cols = d.swiglu ? out / 2 : out,
                  y_bytes = bench_padded(rows_of_y * y_cols * size);
    constexpr int kSets = 2;  // of x and y
    const Memory x = filled(kSets * x_bytes, values(d.dtype, 1, 0)), y(device_, kSets * y_bytes),
                 workspace(device_, plan.workspace_size()),
                 loop_x = filled(num_slots * in * size, values(d.dtype, 1, 0)),
                 loop_y(device_, num_slots * out * size);
    const Memory routing_weights = filled(num_slots * 4, values(DType::f32, 0.1f, 0.5f));
    const auto i32 = [&](const Memory& memory, int64_t at, std::vector<int64_t> shape) {
      return TensorView{memory.data() + at * 4, DType::i32, std::move(shape), {}, device_};
    };
    const auto stack = [&](int i) {  // another copy of the weights each time
      PackedWeight weight = weights_.stack();
      weight.data = static_cast<std::byte*>(weight.data) + i % copies_ * d.num_experts * bytes;
      weight.num_bytes = d.num_experts * bytes;
      return weight;
    };
    const auto product = [&](int i) {
      const int64_t r = i % kRoutings;
      QgemmGrouped::Args args;
      args.x = TensorView{x.data() + i % kSets * x_bytes, d.dtype, {rows_of_x, in}, {}, device_};
      args.weight = stack(i);
      args.offsets = i32(offsets, r * d.num_experts, {d.num_experts});
      args.slots = i32(slots, r * num_slots, {num_slots});
      if (d.routing_weights)
        args.routing_weights = TensorView{routing_weights.data(), DType::f32, {d.m, d.top_k}, {}, device_};
      args.y = TensorView{y.data() + i % kSets * y_bytes, d.dtype, {rows_of_y, y_cols}, {}, device_};
      plan.run(stream_.handle(), workspace, args);
    };
    const QgemmPlans plans(device_,
                           {.spec = d.spec, .n = d.n, .k = d.k, .transposed = d.transposed, .dtype = d.dtype},
                           backend_.preference());
    int64_t loop_bytes = 16;
    for (const Routing& routing : routings) {
      int64_t begin = 0;
      for (const int32_t end : routing.offsets) {
        if (end > begin && !times_only_) loop_bytes = std::max(loop_bytes, plans.workspace_size(end - begin));
        begin = end;
      }
    }
    const Memory loop_workspace(device_, loop_bytes);
    const auto loop = [&](int i) {
      const Routing& routing = routings[static_cast<size_t>(i % kRoutings)];
      int64_t begin = 0;
      for (int64_t e = 0; e < d.num_experts; ++e) {
        const int64_t m = routing.offsets[static_cast<size_t>(e)] - begin;
        if (m == 0) continue;
        plans.run(stream_.handle(), loop_workspace,
                  {.x = TensorView{loop_x.data() + begin * in * size, d.dtype, {m, in}, {}, device_},
                   .weight = weights_.view(i % copies_ * d.num_experts + e),
                   .y = TensorView{loop_y.data() + begin * out * size, d.dtype, {m, out}, {}, device_}});
        begin += m;
      }
    };
    const Memory route_workspace(device_, route.workspace_size());
    const Memory new_offsets(device_, d.num_experts * 4),
        new_slots(device_, std::max<int64_t>(num_slots, 1) * 4);

    const double guess_us = std::max(row.weight_bytes / 3e6, row.flops / 6e8);
    const int launches = std::max(kRoutings, backend_.launches_of(guess_us, kRoutings));
    std::vector<std::shared_ptr<Work>> works = {backend_.record(launches, product)};
    works.push_back(backend_.record(launches, [&](int i) {
      route.run(stream_.handle(), route_workspace,
                {.experts = i32(experts, i % kRoutings * num_slots, {d.m, d.top_k}),
                 .offsets = i32(new_offsets, 0, {d.num_experts}),
                 .slots = i32(new_slots, 0, {num_slots})});
    }));
    // As many bytes as the experts have, from other places each time.
    const int64_t read_bytes = static_cast<int64_t>(row.weight_bytes) / 16 * 16;
    std::vector<const void*> places;
    const int64_t all = weights_.stack().num_bytes, num_places = std::max<int64_t>(1, all / read_bytes);
    for (int64_t i = 0; i < num_places; ++i)
      places.push_back(static_cast<std::byte*>(weights_.stack().data) + i * read_bytes / 256 * 256);
    const std::vector<std::shared_ptr<Work>> readers = backend_.readers(places, read_bytes, launches, false);
    works.push_back(harness_.fastest(readers));
    if (!times_only_) works.push_back(backend_.record(kRoutings, loop));
    const std::vector<Timing> timings = harness_.medians(works, harness_.rounds());
    row.plain_us = timings[0].us;
    row.plain_spread = timings[0].spread;
    row.route_us = timings[1].us;
    row.read_us = timings[2].us;
    if (!times_only_) row.loop_us = timings[3].us;
  }

  Device device_;
  const BenchHarness harness_;
  const BenchBackend& backend_;
  const Stream& stream_;
  const bool times_only_;
  std::vector<uint8_t> random_bytes_;
  PackedExperts weights_;  // of copies_ times the experts
  int64_t copies_ = 1;
};

}  // namespace

void bench_qgemm_grouped(Device device, std::span<const QgemmGroupedBenchCase> cases,
                         const BenchOptions& options,
                         const std::function<bool(const QgemmGroupedBenchRow&)>& progress) {
  for (const QgemmGroupedBenchCase& test : cases) {
    const QgemmGroupedDescriptor& d = test.descriptor;
    check_descriptor(d);
    HALFBYTE_CHECK(
        d.rows == ExpertRows::indices && !d.bias && !d.accumulate && !d.routing_gradient && d.m > 0 &&
            d.n > 0 && d.k > 0 && d.top_k <= d.num_experts,
        usage,
        "bench_qgemm_grouped: {}: rows must be indices, extents positive, top_k at most num_experts, "
        "and there is no bias, accumulate and gradient",
        test.name);
  }
  check_device(device);
  QgemmGroupedBench bench(device, options);
  for (const QgemmGroupedBenchCase& test : cases)
    HALFBYTE_CHECK(progress(bench.run(test)), cancelled, "bench_qgemm_grouped: cancelled");
}

}  // namespace halfbyte
