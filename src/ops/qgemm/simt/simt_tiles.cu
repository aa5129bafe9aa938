// qgemm, both directions, any number of rows: a block makes kTileM rows and kTileN columns of y. Tiles of x
// and of the decoded weight go through shared memory, kStep of the summed axis at a time; each thread keeps
// the next part of them in registers, and sums kTileM / 16 by kTileN / 16 outputs in the order of the axis.
// Where the axis is split, the blocks of a tile leave partial sums to qgemm_sum.
#include "ops/qgemm/simt/simt_weight.cuh"

namespace halfbyte::device {

constexpr int kStep = simt_step(kTileN), kPad = 4;
constexpr int kThreadM = kTileM / 16, kThreadN = kTileN / 16, kThreadX = kTileM * kStep / kSimtThreads;

using TileOfX = F[kStep][kTileM + kPad];
using TileOfWeight = F[kStep][kTileN + kPad];

// ---- 1. The weight: a chunk a thread

class ChunkOfTile {
 public:
  __device__ __forceinline__ ChunkOfTile(const SimtArgs& args, TileOfWeight& tile, i64 first_n)
      : args_(args), first_n_(first_n), table_value_(lane_value(args.weight)) {
    const int thread = static_cast<int>(threadIdx.x);
    const int chunks_per_row = (args.transposed ? kTileN : kStep) / kChunk;
    of_row_ = thread / chunks_per_row;
    of_col_ = thread % chunks_per_row * kChunk;
    to_ = args.transposed ? &tile[of_row_][of_col_] : &tile[of_col_][of_row_];
    stride_ = args.transposed ? 1 : kTileN + kPad;
  }

  // Of the tile that begins at `s` on the summed axis: to registers.
  __device__ __forceinline__ void load(i64 s) {
    const WeightArgs& w = args_.weight;
    const i64 row = row_of(s), col = col_of(s);
    codes_ = load_codes(w, row, col);
    if (w.whole_chunks) stored_ = load_parameters(w, row, group_of(w, col));
  }
  // ... decoded to shared memory. Behind `end` weights are 0.
  __device__ __forceinline__ void store(i64 s, i64 end) const {
    const WeightArgs& w = args_.weight;
    F values[kChunk];
    const i64 row = row_of(s), col = col_of(s);
    if (w.whole_chunks) {
      const Parameters p = convert(w, storage_of(w), stored_, row, group_of(w, col));
      const F factor = decode(codes_, p, table_value_, values);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) values[i] = values[i] * factor;
    } else {
      decode_any(w, codes_, row, col, table_value_, values);
    }
    const i64 left = end - s - (args_.transposed ? of_row_ : of_col_);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) to_[i * stride_] = left > (args_.transposed ? 0 : i) ? values[i] : F{0};
  }

 private:
  __device__ __forceinline__ i64 row_of(i64 s) const {
    return min((args_.transposed ? s : first_n_) + of_row_, args_.weight.n - 1);
  }
  __device__ __forceinline__ i64 col_of(i64 s) const {
    return min((args_.transposed ? first_n_ : s) + of_col_, (args_.weight.k - 1) / kChunk * kChunk);
  }

  const SimtArgs& args_;
  i64 first_n_;
  float table_value_;
  int of_row_, of_col_;  // within the tile
  F* to_;                // in shared memory
  int stride_;
  Codes codes_ = 0;
  StoredParameters stored_{};
};

// ---- 2. x: kThreadX elements a thread

__device__ __forceinline__ void load_x(Memory (&x)[kThreadX], const SimtArgs& args, i64 first_m, i64 s,
                                       i64 end) {
#pragma unroll
  for (int i = 0; i < kThreadX; ++i) {
    const int at = i * kSimtThreads + static_cast<int>(threadIdx.x);
    const i64 m = first_m + at / kStep, col = s + at % kStep;
    x[i] = m < args.m && col < end ? static_cast<const Memory*>(args.x)[m * args.in_cols + col] : Memory{0};
  }
}
__device__ __forceinline__ void store_x(TileOfX& to, const Memory (&x)[kThreadX]) {
#pragma unroll
  for (int i = 0; i < kThreadX; ++i) {
    const int at = i * kSimtThreads + static_cast<int>(threadIdx.x);
    to[at % kStep][at / kStep] = static_cast<F>(load(Element(), x[i]));
  }
}

// ---- 3. Products

// Adds those of rows m_in and up of x and columns n_in and up of the weight.
__device__ __forceinline__ void multiply(F (&sums)[kThreadM][kThreadN], const TileOfX& xs,
                                         const TileOfWeight& ws, int m_in, int n_in) {
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
}

// ---- 4. Outputs, or partial sums of split `split`; from row m0 and column n0 on.

__device__ __forceinline__ void write_sums(const F (&sums)[kThreadM][kThreadN], const SimtArgs& args,
                                           i64 split, i64 m0, i64 n0) {
#pragma unroll
  for (int m = 0; m < kThreadM; ++m)
#pragma unroll
    for (int n = 0; n < kThreadN; ++n) {
      const i64 row = m0 + m, col = n0 + n;
      if (row >= args.m || col >= args.out_cols) continue;
      if (args.splits > 1)
        static_cast<F*>(args.partials)[(split * args.m + row) * args.out_cols + col] = sums[m][n];
      else
        write_sum(args, row, col, sums[m][n]);
    }
}

// ---- 5. The kernel

extern "C" __global__ void __launch_bounds__(kSimtThreads, kF64 || kPacked || kTileM > 64 ? 1 : 2)
    qgemm_simt_tiles(const __grid_constant__ SimtArgs args) {
  alignas(16) __shared__ TileOfX xs;
  alignas(16) __shared__ TileOfWeight ws;
  let_next_kernel_start();
  const i64 tile = block_index();
  const i64 tile_m = tile % args.tiles_m, tile_n = tile / args.tiles_m % args.tiles_n;
  const i64 split = tile / args.tiles_m / args.tiles_n;
  if (split >= args.splits) return;
  const i64 first_m = tile_m * kTileM, first_n = tile_n * kTileN;
  const i64 begin = split * args.split_steps * kStep,
            end = min(begin + args.split_steps * kStep, args.in_cols);

  ChunkOfTile chunk(args, ws, first_n);
  Memory x[kThreadX];
  F sums[kThreadM][kThreadN] = {};
  const int thread = static_cast<int>(threadIdx.x);
  const int m_in = thread / 16 * kThreadM, n_in = thread % 16 * kThreadN;
  if (begin < end) chunk.load(begin);
  wait_for_earlier();
  if (begin < end) load_x(x, args, first_m, begin, end);
#pragma unroll 1
  for (i64 s = begin; s < end; s += kStep) {
    chunk.store(s, end);
    store_x(xs, x);
    __syncthreads();
    if (s + kStep < end) {  // meanwhile
      chunk.load(s + kStep);
      load_x(x, args, first_m, s + kStep, end);
    }
    multiply(sums, xs, ws, m_in, n_in);
    __syncthreads();
  }
  write_sums(sums, args, split, first_m + m_in, first_n + n_in);
}

}  // namespace halfbyte::device
