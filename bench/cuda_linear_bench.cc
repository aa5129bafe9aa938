#include "bench/cuda_linear_bench.h"

#include <chrono>
#include <nlohmann/json.hpp>

#include "bench/cuda_timing.h"
#include "halfbyte/quantize_linear.hpp"

namespace halfbyte::bench {
namespace {

constexpr int64_t kRows = 8192, kCols = 8192;
constexpr double kTarget = 0.9;  // of a kernel that only moves the same bytes
constexpr double kMaxRunUs = 5;  // of the host, for a run
enum class Op { quantize, compute, dequantize, backward };

struct Case {
  std::string name;
  Op op;
  LinearDescriptor descriptor;
  double target;  // 0: for information
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  const std::vector<int64_t> shape = {kRows, kCols};
  const auto add = [&](Op op, const std::string& name, LinearDescriptor d, DType code, bool asymmetric,
                       double target, DType dtype = DType::bf16) {
    d.dtype = dtype;
    d.code_dtype = code;
    if (code == DType::u8) d.q_min = 0, d.q_max = 255;
    if (code == DType::i4) d.q_min = -8, d.q_max = 7;
    if (asymmetric) d.zero_point_dtype = op == Op::backward ? DType::i32 : code;
    d.computed = op == Op::compute;
    constexpr const char* kNames[] = {"quantize", "quantize computed", "dequantize", "backward"};
    cases.push_back({fmt::format("{} {} {}{}{}", kNames[static_cast<int>(op)], name, to_string(code),
                                 asymmetric ? " zero point" : "",
                                 dtype == DType::bf16 ? "" : fmt::format(" {}", to_string(dtype))),
                     op, d, target});
  };
  const auto tensor = LinearDescriptor::per_tensor(shape), channel = LinearDescriptor::per_channel(shape, 0),
             column = LinearDescriptor::per_channel(shape, 1), group = LinearDescriptor::per_group(shape, 64),
             group128 = LinearDescriptor::per_group(shape, 128),
             rows = LinearDescriptor::per_group(shape, 64, 0), token = LinearDescriptor::per_token(shape);
  for (const Op op : {Op::quantize, Op::dequantize, Op::backward})
    for (const bool asymmetric : {false, true}) {
      const DType code = asymmetric ? DType::u8 : DType::i8;
      add(op, "tensor", tensor, code, asymmetric, kTarget);
      add(op, "channel", channel, code, asymmetric, kTarget);
      add(op, "group 64", group, code, asymmetric, kTarget);
      add(op, "channel axis 1", column, code, asymmetric, 0);
      add(op, "group 64 axis 0", rows, code, asymmetric, 0);
      if (op == Op::backward) continue;
      add(op, "group 64", group, DType::i4, asymmetric, 0);
    }
  for (const bool asymmetric : {false, true}) {
    const DType code = asymmetric ? DType::u8 : DType::i8;
    add(Op::compute, "group 64", group, code, asymmetric, kTarget);
    add(Op::compute, "group 128", group128, code, asymmetric, kTarget);
    add(Op::compute, "token", token, code, asymmetric, kTarget);
    add(Op::compute, "tensor", tensor, code, asymmetric, 0);
    add(Op::compute, "channel axis 1", column, code, asymmetric, 0);
    add(Op::compute, "group 64 axis 0", rows, code, asymmetric, 0);
  }
  add(Op::compute, "group 64", group, DType::i4, false, 0);
  add(Op::quantize, "tensor", tensor, DType::i8, false, 0, DType::f32);
  add(Op::compute, "token", token, DType::i8, false, 0, DType::f32);
  add(Op::quantize, "tensor", tensor, DType::i8, false, 0, DType::f64);
  return cases;
}

// The arrays of one run, one behind the other, so that a kernel that only moves bytes can have the same.
struct Buffers {
  int64_t x = 0, dy = 0, codes = 0, scale = 0, zero = 0, y = 0, end = 0;
  int64_t read_bytes = 0, write_bytes = 0;
};
Buffers buffers_of(const Case& test) {
  const LinearDescriptor& d = test.descriptor;
  const int64_t dense = contiguous_bytes(d.dtype, d.shape), codes = contiguous_bytes(d.code_dtype, d.shape),
                scales = contiguous_bytes(d.scale_dtype, d.scale_shape()),
                zeros = d.zero_point_dtype ? contiguous_bytes(*d.zero_point_dtype, d.scale_shape()) : 0;
  Buffers b;
  int64_t at = 0;
  const auto place = [&](int64_t num_bytes) {
    const int64_t begin = at;
    at += (num_bytes + 255) / 256 * 256;
    return begin;
  };
  const bool backward = test.op == Op::backward, decodes = test.op == Op::dequantize;
  b.x = place(decodes ? 0 : dense);
  b.dy = place(backward ? dense : 0);  // right behind x
  b.y = place(backward || decodes ? dense : 0);
  b.codes = place(backward ? 0 : codes);
  b.scale = place(scales);
  b.zero = place(zeros);
  b.end = at;
  switch (test.op) {
    case Op::quantize:
      b.read_bytes = dense + scales + zeros;
      b.write_bytes = codes;
      break;
    case Op::compute:
      b.read_bytes = dense;
      b.write_bytes = codes + scales + zeros;
      break;
    case Op::dequantize:
      b.read_bytes = codes + scales + zeros;
      b.write_bytes = dense;
      break;
    case Op::backward:
      b.read_bytes = 2 * dense + scales + zeros;
      b.write_bytes = dense;
      break;
  }
  return b;
}

// The views of a run in memory at `data`.
struct Views {
  TensorView x, dy, codes, scale, zero, y;
};
Views views_of(const Case& test, const Buffers& b, std::byte* data, Device device, int64_t rows) {
  LinearDescriptor d = test.descriptor;
  d.shape[0] = rows;
  const auto view = [&](int64_t at, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{data + at, dtype, shape, {}, device};
  };
  Views v{view(b.x, d.dtype, d.shape),
          view(b.dy, d.dtype, d.shape),
          view(b.codes, d.code_dtype, d.shape),
          view(b.scale, d.scale_dtype, d.scale_shape()),
          {},
          view(b.y, d.dtype, d.shape)};
  if (d.zero_point_dtype) v.zero = view(b.zero, *d.zero_point_dtype, d.scale_shape());
  return v;
}

template <class Body>
void with_plan(const Case& test, Device device, const Views& v, const Body& body) {
  if (test.op == Op::dequantize)
    body(DequantizeLinearPlan::select(device, test.descriptor),
         DequantizeLinear::Args{v.codes, v.scale, v.zero, v.y});
  else if (test.op == Op::backward)
    body(QuantizeLinearBackwardPlan::select(device, test.descriptor),
         QuantizeLinearBackward::Args{v.x, v.dy, v.scale, v.zero, v.y});
  else
    body(QuantizeLinearPlan::select(device, test.descriptor),
         QuantizeLinear::Args{v.x, v.codes, v.scale, v.zero});
}

// The whole result on the CPU equals that of the device.
bool check(const Case& test, const Buffers& b, const std::vector<uint8_t>& before, const Memory& memory) {
  std::vector<uint8_t> expected = before;
  const Views views = views_of(test, b, reinterpret_cast<std::byte*>(expected.data()), {}, kRows);
  with_plan(test, Device{}, views, [](const auto& plan, const auto& args) {
    alignas(16) QuantizeStatus workspace;
    plan.run(nullptr, &workspace, args);
  });
  return download(memory.data(), b.end) == expected;
}

}  // namespace

bool run_linear_bench(const std::string& filter, nlohmann::json& results) {
  const Timer timer;
  const std::vector<Case> cases = make_cases();
  int64_t most = 0;
  for (const Case& test : cases) most = std::max(most, buffers_of(test).end);
  std::vector<Memory> memories;
  for (int i = 0; i < kSets; ++i) memories.emplace_back(kCuda, most);
  const Memory workspace(kCuda, int64_t{64} << 20);
  bool passed = true;
  results = nlohmann::json::array();
  fmt::print("\nlinear [{}, {}]\n{:<48} {:>9} {:>8} {:>8}\n", kRows, kCols, "", "us", "GB/s", "of move");
  for (const Case& test : cases) {
    if (test.name.find(filter) == std::string::npos) continue;
    const Buffers b = buffers_of(test);
    const LinearDescriptor& d = test.descriptor;
    // Everything is poisoned but what is read.
    std::vector<uint8_t> host(static_cast<size_t>(b.end), kPoison);
    const std::vector<uint8_t> pool = make_pool(d.dtype);
    for (int64_t at = b.x; at < b.y; at += static_cast<int64_t>(pool.size()))
      std::copy_n(pool.begin(), std::min<int64_t>(static_cast<int64_t>(pool.size()), b.y - at),
                  host.begin() + at);
    std::mt19937_64 random(2);
    if (test.op == Op::dequantize)
      for (int64_t at = b.codes; at < b.scale; at += 8) {
        const uint64_t word = random();
        std::memcpy(host.data() + at, &word, 8);
      }
    if (test.op != Op::compute) {
      for (int64_t at = b.scale; at < b.zero; at += 4) {
        const float scale = 0.0005f * static_cast<float>(1 + random() % 1000 * 0.001);
        std::memcpy(host.data() + at, &scale, 4);
      }
      const int64_t zero_size = d.zero_point_dtype == DType::i32 ? 4 : 1;
      for (int64_t at = b.zero; at < b.end; ++at) host[static_cast<size_t>(at)] = 0;
      for (int64_t at = b.zero; at < b.end; at += zero_size)
        host[static_cast<size_t>(at)] = static_cast<uint8_t>(112 + random() % 32);
    }
    copy(kCuda, memories[0].data(), host.data(), b.end);
    for (size_t i = 1; i < kSets; ++i) copy(kCuda, memories[i].data(), memories[0].data(), b.end);
    cuda::synchronize(nullptr);
    std::vector<Move> moves;
    for (const Memory& memory : memories) {
      // Read from x (and dy behind it) or from the codes; written where the operation writes.
      const int64_t from = test.op == Op::dequantize ? b.codes : b.x;
      const int64_t to = test.op == Op::dequantize || test.op == Op::backward ? b.y : b.codes;
      moves.push_back({memory.data() + from, memory.data() + to});
    }
    double us = 0;
    std::string kernel;
    const Views views = views_of(test, b, memories[0].data(), kCuda, kRows);
    with_plan(test, kCuda, views, [&](const auto& plan, const auto& first) {
      std::vector<std::decay_t<decltype(first)>> args = {first};
      for (int i = 1; i < kSets; ++i)
        with_plan(test, kCuda, views_of(test, b, memories[static_cast<size_t>(i)].data(), kCuda, kRows),
                  [&](const auto&, const auto& more) {
                    if constexpr (std::is_same_v<std::decay_t<decltype(more)>, std::decay_t<decltype(first)>>)
                      args.push_back(more);
                  });
      kernel = plan.sku().kernel;
      us = timer.time([&](int i) { plan.run(nullptr, workspace.data(), args[static_cast<size_t>(i)]); });
    });
    const bool correct = check(test, b, host, memories[0]);
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
  // The time of the host for a run, where the device has little to do.
  Case small{"run", Op::quantize, LinearDescriptor::per_tensor({64}), 0};
  small.descriptor.dtype = DType::bf16;
  small.descriptor.zero_point_dtype = DType::i32;
  const Views views = views_of(small, buffers_of(small), memories[0].data(), kCuda, 64);
  with_plan(small, kCuda, views, [&](const auto& plan, const auto& args) {
    constexpr int kRuns = 500;
    double best = INFINITY;
    for (int round = 0; round < 20; ++round) {
      cuda::synchronize(nullptr);
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kRuns; ++i) plan.run(nullptr, workspace.data(), args);
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    cuda::synchronize(nullptr);
    const double us = 1e6 * best / kRuns;
    passed = passed && us <= kMaxRunUs;
    fmt::print("host time of a run {:.2f} us, limit {} us: {}\n", us, kMaxRunUs,
               us <= kMaxRunUs ? "pass" : "FAIL");
    results.push_back(
        {{"case", "host time of a run"}, {"us", us}, {"limit_us", kMaxRunUs}, {"passed", us <= kMaxRunUs}});
  });
  return passed;
}

}  // namespace halfbyte::bench
