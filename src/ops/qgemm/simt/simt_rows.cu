// qgemm, forward, few rows of x: a block multiplies kSimtRows rows of the weight with kM rows of x. Rows are
// whole chunks, and chunks have one group and are aligned. A warp takes 32 chunks of each row, every
// kSimtWarps-th time; then lanes are added up, then warps, each in one order.
#include "cuda/device/chunk.cuh"
#include "cuda/device/sum.cuh"
#include "ops/qgemm/simt/simt_weight.cuh"

namespace halfbyte::device {

constexpr int kRows = kSimtRows, kSums = kRows * kM;
static_assert(kSums <= 32);

// ---- 1. Chunks of the weight and of x

// One of each row.
struct Chunks {
  Codes codes[kRows];
  StoredParameters parameters[kRows];
};

using ChunkOfX = ChunkOf<Element, kChunk>;
// Chunk `chunk` of each row of x; behind them the last row again.
__device__ __forceinline__ void load_x(ChunkOfX (&x)[kM], const SimtArgs& args, int num_chunks, int chunk) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const i64 at = min<i64>(m, args.m - 1) * num_chunks + chunk;
#pragma unroll
    for (int i = 0; i < x[m].kWords4; ++i)
      x[m].words[i] = static_cast<const Words4*>(args.x)[at * x[m].kWords4 + i];
  }
}

// ---- 2. Products

// sum[m] += factor * (values . x[m])
__device__ __forceinline__ void add_products(F* sum, const ChunkOfX (&x)[kM], const F (&values)[kChunk],
                                             F factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    F part = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) part = multiply_add(static_cast<F>(x[m][i]), values[i], part);
    sum[m] = multiply_add(part, factor, sum[m]);
  }
}

// ---- 3. Sums over lanes: each keeps half of them until it has one, in sum[0], number lane / (32 / kSums).

__device__ __forceinline__ void add_lanes(F (&sum)[kSums]) {
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
}

// ---- 4. The kernel

// Of a multiprocessor at once: as many as registers allow.
constexpr int kBlocks = kF64 || kSums > 16     ? 1
                        : kPacked || kSums > 8 ? 2
                                               : (kTable ? 4 : 3) - (kSums > 4 ? 1 : 0);

extern "C" __global__ void __launch_bounds__(kSimtThreads, kBlocks)
    qgemm_simt_rows(const __grid_constant__ SimtArgs args) {
  __shared__ F sums[kSimtWarps][kSums];
  let_next_kernel_start();
  const WeightArgs& w = args.weight;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const i64 first_row = block_index() * kRows;
  const int num_chunks = static_cast<int>(w.k / kChunk);
  const float table_value = lane_value(w);
  // Behind the end the last row and chunk are decoded again: shuffles need all lanes.
  const WholeRows rows(w, first_row);
  const auto group_at = [&](int chunk) {
    return w.group_chunks.divide(static_cast<u32>(min(chunk, num_chunks - 1)));
  };
  const auto load_chunks = [&](int chunk, Chunks& chunks) {
    const u32 group = group_at(chunk);
#pragma unroll
    for (u32 r = 0; r < kRows; ++r)
      chunks.codes[r] = rows.codes(r, static_cast<u32>(min(chunk, num_chunks - 1)));
    rows.parameters(group, chunks.parameters);
  };

  F sum[kSums] = {};
  Chunks next = {};
  if (warp * 32 < num_chunks) load_chunks(warp * 32 + lane, next);
  wait_for_earlier();
#pragma unroll 1
  for (int first = warp * 32; first < num_chunks; first += kSimtWarps * 32) {
    const int chunk = first + lane;
    ChunkOfX x[kM] = {};
    if (chunk < num_chunks) load_x(x, args, num_chunks, chunk);
    const Chunks chunks = next;
    if (first + kSimtWarps * 32 < num_chunks) load_chunks(chunk + kSimtWarps * 32, next);
    const u32 group = group_at(chunk);
    Parameters parameters[kRows];
    rows.convert(chunks.parameters, group, parameters);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      F values[kChunk];
      const F factor = decode(chunks.codes[r], parameters[r], table_value, values);
      add_products(sum + r * kM, x, values, factor);
    }
  }

  add_lanes(sum);
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
