// For the benchmarks of the ops: buffers and the ceilings they are compared with, in the same process.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>

#include "cpu/parallel.h"
#include "halfbyte/ops.hpp"

namespace halfbyte::bench {

// Large against every cache, as the weights of a model are: 1 GiB of bf16.
inline constexpr int64_t kRows = 65536, kCols = 8192;

struct FreeDelete {
  void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<uint8_t[], FreeDelete>;
// 64-byte aligned; every page touched.
inline Buffer make_buffer(int64_t num_bytes) {
  Buffer buffer(
      static_cast<uint8_t*>(::operator new[](static_cast<size_t>(num_bytes), std::align_val_t(64))));
  for (int64_t i = 0; i < num_bytes; i += 4096) buffer[static_cast<size_t>(i)] = 1;
  return buffer;
}
// n values of f32 in [-0.1, 0.1].
inline void fill_floats(uint8_t* bytes, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    reinterpret_cast<float*>(bytes)[i] = static_cast<float>((i * 2654435761) % 4001 - 2000) * 0.00005f;
}
// Normal weights in bf16, from a pool so that filling a gigabyte is quick.
inline void fill_weights(uint8_t* bytes, int64_t num_values) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  constexpr int64_t kPool = 1 << 20;
  auto* out = reinterpret_cast<uint16_t*>(bytes);
  for (int64_t i = 0; i < std::min(kPool, num_values); ++i) {
    const float v = normal(random);
    out[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, v) >> 16);
  }
  for (int64_t i = kPool; i < num_values; ++i) out[i] = out[i - kPool + (i >> 20)];
}

// Bare loops over memory on `threads` threads: the ceilings.
void bare_read(const uint8_t* from, int64_t num_bytes, int threads);
// Reads `read_bytes` and writes `write_bytes` past the caches, evenly interleaved.
void bare_move(const uint8_t* from, int64_t read_bytes, uint8_t* to, int64_t write_bytes, int threads);

// Times `op` in turn with a copy of the same bytes: a bare move of what it reads and writes. The counter
// of_copy is the best time of the copy by the best of the op.
template <class Op>
void beside_copy(benchmark::State& state, int64_t read_bytes, int64_t write_bytes, int threads,
                 const Op& op) {
  const auto seconds = [](const auto& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const Buffer from = make_buffer(read_bytes), to = make_buffer(write_bytes);
  double ours = 1e9, copy = 1e9;
  for (auto _ : state) {
    const double time = seconds(op);
    state.SetIterationTime(time);
    ours = std::min(ours, time);
    copy =
        std::min(copy, seconds([&] { bare_move(from.get(), read_bytes, to.get(), write_bytes, threads); }));
  }
  state.SetBytesProcessed(state.iterations() * (read_bytes + write_bytes));
  state.counters["of_copy"] = copy / ours;
}

}  // namespace halfbyte::bench
