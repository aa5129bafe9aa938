// What the plan functions of all operations share.
#pragma once

#include <vector>

#include "capi/support.h"
#include "halfbyte/plan.hpp"

struct halfbyte_plan {
  virtual ~halfbyte_plan() = default;
  virtual halfbyte::Device device() const = 0;
  virtual const halfbyte::Sku& sku() const = 0;
  virtual const halfbyte::PrecisionGuarantee& guarantee() const = 0;
  virtual int64_t workspace_size() const = 0;
  virtual halfbyte::QuantizeStatus status(void* stream, const halfbyte::Workspace& workspace) const = 0;
};

namespace halfbyte::capi {

template <class Op>
struct PlanOf : halfbyte_plan {
  explicit PlanOf(Plan<Op> of) : plan(std::move(of)) {}
  Device device() const override { return plan.device(); }
  const Sku& sku() const override { return plan.sku(); }
  const PrecisionGuarantee& guarantee() const override { return plan.precision_guarantee(); }
  int64_t workspace_size() const override { return plan.workspace_size(); }
  QuantizeStatus status(void* stream, const Workspace& workspace) const override {
    return plan.status(stream, workspace);
  }

  Plan<Op> plan;
};

// `op` as its Sku names it.
template <class Op>
const Plan<Op>& plan_of(const halfbyte_plan* plan, const char* op) {
  const auto* typed = dynamic_cast<const PlanOf<Op>*>(&required(plan, "plan"));
  if (typed == nullptr) refuse("plan must be one of {}, got one of {}", op, plan->sku().op);
  return typed->plan;
}

// The extents of a descriptor.
inline std::vector<int64_t> shape_of(const int64_t* shape, int32_t ndim) {
  return extents_of(shape, ndim, 0, "descriptor.shape", "descriptor.ndim");
}
// The shape of scales, to C: see halfbyte_linear_descriptor_scale_shape.
inline void write_shape(const std::vector<int64_t>& from, int32_t* ndim, int64_t* shape) {
  std::copy(from.begin(), from.end(), shape);
  *ndim = static_cast<int32_t>(from.size());
}

// NULL: the defaults.
inline PlanPreference preference_of(const halfbyte_plan_preference* given) {
  const halfbyte_plan_preference preference = read_struct(given, {}, "preference");
  return {threads_of(preference.num_threads, "preference.num_threads")};
}

// The functions of an operation. `descriptor` and `args` convert what C gave, where errors become statuses.

template <class Op, class Descriptor>
halfbyte_status select_plan(DLDevice device, const Descriptor& descriptor,
                            const halfbyte_plan_preference* given, halfbyte_plan** plan) {
  return guard([&] {
    required(plan, "plan");
    const PlanPreference preference = preference_of(given);
    *plan = new PlanOf<Op>(Plan<Op>::select(from_dlpack(device), descriptor(), preference));
  });
}
template <class Op, class Args>
halfbyte_status can_implement(const char* op, const halfbyte_plan* plan, const Args& args) {
  return guard([&] {
    const Plan<Op>& typed = plan_of<Op>(plan, op);
    if (const auto error = typed.can_implement(args(typed.descriptor()))) throw Error(*error);
  });
}
template <class Op, class Args>
halfbyte_status run_plan(const char* op, const halfbyte_plan* plan, void* stream, const Workspace& workspace,
                         const Args& args) {
  return guard([&] {
    const Plan<Op>& typed = plan_of<Op>(plan, op);
    typed.run(stream, workspace, args(typed.descriptor()));
  });
}

}  // namespace halfbyte::capi

// Defines the functions that halfbyte.h declares for an operation. In sight must be
// descriptor_of(const descriptor_type*) and args_of(const Op::Descriptor&, const halfbyte_NAME_args*).
#define HALFBYTE_PLAN(name, Op, descriptor_type)                                                       \
  halfbyte_status halfbyte_##name##_select(DLDevice device, const descriptor_type* descriptor,         \
                                           const halfbyte_plan_preference* preference,                 \
                                           halfbyte_plan** plan) {                                     \
    return halfbyte::capi::select_plan<Op>(                                                            \
        device, [&] { return descriptor_of(descriptor); }, preference, plan);                          \
  }                                                                                                    \
  halfbyte_status halfbyte_##name##_args_init(halfbyte_##name##_args* args, size_t struct_size) {      \
    return halfbyte::capi::init_struct(args, {}, struct_size, "args");                                 \
  }                                                                                                    \
  halfbyte_status halfbyte_##name##_can_implement(const halfbyte_plan* plan,                           \
                                                  const halfbyte_##name##_args* args) {                \
    return halfbyte::capi::can_implement<Op>(                                                          \
        #name, plan, [&](const Op::Descriptor& descriptor) { return args_of(descriptor, args); });     \
  }                                                                                                    \
  halfbyte_status halfbyte_##name##_run(const halfbyte_plan* plan, void* stream, void* workspace,      \
                                        int64_t workspace_bytes, const halfbyte_##name##_args* args) { \
    return halfbyte::capi::run_plan<Op>(                                                               \
        #name, plan, stream, {workspace, workspace_bytes},                                             \
        [&](const Op::Descriptor& descriptor) { return args_of(descriptor, args); });                  \
  }
