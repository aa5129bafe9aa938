#include "bench/cuda_affine_bench.h"

#include <nlohmann/json.hpp>

#include "bench/cuda_timing.h"
#include "halfbyte/affine_qdq.hpp"

namespace halfbyte::bench {
namespace {

constexpr int64_t kRows = 8192, kCols = 8192;
constexpr double kTarget = 0.9;  // of a kernel that only moves the same bytes
enum class Op { init, forward, backward };

struct Case {
  std::string name;
  Op op;
  AffineQdqDescriptor descriptor;
  double target;  // 0: for information
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  const auto add = [&](Op op, DType dtype, int bits, bool packed, int64_t group_size, double target,
                       bool adam = false) {
    AffineQdqDescriptor d;
    d.rows = kRows;
    d.cols = kCols;
    d.bits = bits;
    d.packed = packed;
    d.group_size = group_size;
    d.dtype = dtype;
    d.adam = adam;
    constexpr const char* kNames[] = {"init", "forward", "backward"};
    cases.push_back(
        {fmt::format("affine {} {} u{}{} group {}{}", kNames[static_cast<int>(op)], to_string(dtype), bits,
                     packed ? "" : " in bytes", group_size, adam ? " adam" : ""),
         op, d, target});
  };
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const Op op : {Op::forward, Op::backward})
      for (const bool packed : {true, false})
        for (const int64_t group_size : {32, 64, 128}) add(op, dtype, 4, packed, group_size, kTarget);
    for (const int64_t group_size : {16, 256, 1024, 100, 8192})
      add(Op::backward, dtype, 4, true, group_size, 0);
    for (const int bits : {2, 3, 5, 6, 8}) add(Op::backward, dtype, bits, true, 64, 0);
    add(Op::backward, dtype, 4, true, 64, 0, true);
    add(Op::backward, dtype, 4, false, 64, 0, true);
    add(Op::init, dtype, 4, true, 64, 0);
  }
  return cases;
}

// The arrays of one run, one behind the other, so that a kernel that only moves bytes can have the same.
struct Buffers {
  static constexpr int kParameters = 8;  // scales, biases, four moments, two gradients
  int64_t dense = 0, codes = 0, parameters[kParameters] = {}, end = 0;
  int64_t from = 0, read_bytes = 0, to = 0, write_bytes = 0;
};
Buffers buffers_of(const Case& test) {
  const AffineQdqDescriptor& d = test.descriptor;
  const int64_t dense = d.rows * d.cols * size_of(d.dtype),
                codes = contiguous_bytes(DType::u8, d.code_shape()),
                parameter = contiguous_bytes(DType::f32, d.scale_shape());
  Buffers b;
  int64_t at = 0;
  const auto place = [&](int64_t num_bytes) {
    const int64_t begin = at;
    at += (num_bytes + 255) / 256 * 256;
    return begin;
  };
  b.dense = place(dense);
  b.codes = place(codes);
  for (int64_t& begin : b.parameters) begin = place(parameter);
  b.end = at;
  switch (test.op) {
    case Op::init:
      b.read_bytes = dense;
      b.to = b.codes;
      b.write_bytes = codes + 2 * parameter;
      break;
    case Op::forward:
      b.from = b.codes;
      b.read_bytes = codes + 2 * parameter;
      b.write_bytes = dense;
      break;
    case Op::backward:
      b.read_bytes = dense + codes + (d.adam ? 6 * parameter : 0);
      b.to = b.parameters[d.adam ? 0 : 6];
      b.write_bytes = (d.adam ? 6 : 2) * parameter;
      break;
  }
  return b;
}

template <class Body>
void with_plan(const Case& test, const Buffers& b, std::byte* data, Device device, const Body& body) {
  const AffineQdqDescriptor& d = test.descriptor;
  const TensorView dense{data + b.dense, d.dtype, {d.rows, d.cols}, {}, device},
      codes{data + b.codes, DType::u8, d.code_shape(), {}, device};
  TensorView parameters[Buffers::kParameters];
  for (int i = 0; i < Buffers::kParameters; ++i)
    parameters[i] = {data + b.parameters[i], DType::f32, d.scale_shape(), {}, device};
  AffineQdqBackward::Args backward;
  switch (test.op) {
    case Op::init:
      return body(AffineInitPlan::select(device, d),
                  AffineInit::Args{dense, codes, parameters[0], parameters[1]});
    case Op::forward:
      return body(AffineQdqPlan::select(device, d),
                  AffineQdq::Args{codes, parameters[0], parameters[1], dense});
    case Op::backward:
      break;
  }
  backward.codes = codes;
  backward.dy = dense;
  if (d.adam) {
    TensorView* const to[] = {&backward.scales,  &backward.biases, &backward.scale_m,
                              &backward.scale_v, &backward.bias_m, &backward.bias_v};
    for (size_t i = 0; i < 6; ++i) *to[i] = parameters[i];
  } else {
    backward.dscales = parameters[6];
    backward.dbiases = parameters[7];
  }
  body(AffineQdqBackwardPlan::select(device, d), backward);
}

// The whole result on the CPU equals that of the device after one run.
bool check(const Case& test, const Buffers& b, const std::vector<uint8_t>& before, const Memory& memory,
           void* workspace) {
  copy(kCuda, memory.data(), before.data(), b.end);
  with_plan(test, b, memory.data(), kCuda,
            [&](const auto& plan, const auto& args) { plan.run(nullptr, workspace, args); });
  std::vector<uint8_t> expected = before;
  with_plan(test, b, reinterpret_cast<std::byte*>(expected.data()), {},
            [](const auto& plan, const auto& args) {
              alignas(16) std::array<uint8_t, 256> on_host;
              plan.run(nullptr, on_host.data(), args);
            });
  return download(memory.data(), b.end) == expected;
}

}  // namespace

bool run_affine_bench(const std::string& filter, nlohmann::json& results) {
  const Timer timer;
  const std::vector<Case> cases = make_cases();
  int64_t most = 0;
  for (const Case& test : cases) most = std::max(most, buffers_of(test).end);
  std::vector<Memory> memories;
  for (int i = 0; i < kSets; ++i) memories.emplace_back(kCuda, most);
  const Memory workspace(kCuda, 256);
  bool passed = true;
  results = nlohmann::json::array();
  fmt::print("\naffine [{}, {}]\n{:<48} {:>9} {:>8} {:>8}\n", kRows, kCols, "", "us", "GB/s", "of move");
  for (const Case& test : cases) {
    if (test.name.find(filter) == std::string::npos) continue;
    const Buffers b = buffers_of(test);
    std::vector<uint8_t> host(static_cast<size_t>(b.end), kPoison);
    const std::vector<uint8_t> pool = make_pool(test.descriptor.dtype);
    for (int64_t at = b.dense; at < b.codes; at += static_cast<int64_t>(pool.size()))
      std::copy_n(pool.begin(), std::min<int64_t>(static_cast<int64_t>(pool.size()), b.codes - at),
                  host.begin() + at);
    std::mt19937_64 random(2);
    for (int64_t at = b.codes; at < b.parameters[0]; at += 8) {
      const uint64_t word = random();
      std::memcpy(host.data() + at, &word, 8);
    }
    for (int64_t at = b.parameters[0]; at < b.parameters[6]; at += 4) {
      const float value = 0.0005f * static_cast<float>(1 + random() % 1000 * 0.001);
      std::memcpy(host.data() + at, &value, 4);
    }
    for (const Memory& memory : memories) copy(kCuda, memory.data(), host.data(), b.end);
    cuda::synchronize(nullptr);
    std::vector<Move> moves;
    for (const Memory& memory : memories) moves.push_back({memory.data() + b.from, memory.data() + b.to});
    double us = 0;
    std::string kernel;
    with_plan(test, b, memories[0].data(), kCuda, [&](const auto& plan, const auto& first) {
      std::vector<std::decay_t<decltype(first)>> args = {first};
      for (size_t i = 1; i < kSets; ++i)
        with_plan(test, b, memories[i].data(), kCuda, [&](const auto&, const auto& more) {
          if constexpr (std::is_same_v<std::decay_t<decltype(more)>, std::decay_t<decltype(first)>>)
            args.push_back(more);
        });
      kernel = plan.sku().kernel;
      us = timer.time([&](int i) { plan.run(nullptr, workspace.data(), args[static_cast<size_t>(i)]); });
    });
    const bool correct = check(test, b, host, memories[0], workspace.data());
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
