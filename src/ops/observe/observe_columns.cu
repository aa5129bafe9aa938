// observe, groups side by side: each column of a band of rows is one. A block has some rows of a tile of
// columns, a thread the rows below each other of a chunk of them.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

constexpr int kBatch = 8;  // loads in flight

// The range of each element of a chunk.
#if __CUDA_ARCH__ >= 800
constexpr bool kPairs = sizeof(Memory) == 2;
#else
constexpr bool kPairs = false;
#endif
template <class Type, bool pairs>
struct ColumnRanges {
  F lows[kChunk], highs[kChunk];

  __device__ __forceinline__ ColumnRanges() {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) lows[i] = highs[i] = no_range<F>().low;
  }
  __device__ __forceinline__ void take(const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      lows[i] = max_or_nan(lows[i], -chunk[i]);
      highs[i] = max_or_nan(highs[i], chunk[i]);
    }
  }
  __device__ __forceinline__ Range<F> operator[](int i) const { return {lows[i], highs[i]}; }
};
#if __CUDA_ARCH__ >= 800
template <class Type>
struct ColumnRanges<Type, true> {
  static constexpr int kWords = 4;
  u32 least[kWords], most[kWords];

  __device__ __forceinline__ ColumnRanges() {
    const u32 infinity = store_pair(Type(), bit_cast<float>(Float<float>::kInfinity),
                                    bit_cast<float>(Float<float>::kInfinity));
#pragma unroll
    for (int i = 0; i < kWords; ++i) least[i] = infinity, most[i] = infinity | 0x80008000u;
  }
  __device__ __forceinline__ void take(const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      least[i] = min_pair(Type(), least[i], chunk.words[0].word[i]);
      most[i] = max_pair(Type(), most[i], chunk.words[0].word[i]);
    }
  }
  __device__ __forceinline__ Range<float> operator[](int i) const {
    const auto half = [&](u32 pair) { return load(Type(), static_cast<u16>(i % 2 ? pair >> 16 : pair)); };
    return {-half(least[i / 2]), half(most[i / 2])};
  }
};
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    observe_columns(const __grid_constant__ ObserveColumnsArgs args) {
  // Of each warp, in the order in which its lanes write them.
  __shared__ Range<F> found[kWarps][kChunk][32];
  __shared__ bool last;
  count_batch(args.common);
  const u32 block = blockIdx.x, across = block / args.tiles, band = across / args.pieces;
  const i64 tile = block - across * args.tiles, piece = across - band * args.pieces;
  const i64 axis_number = band / args.bands_per_axis;
  const i64 in_axis = (band - axis_number * args.bands_per_axis) * args.group;
  const i64 group_rows = min(args.group, args.axis - in_axis);  // a short band has fewer pieces with rows
  const i64 first_row = axis_number * args.axis + in_axis;
  const i64 end = first_row + min(group_rows, (piece + 1) * args.rows);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  static_assert(kThreads == 1 << 8);
  const int width = 1 << args.width, rows_of_warp = 32 >> args.width;
  const i64 column = tile * width + (lane & (width - 1));
  const i64 begin = first_row + piece * args.rows + warp * rows_of_warp + (lane >> args.width);
  // This thread has n rows from `begin` on, kWarps * rows_of_warp apart; its chunks of them are `step` apart.
  const int shift = 8 - args.width, n = static_cast<int>((end - begin + (1 << shift) - 1) >> shift);
  const i64 first = begin * args.columns + column, step = args.columns << shift;

  const bool has_rows = column < args.columns && n > 0;
  ColumnRanges<Element, kPairs> joined;
  for (int k = 0; k < n && has_rows; k += kBatch) {
    Chunk chunks[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      chunks[b] = load_chunk<Chunk>(args.common.x, first + min(k + b, n - 1) * step);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) joined.take(chunks[b]);
  }
  NonFinite wrong;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    Range<F> range = joined[i];
    if (has_rows && !is_finite(range)) {
      range = no_range<F>();
#pragma unroll 1
      for (int k = 0; k < n; ++k) take_finite(args.common.x, (first + k * step) * kChunk + i, range, wrong);
    }
    for (int mask = 16; mask >= width; mask /= 2) range = join(range, shuffle_xor(range, mask));
    found[warp][i][lane] = range;
  }
  wrong.report(args.common.counts);
  __syncthreads();
  // A thread now has a column.
  const int thread = static_cast<int>(threadIdx.x), chunk = thread / kChunk, in_chunk = thread % kChunk;
  const bool has_one = chunk < width && tile * width + chunk < args.columns;
  const i64 group = static_cast<i64>(band) * args.columns * kChunk + tile * width * kChunk + thread;
  Range<F> range = no_range<F>();
  if (has_one) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) range = join(range, found[w][in_chunk][chunk]);
  }
  if (args.pieces > 1) {
    if (has_one) leave(&args.common.join.ranges[group], range);
    if (args.common.leaves_ranges) return;
    __threadfence();
    __syncthreads();
    if (thread == 0)
      last = is_last(&args.common.join.arrived[band * static_cast<i64>(args.tiles) + tile], args.pieces);
    __syncthreads();
    if (!last) return;
    if (has_one) range = left(&args.common.join.ranges[group]);
  }
  if (has_one) finish(args.common, group, range);
  wait_for_earlier();
}

}  // namespace halfbyte::device
