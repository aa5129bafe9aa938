// The ranges of the groups of linear quantization, of any shape. A warp, or where neighbouring groups lie
// side by side a thread, takes a part of a group; parts are joined by integer atomics, so that their order
// does not matter.
#include "grouped/linear.cuh"

namespace halfbyte::device {

constexpr int kChunk = 16 / sizeof(Memory), kUnit = kChunks ? kChunk : 1;
constexpr int kUnroll = kWide ? 2 : 4;  // loads in flight; 64-bit divisions take the registers of some

extern "C" __global__ void __launch_bounds__(kLinearThreads, 4)
    HALFBYTE_KERNEL(const __grid_constant__ LinearRangesArgs args) {
  using Index = Select<kWide, i64, u32>;  // 32-bit divisions are several times as fast
  const i64 thread = block_index() * kLinearThreads + threadIdx.x;
  const auto item = static_cast<Index>(args.columns ? thread : thread / 32);
  const auto by = static_cast<Index>(args.columns ? args.num_groups : args.splits);
  const Index quotient = item / by, rest = item - quotient * by;
  const Index group = args.columns ? rest : quotient, split = args.columns ? quotient : rest;
  if (group >= args.num_groups || split >= args.splits) return;  // warps as a whole where lanes share a group
  const Index axis_group = group / static_cast<Index>(args.groups_inner);
  const i64 i = group - axis_group * static_cast<Index>(args.groups_inner);
  const Index outer_group = axis_group / static_cast<Index>(args.groups_axis);
  const i64 o = outer_group,
            a = (axis_group - outer_group * static_cast<Index>(args.groups_axis)) * args.group_axis;
  const i64 group_axis = min(args.group_axis, args.axis - a);
  const i64 num_units = args.group_outer * group_axis * args.group_inner;
  const i64 begin = split * args.per_split, end = min(num_units, begin + args.per_split);
  const int lane = args.columns ? 0 : static_cast<int>(threadIdx.x % 32), lanes = args.columns ? 1 : 32;
  const i64 base = o * args.strides.outer + a * args.strides.axis + i * args.strides.inner;
  const auto* const x = static_cast<const Memory*>(args.x) + base;

  const auto offset_of = [&](i64 k) {
    auto rest_of = static_cast<Index>(k);
    Index inner = 0, outer = 0;
    if (args.group_inner > 1) {
      rest_of = static_cast<Index>(k) / static_cast<Index>(args.group_inner);
      inner = static_cast<Index>(k) - rest_of * static_cast<Index>(args.group_inner);
    }
    if (args.group_outer > 1) {
      outer = rest_of / static_cast<Index>(group_axis);
      rest_of -= outer * static_cast<Index>(group_axis);
    }
    return outer * args.strides.outer + rest_of * args.strides.axis + inner * args.strides.inner;
  };
  const auto range_of_unit = [&](i64 k) {
    const i64 offset = offset_of(k);
    if constexpr (kChunks) {
      const ChunkOf<Element, kChunk> chunk = {load_once(reinterpret_cast<const Words4*>(x + offset))};
      return unpack(signed_range(chunk));
    } else {
      const F value = load(Element(), x[offset]);
      return Range<F>{-value, value};
    }
  };
  Range<F> range = no_range<F>();
  for (i64 k = begin + lane; k < end; k += lanes * kUnroll) {
    Range<F> ranges[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) ranges[u] = range_of_unit(min(k + u * lanes, end - 1));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) range = join(range, ranges[u]);
  }
  if (begin + lane < end && !is_finite(range)) {
    range = no_range<F>();
#pragma unroll 1
    for (i64 k = begin + lane; k < end; k += lanes) {
      const i64 offset = offset_of(k);
#pragma unroll 1
      for (int j = 0; j < kUnit; ++j) {
        const F value = load(Element(), x[offset + j]);
        if (formats::is_finite(value)) range = join(range, Range<F>{-value, value});
      }
    }
  }
  if (!args.columns) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  }
  if (lane == 0 && range.high >= -Float<F>::kMax) {
    atomic_max(&args.ranges[group].low, order_key(static_cast<double>(range.low)));
    atomic_max(&args.ranges[group].high, order_key(static_cast<double>(range.high)));
  }
}

}  // namespace halfbyte::device
