// quantize for any group size, row length and alignment. A block takes a span of a row: the ranges of its groups by
// atomics in shared memory, their parameters, then the codes, for which x is read again from the caches. Spans are
// whole groups, so that no block waits for another; groups too large for that bring their ranges (value_range.cu),
// and a span is then any part of a row.
#include "ops/quantize/quantize.cuh"

namespace halfbyte::device {

using Key = decltype(sortable(F()));

constexpr int kThreads = kSpansThreads;
// Chunks a thread reads at a time. A span of at most so many a thread stays in registers.
constexpr int kUnroll = 8 / static_cast<int>(sizeof(Memory));

struct SpanGroup {
  Key low, high;  // sortable(-min), sortable(max); 0: none
  Encoding encoding;
};

// kAligned: rows and chunks begin at multiples of 16 bytes, and all rows but their chunks are whole.
__device__ __forceinline__ Chunk load_part(const QuantizeArgs& args, i64 index, int n) {
  if constexpr (kAligned) {
    return n > 0 ? load_chunk(args.x, index / kChunk) : Chunk{};
  } else {
    Chunk x{};
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < n) x.set(i, static_cast<const Memory*>(args.x)[index + i]);
    return x;
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
// Adds a chunk of each lane of the warp, all of one group and finite.
__device__ __forceinline__ void add_warp_range(SpanGroup& group, const Chunk& x, int lane) {
  auto packed = chunk_range(Element(), x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) packed = join(packed, shuffle_xor(packed, mask));
  if (lane != 0) return;
  const Range<F> range = unpack(packed);
  shared_atomic_max(&group.low, sortable(range.low));
  shared_atomic_max(&group.high, sortable(range.high));
}

// No element is beyond the range of the group.
__device__ __forceinline__ bool is_within(const Chunk& x, const SpanGroup& group) {
  const Range<F> range = range_of(x);
  return sortable(range.low) <= group.low && sortable(range.high) <= group.high;
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

extern "C" __global__ void __launch_bounds__(kThreads, kFast ? 3 : 2) quantize_spans(const __grid_constant__ QuantizeArgs args) {
  __shared__ SpanGroup groups[kMaxSpanGroups];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const i64 block = block_index(), row = block / args.spans_per_row;
  if (row >= args.rows) return;
  const i64 begin = block % args.spans_per_row * args.span_cols, end = min(args.cols, begin + args.span_cols);
  const i64 first_group = begin / args.group_size, row_groups = row * args.groups_per_row;
  const int num_groups = static_cast<int>((end - 1) / args.group_size - first_group) + 1;

  // Column `col` of a chunk of n elements: its group among `groups`, and how many of the n belong to it.
  struct Part {
    i64 col;
    int n, group, in_first;
  };
  const auto part_of = [&](i64 step) {
    Part part;
    part.col = begin + (step + thread) * kChunk;
    part.n = static_cast<int>(clamp<i64>(end - part.col, 0, kChunk));
    part.group = 0;
    part.in_first = part.n;
    if (part.n == 0 || num_groups == 1) return part;
    if (args.ranges != nullptr) {  // at most two groups
      const i64 left = (first_group + 1) * args.group_size - part.col;
      part.group = left <= 0 ? 1 : 0;
      if (left > 0) part.in_first = static_cast<int>(min<i64>(part.n, left));
    } else {
      const u32 offset = static_cast<u32>(part.col - first_group * args.group_size);
      const u32 size = static_cast<u32>(args.group_size);
      part.group = static_cast<int>(offset / size);
      part.in_first = min(part.n, static_cast<int>(size - offset % size));
    }
    return part;
  };

  const i64 num_chunks = (end - begin + kChunk - 1) / kChunk;
  Chunk x[kUnroll];
  const auto load_chunks = [&](i64 step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const i64 col = begin + (step + u * kThreads + thread) * kChunk;
      x[u] = load_part(args, row * args.cols + col, static_cast<int>(clamp<i64>(end - col, 0, kChunk)));
    }
  };
  if (args.ranges == nullptr) {
    for (int g = thread; g < num_groups; g += kThreads) groups[g].low = groups[g].high = 0;
    __syncthreads();
    for (i64 step = 0; step < num_chunks; step += kThreads * kUnroll) {
      load_chunks(step);
      u32 slow = 0;  // chunks that are left for the loop below
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Part part = part_of(step + u * kThreads);
        const int warp_group = shuffle(part.group, 0);
        if (__all_sync(kAllLanes, part.in_first == kChunk && part.group == warp_group && all_finite(x[u])))
          add_warp_range(groups[warp_group], x[u], lane);
        else
          slow |= 1u << u;
      }
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) {
        if (!(slow >> u & 1)) continue;
        const Part part = part_of(step + u * kThreads);
        const Chunk again = load_part(args, row * args.cols + part.col, part.n);
        for (int i = 0, group = part.group, next = part.in_first; i < part.n; ++group) {
          add_range(groups[group], again, i, next);
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
    // The block that has the first column of a group stores what it has worked out.
    const bool first = group * args.group_size >= begin && (args.groups_per_row > 0 || row == 0);
    groups[g].encoding = finish_group(args, row_groups + group, range, first);
    groups[g].low = sortable(range.low);
    groups[g].high = sortable(range.high);
  }
  __syncthreads();

  const LaneBins bins = load_bins(lane);
  u8* const row_codes = args.codes + row * args.row_bytes;
  for (i64 step = 0; step < num_chunks; step += kThreads * kUnroll) {
    if (args.ranges != nullptr || num_chunks > kThreads * kUnroll) load_chunks(step);
    u32 slow = 0;  // chunks that are left for the loop below
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Part part = part_of(step + u * kThreads);
      const SpanGroup& group = groups[part.group];
      const Encoding e = group.encoding;
      // What lies behind the end of a row needs the code of zero, which may not lie within the range. A given
      // range may be that of other elements.
      const bool fast = kFast && !e.slow && part.in_first == kChunk && all_finite(x[u]) &&
                        (args.ranges == nullptr || is_within(x[u], group));
      u64 bits = 0;
      if constexpr (kFast) bits = encode_fast(x[u], e, bins).bits();
      if (part.n == 0) continue;
      if (fast)
        store_part(row_codes + part.col / kChunk * kBits, bits, part.n);
      else
        slow |= 1u << u;
    }
#pragma unroll 1
    for (int u = 0; u < kUnroll; ++u) {
      if (!(slow >> u & 1)) continue;
      const Part part = part_of(step + u * kThreads);
      const i64 index = row * args.cols + part.col;
      const auto encoding = [&](int i) {
        const int behind = i < part.in_first ? 0 : 1 + static_cast<int>((i - part.in_first) / args.group_size);
        return groups[part.group + behind].encoding;
      };
      const u64 bits =
          encode_slow(args, index, part.n, [&](int i) { return load_element(args.x, index + i); }, encoding);
      store_part(row_codes + part.col / kChunk * kBits, bits, part.n);
    }
  }
}

}  // namespace halfbyte::device
