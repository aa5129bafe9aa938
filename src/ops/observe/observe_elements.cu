// observe, groups of any shape and alignment: a warp, or where neighbouring groups lie side by side a thread,
// has a part of a group, an element at a time. Their ranges are joined by integer atomics; observe_update
// hands them to the state.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

constexpr int kUnroll = kWide ? 2 : 4;  // loads in flight; 64-bit divisions take the registers of some

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    observe_elements(const __grid_constant__ ObserveElementsArgs args) {
  using Index = Select<kWide, i64, u32>;  // 32-bit divisions are several times as fast
  const i64 thread = block_index() * kThreads + threadIdx.x;
  const auto item = static_cast<Index>(args.columns ? thread : thread / 32);
  const auto by = static_cast<Index>(args.columns ? args.num_groups : args.splits);
  const Index quotient = item / by, rest = item - quotient * by;
  const Index group = args.columns ? rest : quotient, split = args.columns ? quotient : rest;
  if (group >= args.num_groups || split >= args.splits) return;  // warps as a whole where lanes share a group
  const Index axis_group = group / static_cast<Index>(args.groups_inner);
  const i64 i = group - axis_group * static_cast<Index>(args.groups_inner);
  const Index outer_group = axis_group / static_cast<Index>(args.groups_axis);
  const i64 a = (axis_group - outer_group * static_cast<Index>(args.groups_axis)) * args.group_axis;
  const i64 group_axis = min(args.group_axis, args.axis - a);
  const i64 n = args.group_outer * group_axis * args.group_inner;
  const int lane = args.columns ? 0 : static_cast<int>(threadIdx.x % 32), lanes = args.columns ? 1 : 32;
  const i64 begin = split * args.per_split + lane, end = min(n, split * args.per_split + args.per_split);
  const i64 base = outer_group * args.outer_stride + a * args.axis_stride + i;

  const auto index_of = [&](i64 k) {
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
    return base + static_cast<i64>(outer) * args.outer_stride + static_cast<i64>(rest_of) * args.axis_stride +
           static_cast<i64>(inner);
  };
  const auto* const x = static_cast<const Memory*>(args.common.x);
  Range<F> range = no_range<F>();
  for (i64 k = begin; k < end; k += lanes * kUnroll) {
    F values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) values[u] = load(Element(), x[index_of(min(k + u * lanes, end - 1))]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) range = join(range, Range<F>{-values[u], values[u]});
  }
  if (begin < end && !is_finite(range)) {
    NonFinite found;
    range = no_range<F>();
#pragma unroll 1
    for (i64 k = begin; k < end; k += lanes) take_finite(args.common.x, index_of(k), range, found);
    found.report(args.common.counts);
  }
  if (!args.columns) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  }
  if (lane == 0) leave(&args.common.join.ranges[group], range);
  wait_for_earlier();
}

}  // namespace halfbyte::device
