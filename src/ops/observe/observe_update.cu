// observe, second step: the state takes up the ranges of a batch that other kernels left. A thread has a
// group.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_update(const __grid_constant__ ObserveUpdateArgs args) {
  const i64 group = block_index() * kThreads + threadIdx.x;
  const ObserveState& state = args.state;
  const bool is_mean = state.history == kMean;
  if (group == 0 && !is_mean) ++*state.num_batches;
  if (group >= args.num_groups) return;
  const Seen<F> before = state_of(state, group), batch = seen_of(left(&args.ranges[group]));
  store_state(state, group,
              is_mean ? observed_mean(before, batch, state.num_batches[group])
                      : observed(before, batch, state.history));
}

}  // namespace halfbyte::device
