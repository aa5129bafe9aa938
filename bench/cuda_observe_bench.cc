#include "bench/cuda_observe_bench.h"

#include <nlohmann/json.hpp>

#include "bench/cuda_timing.h"
#include "halfbyte/observe.hpp"

namespace halfbyte::bench {
namespace {

constexpr int64_t kRows = 8192, kCols = 8192;
constexpr double kTarget = 0.9;  // of a kernel that only reads x, and reads and writes the state

struct Case {
  std::string name;
  ObserveDescriptor descriptor;
  double target;  // 0: for information
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average}) {
      const auto add = [&](const char* name, Granularity granularity, int axis, int64_t group_size,
                           double target) {
        ObserveDescriptor d;
        d.shape = {kRows, kCols};
        d.granularity = granularity;
        d.axis = axis;
        d.group_size = group_size;
        d.dtype = dtype;
        d.observer.kind = kind;
        cases.push_back(
            {fmt::format("observe {} {} {}", name, to_string(dtype), to_string(kind)), d, target});
      };
      add("tensor", Granularity::tensor, -1, 0, kTarget);
      add("channel", Granularity::channel, 0, 0, kTarget);
      add("group 64", Granularity::group, -1, 64, kTarget);
      add("channel axis 1", Granularity::channel, 1, 0, 0);
      if (kind == ObserverKind::min_max) add("group 64 axis 0", Granularity::group, 0, 64, 0);
    }
  return cases;
}

// The arrays of one run, one behind the other: x, min, max, num_batches.
struct Buffers {
  int64_t x_bytes, state_bytes, min, max, num_batches, end;
};
Buffers buffers_of(const ObserveDescriptor& d) {
  Buffers b{};
  b.x_bytes = contiguous_bytes(d.dtype, d.shape);
  b.state_bytes = contiguous_bytes(DType::f32, d.state_shape());
  const int64_t padded = (b.state_bytes + 255) / 256 * 256;
  b.min = b.x_bytes;
  b.max = b.min + padded;
  b.num_batches = b.max + padded;
  b.end = b.num_batches + 256;
  return b;
}
Observe::Args args_of(const ObserveDescriptor& d, const Buffers& b, std::byte* data, Device device) {
  const std::vector<int64_t> groups = d.state_shape();
  return {{data, d.dtype, d.shape, {}, device},
          {data + b.min, DType::f32, groups, {}, device},
          {data + b.max, DType::f32, groups, {}, device},
          {data + b.num_batches, DType::i64, {}, {}, device}};
}

// A second batch, on the device as on the CPU.
bool check(const ObserveDescriptor& d, const Buffers& b, const ObservePlan& plan, const Memory& memory,
           void* workspace) {
  const Observe::Args args = args_of(d, b, memory.data(), kCuda);
  reset_observer(args.min, args.max, args.num_batches);
  std::vector<uint8_t> expected = download(memory.data(), b.end);
  const auto on_cpu = ObservePlan::select({}, d);
  alignas(16) QuantizeStatus status;
  for (int i = 0; i < 2; ++i) {
    plan.run(nullptr, workspace, args);
    on_cpu.run(nullptr, &status, args_of(d, b, reinterpret_cast<std::byte*>(expected.data()), {}));
  }
  return download(memory.data(), b.end) == expected;
}

}  // namespace

bool run_observe_bench(const std::string& filter, nlohmann::json& results) {
  const Timer timer;
  const std::vector<Case> cases = make_cases();
  int64_t most = 0;
  for (const Case& test : cases) most = std::max(most, buffers_of(test.descriptor).end);
  std::vector<Memory> memories;
  for (int i = 0; i < kSets; ++i) memories.emplace_back(kCuda, most);
  const Memory workspace(kCuda, int64_t{64} << 20), other(kCuda, most);
  bool passed = true;
  results = nlohmann::json::array();
  fmt::print("\nobserve [{}, {}]\n{:<48} {:>9} {:>8} {:>8}\n", kRows, kCols, "", "us", "GB/s", "of move");
  for (const Case& test : cases) {
    if (test.name.find(filter) == std::string::npos) continue;
    const ObserveDescriptor& d = test.descriptor;
    const Buffers b = buffers_of(d);
    const std::vector<uint8_t> pool = make_pool(d.dtype);
    std::vector<Observe::Args> args;
    std::vector<Move> moves;
    for (const Memory& memory : memories) {
      fill(memory, pool);
      args.push_back(args_of(d, b, memory.data(), kCuda));
      reset_observer(args.back().min, args.back().max, args.back().num_batches);
      moves.push_back({memory.data(), other.data()});
    }
    const auto plan = ObservePlan::select(kCuda, d);
    const bool correct = check(d, b, plan, memories[0], workspace.data());
    const double us =
        timer.time([&](int i) { plan.run(nullptr, workspace.data(), args[static_cast<size_t>(i)]); });
    // min and max lie behind x. Something is written, so that the reads are not left out.
    const int64_t state = 2 * (b.state_bytes / 16 * 16), read = b.x_bytes + state,
                  written = std::max<int64_t>(16, state);
    const double move_us = time_move(timer, moves, read, written);
    const double ratio = move_us / us, gbs = 1e-3 * static_cast<double>(read + state) / us;
    const bool good = correct && ratio >= test.target;
    passed = passed && good;
    fmt::print("{:<48} {:>9.1f} {:>8.0f} {:>8.3f}  {:<16} {}\n", test.name, us, gbs, ratio, plan.sku().kernel,
               !correct           ? "WRONG OUTPUT"
               : test.target == 0 ? ""
               : good             ? fmt::format("pass {}", test.target)
                                  : fmt::format("BELOW {}", test.target));
    std::fflush(stdout);
    results.push_back({{"case", test.name},
                       {"kernel", plan.sku().kernel},
                       {"us", us},
                       {"gb_per_s", gbs},
                       {"move_us", move_us},
                       {"of_move", ratio},
                       {"target", test.target},
                       {"correct", correct},
                       {"passed", good}});
  }
  return passed;
}

}  // namespace halfbyte::bench
