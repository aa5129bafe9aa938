// qgemm, both directions, any number of rows: a block makes kTileM rows and kTileN columns of y. Tiles of x
// and of the decoded weight go through shared memory, kStep of the summed axis at a time; each thread keeps
// the next part of them in registers, and sums kTileM / 16 by kTileN / 16 outputs in the order of the axis.
// Where the axis is split, the blocks of a tile leave partial sums to qgemm_simt_sum.
#include "ops/qgemm/simt/simt_weight.cuh"

namespace halfbyte::device {

constexpr int kStep = simt_step(kTileN), kPad = 4;
constexpr int kThreadM = kTileM / 16, kThreadN = kTileN / 16, kThreadX = kTileM * kStep / kSimtThreads;

extern "C" __global__ void __launch_bounds__(kSimtThreads, kF64 || kPacked || kTileM > 64 ? 1 : 2)
    qgemm_simt_tiles(const __grid_constant__ SimtArgs args) {
  alignas(16) __shared__ F xs[kStep][kTileM + kPad];
  alignas(16) __shared__ F ws[kStep][kTileN + kPad];
  let_next_kernel_start();
  const SimtWeight& w = args.weight;
  const int thread = static_cast<int>(threadIdx.x);
  const i64 tile = block_index();
  const i64 tile_m = tile % args.tiles_m, tile_n = tile / args.tiles_m % args.tiles_n;
  const i64 split = tile / args.tiles_m / args.tiles_n;
  if (split >= args.splits) return;
  const i64 first_m = tile_m * kTileM, first_n = tile_n * kTileN;
  const i64 begin = split * args.split_steps * kStep,
            end = min(begin + args.split_steps * kStep, args.in_cols);
  const float table_value = lane_value(w);

  // This thread's chunk of the weight: where it begins within the tile, on the summed and on the other axis.
  const int chunks_per_row = (args.transposed ? kTileN : kStep) / kChunk;
  const int of_row = thread / chunks_per_row, of_col = thread % chunks_per_row * kChunk;
  const auto row_of = [&](i64 s) { return min((args.transposed ? s : first_n) + of_row, w.n - 1); };
  const auto col_of = [&](i64 s) {
    return min((args.transposed ? first_n : s) + of_col, (w.k - 1) / kChunk * kChunk);
  };
  F* const w_to = args.transposed ? &ws[of_row][of_col] : &ws[of_col][of_row];
  const int w_stride = args.transposed ? 1 : kTileN + kPad;

  Codes codes = 0;
  StoredParameters stored{};
  Memory x[kThreadX];
  const auto load_chunk = [&](i64 s) {
    const i64 row = row_of(s), col = col_of(s);
    codes = load_codes(w, row, col);
    if (w.whole_chunks) stored = load_parameters(w, row, group_of(w, col));
  };
  const auto load_tile_of_x = [&](i64 s) {
#pragma unroll
    for (int i = 0; i < kThreadX; ++i) {
      const int at = i * kSimtThreads + thread;
      const i64 m = first_m + at / kStep, col = s + at % kStep;
      x[i] = m < args.m && col < end ? static_cast<const Memory*>(args.x)[m * args.in_cols + col] : Memory{0};
    }
  };
  F sums[kThreadM][kThreadN] = {};
  const int m_in = thread / 16 * kThreadM, n_in = thread % 16 * kThreadN;
  if (begin < end) load_chunk(begin);
  wait_for_earlier();
  if (begin < end) load_tile_of_x(begin);
#pragma unroll 1
  for (i64 s = begin; s < end; s += kStep) {
    F values[kChunk];
    const i64 row = row_of(s), col = col_of(s);
    if (w.whole_chunks) {
      const F factor = decode(codes, convert(w, stored, row, group_of(w, col)), table_value, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = values[i] * factor;
    } else {
      decode_any(w, codes, row, col, table_value, values);
    }
    // On the summed axis: behind its end weights are 0.
    const i64 left = end - s - (args.transposed ? of_row : of_col);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) w_to[i * w_stride] = left > (args.transposed ? 0 : i) ? values[i] : F{0};
#pragma unroll
    for (int i = 0; i < kThreadX; ++i) {
      const int at = i * kSimtThreads + thread;
      xs[at % kStep][at / kStep] = static_cast<F>(load(Element(), x[i]));
    }
    __syncthreads();
    if (s + kStep < end) {
      load_chunk(s + kStep);
      load_tile_of_x(s + kStep);
    }
#pragma unroll 2
    for (int i = 0; i < kStep; ++i) {
      F a[kThreadM], b[kThreadN];
#pragma unroll
      for (int m = 0; m < kThreadM; ++m) a[m] = xs[i][m_in + m];
#pragma unroll
      for (int n = 0; n < kThreadN; ++n) b[n] = ws[i][n_in + n];
#pragma unroll
      for (int m = 0; m < kThreadM; ++m)
#pragma unroll
        for (int n = 0; n < kThreadN; ++n) sums[m][n] = multiply_add(a[m], b[n], sums[m][n]);
    }
    __syncthreads();
  }

#pragma unroll
  for (int m = 0; m < kThreadM; ++m)
#pragma unroll
    for (int n = 0; n < kThreadN; ++n) {
      const i64 row = first_m + m_in + m, col = first_n + n_in + n;
      if (row >= args.m || col >= args.out_cols) continue;
      if (args.splits > 1)
        static_cast<F*>(args.partials)[(split * args.m + row) * args.out_cols + col] = sums[m][n];
      else
        write_sum(args, row, col, sums[m][n]);
    }
}

}  // namespace halfbyte::device
