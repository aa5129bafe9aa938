// qgemm, both directions, any number of rows: a block makes kTileM rows and kTileN columns of y. Tiles of x
// and of the decoded weight go through shared memory, kStep of the summed axis at a time; each thread keeps
// the next part of them in registers, and sums kTileM / 16 by kTileN / 16 outputs in the order of the axis.
// Where the axis is split, the blocks of a tile leave partial sums to qgemm_sum.
#include "ops/qgemm/simt/simt_weight.cuh"
#include "ops/qgemm/weight/experts.cuh"

namespace halfbyte::device {

constexpr int kStep = simt_step(kTileN), kPad = 4;
constexpr int kThreadM = kTileM / 16, kThreadN = kTileN / 16, kThreadX = kTileM * kStep / kSimtThreads;

using TileOfX = F[kStep][kTileM + kPad];
using TileOfWeight = F[kStep][kTileN + kPad];

// ---- 1. The weight: a chunk a thread

template <class T>
__device__ __forceinline__ const T* behind(const T* part, i64 offset) {
  return part == nullptr ? part : reinterpret_cast<const T*>(reinterpret_cast<const u8*>(part) + offset);
}
// The packed weight `offset` bytes behind another one: its parts are at the same places of its memory.
__device__ __forceinline__ WeightArgs weight_behind(WeightArgs w, i64 offset) {
  w.codes = behind(w.codes, offset);
  w.scales = behind(w.scales, offset);
  w.zeros = behind(w.zeros, offset);
  w.biases = behind(w.biases, offset);
  w.absmax = behind(w.absmax, offset);
  w.map = behind(w.map, offset);
  w.offset = behind(w.offset, offset);
  w.global_scale = behind(w.global_scale, offset);
  return w;
}

class ChunkOfTile {
 public:
  // `offset`: bytes from the first weight to that of the tile.
  __device__ __forceinline__ ChunkOfTile(const SimtArgs& args, TileOfWeight& tile, i64 first_n, i64 offset)
      : args_(args), first_n_(first_n), offset_(offset), table_value_(lane_value(args.weight)) {
    const int thread = static_cast<int>(threadIdx.x);
    const int chunks_per_row = (args.transposed ? kTileN : kStep) / kChunk;
    of_row_ = thread / chunks_per_row;
    of_col_ = thread % chunks_per_row * kChunk;
    to_ = args.transposed ? &tile[of_row_][of_col_] : &tile[of_col_][of_row_];
    stride_ = args.transposed ? 1 : kTileN + kPad;
  }

  // Of the tile that begins at `s` on the summed axis: to registers.
  __device__ __forceinline__ void load(i64 s) {
    const WeightArgs w = weight();
    const i64 row = row_of(s), col = col_of(s);
    codes_ = load_codes(w, row, col);
    if (w.whole_chunks) stored_ = load_parameters(w, row, group_of(w, col));
  }
  // ... decoded to shared memory. Behind `end` weights are 0.
  __device__ __forceinline__ void store(i64 s, i64 end) const {
    const WeightArgs w = weight();
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
  __device__ __forceinline__ WeightArgs weight() const {
    return kExperts ? weight_behind(args_.weight, offset_) : args_.weight;
  }
  __device__ __forceinline__ i64 row_of(i64 s) const {
    return min((args_.transposed ? s : first_n_) + of_row_, args_.weight.n - 1);
  }
  __device__ __forceinline__ i64 col_of(i64 s) const {
    return min((args_.transposed ? first_n_ : s) + of_col_, (args_.weight.k - 1) / kChunk * kChunk);
  }

  const SimtArgs& args_;
  i64 first_n_, offset_;
  float table_value_;
  int of_row_, of_col_;  // within the tile
  F* to_;                // in shared memory
  int stride_;
  Codes codes_ = 0;
  StoredParameters stored_{};
};

// ---- 2. x: kThreadX elements a thread

// The rows of a tile.
struct RowLists {
  i32 x[kTileM], y[kTileM];  // y below 0: none
};
struct TileRows {
  i64 first;
  int count, expert;
  const RowLists* lists;  // of experts

  __device__ __forceinline__ i64 of_x(int m) const {
    if constexpr (kExperts)
      return lists->x[m];
    else
      return first + m;
  }
  __device__ __forceinline__ i64 of_y(int m) const {
    if constexpr (kExperts)
      return lists->y[m];
    else
      return first + m;
  }
};

__device__ __forceinline__ void load_x(Memory (&x)[kThreadX], const SimtArgs& args, const TileRows& rows,
                                       i64 s, i64 end) {
#pragma unroll
  for (int i = 0; i < kThreadX; ++i) {
    const int at = i * kSimtThreads + static_cast<int>(threadIdx.x), m = at / kStep;
    const i64 col = s + at % kStep;
    x[i] = m < rows.count && col < end ? static_cast<const Memory*>(args.x)[rows.of_x(m) * args.in_cols + col]
                                       : Memory{0};
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
                                           const TileRows& rows, i64 split, int m0, i64 n0) {
#pragma unroll
  for (int m = 0; m < kThreadM; ++m) {
    if (m0 + m >= rows.count) break;
    const i64 row = rows.of_y(m0 + m);
    if (row < 0) continue;
#pragma unroll
    for (int n = 0; n < kThreadN; ++n) {
      const i64 col = n0 + n;
      if (col >= args.out_cols) continue;
      if (args.partials == nullptr && !kExperts) {
        write_sum(args, row, col, sums[m][n]);
        continue;
      }
      F sum = sums[m][n];
      if (kExperts && args.bias != nullptr && split == 0 && rows.expert < args.experts.num)
        sum = sum + load(Element(), static_cast<const Memory*>(args.bias)[rows.expert * args.out_cols + col]);
      if (args.partials != nullptr) {
        static_cast<F*>(args.partials)[(split * args.m + row) * args.out_cols + col] = sum;
        continue;
      }
      if (args.experts.routing_weights != nullptr) sum = sum * args.experts.routing_weights[row];
      Memory& y = static_cast<Memory*>(args.y)[row * args.out_cols + col];
      const double before = args.accumulate ? static_cast<double>(load(Element(), y)) : 0;
      y = rounded(Element(), static_cast<double>(sum) + before);
    }
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
  const i64 first_n = tile_n * kTileN;
  const i64 begin = split * args.split_steps * kStep;
  i64 end = min(begin + args.split_steps * kStep, args.in_cols), offset = 0;
  TileRows rows = {tile_m * kTileM, 0, 0, nullptr};
  if constexpr (kExperts) {
    __shared__ RowLists lists;
    wait_for_earlier();  // for who gets which row
    const ExpertTile of = find_expert_tile<kTileM>(args.experts, static_cast<i32>(tile_m));
    if (of.count <= 0) return;
    rows = {of.first, of.count, of.expert, &lists};
    for (int m = static_cast<int>(threadIdx.x); m < kTileM; m += kSimtThreads) {
      const i32 slot = m < of.count ? slot_of(args.experts, of.first + m) : -1;
      lists.x[m] = max(slot, 0) / args.experts.slots_per_x;
      lists.y[m] = slot;
    }
    __syncthreads();
    if (of.expert < args.experts.num)
      offset = of.expert * args.experts.weight_bytes;
    else
      end = begin;  // no expert: sums of nothing
  } else {
    rows.count = static_cast<int>(min<i64>(args.m - rows.first, kTileM));
  }

  ChunkOfTile chunk(args, ws, first_n, offset);
  Memory x[kThreadX];
  F sums[kThreadM][kThreadN] = {};
  const int thread = static_cast<int>(threadIdx.x);
  const int m_in = thread / 16 * kThreadM, n_in = thread % 16 * kThreadN;
  if (begin < end) chunk.load(begin);
  if (!kExperts) wait_for_earlier();
  if (begin < end) load_x(x, args, rows, begin, end);
#pragma unroll 1
  for (i64 s = begin; s < end; s += kStep) {
    chunk.store(s, end);
    store_x(xs, x);
    __syncthreads();
    if (s + kStep < end) {  // meanwhile
      chunk.load(s + kStep);
      load_x(x, args, rows, s + kStep, end);
    }
    multiply(sums, xs, ws, m_in, n_in);
    __syncthreads();
  }
  write_sums(sums, args, rows, split, m_in, first_n + n_in);
}

}  // namespace halfbyte::device
