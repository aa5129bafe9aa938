#include "benchmark/loops.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "cpu/features.h"
#include "hwy/cache_control.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmark/loops_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/simd-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace halfbyte::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kLine = 64;  // bytes of the cache

template <int kStreams>
uint64_t read_streams(const uint8_t* from, int64_t num_bytes, int64_t prefetch_bytes) {
  const hn::ScalableTag<uint64_t> d;
  constexpr int64_t kStep = 4 * kLine;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t of_stream = num_bytes / kStreams / kStep * kStep;
  auto all = hn::Zero(d);
  for (int64_t i = 0; i < of_stream; i += kStep)
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint8_t* const at = from + stream * of_stream + i;
      if (prefetch_bytes > 0)
        for (int64_t line = 0; line < kStep; line += kLine) hwy::Prefetch(at + prefetch_bytes + line);
      const auto* const words = reinterpret_cast<const uint64_t*>(at);
      auto first = hn::LoadU(d, words), second = hn::LoadU(d, words + lanes);
      for (int64_t j = 2 * lanes; j < kStep / 8; j += 2 * lanes) {
        first = hn::Xor(first, hn::LoadU(d, words + j));
        second = hn::Xor(second, hn::LoadU(d, words + j + lanes));
      }
      all = hn::Xor(all, hn::Xor(first, second));
    }
  HWY_ALIGN uint64_t of_lanes[HWY_MAX_BYTES / 8];
  hn::Store(all, d, of_lanes);
  uint64_t result = 0;
  for (int64_t i = 0; i < lanes; ++i) result ^= of_lanes[i];
  for (int64_t i = kStreams * of_stream; i < num_bytes; ++i) result ^= from[i];
  return result;
}

uint64_t read(const uint8_t* from, int64_t num_bytes, ReadLoop loop) {
  return loop.num_streams == 4   ? read_streams<4>(from, num_bytes, loop.prefetch_bytes)
         : loop.num_streams == 2 ? read_streams<2>(from, num_bytes, loop.prefetch_bytes)
                                 : read_streams<1>(from, num_bytes, loop.prefetch_bytes);
}

void stream(const uint8_t* from, uint8_t* to, int64_t num_bytes) {
#if HALFBYTE_SIMD
  stream_copy(to, from, static_cast<size_t>(num_bytes));
#else
  std::copy_n(from, num_bytes, to);
#endif
}

constexpr int kChains = 12;  // of sums that do not wait for each other; with two operands in 16 registers

// The sums tend to 1: no operand becomes special.
double fma(int64_t steps) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.75f), term = hn::Set(d, 0.25f);
  hn::Vec<decltype(d)> sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = hn::Iota(d, static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step)
    for (auto& sum : sums) sum = hn::MulAdd(sum, factor, term);
  for (int i = 1; i < kChains; ++i) sums[0] = hn::Add(sums[0], sums[i]);
  return static_cast<double>(hn::GetLane(sums[0]));
}
double fma_flops() { return 2.0 * kChains * static_cast<double>(hn::Lanes(hn::ScalableTag<float>())); }

}  // namespace
}  // namespace halfbyte::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfbyte {
namespace {

HWY_EXPORT(read);
HWY_EXPORT(stream);
HWY_EXPORT(fma);
HWY_EXPORT(fma_flops);

#ifdef __x86_64__

constexpr int kDotChains = 16;

__attribute__((target("avx512f,avx512bf16"))) double dot_bf16(int64_t steps) {
  const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F403F40)),  // 0.75, twice
      w = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F20BF20));         // 0.625 and -0.625
  __m512 sums[kDotChains];
  for (int i = 0; i < kDotChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step)
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, x, w);
  for (int i = 1; i < kDotChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return static_cast<double>(_mm512_cvtss_f32(sums[0]));
}
constexpr double kDotFlops = 2.0 * kDotChains * 32;

// Four tiles of sums from two by two of operands: a step has four products of 16 x 32 by 32 x 16.
__attribute__((target("amx-tile,amx-bf16"))) double multiply_tiles(int64_t steps) {
  // Static: GCC 12 believes that ldtilecfg reads 8 of its 64 bytes, and would not store the others.
  alignas(64) static const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } kConfig;
  alignas(64) static constexpr auto kOperand = [] {
    std::array<uint16_t, 16 * 32> values{};
    for (size_t i = 0; i < values.size(); ++i)  // 0.5 to 1, both signs
      values[i] = static_cast<uint16_t>(0x3F00 + i % 127 + (i % 2 << 15));
    return values;
  }();
  alignas(64) float sums[16 * 16];
  constexpr int kRowBytes = 64;
  _tile_loadconfig(&kConfig);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, kOperand.data(), kRowBytes);
  _tile_loadd(5, kOperand.data(), kRowBytes);
  _tile_loadd(6, kOperand.data(), kRowBytes);
  _tile_loadd(7, kOperand.data(), kRowBytes);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kRowBytes);
  _tile_release();
  return static_cast<double>(sums[0]);
}
constexpr double kTilesFlops = 2.0 * 4 * 16 * 16 * 32;

#endif

}  // namespace

uint64_t read_bytes(const void* from, int64_t num_bytes, ReadLoop loop) {
  return HWY_DYNAMIC_DISPATCH(read)(static_cast<const uint8_t*>(from), num_bytes, loop);
}

void move_bytes(const void* from, int64_t read_bytes, void* to, int64_t write_bytes) {
  static std::atomic<uint64_t> sink;
  alignas(64) static constexpr std::array<uint8_t, 1 << 14> kBlock = {1, 2, 3};
  const uint64_t sum = halfbyte::read_bytes(from, read_bytes, {.num_streams = 1});
  if (sum == 1) sink.fetch_xor(sum, std::memory_order_relaxed);
  const auto block_bytes = static_cast<int64_t>(kBlock.size());
  for (int64_t i = 0; i < write_bytes; i += block_bytes)
    copy_bytes(kBlock.data(), static_cast<uint8_t*>(to) + i, std::min(block_bytes, write_bytes - i));
}
void copy_bytes(const void* from, void* to, int64_t num_bytes) {
  HWY_DYNAMIC_DISPATCH(stream)(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), num_bytes);
}
void end_moves() { hwy::FlushStream(); }

std::vector<ArithmeticLoop> arithmetic_loops([[maybe_unused]] DType dtype) {
  std::vector<ArithmeticLoop> loops = {{"fma", HWY_DYNAMIC_DISPATCH(fma_flops)(),
                                        [](int64_t steps) { return HWY_DYNAMIC_DISPATCH(fma)(steps); }}};
#ifdef __x86_64__
  if (dtype == DType::bf16 && cpu_features().avx512_bf16) loops.push_back({"bf16_dot", kDotFlops, dot_bf16});
  if (dtype == DType::bf16 && cpu_features().amx_bf16)
    loops.push_back({"amx_bf16", kTilesFlops, multiply_tiles});
#endif
  return loops;
}

}  // namespace halfbyte
#endif
