// observe, second step: the state takes up the ranges of a batch that other kernels left. A thread has a
// group.
#include "ops/observe/observe.cuh"

namespace halfbyte::device {

extern "C" __global__ void __launch_bounds__(kThreads)
    observe_update(const __grid_constant__ ObserveUpdateArgs args) {
  const i64 group = block_index() * kThreads + threadIdx.x;
  double history = args.state.history;
  if (history == kMean) {
    const i64 before = *args.state.num_batches;
    history = static_cast<double>(before) / static_cast<double>(before + 1);
  }
  if (group < args.num_groups)
    take_up(args.state, group, state_of(args.state, group), left(&args.join.ranges[group]), history);
  __syncthreads();  // all have read the number of batches
  const i64 num_blocks = static_cast<i64>(gridDim.x) * gridDim.y;
  if (threadIdx.x == 0 && is_last(args.join.arrived, num_blocks)) ++*args.state.num_batches;
}

}  // namespace halfbyte::device
