// The ranges of groups of any shape. A warp, or where neighbouring groups lie side by side a thread, has a
// part of a group, a unit at a time: an element, or where kChunks a chunk. Where kCounts, elements that are
// not finite are counted; x is contiguous, in elements.
#include "grouped/ranges.cuh"
#include "grouped/ranges_args.h"

namespace halfbyte::device {

constexpr int kChunk = 16 / sizeof(Memory), kUnit = kChunks ? kChunk : 1;
constexpr int kUnroll = kWide ? 2 : 4;  // loads in flight; 64-bit divisions take the registers of some

extern "C" __global__ void __launch_bounds__(kRangesThreads, 4)
    HALFBYTE_KERNEL(const __grid_constant__ RangesArgs args) {
  using Index = Select<kWide, i64, u32>;  // 32-bit divisions are several times as fast
  const Groups& groups = args.groups;
  const i64 thread = block_index() * kRangesThreads + threadIdx.x;
  const auto item = static_cast<Index>(args.columns ? thread : thread / 32);
  const auto by = static_cast<Index>(args.columns ? groups.num_groups : args.splits);
  const Index quotient = item / by, rest = item - quotient * by;
  const Index number = args.columns ? rest : quotient, split = args.columns ? quotient : rest;
  if (number >= groups.num_groups || split >= args.splits)
    return;  // warps as a whole where lanes share a group
  const Groups::Group group = groups.group<kCounts>(number);
  const int lane = args.columns ? 0 : static_cast<int>(threadIdx.x % 32), lanes = args.columns ? 1 : 32;
  const i64 begin = split * args.per_split + lane,
            end = min(group.size, split * args.per_split + args.per_split);

  // The first element of a unit.
  const auto index_of = [&](i64 k) {
    return group.begin + groups.offset<kCounts>(group, static_cast<Index>(k));
  };
  const auto range_of_unit = [&](i64 k) {
    const auto* const x = static_cast<const Memory*>(args.x) + index_of(k);
    if constexpr (kChunks) {
      const ChunkOf<Element, kChunk> chunk = {load_once(reinterpret_cast<const Words4*>(x))};
      return unpack(signed_range(chunk));
    } else {
      const F value = load(Element(), *x);
      return Range<F>{-value, value};
    }
  };
  Range<F> range = no_range<F>();
  for (i64 k = begin; k < end; k += lanes * kUnroll) {
    Range<F> ranges[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) ranges[u] = range_of_unit(min(k + u * lanes, end - 1));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) range = join(range, ranges[u]);
  }
  if (begin < end && !is_finite(range)) {
    NonFinite found;
    range = no_range<F>();
#pragma unroll 1
    for (i64 k = begin; k < end; k += lanes)
      range = join(range, finite_range(args.x, index_of(k), kUnit, found));
    if constexpr (kCounts) found.report(args.counts);
  }
  if (!args.columns) range = warp_range(range);
  if (lane == 0) leave(&args.ranges[number], range);
  if constexpr (kCounts) wait_for_earlier();
}

}  // namespace halfbyte::device
