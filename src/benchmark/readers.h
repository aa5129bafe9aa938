// How long the device takes to read memory and do nothing else.
#pragma once

#include <limits>
#include <span>

#include "benchmark/timing.h"
#include "halfbyte/device.hpp"

namespace halfbyte {

// The fastest of several kernels that read one of `sets` a launch, num_bytes each (a multiple of 16), in
// turn.
class FastestRead {
 public:
  FastestRead(const cuda::Context& context, void* stream, GraphTimer& timer,
              std::span<const void* const> sets, int64_t num_bytes, int num_launches, int rounds);
  const cuda::Graph& graph() const { return *graph_; }
  int num_launches() const { return num_launches_; }
  double us() const { return us_; }                  // of one
  double chained_us() const { return chained_us_; }  // NaN before sm_90

 private:
  Memory never_;
  std::shared_ptr<const cuda::Graph> graph_;
  int num_launches_ = 0;
  double us_ = 0, chained_us_ = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace halfbyte
