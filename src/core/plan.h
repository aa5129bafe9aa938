// What is behind a Plan. An op derives from Plan<Op>::Impl: its constructor chooses the kernel and declares a
// table of the arguments, `execute` runs the kernel. HALFBYTE_DEFINE_PLAN makes a Plan of it.
//
//   struct NegateImpl : NegatePlan::Impl {
//     NegateImpl(Device device, const NegateDescriptor& d, const PlanPreference& preference)
//         : Impl("negate", device, d, preference) {
//       tensor("x", &Args::x, d.dtype, d.shape).promised(d.alignment);
//       tensor("y", &Args::y, d.dtype, d.shape).promised(d.alignment).written();
//       in_place("y", "x");
//     }
//     void execute(const Args& args, void* stream, void* workspace) const override { ... }
//   };
#pragma once

#include <array>
#include <functional>

#include "core/plan_base.h"

namespace halfbyte {

template <class Op>
struct Plan<Op>::Impl : PlanBase {
  using Args = typename Op::Args;

  Descriptor descriptor;

  // Checks the descriptor, also by `rules`, which are those of this op among others with the same descriptor.
  Impl(const char* name, Device on, const Descriptor& of, const PlanPreference& preference,
       void (*rules)(const char* op, const Descriptor& descriptor) = nullptr)
      : PlanBase(name, on, checked(name, of, rules).dtype, preference), descriptor(of) {}

  // Throws Error(usage) where `run` would refuse the arguments.
  void check(const Args& args) const {
    std::array<ArgumentMemory, kMaxArguments> memory;
    check_arguments(args, memory);
  }
  // Checks them too.
  void run(void* stream, const Workspace& workspace, const Args& args) const {
    std::array<ArgumentMemory, kMaxArguments> memory;
    const std::span<const ArgumentMemory> touched = check_arguments(args, memory);
    const bool has_none = workspace.data == nullptr && workspace.num_bytes == 0;
    if (has_none && device.kind == DeviceKind::cpu)
      return execute(args, stream, ThreadWorkspace(workspace_size).data());
    check_workspace(op, workspace, workspace_size, device, touched);
    execute(args, stream, workspace.data);
  }

 protected:
  // ---- The table. What is wrong is found in the order of its rows, which have the names of errors.
  template <class Data>
  ArgumentRow& tensor(std::string name, BasicTensorView<Data> Args::*view, DType dtype,
                      std::vector<int64_t> shape) {
    finds_.push_back([view](const Args& args, ArgumentData& data) { data = data_of(args.*view); });
    return add({std::move(name), dtype, std::move(shape)});
  }
  // `find` returns an ArgumentData.
  template <class Find>
  ArgumentRow& memory(std::string name, Find find, int64_t num_bytes) {
    finds_.push_back([find](const Args& args, ArgumentData& data) { data = find(args); });
    return add({std::move(name), num_bytes});
  }

  // ---- What a table does not say; throw Error(usage).
  // Of what is no tensor: before the rows.
  virtual void check_values(const Args&) const {}
  // Of strides: of tensors that are as their rows have it.
  virtual void check_strides(const Args&) const {}

  // ---- The run, of checked arguments: what is absent has null for its data. On the CPU the status is
  // written to status_in(workspace); on a CUDA device the kernels count in the workspace.
  virtual void execute(const Args& args, void* stream, void* workspace) const = 0;
  static QuantizeStatus& status_in(void* workspace) { return *static_cast<QuantizeStatus*>(workspace); }

 private:
  static_assert(std::is_same_v<typename Op::Status, QuantizeStatus>);

  static const Descriptor& checked(const char* name, const Descriptor& of,
                                   void (*rules)(const char* op, const Descriptor& descriptor)) {
    check_problem([&] {
      check_descriptor(of);
      if (rules != nullptr) rules(name, of);
    });
    return of;
  }
  // Returns what a run touches, in `memory`.
  std::span<const ArgumentMemory> check_arguments(const Args& args, std::span<ArgumentMemory> memory) const {
    check_values(args);
    std::array<ArgumentData, kMaxArguments> data;
    for (size_t i = 0; i < finds_.size(); ++i) finds_[i](args, data[i]);
    memory = memory.first(finds_.size());
    check_rows(data, memory);
    check_strides(args);
    check_overlap(data, memory);
    return memory;
  }

  std::vector<std::function<void(const Args& args, ArgumentData& data)>> finds_;  // of each row
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
void Plan<Op>::run(void* stream, const Workspace& workspace, const Args& args) const {
  impl_->run(stream, workspace, args);
}
template <class Op>
typename Op::Status Plan<Op>::status(void* stream, const Workspace& workspace) const {
  return impl_->status(stream, workspace);
}

}  // namespace halfbyte

// In namespace halfbyte: Plan<OP> is what `IMPL` implements.
#define HALFBYTE_DEFINE_PLAN(OP, IMPL)                                                                 \
  template <>                                                                                          \
  std::shared_ptr<const Plan<OP>::Impl> make_plan<OP>(Device device, const OP::Descriptor& descriptor, \
                                                      const PlanPreference& preference) {              \
    const auto made = std::make_shared<IMPL>(device, descriptor, preference);                          \
    set_enumerators(made->sku);                                                                        \
    return made;                                                                                       \
  }                                                                                                    \
  template class Plan<OP>
