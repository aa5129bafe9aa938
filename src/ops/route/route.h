// What the files of `route` share.
#pragma once

#include <memory>

#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte {

struct RouteTensors {
  const void* experts = nullptr;
  int32_t *offsets = nullptr, *slots = nullptr;
};

// ---- CUDA: the kernel, loaded.
struct RouteCuda;
std::shared_ptr<const RouteCuda> select_route_cuda(int device_index, const RouteDescriptor& descriptor);
// Enqueues on `stream`.
void run_route_cuda(const RouteCuda& cuda, const RouteTensors& tensors, void* stream);

}  // namespace halfbyte
