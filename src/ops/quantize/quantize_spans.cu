// quantize for any group size, row length and alignment. A block takes a span of a row: the ranges of its
// groups by atomics in shared memory, their parameters, then the codes. Spans are whole groups, so that no
// block waits for another; groups too large for that bring their ranges (value_range.cu), and a span is then
// any part of a row.
#include "ops/quantize/quantize.cuh"

namespace halfbyte::device {

using Key = decltype(sortable(F()));

constexpr int kThreads = kSpansThreads;
// Chunks a thread has at a time, in shared memory. A span of at most so many a thread is read once.
constexpr int kUnroll = 8 / static_cast<int>(sizeof(Memory));

struct SpanGroup {
  Key low, high;  // sortable(-min), sortable(max), 0: none; with the encoding the bits of -min and max
  Encoding encoding;
};

// n elements from `index` on, zeros behind them; there after wait_copies(). kAligned: rows and chunks begin
// at multiples of 16 bytes, and no chunk is cut.
__device__ __forceinline__ void load_part(const QuantizeArgs& args, i64 index, int n, Chunk& to) {
  if (kAligned && n > 0) {
    const auto* const from = static_cast<const Words4*>(args.x) + index / kChunk * Chunk::kWords4;
#pragma unroll
    for (int i = 0; i < Chunk::kWords4; ++i) copy_async(&to.words[i], from + i);
  } else {
    Chunk x{};
    if constexpr (!kAligned) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (i < n) x.set(i, static_cast<const Memory*>(args.x)[index + i]);
    }
    to = x;
  }
}

// Adds the finite elements [begin, end) of x to the range of a group.
__device__ __forceinline__ void add_range(SpanGroup& group, const Chunk& x, int begin, int end) {
  Key low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < begin || i >= end || !formats::is_finite(x[i])) continue;
    low = max(low, sortable(-x[i]));
    high = max(high, sortable(x[i]));
  }
  if (high == 0) return;
  shared_atomic_max(&group.low, low);
  shared_atomic_max(&group.high, high);
}
// Adds the ranges of a chunk of each lane of the warp, all of one group.
template <class ChunkRange>
__device__ __forceinline__ void add_warp_range(SpanGroup& group, ChunkRange range, int lane) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  if (lane != 0) return;
  shared_atomic_max(&group.low, sortable(unpack(range).low));
  shared_atomic_max(&group.high, sortable(unpack(range).high));
}

__device__ __forceinline__ void store_part(u8* to, const u64 bits, int n) {
  if (kAligned && kBits == 2) {
    *reinterpret_cast<u16*>(to) = static_cast<u16>(bits);
  } else if (kAligned && kBits == 4) {
    *reinterpret_cast<u32*>(to) = static_cast<u32>(bits);
  } else if (kAligned && kBits == 8) {
    *reinterpret_cast<u64*>(to) = bits;
  } else {
    const int num_bytes = (n * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kBits; ++i)
      if (i < num_bytes) to[i] = static_cast<u8>(bits >> (8 * i));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kFast ? 4 : 2)
    quantize_spans(const __grid_constant__ QuantizeArgs args) {
  __shared__ SpanGroup groups[kMaxSpanGroups];
  __shared__ Chunk chunks[kUnroll * kThreads];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const i64 block = block_index(), row = block / args.spans_per_row;
  if (row >= args.rows) return;
  const i64 begin = block % args.spans_per_row * args.span_cols, end = min(args.cols, begin + args.span_cols);
  const i64 first_group = begin / args.group_size, row_groups = row * args.groups_per_row;
  const int num_groups = static_cast<int>((end - 1) / args.group_size - first_group) + 1;

  const int num_cols = static_cast<int>(end - begin);
  const int num_chunks = (num_cols + kChunk - 1) / kChunk;

  // This thread's chunk from chunk `step` of the span on: its first column within the span, how many elements
  // there are, the group of the first of them among `groups`, and how many belong to that.
  struct Part {
    int offset, n, group, in_first;
  };
  const auto part_of = [&](int step) {
    Part part;
    part.offset = (step + thread) * kChunk;
    part.n = clamp(num_cols - part.offset, 0, kChunk);
    part.group = 0;
    part.in_first = part.n;
    if (part.n == 0 || num_groups == 1) return part;
    if (args.ranges != nullptr) {  // at most two groups
      const i64 left = (first_group + 1) * args.group_size - (begin + part.offset);
      part.group = left <= 0 ? 1 : 0;
      if (left > 0) part.in_first = static_cast<int>(min<i64>(part.n, left));
    } else {
      const u32 offset = static_cast<u32>(part.offset), size = static_cast<u32>(args.group_size);
      part.group = static_cast<int>(offset / size);
      part.in_first = min(part.n, static_cast<int>(size - offset % size));
    }
    return part;
  };

  const auto chunk_at = [&](int u) -> Chunk& { return chunks[u * kThreads + thread]; };
  const i64 span_index = row * args.cols + begin;
  const auto load_chunks = [&](int step) {
    for (int u = 0; u < kUnroll; ++u) {
      const int offset = (step + u * kThreads + thread) * kChunk;
      load_part(args, span_index + offset, clamp(num_cols - offset, 0, kChunk), chunk_at(u));
    }
    wait_copies();
  };
  if (args.ranges == nullptr) {
    for (int g = thread; g < num_groups; g += kThreads) groups[g].low = groups[g].high = 0;
    __syncthreads();
    for (int step = 0; step < num_chunks; step += kThreads * kUnroll) {
      load_chunks(step);
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) {
        const Part part = part_of(step + u * kThreads);
        const Chunk x = chunk_at(u);
        const int warp_group = shuffle(part.group, 0);
        const bool within = part.in_first == kChunk && part.group == warp_group;
        if (with_range(args, x, [&](const auto& range) {
              const bool all = __all_sync(kAllLanes, within && is_finite(unpack(range)));
              if (all) add_warp_range(groups[warp_group], range, lane);
              return all;
            }))
          continue;
        for (int i = 0, group = part.group, next = part.in_first; i < part.n; ++group) {
          add_range(groups[group], x, i, next);
          i = next;
          next = static_cast<int>(min<i64>(part.n, next + args.group_size));
        }
      }
    }
    __syncthreads();
  }
  for (int g = thread; g < num_groups; g += kThreads) {
    const i64 group = first_group + g;
    constexpr F kNone = -bit_cast<F>(Float<F>::kInfinity);
    Range<F> range;
    if (args.ranges != nullptr) {
      const RangeKeys keys = args.ranges[row_groups + group];
      range = {keys.low == 0 ? kNone : static_cast<F>(from_order_key(keys.low)),
               keys.high == 0 ? kNone : static_cast<F>(from_order_key(keys.high))};
    } else {
      range = {groups[g].low == 0 ? kNone : from_sortable(groups[g].low),
               groups[g].high == 0 ? kNone : from_sortable(groups[g].high)};
    }
    if (is_symmetric(args)) range.low = range.high = max(range.low, range.high);
    // The block that has the first column of a group stores what it has worked out.
    const bool first = group * args.group_size >= begin && (args.groups_per_row > 0 || row == 0);
    groups[g].encoding = finish_group(args, row_groups + group, range, first);
    groups[g].low = bit_cast<Key>(range.low);
    groups[g].high = bit_cast<Key>(range.high);
  }
  __syncthreads();

  const LaneBins bins = load_bins(lane);
  u8* const span_codes = args.codes + row * args.row_bytes + begin / kChunk * kBits;
  for (int step = 0; step < num_chunks; step += kThreads * kUnroll) {
    if (args.ranges != nullptr || num_chunks > kThreads * kUnroll) load_chunks(step);
#pragma unroll 1
    for (int u = 0; u < kUnroll; ++u) {
      const Part part = part_of(step + u * kThreads);
      const SpanGroup& group = groups[part.group];
      const Encoding e = group.encoding;
      const Chunk x = chunk_at(u);
      // What lies behind the end of a row needs the code of zero, which may not lie within the range. A given
      // range may be that of other elements.
      const bool within = with_range(args, x, [&](const auto& of_chunk) {  // not if one is not finite
        const Range<F> range = unpack(of_chunk);
        return range.low <= bit_cast<F>(group.low) && range.high <= bit_cast<F>(group.high);
      });
      const bool fast = kFast && !e.slow && part.in_first == kChunk && within;
      u64 bits = 0;
      if constexpr (kFast)
        bits = (clamps_high(args) ? encode_fast<true>(x, e, bins) : encode_fast<false>(x, e, bins)).bits();
      if (part.n == 0) continue;
      if (!fast) {
        const i64 index = span_index + part.offset;
        const auto encoding = [&](int i) {
          const int behind =
              i < part.in_first ? 0 : 1 + static_cast<int>((i - part.in_first) / args.group_size);
          return groups[part.group + behind].encoding;
        };
        bits = encode_slow(
            args, index, part.n, [&](int i) { return load_element(args.x, index + i); }, encoding);
      }
      store_part(span_codes + part.offset / kChunk * kBits, bits, part.n);
    }
  }
}

}  // namespace halfbyte::device
