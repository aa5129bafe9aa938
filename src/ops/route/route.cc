// Slots in the order of their experts. On the CPU by counting, on one thread: there are few against the rows
// that they stand for.
#include "ops/route/route.h"

#include <algorithm>
#include <numeric>

#include "core/expect.h"
#include "core/plan.h"

namespace halfbyte {
namespace {

constexpr const char* kDescriptor = "route descriptor";

// offsets have how many slots an expert has, then where its next one goes.
template <class T>
void run_on_cpu(const RouteDescriptor& d, const RouteTensors& tensors) {
  const auto* const experts = static_cast<const T*>(tensors.experts);
  const auto num_slots = static_cast<int32_t>(d.tokens * d.top_k);
  int32_t none = 0;  // where the next slot of no expert goes
  const auto next = [&](int32_t slot) -> int32_t& {
    const T expert = experts[slot];
    return expert >= 0 && expert < d.num_experts ? tensors.offsets[expert] : none;
  };
  std::fill_n(tensors.offsets, d.num_experts, 0);
  for (int32_t slot = 0; slot < num_slots; ++slot) ++next(slot);
  std::exclusive_scan(tensors.offsets, tensors.offsets + d.num_experts, tensors.offsets, 0);
  none = num_slots - none;
  for (int32_t slot = 0; slot < num_slots; ++slot) tensors.slots[next(slot)++] = slot;
}

struct RouteImpl : RoutePlan::Impl {
  std::shared_ptr<const RouteCuda> cuda;  // null: the CPU

  RouteImpl(Device on, const RouteDescriptor& d, const PlanPreference& preference)
      : Impl("route", on, d, preference) {
    tensor("experts", &Args::experts, d.dtype, {d.tokens, d.top_k});
    tensor("offsets", &Args::offsets, DType::i32, {d.num_experts}).written();
    tensor("slots", &Args::slots, DType::i32, {d.tokens * d.top_k}).written();
    finds_nothing();
    sku.aux_element = DType::i32;
    sku.dtypes = fmt::format("{} -> i32", to_string(d.dtype));
    if (on.kind != DeviceKind::cuda) return;
    cuda = select_route_cuda(on.index, d);
    sku.kernel = "route";
  }

  void execute(const Args& args, void* stream, void*) const override {
    const RouteTensors tensors{args.experts.data, static_cast<int32_t*>(args.offsets.data),
                               static_cast<int32_t*>(args.slots.data)};
    if (cuda)
      run_route_cuda(*cuda, tensors, stream);
    else if (descriptor.dtype == DType::i64)
      run_on_cpu<int64_t>(descriptor, tensors);
    else
      run_on_cpu<int32_t>(descriptor, tensors);
  }
};

}  // namespace

void check_descriptor(const RouteDescriptor& d) {
  HALFBYTE_MUST(d.tokens >= 0, invalid_problem, kDescriptor, "tokens", "be", ">= 0", d.tokens);
  HALFBYTE_MUST(d.top_k >= 1, invalid_problem, kDescriptor, "top_k", "be", ">= 1", d.top_k);
  HALFBYTE_MUST(d.num_experts >= 1 && d.num_experts <= int64_t{1} << 20, invalid_problem, kDescriptor,
                "num_experts", "be", "1 to 2^20", d.num_experts);
  HALFBYTE_CHECK(d.tokens <= INT32_MAX / d.top_k, usage,
                 "{}: tokens times top_k must be at most 2^31 - 1, got {} times {}", kDescriptor, d.tokens,
                 d.top_k);
  HALFBYTE_MUST(d.dtype == DType::i32 || d.dtype == DType::i64, unsupported, kDescriptor, "dtype", "be",
                "i32 or i64", to_string(d.dtype));
}

HALFBYTE_DEFINE_PLAN(Route, RouteImpl);

}  // namespace halfbyte
