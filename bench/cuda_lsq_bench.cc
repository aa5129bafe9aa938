#include "bench/cuda_lsq_bench.h"

#include <nlohmann/json.hpp>

#include "bench/cuda_timing.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte::bench {
namespace {

using LearnedPlan = FakeQuantizeLearnedBackwardPlan;

constexpr int64_t kRows = 8192, kCols = 8192;
constexpr double kTarget = 0.9;  // of a kernel that only reads x and dy and writes dx

struct Case {
  std::string name;
  FakeQuantizeDescriptor descriptor;
  double target;  // 0: for information
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const char* const what : {"scale", "scale and zero point", "nf4"}) {
      const auto add = [&](const char* name, Granularity granularity, int axis, int64_t group_size,
                           double target) {
        FakeQuantizeDescriptor d;
        d.shape = {kRows, kCols};
        d.granularity = granularity;
        d.axis = axis;
        d.group_size = group_size;
        d.dtype = dtype;
        d.gradient_scale = 1e-3;
        if (std::string(what) == "nf4")
          d.format = Format::nf4;
        else if (std::string(what) != "scale")
          d.zero_point_dtype = DType::f32;
        cases.push_back(
            {fmt::format("lsq backward {} {} {}", name, to_string(dtype), what), d, d.format ? 0 : target});
      };
      add("tensor", Granularity::tensor, -1, 0, kTarget);
      add("channel", Granularity::channel, 0, 0, kTarget);
      add("group 64", Granularity::group, -1, 64, kTarget);
      add("channel axis 1", Granularity::channel, 1, 0, 0);
      add("group 64 axis 0", Granularity::group, 0, 64, 0);
    }
  return cases;
}

// The arrays of one run, one behind the other: x, dy, dx, scale, zero point and their gradients.
struct Buffers {
  int64_t dense, groups, scale, zero, dscale, dzero, end;
};
Buffers buffers_of(const FakeQuantizeDescriptor& d) {
  Buffers b{};
  b.dense = contiguous_bytes(d.dtype, d.shape);
  b.groups = contiguous_bytes(DType::f32, d.scale_shape());
  const int64_t padded = (b.groups + 255) / 256 * 256;
  b.scale = 3 * b.dense;
  b.zero = b.scale + padded;
  b.dscale = b.zero + padded;
  b.dzero = b.dscale + padded;
  b.end = b.dzero + padded;
  return b;
}
FakeQuantizeLearnedBackward::Args args_of(const FakeQuantizeDescriptor& d, const Buffers& b, std::byte* data,
                                          Device device) {
  const std::vector<int64_t> groups = d.scale_shape();
  const auto view = [&](int64_t at, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{data + at, dtype, shape, {}, device};
  };
  FakeQuantizeLearnedBackward::Args args{view(0, d.dtype, d.shape),
                                         view(b.dense, d.dtype, d.shape),
                                         view(b.scale, DType::f32, groups),
                                         {},
                                         view(2 * b.dense, d.dtype, d.shape),
                                         view(b.dscale, DType::f32, groups),
                                         {}};
  if (d.zero_point_dtype) {
    args.zero_point = view(b.zero, DType::f32, groups);
    args.dzero_point = view(b.dzero, DType::f32, groups);
  }
  return args;
}

}  // namespace

bool run_lsq_bench(const std::string& filter, nlohmann::json& results) {
  const Timer timer;
  const std::vector<Case> cases = make_cases();
  int64_t most = 0;
  for (const Case& test : cases) most = std::max(most, buffers_of(test.descriptor).end);
  std::vector<Memory> memories;
  for (int i = 0; i < kSets; ++i) memories.emplace_back(kCuda, most);
  const Memory workspace(kCuda, int64_t{64} << 20);
  bool passed = true;
  results = nlohmann::json::array();
  fmt::print("\nlearned scales [{}, {}]\n{:<48} {:>9} {:>8} {:>8}\n", kRows, kCols, "", "us", "GB/s",
             "of move");
  for (const Case& test : cases) {
    if (test.name.find(filter) == std::string::npos) continue;
    const FakeQuantizeDescriptor& d = test.descriptor;
    const Buffers b = buffers_of(d);
    const std::vector<uint8_t> pool = make_pool(d.dtype);
    std::vector<uint8_t> host(static_cast<size_t>(b.end), kPoison);
    for (int64_t at = 0; at < 2 * b.dense; at += static_cast<int64_t>(pool.size()))
      std::copy_n(pool.begin(), std::min<int64_t>(static_cast<int64_t>(pool.size()), 2 * b.dense - at),
                  host.begin() + at);
    std::mt19937_64 random(2);
    for (int64_t i = 0; i < b.groups / 4; ++i) {
      const float scale = (d.format ? 0.05f : 0.005f) * static_cast<float>(1 + random() % 1000 * 0.001);
      const float zero = -2 + static_cast<float>(random() % 100) * 0.03f;
      std::memcpy(host.data() + b.scale + 4 * i, &scale, 4);
      std::memcpy(host.data() + b.zero + 4 * i, &zero, 4);
    }
    std::vector<FakeQuantizeLearnedBackward::Args> args;
    std::vector<Move> moves;
    for (const Memory& memory : memories) {
      copy(kCuda, memory.data(), host.data(), b.end);
      args.push_back(args_of(d, b, memory.data(), kCuda));
      moves.push_back({memory.data(), memory.data() + 2 * b.dense});
    }
    cuda::synchronize(nullptr);
    const auto plan = LearnedPlan::select(kCuda, d);
    const double us =
        timer.time([&](int i) { plan.run(nullptr, workspace.data(), args[static_cast<size_t>(i)]); });
    alignas(16) QuantizeStatus status;
    LearnedPlan::select({}, d).run(nullptr, &status,
                                   args_of(d, b, reinterpret_cast<std::byte*>(host.data()), {}));
    const bool correct = download(memories[0].data(), b.end) == host;
    // Parameters and their gradients lie behind x, dy and behind dx.
    const int64_t params = (d.zero_point_dtype ? 2 : 1) * (b.groups / 16 * 16);
    const int64_t read = 2 * b.dense + params, written = b.dense + params;
    const double move_us = time_move(timer, moves, read, written);
    const double ratio = move_us / us, gbs = 1e-3 * static_cast<double>(read + written) / us;
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
