// What is behind a Plan. An op derives from Plan<Op>::Impl, specialises make_plan<Op> and instantiates
// Plan<Op>.
#pragma once

#include "halfbyte/plan.hpp"

namespace halfbyte {

template <class Op>
struct Plan<Op>::Impl {
  Device device;
  Descriptor descriptor;
  Sku sku;
  PrecisionGuarantee guarantee;
  int64_t workspace_size = 0;

  Impl() = default;
  Impl(const Impl&) = delete;
  virtual ~Impl() = default;
  // Throws Error(usage) where `run` would refuse the tensors.
  virtual void check(const Args& args) const = 0;
  // Checks them too.
  virtual void run(void* stream, void* workspace, const Args& args) const = 0;
  virtual Status status(const void* workspace, void* stream) const = 0;
};

// Checks the descriptor, chooses and compiles the kernels.
template <class Op>
std::shared_ptr<const typename Plan<Op>::Impl> make_plan(Device device,
                                                         const typename Op::Descriptor& descriptor,
                                                         const PlanPreference& preference);

template <class Op>
Plan<Op> Plan<Op>::select(Device device, const Descriptor& descriptor, const PlanPreference& preference) {
  return Plan(make_plan<Op>(device, descriptor, preference));
}
template <class Op>
Device Plan<Op>::device() const {
  return impl_->device;
}
template <class Op>
const typename Op::Descriptor& Plan<Op>::descriptor() const {
  return impl_->descriptor;
}
template <class Op>
const Sku& Plan<Op>::sku() const {
  return impl_->sku;
}
template <class Op>
const PrecisionGuarantee& Plan<Op>::precision_guarantee() const {
  return impl_->guarantee;
}
template <class Op>
int64_t Plan<Op>::workspace_size() const {
  return impl_->workspace_size;
}
template <class Op>
std::optional<Error> Plan<Op>::can_implement(const Args& args) const {
  try {
    impl_->check(args);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}
template <class Op>
void Plan<Op>::run(void* stream, void* workspace, const Args& args) const {
  impl_->run(stream, workspace, args);
}
template <class Op>
typename Op::Status Plan<Op>::status(const void* workspace, void* stream) const {
  return impl_->status(workspace, stream);
}

}  // namespace halfbyte
