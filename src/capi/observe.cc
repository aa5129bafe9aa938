// Scales from ranges, observers, and their plans.
#include "capi/observe.h"

#include "capi/plan.h"

namespace halfbyte::capi {

static_assert(HALFBYTE_OBSERVER_MIN_MAX == static_cast<int32_t>(ObserverKind::min_max));
static_assert(HALFBYTE_OBSERVER_MOVING_AVERAGE == static_cast<int32_t>(ObserverKind::moving_average));
static_assert(HALFBYTE_OBSERVER_PERCENTILE == static_cast<int32_t>(ObserverKind::percentile));
static_assert(HALFBYTE_OBSERVER_MSE == static_cast<int32_t>(ObserverKind::mse));

halfbyte_qparams_config to_c(const QParamsConfig& config) {
  return {sizeof(halfbyte_qparams_config),         config.q_min, config.q_max, config.asymmetric,
          static_cast<int32_t>(config.scale_rule), config.eps};
}
halfbyte_observer_config to_c(const ObserverConfig& config) {
  return {sizeof(halfbyte_observer_config), static_cast<int32_t>(config.kind), config.momentum,
          config.percentile, nullptr};
}

QParamsConfig qparams_config_of(const halfbyte_qparams_config* given, const char* name) {
  const halfbyte_qparams_config c = read_struct(given, to_c(QParamsConfig{}), name);
  QParamsConfig config;
  config.q_min = c.q_min;
  config.q_max = c.q_max;
  config.asymmetric = flag_of(c.asymmetric, "config.asymmetric");
  config.scale_rule = enum_of(c.scale_rule, ScaleRule::mlx_edge, "config.scale_rule");
  config.eps = c.eps;
  return config;
}
ObserverConfig observer_config_of(const halfbyte_observer_config* given, const char* name) {
  const halfbyte_observer_config c = read_struct(given, to_c(ObserverConfig{}), name);
  ObserverConfig config;
  config.kind = enum_of(c.kind, ObserverKind::mse, "config.kind");
  config.momentum = c.momentum;
  config.percentile = c.percentile;
  config.qparams = qparams_config_of(c.qparams, "config.qparams");
  return config;
}

}  // namespace halfbyte::capi

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

halfbyte_observer_state empty_state() {
  halfbyte_observer_state state{};
  state.dtype = HALFBYTE_DTYPE_F32;
  return state;
}
// A structure whose arrays are there.
halfbyte_observer_state read_state(const halfbyte_observer_state* given, const char* name) {
  required(given, name);
  const halfbyte_observer_state state = read_struct(given, empty_state(), name);
  if (state.num_groups < 0) refuse("{}.num_groups must not be negative, got {}", name, state.num_groups);
  if (state.num_groups > 0) {
    required(state.min, "state.min");
    required(state.max, "state.max");
  }
  return state;
}
ObserverState state_of(const halfbyte_observer_state* given, const char* name) {
  const halfbyte_observer_state c = read_state(given, name);
  ObserverState state;
  state.min.assign(c.min, c.min + c.num_groups);
  state.max.assign(c.max, c.max + c.num_groups);
  state.dtype = dtype_of(c.dtype, "state.dtype");
  if (c.group_batches != nullptr)
    state.num_batches.assign(c.group_batches, c.group_batches + c.num_groups);
  else
    state.num_batches = {c.num_batches};
  return state;
}
// Into a structure of as many groups and counts, that read_state took.
void write_state(const ObserverState& state, halfbyte_observer_state* to) {
  halfbyte_observer_state c = read_state(to, "state");
  std::copy(state.min.begin(), state.min.end(), c.min);
  std::copy(state.max.begin(), state.max.end(), c.max);
  if (c.group_batches != nullptr)
    std::copy(state.num_batches.begin(), state.num_batches.end(), c.group_batches);
  else
    c.num_batches = state.num_batches[0];
  write_struct(to, c, "state");
}

// ---- Descriptors and arguments of the plans

halfbyte_observe_descriptor default_observe_descriptor() {
  const ObserveDescriptor defaults;
  halfbyte_observe_descriptor descriptor{};
  descriptor.granularity = static_cast<int32_t>(defaults.granularity);
  descriptor.axis = defaults.axis;
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.group_size = defaults.group_size;
  descriptor.alignment = defaults.alignment;
  return descriptor;
}

ObserveDescriptor descriptor_of(const halfbyte_observe_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_observe_descriptor c = read_struct(given, default_observe_descriptor(), "descriptor");
  ObserveDescriptor descriptor;
  descriptor.shape = shape_of(c.shape, c.ndim);
  descriptor.granularity = enum_of(c.granularity, Granularity::flat, "descriptor.granularity");
  descriptor.axis = c.axis;
  descriptor.group_size = c.group_size;
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.observer = observer_config_of(c.observer, "descriptor.observer");
  descriptor.alignment = c.alignment;
  return descriptor;
}
halfbyte_status shape_of_state(const halfbyte_observe_descriptor* given,
                               std::vector<int64_t> (ObserveDescriptor::*shape)() const, int32_t* ndim,
                               int64_t* extents, const char* name) {
  return guard([&] {
    required(ndim, "ndim");
    required(extents, name);
    const ObserveDescriptor descriptor = descriptor_of(given);
    check_descriptor(descriptor);
    write_shape((descriptor.*shape)(), ndim, extents);
  });
}
Observe::Args args_of(const ObserveDescriptor&, const halfbyte_observe_args* given) {
  required(given, "args");
  const halfbyte_observe_args args = read_struct(given, {}, "args");
  return {view_of(args.x, "x"), view_of(args.min, "min"), view_of(args.max, "max"),
          view_of(args.num_batches, "num_batches")};
}

halfbyte_qparams_descriptor default_qparams_descriptor() {
  const QParamsDescriptor defaults;
  halfbyte_qparams_descriptor descriptor{};
  descriptor.dtype = static_cast<int32_t>(defaults.dtype);
  descriptor.scale_dtype = static_cast<int32_t>(defaults.scale_dtype);
  descriptor.zero_point_dtype = HALFBYTE_UNSET;
  return descriptor;
}

QParamsDescriptor descriptor_of(const halfbyte_qparams_descriptor* given) {
  required(given, "descriptor");
  const halfbyte_qparams_descriptor c = read_struct(given, default_qparams_descriptor(), "descriptor");
  QParamsDescriptor descriptor;
  descriptor.shape = shape_of(c.shape, c.ndim);
  descriptor.config = qparams_config_of(c.config, "descriptor.config");
  descriptor.dtype = dtype_of(c.dtype, "descriptor.dtype");
  descriptor.scale_dtype = dtype_of(c.scale_dtype, "descriptor.scale_dtype");
  if (c.zero_point_dtype != HALFBYTE_UNSET)
    descriptor.zero_point_dtype = dtype_of(c.zero_point_dtype, "descriptor.zero_point_dtype");
  return descriptor;
}
ComputeQParams::Args args_of(const QParamsDescriptor&, const halfbyte_compute_qparams_args* given) {
  required(given, "args");
  const halfbyte_compute_qparams_args args = read_struct(given, {}, "args");
  return {view_of(args.min, "min"), view_of(args.max, "max"), view_of(args.scale, "scale"),
          optional_view_of(args.zero_point, "zero_point")};
}

}  // namespace

// ---- Scales from ranges

halfbyte_status halfbyte_qparams_config_init(halfbyte_qparams_config* config, size_t struct_size) {
  return init_struct(config, to_c(QParamsConfig{}), struct_size, "config");
}
halfbyte_status halfbyte_compute_qparams(double min, double max, const halfbyte_qparams_config* config,
                                         halfbyte_dtype scale_dtype, halfbyte_dtype dtype, double* scale,
                                         int32_t* zero_point) {
  return guard([&] {
    required(scale, "scale");
    required(zero_point, "zero_point");
    required(config, "config");
    const QParams params = compute_qparams(min, max, qparams_config_of(config, "config"),
                                           dtype_of(scale_dtype, "scale_dtype"), dtype_of(dtype, "dtype"));
    *scale = params.scale;
    *zero_point = params.zero_point;
  });
}

// ---- Observers

const char* halfbyte_observer_kind_name(halfbyte_observer_kind kind) {
  return kind < 0 || kind > HALFBYTE_OBSERVER_MSE ? nullptr : to_string(static_cast<ObserverKind>(kind));
}
halfbyte_status halfbyte_observer_kind_find(const char* word, halfbyte_observer_kind* kind) {
  return guard(
      [&] { required(kind, "kind") = static_cast<int32_t>(parse_observer_kind(&required(word, "word"))); });
}
halfbyte_status halfbyte_observer_config_init(halfbyte_observer_config* config, size_t struct_size) {
  return init_struct(config, to_c(ObserverConfig{}), struct_size, "config");
}
halfbyte_status halfbyte_observer_state_init(halfbyte_observer_state* state, size_t struct_size) {
  return init_struct(state, empty_state(), struct_size, "state");
}
halfbyte_status halfbyte_observer_state_reset(halfbyte_observer_state* state) {
  return guard([&] {
    const halfbyte_observer_state c = read_state(state, "state");
    const bool per_group = c.group_batches != nullptr;
    write_state(ObserverState::empty(c.num_groups, dtype_of(c.dtype, "state.dtype"),
                                     per_group ? ObserverKind::percentile : ObserverKind::min_max),
                state);
  });
}
halfbyte_status halfbyte_observer_state_update(halfbyte_observer_state* state,
                                               const halfbyte_observer_config* config,
                                               const double* batch_min, const double* batch_max) {
  return guard([&] {
    ObserverState seen = state_of(state, "state");
    required(config, "config");
    required(batch_min, "batch_min");
    required(batch_max, "batch_max");
    seen.update(observer_config_of(config, "config"), {batch_min, seen.min.size()},
                {batch_max, seen.min.size()});
    write_state(seen, state);
  });
}
halfbyte_status halfbyte_observer_state_merge(halfbyte_observer_state* state,
                                              const halfbyte_observer_config* config,
                                              const halfbyte_observer_state* other) {
  return guard([&] {
    ObserverState seen = state_of(state, "state");
    required(config, "config");
    seen.merge(observer_config_of(config, "config"), state_of(other, "other"));
    write_state(seen, state);
  });
}
halfbyte_status halfbyte_observer_state_qparams(const halfbyte_observer_state* state,
                                                const halfbyte_qparams_config* config,
                                                halfbyte_dtype scale_dtype, double* scale,
                                                int32_t* zero_point) {
  return guard([&] {
    const ObserverState seen = state_of(state, "state");
    required(config, "config");
    required(scale, "scale");
    required(zero_point, "zero_point");
    for (const QParams& params :
         seen.qparams(qparams_config_of(config, "config"), dtype_of(scale_dtype, "scale_dtype"))) {
      *scale++ = params.scale;
      *zero_point++ = params.zero_point;
    }
  });
}

halfbyte_status halfbyte_observer_reset(const DLTensor* min, const DLTensor* max, const DLTensor* num_batches,
                                        void* stream) {
  return guard([&] {
    reset_observer(view_of(min, "min"), view_of(max, "max"), view_of(num_batches, "num_batches"), stream);
  });
}
halfbyte_status halfbyte_observer_load(const DLTensor* min, const DLTensor* max, const DLTensor* num_batches,
                                       void* stream, halfbyte_observer_state* state) {
  return guard([&] {
    const halfbyte_observer_state c = read_state(state, "state");
    const ObserverState loaded =
        load_observer(view_of(min, "min"), view_of(max, "max"), view_of(num_batches, "num_batches"), stream);
    if (static_cast<int64_t>(loaded.min.size()) != c.num_groups ||
        static_cast<int32_t>(loaded.dtype) != c.dtype)
      refuse("state must have {} groups of dtype {}, got {} of {}", loaded.min.size(),
             static_cast<int32_t>(loaded.dtype), c.num_groups, c.dtype);
    const int64_t counts = c.group_batches != nullptr ? c.num_groups : 1;
    if (static_cast<int64_t>(loaded.num_batches.size()) != counts)
      refuse("state must have {}, as num_batches has {} counts",
             counts == 1 ? "group_batches" : "no group_batches", loaded.num_batches.size());
    write_state(loaded, state);
  });
}
halfbyte_status halfbyte_observer_store(const halfbyte_observer_state* state, const DLTensor* min,
                                        const DLTensor* max, const DLTensor* num_batches, void* stream) {
  return guard([&] {
    store_observer(state_of(state, "state"), view_of(min, "min"), view_of(max, "max"),
                   view_of(num_batches, "num_batches"), stream);
  });
}

// ---- Plans

HALFBYTE_PLAN(observe, Observe, halfbyte_observe_descriptor)
HALFBYTE_PLAN(compute_qparams, ComputeQParams, halfbyte_qparams_descriptor)

halfbyte_status halfbyte_observe_descriptor_init(halfbyte_observe_descriptor* descriptor,
                                                 size_t struct_size) {
  return init_struct(descriptor, default_observe_descriptor(), struct_size, "descriptor");
}
halfbyte_status halfbyte_observe_descriptor_state_shape(const halfbyte_observe_descriptor* descriptor,
                                                        int32_t* ndim, int64_t* state_shape) {
  return shape_of_state(descriptor, &ObserveDescriptor::state_shape, ndim, state_shape, "state_shape");
}
halfbyte_status halfbyte_observe_descriptor_count_shape(const halfbyte_observe_descriptor* descriptor,
                                                        int32_t* ndim, int64_t* count_shape) {
  return shape_of_state(descriptor, &ObserveDescriptor::count_shape, ndim, count_shape, "count_shape");
}
halfbyte_status halfbyte_qparams_descriptor_init(halfbyte_qparams_descriptor* descriptor,
                                                 size_t struct_size) {
  return init_struct(descriptor, default_qparams_descriptor(), struct_size, "descriptor");
}
