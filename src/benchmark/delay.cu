// Keeps the device busy for a while, so that what is timed is all enqueued when it starts.
#include "benchmark/benchmark_args.h"

namespace halfbyte::device {

extern "C" __global__ void delay(const __grid_constant__ DelayArgs args) {
  const long long start = clock64();
  while (clock64() - start < args.cycles) {
  }
}

}  // namespace halfbyte::device
