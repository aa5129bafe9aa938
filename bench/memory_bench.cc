// What the memory of this machine gives: the ceilings of the CPU benchmarks.
#include <algorithm>
#include <atomic>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/memory_bench.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/bench.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {

uint64_t Read(const uint8_t* from, int64_t n) {
  const hn::ScalableTag<uint64_t> d;
  const auto step = static_cast<int64_t>(hn::Lanes(d) * 8);
  auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
  for (int64_t i = 0; i + 4 * step <= n; i += 4 * step) {
    const auto* p = reinterpret_cast<const uint64_t*>(from + i);
    a = hn::Xor(a, hn::LoadU(d, p));
    b = hn::Xor(b, hn::LoadU(d, p + hn::Lanes(d)));
    c = hn::Xor(c, hn::LoadU(d, p + 2 * hn::Lanes(d)));
    e = hn::Xor(e, hn::LoadU(d, p + 3 * hn::Lanes(d)));
  }
  return hn::GetLane(hn::Xor(hn::Xor(a, b), hn::Xor(c, e)));
}

void Write(const uint8_t* from, uint8_t* to, int64_t n) {
#if HALFBYTE_SIMD
  stream_copy(to, from, static_cast<size_t>(n));
#else
  std::copy(from, from + n, to);
#endif
}

}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte::bench {
HWY_EXPORT(Read);
HWY_EXPORT(Write);

void bare_read(const uint8_t* from, int64_t num_bytes, int threads) {
  constexpr int64_t kBlock = 1 << 18;
  std::atomic<uint64_t> sink = 0;
  parallel_for((num_bytes + kBlock - 1) / kBlock, 1, threads, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kBlock, last = std::min(num_bytes, end * kBlock);
    sink.fetch_xor(HWY_DYNAMIC_DISPATCH(Read)(from + first, last - first), std::memory_order_relaxed);
  });
  benchmark::DoNotOptimize(sink.load());
}

void bare_move(const uint8_t* from, int64_t read_bytes, uint8_t* to, int64_t write_bytes, int threads) {
  // Blocks of up to 16 KiB: their share of the input is read, that of the output written from L1.
  constexpr int64_t kBlock = 1 << 14;
  alignas(64) static uint8_t block[kBlock] = {1, 2, 3};
  std::atomic<uint64_t> sink = 0;
  const int64_t blocks = (std::max(read_bytes, write_bytes) + kBlock - 1) / kBlock;
  const int64_t reads = read_bytes / blocks / 64 * 64, writes = write_bytes / blocks / 64 * 64;
  parallel_for(blocks, 16, threads, [&](int64_t begin, int64_t end, int) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      sum ^= HWY_DYNAMIC_DISPATCH(Read)(from + i * reads, reads);
      HWY_DYNAMIC_DISPATCH(Write)(block, to + i * writes, writes);
    }
    hwy::FlushStream();
    sink.fetch_xor(sum, std::memory_order_relaxed);
  });
  benchmark::DoNotOptimize(sink.load());
}

namespace {

void BM_bare_read(benchmark::State& state) {
  const int64_t n = kRows * kCols * 2;
  const Buffer x = make_buffer(n);
  for (auto _ : state) bare_read(x.get(), n, static_cast<int>(state.range(0)));
  state.SetBytesProcessed(state.iterations() * n);
}
BENCHMARK(BM_bare_read)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

// A non-temporal copy; bytes are read + written.
void BM_bare_copy(benchmark::State& state) {
  const int64_t n = kRows * kCols * 2;
  const Buffer x = make_buffer(n), y = make_buffer(n);
  for (auto _ : state) {
    parallel_for(n >> 16, 4, static_cast<int>(state.range(0)), [&](int64_t begin, int64_t end, int) {
      HWY_DYNAMIC_DISPATCH(Write)(x.get() + (begin << 16), y.get() + (begin << 16), (end - begin) << 16);
    });
  }
  state.SetBytesProcessed(state.iterations() * 2 * n);
}
BENCHMARK(BM_bare_copy)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace halfbyte::bench
#endif  // HWY_ONCE
