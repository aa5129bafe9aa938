// For the tests of ops on grouped tensors: random groups, tensors in poisoned memory, plans that run on them.
//
// A case of an op has `descriptor`, its tensors as Storage, all() of them in an order, kNames of these,
// text(); and there is run_case(test, memory, device, workspace, workspace_bytes, stream, preference), which
// runs it with the storages of all() at `memory`.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "halfbyte/plan.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

// A tensor in memory of its own, of which it need not use all.
struct Storage {
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr int64_t kGuard = 256;
  TensorView view;             // without data and device
  int64_t offset = 0;          // bytes before its first element
  std::vector<uint8_t> bytes;  // all, with what lies around it; none where the tensor has none

  Storage() = default;
  // Poison, `shift` bytes behind the guard.
  Storage(DType dtype, std::vector<int64_t> shape, int64_t shift = 0)
      : view{nullptr, dtype, std::move(shape), {}, {}} {
    allocate(contiguous_bytes(dtype, view.shape), shift);
  }
  Storage(DType dtype, std::vector<int64_t> shape, const void* data, int64_t shift = 0)
      : Storage(dtype, std::move(shape), shift) {
    if (!bytes.empty()) std::memcpy(this->data(), data, static_cast<size_t>(num_bytes()));
  }
  void allocate(int64_t num_bytes, int64_t shift) {
    offset = kGuard + shift;
    if (num_bytes > 0) bytes.assign(static_cast<size_t>(offset + num_bytes + kGuard), kPoison);
  }
  // From the first element to behind the last.
  int64_t num_bytes() const {
    return bytes.empty() ? 0 : static_cast<int64_t>(bytes.size()) - offset - kGuard;
  }
  uint8_t* data() { return bytes.empty() ? nullptr : bytes.data() + offset; }
  // `memory`: of all bytes.
  TensorView at(void* memory, Device device) const {
    TensorView result = view;
    result.device = device;
    result.data = bytes.empty() ? nullptr : static_cast<uint8_t*>(memory) + offset;
    return result;
  }
};

template <class Case>
auto host_memory(Case& test) {
  const auto all = test.all();
  std::array<void*, std::tuple_size_v<decltype(all)>> memory{};
  std::ranges::transform(all, memory.begin(), [](Storage* storage) { return storage->bytes.data(); });
  return memory;
}

template <class Op>
QuantizeStatus run_plan(const typename Op::Descriptor& descriptor, const typename Op::Args& args,
                        Device device, void* workspace, int64_t workspace_bytes, void* stream,
                        const PlanPreference& preference) {
  const auto plan = Plan<Op>::select(device, descriptor, preference);
  EXPECT_GT(plan.workspace_size(), 0);
  Memory own;
  if (workspace == nullptr) {
    own = Memory(device, plan.workspace_size());
    workspace = own.data();
    workspace_bytes = own.num_bytes();
  }
  EXPECT_LE(plan.workspace_size(), workspace_bytes);
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  plan.run(stream, {workspace, workspace_bytes}, args);
  return plan.status(stream, {workspace, workspace_bytes});
}
template <class Case>
QuantizeStatus run_on_cpu(Case& test, const PlanPreference& preference = {}) {
  return run_case(test, host_memory(test), Device{}, nullptr, 0, nullptr, preference);
}

// Every byte of every storage, with what lies around the tensors.
template <class Case>
::testing::AssertionResult same_tensors(Case& expected, Case& actual) {
  const auto want = expected.all(), got = actual.all();
  for (size_t i = 0; i < want.size(); ++i) {
    const auto &a = want[i]->bytes, &b = got[i]->bytes;
    if (a == b) continue;
    const auto differs = std::ranges::mismatch(a, b);
    return ::testing::AssertionFailure()
           << Case::kNames[i] << " differs at byte " << (differs.in1 - a.begin()) - want[i]->offset << "\n"
           << expected.text();
  }
  return ::testing::AssertionSuccess();
}

// What the random cases of all ops are made of.
class RandomCases {
 protected:
  explicit RandomCases(uint64_t seed) : random_(seed) {}

  template <class T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }
  Format pick_table() {
    static const std::vector<Format> tables = table_formats();
    return tables[random_() % tables.size()];
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  // A shape of at most about `most` elements, and groups of it.
  template <class Descriptor>
  void set_groups(Descriptor& d, int64_t most) {
    d.shape = shape(most);
    d.granularity = d.shape.empty() ? Granularity::tensor
                                    : pick({Granularity::tensor, Granularity::channel, Granularity::group});
    const int rank = static_cast<int>(d.shape.size());
    if (rank > 0) d.axis = static_cast<int>(below(2 * rank)) - rank;
    if (rank > 0 && random_() % 2) d.axis = -1;
    if (d.granularity == Granularity::group)
      d.group_size = pick<int64_t>(
          {1, 4, 7, 8, 16, 32, 64, 100, 128, 256, 1000, 1024, below(40) + 1, d.shape.back() + 1});
  }
  std::vector<int64_t> shape(int64_t most) {
    std::vector<int64_t> result(random_() % 5);
    int64_t left = most;
    for (int64_t& extent : result) {
      extent =
          pick<int64_t>({0, 1, 2, 3, 8, 16, 31, 32, 64, 72, 128, 200, 256, 1024, 3000, 4096, below(300) + 1});
      if (extent == 0 && random_() % 8) extent = 16;
      extent = std::min(extent, std::max<int64_t>(1, left));
      left /= std::max<int64_t>(1, extent);
    }
    std::shuffle(result.begin(), result.end(), random_);
    return result;
  }

  // Poison, at a multiple of `alignment` or 16.
  Storage storage(DType dtype, const std::vector<int64_t>& shape, int64_t alignment) {
    return {dtype, shape, alignment >= 16 ? 0 : alignment * below(3)};
  }
  static void put(Storage& storage, int64_t index, const Values& values) {
    std::ranges::copy(values.bytes, storage.data() + index * size_of(values.dtype));
  }
  static void put(Storage& storage, int64_t index, double value) {
    Values one;
    one.dtype = storage.view.dtype;
    one.push_back(value);
    put(storage, index, one);
  }
  // NaN and infinities, at `count` places of a contiguous tensor of n elements.
  void put_nonfinite(Storage& storage, int64_t n, int64_t count) {
    for (; count > 0; --count) put(storage, below(n), pick<double>({NAN, INFINITY, -INFINITY}));
  }

  // any: one that kernels do not like, or none at all.
  double scale(bool any) {
    const double usual =
        std::exp2(static_cast<double>(below(12)) - 12) * (1 + static_cast<double>(below(100)) / 100);
    if (any)
      return pick<double>(
          {usual, 0.0, -usual, NAN, INFINITY, usual * 1e-37, usual * 1e37, 1e-44, usual * 1e10});
    return random_() % 8 == 0 ? std::exp2(static_cast<double>(below(8)) - 8) : usual;
  }
  // Zero point number i of [q_min, q_max], i32 or learned; any: also others.
  void put_zero_point(Storage& storage, int64_t i, int q_min, int q_max, bool any) {
    const int64_t inside = q_min + below(q_max - q_min + 1);
    const bool wild = any && random_() % 4 == 0;
    if (storage.view.dtype == DType::i32) {
      const auto integer = wild ? static_cast<int32_t>(random_()) : static_cast<int32_t>(inside);
      std::memcpy(storage.data() + 4 * i, &integer, 4);
    } else {
      const double zero = static_cast<double>(inside) + static_cast<double>(below(65)) / 64 - 0.5;
      put(storage, i, wild ? pick<double>({NAN, INFINITY, -1e30, 1e3, zero}) : zero);
    }
  }

  std::mt19937_64 random_;
};

}  // namespace halfbyte::testing
