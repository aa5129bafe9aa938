#include "ops/observe/observe.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/expect.h"
#include "core/plan.h"
#include "core/plan_device.h"
#include "core/tensor_check.h"
#include "cpu/parallel.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

constexpr const char* kOp = "observe";
constexpr const char* kDescriptor = "observe descriptor";

Grouping grouping_of(const ObserveDescriptor& d) {
  return make_grouping(kDescriptor, {d.shape, d.granularity, d.axis, d.group_size}, d.dtype);
}

double history_of(const ObserverConfig& config) {
  switch (config.kind) {
    case ObserverKind::min_max:
      return -1;
    case ObserverKind::moving_average:
      return config.momentum;
    default:
      return kMean;
  }
}

struct ObserveImpl : ObservePlan::Impl {
  ObserveProblem problem;
  std::shared_ptr<const ObserveCuda> cuda;  // null: the CPU

  ObserveImpl(Device on, const ObserveDescriptor& d, const PlanPreference& preference)
      : Impl(kOp, on, d, preference), problem(observe_problem(d, on, preference)) {
    const DType state = d.state_dtype();
    tensor("x", &Args::x, d.dtype, d.shape).promised(d.alignment);
    tensor("min", &Args::min, state, problem.scale_shape).written();
    tensor("max", &Args::max, state, problem.scale_shape).written();
    tensor("num_batches", &Args::num_batches, DType::i64, d.count_shape()).written();
    sku.dtypes = fmt::format("{} -> {}", to_string(d.dtype), to_string(state));
    sku.aux_element = state;
    // Ranges of groups that are found in parts. A search allocates what it sorts and measures.
    if (problem.history != kMean)
      needs_scratch(state == DType::f64 ? Scratch::bytes_of<formats::Seen<double>>(problem.num_scales)
                                        : Scratch::bytes_of<formats::Seen<float>>(problem.num_scales));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_observe_cuda(problem, d.alignment);
    sku.kernel = kernel_name(*cuda);
    workspace_size = workspace_bytes(*cuda);
  }

  void execute(const Args& args, void* stream, void* workspace) const override {
    Scratch memory = scratch(workspace);
    const ObserveTensors tensors{args.x.data, args.min.data, args.max.data,
                                 static_cast<int64_t*>(args.num_batches.data), &memory};
    if (cuda)
      run_observe_cuda(*cuda, tensors, stream, workspace);
    else
      status_in(workspace) = observe_cpu(problem, tensors);
  }
};

// The tensors of a state, an empty one of which is the result. `written`: all of them, else they are read.
ObserverState check_state(const char* op, const ConstTensorView& min, const ConstTensorView& max,
                          const ConstTensorView& num_batches, bool written) {
  HALFBYTE_MUST(min.dtype == DType::f32 || min.dtype == DType::f64, invalid_argument, op, "min", "be",
                "f32 or f64", to_string(min.dtype));
  const bool per_group =
      num_batches.shape.size() > 1 || (num_batches.shape.size() == 1 && num_batches.shape[0] != 1);
  const Extents counts = per_group ? min.shape : Extents();
  const std::array<ArgumentData, 3> data{data_of(min), data_of(max), data_of(num_batches)};
  const std::array<TensorArgument, 3> arguments{
      {{"min", &data[0], min.dtype, min.shape, written, size_of(min.dtype)},
       {"max", &data[1], min.dtype, min.shape, written, size_of(min.dtype)},
       {"num_batches", &data[2], DType::i64, counts, written, size_of(DType::i64)}}};
  std::array<ArgumentMemory, 3> memory;
  for (size_t i = 0; i < arguments.size(); ++i) memory[i] = check_tensor(op, arguments[i], min.device);
  check_all_apart(op, memory);
  return ObserverState::empty(num_elements(min), min.dtype,
                              per_group ? ObserverKind::mse : ObserverKind::min_max);
}

template <class T>
int64_t bytes_of(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size() * sizeof(T));
}
// As the tensor has them, F for its dtype.
template <class F>
std::vector<F> converted(const std::vector<double>& values) {
  std::vector<F> result(values.size());
  std::ranges::transform(values, result.begin(), [](double value) { return static_cast<F>(value); });
  return result;
}
template <class F>
void store(const ObserverState& state, const TensorView& min, const TensorView& max,
           const TensorView& num_batches, void* stream) {
  const std::vector<F> low = converted<F>(state.min), high = converted<F>(state.max);
  copy(min.device, min.data, low.data(), bytes_of(low), stream);
  copy(min.device, max.data, high.data(), bytes_of(low), stream);
  copy(min.device, num_batches.data, state.num_batches.data(), bytes_of(state.num_batches), stream);
  wait_for(min.device, stream);  // what is copied lives till here
}
template <class F>
void load(ObserverState& state, const ConstTensorView& min, const ConstTensorView& max,
          const ConstTensorView& num_batches, void* stream) {
  std::vector<F> low(state.min.size()), high(low.size());
  copy(min.device, low.data(), min.data, bytes_of(low), stream);
  copy(min.device, high.data(), max.data, bytes_of(low), stream);
  copy(min.device, state.num_batches.data(), num_batches.data, bytes_of(state.num_batches), stream);
  wait_for(min.device, stream);
  std::ranges::copy(low, state.min.begin());
  std::ranges::copy(high, state.max.begin());
}

}  // namespace

std::vector<int64_t> ObserveDescriptor::state_shape() const { return grouping_of(*this).scale_shape; }
std::vector<int64_t> ObserveDescriptor::count_shape() const {
  return counts_per_group(observer.kind) ? state_shape() : std::vector<int64_t>();
}

void check_descriptor(const ObserveDescriptor& d) {
  HALFBYTE_MUST(is_floating(d.dtype), unsupported, kDescriptor, "dtype", "be", "f32, f64, f16 or bf16",
                to_string(d.dtype));
  grouping_of(d);  // throws
  check_config(d.observer);
  check_alignment(kDescriptor, d.alignment, d.dtype);
}

void reset_observer(const TensorView& min, const TensorView& max, const TensorView& num_batches,
                    void* stream) {
  store_observer(check_state("reset_observer", min, max, num_batches, true), min, max, num_batches, stream);
}

ObserverState load_observer(const ConstTensorView& min, const ConstTensorView& max,
                            const ConstTensorView& num_batches, void* stream) {
  ObserverState state = check_state("load_observer", min, max, num_batches, false);
  if (min.dtype == DType::f64)
    load<double>(state, min, max, num_batches, stream);
  else
    load<float>(state, min, max, num_batches, stream);
  return state;
}

void store_observer(const ObserverState& state, const TensorView& min, const TensorView& max,
                    const TensorView& num_batches, void* stream) {
  check_state(state);
  const ObserverState there = check_state("store_observer", min, max, num_batches, true);
  HALFBYTE_CHECK(state.dtype == there.dtype && state.min.size() == there.min.size(), usage,
                 "store_observer: min and max must have the {} groups of the state in {}, got {} in {}",
                 state.min.size(), to_string(state.dtype), there.min.size(), to_string(there.dtype));
  HALFBYTE_CHECK(state.num_batches.size() == there.num_batches.size(), usage,
                 "store_observer: num_batches must have the {} counts of the state, got {}",
                 state.num_batches.size(), there.num_batches.size());
  if (min.dtype == DType::f64)
    store<double>(state, min, max, num_batches, stream);
  else
    store<float>(state, min, max, num_batches, stream);
}

ObserveProblem observe_problem(const ObserveDescriptor& descriptor, Device device,
                               const PlanPreference& preference) {
  ObserveProblem problem;
  static_cast<Grouping&>(problem) = grouping_of(descriptor);
  problem.dtype = descriptor.dtype;
  problem.observer = descriptor.observer;
  problem.history = history_of(descriptor.observer);
  problem.num_threads = threads_for(preference.num_threads, static_cast<double>(problem.num_elements()));
  problem.device = device;
  return problem;
}

HALFBYTE_DEFINE_PLAN(Observe, ObserveImpl);

}  // namespace halfbyte
