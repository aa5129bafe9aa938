// The range of the finite elements of groups too large for one block, and of whole tensors. A block takes
// kRangeSpan elements of a group; ranges are joined by integer atomics, so that their order does not matter.
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "halfbyte_config.h"
#include "ops/quantize/quantize_args.h"

namespace halfbyte::device {

using F = Element::Compute;
using Key = decltype(sortable(F()));

constexpr int kThreads = kRangeThreads;
constexpr int kUnroll = 8;  // loads in flight

extern "C" __global__ void __launch_bounds__(kThreads)
    value_range(const __grid_constant__ ValueRangeArgs args) {
  const i64 block = block_index(), group = block / args.spans_per_group;
  if (group >= args.num_groups) return;
  const i64 begin = group / args.groups_per_row * args.cols + group % args.groups_per_row * args.group_size;
  const i64 group_cols = min(args.group_size, args.cols - group % args.groups_per_row * args.group_size);
  const i64 first = block % args.spans_per_group * kRangeSpan;
  const int n =
      static_cast<int>(clamp<i64>(group_cols - first, 0, kRangeSpan));  // a short group needs fewer blocks
  const auto* const x = static_cast<const Element::Memory*>(args.x) + begin + first;
  const int thread = static_cast<int>(threadIdx.x);

  Range<F> range = no_range<F>();
  bool finite = true;
  for (int step = thread; step < n; step += kThreads * kUnroll) {
    F values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = load(Element(), x[min(step + i * kThreads, n - 1)]);
    Range<F> here = {-values[0], values[0]};
#pragma unroll
    for (int i = 1; i < kUnroll; ++i) here = join(here, Range<F>{-values[i], values[i]});
    if (is_finite(here))
      range = join(range, here);
    else
      finite = false;
  }
  if (!finite) {
    range = no_range<F>();
#pragma unroll 1
    for (int i = thread; i < n; i += kThreads) {
      const F value = load(Element(), x[i]);
      if (formats::is_finite(value)) {
        range = join(range, Range<F>{-value, value});
      } else if (args.counts != nullptr) {
        atomic_add(&args.counts->num_nonfinite, 1);
        atomic_max(&args.counts->first_nonfinite_key, ~static_cast<u64>(begin + first + i));
      }
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) range = join(range, shuffle_xor(range, mask));
  if (thread % 32 == 0 && range.high >= -Float<F>::kMax) {
    atomic_max(&args.ranges[group].low, order_key(static_cast<double>(range.low)));
    atomic_max(&args.ranges[group].high, order_key(static_cast<double>(range.high)));
  }
}

}  // namespace halfbyte::device
