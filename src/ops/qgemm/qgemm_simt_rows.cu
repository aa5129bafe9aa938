// qgemm, forward, few rows of x: a block multiplies kSimtRows rows of the weight with kM rows of x. A warp takes chunks of
// 32 * 8 columns, every kSimtWarps-th; then lanes are added up, then warps, each in one order.
#include "cuda/device/chunk.cuh"
#include "cuda/device/sum.cuh"
#include "ops/qgemm/qgemm_simt_weight.cuh"

namespace halfbyte::device {

constexpr int kRows = kSimtRows, kSums = kRows * kM;
static_assert(kSums <= 32);

// A chunk of a row of x, 0 behind its end.
__device__ __forceinline__ void load_x(const SimtArgs& args, i64 m, i64 col, F (&x)[kChunk]) {
  const Memory* const from = static_cast<const Memory*>(args.x) + m * args.in_cols + col;
  if (args.wide_x && col < args.in_cols) {
    ChunkOf<Element, kChunk> chunk;
#pragma unroll
    for (int i = 0; i < chunk.kWords4; ++i) chunk.words[i] = reinterpret_cast<const Words4*>(from)[i];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = static_cast<F>(chunk[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = col + i < args.in_cols ? static_cast<F>(load(Element(), from[i])) : F{0};
  }
}

extern "C" __global__ void __launch_bounds__(kSimtThreads, kSums <= 8 ? 3 : 1)
    qgemm_simt_rows(const __grid_constant__ SimtArgs args) {
  __shared__ F sums[kSimtWarps][kSums];
  let_next_kernel_start();
  const SimtWeight& w = args.weight;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const i64 first_row = block_index() * kRows;
  const i64 num_chunks = (args.in_cols + kChunk - 1) / kChunk;
  const float table_value = lane_value(w);
  // Behind the end the last row and chunk are decoded again: shuffles need all lanes.
  const auto row_of = [&](int r) { return min(first_row + r, w.n - 1); };
  const auto col_of = [&](i64 chunk) { return min(chunk, num_chunks - 1) * kChunk; };
  const auto load_chunks = [&](i64 chunk, Chunk(&chunks)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) chunks[r] = load_chunk(w, row_of(r), col_of(chunk));
  };

  F sum[kSums] = {};
  Chunk next[kRows] = {};
  i64 chunk = warp * 32 + lane;
  if (warp * 32 < num_chunks) load_chunks(chunk, next);
  wait_for_earlier();
#pragma unroll 1
  for (; chunk - lane < num_chunks; chunk += kSimtWarps * 32) {
    Chunk chunks[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) chunks[r] = next[r];
    F x[kM][kChunk];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_x(args, min<i64>(m, args.m - 1), chunk * kChunk, x[m]);
    if (chunk - lane + kSimtWarps * 32 < num_chunks) load_chunks(chunk + kSimtWarps * 32, next);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      F values[kChunk];
      const F factor = decode(w, chunks[r], row_of(r), col_of(chunk), table_value, values);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        F part = 0;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) part = multiply_add(x[m][i], values[i], part);
        sum[r * kM + m] = multiply_add(part, factor, sum[r * kM + m]);
      }
    }
  }

  // Over the lanes: each keeps half of the sums until it has one, which is number lane / (32 / kSums).
  int count = kSums;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (count > 1) {
      count /= 2;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i)
        if (i < count) sum[i] = fold_sums(sum[i], sum[i + count], mask);
    } else {
      sum[0] = sum[0] + shuffle_xor(sum[0], mask);
    }
  }
  if (lane % (32 / kSums) == 0) sums[warp][lane / (32 / kSums)] = sum[0];
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  const i64 row = first_row + i / kM, m = i % kM;
  if (i >= kSums || row >= w.n || m >= args.m) return;
  F total = sums[0][i];
  for (int from = 1; from < kSimtWarps; ++from) total = total + sums[from][i];
  write_sum(args, m, row, total);
}

}  // namespace halfbyte::device
