#include "bench/cuda_fake_quantize_bench.h"

#include <nlohmann/json.hpp>

#include "bench/cuda_timing.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte::bench {
namespace {

constexpr int64_t kRows = 8192, kCols = 8192;
constexpr double kTarget = 0.9;  // of a kernel that only moves the same bytes

struct Case {
  std::string name;
  bool forward;
  FakeQuantizeDescriptor descriptor;
  double target;  // 0: for information
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    FakeQuantizeDescriptor tensor;
    tensor.shape = {kRows, kCols};
    tensor.dtype = dtype;
    FakeQuantizeDescriptor channel = tensor, column = tensor, group = tensor;
    channel.granularity = column.granularity = Granularity::channel;
    channel.axis = 0;
    column.axis = 1;
    group.granularity = Granularity::group;
    group.group_size = 64;
    const auto add = [&](const char* name, FakeQuantizeDescriptor d, double target, bool forward = true) {
      cases.push_back({fmt::format("fake {} {}", name, to_string(dtype)), forward, std::move(d), target});
    };
    const auto masked = [](FakeQuantizeDescriptor d) {
      d.mask = true;
      return d;
    };
    const auto computed = [](FakeQuantizeDescriptor d) {
      d.computed = true;
      return d;
    };
    FakeQuantizeDescriptor asymmetric = group, nf4 = group, observed = computed(group);
    asymmetric.zero_point_dtype = DType::i32;
    nf4.format = Format::nf4;
    observed.observer.emplace().kind = ObserverKind::moving_average;

    add("tensor", tensor, kTarget);
    add("channel", channel, kTarget);
    add("group 64", group, kTarget);
    add("channel axis 1", column, 0);
    add("group 64 zero point", asymmetric, 0);
    add("group 64 nf4", nf4, 0);
    add("tensor with mask", masked(tensor), 0);
    add("group 64 with mask", masked(group), 0);
    add("computed group 64", computed(group), kTarget);
    add("computed tensor", computed(tensor), 0);
    add("computed channel", computed(channel), 0);
    add("observed group 64", observed, 0);
    add("backward tensor", tensor, kTarget, false);
    add("backward channel", channel, kTarget, false);
    add("backward group 64", group, kTarget, false);
    add("backward from mask", masked(tensor), kTarget, false);
  }
  return cases;
}

// The arrays of one run, one behind the other, so that a kernel that only moves bytes can have the same: what
// is read, then what is written, then what is either.
struct Buffers {
  int64_t x = 0, dy = 0, y = 0, mask = 0, scale = 0, zero = 0, min = 0, max = 0, num_batches = 0, end = 0;
  int64_t read_bytes = 0, write_bytes = 0;
};
Buffers buffers_of(const Case& test) {
  const FakeQuantizeDescriptor& d = test.descriptor;
  const bool from_mask = !test.forward && d.mask;
  const std::vector<int64_t> groups = d.scale_shape();
  const int64_t dense = contiguous_bytes(d.dtype, d.shape),
                mask = d.mask ? contiguous_bytes(DType::u8, d.mask_shape()) : 0,
                scale = from_mask ? 0 : contiguous_bytes(d.scale_dtype, groups),
                zero = d.zero_point_dtype ? contiguous_bytes(*d.zero_point_dtype, groups) : 0,
                state = d.observer ? contiguous_bytes(d.state_dtype(), groups) : 0;
  Buffers b;
  const auto place = [&](int64_t num_bytes) {
    const int64_t begin = b.end;
    b.end += (num_bytes + 255) / 256 * 256;
    return begin;
  };
  b.x = place(from_mask ? 0 : dense);
  b.dy = place(test.forward ? 0 : dense);
  b.y = place(dense);
  b.mask = place(mask);
  b.scale = place(scale);
  b.zero = place(zero);
  b.min = place(state);
  b.max = place(state);
  b.num_batches = place(d.observer ? 8 : 0);
  b.read_bytes = b.y + 2 * state + (d.computed ? 0 : scale + zero) + (from_mask ? mask : 0);
  b.write_bytes = dense + 2 * state + (d.computed ? scale + zero : 0) + (test.forward ? mask : 0);
  return b;
}

// The views of a run in memory at `data`.
struct Views {
  TensorView x, dy, y, mask, scale, zero, min, max, num_batches;
};
Views views_of(const Case& test, const Buffers& b, std::byte* data, Device device) {
  const FakeQuantizeDescriptor& d = test.descriptor;
  const std::vector<int64_t> groups = d.scale_shape();
  const auto view = [&](int64_t at, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{data + at, dtype, shape, {}, device};
  };
  Views v;
  v.y = view(b.y, d.dtype, d.shape);
  if (!test.forward) v.dy = view(b.dy, d.dtype, d.shape);
  if (d.mask) v.mask = view(b.mask, DType::u8, d.mask_shape());
  if (!test.forward && d.mask) return v;
  v.x = view(b.x, d.dtype, d.shape);
  v.scale = view(b.scale, d.scale_dtype, groups);
  if (d.zero_point_dtype) v.zero = view(b.zero, *d.zero_point_dtype, groups);
  if (d.observer) {
    v.min = view(b.min, d.state_dtype(), groups);
    v.max = view(b.max, d.state_dtype(), groups);
    v.num_batches = view(b.num_batches, DType::i64, {});
  }
  return v;
}

// What a run has before it: everything is poisoned but what is read.
std::vector<uint8_t> make_memory(const Case& test, const Buffers& b) {
  const FakeQuantizeDescriptor& d = test.descriptor;
  std::vector<uint8_t> host(static_cast<size_t>(b.end), kPoison);
  const std::vector<uint8_t> pool = make_pool(d.dtype);
  for (int64_t at = b.x; at < b.y; at += static_cast<int64_t>(pool.size()))
    std::copy_n(pool.begin(), std::min<int64_t>(static_cast<int64_t>(pool.size()), b.y - at),
                host.begin() + at);
  std::mt19937_64 random(2);
  if (!test.forward)
    for (int64_t at = b.mask; at < b.scale; at += 8) {
      const uint64_t word = random();
      std::memcpy(host.data() + at, &word, 8);
    }
  if (!d.computed)
    for (int64_t at = b.scale; at < b.zero; at += 4) {
      const float scale = (d.format ? 0.05f : 0.005f) * static_cast<float>(1 + random() % 1000 * 0.001);
      std::memcpy(host.data() + at, &scale, 4);
    }
  for (int64_t at = b.zero; at < b.min; at += 4) {
    const auto zero = static_cast<int32_t>(random() % 5) - 2;
    std::memcpy(host.data() + at, &zero, 4);
  }
  if (d.observer) {
    const Views v = views_of(test, b, reinterpret_cast<std::byte*>(host.data()), {});
    reset_observer(v.min, v.max, v.num_batches);
  }
  return host;
}

template <class Body>
void with_plan(const Case& test, Device device, const Body& body) {
  if (test.forward)
    body(FakeQuantizePlan::select(device, test.descriptor), [](const Views& v) {
      return FakeQuantize::Args{v.x, v.y, v.scale, v.zero, v.mask, v.min, v.max, v.num_batches};
    });
  else
    body(FakeQuantizeBackwardPlan::select(device, test.descriptor),
         [](const Views& v) { return FakeQuantizeBackward::Args{v.x, v.mask, v.dy, v.scale, v.zero, v.y}; });
}

}  // namespace

bool run_fake_quantize_bench(const std::string& filter, nlohmann::json& results) {
  const Timer timer;
  const std::vector<Case> cases = make_cases();
  int64_t most = 0;
  for (const Case& test : cases) most = std::max(most, buffers_of(test).end);
  std::vector<Memory> memories;
  for (int i = 0; i < kSets; ++i) memories.emplace_back(kCuda, most);
  const Memory workspace(kCuda, int64_t{64} << 20);
  bool passed = true;
  results = nlohmann::json::array();
  fmt::print("\nfake quantization [{}, {}]\n{:<48} {:>9} {:>8} {:>8}\n", kRows, kCols, "", "us", "GB/s",
             "of move");
  for (const Case& test : cases) {
    if (test.name.find(filter) == std::string::npos) continue;
    const Buffers b = buffers_of(test);
    std::vector<uint8_t> host = make_memory(test, b);
    std::vector<Move> moves;
    for (const Memory& memory : memories) {
      copy(kCuda, memory.data(), host.data(), b.end);
      moves.push_back({memory.data(), memory.data() + b.y});
    }
    double us = 0;
    std::string kernel;
    bool correct = false;
    with_plan(test, kCuda, [&](const auto& plan, const auto& args_of) {
      std::vector<decltype(args_of(Views{}))> args;
      for (const Memory& memory : memories) args.push_back(args_of(views_of(test, b, memory.data(), kCuda)));
      kernel = plan.sku().kernel;
      us = timer.time([&](int i) { plan.run(nullptr, workspace.data(), args[static_cast<size_t>(i)]); });
      // Once more from the start, where the state of an observer is that of the CPU.
      copy(kCuda, memories[0].data(), host.data(), b.end);
      plan.run(nullptr, workspace.data(), args[0]);
    });
    with_plan(test, Device{}, [&](const auto& plan, const auto& args_of) {
      alignas(16) QuantizeStatus status;
      plan.run(nullptr, &status, args_of(views_of(test, b, reinterpret_cast<std::byte*>(host.data()), {})));
      correct = download(memories[0].data(), b.end) == host;
    });
    const double move_us = time_move(timer, moves, b.read_bytes / 16 * 16, b.write_bytes / 16 * 16);
    const double ratio = move_us / us, gbs = 1e-3 * static_cast<double>(b.read_bytes + b.write_bytes) / us;
    const bool good = correct && ratio >= test.target;
    passed = passed && good;
    fmt::print("{:<48} {:>9.1f} {:>8.0f} {:>8.3f}  {:<16} {}\n", test.name, us, gbs, ratio, kernel,
               !correct           ? "WRONG OUTPUT"
               : test.target == 0 ? ""
               : good             ? fmt::format("pass {}", test.target)
                                  : fmt::format("BELOW {}", test.target));
    std::fflush(stdout);
    results.push_back({{"case", test.name},
                       {"kernel", kernel},
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
