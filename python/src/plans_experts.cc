// Experts: who gets which row, products.
#include "halfbyte/qgemm_grouped.hpp"

#include "plans.h"

namespace halfbyte::python {

void bind_expert_plans(nb::module_& module) {
  {
    using Args = Route::Args;
    PlanClass<Route> plan(
        module, "RoutePlan",
        "Slots in the order of their experts: experts [tokens, top_k] -> offsets [num_experts], where the "
        "slots "
        "of an expert end, and slots [tokens * top_k]; i32.\n\n"
        "    >>> d = halfbyte.RouteDescriptor(tokens=2, top_k=2, num_experts=3)\n"
        "    >>> plan = halfbyte.RoutePlan.select(\"cpu\", d)\n"
        "    >>> offsets, slots = np.empty(3, np.int32), np.empty(4, np.int32)\n"
        "    >>> plan.run(experts=np.array([[2, 0], [0, 2]], np.int32), offsets=offsets, slots=slots)\n"
        "    >>> offsets.tolist(), slots.tolist()\n"
        "    ([2, 2, 4], [1, 2, 0, 3])");
    plan.read("experts", &Args::experts).write("offsets", &Args::offsets).write("slots", &Args::slots);
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, experts: object, offsets: object, "
        "slots: object) -> None");
  }
  {
    using Args = QgemmGrouped::Args;
    PlanClass<QgemmGrouped> plan(
        module, "QgemmGroupedPlan",
        "y[row] = x[row] . W[e]^T (+ bias[e]), or with descriptor.transposed x[row] . W[e], of the expert e "
        "of "
        "the row. `weight`: the bytes of the packed weights of all experts, PackedExperts.data.\n\n"
        "    >>> w = halfbyte.pack_experts(halfbyte.quantize(np.ones((3, 64, 64), np.float32), \"int8\"))\n"
        "    >>> d = halfbyte.QgemmGroupedDescriptor(spec=w.spec, num_experts=3, m=2, n=64, k=64, "
        "dtype=\"f32\")\n"
        "    >>> plan = halfbyte.QgemmGroupedPlan.select(\"cpu\", d)\n"
        "    >>> x, y = np.ones((2, 64), np.float32), np.empty((2, 64), np.float32)\n"
        "    >>> plan.run(x=x, weight=w.data, offsets=np.array([0, 1, 2], np.int32), y=y)\n"
        "    >>> bool((y == 64).all())\n"
        "    True");
    plan.read("x", &Args::x).read("offsets", &Args::offsets).read("slots", &Args::slots);
    plan.read("routing_weights", &Args::routing_weights).read("bias", &Args::bias);
    plan.read("forward_x", &Args::forward_x).write("routing_grad", &Args::routing_grad).write("y", &Args::y);
    plan.row("weight", [](const QgemmGroupedDescriptor& d, Args& args, RunArguments& run, nb::handle value) {
      const Array& array = run.take(value, "weight", false);
      const int64_t size = d.num_experts * packed_weight_bytes(d.spec, d.n, d.k);
      void* const memory = part_data(array, "weight", DType::u8, size, run.device);
      args.weight = PackedWeight{d.spec, d.n, d.k, memory, run.device, kPackedWeightVersion, size};
    });
    plan.done(
        "def run(self, *, workspace: object = None, stream: object = None, x: object, weight: object, "
        "offsets: object, y: object, slots: object = None, routing_weights: object = None, "
        "bias: object = None, forward_x: object = None, routing_grad: object = None) -> None");
  }
}

}  // namespace halfbyte::python
