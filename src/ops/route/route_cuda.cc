#include "ops/route/route_cuda.h"

#include <fmt/format.h>

#include "cuda/config.h"
#include "ops/route/route_args.h"

namespace halfbyte {
namespace {

cuda::KernelSpec kernel_of(DType dtype) {
  return {"ops/route/route.cu", "route",
          cuda::config_text(fmt::format("using Expert = {};\n", dtype == DType::i64 ? "i64" : "i32"))};
}

}  // namespace

struct RouteCuda {
  const cuda::Context* context = nullptr;
  cuda::CUfunction function = nullptr;
  RouteArgs args{};  // but for addresses
};

std::shared_ptr<const RouteCuda> select_route_cuda(int device_index, const RouteDescriptor& d) {
  RouteCuda made;
  made.context = &cuda::context(device_index);
  const cuda::Scope scope(*made.context);
  made.function = cuda::get_kernel(*made.context, kernel_of(d.dtype));
  made.args.num_slots = static_cast<int32_t>(d.tokens * d.top_k);
  made.args.num_experts = static_cast<int32_t>(d.num_experts);
  return std::make_shared<const RouteCuda>(made);
}

void run_route_cuda(const RouteCuda& selected, const RouteTensors& tensors, void* stream) {
  const cuda::Scope scope(*selected.context);
  RouteArgs args = selected.args;
  args.experts = tensors.experts;
  args.offsets = tensors.offsets;
  args.slots = tensors.slots;
  cuda::launch(selected.function, {int64_t{args.num_experts} + 1, kRouteThreads}, stream, args);
}

std::vector<cuda::Kernel> route_kernels() {
  return {{{"route",
            "route",
            "Slots in the order of their experts.",
            {{"dtype", {"i32", "i64"}, false, "The dtype of experts."}}},
           [](const cuda::KernelValues& values) { return kernel_of(parse_dtype(values.at("dtype"))); }}};
}

}  // namespace halfbyte
