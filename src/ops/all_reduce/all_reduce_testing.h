// Groups under test, on the CPU and on CUDA devices: a thread for each member.
#pragma once

#include <functional>
#include <random>
#include <thread>

#include "halfbyte/qgemm_parallel.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

// Runs `body` for each member, and returns what it threw: "" where nothing.
inline std::vector<std::string> run_members(std::span<const Communicator> members,
                                            const std::function<void(const Communicator&)>& body) {
  std::vector<std::string> errors(members.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < members.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        body(members[i]);
      } catch (const Error& error) {
        errors[i] = std::string(to_string(error.code())) + ": " + error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline Values values_of(std::span<const float> list, DType dtype) {
  Values values;
  values.dtype = dtype;
  for (const float value : list) values.push_back(value);
  return values;
}
inline std::vector<uint8_t> encoded(std::span<const float> list, DType dtype) {
  return values_of(list, dtype).bytes;
}

// Bytes on a device, `offset` bytes behind a multiple of 256, and back.
inline Memory on_device(std::span<const uint8_t> bytes, Device device, int64_t offset, const Stream& stream) {
  Memory memory(device, offset + static_cast<int64_t>(bytes.size()) + 1);
  copy(device, memory.data() + offset, bytes.data(), static_cast<int64_t>(bytes.size()), stream.handle());
  stream.synchronize();
  return memory;
}
inline std::vector<uint8_t> on_host(const void* from, size_t num_bytes, Device device, const Stream& stream) {
  std::vector<uint8_t> bytes(num_bytes);
  copy(device, bytes.data(), from, static_cast<int64_t>(num_bytes), stream.handle());
  stream.synchronize();
  return bytes;
}

// Random values of all members, of `count` elements: every one gets the sum, of f32 in the order of ranks and
// rounded once. `exact`: of small integers, which every order gives.
inline void expect_sum(std::span<const Communicator> members, DType dtype, int64_t count, int64_t offset,
                       uint64_t seed, bool exact = false) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::vector<uint8_t>> inputs;
  std::vector<float> sums;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = exact ? static_cast<float>(random() % 15) - 7 : normal(random);
    const Values input = values_of(values, dtype);
    inputs.push_back(input.bytes);
    sums.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<float>(input.exact[i]);
      sums[i] = rank == 0 ? value : sums[i] + value;
    }
  }
  const std::vector<uint8_t> expected = encoded(sums, dtype);
  std::vector<std::vector<uint8_t>> actual(members.size());
  const auto errors = run_members(members, [&](const Communicator& member) {
    const Stream stream(member.device());
    const auto rank = static_cast<size_t>(member.rank());
    const Memory memory = on_device(inputs[rank], member.device(), offset, stream);
    std::byte* const x = memory.data() + offset;
    member.all_reduce({x, dtype, {count}, {}, member.device()}, stream.handle());
    actual[rank] = on_host(x, expected.size(), member.device(), stream);
  });
  for (size_t rank = 0; rank < members.size(); ++rank) {
    EXPECT_EQ(errors[rank], "");
    EXPECT_TRUE(actual[rank] == expected)
        << to_string(dtype) << " of " << count << " at " << offset << ", member " << rank;
  }
}

// A product of integers with a weight of integers, whose every sum is exact: that of one device, from parts.
struct ParallelCase {
  QgemmDescriptor whole;
  std::vector<float> weight, x, bias, before;  // before: y, with accumulate

  ParallelCase(QgemmDescriptor d, uint64_t seed) : whole(std::move(d)) {
    std::mt19937_64 random(seed);
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      values.resize(static_cast<size_t>(count));
      for (float& value : values) value = static_cast<float>(random() % 7) - 3;
    };
    fill(weight, whole.n * whole.k);
    for (size_t i = 0; i < weight.size(); i += 16) weight[i] = 7;  // absmax: a scale of 1
    fill(x, whole.m * (whole.transposed ? whole.n : whole.k));
    if (whole.bias) fill(bias, whole.n);
    if (whole.accumulate) fill(before, whole.m * out_cols());
  }
  int64_t in_cols() const { return whole.transposed ? whole.n : whole.k; }
  int64_t out_cols() const { return whole.transposed ? whole.k : whole.n; }

  std::vector<float> expected() const {
    std::vector<float> y = before;
    y.resize(static_cast<size_t>(whole.m * out_cols()));
    for (int64_t row = 0; row < whole.m; ++row)
      for (int64_t n = 0; n < whole.n; ++n)
        for (int64_t k = 0; k < whole.k; ++k) {
          const float w = weight[static_cast<size_t>(n * whole.k + k)];
          const int64_t in = whole.transposed ? n : k, out = whole.transposed ? k : n;
          y[static_cast<size_t>(row * out_cols() + out)] += w * x[static_cast<size_t>(row * in_cols() + in)];
        }
    if (whole.bias)
      for (size_t i = 0; i < y.size(); ++i) y[i] += bias[i % static_cast<size_t>(whole.n)];
    return y;
  }

  static std::vector<float> columns(const std::vector<float>& values, int64_t cols, const Slice& slice) {
    std::vector<float> result;
    for (size_t row = 0; row < values.size(); row += static_cast<size_t>(cols))
      result.insert(result.end(), values.begin() + static_cast<int64_t>(row) + slice.begin,
                    values.begin() + static_cast<int64_t>(row) + slice.end);
    return result;
  }

  // What each member's y is: all of it where members sum, else its columns.
  void run(std::span<const Communicator> members, ParallelStyle style) const {
    std::vector<float> values = weight;
    const QuantizedTensor quantized = quantize({values.data(), DType::f32, {whole.n, whole.k}}, whole.spec,
                                               {.scale_rule = ScaleRule::absmax});
    const std::vector<float> y = expected();
    const DType dtype = whole.dtype;
    const auto errors = run_members(members, [&](const Communicator& member) {
      const Device device = member.device();
      const Stream stream(device);
      const int axis = style == ParallelStyle::rowwise ? 1 : 0;
      const Slice slice =
          part_of(axis, axis == 1 ? whole.k : whole.n, axis == 1 ? 32 : 1, member.rank(), member.size());
      QgemmDescriptor d = whole;
      (axis == 1 ? d.k : d.n) = slice.end - slice.begin;
      const auto plan = ParallelQgemmPlan::select(member, d, style, {1});
      const bool sums = (style == ParallelStyle::rowwise) != whole.transposed;
      EXPECT_EQ(plan.sums(), sums && member.size() > 1);
      EXPECT_EQ(plan.descriptor(), d);
      const PackedTensor packed = quantized.slice(slice).pack().to(device, stream.handle());
      const std::vector<float> own_x = sums ? columns(x, in_cols(), slice) : x;
      const std::vector<float> own_bias = sums || bias.empty() ? bias : columns(bias, whole.n, slice);
      const std::vector<float> own_before = sums ? before : columns(before, out_cols(), slice);
      const std::vector<float> own_y = sums ? y : columns(y, out_cols(), slice);
      const Memory on_x = on_device(encoded(own_x, dtype), device, 0, stream);
      const Memory on_bias = on_device(encoded(own_bias, dtype), device, 0, stream);
      const std::vector<float> poison(own_y.size(), std::numeric_limits<float>::quiet_NaN());
      const Memory on_y =
          on_device(encoded(whole.accumulate ? own_before : poison, dtype), device, 0, stream);
      const Memory workspace(device, plan.workspace_size());
      const auto out = static_cast<int64_t>(own_y.size()) / whole.m;
      Qgemm::Args args{.weight = packed.view()};
      args.x = {on_x.data(), dtype, {whole.m, static_cast<int64_t>(own_x.size()) / whole.m}, {}, device};
      args.y = {on_y.data(), dtype, {whole.m, out}, {}, device};
      if (whole.bias)
        args.bias = {on_bias.data(), dtype, {static_cast<int64_t>(own_bias.size())}, {}, device};
      plan.run(stream.handle(), workspace, args);
      const std::vector<uint8_t> bytes = encoded(own_y, dtype);
      EXPECT_TRUE(on_host(on_y.data(), bytes.size(), device, stream) == bytes)
          << to_string(style) << (whole.transposed ? " transposed" : "") << ", member " << member.rank();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
};

inline void expect_parallel_products(std::span<const Communicator> members, std::span<const int64_t> rows) {
  const QuantSpec spec{.format = Format::int4, .group_size = 32};
  uint64_t seed = 1;
  for (const int64_t m : rows)
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool transposed : {false, true})
        for (const bool adds : {false, true})
          for (const ParallelStyle style : {ParallelStyle::colwise, ParallelStyle::rowwise}) {
            QgemmDescriptor d{.spec = spec, .m = m, .n = 101, .k = 7 * 32, .transposed = transposed};
            d.dtype = dtype;
            d.bias = adds && !transposed;
            d.accumulate = adds;
            ParallelCase test(d, ++seed);
            if (dtype == DType::bf16)  // sums stay below 256
              for (float& value : test.x) value = value > 1 ? 1.0f : 0.0f;
            test.run(members, style);
          }
}

}  // namespace halfbyte::testing
