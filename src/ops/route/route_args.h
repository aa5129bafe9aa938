// What the kernel of `route` is given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

inline constexpr int kRouteThreads = 256;

// A block has an expert, the last one the slots of none.
struct RouteArgs {
  const void* experts;
  formats::i32 *offsets, *slots;
  formats::i32 num_slots, num_experts;
};

}  // namespace halfbyte
